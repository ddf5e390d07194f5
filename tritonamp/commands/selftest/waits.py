"""Checks that the host does not wait for the GPU, for levels, optimizers and options."""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tritonamp
from tritonamp.commands.selftest.check import Check, Found, require
from tritonamp.commands.selftest.training import (
    LEVELS,
    SmallTraining,
    level_name,
    refusals_are_not_here,
)

FIRST, STEPS = 3, 5  # number of first steps, which may wait, and of later steps, which must not
MAX_NORM = 1.0
Parameters = Iterable[Tensor]


class Loop(NamedTuple):
    """A training loop.

    Attributes:
        level, dtype: arguments of ``enable``.
        optimizer: function from the model's parameters to the optimizer.
        options: further arguments of ``enable``.
    """

    level: str
    dtype: torch.dtype
    optimizer: Callable[[Parameters], torch.optim.Optimizer]
    options: dict[str, Any]


def _adamw(params: Parameters, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, **options)


OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "fused AdamW": functools.partial(_adamw, fused=True),
    "Adam": functools.partial(torch.optim.Adam, lr=1e-3),
    "SGD": functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "AdamW state=8bit": functools.partial(tritonamp.optim.AdamW, lr=1e-3, state="8bit"),
    "AdamW state=bf16": functools.partial(tritonamp.optim.AdamW, lr=1e-3, state="bf16"),
    "Lion": functools.partial(tritonamp.optim.Lion, lr=1e-4),
    "Lion state=8bit": functools.partial(tritonamp.optim.Lion, lr=1e-4, state="8bit"),
    "Muon": lambda params: tritonamp.optim.Muon([p for p in params if p.dim() == 2], lr=1e-3),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "skip_outliers": {"skip_outliers": 6.0},
    "offload": {"offload": "state"},
    "grad_dtype float32": {"grad_dtype": torch.float32},
    "static loss scale": {"loss_scale": 128.0},
    "softmax_dtype float32": {"softmax_dtype": torch.float32},
}


def loops() -> dict[str, Loop]:
    """Return the loops by name."""
    half = torch.float16
    found = {level_name(level, dtype): Loop(level, dtype, _adamw, {}) for level, dtype in LEVELS}
    found |= {f"O2 {name}": Loop("O2", half, make, {}) for name, make in OPTIMIZERS.items()}
    return found | {
        f"O2 {name}": Loop("O2", half, _adamw, options) for name, options in OPTIONS.items()
    }


def checks(device: torch.device, backend: str) -> Iterator[Check]:
    """Yield a check of each loop on a GPU; none on a CPU, for which the host never waits."""
    if device.type != "cuda":
        return
    for name, loop in loops().items():
        yield Check(name, functools.partial(_train, loop, device, backend))


def _train(loop: Loop, device: torch.device, backend: str) -> Found:
    """Train with an error from torch if a step waits.

    torch notices most waits, but not ``torch.cuda.synchronize`` and ``Event.synchronize``.
    """
    run = SmallTraining(device)
    run.optimizer = loop.optimizer(run.model.parameters())
    with refusals_are_not_here():
        amp = tritonamp.enable(
            run.model, run.optimizer, level=loop.level, dtype=loop.dtype, backend=backend,
            **loop.options,
        )  # fmt: skip
    with amp as run.amp:
        first = float(run.step(MAX_NORM))
        for i in range(1, FIRST + STEPS):
            with waits_raise() if i >= FIRST else contextlib.nullcontext():
                loss = run.step(MAX_NORM)
                amp.metrics()
        last, skipped = float(loss), amp.stats()["skipped"]
    require(last < first, f"the loss does not fall: {first:.3f} to {last:.3f}, {skipped} skipped")
    return Found(f"{STEPS} steps, loss {first:.3f} to {last:.3f}, {skipped} skipped")


@contextlib.contextmanager
def waits_raise() -> Iterator[None]:
    """Let torch raise if an operation inside the block makes the host wait for the GPU."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says once that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
