"""Training with a planted fault, or with the advice about it followed."""

import math
from typing import Any

import torch
from diagnosis.planted.case import OUTPUTS, SAMPLES, WIDTH, Planted
from diagnosis.planted.following import Setup
from diagnosis.planted.report import Report
from torch import Tensor

import tritonamp


class Run:
    """A model in training. ``with`` enables it, unless ``level`` is None."""

    def __init__(self, setup: Setup, *, plain: bool = False) -> None:
        self.setup, case = setup, setup.case
        torch.manual_seed(0)
        self.model = case.net(case.block())
        if not setup.repaired:
            case.spoil(self.model)
        self.criterion = case.loss()
        self.x, self.y = torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, OUTPUTS)
        if not setup.batch:
            self.x, self.y = case.data(self.x, self.y)
        if setup.without:
            kept = [i for i in range(len(self.x)) if i not in setup.without]
            self.x, self.y = self.x[kept], self.y[kept]
        if setup.told:
            self._follow()
        self.optimizer = case.optimizer(self.model.parameters())
        for name, value in setup.settings:
            for group in self.optimizer.param_groups:
                group[name] = value
        self.amp: Any = None
        if not plain:
            fields = {"level": case.level, **case.fields, **dict(setup.fields)}
            self.amp = tritonamp.enable(self.model, self.optimizer, **fields)

    def _follow(self) -> None:
        """Put the methods ``told`` in place of what has the mistake."""
        for module in self.model.modules():
            if hasattr(module, "told"):
                module.__class__ = _as_told(type(module), "forward")
        if hasattr(self.criterion, "told"):
            self.criterion.__class__ = _as_told(type(self.criterion), "__call__")

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *error: object) -> None:
        if self.amp is not None:
            self.amp.disable()

    def loss(self) -> Tensor:
        output = self.model(self.x)
        if not self.setup.in_fp32:
            return self.criterion(output, self.y)
        with tritonamp.disable_casts():
            return self.criterion(output.float(), self.y)

    def step(self) -> float:
        """Return the loss of a step."""
        self.optimizer.zero_grad()
        loss = self.loss()
        if self.amp is None:
            loss.backward()
        else:
            self.amp.backward(loss)
        self.optimizer.step()
        return float(loss.detach())

    def causes_until_a_step(self, most: int) -> list[str]:
        """Return the causes of skips, and "" at the end if a step was taken."""
        causes: list[str] = []
        while len(causes) < most and (not causes or causes[-1]):
            self.step()
            causes.append(self.cause)
        return causes

    @property
    def cause(self) -> str:
        """The cause for which the last step was skipped; "" if it was taken."""
        cause = self.amp.history[-1].cause
        return "" if cause is None else str(getattr(cause, "value", cause))


def _as_told(kind: type, method: str) -> type:
    return type(kind.__name__, (kind,), {method: kind.told})  # type: ignore[attr-defined]


def report_of(setup: Setup) -> Report:
    """Return the report about the fault, after the steps of the case."""
    with Run(setup) as run:
        for _ in range(setup.case.steps):
            run.step()
        return Report(run.amp.explain(replay=run.loss if setup.case.replay else False))


def failure_of(setup: Setup) -> str:
    """Return the failure of a training in which advice was followed; "" if it helped."""
    return trained(setup) if setup.case.trains else passed(setup)


def passed(setup: Setup) -> str:
    """Return why the batch does not pass; "" if it does.

    The step is taken, perhaps after skips by which the loss scale finds its level. Where the fault
    skipped no step, the report about the batch has to be without a fault.
    """
    with Run(setup) as run:
        for _ in range(setup.skips + 1):
            loss = run.step()
            if not run.cause:
                text = "" if setup.case.cause else run.amp.explain(replay=run.loss)
                bad = "silent" in text
                return f"loss {loss}: {text}" if bad or not math.isfinite(loss) else ""
            if run.cause != "scale overflow" or not math.isfinite(loss):
                return f"skipped: {run.cause}, loss {loss}"
        return f"no loss scale fits, {run.amp.stats()['scale']:g} is the last"


def is_finite_in_fp32(case: Planted) -> bool:
    """Return whether loss and gradients are finite without the library."""
    run = Run(Setup(case), plain=True)
    loss = run.step()
    grads = [p.grad for p in run.model.parameters() if p.grad is not None]
    return math.isfinite(loss) and all(bool(grad.isfinite().all()) for grad in grads)


def trained(setup: Setup) -> str:
    """Return the distance from FP32's loss after some steps, if that is more than rounding's.

    A step rounds each gradient by a few units of 2^-11, relative to its size. So a step that takes
    a part of the loss away is wrong by at most a few of these units of that part, and all steps
    together by a few units of the first loss. Losses are not exactly linear: a unit for each step.
    """
    steps = setup.case.trains
    with Run(setup) as run, Run(setup, plain=True) as fp32:
        half = [run.step() for _ in range(steps)]
        full = [fp32.step() for _ in range(steps)]
        skipped = run.amp.stats()["skipped"]
    bound = 2 * steps * 2.0**-11 * max(full)
    if not math.isfinite(full[-1]) or full[-1] > full[0]:
        return f"FP32 does not train: {full[0]:g} -> {full[-1]:g}"
    if skipped or not abs(half[-1] - full[-1]) <= bound:
        return f"loss {half[-1]:g} instead of {full[-1]:g} +- {bound:g}, {skipped} steps skipped"
    return ""
