"""Training of every model at every level: one table, one picture."""

import argparse
import time
from collections.abc import Iterator

import torch

import tritonamp
from tritonamp.commands.table import table
from tritonamp.demo import LEVELS, data
from tritonamp.demo.device import chosen_device, describe
from tritonamp.demo.measured import Run, Task, measured
from tritonamp.demo.models import CharTransformer, DigitNet
from tritonamp.demo.picture import save_picture
from tritonamp.demo.train import criterion

SMALL = "bf16", "8bit"
WARM_UP_STEPS = 2  # compile kernels and start thread pools before the clock runs


def compare(args: argparse.Namespace) -> None:
    start = time.perf_counter()
    device = chosen_device(args.device)
    print(f"training in {args.dtype} on {describe(device)}, seed {args.seed}")
    runs = [run for task in tasks() for run in _train_levels(task, args, device)]

    rows = [_row(run) for run in runs]
    print(table([*rows[0]], [[*row.values()] for row in rows]))
    print("seconds: the training loop alone.")
    small = ", ".join(f"{_bytes('O2', state):.3g} with state={state!r}" for state in SMALL)
    print(f"B/param: bytes of a parameter, its gradient, master and moments; for O2 {small}.")
    if device.type == "cpu":
        print(
            "A CPU computes half in FP32 and rounds it. Read the results; the seconds say nothing "
            "about a GPU."
        )
    for run in runs:
        if run.stats["skipped"]:
            print(f"{run.task.name} {run.level}: {run.explanation}")
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
        score=data.percent_right,
        shown_as="accuracy {:.2f} %",
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


def _train_levels(task: Task, args: argparse.Namespace, device: torch.device) -> Iterator[Run]:
    steps = args.steps or task.steps
    dtype = getattr(torch, args.dtype)
    settings = {"dtype": dtype, "device": device, "seed": args.seed}
    for level in args.level or LEVELS:
        measured(task, level, steps=WARM_UP_STEPS, quiet=True, **settings)
        yield measured(task, level, steps=steps, quiet=args.quiet, **settings)


def _row(run: Run) -> dict[str, str]:
    return {
        "model": run.task.name,
        "level": run.level,
        "result": run.shown_score,
        "seconds": f"{run.seconds:.1f}",
        "B/param": f"{_bytes(run.level):.3g}",
        "steps": str(run.stats["steps"]),
        "skipped": str(run.stats["skipped"]),
        "final scale": f"{run.stats['scale']:g}",
        "backend": run.stats["backend"],
    }


def _bytes(level: str, state: str = "fp32") -> float:
    policy: tritonamp.Policy = getattr(tritonamp, level)
    return policy.bytes_per_parameter(state)
