"""The calls that rewritten functions make: one op where it applies, else the code as it stood."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tritonamp.casts.active import active
from tritonamp.casts.written.modules import Spec
from tritonamp.casts.written.modules import of_module as of_module
from tritonamp.functional.activations import activated
from tritonamp.functional.inputs import is_under_transforms
from tritonamp.policy import HALF_DTYPES


def takes(x: Any, gate: Any = None) -> bool:
    """Return whether the activation of ``x``, times a gate if there is one, runs as one op now."""
    # torch.compile fuses by itself
    if torch.compiler.is_compiling() or not _is_plain(x) or x.dtype not in HALF_DTYPES:
        return False
    if gate is not None:
        if not _is_plain(gate) or gate.dtype is not x.dtype:
            return False
        if gate.shape != x.shape or gate.device != x.device:
            return False
    found = active()
    if found is None or not (found.policy.op_policy and found.policy.fuse_ops):
        return False
    # autocast is off inside disable_casts()
    return torch.is_autocast_enabled(x.device.type) and not is_under_transforms()


def _is_plain(x: Any) -> bool:
    """Return whether operations on ``x`` are torch's own."""
    cls = type(x)
    if cls is Tensor:
        return True
    if not issubclass(cls, Tensor) or is_traceable_wrapper_subclass(x):
        return False
    # a class may give functions another meaning; private: what disables that (torch 2.11 to 2.15)
    own: Any = cls.__torch_function__
    of_torch: Any = Tensor.__torch_function__
    disabled = torch._C._disabled_torch_function_impl
    return own is disabled or getattr(own, "__func__", None) is of_torch.__func__


def activation(spec: Spec, x: Tensor, gate: Tensor | None = None) -> Tensor:
    """Return an activation as one op, for operands that ``takes`` accepts."""
    found = active()
    return activated(x, gate, *spec, "auto" if found is None else found.backend)


def run(plain: Callable[..., Any], spec: Spec, place: int, *operands: Any) -> Any:
    """Return an activation, as one op if ``takes`` accepts the operands.

    Args:
        plain: the expression as it stood, as a function of the operands.
        spec: the activation.
        place: index of the activation's input among the operands; the other one is the gate.
        operands: one or two values, in the order in which the expression evaluates them.
    """
    x, *gate = operands if place == 0 else reversed(operands)
    return activation(spec, x, *gate) if takes(x, *gate) else plain(*operands)


def gated(module: Any, place: int, *operands: Any) -> Any:
    """Return ``module(x)`` times a gate, as one op if ``takes`` accepts both.

    Args:
        module: module with an activation that ``of_module`` knows.
        place: index of its input among the operands.
        operands: input and gate, in the order in which the expression evaluates them.
    """
    spec = of_module(module)
    x, gate = operands if place == 0 else reversed(operands)
    if spec is not None and takes(x, gate):
        return activation(spec, x, gate)
    return module(x) * gate if place == 0 else gate * module(x)
