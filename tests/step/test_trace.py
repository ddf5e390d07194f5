"""What runs from a loss to new weights: files, classes and calls of ours in one clean step."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from host_ratios import our_step
from host_stubs import stub_launches
from runs import Classifying
from steps import tiny
from torch import nn

import tritonamp
from tritonamp import kernels
from tritonamp.kernels import _facts

FILES, CLASSES, CALLS = 42, 27, 345
"""Limits of a backward and a step in eager torch."""
STEADY_CALLS = 108
"""Limit of the Python calls of scaling, clipping and stepping, in a step like the last one."""
LIKE = 40  # steps before the one that is traced, which is none after which weights are measured
OURS = tuple(f"{Path(package.__file__).parent}{os.sep}" for package in (tritonamp, kernels))


class Trace:
    """Calls of our Python functions.

    Attributes:
        files: paths of the files that hold these functions.
        classes: classes whose methods were called.
        calls: number of calls.
    """

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.classes: set[type] = set()
        self.calls = 0

    def note(self, frame: Any, event: str, arg: Any) -> None:
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(OURS):
            return
        self.calls += 1
        self.files.add(file)
        owner = type(frame.f_locals.get("self"))
        if owner.__module__.startswith("tritonamp."):
            self.classes.add(owner)

    @contextmanager
    def of(self) -> Iterator["Trace"]:
        """Trace the ``with`` block."""
        sys.setprofile(self.note)
        try:
            yield self
        finally:
            sys.setprofile(None)


class Five(nn.Sequential):
    """Five layers with three parameters and more."""

    def __init__(self) -> None:
        linear = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        super().__init__(linear[0], nn.LayerNorm(16), linear[1], nn.Softmax(-1), linear[2])


@pytest.fixture
def trace(plans: None) -> Iterator[Trace]:
    """The trace of a backward and a step that are like those before them."""
    with Classifying(Five, level="O2", backend="eager", lr=1e-3) as run:
        for number in range(LIKE):
            run.step(number)
        loss = run.loss(LIKE)
        with Trace().of() as found:
            run.amp.backward(loss)
            run.optimizer.step()
        assert run.amp.stats()["skipped"] == 0
        yield found


def test_an_eager_step_passes_few_files(trace: Trace) -> None:
    assert len(trace.files) <= FILES, sorted(trace.files)
    assert len(trace.classes) <= CLASSES, sorted(kind.__name__ for kind in trace.classes)
    assert trace.calls <= CALLS


def test_a_clean_step_diagnoses_nothing(trace: Trace) -> None:
    assert [file for file in trace.files if "diagnosis" in Path(file).parts] == []


def own_calls(step: Callable[[], object]) -> int:
    """Return the Python calls of ours in a step that is like those before it."""
    for _ in range(LIKE):
        step()
    with Trace().of() as found:
        step()
    return found.calls


@pytest.mark.parametrize("tensors", [12, 120])
def test_a_like_step_makes_few_calls(tensors: int, plans: None) -> None:
    """However many tensors there are."""
    _facts.use_native()
    if _facts._native is _facts._InPython:
        pytest.skip("no C++ compiler")
    with stub_launches():
        work = our_step(tiny(tensors), False)
        try:
            assert own_calls(work.calls[0]) <= STEADY_CALLS
        finally:
            work.close()
