"""ResNet-50 on CIFAR-10 in FP32, torch.amp and apex's levels: time, memory and accuracy.

    python bench/articles.py                   # generated images; --data FOLDER: CIFAR-10
    python bench/articles.py --mode "apex O2"  # that mode alone, in this process
    python bench/articles.py --toy --lines /tmp/x.jsonl    # toy sizes on the CPU

FOLDER holds ``cifar-10-batches-py``, which torchvision checks and reads. Time and memory do not
depend on what the images show. Each mode runs in a process of its own, and appends a line of JSON
when it is done: numbers, or the reason why there are none. Of several lines of a mode the last
counts. The exit status is 1 if a mode was not measured. Without a GPU nothing is measured or
written.
"""

import argparse
import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import images
import markdown
import models
import provenance
import torch
from images import Images
from timing import now
from torch import Tensor, nn
from training import (
    Step,
    apex_training_step,
    criterion,
    our_training_step,
    torchs_training_step,
)

import tritonamp
from tritonamp.apex import amp as apex_amp

RESULTS = Path(__file__).parent / "results"
MODES = "FP32", "TF32", "torch.amp", "apex O1", "apex O2", "tritonamp O2"
SEED = 0
LR, MOMENTUM, WEIGHT_DECAY = 0.1, 0.9, 5e-4  # the highest of a one-cycle schedule
NO_GPU = "no GPU here, so nothing is measured: --toy tries the script on the CPU"
NOT_MEASURED = "Not measured yet: `python bench/articles.py`"
HEAD = "mode", "s an epoch", "images a second", "peak MiB", "accuracy, %", "loss", "skipped"

Row = dict[str, Any]
Batches = Iterable[tuple[Tensor, Tensor]]


class Task(NamedTuple):
    """What every mode trains.

    Attributes:
        build: maker of the model.
        train: number of generated images to train on.
        test: number of generated images to test on.
        size: pixels along a side of generated images.
        batch: images in a step.
        epochs: epochs of a mode; the first is timed apart.
        data: folder of CIFAR-10; None: images are generated.
    """

    build: Callable[[], nn.Module]
    train: int
    test: int
    size: int
    batch: int
    epochs: int
    data: Path | None = None

    def images(self, device: torch.device) -> Images:
        if self.data:
            return images.cifar10(self.data, device)
        return images.generated(self.train, self.test, self.size, device)


REAL = Task(models.ResNet, 50_000, 10_000, 32, 256, 3)
TOY = Task(functools.partial(models.ResNet, (1, 1), 8), 512, 256, 8, 16, 4)


class Trainer(NamedTuple):
    """How a mode trains and evaluates a model.

    Attributes:
        step: a training step.
        forward: the forward of an evaluation.
        close: undoes ``enable``.
    """

    step: Step
    forward: Callable[[Tensor], Tensor]
    close: Callable[[], None] = lambda: None


def trainer(mode: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Trainer:
    library, _, level = mode.partition(" ")
    if library == "apex":
        apex_amp.initialize(model, optimizer, opt_level=level)
        return Trainer(apex_training_step(optimizer, model), model)
    if library == "tritonamp":
        amp = tritonamp.enable(model, optimizer, level=level)
        step = our_training_step(amp, optimizer, lambda x, y: criterion(model(x), y))
        return Trainer(step, model, amp.disable)
    params, half = list(model.parameters()), mode == "torch.amp"

    def forward(x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.float16, enabled=half):
            return model(x)

    return Trainer(torchs_training_step(params, optimizer, model, half), forward)


def train_epoch(step: Step, schedule: Any, batches: Batches) -> tuple[Tensor, Tensor]:
    """Take a step for each batch, without waiting for the device.

    Returns:
        mean loss, and number of steps whose gradients were not finite, on the device. Steps with a
        loss scale skip then.
    """
    losses, overflows = [], []
    for x, y in batches:
        loss, norm = step(x, y)
        schedule.step()
        losses.append(loss.detach())
        overflows.append(~norm.isfinite())
    return torch.stack(losses).float().mean(), torch.stack(overflows).sum()


@torch.no_grad()
def accuracy(model: nn.Module, forward: Callable[[Tensor], Tensor], batches: Batches) -> float:
    """Return the share of right answers in percent."""
    model.eval()
    right = [forward(x).argmax(-1) == y for x, y in batches]
    return 100 * torch.cat(right).float().mean().item()


def measure(mode: str, task: Task, device: torch.device) -> Row:
    """Train in one mode; return what it took and where it ended."""
    torch.manual_seed(SEED)
    model = task.build().to(device)  # made on the CPU: equal weights on every device
    data = task.images(device)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY, fused=True
    )
    step, forward, close = trainer(mode, model, optimizer)
    steps = len(data.padded) // task.batch
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LR, task.epochs * steps, cycle_momentum=False
    )
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds, losses, overflows = [], [], []
    for _ in range(task.epochs):
        start = now(device)
        loss, overflow = train_epoch(step, schedule, data.epoch(task.batch))
        seconds.append(now(device) - start)
        losses.append(loss.item())
        overflows.append(overflow.item())
    peak = torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else None
    typical = median(seconds[1:] or seconds)
    found = {
        "seconds_per_epoch": typical, "first_epoch_seconds": seconds[0],
        "images_per_second": steps * task.batch / typical, "peak_mib": peak,
        "accuracy": accuracy(model, forward, data.tests(task.batch)),
        "final_loss": losses[-1], "losses": losses, "skipped": sum(overflows),
        "images": len(data.padded), "test_images": len(data.test),
    }  # fmt: skip
    close()
    return found


def read(path: Path) -> list[Row]:
    return list(map(json.loads, path.read_text().splitlines())) if path.exists() else []


def append(path: Path, row: Row) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as lines:
        print(json.dumps(row), file=lines)


def measure_to_file(mode: str, task: Task, device: torch.device, path: Path, about: Row) -> None:
    """Append what one mode took, or the reason why it failed."""
    if mode == "FP32":
        # for the whole process: torch's default is TF32
        torch.backends.cudnn.conv.fp32_precision = "ieee"
    try:
        found = measure(mode, task, device)
    except Exception as error:  # a mode can fail in any way; the others go on
        found = {"reason": provenance.reason_of(error)}
    append(path, {"mode": mode} | found | about)


def run_modes(arguments: list[str], seconds: float | None, path: Path, about: Row) -> None:
    """Measure every mode in a process of its own; append lines for those that write none."""
    until = float("inf") if seconds is None else time.time() + seconds
    for mode in MODES:
        reason = run_process([*arguments, "--mode", mode, "--lines", str(path)], until)
        if reason:
            append(path, {"mode": mode, "reason": reason} | about)


def run_process(arguments: list[str], until: float) -> str | None:
    """Run this script in a process; return why it ended early, or None."""
    left = until - time.time()
    if left <= 0:
        return "out of time"
    command = [sys.executable, __file__, *arguments]
    timeout = None if left == float("inf") else left
    try:
        status = subprocess.run(command, timeout=timeout, check=False).returncode
    except subprocess.TimeoutExpired:
        return "out of time"
    return f"its process ended early: exit status {status}" if status else None


def tables(path: Path) -> str:
    """Return the tables of a file of lines: one for each machine and setup."""
    found: dict[str, dict[str, Row]] = {}
    for row in read(path):
        found.setdefault(_about(row), {})[row["mode"]] = row
    parts = []
    for about, by_mode in found.items():
        rows = [by_mode[mode] for mode in MODES if mode in by_mode]
        absent = [f"{row['mode']}: {row['reason']}" for row in rows if "reason" in row]
        shown = markdown.table(HEAD, (_cells(row) for row in rows if "reason" not in row))
        text = about + (f" Not measured: {'; '.join(absent)}." if absent else "")
        parts += [shown, markdown.paragraph(text)]
    return "\n\n".join(parts)


def _cells(row: Row) -> tuple[str, ...]:
    peak = "" if row["peak_mib"] is None else f"{row['peak_mib']:.0f}"
    return (
        row["mode"], f"{row['seconds_per_epoch']:.2f}", f"{row['images_per_second']:.0f}", peak,
        f"{row['accuracy']:.2f}", f"{row['final_loss']:.4f}", str(row["skipped"]),
    )  # fmt: skip


def _about(row: Row) -> str:
    return (
        f"{row['data']} images, batch {row['batch']}, {row['epochs']} epochs, on {row['device']}, "
        f"torch {row['torch']}, Triton {row['triton']}, commit {row['commit']}, `{row['command']}`."
    )


def results(folder: Path) -> str:
    """Return the Markdown of all files of lines in a folder."""
    found = [tables(path) for path in sorted(folder.glob("articles-*.jsonl"))]
    return "\n\n".join(found) or NOT_MEASURED


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description="ResNet-50 on CIFAR-10, in every mode.")
    made.add_argument("--data", type=Path, help="folder of cifar-10-batches-py, for torchvision")
    made.add_argument("--epochs", type=int, help=f"default: {REAL.epochs}")
    made.add_argument("--batch", type=int, help=f"images in a step, default: {REAL.batch}")
    made.add_argument("--seconds", type=float, help="limit of all modes together, default: none")
    made.add_argument("--lines", type=Path, help="file to append to (default: in bench/results)")
    made.add_argument("--mode", choices=MODES, help="measure it alone, in this process")
    made.add_argument("--device", type=torch.device, help="default: cuda; with --toy cpu")
    made.add_argument("--toy", action="store_true", help="toy sizes, needs --lines")
    return made


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    args = parser().parse_args(given)
    device = args.device or torch.device("cpu" if args.toy else "cuda")
    if args.toy and args.lines is None:
        parser().error("expected --lines with --toy: bench/results/ is for measurements")
    if device.type == "cuda" and not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 2
    task = (TOY if args.toy else REAL)._replace(data=args.data)
    task = task._replace(batch=args.batch or task.batch, epochs=args.epochs or task.epochs)
    about = provenance.machine(device) | {
        "data": "CIFAR-10" if task.data else "generated", "batch": task.batch,
        "epochs": task.epochs, "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python bench/articles.py", *["--toy"] * args.toy]),
    }  # fmt: skip
    name = provenance.slug(f"articles-{about['device']}-{about['data']}")
    path = args.lines or RESULTS / f"{name}.jsonl"
    if args.mode:
        measure_to_file(args.mode, task, device, path, about)
        return 0
    before = len(read(path))
    run_modes(given, args.seconds, path, about)
    print(tables(path), path, sep="\n\n")
    return int(any("reason" in row for row in read(path)[before:]))


if __name__ == "__main__":
    sys.exit(main())
