"""The step in one pass on the device, by the rule of an optimizer."""

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from tritonamp.kernels._multi_tensor import TensorLists
from tritonamp.kernels._state_formats import FORMATS
from tritonamp.kernels._update import Update
from tritonamp.kernels._update_lists import UpdateLists
from tritonamp.policy import STATES
from tritonamp.step.changes import Changes
from tritonamp.step.fused_rule import FusedRule
from tritonamp.step.gradients import Gradients
from tritonamp.step.offload import Offload
from tritonamp.step.packed_masters import ORDER
from tritonamp.step.small_state import StateShape


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
        self._format = state
        self._has_codes = FORMATS[state].in_blocks
        self._shape = StateShape(rule, state, offload)
        self._packs = packs
        self._stored_form = stored_form
        self._offload = offload
        self._changes = changes

    def step(
        self, gradients: Gradients, grad_scale: Tensor | None, found_inf: Tensor | None
    ) -> UpdateLists | None:
        """Update parameters, state and half copies in one pass, or skip on the device.

        Args:
            gradients: lists of the step; "params" and "copies" are written.
            grad_scale: factor on the gradients, 0-d; None: 1.
            found_inf: 0-d flag, skip on the device if it is not 0; None: always step.

        Returns:
            the lists of the step with its launches, which another step on the same tensors may
            repeat; None: none may.
        """
        if not len(gradients.lists):
            return None
        groups = self._optimizer.param_groups
        tells_first = self.rule.tells_first_step(groups)
        # the one host read of such rules: a skipped step makes no state, so the next one is still
        # the first
        if tells_first and found_inf is not None and bool(found_inf):
            return None
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
        is_whole = self._offload is None and not tells_first
        return updates if is_whole and isinstance(self.rule.update, Update) else None

    def _in_shape(self, gradients: Gradients, tells_first: bool) -> tuple[TensorLists, list[int]]:
        """Return the lists of a step with its state, and the rule of each parameter.

        Args:
            gradients: gradients of the step.
            tells_first: whether parameters without state have first-step rules.
        """
        groups = self._optimizer.param_groups
        group_of = [g for g, group in enumerate(groups) for _ in group["params"]]
        made: set[int] = set()
        # Lists of a kind that an earlier step has noted have state in shape. Otherwise each
        # parameter's state is looked at. State of zeros is made before the device knows whether it
        # skips, and stays zero at a skip.
        lists = self._lists(gradients, group_of)
        # kinds do not say whether host memory is pinned
        if self._offload is not None or lists is None or not lists.is_of_noted_kind():
            params = dict(zip(gradients.lists.numbers, gradients.params, strict=True))
            made = self._shape.bring(params, groups, group_of, self._state)
            lists = self._lists(gradients, group_of)
            assert lists is not None
            lists.note_kind()
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
        if self.rule.counts_in(self._format, self._optimizer.param_groups):
            keys["steps"] = "step"
        try:
            for name, key in keys.items():
                if name in self.rule.optional:
                    found[name] = self._optional_state(name, key, states, tensors, group_of)
                else:
                    found[name] = list(map(operator.itemgetter(key), states))
        except KeyError:
            return None
        if self._changes is not None:
            found["changes"] = self._changes.rows(tensors.numbers, tensors["params"])
        # state without codes has no order of its own
        orders = [state.get(ORDER) for state in states] if self._has_codes else ()
        return tensors.with_lists(repeat, ("steps",), found, orders=orders)

    @property
    def _state(self) -> dict[Tensor, dict[str, Any]]:
        # not ``optimizer.state``, which waits for the device under ``offload``
        state: dict[Tensor, dict[str, Any]] = vars(self._optimizer)["state"]
        return state

    def _states(self, params: Sequence[Tensor]) -> list[Mapping[str, Any]]:
        """Return the state of each parameter."""
        state = self._state
        # State is usually in the order of the groups. Then its values are the lists, without a hash
        # of each tensor, which runs Python code.
        if len(params) <= len(state) and all(map(operator.is_, params, state)):
            return list(itertools.islice(state.values(), len(params)))
        return [state.get(param, {}) for param in params]

    def _optional_state(
        self,
        name: str,
        key: str,
        states: Sequence[Mapping[str, Any]],
        tensors: TensorLists,
        group_of: Sequence[int],
    ) -> Sequence[Tensor]:
        """Return a list of state, with the parameter itself where a group lacks such state.

        Args:
            name: one of ``FusedRule.optional``.
            key: key in the parameters' state.
            states: state of each parameter.
            tensors: lists of the gradients.
            group_of: number of the group, by number of the parameter.
        """
        there = [self.rule.has(name, group) for group in self._optimizer.param_groups]
        if not any(there):
            return tensors["params"]
        rows = zip(tensors.numbers, states, tensors["params"], strict=True)
        return [state[key] if there[group_of[i]] else param for i, state, param in rows]
