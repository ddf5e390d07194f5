"""Norms of half activations with FP32 weights, forward and backward; one also of a sum."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from case import Case
from row_ops import ELEMENTS, TOY_LENGTH, compiled, differentiated, under_flag_gems
from timing import Work
from torch import Tensor

from tritonamp import functional

EPS = 1e-5
BF16, HALF = torch.bfloat16, torch.float16
LENGTHS = {BF16: (256, 768, 1024, 4096, 8192, 65536), HALF: (1024, 4096)}
QUICK = 1024, 4096
KINDS = {  # bytes of an element, forward and backward: ours, and stock autocast's
    "layer_norm": ((4, 6), (20, 24)),
    "rms_norm": ((4, 6), (20, 24)),
    "add_rms_norm": ((8, 8), (26, 30)),
}

Norm = Callable[["Inputs"], tuple[Tensor, ...]]


class Inputs(NamedTuple):
    """Of a layer_norm, or without a bias of an rms_norm; with a residual of that sum's."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    residual: Tensor | None

    @property
    def n(self) -> int:
        return self.x.shape[-1]

    @property
    def summed(self) -> tuple[Tensor, "Inputs"]:
        """What is normalised, and the inputs of that norm alone."""
        total = self.x if self.residual is None else self.x + self.residual
        return total, self._replace(x=total, residual=None)


def norm_of(library: Any, given: Inputs) -> Tensor:
    if given.bias is None:
        return library.rms_norm(given.x, (given.n,), given.weight, EPS)
    return library.layer_norm(given.x, (given.n,), given.weight, given.bias, EPS)


def of_sums(norm: Callable[[Inputs], Tensor]) -> Norm:
    """Return the norm of a sum, by one that knows of none, with the sum."""

    def both(given: Inputs) -> tuple[Tensor, ...]:
        total, summed = given.summed
        return (norm(summed),) if given.residual is None else (total, norm(summed))

    return both


def tritonamp(given: Inputs) -> tuple[Tensor, ...]:
    if given.residual is None:
        return (norm_of(functional, given),)
    return functional.add_rms_norm(given.x, given.residual, (given.n,), given.weight, EPS)


@of_sums
def torchs(given: Inputs) -> Tensor:
    return norm_of(F, given)


@of_sums
def autocast(given: Inputs) -> Tensor:
    """As before a half matmul: stock autocast's result is FP32."""
    with torch.autocast(given.x.device.type, given.x.dtype):
        return norm_of(F, given).to(given.x.dtype)


@of_sums
def widened(given: Inputs) -> Tensor:
    """Compute in FP32, for torch.compile to fuse: torch refuses half input beside FP32 weights."""
    return norm_of(F, given._replace(x=given.x.float())).to(given.x.dtype)


@of_sums
def liger(given: Inputs) -> Tensor:
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    if given.bias is None:
        return LigerRMSNormFunction.apply(given.x, given.weight, EPS)
    return LigerLayerNormFunction.apply(given.x, given.weight, given.bias, EPS)


@of_sums
def apex(given: Inputs) -> Tensor:
    from apex.normalization import fused_layer_norm as norms

    if given.bias is None:
        return norms.fused_rms_norm_affine(given.x, given.weight, (given.n,), EPS)
    return norms.fused_layer_norm_affine(given.x, given.weight, given.bias, (given.n,), EPS)


def peers() -> dict[str, tuple[Callable[[torch.device], Norm], bool]]:
    """By peer, what makes its forward on a device, and whether its weights are half."""
    return {
        "tritonamp": (lambda _: tritonamp, False),
        "eager": (lambda _: torchs, True),
        "autocast": (lambda _: autocast, False),
        "compile": (functools.partial(compiled, widened), False),
        "Liger-Kernel": (lambda _: liger, False),
        "apex": (lambda _: apex, True),
    }


def inputs(
    kind: str, shape: tuple[int, int], dtype: torch.dtype, half_weights: bool, device: Any
) -> Inputs:
    of_weights = dtype if half_weights else torch.float32
    x, residual = (
        torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(2)
    )
    weights = torch.rand(2, shape[1], device=device).to(of_weights)
    weight, bias = (w.clone().requires_grad_() for w in weights)
    return Inputs(
        x,
        weight,
        bias if kind == "layer_norm" else None,
        residual if kind.startswith("add") else None,
    )


def work(
    make: Callable[[torch.device], Norm],
    half_weights: bool,
    kind: str,
    shape: tuple[int, int],
    dtype: torch.dtype,
    backward: bool,
    device: torch.device,
) -> Work:
    """Make a forward without autograd, or the gradients of input and weights."""
    return forward_or_gradients(
        make(device), inputs(kind, shape, dtype, half_weights, device), backward
    )


def forward_or_gradients(norm: Callable[[Any], Any], given: Any, backward: bool) -> Work:
    """Make what a norm of these tensors takes: the forward, or its gradients from results."""
    if not backward:
        return Work([torch.no_grad()(functools.partial(norm, given))])
    return differentiated(lambda: norm(given), [t for t in given if t is not None])


def cases(toy: bool) -> list[Case]:
    return [
        _case(kind, (ELEMENTS // n, n), dtype, backward, toy)
        for kind in KINDS
        for dtype, lengths in LENGTHS.items()
        for n in lengths
        for backward in (False, True)
    ]


def _case(kind: str, shape: tuple[int, int], dtype: torch.dtype, backward: bool, toy: bool) -> Case:
    group = f"{kind} {'backward' if backward else 'forward'}"
    used = (2, TOY_LENGTH) if toy else shape
    makers = {
        peer: functools.partial(work, make, half, kind, used, dtype, backward)
        for peer, (make, half) in peers().items()
    }
    makers["FlagGems"] = functools.partial(under_flag_gems, makers["eager"])
    name_of_dtype = str(dtype).removeprefix("torch.")
    ours, autocasts = (counts[backward] for counts in KINDS[kind])
    return Case(
        group=group,
        name=f"{group} {name_of_dtype} {'x'.join(map(str, shape))}",
        dtype=name_of_dtype,
        shape="x".join(map(str, used)),
        elements=used[0] * used[1],
        bytes=ours,
        peers=makers,
        path_bytes={"tritonamp": ours, "autocast": autocasts},
        quick=dtype is BF16 and shape[1] in QUICK,
        operations=("norm_backward",) if backward else (_operation(kind),),
    )


def _operation(kind: str) -> str:
    return "add_norm" if kind.startswith("add") else "norm"
