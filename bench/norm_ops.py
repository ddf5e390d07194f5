"""Norms of half activations with FP32 weights, also of a sum, forward and backward."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from case import Case
from op_cases import (
    BF16,
    ELEMENTS,
    HALF,
    TOY_LENGTH,
    Forward,
    Inputs,
    Op,
    Shape,
    both_directions,
)
from torch import Tensor

from tritonamp import functional

EPS = 1e-5
LENGTHS = {BF16: (256, 768, 1024, 4096, 8192, 65536), HALF: (1024, 4096)}
TELLING = 1024, 4096


def inputs(kind: str, shape: Shape, dtype: torch.dtype, device: Any) -> Inputs:
    """Return input and weight, the bias of a layer_norm and the residual of an add_rms_norm."""
    x, residual = (torch.randn(shape, dtype=dtype, device=device) for _ in range(2))
    weight, bias = (torch.rand(shape[1], device=device) for _ in range(2))
    return [
        x,
        weight,
        bias if kind == "layer_norm" else None,
        residual if kind == "add_rms_norm" else None,
    ]


def norm_of(library: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    shape = x.shape[-1:]
    if bias is None:
        return library.rms_norm(x, shape, weight, EPS)
    return library.layer_norm(x, shape, weight, bias, EPS)


def of_sums(norm: Callable[[Tensor, Tensor, Tensor | None], Tensor]) -> Forward:
    """Return a function that adds the residual first, and returns the sum and its norm."""

    def of_sum(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Any:
        if residual is None:
            return norm(x, weight, bias)
        total = x + residual
        return total, norm(total, weight, bias)

    return of_sum


def tritonamp(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Any:
    if residual is None:
        return norm_of(functional, x, weight, bias)
    return functional.add_rms_norm(x, residual, x.shape[-1:], weight, EPS)


torchs = of_sums(functools.partial(norm_of, F))


@of_sums
def autocast(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute under stock autocast, with a cast of its FP32 result for a half matmul."""
    with torch.autocast(x.device.type, x.dtype):
        return norm_of(F, x, weight, bias).to(x.dtype)


@of_sums
def widened(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute in FP32 for torch.compile, because torch refuses half input with FP32 weights."""
    return norm_of(F, x.float(), weight, bias).to(x.dtype)


@of_sums
def liger(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    if bias is None:
        return LigerRMSNormFunction.apply(x, weight, EPS)
    return LigerLayerNormFunction.apply(x, weight, bias, EPS)


@of_sums
def apex(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    from apex.normalization import fused_layer_norm as norms

    shape = x.shape[-1:]
    if bias is None:
        return norms.fused_rms_norm_affine(x, weight, shape, EPS)
    return norms.fused_layer_norm_affine(x, weight, bias, shape, EPS)


FORWARDS: dict[str, Forward] = {
    "tritonamp": tritonamp,
    "eager": torchs,
    "autocast": autocast,
    "compile": widened,
    "Liger-Kernel": liger,
    "apex": apex,
}


def _op(kind: str, bytes: tuple[float, float], kernel: str) -> Op:
    made_by = functools.partial(inputs, kind)
    return Op(kind, FORWARDS, made_by, bytes, ((kernel,), ("norm_backward",)))


AUTOCAST_BYTES: list[tuple[Op, tuple[float, float]]] = [
    (_op("layer_norm", (4, 6), "norm"), (20, 24)),
    (_op("rms_norm", (4, 6), "norm"), (20, 24)),
    (_op("add_rms_norm", (8, 8), "add_norm"), (26, 30)),
]
OPS = [op for op, _ in AUTOCAST_BYTES]


def cases(toy: bool) -> list[Case]:
    return [
        case
        for op, autocasts in AUTOCAST_BYTES
        for dtype, lengths in LENGTHS.items()
        for n in lengths
        for case in both_directions(
            op, dtype, (ELEMENTS // n, n), (2, TOY_LENGTH) if toy else None,
            path_bytes={"autocast": autocasts}, tier=2 if dtype is BF16 and n in TELLING else 3,
        )
    ]  # fmt: skip
