"""Training of every model at every level: one table, one picture."""

import argparse
import time

import torch

import tritonamp
from tritonamp.demo import LEVELS, data
from tritonamp.demo.device import chosen_device, describe
from tritonamp.demo.measured import Run, Setting, Task, measured
from tritonamp.demo.models import CharTransformer, DigitNet
from tritonamp.demo.picture import save_picture
from tritonamp.demo.train import criterion
from tritonamp.diagnosis.terminal import table


def compare(args: argparse.Namespace) -> None:
    start = time.perf_counter()
    setting = Setting(chosen_device(args.device), args.seed, args.steps)
    print(f"training in {args.dtype} on {describe(setting.device)}, seed {args.seed}")
    dtype = getattr(torch, args.dtype)
    runs = [
        measured(task, setting, level=level, dtype=dtype)
        for task in tasks()
        for level in args.level or LEVELS
    ]

    rows = [_row(run) for run in runs]
    print(table([*rows[0]], [[*row.values()] for row in rows]))
    print("B/param: bytes of a parameter, its gradient, master and moments.")
    for run in runs:
        if run.stats["skipped"]:
            print(f"{run.task.name} {run.name}: {run.explanation}")
    save_picture(runs, args.output)
    print(f"picture: {args.output}   total: {time.perf_counter() - start:.0f} s")


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
