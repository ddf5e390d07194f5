"""``optimizer.step()`` alone, in each format of state and by each peer.

Bytes are those that ``step_bytes`` has for the update alone.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import steps
import torch
from case import Case
from steps import FUSED_ADAMW, HALF, LR, Build, Group, Maker, parameters
from timing import Work
from torch import nn

import tritonamp

BF16 = torch.bfloat16
Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def stepping(
    optimizer: Optimizer,
    dtype: torch.dtype,
    build: Build,
    device: torch.device,
) -> Work:
    """Make ``optimizer.step()`` alone, on parameters in ``dtype``."""
    return Work([optimizer(parameters(build, device, dtype)).step])


def imported(module: str, name: str, **options: Any) -> Optimizer:
    """Return a function that imports a peer's optimizer and makes it for parameters."""
    return lambda params: getattr(importlib.import_module(module), name)(params, lr=LR, **options)


OF_APEX = {"weight_decay": 1e-2, "capturable": True, "master_weights": True}
ADAMWS: dict[str, tuple[Optimizer, torch.dtype]] = {
    "tritonamp": (functools.partial(tritonamp.optim.AdamW, lr=LR), HALF),
    "fused AdamW": (FUSED_ADAMW, torch.float32),
    "apex": (imported("apex.optimizers", "FusedAdam", **OF_APEX), HALF),
    "optimi": (imported("optimi", "AdamW"), BF16),
}
"""By peer, its AdamW and the dtype of its parameters."""


def our_stepper(name: str, **options: Any) -> Maker:
    """Make the step of an optimizer of ``tritonamp.optim``, on half parameters."""
    optimizer = functools.partial(getattr(tritonamp.optim, name), lr=LR, **options)
    return functools.partial(stepping, optimizer, HALF)


def stepper(optimizer: Optimizer, dtype: torch.dtype = torch.float32) -> Maker:
    return functools.partial(stepping, optimizer, dtype)


def torchs_sgd(**options: Any) -> Maker:
    return stepper(functools.partial(torch.optim.SGD, lr=LR, momentum=0.9, **options))


def flash(name: str, **options: Any) -> Maker:
    """Make the step of an optimizer of FlashOptim, with masters as exact as ours."""
    return stepper(imported("flashoptim", name, master_weight_bits=32, **options), BF16)


def muon(kind: type[torch.optim.Optimizer], build: Build, device: torch.device) -> Work:
    """Make ``optimizer.step()`` alone, on all matrices: ours half with masters, torch's FP32."""
    dtype = HALF if kind is tritonamp.optim.Muon else torch.float32
    matrices = [p for p in parameters(build, device, dtype) if p.dim() == 2]
    return Work([kind(matrices, lr=LR).step])  # type: ignore[call-arg]


TORCHS = stepper(FUSED_ADAMW), 28.0
GROUPS = [
    Group(
        "optimizer",
        {
            "tritonamp": (stepper(*ADAMWS["tritonamp"]), 28),
            "fused AdamW": TORCHS,
            "apex": (stepper(*ADAMWS["apex"]), 30),
        },
        ("adamw",),
    ),
    Group(
        "optimizer, masters packed",
        {"tritonamp": (our_stepper("AdamW", masters="packed"), 26), "fused AdamW": TORCHS},
        ("adamw",),
    ),
    Group(
        "optimizer, state bf16",
        {"tritonamp": (our_stepper("AdamW", state="bf16"), 20), "fused AdamW": TORCHS},
        ("adamw",),
    ),
    Group(  # optimi: bfloat16 parameters and state, no masters
        "optimizer, state bf16, masters packed",
        {
            "tritonamp": (our_stepper("AdamW", state="bf16", masters="packed"), 18),
            "fused AdamW": TORCHS,
            "optimi": (stepper(*ADAMWS["optimi"]), 18),
        },
        ("adamw",),
    ),
    Group(  # bitsandbytes and torchao: FP32 parameters, 8-bit moments
        "optimizer, state 8bit",
        {
            "tritonamp": (our_stepper("AdamW", state="8bit"), 14),
            "fused AdamW": TORCHS,
            "FlashOptim": (flash("FlashAdamW"), 14.25),
            "bitsandbytes": (stepper(imported("bitsandbytes.optim", "AdamW8bit")), 16),
            "torchao": (stepper(imported("torchao.optim", "AdamW8bit")), None),
        },
        ("adamw",),
    ),
    Group(
        "Lion",
        {"tritonamp": (our_stepper("Lion"), 20), "fused AdamW": TORCHS},
        ("lion",),
    ),
    Group(  # optimi: bfloat16 parameters and state, no masters
        "Lion, state bf16, masters packed",
        {
            "tritonamp": (our_stepper("Lion", state="bf16", masters="packed"), 14),
            "fused AdamW": TORCHS,
            "optimi": (stepper(imported("optimi", "Lion"), BF16), 14),
        },
        ("lion",),
    ),
    Group(  # bitsandbytes: FP32 parameters, an 8-bit moment
        "Lion, state 8bit",
        {
            "tritonamp": (our_stepper("Lion", state="8bit"), 12),
            "fused AdamW": TORCHS,
            "FlashOptim": (flash("FlashLion"), 12.125),
            "bitsandbytes": (stepper(imported("bitsandbytes.optim", "Lion8bit")), 14),
        },
        ("lion",),
    ),
    Group(
        "SGD with momentum",
        {
            "tritonamp": (our_stepper("SGD", momentum=0.9), 20),
            "fused SGD": (torchs_sgd(fused=True), 20),
            "foreach SGD": (torchs_sgd(foreach=True), None),
            "fused AdamW": TORCHS,
        },
        ("sgd",),
    ),
    Group(
        "SGD with momentum, state 8bit",
        {
            "tritonamp": (our_stepper("SGD", momentum=0.9, state="8bit"), 12),
            "fused SGD": (torchs_sgd(fused=True), 20),
            "FlashOptim": (flash("FlashSGD", momentum=0.9), 12.125),
            "fused AdamW": TORCHS,
        },
        ("sgd",),
    ),
    Group(  # products of matrices in addition: not a matter of bytes
        "Muon",
        {
            "tritonamp": (functools.partial(muon, tritonamp.optim.Muon), None),
            "eager": (functools.partial(muon, torch.optim.Muon), None),
        },
        ("muon",),
    ),
]


def cases(toy: bool) -> list[Case]:
    return steps.cases(toy, GROUPS)
