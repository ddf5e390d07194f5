"""Training with a planted fault, or with the advice about it followed."""

import inspect
import math
import re
from typing import Any

import torch
from diagnosis.planted.case import OUTPUTS, SAMPLES, WIDTH, Planted
from diagnosis.planted.following import Setup
from diagnosis.planted.report import Report
from diagnosis.planted.rewriting import Unknown, rewritten
from torch import Tensor

import tritonamp

OF_THE_SCALE = ("scale overflow", "backward fault")
"""Causes of skips that a lower loss scale may end: NaN of inf - inf counts as a backward fault."""


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
        if setup.nan_to_num:
            self.x, self.y = self.x.nan_to_num(0, 0, 0), self.y.nan_to_num(0, 0, 0)
        if setup.without:
            kept = [i for i in range(len(self.x)) if i not in setup.without]
            self.x, self.y = self.x[kept], self.y[kept]
        if setup.told:
            self._follow()
        if setup.edit is not None:
            self._rewrite(*setup.edit)
        self.optimizer = case.optimizer(self.model.parameters())
        for name, value in setup.settings:
            for group in self.optimizer.param_groups:
                group[name] = value
        self.amp: Any = None
        if not plain:
            fields = {"level": case.level, **case.fields, **dict(setup.fields)}
            self.amp = tritonamp.enable(self.model, self.optimizer, **fields)

    def _parts(self) -> list[tuple[Any, str]]:
        """Return the objects that may have the mistake, and the names of their methods."""
        return [*((m, "forward") for m in self.model.modules()), (self.criterion, "__call__")]

    def _follow(self) -> None:
        """Put the methods ``told`` in place of those with the mistake."""
        for part, method in self._parts():
            if hasattr(part, "told"):
                _put(part, method, type(part).told)

    def _rewrite(self, line: int, op: str, words: str) -> None:
        """Edit a line of a method of the model or the loss, or give a layer another eps."""
        eps = re.fullmatch(r"write \w+_norm\(\.\.\., eps=(\S+)\)", words)
        layers = [m for m in self.model.modules() if hasattr(m, "eps")]
        if eps is not None and layers:
            for layer in layers:
                layer.eps = float(eps[1])
            return
        for part, method in self._parts():
            function = getattr(type(part), method)
            lines, first = inspect.getsourcelines(function)
            if _is_here(function) and 0 <= line - first < len(lines):
                _put(part, method, rewritten(function, line, op, words))
                return
        raise Unknown(f"line {line} is in no method of the model")

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *error: object) -> None:
        if self.amp is not None:
            self.amp.disable()

    def loss(self) -> Tensor:
        return self.criterion(self.model(self.x), self.y)

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


def _is_here(function: Any) -> bool:
    return str(function.__module__).startswith("diagnosis.planted.")


def _put(part: Any, method: str, function: Any) -> None:
    """Give one object a class of its own with another method."""
    kind = type(part)
    part.__class__ = type(kind.__name__, (kind,), {method: function})


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
            if run.cause not in OF_THE_SCALE or not math.isfinite(loss):
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
