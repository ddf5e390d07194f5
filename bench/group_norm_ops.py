"""group_norm of half activations with FP32 weights in 32 groups, in both memory formats."""

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from case import Case
from norm_ops import EPS
from op_cases import BF16, ELEMENTS, HALF, Inputs, Shape, both_directions, simple_op
from torch import Tensor

from tritonamp import functional

GROUPS = 32
IMAGES = {  # channels, height and width: of diffusion models, a ResNet, a decoder's one image
    BF16: ((320, 64, 64), (1280, 16, 16), (512, 8, 8), (256, 56, 56)),
    HALF: ((640, 32, 32),),
}
DECODED = 1, 128, 512, 512
TOY = 2, 64, 4, 4
FORMATS = {"": torch.contiguous_format, " channels last": torch.channels_last}
AUTOCAST_BYTES = 24, 32  # FP32 copies; statistics and result, sums and gradient read it twice


def inputs(form: str, shape: Shape, dtype: torch.dtype, device: Any) -> Inputs:
    x = torch.randn(shape, dtype=dtype, device=device).contiguous(memory_format=FORMATS[form])
    return [x, *(torch.rand(shape[1], device=device) for _ in range(2))]


def tritonamp(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.group_norm(x, GROUPS, weight, bias, EPS)


def torchs(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.group_norm(x, GROUPS, weight, bias, EPS)


def autocast(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute under stock autocast, with a cast of its FP32 result for a half convolution."""
    with torch.autocast(x.device.type, x.dtype):
        return torchs(x, weight, bias).to(x.dtype)


def widened(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute in FP32, for torch.compile to fuse."""
    return torchs(x.float(), weight, bias).to(x.dtype)


FORWARDS = {"tritonamp": tritonamp, "eager": torchs, "autocast": autocast, "compile": widened}
OPS = {  # by memory format
    form: simple_op("group_norm", FORWARDS, functools.partial(inputs, form), (4, 6))
    for form in FORMATS
}


def cases(toy: bool) -> list[Case]:
    shapes = [
        ((ELEMENTS // math.prod(image), *image), dtype)
        for dtype, images in IMAGES.items()
        for image in images
    ]
    return [
        case
        for shape, dtype in [*shapes, (DECODED, BF16)]
        for form, op in OPS.items()
        for case in both_directions(
            op, dtype, shape, TOY if toy else None, form=form,
            path_bytes={} if form else {"autocast": AUTOCAST_BYTES},
            tier=2 if dtype is BF16 and shape[1] == 320 else 3,
        )
    ]  # fmt: skip
