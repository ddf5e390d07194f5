"""group_norm of half activations with FP32 weights in 32 groups, in both memory formats."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from case import Case
from norm_ops import BF16, EPS, HALF, forward_or_gradients
from row_ops import ELEMENTS, compiled, under_flag_gems
from timing import Work
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
BYTES = 4, 6
AUTOCAST = 24, 32  # FP32 copies; statistics and result, sums and gradient read it twice

Norm = Callable[["Inputs"], tuple[Tensor, ...]]


class Inputs(NamedTuple):
    x: Tensor
    weight: Tensor
    bias: Tensor


def tritonamp(given: Inputs) -> tuple[Tensor, ...]:
    return (functional.group_norm(given.x, GROUPS, given.weight, given.bias, EPS),)


def torchs(given: Inputs) -> tuple[Tensor, ...]:
    return (F.group_norm(given.x, GROUPS, given.weight, given.bias, EPS),)


def autocast(given: Inputs) -> tuple[Tensor, ...]:
    """As before a half convolution: stock autocast's result is FP32."""
    with torch.autocast(given.x.device.type, given.x.dtype):
        return (torchs(given)[0].to(given.x.dtype),)


def widened(given: Inputs) -> tuple[Tensor, ...]:
    """Compute in FP32, for torch.compile to fuse."""
    return (torchs(given._replace(x=given.x.float()))[0].to(given.x.dtype),)


def peers() -> dict[str, tuple[Callable[[torch.device], Norm], bool]]:
    """By peer, what makes its forward on a device, and whether its weights are half."""
    return {
        "tritonamp": (lambda _: tritonamp, False),
        "eager": (lambda _: torchs, True),
        "autocast": (lambda _: autocast, False),
        "compile": (functools.partial(compiled, widened), False),
    }


def work(
    make: Callable[[torch.device], Norm],
    half_weights: bool,
    shape: tuple[int, ...],
    form: torch.memory_format,
    dtype: torch.dtype,
    backward: bool,
    device: torch.device,
) -> Work:
    """Make a forward without autograd, or the gradients of input and weights."""
    x = torch.randn(shape, dtype=dtype, device=device).contiguous(memory_format=form)
    weights = torch.rand(2, shape[1], device=device).to(dtype if half_weights else torch.float32)
    given = Inputs(*(t.clone().requires_grad_() for t in (x, *weights)))
    return forward_or_gradients(make(device), given, backward)


def cases(toy: bool) -> list[Case]:
    shapes = [
        ((ELEMENTS // torch.Size(image).numel(), *image), dtype)
        for dtype, images in IMAGES.items()
        for image in images
    ]
    return [
        _case(shape, name, dtype, backward, toy)
        for shape, dtype in [*shapes, (DECODED, BF16)]
        for name in FORMATS
        for backward in (False, True)
    ]


def _case(shape: tuple[int, ...], form: str, dtype: torch.dtype, backward: bool, toy: bool) -> Case:
    group = f"group_norm {'backward' if backward else 'forward'}"
    used = TOY if toy else shape
    makers: dict[str, Any] = {
        peer: functools.partial(work, make, half, used, FORMATS[form], dtype, backward)
        for peer, (make, half) in peers().items()
    }
    makers["FlagGems"] = functools.partial(under_flag_gems, makers["eager"])
    name_of_dtype = str(dtype).removeprefix("torch.")
    counted = {} if form else {"autocast": AUTOCAST[backward]}
    return Case(
        group=group,
        name=f"{group} {name_of_dtype} {'x'.join(map(str, shape))}{form}",
        dtype=name_of_dtype,
        shape="x".join(map(str, used)) + form,
        elements=torch.Size(used).numel(),
        bytes=BYTES[backward],
        peers=makers,
        path_bytes={"tritonamp": BYTES[backward], **counted},
        quick=dtype is BF16 and shape[1] == 320,
        operations=("group_norm_backward",) if backward else ("group_norm",),
    )
