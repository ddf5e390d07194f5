"""The form in which steps take an optimizer's state."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tritonamp.kernels._memory_order import memory_strides
from tritonamp.kernels._state_formats import FORMATS, is_in_blocks
from tritonamp.kernels.device import refuse_capture
from tritonamp.step.fused_rule import FusedRule
from tritonamp.step.offload import Offload
from tritonamp.step.packed_masters import ORDER, REMAINDER
from tritonamp.step.small_state import coded, in_fp32, moment_dtype


class StateShape:
    """The keys, dtypes and devices of one optimizer's state, for parameters of any dtype.

    Args:
        rule: fused rule of the optimizer.
        state: format of the moments, among ``policy.STATES``.
        offload: host memory of the state; None: the state is on the parameters' devices.

    Attributes:
        has_codes: whether moments are in codes.
    """

    def __init__(self, rule: FusedRule, state: str, offload: Offload | None) -> None:
        self._rule = rule
        self._state = state
        self._offload = offload
        self.has_codes = FORMATS[state].in_blocks

    def check(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise ValueError if a group has state that this format may not round."""
        for group in groups:
            self._rule.check_format(self._state, group)

    def counts_steps(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Tell whether all state holds a step count; codes always need one."""
        has_codes = self.has_codes and any(map(self._rule.keys_of, groups))
        return self._rule.counts_steps or has_codes

    def bring(
        self,
        param: Tensor,
        states: Mapping[Tensor, dict[str, Any]],
        group: dict[str, Any],
        counts_steps: bool,
    ) -> bool:
        """Make missing state of one parameter, and convert state that has another form.

        Args:
            param: the parameter, as the optimizer's groups hold it.
            states: a defaultdict with the state of each parameter; the state of ``param`` is
                changed in place.
            group: group of the parameter.
            counts_steps: whether the state holds a step count.

        Returns:
            whether moments were made.
        """
        keys = self._rule.keys_of(group)
        # SGD without momentum has no state, and torch leaves no entry for such parameters either.
        if not (keys or counts_steps):
            return False
        state = states[param]
        # before the state is made: a parameter without moments takes its first step
        is_new = any(state.get(key) is None for key in keys)
        self._unpack(param, state)
        shaped = self._step_count(param, state) if counts_steps else {}
        shaped |= self._moments(param, state, keys)
        if shaped:
            # state that is made inside of a CUDA graph would be zeroed again by each replay
            refuse_capture(param.device, "the optimizer's state")
            state.update(shaped)
        if self._offload is not None:
            moment_keys = self._rule.state_keys.values()
            moments = {key: state[key] for key in moment_keys if state.get(key) is not None}
            unpinned = {k: v for k, v in moments.items() if not self._offload.is_pinned(v)}
            state |= {k: self._offload.pin(v) for k, v in unpinned.items()}
        return is_new

    def _step_count(self, param: Tensor, state: Mapping[str, Any]) -> dict[str, Tensor]:
        step = state.get("step", 0.0)
        if not isinstance(step, Tensor):
            return {"step": torch.full((), step, dtype=torch.float32, device=param.device)}
        # torch keeps step counts in main memory, where a kernel cannot count
        if step.dtype is not torch.float32 or step.device != param.device:
            return {"step": step.to(param.device, torch.float32)}
        return {}

    def _moments(
        self, param: Tensor, state: Mapping[str, Any], keys: Sequence[str]
    ) -> dict[str, Any]:
        dtype = moment_dtype(self._state, param)
        shaped: dict[str, Any] = {}
        for key in keys:
            # states of torch's SGD may hold None here
            moment = state.get(key)
            if moment is not None and moment.is_sparse:
                # torch's own step on a sparse gradient has made it, and kernels take dense tensors
                moment = shaped[key] = moment.to_dense()
            if moment is not None and moment.dtype == dtype:
                continue
            if is_in_blocks(dtype):
                shaped[key] = coded(moment, param, self._rule.value_kinds[key], self._state)
                shaped[ORDER] = memory_strides(param)
            elif moment is None:
                shaped[key] = torch.zeros_like(
                    param, dtype=dtype, memory_format=torch.preserve_format
                )
            else:
                shaped[key] = moment.to(dtype)
        return shaped

    def _unpack(self, param: Tensor, state: dict[str, Any]) -> None:
        """Turn codes into FP32 moments if another format is wanted, or another order of memory."""
        codes = {
            key: state[key]
            for key in self._rule.state_keys.values()
            if isinstance(state.get(key), Tensor) and is_in_blocks(state[key].dtype)
        }
        # Codes lie in the parameter's order of memory. ``model.to(memory_format=...)`` has changed
        # that order since, so the codes are made again from FP32.
        strides = memory_strides(param)
        wanted = moment_dtype(self._state, param)
        stays = all(moment.dtype is wanted for moment in codes.values())
        if not codes or (stays and state.setdefault(ORDER, strides) == strides):
            return
        refuse_capture(param.device, "the optimizer's state")
        if self._offload is not None:
            self._offload.wait()
        state |= in_fp32({**codes, ORDER: state.pop(ORDER, strides)}, self._rule, param)
        # the order of the remainders, which the step has brought into the present one
        if REMAINDER in state:
            state[ORDER] = strides
