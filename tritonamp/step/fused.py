"""Optimizers that step in one pass on the device: the rule of each, and the step of all."""

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer

from tritonamp.kernels._facts import identities
from tritonamp.kernels._multi_tensor import TensorLists
from tritonamp.kernels._update_lists import Hyperparameters, UpdateLists
from tritonamp.policy import STATES
from tritonamp.step.gradients import Gradients
from tritonamp.step.offload import Offload
from tritonamp.step.small_state import IN_THE_FORMAT, ORDER, PACKED
from tritonamp.step.state_shape import StateShape

_dtype = operator.attrgetter("dtype")


class FusedRule(ABC):
    """The step of one kind of optimizer: unscale, clip, update, half copies, skip in one pass.

    Attributes:
        kinds: name of such optimizers in messages, with its article.
        torch_step: step function of torch's own optimizer of this kind; None: torch has none.
        needs: keys that a parameter group must have.
        states: formats that the state can have, among ``policy.STATES``.
        state_keys: name in the kernel's lists to key in ``optimizer.state``, for tensors of the
            parameter's shape, in FP32 (FP64 for FP64 parameters).
        optional: names among ``state_keys`` that a group may lack.
        counts_steps: whether the state holds a step count under "step"; state "8bit" always does.
        leaves_sparse_to_torch: whether torch's own step takes sparse gradients.
        offloads: whether a step can be divided into parts, on some parameters after others.
    """

    kinds: str
    torch_step: Callable[..., Any] | None = None
    needs: Sequence[str]
    states: tuple[str, ...] = STATES[:1]
    state_keys: ClassVar[Mapping[str, str]]
    optional: Sequence[str] = ()
    counts_steps: bool = False
    leaves_sparse_to_torch: bool = False
    offloads: bool = True

    @abstractmethod
    def update(
        self,
        lists: UpdateLists,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        backend: str,
    ) -> None:
        """Call the operation of ``tritonamp.kernels`` on the lists of one step.

        Args:
            lists: parameters, gradients, copies and state, with the hyperparameters.
            grad_scale: factor on the gradients, 0-d; None: 1.
            found_inf: 0-d flag, skip if it is not 0; None: always step.
            backend: "auto", "triton" or "eager".
        """

    @abstractmethod
    def hyperparameters(self, optimizer: Optimizer, group: dict[str, Any]) -> Hyperparameters:
        """Return the hyperparameters of one group."""

    def has(self, name: str, group: dict[str, Any]) -> bool:
        """Tell whether the group's parameters have the state ``name``, a key of ``state_keys``."""
        return True

    def takes(self, optimizer: Optimizer) -> bool:
        """Tell whether this rule replaces the step of ``optimizer``, which is torch's own."""
        return True

    def tells_first_step(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Tell whether a parameter's first step differs from a step on state of zeros.

        True costs one host read per step, because a step that the device skips does not count as
        the first.
        """
        return False

    def at_first_step(self, hyperparameters: Any) -> Hyperparameters:
        """Return the hyperparameters of a first step, given those of a parameter's other steps."""
        return hyperparameters

    def group_problems(
        self, groups: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any]
    ) -> Iterator[str]:
        """Yield problems of the parameter groups of a state that is to be loaded."""
        missing = sorted(key for key in self.needs if any(key not in group for group in groups))
        if missing:
            yield f"the parameter groups have no {', '.join(missing)}"

    def refuse_sparse(self) -> None:
        """Raise torch's error for sparse gradients; return if torch's optimizer takes them."""
        return


class FusedStep:
    """The steps of one optimizer by a rule; hyperparameters and state stay in torch's format.

    Args:
        optimizer: the optimizer; its ``param_groups`` and ``state`` are read and written.
        rule: rule of this kind of optimizer.
        backend: "auto", "triton" or "eager".
        track_lost: count the half values that a step did not change.
        state: format of the state, among ``policy.STATES``; for parameters as in ``StateShape``.
        beside: function that returns the stored form of parameters' FP32 values: lower 16 bits for
            state "8bit", else the masters of ``offload``.
        offload: host memory of masters and state; None: they are on the parameters' devices.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        rule: FusedRule,
        backend: str,
        track_lost: bool = False,
        state: str = STATES[0],
        beside: Callable[[Sequence[Tensor]], list[Tensor]] = list,
        offload: Offload | None = None,
    ) -> None:
        self.rule = rule
        self._optimizer = optimizer
        self._backend = backend
        self._track_lost = track_lost
        self._state = state
        self._shape = StateShape(rule, state, offload)
        self._beside = beside
        self._offload = offload

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
        rules = [self.rule.hyperparameters(self._optimizer, group) for group in groups]
        # number len(groups) + g is the first-step rule of group g
        if tells_first:
            rules += [self.rule.at_first_step(rule) for rule in rules]
        # A list, not a generator: all state is in shape before any parameter is written, so that an
        # error of a later part (out of memory) leaves the parameters as they were.
        for lists, group_of, state in [
            self._in_shape(part, state, tells_first) for part, state in self._by_format(gradients)
        ]:
            for part in [lists] if self._offload is None else self._offload.parts_on_device(lists):
                updates = UpdateLists(part, rules, group_of, self._track_lost, state)
                self.rule.update(updates, grad_scale, found_inf, self._backend)

    def _by_format(self, gradients: Gradients) -> list[tuple[Gradients, str]]:
        """Return the gradients in groups, each with the format of its parameters' state."""
        params = gradients.params
        if self._state == STATES[0] or IN_THE_FORMAT.issuperset(map(_dtype, params)):
            return [(gradients, self._state)]
        places: dict[str, list[int]] = {}
        for i, param in enumerate(params):
            places.setdefault(self._shape.format_of(param), []).append(i)
        return [(gradients.part(of_format), state) for state, of_format in places.items()]

    def _in_shape(
        self, gradients: Gradients, state: str, tells_first: bool
    ) -> tuple[TensorLists, list[int], str]:
        """Return the lists of a step with its state, the rule of each parameter, and the format.

        Args:
            gradients: gradients of parameters whose state has one format.
            state: the format, among ``policy.STATES``.
            tells_first: whether parameters without state have first-step rules.
        """
        groups = self._optimizer.param_groups
        group_of = [g for g, group in enumerate(groups) for _ in group["params"]]
        made: set[int] = set()
        # A plan of an earlier step proves that such state is in shape. Only without one, or where
        # state is missing, is each parameter's state looked at. State of zeros is made before the
        # device knows whether it skips, and stays zero at a skip.
        lists = self._lists(gradients, group_of, state)
        if self._offload is not None or lists is None or not _is_in_shape(lists):
            made = self._bring_into_shape(gradients, group_of)
            lists = self._lists(gradients, group_of, state)
            assert lists is not None
        if tells_first:
            group_of = [g + len(groups) * (i in made) for i, g in enumerate(group_of)]
        return lists, group_of, state

    def _lists(
        self, gradients: Gradients, group_of: Sequence[int], state: str
    ) -> TensorLists | None:
        """Return the gradients' lists joined by the state's; None if some state is missing."""
        tensors, states = gradients.lists, self._states(gradients.params)
        packed = state == "8bit"
        if self._offload is not None and not packed:
            tensors = tensors.with_lists((), (), {"params": self._beside(gradients.params)})
        # All codes of a parameter are one tensor, under one key.
        keys = {PACKED: PACKED} if packed else dict(self.rule.state_keys)
        if self._shape.counts_steps(state):
            keys["steps"] = "step"
        try:
            found = {
                name: self._values(name, key, states, tensors, group_of)
                for name, key in keys.items()
            }
            orders = list(map(operator.itemgetter(ORDER), states)) if packed else ()
        except KeyError:
            return None
        if not packed:
            return tensors.with_lists(("copies", *self.rule.optional), ("steps",), found)
        found["remainders"] = self._beside(gradients.params)
        repeat, coded = ("copies", "remainders"), ("remainders", PACKED)
        return tensors.with_lists(repeat, ("steps",), found, coded, orders)

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
        """Return one list of state; parameters whose group lacks such state stand in for it.

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
        rows = zip(gradients.lists.numbers, gradients.params, strict=True)
        return {i for i, p in rows if self._shape.bring(p, state, groups[group_of[i]])}


def _is_in_shape(lists: TensorLists) -> bool:
    """Tell whether kernels can take the state as it is: an earlier step had the same plan."""
    try:
        return lists.known_plan() is not None
    except (AttributeError, TypeError):
        # The state of another optimizer may have numbers or None where these lists have tensors.
        return False


def scalar(value: Any) -> Any:
    """Return ``value``; a tensor of one element becomes 0-d."""
    return value.reshape(()) if isinstance(value, Tensor) else value
