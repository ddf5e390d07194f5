"""The block of a forward, in Python and in C++: the same states of a thread at every point, and
the state of before after any exception.
"""

import contextlib
import dataclasses
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import tritonamp
from tritonamp.casts import active, context, dispatch
from tritonamp.casts.context import EnabledContext
from tritonamp.fp32_values import Fp32Values
from tritonamp.kernels import _facts, _native

POLICIES = {
    "O1": tritonamp.O1,
    "O1 bf16": dataclasses.replace(tritonamp.O1, dtype=torch.bfloat16),
    "O2": tritonamp.O2,
    "O3": tritonamp.O3,
}
DEVICE_TYPES = "cpu", "cuda"  # the state of autocast for CUDA needs no GPU


@pytest.fixture(params=["Python", "C++"])
def way(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    use(request.param, monkeypatch)
    return request.param


def use(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = _facts._InPython if way == "Python" else _native.build().module
    if module is None:
        pytest.skip("there is no C++ compiler")
    monkeypatch.setattr(_facts, "_native", module)


@pytest.fixture(autouse=True)
def op_table() -> Iterator[None]:
    """The op table stays registered. A block registers it only for a copy."""
    with tritonamp.enable(nn.Linear(1, 1), level="O1"):
        yield


def contexts() -> list[EnabledContext]:
    """Return contexts of models, two of each policy and device type."""
    made = [(policy, kind) for policy in POLICIES.values() for kind in DEVICE_TYPES]
    return [EnabledContext(policy, "auto", kind, Fp32Values()) for policy, kind in made * 2]


def state() -> list[Any]:
    """Return all that a block changes in this thread."""
    nesting = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return [
        [(torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in DEVICE_TYPES],
        torch.is_autocast_cache_enabled(),
        nesting,
        torch._C._is_multithreading_enabled(),
        list(active.thread.stack),
        active.active(),
    ]


class Program:
    """A random nest of blocks, which leaves states changed and raises at random.

    Args:
        seed: seed of the program.

    Attributes:
        states: states of the thread where the program has been.
    """

    ERRORS = KeyError, KeyboardInterrupt, RuntimeError

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.contexts = contexts()
        self.last = self.contexts[0]
        self.states: list[Any] = []

    def run(self, depth: int, within: str = "") -> int:
        """Run some blocks inside a block for a device type, or outside all. Return a number."""
        draw = self.draw
        for _ in range(draw.randint(1, 3)):
            self.states.append([state(), active.process.latest])
            kind = draw.choice(["block", "block", "with", "torch", "leave", "raise"])
            if kind == "raise" and depth > 0:
                raise draw.choice(self.ERRORS)
            if kind == "leave" and within:
                self.leave_changed(within)
            elif kind in ("block", "with", "torch") and depth < 4:
                with contextlib.suppress(*self.ERRORS):
                    self.enter(kind, depth + 1)
        self.states.append([state(), active.process.latest])
        return depth

    def enter(self, kind: str, depth: int) -> None:
        if self.draw.random() < 0.5:  # else the last context again, as most forwards are
            self.last = self.draw.choice(self.contexts)
        chosen = self.last
        within = chosen.device_type if chosen.autocast else ""
        if kind == "with":
            with chosen.entered():
                self.run(depth, within)
        elif kind == "torch":
            with torch.autocast("cpu", dtype=self.draw.choice([torch.half, torch.bfloat16])):
                self.run(depth)
        else:
            args, kwargs = self.draw.choice([((depth, within), {}), ((depth,), {"within": within})])
            assert chosen.run_forward(self.run, args, kwargs) == depth

    def leave_changed(self, device_type: str) -> None:
        """Change the state as code does that does not restore it."""
        draw = self.draw
        torch.set_autocast_enabled(device_type, draw.random() < 0.5)
        torch.set_autocast_dtype(device_type, draw.choice([torch.half, torch.bfloat16]))
        torch.set_autocast_cache_enabled(draw.random() < 0.5)
        torch.autocast_increment_nesting()


def test_random_nests_give_the_same_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last mark is also the same, by which a backward finds a segment's policy."""
    in_native = [0]
    for seed in range(250):
        found = []
        for way in ("Python", "C++"):
            use(way, monkeypatch)
            if way == "C++":
                monkeypatch.setattr(_facts, "_native", Counting(_facts._native, in_native))
            active.process.latest = None
            active.process.marks.clear()
            before, program = state(), Program(seed)
            program.run(0)
            assert state() == before
            marks = [policy for _, policy in active.process.marks]
            found.append([program.states, marks])
        assert found[0] == found[1]
    assert in_native[0] > 200


class Counting:
    """The C++ module, with a count of its blocks."""

    def __init__(self, module: Any, count: list[int]) -> None:
        self._module, self._count = module, count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def run_under(self, *args: Any) -> Any:
        self._count[0] += 1
        return self._module.run_under(*args)


def test_the_cache_is_cleared_where_the_outermost_block_ends(way: str) -> None:
    one, x = contexts()[0], torch.ones(2, 2)
    run = one.run_forward
    run(int, (), {})  # marks the policy
    for outside in (0, 1):
        weight = torch.ones(2, 2, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.mm(x, weight)  # the cast of the weight is in the cache
        torch.set_autocast_cache_enabled(True)
        nesting = [torch.autocast_increment_nesting() for _ in range(outside)]
        torch.set_autocast_enabled("cpu", True)
        try:
            torch.mm(x, weight)
            weight.data.fill_(3.0)
            run(run, (int, (), {}), {})
            expected = 2.0 if nesting else 6.0
            assert (torch.mm(x, weight) == expected).all()
        finally:
            torch.set_autocast_enabled("cpu", False)
            for _ in nesting:
                torch.autocast_decrement_nesting()
            torch.clear_autocast_cache()


def test_a_block_holds_nothing_when_it_has_ended(way: str) -> None:
    class Given:
        pass

    for raises in (False, True):
        given, run = Given(), contexts()[0].run_forward
        gone = weakref.ref(given)

        def function(value: Any, *, other: Any = None, raises: bool = raises) -> Any:
            if raises:
                raise KeyError
            return value

        with contextlib.suppress(KeyError):
            run(function, (given,), {"other": given})
        counts = [sys.getrefcount(o) for o in (None, torch.half, active.process.latest)]
        for _ in range(100):
            run(int, (), {})
        after = [sys.getrefcount(o) for o in (None, torch.half, active.process.latest)]
        assert all(b - a < 50 for a, b in zip(counts, after, strict=True))
        del given
        assert gone() is None


def test_an_error_keeps_its_traceback_and_its_cause(way: str) -> None:
    def deep(x: Tensor) -> None:
        try:
            raise KeyError("cause")
        except KeyError as error:
            raise ValueError("raised") from error

    run = contexts()[0].run_forward
    for _ in range(2):
        with pytest.raises(ValueError, match="raised") as caught:
            run(deep, (torch.ones(1),), {})
        assert isinstance(caught.value.__cause__, KeyError)
        assert caught.traceback[-1].name == "deep"


def test_a_deep_recursion_ends_as_without_a_block(way: str) -> None:
    run = contexts()[0].run_forward

    def again() -> Any:
        return run(again, (), {})

    before = state()
    with pytest.raises(RecursionError):
        again()
    assert state() == before


def test_threads_have_blocks_of_their_own(way: str) -> None:
    one, other = contexts()[:2]
    inside, go_on, seen = threading.Event(), threading.Event(), []

    def wait() -> None:
        inside.set()
        assert go_on.wait(60)
        seen.append(active.active())

    thread = threading.Thread(target=lambda: one.run_forward(wait, (), {}))
    thread.start()
    assert inside.wait(60)
    assert active.active() is None and not torch.is_autocast_enabled("cpu")
    other.run_forward(lambda: seen.append(active.active()), (), {})
    go_on.set()
    thread.join()
    assert [found.device_type for found in seen] == ["cuda", "cpu"]


def test_a_block_that_python_has_begun_may_hold_one_of_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    """The switch to C++ comes in a step, and other threads may be in forwards."""
    run, before = contexts()[0].run_forward, state()
    use("Python", monkeypatch)

    def switch() -> None:
        use("C++", monkeypatch)
        outer = state()
        with pytest.raises(KeyError):
            run({}.__getitem__, ("missing",), {})
        assert state() == outer

    run(switch, (), {})
    assert state() == before


def test_what_is_missing_is_registered_first(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """C++ registers no op table, and a copy outlives the model that did."""
    one = contexts()[0]
    one.run_forward(int, (), {})
    libraries: list[Any] = []
    monkeypatch.setattr(dispatch.registration, "libraries", libraries)
    monkeypatch.setattr(dispatch, "borrow", libraries.append)
    one.run_forward(int, (), {})
    assert libraries == [one]


class InterruptedAt:
    """Raises KeyboardInterrupt once, before an instruction of a block that C++ runs.

    Args:
        instruction: number of the instruction, from 1.
    """

    CODES: ClassVar = {context.run_under.__code__, context._changes_autocast_only.__code__}

    def __init__(self, instruction: int) -> None:
        self.left = instruction

    def __call__(self, frame: Any, event: str, arg: Any) -> Any:
        if frame.f_code not in self.CODES:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt
        return self


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("kind", DEVICE_TYPES)
def test_ctrl_c_at_every_instruction(
    kind: str, outer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block in Python has a test of its own (tests/step/test_interrupted.py)."""
    use("C++", monkeypatch)
    count, tracing = [0], sys.gettrace()
    monkeypatch.setattr(_facts, "_native", Counting(_facts._native, count))
    one = next(c for c in contexts() if c.device_type == kind)

    def interrupt_all() -> None:
        before, interrupted = state(), 0
        while True:
            tracer = InterruptedAt(interrupted + 1)
            sys._getframe().f_trace_opcodes = True  # before settrace, for Python 3.12
            sys.settrace(tracer)
            try:
                one.run_forward(torch.ones, (2,), {})
                break
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                sys.settrace(tracing)
            assert state() == before
        assert tracer.left > 0 and interrupted > 50
        assert count[0] > 1

    one.run_forward(int, (), {})
    if outer:
        one.run_forward(interrupt_all, (), {})
    else:
        interrupt_all()


def test_a_function_gets_the_arguments_as_they_are(way: str) -> None:
    run = contexts()[0].run_forward
    run(int, (), {})

    def function(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    call: Callable[..., Any] = function
    for args, kwargs in [((), {}), ((1, None), {}), ((), {"a": 2}), (([],), {"b": {}})]:
        assert run(call, args, kwargs) == (args, kwargs)
