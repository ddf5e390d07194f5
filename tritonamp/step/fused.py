"""The step in one pass on the device, by the rule of an optimizer."""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from tritonamp.kernels._facts import identities
from tritonamp.kernels._multi_tensor import TensorLists
from tritonamp.kernels._update_lists import UpdateLists
from tritonamp.policy import STATES
from tritonamp.step.changes import Changes
from tritonamp.step.fused_rule import FusedRule
from tritonamp.step.gradients import Gradients
from tritonamp.step.offload import Offload
from tritonamp.step.packed_masters import ORDER
from tritonamp.step.state_shape import StateShape


class FusedStep:
    """The steps of one optimizer by a rule; hyperparameters and state stay in torch's format.

    Args:
        optimizer: the optimizer; its ``param_groups`` and ``state`` are read and written.
        rule: rule of this kind of optimizer.
        backend: "auto", "triton" or "eager".
        state: format of the state, among ``policy.STATES``.
        packs: whether FP32 masters are the half parameters and 16 more bits.
        stored_form: function from parameters to the stored form of their FP32 values: the 16 bits
            if ``packs`` is True, else the masters of ``offload``.
        offload: host memory of masters and state; None: they are on the parameters' devices.
        changes: record of changed values, which the kernels write; None: they write none.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        rule: FusedRule,
        backend: str,
        state: str = STATES[0],
        packs: bool = False,
        stored_form: Callable[[Sequence[Tensor]], list[Tensor]] = list,
        offload: Offload | None = None,
        changes: Changes | None = None,
    ) -> None:
        self.rule = rule
        self._optimizer = optimizer
        self._backend = backend
        self._shape = StateShape(rule, state, offload)
        self._packs = packs
        self._stored_form = stored_form
        self._offload = offload
        self._changes = changes

    def step(
        self, gradients: Gradients, grad_scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        """Update parameters, state and half copies in one pass, or skip on the device.

        Args:
            gradients: lists of the step; "params" and "copies" are written.
            grad_scale: factor on the gradients, 0-d; None: 1.
            found_inf: 0-d flag, skip on the device if it is not 0; None: always step.
        """
        if not len(gradients.lists):
            return
        groups = self._optimizer.param_groups
        tells_first = self.rule.tells_first_step(groups)
        # the one host read of such rules: a skipped step makes no state, so the next one is still
        # the first
        if tells_first and found_inf is not None and bool(found_inf):
            return
        rules = [self.rule.hyperparameters(group) for group in groups]
        # number len(groups) + g is the first-step rule of group g
        if tells_first:
            rules += [self.rule.at_first_step(rule) for rule in rules]
        # All state is in shape before any parameter is written, so that an error (out of memory)
        # leaves the parameters as they were.
        lists, group_of = self._in_shape(gradients, tells_first)
        for part in [lists] if self._offload is None else self._offload.parts_on_device(lists):
            updates = UpdateLists(part, rules, group_of)
            self.rule.update(updates, grad_scale, found_inf, self._backend)

    def _in_shape(self, gradients: Gradients, tells_first: bool) -> tuple[TensorLists, list[int]]:
        """Return the lists of a step with its state, and the rule of each parameter.

        Args:
            gradients: gradients of the step.
            tells_first: whether parameters without state have first-step rules.
        """
        groups = self._optimizer.param_groups
        group_of = [g for g, group in enumerate(groups) for _ in group["params"]]
        made: set[int] = set()
        # A plan of an earlier step proves that such state is in shape. Only without one, or where
        # state is missing, is each parameter's state looked at. State of zeros is made before the
        # device knows whether it skips, and stays zero at a skip.
        lists = self._lists(gradients, group_of)
        if self._offload is not None or lists is None or not _is_in_shape(lists):
            made = self._bring_into_shape(gradients, group_of)
            lists = self._lists(gradients, group_of)
            assert lists is not None
        if tells_first:
            group_of = [g + len(groups) * (i in made) for i, g in enumerate(group_of)]
        return lists, group_of

    def _lists(self, gradients: Gradients, group_of: Sequence[int]) -> TensorLists | None:
        """Return the gradients' lists joined by the state's; None if some state is missing."""
        tensors, states = gradients.lists, self._states(gradients.params)
        repeat, found = ["copies", *self.rule.optional], dict[str, Sequence[Tensor]]()
        if self._packs:
            repeat.append("remainders")
            found["remainders"] = self._stored_form(gradients.params)
        elif self._offload is not None:
            tensors = tensors.with_lists((), (), {"params": self._stored_form(gradients.params)})
        keys = dict(self.rule.state_keys)
        if self._shape.counts_steps(self._optimizer.param_groups):
            keys["steps"] = "step"
        try:
            for name, key in keys.items():
                found[name] = self._values(name, key, states, tensors, group_of)
        except KeyError:
            return None
        if self._changes is not None:
            found["changes"] = self._changes.rows(tensors.numbers, tensors["params"])
        # state without codes has no order of its own
        orders = [state.get(ORDER) for state in states] if self._shape.has_codes else ()
        return tensors.with_lists(repeat, ("steps",), found, orders=orders)

    def _states(self, params: Sequence[Tensor]) -> list[Mapping[str, Any]]:
        # not ``optimizer.state``, which waits for the device under ``offload``
        state = vars(self._optimizer)["state"]
        # State is usually in the order of the groups. Then its values are the lists, without a hash
        # of each tensor, which runs Python code.
        if identities(list(state)[: len(params)]) == identities(params):
            return list(state.values())[: len(params)]
        return [state.get(param, {}) for param in params]

    def _values(
        self,
        name: str,
        key: str,
        states: Sequence[Mapping[str, Any]],
        tensors: TensorLists,
        group_of: Sequence[int],
    ) -> Sequence[Tensor]:
        """Return one list of state, with the parameter itself where a group lacks such state.

        Args:
            name: key of ``state_keys``, or of another list.
            key: key in the parameters' state.
            states: state of each parameter.
            tensors: lists of the gradients.
            group_of: number of the group, by number of the parameter.
        """
        there = [True]
        if name in self.rule.optional:
            there = [self.rule.has(name, group) for group in self._optimizer.param_groups]
        if all(there):
            return list(map(operator.itemgetter(key), states))
        if not any(there):
            return tensors["params"]
        rows = zip(tensors.numbers, states, tensors["params"], strict=True)
        return [state[key] if there[group_of[i]] else param for i, state, param in rows]

    def _bring_into_shape(self, gradients: Gradients, group_of: Sequence[int]) -> set[int]:
        """Bring the state of all parameters into shape; return the numbers with new state."""
        groups, state = self._optimizer.param_groups, vars(self._optimizer)["state"]
        self._shape.check(groups)  # before any state is made
        rows = zip(gradients.lists.numbers, gradients.params, strict=True)
        counts = self._shape.counts_steps(groups)
        return {i for i, p in rows if self._shape.bring(p, state, groups[group_of[i]], counts)}


def _is_in_shape(lists: TensorLists) -> bool:
    """Tell whether kernels can take the state as it is: an earlier step had the same plan."""
    try:
        return lists.known_plan() is not None
    except (AttributeError, TypeError):
        # The state of another optimizer may have numbers or None where these lists have tensors.
        return False
