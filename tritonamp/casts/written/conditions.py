"""Whether formulas of a tensor run as one op now."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tritonamp.casts.active import active
from tritonamp.functional.inputs import is_under_transforms
from tritonamp.policy import HALF_DTYPES


def takes(x: Any, gate: Any = None) -> bool:
    """Return whether a formula of ``x``, and of a gate if there is one, runs as one op now."""
    # torch.compile fuses by itself, and TorchScript has no Functions
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined]
        return False
    if not is_plain(x) or x.dtype not in HALF_DTYPES or x.device.type not in ("cpu", "cuda"):
        return False
    if gate is not None:
        if not is_plain(gate) or gate.dtype is not x.dtype:
            return False
        if gate.shape != x.shape or gate.device != x.device:
            return False
    found = active()
    if found is None or not (found.policy.op_policy and found.policy.fuse_ops):
        return False
    # autocast is off inside disable_casts()
    return torch.is_autocast_enabled(x.device.type) and not is_under_transforms()


def is_plain(x: Any) -> bool:
    """Return whether ``x`` is a dense tensor whose operations are torch's own."""
    cls = type(x)
    if isinstance(x, Tensor) and (x.is_nested or x.layout is not torch.strided):
        return False
    if cls is Tensor:
        return True
    if not issubclass(cls, Tensor) or is_traceable_wrapper_subclass(x):
        return False
    # a class may give functions another meaning, unless it has torch's own function or the one
    # that disables this; private (torch 2.11 to 2.15)
    own: Any = cls.__torch_function__
    of_torch: Any = Tensor.__torch_function__
    disabled = torch._C._disabled_torch_function_impl
    return own is disabled or getattr(own, "__func__", None) is of_torch.__func__


def backend() -> str:
    """Return the backend of the policy in force."""
    found = active()
    return "auto" if found is None else found.backend
