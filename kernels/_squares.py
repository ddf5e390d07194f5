"""Bounds of the squared gradients that an optimizer's FP32 state holds."""

import ctypes
import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from tritonamp.kernels._optimizers import NORM, OPTIMIZERS, SUM

# below bfloat16's largest number, because state="bf16" may round up to it; FP32's is larger
LARGEST_SQUARE = 3.37e38


class Squares(NamedTuple):
    """Movement of a bound of all squares in an optimizer's state: ``keep * bound + gain * amax^2``.

    Both are FP32 values. A ``gain`` of 0 means that the optimizer does not square its gradients.
    """

    keep: float
    gain: float


NO_SQUARES = Squares(0.0, 0.0)
OF_ANY_MEAN = Squares(0.0, 1.0)  # a mean is not above the largest square, whatever its decay


def squares_of(optimizers: Iterable[Optimizer]) -> Squares:
    """Return the numbers of a bound that holds for all ``optimizers``.

    Optimizers are recognised by the name of their class or of one of its bases. All others are
    treated as optimizers that do not square their gradients.
    """
    found = NO_SQUARES
    for optimizer in optimizers:
        kind: Any = type(optimizer)  # Optimizer's own __hash__ confuses mypy
        key = _key_of(kind)
        if key is None:
            continue
        for group in optimizer.param_groups:
            squares = _of_group(key, group)
            # groups nearly always agree, and a comparison is cheaper than a new tuple in each step
            if found is NO_SQUARES:
                found = squares
            elif squares != found:
                found = Squares(max(found.keep, squares.keep), max(found.gain, squares.gain))
    return found


@functools.cache
def _key_of(kind: type) -> str | None:
    names = (base.__name__ for base in kind.__mro__)
    return next((OPTIMIZERS[name].squares for name in names if name in OPTIMIZERS), None)


def _of_group(key: str, group: dict[str, Any]) -> Squares:
    if key == SUM:
        # Adagrad never forgets a square
        return Squares(1.0, 1.0)
    if key == NORM:
        # the sum of the squares of p elements is at most p times the largest square
        return Squares(0.0, float(max((p.numel() for p in group["params"]), default=1)))
    if key not in group:
        return NO_SQUARES
    decay = group[key][1] if key == "betas" else group[key]
    # a tensor is not read, because the host would wait for its device
    return OF_ANY_MEAN if isinstance(decay, Tensor) else _of_decay(decay)


@functools.cache
def _of_decay(decay: float) -> Squares:
    # as FP32 values, which kernels and twins then use alike
    return Squares(ctypes.c_float(decay).value, ctypes.c_float(1.0 - decay).value)
