"""What an optimizer step is made of, and whole steps, on the parameters of real models."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

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

Build = Callable[[], nn.Module]
Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def gpt(vocabulary: int, context: int, width: int, layers: int) -> nn.Module:
    """Modules that have the parameters of a GPT-2 with tied embeddings; they never run."""
    blocks = [m for _ in range(layers) for m in _block(width)]
    return nn.ModuleList(
        [
            nn.Embedding(vocabulary, width),
            nn.Embedding(context, width),
            *blocks,
            nn.LayerNorm(width),
        ]
    )


def _block(width: int) -> list[nn.Module]:
    attention = [nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)]
    return [
        *attention,
        nn.LayerNorm(width),
        nn.Linear(width, 4 * width),
        nn.Linear(4 * width, width),
    ]


def tiny(count: int) -> nn.Module:
    return nn.ModuleList(nn.Linear(16, 16) for _ in range(count // 2))


SETS: dict[str, tuple[Build, Build]] = {
    "GPT-2 124M": (lambda: gpt(50257, 1024, 768, 12), lambda: gpt(17, 8, 8, 2)),
    "148 small": (lambda: gpt(256, 64, 64, 12), lambda: gpt(16, 4, 4, 12)),
    "4000 tiny": (lambda: tiny(4000), lambda: tiny(40)),
    "1.3B": (lambda: gpt(50257, 2048, 2048, 24), lambda: gpt(19, 8, 12, 3)),
}
"""By name, how to build the parameters, and a toy of them."""


def parameters(build: Build, device: torch.device, dtype: torch.dtype) -> list[nn.Parameter]:
    with torch.device(device):
        params = [nn.Parameter(p.detach().to(dtype)) for p in build().parameters()]
    for p in params:
        p.grad = torch.randn_like(p)
    return params


def grads_of(params: list[nn.Parameter]) -> list[Tensor]:
    return [p.grad for p in params if p.grad is not None]


def scaler_of_one(device: torch.device) -> torch.amp.GradScaler:
    """Return a scaler with scale 1 for good.

    Unscaling reads and writes all the same, and gradients do not shrink from call to call.
    """
    scaler = torch.amp.GradScaler(device.type, init_scale=1.0, growth_interval=1 << 30)
    scaler.scale(torch.ones((), device=device))
    return scaler


# the parts


def statistics(build: Build, device: torch.device) -> Work:
    lists = TensorLists(grads=grads_of(parameters(build, device, HALF)))
    return Work([lambda: grad_stats.grad_stats(lists, device)])


def unscale_and_norm(build: Build, device: torch.device) -> Work:
    grads = grads_of(parameters(build, device, HALF))
    found_inf, inv_scale = torch.zeros(1, device=device), torch.ones(1, device=device)

    def call() -> None:
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)
        torch.nn.utils.get_total_norm(grads)

    return Work([call])


def stepping(
    optimizer: Optimizer,
    dtype: torch.dtype,
    build: Build,
    device: torch.device,
) -> Work:
    """``optimizer.step()`` alone, of parameters in ``dtype``."""
    return Work([optimizer(parameters(build, device, dtype)).step])


def imported(module: str, name: str, **options: Any) -> Optimizer:
    """Return a peer's optimizer, whose package is imported where it is made."""
    return lambda params: getattr(importlib.import_module(module), name)(params, lr=LR, **options)


OUR_ADAMW = functools.partial(tritonamp.optim.AdamW, lr=LR)
FUSED_ADAMW = functools.partial(torch.optim.AdamW, lr=LR, fused=True)
OF_APEX = {"weight_decay": 1e-2, "capturable": True, "master_weights": True}
ADAMWS: dict[str, tuple[Optimizer, torch.dtype]] = {
    "tritonamp": (OUR_ADAMW, HALF),
    "fused AdamW": (FUSED_ADAMW, torch.float32),
    "apex": (imported("apex.optimizers", "FusedAdam", **OF_APEX), HALF),
    "optimi": (imported("optimi", "AdamW"), torch.bfloat16),
}
"""By peer, its AdamW and the dtype of the parameters that it steps on."""

OUR_SGD = functools.partial(tritonamp.optim.SGD, lr=LR, momentum=0.9)
TORCHS_SGD = functools.partial(torch.optim.SGD, lr=LR, momentum=0.9)

OUR_LION = functools.partial(tritonamp.optim.Lion, lr=LR)
OUR_LION_8BIT = functools.partial(tritonamp.optim.Lion, lr=LR, state="8bit")


def muon(kind: type[torch.optim.Optimizer], build: Build, device: torch.device) -> Work:
    """``optimizer.step()`` alone, of all matrices: ours half with masters, torch's FP32."""
    dtype = HALF if kind is tritonamp.optim.Muon else torch.float32
    matrices = [p for p in parameters(build, device, dtype) if p.dim() == 2]
    return Work([kind(matrices, lr=LR).step])  # type: ignore[call-arg]


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
    """Make the reading of ``amp.watch``, with the gradients in the place of activations."""
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


def our_step(build: Build, device: torch.device, skip_outliers: float | None = None) -> Work:
    with torch.device(device):
        model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    amp = tritonamp.enable(model, optimizer, level="O2", dtype=HALF, skip_outliers=skip_outliers)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    loss = torch.ones((), device=device)

    def call() -> None:
        with amp.scale_loss(loss):  # stands for the backward: the gradients are there
            pass
        amp.clip_grad_norm_(MAX_NORM)
        optimizer.step()

    return Work([call], amp.disable)


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
    optimizer, scaler = torch.optim.AdamW(masters, lr=LR, fused=True), scaler_of_one(device)

    def call() -> None:
        torch._foreach_copy_(grads, half_grads)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(masters, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        torch._foreach_copy_(halves, wide)

    return Work([call])


def standard_amp(build: Build, device: torch.device) -> Work:
    """Make the step of FP32 parameters and gradients, 54 B/param.

    Weight casts of the forward, unscale, clip, fused AdamW.
    """
    params = parameters(build, device, torch.float32)
    weights = [p.detach() for p in params if p.dim() > 1]
    optimizer, scaler = torch.optim.AdamW(params, lr=LR, fused=True), scaler_of_one(device)

    def call() -> None:
        for weight in weights:  # one by one, as autocast does
            weight.to(HALF)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()

    return Work([call])


def cases(toy: bool) -> list[Case]:
    found = []
    for name, builds in SETS.items():
        build = builds[toy]
        with torch.device("meta"):
            size = sum(p.numel() for p in build().parameters())
        rows: dict[
            str,
            tuple[float | None, dict[str, Callable[..., Work]], dict[str, float], tuple[str, ...]],
        ] = {
            "full step": (
                30,
                {"tritonamp": our_step, "half pipeline": half_pipeline, "torch.amp": standard_amp},
                {"tritonamp": 30, "half pipeline": 60, "torch.amp": 54},
                ("grad_stats", "decide", "adamw"),
            ),
            "full step without outliers": (
                30,
                {"tritonamp": functools.partial(our_step, skip_outliers=6.0)},
                {"tritonamp": 30},
                ("grad_stats", "outliers", "decide", "adamw"),
            ),
            "Muon": (  # products of matrices beside them: not a matter of bytes
                None,
                {
                    "tritonamp": functools.partial(muon, tritonamp.optim.Muon),
                    "eager": functools.partial(muon, torch.optim.Muon),
                },
                {},
                ("muon",),
            ),
            "optimizer": (
                28,
                {peer: functools.partial(stepping, *given) for peer, given in ADAMWS.items()},
                {"tritonamp": 28, "fused AdamW": 28},
                ("adamw",),
            ),
            "optimizer, state bf16": (
                20,
                {
                    "tritonamp": functools.partial(
                        stepping, functools.partial(OUR_ADAMW, state="bf16"), HALF
                    ),
                    "fused AdamW": functools.partial(stepping, FUSED_ADAMW, torch.float32),
                },
                {"tritonamp": 20, "fused AdamW": 28},
                ("adamw",),
            ),
            "optimizer, state 8bit": (  # bitsandbytes and torchao: FP32 parameters, 8-bit moments
                14,
                {
                    "tritonamp": functools.partial(
                        stepping, functools.partial(OUR_ADAMW, state="8bit"), HALF
                    ),
                    "fused AdamW": functools.partial(stepping, FUSED_ADAMW, torch.float32),
                    "bitsandbytes": functools.partial(
                        stepping, imported("bitsandbytes.optim", "AdamW8bit"), torch.float32
                    ),
                    "torchao": functools.partial(
                        stepping, imported("torchao.optim", "AdamW8bit"), torch.float32
                    ),
                },
                {"tritonamp": 14, "fused AdamW": 28, "bitsandbytes": 16},
                ("adamw_8bit",),
            ),
            "SGD with momentum": (
                20,
                {
                    "tritonamp": functools.partial(stepping, OUR_SGD, HALF),
                    "fused SGD": functools.partial(
                        stepping, functools.partial(TORCHS_SGD, fused=True), torch.float32
                    ),
                    "foreach SGD": functools.partial(
                        stepping, functools.partial(TORCHS_SGD, foreach=True), torch.float32
                    ),
                },
                {"tritonamp": 20, "fused SGD": 20},
                ("sgd",),
            ),
            "Lion": (
                20,
                {
                    "tritonamp": functools.partial(stepping, OUR_LION, HALF),
                    "optimi": functools.partial(
                        stepping, imported("optimi", "Lion"), torch.bfloat16
                    ),
                },
                {"tritonamp": 20},
                ("lion",),
            ),
            "Lion, state 8bit": (  # bitsandbytes: FP32 parameters, an 8-bit moment
                12,
                {
                    "tritonamp": functools.partial(stepping, OUR_LION_8BIT, HALF),
                    "bitsandbytes": functools.partial(
                        stepping, imported("bitsandbytes.optim", "Lion8bit"), torch.float32
                    ),
                },
                {"tritonamp": 12, "bitsandbytes": 14},
                ("lion_8bit",),
            ),
            "gradient statistics": (
                2,
                {"tritonamp": statistics, "eager": unscale_and_norm},
                {"tritonamp": 2, "eager": 6},
                ("grad_stats",),
            ),
            "weight cast": (
                6,
                {"tritonamp": our_cast, "eager": foreach_cast},
                {"tritonamp": 6, "eager": 6},
                ("cast",),
            ),
            "moving average": (
                12,
                {"tritonamp": our_average, "eager": foreach_average},
                {"tritonamp": 12, "eager": 12},
                ("ema",),
            ),
            "ranges": (
                2,
                {"tritonamp": our_ranges, "eager": eager_ranges},
                {"tritonamp": 2},
                ("ranges",),
            ),
        }
        for group, (least, peers, path, operations) in rows.items():
            made = {peer: functools.partial(make, build) for peer, make in peers.items()}
            quick = name == "GPT-2 124M" and group == "full step"
            found.append(
                Case(
                    group,
                    f"{group} {name}",
                    "float16",
                    name,
                    size,
                    least,
                    made,
                    path,
                    quick,
                    operations=operations,
                )
            )
    return found
