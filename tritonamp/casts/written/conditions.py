"""Whether formulas of a tensor run as one op now."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tritonamp.casts.active import ActivePolicy, active
from tritonamp.functional.inputs import is_under_transforms
from tritonamp.kernels._dynamo import constant_to_dynamo
from tritonamp.policy import HALF_DTYPES

_apart = False


@contextlib.contextmanager
def activations_apart() -> Iterator[None]:
    """Run activations operation by operation inside the block, as their code writes them.

    All threads do, because autograd's own threads run checkpointed forwards again.
    """
    global _apart
    before, _apart = _apart, True
    try:
        yield
    finally:
        _apart = before


def are_apart() -> bool:
    """Return whether a block of ``activations_apart`` is open."""
    return _apart


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
    if not _fuses(active()):
        return False
    # autocast is off inside disable_casts()
    return torch.is_autocast_enabled(x.device.type) and not is_under_transforms()


def widens(x: Any, owner: Any = None) -> bool:
    """Return whether a softmax or sigmoid of ``x`` is FP32 now.

    Args:
        x: operand of the function.
        owner: module whose forward returns the result; None: code reads the result.
    """
    # an enabled model has the attribute, and so has a copy
    if owner is not None and not hasattr(owner, "_tritonamp_saved"):
        return False
    is_known = isinstance(x, Tensor) if torch.compiler.is_compiling() else is_plain(x)
    if not is_known or x.dtype not in HALF_DTYPES or x.device.type not in ("cpu", "cuda"):
        return False
    return torch.is_autocast_enabled(x.device.type) and _widens_now(owner is not None)


@constant_to_dynamo
def _widens_now(is_result: bool) -> bool:
    found = active()
    if found is None or not _fuses(found) or found.policy.softmax_dtype is not None:
        return False
    return not is_result or found.policy.cast_outputs is torch.float32


def _fuses(found: ActivePolicy | None) -> bool:
    """Return whether formulas run as one op under an active policy, if there is one."""
    return found is not None and found.policy.op_policy and found.policy.fuse_ops


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
