"""softmax, log_softmax and sum over the last dimension, forward and backward."""

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch._functorch.config
from case import Case
from timing import Work, sets_beyond_l2
from torch import Tensor

from tritonamp import functional

ELEMENTS = 1 << 27
TOY_LENGTH = 64
HALF, BF16 = torch.float16, torch.bfloat16
ATTENTION = 16, 32, 2048, 2048
BF16_LENGTHS = (
    256,
    512,
    1024,
    2048,
    4096,
    8192,
    16384,
    32768,
    65536,
    262144,
    1000,
    1001,
    4095,
    32000,
    50257,
    128256,
)
FP16_LENGTHS = 256, 1024, 4096, 16384, 65536, 50257
SMALL = (
    (256, 256),
    (1024, 256),
    (1024, 1024),
)  # too small for events: 64K elements is where torch's kernels take over
QUICK = 1024, 4096, 32768, 50257

Forward = Callable[[Tensor], Tensor]
Make = Callable[[torch.device], Forward]


class Op(NamedTuple):
    """An operation of torch, by name, and where its result goes.

    Attributes:
        lengths: of lines, by dtype.
        wide: the result is FP32, else half.
        bytes: for each element, forward and backward.
        autocast_bytes: what stock autocast takes, by dtype.
    """

    name: str
    lengths: dict[torch.dtype, tuple[int, ...]]
    wide: bool
    bytes: tuple[float, float]
    autocast_bytes: dict[torch.dtype, tuple[float, float]]


OPS = [
    Op(
        "softmax",
        {BF16: BF16_LENGTHS, HALF: FP16_LENGTHS},
        False,
        (4, 6),
        {BF16: (20, 36), HALF: (12, 28)},
    ),
    Op("log_softmax", {BF16: (1024, 32000, 50257, 128256), HALF: (50257,)}, True, (6, 10), {}),
    Op("sum", {BF16: (1024, 50257, ELEMENTS), HALF: (1024,)}, True, (2, 2), {}),
]


def eager(op: Op, x: Tensor) -> Tensor:
    function = getattr(torch, op.name)
    return function(x, -1, dtype=torch.float32) if op.wide else function(x, -1)


def tritonamp(op: Op, x: Tensor) -> Tensor:
    function = getattr(functional, op.name)
    return function(x, -1, dtype=torch.float32) if op.wide else function(x, -1)


def autocast(op: Op, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, x.dtype):
        y = getattr(torch, op.name)(x, -1)
    return y if op.wide else y.to(x.dtype)


def compiled(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    torch._dynamo.reset()  # a shape of its own for each case, not a dynamic one
    # on a CPU inductor would wait for a C++ compiler
    backend = "inductor" if device.type == "cuda" else "eager"
    return torch.compile(function, dynamic=False, backend=backend)


def liger(x: Tensor) -> Tensor:
    from liger_kernel.ops.softmax import LigerSoftmaxFunction

    return LigerSoftmaxFunction.apply(x)


def under_flag_gems(make: Callable[[torch.device], Work], device: torch.device) -> Work:
    """While the work is open, FlagGems replaces torch's operations in the whole process."""
    import flag_gems

    with contextlib.ExitStack() as stack:
        stack.enter_context(flag_gems.use_gems())
        return Work(make(device).calls, stack.pop_all().close)


def transformer_engine() -> Forward:
    from transformer_engine.pytorch.softmax import FusedScaleMaskSoftmax

    function = FusedScaleMaskSoftmax()
    return lambda x: function(x, None, "no_mask", 1.0)


def forwards(op: Op, attention: bool) -> dict[str, Make]:
    """By peer, what makes its forward on a device."""
    found: dict[str, Make] = {
        "tritonamp": lambda _: functools.partial(tritonamp, op),
        "eager": lambda _: functools.partial(eager, op),
        "autocast": lambda _: functools.partial(autocast, op),
        "compile": functools.partial(compiled, functools.partial(eager, op)),
    }
    if op.name == "softmax":
        found["Liger-Kernel"] = lambda _: liger
    if attention and op.name == "softmax":
        found["Transformer Engine"] = lambda _: transformer_engine()
    return found


def forward_work(
    make: Make, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, sets: int = 1
) -> Work:
    forward = make(device)
    inputs = [torch.randn(shape, dtype=dtype, device=device) for _ in range(sets)]
    return Work([functools.partial(forward, x) for x in inputs])


def backward_work(
    make: Make, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Work:
    """Make a backward that materialises its gradient: what comes next would have to read it."""
    x = torch.randn(shape, dtype=dtype, device=device, requires_grad=True)
    forward = make(device)
    return differentiated(lambda: [forward(x)], [x])


def differentiated(forward: Callable[[], Sequence[Tensor]], inputs: Sequence[Tensor]) -> Work:
    """Make the gradients of inputs from random ones of what ``forward`` returns."""
    with torch._functorch.config.patch(
        donated_buffer=False
    ):  # or a compiled backward runs only once
        results = forward()
        grads = [torch.randn_like(y) for y in results]

        def call() -> Any:
            found = torch.autograd.grad(results, inputs, grads, retain_graph=True)
            return [grad.contiguous() for grad in found]

        call()
    return Work([call])


def cases(toy: bool) -> list[Case]:
    found = []
    for op in OPS:
        for dtype, lengths in op.lengths.items():
            shapes = [(ELEMENTS // n, n) for n in lengths]
            shapes += [ATTENTION] if op.name == "softmax" else []
            for shape in shapes:
                found += [_case(op, shape, dtype, backward, toy) for backward in (False, True)]
    return found + [_small(shape, toy) for shape in SMALL]


def _case(op: Op, shape: tuple[int, ...], dtype: torch.dtype, backward: bool, toy: bool) -> Case:
    direction = "backward" if backward else "forward"
    used = _toy(shape) if toy else shape
    work = backward_work if backward else forward_work
    makers = forwards(op, shape == ATTENTION)
    peers = {peer: functools.partial(work, make, used, dtype) for peer, make in makers.items()}
    peers["FlagGems"] = functools.partial(under_flag_gems, peers["eager"])
    least = op.bytes[backward]
    path = {"tritonamp": least}
    if dtype in op.autocast_bytes:
        path["autocast"] = op.autocast_bytes[dtype][backward]
    return Case(
        group=f"{op.name} {direction}",
        name=f"{op.name} {direction} {_name(dtype)} {_by(shape)}",
        dtype=_name(dtype),
        shape=_by(used),
        elements=math.prod(used),
        bytes=least,
        peers=peers,
        path_bytes=path,
        quick=dtype is BF16 and op.name == "softmax" and shape[-1] in QUICK and len(shape) == 2,
        operations=_measured(op, backward),
    )


def _small(shape: tuple[int, int], toy: bool) -> Case:
    """Return the case of one small bf16 input out of so many that the cache does not hold them."""
    op, used = OPS[0], _toy(shape) if toy else shape

    def rotated(make: Make, device: torch.device) -> Work:
        sets = 2 if toy else sets_beyond_l2(device, 4 * math.prod(used))
        return forward_work(make, used, BF16, device, sets)

    return Case(
        group="softmax forward, small",
        name=f"softmax forward, small {_name(BF16)} {_by(shape)}",
        dtype=_name(BF16),
        shape=_by(used),
        elements=math.prod(used),
        bytes=4,
        peers={
            peer: functools.partial(rotated, make) for peer, make in forwards(op, False).items()
        },
        graph=True,
    )


def _toy(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Few lines, shorter ones; odd lengths stay odd."""
    return (*(1 for _ in shape[:-2]), 2, TOY_LENGTH + shape[-1] % 2)


def _by(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _measured(op: Op, backward: bool) -> tuple[str, ...]:
    """Name the operation of the kernels; the gradient of a sum needs none."""
    if op.name == "sum":
        return () if backward else ("sum",)
    return (f"{op.name}_backward" if backward else op.name,)
