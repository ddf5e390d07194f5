"""Activations that models write out, and a gated one, forward and backward."""

import functools
from typing import Any

import torch
from case import Case
from op_cases import BF16, HALF, Forward, Inputs, Op, Shape, both_directions
from torch import Tensor
from torch.nn import functional as F

from tritonamp.functional.activations import activated
from tritonamp.kernels.activation import KINDS

SHAPE, TOY = (8192, 14336), (4, 256)  # tokens and the width of an MLP
KERNELS = (("activation",), ("activation_backward",))


def inputs(count: int, shape: Shape, dtype: torch.dtype, device: Any) -> Inputs:
    return [torch.randn(shape, dtype=dtype, device=device) for _ in range(count)]


def swiglu(x: Tensor, gate: Tensor) -> Tensor:
    return activated(x, gate, *KINDS["silu"])


def swiglu_by_torch(x: Tensor, gate: Tensor) -> Tensor:
    return F.silu(x) * gate


def liger(x: Tensor, gate: Tensor) -> Tensor:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return LigerSiLUMulFunction.apply(x, gate)


def quick_gelu(x: Tensor) -> Tensor:
    return activated(x, None, "sigmoid", 1.702, 0.0)


def quick_gelu_by_torch(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _op(name: str, count: int, bytes: tuple[int, int], forwards: dict[str, Forward]) -> Op:
    return Op(name, forwards, functools.partial(inputs, count), bytes, KERNELS)


SWIGLU = _op(
    "swiglu", 2, (6, 10),
    {"tritonamp": swiglu, "eager": swiglu_by_torch, "compile": swiglu_by_torch,
     "Liger-Kernel": liger},
)  # fmt: skip
QUICK_GELU = _op(
    "quick_gelu", 1, (4, 6),
    {"tritonamp": quick_gelu, "eager": quick_gelu_by_torch, "compile": quick_gelu_by_torch},
)  # fmt: skip


def cases(toy: bool) -> list[Case]:
    return [
        case
        for op in (SWIGLU, QUICK_GELU)
        for dtype in (BF16, HALF)
        for case in both_directions(op, dtype, SHAPE, TOY if toy else None, path_bytes={}, tier=3)
    ]
