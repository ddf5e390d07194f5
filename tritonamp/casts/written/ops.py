"""Functions that rewritten code calls: one op if it applies, else the original expression."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch import float32 as float32
from torch.nn import functional

from tritonamp.casts.written import conditions, masks
from tritonamp.casts.written.conditions import backend
from tritonamp.casts.written.modules import Spec
from tritonamp.casts.written.modules import of_module as of_module
from tritonamp.functional.activations import activated

added, added_, divided, divided_ = masks.added, masks.added_, masks.divided, masks.divided_
filled, filled_, kept = masks.filled, masks.filled_, masks.kept
scaled, scaled_, softmax = masks.scaled, masks.scaled_, masks.softmax


def takes(spec: Spec, x: Any, gate: Any = None) -> bool:
    """Return whether the activation of ``x``, times a gate if there is one, runs as one op now."""
    if spec[0] == "square" and getattr(x, "dtype", None) is torch.float16:
        return False  # a square needs the range of FP32
    return conditions.takes(x, gate) and not conditions.are_apart()


def activation(spec: Spec, x: Tensor, gate: Tensor | None = None) -> Tensor:
    """Return an activation as one op, for operands that ``takes`` accepts."""
    return activated(x, gate, *spec, backend())


def run(plain: Callable[..., Any], spec: Spec, place: int, *operands: Any) -> Any:
    """Return an activation, as one op if ``takes`` accepts the operands.

    Args:
        plain: function of the operands with the original expression.
        spec: the activation.
        place: index of the activation's input among the operands. Another operand is the gate.
        operands: one or two values, in the order in which the expression evaluates them.
    """
    x, *gate = operands if place == 0 else reversed(operands)
    return activation(spec, x, *gate) if takes(spec, x, *gate) else plain(*operands)


def gated(module: Any, place: int, *operands: Any) -> Any:
    """Return ``module(x)`` times a gate, as one op if ``takes`` accepts both.

    Args:
        module: module with an activation that ``of_module`` knows.
        place: index of the module's input among the operands. The other operand is the gate.
        operands: input and gate, in the order in which the expression evaluates them.
    """
    spec = of_module(module)
    x, gate = operands if place == 0 else reversed(operands)
    if spec is not None and takes(spec, x, gate):
        return activation(spec, x, gate)
    return module(x) * gate if place == 0 else gate * module(x)


def wide(x: Any, owner: Any = None) -> torch.dtype | None:
    """Return the ``dtype`` of a softmax of ``x``: FP32 if that is needed now, else None.

    Args:
        x: a tensor, or ``Scores``.
        owner: module whose forward returns the result; None: code reads the result.
    """
    x = x.x if isinstance(x, masks.Scores) else x
    return float32 if conditions.widens(x, owner) else None


def widened(owner: Any, softmax: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> Any:
    """Return ``softmax(x, *args, **kwargs)``, in FP32 if ``wide`` says so."""
    if conditions.widens(x, owner):
        kwargs["dtype"] = float32
    return softmax(x, *args, **kwargs)


def softmax_of(x: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the result of the method ``softmax`` of ``x``."""
    return x.softmax(*args, **kwargs)


def fp32(x: Any, owner: Any = None) -> Any:
    """Return the operand of a sigmoid: in FP32 if ``wide`` says so."""
    return x.float() if conditions.widens(x, owner) else x


def log_softmax(softmax: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> Any:
    """Return ``softmax(x, *args, **kwargs).log()``, as one op if ``wide`` says so."""
    if conditions.widens(x):
        return functional.log_softmax(x, *args, **kwargs)
    return softmax(x, *args, **kwargs).log()
