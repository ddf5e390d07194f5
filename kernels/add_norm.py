"""The sum of two tensors and the layer_norm or rms_norm of the sum, in one pass. 8 B/element.

A block of a transformer computes both where it adds to the residual stream. The norm is that of the
rounded sum, so that the bits are those of ``norm(x + residual)``.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from tritonamp.kernels import norm as _norm
from tritonamp.kernels._implementations import TraceableOp
from tritonamp.kernels._sample import Sample
from tritonamp.kernels._shipped import Shipped


def add_norm_triton(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    n: int,
    eps: float,
    center: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    # one kernel serves both operations, so that their arithmetic cannot differ
    run = _norm.norm_prepared(x, weight, bias, n, eps, center, x.dtype, added=True)
    total, y, stats = run(x, weight, bias, residual)
    return total, y, stats


def add_norm_torch(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    n: int,
    eps: float,
    center: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    # rounded to the dtype of x before the norm, as the kernel does it
    total = x + residual
    return total, *_norm.norm_torch(total, weight, bias, n, eps, center, x.dtype)


def add_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    n: int,
    eps: float,
    center: bool,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Add ``residual``, round the sum, and normalise the rounded sum as ``norm`` does.

    Args:
        x: float16, bfloat16 or float32, of any shape whose last dimensions have ``n`` elements.
        residual: tensor of the shape and dtype of ``x``.
        weight: n elements, half or float32, or None.
        bias: n elements, half or float32, or None.
        n: elements of a line.
        eps: number that is added to the variance.
        center: subtract the mean first (layer_norm), or not (rms_norm).
        backend: "auto", "triton" or "eager".

    Returns:
        The sum, and the results of ``norm`` for it, in the dtype of ``x``.
    """
    return ADD_NORM(backend, x, residual, weight, bias, n, eps, center)


def _args(x: Tensor, dim: int, center: bool, affine: bool) -> tuple[Any, ...]:
    # without the dtype of the result, which is always that of x
    lines, *others, _ = _norm.line_args(x, dim, center, affine)
    return lines, lines.flip(-1), *others


ADD_NORM = TraceableOp(
    add_norm_triton,
    add_norm_torch,
    [
        Sample(
            lambda x, dim: _args(x, dim, True, False),
            reads=4,
            writes=4,
            of_line=(0, 8),
            any_order=True,
            rows_only=True,
            variant="layer_norm",
        ),
        Sample(
            lambda x, dim: _args(x, dim, False, True),
            any_order=True,
            rows_only=True,
            variant="rms_norm affine",
        ),
    ],
    left_to_inductor=True,
)


def shipped() -> Iterator[Shipped]:
    """Yield the calls whose builds are checked: one whole line, one long."""
    for name, x, w, center in _norm.shipped_cases():
        if len(w) in (16384, 65536):
            args = x, x, w, w if center else None, len(w), 1e-5, center
            yield Shipped(f"add_{name}", add_norm_triton, args, 64, 20, 0)
