"""The form in which steps take an optimizer's state."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tritonamp.kernels._device_tables import memory_strides
from tritonamp.kernels.device import refuse_capture
from tritonamp.step.fused_rule import FusedRule
from tritonamp.step.offload import Offload, host_keys
from tritonamp.step.small_state import IN_THE_FORMAT, ORDER, PACKED, in_fp32, packed_moments


class StateShape:
    """The keys, dtypes and devices of one optimizer's state, for parameters of any dtype.

    Args:
        rule: fused rule of the optimizer.
        state: format, among ``policy.STATES``, for parameters that are half or FP32. State of wider
            parameters (float64, complex) has their own dtype, as in torch.
        offload: host memory of the state; None: the state is on the parameters' devices.
    """

    def __init__(self, rule: FusedRule, state: str, offload: Offload | None) -> None:
        self._rule = rule
        self._state = state
        self._offload = offload

    def format_of(self, param: Tensor) -> str:
        """Return the format of the state of ``param``, one of ``policy.STATES``."""
        return self._state if param.dtype in IN_THE_FORMAT else "fp32"

    def counts_steps(self, state: str) -> bool:
        """Tell whether state of the format ``state`` holds a step count; codes always need one."""
        return self._rule.counts_steps or state == "8bit"

    def bring(
        self, param: Tensor, states: Mapping[Tensor, dict[str, Any]], group: dict[str, Any]
    ) -> bool:
        """Make missing state of one parameter, and convert state that has another form.

        Args:
            param: the parameter, as the optimizer's groups hold it.
            states: a defaultdict with the state of each parameter; the state of ``param`` is
                changed in place.
            group: group of the parameter.

        Returns:
            whether moments were made.
        """
        keys = [key for name, key in self._rule.state_keys.items() if self._rule.has(name, group)]
        # SGD without momentum has no state, and torch leaves no entry for such parameters either.
        if not keys:
            return False
        state = states[param]
        wanted = self.format_of(param)
        if PACKED in state and wanted != "8bit":
            self._unpack(param, state)
        # before the state is made: a parameter without moments takes its first step
        is_new = any(state.get(key) is None for key in keys) and PACKED not in state
        shaped = self._step_count(param, state) if self.counts_steps(wanted) else {}
        shaped |= self._codes(param, state, keys) if wanted == "8bit" else {}
        shaped |= self._moments(param, state, keys, wanted) if wanted != "8bit" else {}
        if shaped:
            # state that is made inside of a CUDA graph would be zeroed again by each replay
            refuse_capture(param.device, "the optimizer's state")
            state.update(shaped)
        if self._offload is not None:
            found = {k: v for k, v in state.items() if k in host_keys(self._rule) and v is not None}
            away = {k: v for k, v in found.items() if not self._offload.is_pinned(v)}
            state |= {k: self._offload.pin(v) for k, v in away.items()}
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
        self, param: Tensor, state: Mapping[str, Any], keys: Sequence[str], wanted: str
    ) -> dict[str, Tensor]:
        dtype = torch.promote_types(param.dtype, torch.float32)
        if wanted == "bf16":
            dtype = torch.bfloat16
        shaped = {}
        for key in keys:
            # states of torch's SGD may hold None here
            moment = state.get(key)
            if moment is None:
                shaped[key] = torch.zeros_like(
                    param, dtype=dtype, memory_format=torch.preserve_format
                )
            elif moment.is_sparse:
                # torch's own step on a sparse gradient has made it, and kernels take dense tensors
                shaped[key] = moment.to_dense()
            elif moment.dtype != dtype:
                shaped[key] = moment.to(dtype)
        return shaped

    def _codes(self, param: Tensor, state: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
        strides = memory_strides(param)
        # Codes lie in the parameter's order of memory. ``model.to(memory_format=...)`` has changed
        # that order since, so the codes are made again from FP32.
        if PACKED in state and state.setdefault(ORDER, strides) != strides:
            self._unpack(param, state)
        if PACKED in state:
            return {}
        moments = [state.pop(key, None) for key in keys]
        return {PACKED: packed_moments(moments, param), ORDER: strides}

    def _unpack(self, param: Tensor, state: dict[str, Any]) -> None:
        """Turn the codes of a state into FP32 moments."""
        refuse_capture(param.device, "the optimizer's state")
        if self._offload is not None:
            self._offload.wait()
        codes = {key: state.pop(key) for key in (PACKED, ORDER) if key in state}
        state |= in_fp32(codes, self._rule, param)
