"""A step that is like the one before repeats its launches."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from tritonamp.kernels._facts import is_native
from tritonamp.kernels._launch import run_again
from tritonamp.kernels._plan import Plan
from tritonamp.kernels._steady import Steady
from tritonamp.kernels._update_lists import UpdateLists, send_rules
from tritonamp.kernels.device import is_capturing
from tritonamp.kernels.grad_stats import Prepared, prepared_stats
from tritonamp.step.fused_rule import FusedRule

_HYPERPARAMETERS, _GRADIENTS = 1, 2  # bits of the answer of ``Steady.same``


class SteadyStep:
    """The launches of one optimizer's last step, for a step on the same tensors.

    ::

        a step is built    -> what it touched is recorded, with its launches
        the next decision  -> stats
        the next step      -> is_like, run

    Where anything but hyperparameters and addresses of gradients differs, the step is built, and
    another value is recorded.

    It holds neither gradients nor state, because both may be replaced while it exists.

    Args:
        touched: everything that the step has touched.
        updates: lists of the step, with its launches.
        rule: fused rule of the optimizer.
        groups: groups of the optimizer.
        plans: plans of the statistics and of the step.
        stats: launches of the statistics.

    Attributes:
        device: device of the launches.
        untouched: function that tells whether torch has counted no write to the parameters
            since this step.
    """

    def __init__(
        self,
        touched: Steady,
        updates: UpdateLists,
        rule: FusedRule,
        groups: Sequence[Mapping[str, Any]],
        plans: Sequence[Plan],
        stats: Prepared,
    ) -> None:
        assert updates.launches is not None
        self._touched = touched
        self.untouched = touched.untouched
        self._launches = [launch for launch, _ in updates.launches]
        self._memory = updates.tensors.memory
        self._rule = rule
        self._groups = groups
        self._plans = plans
        ((self._amax, self._square_sum),) = stats.results  # of the only device
        self._stats_launches = stats.launches
        self.device = plans[1].devices[0]
        self._states = self._present_states()

    @classmethod
    def of(
        cls,
        updates: UpdateLists,
        rule: FusedRule,
        optimizer: Optimizer,
        params: Sequence[Tensor],
    ) -> "SteadyStep | None":
        """Record a step that was just built; None: no step can repeat its launches.

        Args:
            updates: lists of the step, with its launches.
            rule: fused rule of the optimizer.
            optimizer: the optimizer.
            params: parameters of the model, in the order of the groups, whose ``.grad`` the step
                has used.
        """
        lists = updates.tensors
        # a captured step is repeated by its CUDA graph
        if not is_native() or is_capturing(params[0].device):
            return None
        in_stats, in_step = lists.plan(("grads",)), lists.plan()
        stats = prepared_stats(in_stats)
        # Several devices, and copies of tensors with gaps, are work of the host in each step.
        if stats is None or len(in_step.devices) > 1 or in_stats.copies or in_step.copies:
            return None
        # the gradients may have moved since the statistics were taken
        in_stats.send_pointers(lists.facts(("grads",)))
        plans = in_stats, in_step
        touched = Steady.record(
            optimizer=optimizer,
            keys=rule.keys,
            holders=params,
            params=params,
            fixed=[lists["remainders"]] if "remainders" in lists else [],
            slots=_slots_of_gradients(plans, lists.numbers, len(params)),
        )
        if touched is None:
            return None
        return cls(touched, updates, rule, optimizer.param_groups, plans, stats)

    def stats(self, are_like: bool = False) -> tuple[Tensor, Tensor] | None:
        """Return the statistics of the gradients, as ``grad_stats`` does.

        Args:
            are_like: whether ``is_like`` has returned True in this step.

        Returns:
            The statistics; None if the gradients are not like those of the last step.
        """
        moved = 0 if are_like else self._touched.same_gradients()
        if moved < 0:
            return None
        if moved > 0:
            self._send_gradients()
        # atomics accumulate, so the maxima of the step before have to go
        self._amax.zero_()
        run_again(self._stats_launches, self.device)
        return self._amax, self._square_sum

    def is_like(self) -> bool:
        """Tell whether this step touches what the last one did, so that ``run`` may follow."""
        changed = self._touched.same()
        if changed < 0:
            return False
        if changed & _GRADIENTS:
            self._send_gradients()
        if changed & _HYPERPARAMETERS:
            if self._present_states() != self._states:
                return False
            rules = [self._rule.hyperparameters(group) for group in self._groups]
            send_rules(self._memory, rules, self.device)
            self._touched.sent_hyperparameters()
        return True

    def run(self, grad_scale: Tensor, found_inf: Tensor) -> None:
        """Update parameters, state and half copies, or skip on the device.

        Args:
            grad_scale: factor on the gradients, 0-d float32.
            found_inf: 0-d float32 flag; the device skips if it is not 0.
        """
        run_again(self._launches, self.device, grad_scale, found_inf)
        self._touched.wrote()

    def _present_states(self) -> list[bool]:
        """Return which optional states the groups have, which a float may say: SGD's momentum."""
        names, groups = self._rule.optional, self._groups
        return [self._rule.has(name, group) for name in names for group in groups]

    def _send_gradients(self) -> None:
        for plan in self._plans:
            plan.send_written("grads")
        self._touched.sent_gradients()


def _slots_of_gradients(
    plans: Sequence[Plan], numbers: Sequence[int], size: int
) -> list[tuple[int, ...]]:
    """Return, for each parameter, where the tables of the plans have its gradient's address.

    Args:
        plans: plans of lists with gradients.
        numbers: number of the parameter at each place of the lists.
        size: number of parameters.
    """
    in_plans = [plan.slots("grads") for plan in plans]
    slots: list[tuple[int, ...]] = [()] * size
    for place, number in enumerate(numbers):
        if place in in_plans[0]:  # else the tensor has no elements
            slots[number] = tuple(addresses[place] for addresses in in_plans)
    return slots
