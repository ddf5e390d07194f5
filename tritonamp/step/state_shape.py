"""The form in which steps take an optimizer's state."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from tritonamp.kernels._device_tables import memory_strides
from tritonamp.kernels.device import refuse_capture
from tritonamp.step.offload import Offload, host_keys
from tritonamp.step.small_state import (
    IN_THE_FORMAT,
    ORDER,
    PACKED,
    StateRule,
    in_fp32,
    packed_moments,
)


class ShapedRule(StateRule, Protocol):
    """A ``FusedRule``, which imports this file."""

    @property
    def counts_steps(self) -> bool: ...

    def has(self, name: str, group: dict[str, Any]) -> bool: ...


class StateShape:
    """The keys, dtypes and devices of one optimizer's state, for parameters of any dtype.

    Args:
        rule: the rule of the optimizer.
        state: the format, of ``policy.STATES``, for parameters that are half or FP32. State of
            wider ones (float64, complex) has their own dtype, as in torch.
        offload: host memory of the state; None: the state is on the parameters' devices.
    """

    def __init__(self, rule: ShapedRule, state: str, offload: Offload | None) -> None:
        self._rule = rule
        self._state = state
        self._offload = offload

    def format_of(self, param: Tensor) -> str:
        """Return the format of the state of ``param``, of ``policy.STATES``."""
        return self._state if param.dtype in IN_THE_FORMAT else "fp32"

    def counts_steps(self, state: str) -> bool:
        """Tell whether state of a format holds a step count, of which codes need one."""
        return self._rule.counts_steps or state == "8bit"

    def bring(
        self, param: Tensor, states: Mapping[Tensor, dict[str, Any]], group: dict[str, Any]
    ) -> bool:
        """Make missing state of one parameter, and convert what has another form.

        Args:
            param: the parameter, as the optimizer's groups hold it.
            states: a defaultdict, state of each parameter; that of ``param`` is changed in place.
            group: its group.

        Returns:
            whether moments were made.
        """
        keys = [key for name, key in self._rule.state_keys.items() if self._rule.has(name, group)]
        if not keys:
            return False
        state = states[param]
        wanted = self.format_of(param)
        if PACKED in state and wanted != "8bit":
            self._unpack(param, state, PACKED, ORDER)
        is_new = any(state.get(key) is None for key in keys) and PACKED not in state
        shaped = self._step_count(param, state) if self.counts_steps(wanted) else {}
        shaped |= self._codes(param, state, keys) if wanted == "8bit" else {}
        shaped |= self._moments(param, state, keys, wanted) if wanted != "8bit" else {}
        if shaped:
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
            moment = state.get(key)  # None: as torch's SGD has it
            if moment is None:
                shaped[key] = torch.zeros_like(
                    param, dtype=dtype, memory_format=torch.preserve_format
                )
            elif moment.is_sparse:  # torch's own step of a sparse gradient has made it
                shaped[key] = moment.to_dense()
            elif moment.dtype != dtype:
                shaped[key] = moment.to(dtype)
        return shaped

    def _codes(self, param: Tensor, state: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
        strides = memory_strides(param)
        if PACKED in state and state.setdefault(ORDER, strides) != strides:  # channels_last, since
            self._unpack(param, state, PACKED, ORDER)
        if PACKED in state:
            return {}
        moments = [state.pop(key, None) for key in keys]
        return {PACKED: packed_moments(moments, param), ORDER: strides}

    def _unpack(self, param: Tensor, state: dict[str, Any], *keys: str) -> None:
        """Turn codes in the state, under these keys, into FP32."""
        refuse_capture(param.device, "the optimizer's state")
        if self._offload is not None:
            self._offload.wait()
        state |= in_fp32({k: state.pop(k) for k in keys if k in state}, self._rule, param)
