"""Who notices a flipped bit, and how an unnoticed one changes training.

    python bench/bitflips.py            # minutes on a CPU; writes bench/results/bitflips-cpu.json
    python bench/bitflips.py --quick    # one bit in eight; prints, writes nothing

A small classifier trains in each precision. At one step, one bit of one number flips: in a
gradient, a weight, its FP32 master or a moment of AdamW, for every position of the bit. Each flip
happens in a process that is forked from the same run, so all flips hit the same number.
"""

import argparse
import dataclasses
import json
import logging
import math
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import markdown
import provenance
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tritonamp
from tritonamp.testing import Fault, FaultInjector

PATH = Path(__file__).parent / "results" / "bitflips-cpu.json"
NOT_MEASURED = "Not measured yet: `python bench/bitflips.py`"
CPU = torch.device("cpu")
BEFORE = 70
"""Steps before the flip, more than those that an outlier is compared with."""
AFTER = 40
"""Steps from the flip on."""
WEIGHT, MODULE = "3.weight", "3"
SIGMAS = 6.0
SAME_LOSS = 0.01
"""A loss that differs by less counts as unchanged."""
STILL = 0.1
"""A weight that moves less, relative to the run without a flip, counts as frozen."""
MOMENTS = "exp_avg", "exp_avg_sq"
SHOWN = {
    "gradient": "gradient of a weight, after the backward",
    "backward": "gradient of an activation, in the backward",
    "weight": "weight, as the forward reads it",
    "master": "FP32 master",
    "exp_avg": "`exp_avg`",
    "exp_avg_sq": "`exp_avg_sq`",
}
"""Target of a fault to its name in the table."""

Run = dict[str, Any]


class Training:
    """A classifier of 16 numbers into 8 classes, under a level, with a batch for each step."""

    def __init__(self, level: str, dtype: torch.dtype, **fields: Any) -> None:
        torch.manual_seed(0)
        self.teacher = nn.Linear(16, 8).requires_grad_(False)
        self.model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 8))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, weight_decay=0.0)
        self.amp = tritonamp.enable(self.model, self.optimizer, level=level, dtype=dtype, **fields)
        self.injector = FaultInjector(self.model, self.optimizer)
        self.steps = 0

    def loss(self, seed: int, rows: int = 32) -> Tensor:
        x = torch.randn(rows, 16, generator=torch.Generator().manual_seed(seed))
        return F.cross_entropy(self.model(x).float(), self.teacher(x).argmax(1))

    def step(self, fault: Fault | None = None) -> None:
        with self.injector.step(fault):
            self.amp.backward(self.loss(self.steps))
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def test_loss(self) -> float:
        with torch.no_grad():
            return float(self.loss(-1, 1024))

    def weights(self) -> Tensor:
        """Return the FP32 values of the weight whose bits flip, flat."""
        return dict(self.amp.named_master_params())[WEIGHT].detach().flatten().clone()

    def usual(self) -> int:
        """Return the place of the weight of median magnitude."""
        order = self.weights().abs().argsort()
        return int(order[len(order) // 2])


@dataclasses.dataclass(frozen=True)
class Target:
    """A row of the table: numbers whose bits flip, one at a time.

    Attributes:
        form: the precision, a key of ``FORMS``.
        target: ``Fault.target``.
        bits: number of bits of the format.
    """

    form: str
    target: str
    bits: int


FORMS: dict[str, dict[str, Any]] = {
    "O0": {"level": "O0", "dtype": torch.float16},
    "O1 float16": {"level": "O1", "dtype": torch.float16},
    "O2 float16": {"level": "O2", "dtype": torch.float16},
    "O2 bfloat16": {"level": "O2", "dtype": torch.bfloat16},
    'O2 float16, state="bf16"': {"level": "O2", "dtype": torch.float16, "state": "bf16"},
    'O2 float16, state="8bit"': {"level": "O2", "dtype": torch.float16, "state": "8bit"},
}
"""Arguments of ``tritonamp.enable``."""


def targets() -> list[Target]:
    """Return the rows of the table."""
    found = []
    for form, fields in FORMS.items():
        half = 16 if fields["level"] == "O2" else 32
        activation = 32 if fields["level"] == "O0" else 16
        moment = {"bf16": 16, "8bit": 8}.get(form[-5:-1], 32)
        if "state" not in form:
            found += [Target(form, "gradient", half), Target(form, "backward", activation)]
            found += [Target(form, "weight", half)]
            found += [Target(form, "master", 32)] if half == 16 else []
        if form != "O1 float16":  # as O0
            found += [Target(form, key, moment) for key in MOMENTS]
    return found


def fault_of(target: Target, bit: int, run: Training) -> Fault:
    """Return a flip of a number of usual magnitude."""
    if target.target == "backward":
        return Fault("bitflip", MODULE, target="backward", bit=bit, element=0)
    return Fault("bitflip", WEIGHT, target=target.target, bit=bit, element=run.usual())


def trained(form: str, **fields: Any) -> Training:
    """Return a run before the step of the flip."""
    run = Training(**FORMS[form], **fields)
    for _ in range(BEFORE):
        run.step()
    return run


def outcome(run: Training, fault: Fault | None) -> Run:
    """Train on, with a flip in the first step.

    Returns:
        "cause": cause of the first skip from the flip on, or None; "after": number of its step,
        from the flip on; "skipped": number of skips; "named": whether ``amp.explain`` names the
        value; "loss": loss on other data in the end, None if it is not finite; "moved": distance
        that the weight has moved after the step of the flip.
    """
    element = run.usual() if fault is None else fault.element
    run.step(fault)
    then = run.weights()
    for _ in range(AFTER - 1):
        run.step()
    skips = [r for r in run.amp.history if r.cause and r.step > BEFORE]
    text, loss, now = run.amp.explain(), run.test_loss(), run.weights()
    moved = float((now - then)[element or 0])
    return {
        "cause": skips[0].cause if skips else None,
        "after": skips[0].step - BEFORE if skips else None,
        "skipped": len(skips),
        "named": f"value of {WEIGHT}" in text or f" of {WEIGHT}, at" in text,
        "loss": loss if math.isfinite(loss) else None,
        "moved": moved if math.isfinite(moved) else None,
    }


def outlier(run: Training, fault: Fault) -> str | None:
    """Return the cause of the first skip in the four steps from a flip on."""
    for i in range(4):
        run.step(None if i else fault)
    return next((r.cause for r in run.amp.history if r.cause and r.step > BEFORE), None)


def audited(run: Training, fault: Fault) -> bool:
    """Return whether ``amp.audit`` suspects the hardware in the step of a flip."""
    run.amp.audit(every=1)
    run.step(fault)
    return bool(run.amp.stats()["audits"]["suspected"])


def forked(work: Callable[[], Any]) -> Any:
    """Return the result of ``work`` in a copy of this process, so that nothing here changes."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            with os.fdopen(writing, "wb") as file:
                pickle.dump(work(), file)
        finally:  # even after an error only the parent continues
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        found = file.read()
    os.waitpid(child, 0)
    return pickle.loads(found)


def measure(every: int = 1) -> Iterator[Run]:
    """Yield the outcome of a flip of each bit, or of one bit in ``every``."""
    for form in FORMS:
        run, judging = trained(form), trained(form, skip_outliers=SIGMAS)
        clean = forked(lambda run=run: outcome(run, None))
        for target in (target for target in targets() if target.form == form):
            for bit in range(target.bits - 1, -1, -every):
                fault = fault_of(target, bit, run)
                found = forked(lambda run=run, fault=fault: outcome(run, fault))
                with_outliers = forked(lambda run=judging, fault=fault: outlier(run, fault))
                of_audit = forked(lambda run=run, fault=fault: audited(run, fault))
                more = {"with skip_outliers": with_outliers, "audit": of_audit}
                yield relative(target, bit, found, clean) | more


def relative(target: Target, bit: int, found: Run, clean: Run) -> Run:
    """Return the outcome of a flip with loss and distance relative to those without it."""
    loss, moved = found["loss"], found["moved"]
    return dataclasses.asdict(target) | {
        "bit": bit,
        **found,
        "loss": None if loss is None else round(loss / clean["loss"], 4),
        "moved": None if moved is None else round(moved / clean["moved"], 4),
    }


def table(runs: list[Run]) -> str:
    """Return a row for each target, with its bits by their effect."""
    outcomes = "unseen, harmless", "unseen, harmful", "noticed", "an audit finds"
    head = "flipped", "precision", "bits", *outcomes
    rows = []
    for target in targets():
        own = [r for r in runs if (r["form"], r["target"]) == (target.form, target.target)]
        if own:
            quiet = [r for r in own if seen(r) is None]
            harmless = ranges([r["bit"] for r in quiet if not harm(r)])
            harmful, noticed = grouped(quiet, harm), grouped(own, noticing)
            name = SHOWN[target.target]
            found = ranges([r["bit"] for r in own if r["audit"]])
            rows.append((name, target.form, str(target.bits), harmless, harmful, noticed, found))
    return markdown.table(head, rows)


def seen(run: Run) -> str | None:
    """Return the cause of the first skip; else "outlier" if only an outlier's skip would see it."""
    return run["cause"] or (run["with skip_outliers"] and "outlier")


def noticing(run: Run) -> str:
    """Return who notices a flip, and what follows; "" if nothing does."""
    if run["cause"] is None:
        return "outlier, with `skip_outliers`" if seen(run) else ""
    always = run["skipped"] >= AFTER - 1
    return run["cause"] + (", at every later step, too" if always else "")


def harm(run: Run) -> str:
    """Return the effect of an unseen flip on training; "" for none."""
    named = ", which `explain()` names" if run["named"] else ""
    if run["loss"] is None:
        return f"loss not finite{named}"
    if run["moved"] is not None and abs(run["moved"]) < STILL:
        return f"frozen{named}"
    if abs(run["loss"] - 1.0) > SAME_LOSS:
        return f"loss {100 * (run['loss'] - 1.0):+.0f} %{named}"
    return ""


def grouped(runs: list[Run], key: Callable[[Run], str]) -> str:
    """Return the bits of each value of ``key`` that is not ""."""
    found: dict[str, list[int]] = {}
    for run in runs:
        if key(run):
            found.setdefault(key(run), []).append(run["bit"])
    return "; ".join(f"{ranges(bits)}: {name}" for name, bits in found.items())


def ranges(bits: list[int]) -> str:
    """Return numbers as "0 to 29, 31"."""
    parts: list[list[int]] = []
    for bit in sorted(bits):
        if parts and parts[-1][-1] == bit - 1:
            parts[-1].append(bit)
        else:
            parts.append([bit])
    return ", ".join(f"{p[0]} to {p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


def results(path: Path = PATH) -> str:
    """Return the Markdown of the measured flips."""
    if not path.exists():
        return NOT_MEASURED
    record = json.loads(path.read_text())
    runs = record["runs"]
    unseen = [run for run in runs if seen(run) is None]
    about = (
        f"`{record['command']}` on a CPU, torch {record['torch']}, commit {record['commit']}: of "
        f"{len(runs)} flips {len(runs) - len(unseen)} are noticed, "
        f"{sum(not harm(run) for run in unseen)} are unseen and harmless, and "
        f"{sum(bool(harm(run)) for run in unseen)} are unseen and harmful. "
        f"An audit finds {sum(run['audit'] for run in runs)}."
    )
    return f"{table(runs)}\n\n{markdown.paragraph(about)}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Who notices a flipped bit.")
    parser.add_argument("--quick", action="store_true", help="one bit in eight; writes nothing")
    args = parser.parse_args(arguments)
    logging.getLogger("tritonamp").setLevel(logging.CRITICAL)
    record, start, runs = provenance.machine(CPU), time.perf_counter(), []
    for run in measure(8 if args.quick else 1):
        runs.append(run)
        print(run, flush=True)
    print(table(runs))
    if not args.quick:
        seconds = round(time.perf_counter() - start)
        record |= {"command": "python bench/bitflips.py", "seconds": seconds, "runs": runs}
        provenance.write_record(PATH, record)
        print(PATH)
    return 0


if __name__ == "__main__":
    sys.exit(main())
