"""softmax, masked softmax, log_softmax and sum over the last dimension, forward and backward."""

import functools
import itertools
import math
from typing import Any

import torch
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
    by,
    simple_op,
)
from timing import Work, sets_beyond_l2
from torch import Tensor

from tritonamp import functional
from tritonamp.names import short

ATTENTION = 16, 32, 2048, 2048
ATTENTION_SCALE = 0.125
SOFTMAX_LENGTHS = {
    BF16: (
        *(1 << power for power in range(8, 17)), 262144,
        1000, 1001, 4095, 32000, 50257, 128256,
    ),
    HALF: (256, 1024, 4096, 16384, 65536, 50257),
}  # fmt: skip
SMALL = (256, 256), (1024, 256), (1024, 1024)  # from 64K elements on torch takes other kernels
TELLING = 1024, 4096, 32768, 50257


def inputs(shape: Shape, dtype: torch.dtype, device: Any) -> Inputs:
    return [torch.randn(shape, dtype=dtype, device=device)]


def call_of(library: Any, name: str, wide: bool, x: Tensor) -> Tensor:
    function = getattr(library, name)
    return function(x, -1, dtype=torch.float32) if wide else function(x, -1)


def autocast(name: str, wide: bool, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, x.dtype):
        y = getattr(torch, name)(x, -1)
    return y if wide else y.to(x.dtype)


def liger(x: Tensor) -> Tensor:
    from liger_kernel.ops.softmax import LigerSoftmaxFunction

    return LigerSoftmaxFunction.apply(x)


@functools.cache
def _scale_mask_softmax() -> Any:
    from transformer_engine.pytorch.softmax import FusedScaleMaskSoftmax

    return FusedScaleMaskSoftmax()


def transformer_engine(x: Tensor) -> Tensor:
    return _scale_mask_softmax()(x, None, "no_mask", 1.0)


def masked_inputs(shape: Shape, dtype: torch.dtype, device: Any) -> Inputs:
    """Return scores and a mask that all heads share; of two dimensions a mask of its own."""
    of_mask = (shape[0], 1, *shape[2:]) if len(shape) > 2 else shape
    mask = torch.rand(of_mask, device=device) < 0.5
    mask[..., 0] = True  # torch's softmax of a row without a key is NaN
    return [*inputs(shape, dtype, device), mask]


def masked(x: Tensor, mask: Tensor) -> Tensor:
    return functional.masked_softmax(x, mask, scale=ATTENTION_SCALE)


def masked_by_torch(x: Tensor, mask: Tensor) -> Tensor:
    """Return masked softmax in the operations of eager attention in transformers' models."""
    scores = (x * ATTENTION_SCALE).masked_fill(~mask, -torch.inf)
    return torch.softmax(scores, -1, dtype=torch.float32).to(x.dtype)


def causal(x: Tensor) -> Tensor:
    return functional.masked_softmax(x, scale=ATTENTION_SCALE, causal=True)


def causal_by_torch(x: Tensor) -> Tensor:
    seen = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device)
    return masked_by_torch(x, seen.tril(x.shape[-1] - x.shape[-2]))


def forwards(name: str, wide: bool) -> dict[str, Forward]:
    """Return the peers' forwards; with ``wide``, results are FP32, else half."""
    torchs = functools.partial(call_of, torch, name, wide)
    return {
        "tritonamp": functools.partial(call_of, functional, name, wide),
        "eager": torchs,
        "autocast": functools.partial(autocast, name, wide),
        "compile": torchs,
    }


SOFTMAX = simple_op(
    "softmax", {**forwards("softmax", False), "Liger-Kernel": liger}, inputs, (4, 6)
)
# heads share a mask, so all heads but one read it from L2
MASKED = simple_op(
    "masked_softmax",
    {"tritonamp": masked, "eager": masked_by_torch, "compile": masked_by_torch},
    masked_inputs,
    (4 + 1 / ATTENTION[1], 6),
)
# half of the elements of a square are read
CAUSAL = Op(
    "causal_softmax",
    {"tritonamp": causal, "eager": causal_by_torch, "compile": causal_by_torch},
    inputs,
    (3, 4),
    MASKED.kernels,
)
LOG_SOFTMAX = Op("log_softmax", forwards("log_softmax", True), inputs, (6, 10), SOFTMAX.kernels)
# the gradient of a sum needs no kernel
SUM = Op("sum", forwards("sum", True), inputs, (2, 2), (("sum",), ()))
LENGTHS: list[tuple[Op, dict[torch.dtype, tuple[int, ...]]]] = [
    (SOFTMAX, SOFTMAX_LENGTHS),
    (LOG_SOFTMAX, {BF16: (1024, 32000, 50257, 128256), HALF: (50257,)}),
    (SUM, {BF16: (1024, 50257, ELEMENTS), HALF: (1024,)}),
]
AUTOCAST_BYTES = {BF16: (20, 36), HALF: (12, 28)}  # of softmax


def cases(toy: bool) -> list[Case]:
    found = []
    for op, of_dtypes in LENGTHS:
        for dtype, lengths in of_dtypes.items():
            for n in lengths:
                found += _cases(op, (ELEMENTS // n, n), dtype, toy)
            if op is SOFTMAX:
                attended = {**op.forwards, "Transformer Engine": transformer_engine}
                found += _cases(op._replace(forwards=attended), ATTENTION, dtype, toy)
    for op, dtype in itertools.product((MASKED, CAUSAL), (BF16, HALF)):
        found += _cases(op, ATTENTION, dtype, toy)
    return found + [_small(shape, toy) for shape in SMALL]


def _cases(op: Op, shape: Shape, dtype: torch.dtype, toy: bool) -> list[Case]:
    is_softmax = op.name == SOFTMAX.name
    return both_directions(
        op, dtype, shape, _toy(shape) if toy else None,
        path_bytes={"autocast": AUTOCAST_BYTES[dtype]} if is_softmax else {},
        tier=2 if is_softmax and dtype is BF16 and shape[-1] in TELLING and len(shape) == 2 else 3,
    )  # fmt: skip


def _small(shape: Shape, toy: bool) -> Case:
    """Return the case of a small bf16 input, in turn with others so that the cache holds none."""
    used = _toy(shape) if toy else shape

    def rotated(peer: str, device: torch.device) -> Work:
        forward = SOFTMAX.forward_of(peer, device)
        sets = 2 if toy else sets_beyond_l2(device, 4 * math.prod(used))
        return Work([functools.partial(forward, *inputs(used, BF16, device)) for _ in range(sets)])

    return Case(
        group="softmax forward, small",
        name=f"softmax forward, small {short(BF16)} {by(shape)}",
        dtype=short(BF16),
        shape=by(used),
        elements=math.prod(used),
        bytes=4,
        peers={peer: functools.partial(rotated, peer) for peer in SOFTMAX.forwards},
        graph=True,
    )


def _toy(shape: Shape) -> Shape:
    """Return a shape with fewer and shorter lines; odd lengths stay odd."""
    return (*(1 for _ in shape[:-2]), 2, TOY_LENGTH + shape[-1] % 2)
