"""ResNet-50 on CIFAR-10 in FP32, torch.amp and apex's levels: time, memory and accuracy.

    python bench/articles.py                   # generated images; --data FOLDER: CIFAR-10
    python bench/articles.py --mode "apex O2"  # that mode alone, in this process
    python bench/articles.py --toy --lines /tmp/x.jsonl    # toy sizes on the CPU

FOLDER holds ``cifar-10-batches-py``, which torchvision checks and reads. Time and memory do not
depend on what the images show. Each mode runs in a process of its own, and appends a line of JSON
when it is done: numbers, or the reason for their absence. The last line of a mode counts. The exit
status is 1 if a mode was not measured. Without a GPU nothing is measured or written.
"""

import argparse
import functools
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import jsonl
import markdown
import models
import provenance
import torch
from epochs import MODES, Task, measure

RESULTS = Path(__file__).parent / "results"
NO_GPU = (
    "no GPU here, so nothing is measured: `python bench/articles.py --toy --lines /tmp/toy.jsonl` "
    "tries the script on the CPU"
)
NOT_MEASURED = "Not measured yet: `python bench/articles.py`"
HEAD = "mode", "s an epoch", "images a second", "peak MiB", "accuracy, %", "loss", "skipped"

Row = dict[str, Any]
REAL = Task(models.ResNet, 50_000, 10_000, 32, 256, 3)
TOY = Task(functools.partial(models.ResNet, (1, 1), 8), 512, 256, 8, 16, 4)


def measure_to_file(mode: str, task: Task, device: torch.device, path: Path, about: Row) -> None:
    """Measure one mode; append its numbers, or the reason of its failure."""
    if mode == "FP32":
        # for the whole process: torch's default is TF32
        torch.backends.cudnn.conv.fp32_precision = "ieee"
    try:
        found = measure(mode, task, device)
    except Exception as error:  # a mode can fail in any way; the others go on
        traceback.print_exc()
        found = {"reason": provenance.reason_of(error)}
    else:
        print(f"{mode}: {found['seconds_per_epoch']:.2f} s an epoch", flush=True)
    jsonl.append(path, {"mode": mode} | found | about)


def run_modes(arguments: list[str], seconds: float | None, path: Path, about: Row) -> None:
    """Measure every mode in a process of its own, and append its line when it ends.

    All lines carry the commit at the start, because the lines may change a committed file.
    """
    until = float("inf") if seconds is None else time.time() + seconds
    with tempfile.TemporaryDirectory() as folder:
        for mode in MODES:
            written = Path(folder) / provenance.slug(mode)
            reason = run_process([*arguments, "--mode", mode, "--lines", str(written)], until)
            (row,) = jsonl.read(written) or [{"mode": mode, "reason": reason}]
            jsonl.append(path, row | about)


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
    for row in jsonl.read(path):
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
    if device.type == "cpu" and not args.toy:
        parser().error("expected --toy with --device cpu: a CPU measures nothing")
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
    before = len(jsonl.read(path))
    run_modes(given, args.seconds, path, about)
    print(tables(path), path, sep="\n\n")
    return int(any("reason" in row for row in jsonl.read(path)[before:]))


if __name__ == "__main__":
    sys.exit(main())
