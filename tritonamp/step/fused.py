"""Optimizers that step in one pass on the device: the rule of each, and the step of all."""

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from tritonamp.kernels._device_tables import memory_strides
from tritonamp.kernels._facts import identities
from tritonamp.kernels._multi_tensor import TensorLists
from tritonamp.kernels._update_lists import Hyperparameters, UpdateLists
from tritonamp.kernels.device import refuse_capture
from tritonamp.policy import STATES
from tritonamp.step.gradients import Gradients
from tritonamp.step.offload import Offload, host_keys
from tritonamp.step.small_state import ORDER, PACKED, REMAINDER, in_fp32, packed_moments


class FusedRule(ABC):
    """The step of one kind of optimizer: unscale, clip, update, half copies, skip in one pass.

    Attributes:
        kinds: the name of such optimizers in messages, with its article.
        torch_step: the step function of torch's own optimizer of this kind; None: torch has none.
        needs: keys that a parameter group must have.
        states: the formats that the state can have, of ``policy.STATES``.
        state_keys: name in the kernel's lists to key in ``optimizer.state``, of tensors of the
            parameter's shape, in FP32 (FP64 for FP64 parameters).
        optional: names of ``state_keys`` that a group may lack.
        counts_steps: whether the state holds a step count under "step"; that of "8bit" always does.
        leaves_sparse_to_torch: whether torch's own step takes sparse gradients.
        offloads: whether a step can be made in parts, on parameters one after another.
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
            grad_scale: 0-d factor on the gradients, or None.
            found_inf: 0-d, any value other than 0 skips; None: always step.
            backend: "auto", "triton" or "eager".
        """

    @abstractmethod
    def hyperparameters(self, optimizer: Optimizer, group: dict[str, Any]) -> Hyperparameters:
        """Return the hyperparameters of one group."""

    def has(self, name: str, group: dict[str, Any]) -> bool:
        """Tell whether the group's parameters have the state of that name."""
        return True

    def takes(self, optimizer: Optimizer) -> bool:
        """Tell whether this rule steps an optimizer of torch's own; else it runs its own step."""
        return True

    def tells_first_step(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Tell whether a parameter's first step differs from a step on state of zeros.

        True costs one host read a step: a step that the device skips does not count as the first.
        """
        return False

    def at_first_step(self, hyperparameters: Any) -> Hyperparameters:
        """Return the hyperparameters that replace these in a parameter's first step."""
        return hyperparameters

    def group_problems(
        self, groups: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any]
    ) -> Iterator[str]:
        """Yield problems of the parameter groups of a state that is to be loaded."""
        missing = sorted(key for key in self.needs if any(key not in group for group in groups))
        if missing:
            yield f"the parameter groups have no {', '.join(missing)}"

    def refuse_sparse(self) -> None:
        """Raise torch's error for sparse gradients; return where torch's optimizer takes them."""
        return


class FusedStep:
    """The steps of one optimizer by a rule; hyperparameters and state stay in torch's format.

    Args:
        optimizer: the optimizer; its ``param_groups`` and ``state`` are read and written.
        rule: the rule of its kind.
        backend: "auto", "triton" or "eager".
        track_lost: count the half values that a step did not change.
        state: the format of the state, of ``policy.STATES``.
        beside: returns what is kept beside parameters: the lower 16 bits of packed FP32 values,
            for state "8bit", or else the masters of ``offload``.
        offload: host memory of masters and state; None: they are beside the parameters.
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
        self._counts_steps = rule.counts_steps or state == "8bit"
        self._beside = beside
        self._offload = offload

    def step(
        self, gradients: Gradients, grad_scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        """Update parameters, state and half copies in one pass, or skip on the device.

        Args:
            gradients: the step's lists; "params" and "copies" are written.
            grad_scale: 0-d factor on the gradients, or None.
            found_inf: 0-d, any value other than 0 skips on the device; None: always step.
        """
        if not len(gradients.lists):
            return
        groups = self._optimizer.param_groups
        tells_first = self.rule.tells_first_step(groups)
        if tells_first and found_inf is not None and bool(found_inf):
            return
        group_of = [g for g, group in enumerate(groups) for _ in group["params"]]
        made: set[int] = set()
        # State is looked at one by one where some is missing, or no earlier plan has such lists.
        # State of zeros is made before the device knows whether it skips: it stays zero then.
        lists = self._lists(gradients, group_of)
        if self._offload is not None or lists is None or not _is_in_shape(lists):
            made = self._bring_into_shape(gradients, group_of)
            lists = self._lists(gradients, group_of)
            assert lists is not None
        rules = [self.rule.hyperparameters(self._optimizer, group) for group in groups]
        if tells_first:  # number len(groups) + g: the first-step rule of group g
            rules += [self.rule.at_first_step(rule) for rule in rules]
            group_of = [g + len(groups) * (i in made) for i, g in enumerate(group_of)]
        for part in [lists] if self._offload is None else self._offload.parts_on_device(lists):
            updates = UpdateLists(part, rules, group_of, self._track_lost, self._state)
            self.rule.update(updates, grad_scale, found_inf, self._backend)

    def _lists(self, gradients: Gradients, group_of: Sequence[int]) -> TensorLists | None:
        """Return the gradients' lists joined by the state's; None where some state is missing."""
        tensors, states = gradients.lists, self._states(gradients.params)
        packed = self._state == "8bit"
        if self._offload is not None and not packed:
            tensors = tensors.with_lists((), (), {"params": self._beside(gradients.params)})
        keys = {PACKED: PACKED} if packed else dict(self.rule.state_keys)
        if self._counts_steps:
            keys["steps"] = "step"
        try:
            found = {
                name: self._values(name, key, states, tensors, group_of)
                for name, key in keys.items()
            }
        except KeyError:
            return None
        if not packed:
            return tensors.with_lists(("copies", *self.rule.optional), ("steps",), found)
        found["remainders"] = self._beside(gradients.params)
        repeat, coded = ("copies", "remainders"), ("remainders", PACKED)
        return tensors.with_lists(repeat, ("steps",), found, coded)

    def _states(self, params: Sequence[Tensor]) -> list[Mapping[str, Any]]:
        state = vars(self._optimizer)["state"]  # ``EnabledOptimizer.state`` waits
        if identities(list(state)[: len(params)]) == identities(params):  # hashes are slow
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
        """Return one list of state; a group without such state repeats its parameters there."""
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
        """Make missing state, and widen half state to FP32; return the numbers with new state."""
        groups = self._optimizer.param_groups
        rows = zip(gradients.lists.numbers, gradients.params, strict=True)
        return {i for i, param in rows if self._shape_state(param, groups[group_of[i]])}

    def _shape_state(self, param: Tensor, group: dict[str, Any]) -> bool:
        """Bring one parameter's state into torch's format; return whether it was made."""
        keys = [key for name, key in self.rule.state_keys.items() if self.rule.has(name, group)]
        if not keys:
            return False
        state: dict[str, Any] = vars(self._optimizer)["state"][param]
        is_new = self._shape(param, state, keys)
        if self._offload is not None:
            found = {k: v for k, v in state.items() if k in host_keys(self.rule) and v is not None}
            away = {k: v for k, v in found.items() if not self._offload.is_pinned(v)}
            state |= {k: self._offload.pin(v) for k, v in away.items()}
        return is_new

    def _shape(self, param: Tensor, state: dict[str, Any], keys: Sequence[str]) -> bool:
        if PACKED in state and self._state != "8bit":
            self._unpack(param, state, PACKED, ORDER, REMAINDER)
        shaped: dict[str, Any] = {}
        if self._counts_steps:
            step = state.get("step", 0.0)
            if not isinstance(step, Tensor):
                shaped["step"] = torch.full((), step, dtype=torch.float32, device=param.device)
            elif step.dtype is not torch.float32 or step.device != param.device:
                shaped["step"] = step.to(param.device, torch.float32)
        dtype = torch.promote_types(param.dtype, torch.float32)
        if self._state == "bf16" and dtype is torch.float32:
            dtype = torch.bfloat16
        if self._state == "8bit":
            return self._pack(param, state, keys, shaped)
        missing = [key for key in keys if state.get(key) is None]  # None: as torch's SGD has it
        for key in keys:
            if key in missing:
                shaped[key] = torch.zeros_like(
                    param, dtype=dtype, memory_format=torch.preserve_format
                )
            elif state[key].is_sparse:  # torch's own step of a sparse gradient has made it
                shaped[key] = state[key].to_dense()
            elif state[key].dtype != dtype:
                shaped[key] = state[key].to(dtype)
        if shaped:
            refuse_capture(param.device, "the optimizer's state")
            state.update(shaped)
        return bool(missing)

    def _unpack(self, param: Tensor, state: dict[str, Any], *keys: str) -> None:
        """Turn codes in the state, under these keys, into FP32."""
        refuse_capture(param.device, "the optimizer's state")
        if self._offload is not None:
            self._offload.wait()
        state |= in_fp32({k: state.pop(k) for k in keys if k in state}, self.rule, param)

    def _pack(
        self, param: Tensor, state: dict[str, Any], keys: Sequence[str], shaped: dict[str, Any]
    ) -> bool:
        """Bring one parameter's state into the format "8bit"; return whether it was made."""
        is_new = PACKED not in state and any(state.get(key) is None for key in keys)
        strides = memory_strides(param)
        if PACKED in state and state.setdefault(ORDER, strides) != strides:  # channels_last, since
            self._unpack(param, state, PACKED, ORDER)
        if PACKED not in state:
            shaped[PACKED] = packed_moments([state.pop(key, None) for key in keys], param)
            shaped[ORDER] = strides
        if shaped:
            refuse_capture(param.device, "the optimizer's state")
            state.update(shaped)
        return is_new


def _is_in_shape(lists: TensorLists) -> bool:
    """Tell whether the state has the shape that kernels take: an earlier step had the same plan."""
    try:
        return lists.known_plan() is not None
    except (AttributeError, TypeError):  # no tensors, as in the state of another optimizer
        return False


def scalar(value: Any) -> Any:
    """Return ``value``; a tensor of one element becomes 0-d."""
    return value.reshape(()) if isinstance(value, Tensor) else value
