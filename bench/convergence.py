"""Does training end where it ends in FP32? O0, O1, O2 and torch.amp, with equal seeds.

    python bench/convergence.py            # minutes on a CPU; writes
                                           # bench/results/convergence-<device>.json
    python bench/convergence.py --quick    # few steps, writes nothing

Weights and batches are the same. Two models on real data: the digits CNN and the character
transformer of ``tritonamp.demo``, in float16.
"""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import provenance
import torch
from torch import Tensor

import tritonamp
from tritonamp.demo.compare import tasks
from tritonamp.demo.data import batches
from tritonamp.demo.measured import Task, evaluate
from tritonamp.demo.train import criterion

RESULTS = Path(__file__).parent / "results"
MODES = "O0", "O1", "O2", "torch.amp"
SEEDS = 0, 1, 2
STEPS = {"digits": 200, "chars": 150}
QUICK_STEPS = 4
LAST = 20  # steps that a final training loss is the mean of


def train(task: Task, mode: str, seed: int, steps: int, device: torch.device) -> dict[str, Any]:
    """One run: the mean training loss of the last steps, and the score on the test half."""
    torch.manual_seed(seed)
    model = task.build().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.lr)
    step, close = (
        _stock(model, optimizer, device) if mode == "torch.amp" else _ours(model, optimizer, mode)
    )
    losses = [
        step(x, y).detach() for x, y in batches(task.split, task.batch_size, steps, seed, device)
    ]
    with (
        torch.autocast(device.type, torch.float16)
        if mode == "torch.amp"
        else contextlib.nullcontext()
    ):
        score = evaluate(model, task, device)
    close()
    return {
        "task": task.name, "mode": mode, "seed": seed, "steps": steps,
        "loss": torch.stack(losses[-LAST:]).double().mean().item(), "score": score,
    }  # fmt: skip


Step = Callable[[Tensor, Tensor], Tensor]


def _ours(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, level: str
) -> tuple[Step, Callable[[], None]]:
    amp = tritonamp.enable(model, optimizer, level=level)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = criterion(model(x), y)
        amp.backward(loss)
        amp.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, amp.disable


def _stock(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> tuple[Step, Callable[[], None]]:
    scaler = torch.amp.GradScaler(device.type)

    def step(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.float16):
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss

    return step, lambda: None


def table(runs: list[dict[str, Any]]) -> str:
    """Return Markdown: mean, range in brackets, and the largest distance from O0 of one seed."""
    lines = [
        "| model | mode | final training loss | test score | largest difference to O0, same seed |",
        "|---|---|---|---|---|",
    ]
    for task in dict.fromkeys(run["task"] for run in runs):
        baseline = {
            run["seed"]: run["loss"] for run in runs if run["task"] == task and run["mode"] == "O0"
        }
        for mode in dict.fromkeys(run["mode"] for run in runs):
            own = [run for run in runs if run["task"] == task and run["mode"] == mode]
            apart = max(abs(run["loss"] - baseline[run["seed"]]) for run in own)
            distance = "" if mode == "O0" else f"{apart:.4f}"
            loss, score = (
                _spread([run["loss"] for run in own], 4),
                _spread([run["score"] for run in own], 3),
            )
            lines.append(f"| {task} | {mode} | {loss} | {score} | {distance} |")
    return "\n".join(lines)


def _spread(values: list[float], digits: int) -> str:
    return f"{mean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Final losses of O0, O1, O2 and torch.amp, three seeds."
    )
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK_STEPS} steps, one seed; writes nothing"
    )
    parser.add_argument(
        "--output", type=Path, help="default: bench/results/convergence-<device>.json"
    )
    args = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)

    start, runs = time.perf_counter(), []
    for task in tasks():
        for seed in SEEDS[:1] if args.quick else SEEDS:
            for mode in MODES:
                runs.append(
                    train(task, mode, seed, QUICK_STEPS if args.quick else STEPS[task.name], device)
                )
                print(
                    "{task} {mode} seed {seed}: loss {loss:.4f}, score {score:.3f}".format(
                        **runs[-1]
                    ),
                    flush=True,
                )
    print(table(runs))
    if not args.quick:
        path = args.output or RESULTS / f"convergence-{device.type}.json"
        record = provenance.machine(device) | {
            "command": "python bench/convergence.py",
            "seconds": round(time.perf_counter() - start),
            "dtype": "float16",
            "loss": f"mean of the last {LAST} steps",
        }
        path.write_text(json.dumps(record | {"runs": runs}, indent=1) + "\n")
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
