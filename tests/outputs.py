"""The floating tensors of a model's outputs, and their errors."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def floats(value: Any) -> list[Tensor]:
    """Return the floating tensors in an output."""
    if isinstance(value, PackedSequence):
        return [value.data]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in floats(item)]
    return [value] if isinstance(value, Tensor) and value.is_floating_point() else []


def largest_error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest difference over the largest value, of several tensors together."""
    pairs = [
        (f.detach().double(), e.detach().double()) for f, e in zip(found, expected, strict=True)
    ]
    pairs = [(f, e) for f, e in pairs if e.numel()]
    error = max((float((f - e).abs().max()) for f, e in pairs), default=0.0)
    return error and error / max(float(e.abs().max()) for _, e in pairs)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over the norm of ``expected``."""
    return float((found.double() - expected).norm() / expected.norm())
