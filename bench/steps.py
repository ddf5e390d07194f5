"""Whole steps, and their parts but for the update, on the parameters of real models."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from case import Case
from timing import Work
from torch import Tensor, nn

import tritonamp
from tritonamp.kernels import cast, ema, grad_stats
from tritonamp.kernels._multi_tensor import TensorLists
from tritonamp.kernels.ranges import ROW, ranges

HALF = torch.float16
LR = 1e-5
MAX_NORM = 1.0

FUSED_ADAMW = functools.partial(torch.optim.AdamW, lr=LR, fused=True)
FOREACH_RMSPROP = functools.partial(torch.optim.RMSprop, lr=LR, foreach=True)

Build = Callable[[], nn.Module]
Maker = Callable[..., Work]
"""Takes ``Build`` and a device."""


def gpt(vocabulary: int, context: int, width: int, layers: int) -> nn.Module:
    """Return modules with the parameters of a GPT-2 with tied embeddings; they never run."""
    modules: list[nn.Module] = [nn.Embedding(vocabulary, width), nn.Embedding(context, width)]
    for _ in range(layers):
        attention = nn.Linear(width, 3 * width), nn.Linear(width, width)
        mlp = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        modules += [nn.LayerNorm(width), *attention, nn.LayerNorm(width), *mlp]
    return nn.ModuleList([*modules, nn.LayerNorm(width)])


def tiny(count: int) -> nn.Module:
    return nn.ModuleList(nn.Linear(16, 16) for _ in range(count // 2))


SETS: dict[str, tuple[Build, Build]] = {
    "GPT-2 124M": (lambda: gpt(50257, 1024, 768, 12), lambda: gpt(17, 8, 8, 2)),
    "148 small": (lambda: gpt(256, 64, 64, 12), lambda: gpt(16, 4, 4, 12)),
    "4000 tiny": (lambda: tiny(4000), lambda: tiny(40)),
    "1.3B": (lambda: gpt(50257, 2048, 2048, 24), lambda: gpt(19, 8, 12, 3)),
}
"""By name, functions that build the parameters and a toy of them."""


def parameters(build: Build, device: torch.device, dtype: torch.dtype) -> list[nn.Parameter]:
    with torch.device(device):
        params = [nn.Parameter(p.detach().to(dtype)) for p in build().parameters()]
    for p in params:
        p.grad = torch.randn_like(p)
    return params


def grads_of(params: list[nn.Parameter]) -> list[Tensor]:
    return [p.grad for p in params if p.grad is not None]


# the parts


def statistics(build: Build, device: torch.device) -> Work:
    lists = TensorLists(grads=grads_of(parameters(build, device, HALF)))
    return Work([lambda: grad_stats.grad_stats(lists, device)])


def statistics_and_checksums(build: Build, device: torch.device) -> Work:
    lists = TensorLists(grads=grads_of(parameters(build, device, HALF)))
    return Work([lambda: grad_stats.checked_stats(lists, device)])


def unscale_and_norm(build: Build, device: torch.device) -> Work:
    grads = grads_of(parameters(build, device, HALF))
    found_inf, inv_scale = torch.zeros(1, device=device), torch.ones(1, device=device)

    def call() -> None:
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)
        torch.nn.utils.get_total_norm(grads)

    return Work([call])


def our_cast(build: Build, device: torch.device) -> Work:
    params = [p.detach() for p in parameters(build, device, torch.float32)]
    lists = TensorLists(params=params, copies=[p.to(HALF) for p in params])
    return Work([lambda: cast.cast(lists)])


def foreach_cast(build: Build, device: torch.device) -> Work:
    params = [p.detach() for p in parameters(build, device, torch.float32)]
    copies = [p.to(HALF) for p in params]
    return Work([lambda: torch._foreach_copy_(copies, params)])


DECAY = 0.999


def our_average(build: Build, device: torch.device) -> Work:
    params = [p.detach() for p in parameters(build, device, torch.float32)]
    lists = TensorLists(averages=[p.clone() for p in params], params=params)
    return Work([lambda: ema.ema(lists, DECAY, None)])


def foreach_average(build: Build, device: torch.device) -> Work:
    params = [p.detach() for p in parameters(build, device, torch.float32)]
    averages = [p.clone() for p in params]
    return Work([lambda: torch._foreach_lerp_(averages, params, 1.0 - DECAY)])


def our_ranges(build: Build, device: torch.device) -> Work:
    """Make the reading of ``amp.watch``, with gradients instead of activations."""
    grads = grads_of(parameters(build, device, HALF))
    row = torch.zeros(ROW, dtype=torch.int64, device=device)
    on = torch.ones((), dtype=torch.int32, device=device)

    def call() -> None:
        for grad in grads:
            ranges(grad, row, on)

    return Work([call])


def eager_ranges(build: Build, device: torch.device) -> Work:
    grads = grads_of(parameters(build, device, HALF))
    tiny = torch.finfo(HALF).tiny

    def call() -> None:
        for grad in grads:
            numbers = grad.abs()
            _ = numbers.amax(), (numbers == 0).sum(), (numbers < tiny).sum()

    return Work([call])


# whole steps, clipping included


def our_step(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Work:
    """Enable both, and make the work after a backward: decision, clipping and step."""
    amp = tritonamp.enable(model, optimizer, **options)
    params = list(model.parameters())
    for p in params:
        p.grad = torch.randn_like(p)
    loss = torch.ones((), device=params[0].device)

    def call() -> None:
        with amp.scale_loss(loss):  # stands for the backward: the gradients are there
            pass
        amp.clip_grad_norm_(MAX_NORM)
        optimizer.step()

    return Work([call], amp.disable)


def full_step(
    build: Build,
    device: torch.device,
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW,
    **options: Any,
) -> Work:
    with torch.device(device):
        model = build()
    optimizer = kind(model.parameters(), lr=LR)  # type: ignore[call-arg]
    return our_step(model, optimizer, level="O2", dtype=HALF, **options)


def torchs_step(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> Callable[[], None]:
    """Return torch.amp's three calls, and the update of its scale.

    The scale stays 1, so that gradients do not shrink from call to call. Unscaling reads and writes
    nevertheless.
    """
    device = params[0].device
    scaler = torch.amp.GradScaler(device.type, init_scale=1.0, growth_interval=1 << 30)
    scaler.scale(torch.ones((), device=device))

    def call() -> None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(params, MAX_NORM, foreach=True)
        scaler.step(optimizer)
        scaler.update()

    return call


def half_pipeline(build: Build, device: torch.device) -> Work:
    """Make the step of a half model in stock torch, 60 B/param.

    Gradients up, unscale, clip, fused AdamW on masters, parameters down.
    """
    params = parameters(build, device, HALF)
    masters = [nn.Parameter(p.detach().float()) for p in params]
    for master in masters:
        master.grad = torch.empty_like(master)
    halves, wide = [p.detach() for p in params], [m.detach() for m in masters]
    half_grads, grads = grads_of(params), grads_of(masters)
    step = torchs_step(FUSED_ADAMW(masters), masters)

    def call() -> None:
        torch._foreach_copy_(grads, half_grads)
        step()
        torch._foreach_copy_(halves, wide)

    return Work([call])


def standard_amp(
    build: Build,
    device: torch.device,
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = FUSED_ADAMW,
) -> Work:
    """Make the step of FP32 parameters and gradients, 54 B/param with fused AdamW.

    Weight casts of the forward, unscale, clip, update.
    """
    params = parameters(build, device, torch.float32)
    weights = [p.detach() for p in params if p.dim() > 1]
    step = torchs_step(optimizer(params), params)

    def call() -> None:
        for weight in weights:  # one by one, as autocast does
            weight.to(HALF)
        step()

    return Work([call])


class Group(NamedTuple):
    """Rows of the same work, one for each set of parameters.

    Attributes:
        name: name of the group.
        peers: by name, a function that makes the work, and the bytes that the peer moves per
            parameter, None if they are unknown. Ours are the least, and ``step_bytes`` has the
            terms of both.
        operations: names of the measured operations of the kernels.
    """

    name: str
    peers: dict[str, tuple[Maker, float | None]]
    operations: tuple[str, ...]


GROUPS = [
    Group(
        "full step",
        {
            "tritonamp": (full_step, 30),
            "half pipeline": (half_pipeline, 60),
            "torch.amp": (standard_amp, 54),
        },
        ("grad_stats", "decide", "adamw"),
    ),
    Group(
        "full step without outliers",
        {"tritonamp": (functools.partial(full_step, skip_outliers=6.0), 30)},
        ("grad_stats", "outliers", "decide", "adamw"),
    ),
    Group(
        "full step, masters packed",
        {"tritonamp": (functools.partial(full_step, masters="packed"), 28)},
        ("grad_stats", "decide", "adamw"),
    ),
    Group(
        "full step, masters packed, changes",
        {"tritonamp": (functools.partial(full_step, masters="packed", track_changes=True), 28.25)},
        ("grad_stats", "decide", "adamw"),
    ),
    Group(
        "full step, RMSprop",
        {
            "tritonamp": (functools.partial(full_step, kind=torch.optim.RMSprop), 22),
            "torch.amp": (functools.partial(standard_amp, optimizer=FOREACH_RMSPROP), 78),
        },
        ("grad_stats", "decide", "rmsprop"),
    ),
    Group(
        "gradient statistics",
        {"tritonamp": (statistics, 2), "eager": (unscale_and_norm, 6)},
        ("grad_stats",),
    ),
    Group(
        "gradient statistics with checksums",
        {"tritonamp": (statistics_and_checksums, 2)},
        ("checked_stats",),
    ),
    Group("weight cast", {"tritonamp": (our_cast, 6), "eager": (foreach_cast, 6)}, ("cast",)),
    Group(
        "moving average",
        {"tritonamp": (our_average, 12), "eager": (foreach_average, 12)},
        ("ema",),
    ),
    Group("ranges", {"tritonamp": (our_ranges, 2), "eager": (eager_ranges, None)}, ("ranges",)),
]


FIRST = {
    "full step GPT-2 124M",
    "full step 148 small",
    "full step 1.3B",
    "optimizer GPT-2 124M",
    "gradient statistics GPT-2 124M",
}
"""Cases of the first tier."""


def cases(toy: bool, groups: Sequence[Group] = GROUPS) -> list[Case]:
    return [_case(group, name, toy) for name in SETS for group in groups]


@functools.cache
def parameter_count(name: str, toy: bool) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in SETS[name][toy]().parameters())


def _case(group: Group, name: str, toy: bool) -> Case:
    build, size = SETS[name][toy], parameter_count(name, toy)
    peers = group.peers.items()
    return Case(
        group=group.name,
        name=f"{group.name} {name}",
        dtype="float16",
        shape=name,
        elements=size,
        bytes=group.peers["tritonamp"][1],
        peers={peer: functools.partial(make, build) for peer, (make, _) in peers},
        path_bytes={peer: moved for peer, (_, moved) in peers if moved is not None},
        tier=1 if f"{group.name} {name}" in FIRST else 3,
        operations=group.operations,
    )
