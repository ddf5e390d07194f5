"""Activations, and their product with a gate: half storage, FP32 arithmetic. 4 or 6 B/element.

The kinds are:

- "sigmoid": x * sigmoid(a * x + b * x**3). This is SiLU with a = 1 and b = 0, QuickGELU with a =
  1.702 and b = 0, and the tanh form of GELU with a = 2 * sqrt(2 / pi) and b = 0.044715 * a, because
  (1 + tanh(u)) / 2 = sigmoid(2 * u).
- "erf": x * (1 + erf(x / sqrt(2))) / 2, which is GELU.
- "square": relu(x)**2.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tritonamp.kernels._by_length import element_sigmoid
from tritonamp.kernels._elements import Rows, element_offsets, rows_of
from tritonamp.kernels._implementations import TraceableOp
from tritonamp.kernels._launch import Launch
from tritonamp.kernels._lines import cached_by_shape, dense
from tritonamp.kernels._sample import Sample
from tritonamp.kernels._shipped import BF16, HALF, Shipped, build_name
from tritonamp.kernels.device import tl, triton

GELU_SLOPE = 1.5957691216057308  # 2 * sqrt(2 / pi)
KINDS: dict[str, tuple[str, float, float]] = {
    "silu": ("sigmoid", 1.0, 0.0),
    "gelu tanh": ("sigmoid", GELU_SLOPE, 0.044715 * GELU_SLOPE),
    "gelu": ("erf", 0.0, 0.0),
    "squared relu": ("square", 0.0, 0.0),
}
"""Arguments ``kind``, a and b of common activations."""


@triton.jit
def sigmoid(x, A: tl.constexpr, B: tl.constexpr):
    """Return the factor of x in the kind "sigmoid"."""
    u = x * (A + B * x * x) if B != 0.0 else x * A  # 0 times an infinite x would be NaN
    # one exp2 and one division; tanh would need both, and lose the digits of small results
    return 1 / (1 + tl.exp2(u * -1.4426950408889634))


@triton.jit
def activated(x, KIND: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    if KIND == "sigmoid":
        return x * sigmoid(x, A, B)
    elif KIND == "erf":
        return x * (0.5 + 0.5 * tl.erf(x * 0.7071067811865476))
    else:
        # a comparison, because NaN must stay NaN, and a maximum may drop it
        positive = tl.where(x < 0, 0.0, x)
        return positive * positive


@triton.jit(do_not_specialize=("n", "blocks", "x_stride", "gate_stride"))
def activation_kernel(
    x_ptr, gate_ptr, y_ptr, n, blocks, x_stride, gate_stride,
    KIND: tl.constexpr, A: tl.constexpr, B: tl.constexpr, GATED: tl.constexpr,
    FULL: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute a part of one row."""
    row, offs, mask = element_offsets(n, blocks, FULL, VEC, BLOCK)
    x = tl.load(x_ptr + row * (x_stride // VEC * VEC) + offs, mask=mask, other=0.0).to(tl.float32)
    y = activated(x, KIND, A, B)
    if GATED:
        gates = gate_ptr + row * (gate_stride // VEC * VEC)
        y *= tl.load(gates + offs, mask=mask, other=0.0).to(tl.float32)
    y = y.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row * (n // VEC * VEC) + offs, y, mask=mask)


@cached_by_shape
def _forward(
    rows: Rows, shape: tuple[int, ...], dtype: torch.dtype, gated: bool, *activation: Any
) -> Callable[..., Tensor]:
    """Return a function of the tensors that ``rows_of`` returns together with ``rows``."""
    constants = *activation, gated, rows.full, rows.vec, rows.block
    results = (dense(shape, dtype),)
    launch = Launch(
        activation_kernel, rows.grid, rows.sizes, constants, rows.warps, results=results
    )
    return lambda *tensors: launch(*tensors)[0]


def activation_triton(x: Tensor, gate: Tensor | None, kind: str, a: float, b: float) -> Tensor:
    # a grid of 0 programs is an invalid launch
    if not x.numel():
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    rows, tensors = rows_of(x, x if gate is None else gate)
    return _forward(rows, x.shape, x.dtype, gate is not None, kind, a, b)(*tensors)


def activation_torch(x: Tensor, gate: Tensor | None, kind: str, a: float, b: float) -> Tensor:
    wide = x.float()
    if kind == "sigmoid":
        y = wide * element_sigmoid(wide * (a + b * wide * wide if b else a))
    elif kind == "erf":
        y = wide * (0.5 + 0.5 * torch.erf(wide * 0.5**0.5))
    else:
        y = torch.relu(wide).square()
    return (y if gate is None else y * gate.float()).to(x.dtype)


def activation(
    x: Tensor, gate: Tensor | None, kind: str, a: float, b: float, backend: str = "auto"
) -> Tensor:
    """Compute an activation in FP32, multiply it by a gate, and round once.

    Args:
        x: float16, bfloat16 or float32, of any shape and strides.
        gate: tensor of the shape and dtype of ``x``; None: there is no product.
        kind: "sigmoid", "erf" or "square".
        a: coefficient of x in "sigmoid"; other kinds ignore it.
        b: coefficient of x**3 in "sigmoid"; other kinds ignore it.
        backend: "auto", "triton" or "eager".
    """
    return ACTIVATION(backend, x, gate, kind, a, b)


def samples(
    args: Callable[[Tensor, Tensor | None, tuple[str, float, float]], tuple[Any, ...]],
    reads: int,
    writes: int,
) -> list[Sample]:
    """Return a sample for each kind without a gate, and one with a gate.

    Args:
        args: arguments of a call for x, a gate and an activation.
        reads: bytes that a call without a gate reads for an element. A gate adds 2.
        writes: bytes that a call without a gate writes for an element. The gradient of a gate, in
            calls that read a gradient, adds 2.
    """

    def sample(name: str, gated: bool = False) -> Sample:
        def of(x: Tensor, dim: int) -> tuple[Any, ...]:
            x = x.movedim(dim, -1)
            return args(x, x.flip(-1) if gated else None, KINDS[name])

        # torch's bits depend on strides
        return Sample(
            of,
            reads=reads + 2 * gated,
            writes=writes + 2 * (gated and reads > 2),
            any_order=True,
            rows_only=True,
            variant=f"{name} gated" if gated else name,
        )

    return [*map(sample, KINDS), sample("silu", gated=True)]


ACTIVATION = TraceableOp(
    activation_triton,
    activation_torch,
    samples(lambda x, gate, act: (x, gate, *act), 2, 2),
    left_to_inductor=True,
)


def shipped_cases() -> Iterator[tuple[str, Tensor, Tensor | None, tuple[str, float, float]]]:
    """Yield name, x, gate and activation; a gated case has the halves of one tensor."""
    for dtype in (HALF, BF16):
        for n in (4096, 1001):
            x = torch.empty(512, n, dtype=dtype, device="meta")
            for name in KINDS:
                yield build_name(name, dtype, f"n={n}"), x, None, KINDS[name]
        x, gate = torch.empty(512, 8192, dtype=dtype, device="meta").chunk(2, -1)
        for name in ("silu", "gelu"):
            yield build_name(name, dtype, "gated"), x, gate, KINDS[name]


def shipped() -> Iterator[Shipped]:
    """Yield the calls whose builds are checked."""
    for name, x, gate, act in shipped_cases():
        exp2 = int(act[0] != "square")  # erf has one, too
        yield Shipped(name, activation_triton, (x, gate, *act), 56, 48, exp2, 0)
