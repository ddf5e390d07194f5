"""Final losses of levels and states compared with FP32 (O0), with equal weights and batches.

    python bench/convergence.py            # levels: O0, O1, O2 and torch.amp, in float16
    python bench/convergence.py state      # formats of optimizer state, both half types
    python bench/convergence.py drift      # formats of optimizer state, 2,000 steps of one seed
    python bench/convergence.py --quick    # few steps, writes nothing; --jobs 4: in processes

Each takes minutes on a CPU and writes bench/results/convergence-<study>-<device>.json. The models
are the digits CNN and the character transformer of ``tritonamp.demo``, and GPT-2 with four layers.
The data are real.
"""

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import markdown
import models
import provenance
import torch
from training import our_training_step, torchs_training_step

import tritonamp
from tritonamp.demo import compare, data
from tritonamp.demo.data import batches
from tritonamp.demo.measured import Task, evaluate
from tritonamp.demo.train import criterion
from tritonamp.names import short
from tritonamp.policy import HALF_DTYPES, STATES

RESULTS = Path(__file__).parent / "results"
QUICK_STEPS = 4
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAST = 20  # steps that a training loss is the mean of


class Mode(NamedTuple):
    """The precision of a run; ``level`` is a level of tritonamp, or "torch.amp"."""

    level: str
    dtype: torch.dtype = torch.float16
    state: str = "fp32"


@dataclass(frozen=True)
class Study:
    """Runs to compare: ``steps`` of each task, in each mode, from each seed.

    Attributes:
        every: number of steps between recorded training losses; 0 records the final one only.
    """

    modes: dict[str, Mode]
    steps: dict[str, int]
    seeds: tuple[int, ...] = (0, 1, 2)
    every: int = 0

    def dtypes(self) -> list[str]:
        return list(dict.fromkeys(short(mode.dtype) for mode in self.modes.values()))

    def runs(self) -> list[tuple[str, str, int]]:
        """Return task, mode and seed of every run."""
        return [
            (task, mode, seed) for task in self.steps for seed in self.seeds for mode in self.modes
        ]


def _beside_fp32(dtypes: tuple[torch.dtype, ...], states: tuple[str, ...]) -> dict[str, Mode]:
    """Return O0, and O2 in each half type with each format of optimizer state."""
    return {"O0": Mode("O0")} | {
        f"O2 {short(dtype)} {state}": Mode("O2", dtype, state)
        for dtype in dtypes
        for state in states
    }


STUDIES = {
    "levels": Study(
        {level: Mode(level) for level in ("O0", "O1", "O2", "torch.amp")},
        {"digits": 200, "chars": 150},
    ),
    "state": Study(
        _beside_fp32(HALF_DTYPES, STATES),
        {"digits": 200, "chars": 150, "GPT": 100},
    ),
    "drift": Study(_beside_fp32((torch.float16,), STATES), {"chars": 2000}, (0,), every=200),
}


@cache  # a job of a pool asks again for every run
def tasks() -> dict[str, Task]:
    """Return the demo's tasks and a GPT-2 of four layers on the characters, by name."""
    digits, chars = compare.tasks()
    _, vocabulary = data.characters()
    gpt = replace(
        chars,
        name="GPT",
        build=lambda: models.GPT(True, vocabulary, data.CONTEXT, width=64, layers=4, heads=4),
        batch_size=8,
        lr=3e-3,
    )
    return {task.name: task for task in (digits, chars, gpt)}


def train(
    task: Task, mode: Mode, seed: int, steps: int, device: torch.device, every: int = 0
) -> dict[str, Any]:
    """Train, and return the mean training loss of the last steps and the score on the test half.

    With ``every``, "losses" also has pairs of a step and the mean of up to ``LAST`` training losses
    before it, for each ``every``-th step.
    """
    torch.manual_seed(seed)
    model = task.build().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.lr)
    amp = None
    if mode.level == "torch.amp":
        step = torchs_training_step(list(model.parameters()), optimizer, model)
    else:
        options = {} if mode.level == "O0" else {"dtype": mode.dtype, "state": mode.state}
        amp = tritonamp.enable(model, optimizer, level=mode.level, **options)
        step = our_training_step(amp, optimizer, lambda x, y: criterion(model(x), y))
    losses = torch.stack(
        [
            step(x, y).loss.detach()
            for x, y in batches(task.split, task.batch_size, steps, seed, device)
        ]
    ).double()
    stock = torch.autocast(device.type, torch.float16)
    with stock if amp is None else contextlib.nullcontext():
        score = evaluate(model, task, device)
    if amp is not None:
        amp.disable()
    run: dict[str, Any] = {"loss": losses[-LAST:].mean().item(), "score": score}
    if every:
        ends = range(every, steps + 1, every)
        run["losses"] = [[end, losses[max(0, end - LAST) : end].mean().item()] for end in ends]
    return run


def text(runs: list[dict[str, Any]]) -> str:
    """Return a study's result: ``curves`` if its runs recorded losses, else a ``table``."""
    return curves(runs) if "losses" in runs[0] else table(runs)


def table(runs: list[dict[str, Any]]) -> str:
    """Return a table: mean and range of the seeds, and the largest difference from O0 at one seed.

    The number in brackets is that difference divided by O0's range; it is bold above 1.
    """
    head = (
        "model", "mode", "final training loss", "test score",
        "loss: largest difference to O0, same seed (over O0's range)", "test score: the same",
    )  # fmt: skip
    rows = []
    for task in dict.fromkeys(run["task"] for run in runs):
        of_task = [run for run in runs if run["task"] == task]
        baseline = [run for run in of_task if run["mode"] == "O0"]
        for mode in dict.fromkeys(run["mode"] for run in of_task):
            own = [run for run in of_task if run["mode"] == mode]
            columns = [("loss", 4), ("score", 3)]
            cells = [_spread([run[key] for run in own], digits) for key, digits in columns]
            cells += [
                "" if mode == "O0" else _distance(own, baseline, key, digits)
                for key, digits in columns
            ]
            rows.append((task, mode, *cells))
    return markdown.table(head, rows)


def curves(runs: list[dict[str, Any]]) -> str:
    """Return a table of the training losses of each mode during one run."""
    rows = [
        (str(row[0][0]), *(f"{loss:.4f}" for _, loss in row))
        for row in zip(*(run["losses"] for run in runs), strict=True)
    ]
    rows.append(("test", *(f"{run['score']:.3f}" for run in runs)))
    return markdown.table(("step", *(run["mode"] for run in runs)), rows)


def _spread(values: list[float], digits: int) -> str:
    return f"{mean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def _distance(
    own: list[dict[str, Any]], baseline: list[dict[str, Any]], key: str, digits: int
) -> str:
    of_seed = {run["seed"]: run[key] for run in baseline}
    apart = max(abs(run[key] - of_seed[run["seed"]]) for run in own)
    wide = max(of_seed.values()) - min(of_seed.values())
    cell = f"{apart:.{digits}f} ({apart / wide:.2f})" if wide else f"{apart:.{digits}f}"
    return f"**{cell}**" if len(of_seed) > 1 and apart > wide else cell


def _trained(study: str, quick: bool, jobs: int) -> Iterator[dict[str, Any]]:
    """Train every run of a study; with ``quick``, a few steps of one seed."""
    seeds = STUDIES[study].seeds[: 1 if quick else None]
    runs = [run for run in STUDIES[study].runs() if run[2] in seeds]
    train_one = partial(_trained_run, study, quick)
    if jobs == 1:
        yield from map(train_one, runs)
        return
    with ProcessPoolExecutor(jobs, torch.multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(train_one, runs)


def _trained_run(name: str, quick: bool, run: tuple[str, str, int]) -> dict[str, Any]:
    torch.set_num_threads(1)  # of this process, which may be one of a pool
    study, (task, mode, seed) = STUDIES[name], run
    steps = QUICK_STEPS if quick else study.steps[task]
    found = train(tasks()[task], study.modes[mode], seed, steps, DEVICE, study.every)
    return {"task": task, "mode": mode, "seed": seed, "steps": steps} | found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Final losses compared with those of FP32.")
    parser.add_argument("study", nargs="?", choices=STUDIES, default="levels")
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK_STEPS} steps, one seed; writes nothing"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="processes; the losses do not depend on it"
    )
    args = parser.parse_args(arguments)
    record = provenance.machine(DEVICE)  # the commit that runs, not the one checked out afterwards
    record["command"] = f"python bench/convergence.py {args.study}"

    start, runs = time.perf_counter(), []
    for run in _trained(args.study, args.quick, args.jobs):
        runs.append(run)
        print(
            "{task} {mode} seed {seed}: loss {loss:.4f}, score {score:.3f}".format(**run),
            flush=True,
        )
    print(text(runs))
    if not args.quick:
        path = RESULTS / f"convergence-{args.study}-{DEVICE.type}.json"
        record |= {
            "seconds": round(time.perf_counter() - start),
            "dtype": " and ".join(STUDIES[args.study].dtypes()),
            "loss": f"mean of the last {LAST} steps",
        }
        provenance.write_record(path, record | {"runs": runs})
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
