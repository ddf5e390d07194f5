"""Training of every model at every level: one table."""

import time
from collections.abc import Sequence

import torch

import tritonamp
from tritonamp.demo import data
from tritonamp.demo.device import describe
from tritonamp.demo.measured import Run, Setting, Task, measured
from tritonamp.demo.models import CharTransformer, DigitNet
from tritonamp.demo.train import criterion
from tritonamp.diagnosis.terminal import fitted, in_seconds, table

SECONDS = 0.02  # of a step on a CPU core, measured


def compare(setting: Setting, levels: Sequence[str], dtype: str) -> None:
    """Train, and print the table."""
    start = time.perf_counter()
    trainings = [(task, level) for task in tasks() for level in levels]
    steps = sum(setting.steps or task.steps for task, _ in trainings)
    print(
        fitted(
            f"training in {dtype} on {describe(setting.device)}, seed {setting.seed}; "
            f"{len(trainings)} runs take about {in_seconds(SECONDS * steps)} on a CPU core"
        )
    )
    runs = [
        measured(task, setting, level=level, dtype=getattr(torch, dtype))
        for task, level in trainings
    ]

    rows = [_row(run) for run in runs]
    print(table([*rows[0]], [[*row.values()] for row in rows]))
    print(fitted("B/param: bytes of a parameter, its gradient, master and moments."))
    for run in runs:
        if run.stats["skipped"]:
            print(fitted(f"{run.task.name} {run.name}: {run.explanation}"))
    print(f"levels: {time.perf_counter() - start:.0f} s\n")


def tasks() -> list[Task]:
    windows, vocabulary = data.characters()
    digits = Task(
        name="digits",
        title="digits: convolutions and BatchNorm",
        build=DigitNet,
        split=data.digits(),
        batch_size=64,
        lr=3e-3,
        steps=300,
    )
    chars = Task(
        name="chars",
        title="chars: transformer on Python's documentation",
        build=lambda: CharTransformer(vocabulary, data.CONTEXT),
        split=windows,
        batch_size=16,
        lr=6e-3,
        steps=300,
        score=criterion,
        shown_as="val. loss {:.3f}",
    )
    return [digits, chars]


def _row(run: Run) -> dict[str, str]:
    return {
        "model": run.task.name,
        "level": run.name,
        "result": run.shown_score,
        "B/param": f"{getattr(tritonamp, run.name).bytes_per_parameter():.3g}",
        "steps": str(run.stats["steps"]),
        "skipped": str(run.stats["skipped"]),
        "final scale": f"{run.stats['scale']:g}",
        "backend": run.stats["backend"],
    }
