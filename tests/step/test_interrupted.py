"""A step that fails, wherever it does, leaves everything as it was; the next one is as if it had
never been tried.
"""

import inspect
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from helpers import Net, same
from runs import LEVELS, Training, batch, started
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tritonamp
from tritonamp.casts import active, context
from tritonamp.kernels import _facts, _implementations, _launch
from tritonamp.kernels import device as hardware
from tritonamp.step import interrupts
from tritonamp.step.fused import FusedStep
from tritonamp.testing import compile_failure

OPTIMIZERS = "AdamW", "SGD momentum"
FUSED = *OPTIMIZERS, "Lion"
ERRORS = [ZeroDivisionError, KeyboardInterrupt, torch.OutOfMemoryError]


class Checkpointed(Net):
    """Its first two layers are recomputed in the backward if ``checkpoints`` is set."""

    checkpoints = False

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpoints:
            return self.last(checkpoint(self._hidden, x, use_reentrant=False))
        return self.last(self._hidden(x))

    def _hidden(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.first(x)))


class Seeded(Training):
    """Each step is on the batch of a seed; the loss scale moves often."""

    def __init__(self, level: str = "O2", optimizer: str = "AdamW", **fields: Any) -> None:
        if level in ("O1", "O2") and "scaler" not in fields:
            bounds = {"init_scale": 2.0**10, "growth_interval": 4, "max_scale": 2.0**12}
            kind = torch.device(fields["device"]).type
            fields["scaler"] = tritonamp.GradScaler(kind, **bounds)
        super().__init__(Checkpointed, optimizer, level, **fields)

    def loss(self, x: Any = 0) -> Tensor:
        return super().loss(batch(x, 4, 6, device=self.device))


start = started(Seeded)


def raises(error: type[BaseException]) -> Callable[..., Any]:
    def hook(*args: Any) -> None:
        raise error("on purpose")

    return hook


# where it fails: hooks, and a fault between them


@contextmanager
def in_forward(run: Seeded, error: type[BaseException]) -> Iterator[None]:
    handle = run.model.last.register_forward_pre_hook(raises(error))
    yield
    handle.remove()


@contextmanager
def in_backward(run: Seeded, error: type[BaseException]) -> Iterator[None]:
    handle = run.model.norm.register_full_backward_hook(raises(error))
    yield
    handle.remove()


@contextmanager
def in_recomputation(run: Seeded, error: type[BaseException]) -> Iterator[None]:
    calls = []

    def hook(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise error("on purpose")

    run.model.checkpoints = True
    handle = run.model.norm.register_forward_pre_hook(hook)
    yield
    handle.remove()
    run.model.checkpoints = False


@contextmanager
def at_a_gradient(run: Seeded, error: type[BaseException]) -> Iterator[None]:
    handle = run.model.first.weight.register_post_accumulate_grad_hook(raises(error))
    yield
    handle.remove()


@contextmanager
def before_the_step(run: Seeded, error: type[BaseException]) -> Iterator[None]:
    handle = run.optimizer.register_step_pre_hook(raises(error))
    yield
    handle.remove()


PLACES = [in_forward, in_backward, in_recomputation, at_a_gradient, before_the_step]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
def test_a_failed_attempt_never_was(
    start: Any, level: str, optimizer: str, place: Any, error: type[BaseException]
) -> None:
    run, undisturbed = start(level, optimizer), start(level, optimizer)
    for i in range(3):
        run.step(i)
        undisturbed.step(i)
    before, numbers = run.stored(), run.numbers()
    with place(run, error), pytest.raises(error):
        run.step(9)
    assert same(run.stored(), before)
    assert run.numbers() == numbers
    run.optimizer.zero_grad()
    for i in range(3, 6):
        run.step(i)
        undisturbed.step(i)
    assert same(run.stored(), undisturbed.stored())
    assert run.numbers() == undisturbed.numbers()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
def test_inside_scale_loss(start: Any, level: str, optimizer: str) -> None:
    run, undisturbed = start(level, optimizer), start(level, optimizer)
    loss = run.loss(9)

    def interrupted() -> None:
        with run.amp.scale_loss(loss) as scaled:
            scaled.backward()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    run.optimizer.zero_grad()
    for one in (run, undisturbed):
        one.step(0)
    assert same(run.stored(), undisturbed.stored())
    assert run.numbers() == undisturbed.numbers()


def test_a_forward_that_failed_is_no_cause(start: Any) -> None:
    """Its batch was bad, and never led to a loss."""
    run = start("O2")
    with in_forward(run, ZeroDivisionError), pytest.raises(ZeroDivisionError):
        run.model(torch.full((4, 6), float("nan"), device=run.device))
    run.amp.backward(run.loss(0) * float("nan"))
    run.optimizer.step()
    assert run.amp.history[-1].cause == "forward fault"


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_that_failed_can_be_repeated(
    start: Any, optimizer: str, clips: bool, by_hand: bool
) -> None:
    """As in torch: the gradients are still there."""
    run, undisturbed = start("O2", optimizer), start("O2", optimizer)
    for i in range(5):
        for one in (run, undisturbed):
            one.backward(one.loss(i), by_scaler=by_hand)
            if clips:
                one.amp.clip_grad_norm_(0.1)
            step = (
                (lambda one=one: one.amp.scaler.step(one.optimizer))
                if by_hand
                else one.optimizer.step
            )
            if one is run:
                with before_the_step(run, ZeroDivisionError), pytest.raises(ZeroDivisionError):
                    step()
            step()
            if by_hand:
                one.amp.scaler.update()
            one.optimizer.zero_grad()
    assert same(run.stored(), undisturbed.stored())
    assert run.numbers() == undisturbed.numbers()


def failing(optimizer: torch.optim.Optimizer) -> None:
    """A step that a hook ends before it has done anything."""
    handle = optimizer.register_step_pre_hook(raises(torch.OutOfMemoryError))
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.step()
    handle.remove()


def test_a_step_that_failed_twice_counts_once(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second failure comes before a decision, when the first one is already undone."""
    run = start(
        "O2", "AdamW", scaler=tritonamp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    )
    run.amp.backward(run.loss(0))
    with monkeypatch.context() as patch:
        patch.setattr(FusedStep, "step", raises(torch.OutOfMemoryError))
        with pytest.raises(torch.OutOfMemoryError):
            run.optimizer.step()
    failing(run.optimizer)
    run.optimizer.step()
    assert (run.amp.stats()["scale"], run.amp.stats()["steps"]) == (8.0, 1)


@pytest.mark.parametrize("overflow", [False, True])
def test_other_decisions_between_a_failed_step_and_its_repetition(
    device: torch.device, overflow: bool
) -> None:
    models = [nn.Linear(4, 4, device=device) for _ in range(2)]
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for model in models)
    scaler = tritonamp.GradScaler(device.type, init_scale=2.0**10)
    amp = tritonamp.enable(models, [first, second], level="O2", scaler=scaler)
    x = torch.ones(2, 4, device=device)
    amp.backward(models[0](x).square().mean(), first)
    failing(first)
    for i in range(3):
        amp.backward(models[1](x).square().mean() * (1e8 if overflow and i == 1 else 1.0), second)
        second.step()
        second.zero_grad()
    first.step()
    stats = amp.stats()
    amp.disable()
    assert (stats["steps"], stats["skipped"]) == (4 - overflow, overflow)
    assert (stats["scale"], stats["growth_tracker"]) == (
        2.0**9 if overflow else 2.0**10,
        2 if overflow else 4,
    )


@pytest.mark.parametrize(
    ("level", "kind"),
    [("O2", torch.optim.SGD), ("O2", torch.optim.Adagrad), ("O3", torch.optim.SGD)],
)
def test_fused_steps_of_torch_are_seen(device: torch.device, level: str, kind: Any) -> None:
    single = nn.Parameter(torch.ones(4, 4, device=device))
    single.grad = torch.ones_like(single)
    try:
        kind([single], lr=0.5, fused=True).step()
    except RuntimeError as error:  # torch 2.11 has no fused Adagrad on CUDA
        pytest.skip(str(error))
    alone = nn.Parameter(torch.ones(4, 4, device=device).half())
    alone.grad = torch.ones_like(alone)
    torch.optim.SGD([alone], lr=0.5, fused=True).step()
    if level == "O3" and (alone == 1).all():
        pytest.skip("on the CPU, torch 2.11's fused SGD leaves half parameters as they are")
    model = nn.Linear(4, 4, device=device)
    optimizer = kind(model.parameters(), lr=0.5, fused=True)
    amp = tritonamp.enable(
        model, optimizer, level=level, loss_scale=2.0**8 if level == "O2" else 1.0
    )
    before = model.weight.detach().clone()
    amp.backward(model(torch.ones(2, 4, device=device)).square().mean())
    optimizer.step()
    halves = [p.detach().clone() for p in model.parameters()]
    stored = list(model.state_dict().values())
    amp.disable()
    assert not torch.equal(halves[0], before)
    assert same([value.half() for value in stored], halves)


class WritesToData(torch.optim.Optimizer):
    """As older code does; the versions of the parameters stay."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.data.add_(p.grad.data, alpha=-self.param_groups[0]["lr"])


def test_an_optimizer_that_writes_to_data_moves_half_weights(device: torch.device) -> None:
    model = nn.Linear(4, 4, device=device)
    optimizer = WritesToData(model.parameters(), 0.5)
    amp = tritonamp.enable(model, optimizer, level="O2", loss_scale=2.0**8)
    before = model.weight.detach().clone()
    amp.backward(model(torch.ones(2, 4, device=device)).square().mean())
    optimizer.step()
    masters = [p.half() for p in amp.master_params()]
    halves = [p.detach().clone() for p in model.parameters()]
    amp.disable()
    assert same(masters, halves) and not torch.equal(halves[0], before)


def test_a_write_to_data_of_half_parameters_without_masters_is_seen(device: torch.device) -> None:
    model = nn.Linear(4, 4, device=device)
    optimizer = WritesToData(model.parameters(), 0.5)
    amp = tritonamp.enable(model, optimizer, level="O3")
    model.state_dict()  # the FP32 values are up to date
    versions = [p._version for p in model.parameters()]
    amp.backward(model(torch.ones(2, 4, device=device)).square().mean())
    optimizer.step()
    moved = [p._version for p in model.parameters()]
    stored = [value.half() for value in model.state_dict().values()]
    halves = [p.detach().clone() for p in model.parameters()]
    amp.disable()
    assert all(after > before for before, after in zip(versions, moved, strict=True))
    assert same(stored, halves)


class FailsOnce(torch.optim.Optimizer):
    """Has a step of its own, which fails the first time, after so many parameters."""

    def __init__(self, params: Any, after: int) -> None:
        super().__init__(params, {})
        self.after: int | None = after

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        after, self.after = self.after, None
        with torch.no_grad():
            for i, p in enumerate(self.param_groups[0]["params"]):
                if i == after:
                    raise torch.OutOfMemoryError("on purpose")
                p.sub_(p.grad)


@pytest.mark.parametrize("after", [0, 1])
def test_what_torch_has_done_of_a_failed_step_stays(device: torch.device, after: int) -> None:
    """Of one that has done nothing nothing does, and it can be repeated."""
    model = nn.Linear(4, 4, device=device)
    optimizer = FailsOnce(model.parameters(), after)
    amp = tritonamp.enable(model, optimizer, level="O2", loss_scale=2.0**8)
    before = [p.detach().clone() for p in model.parameters()]
    amp.backward(model(torch.ones(2, 4, device=device)).square().mean())
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.step()
    moved = [not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)]
    waits = bool(amp._parts.pending.fed_optimizers())
    if waits:
        optimizer.step()
    masters, halves = [p.half() for p in amp.master_params()], list(model.parameters())
    agree = same(masters, halves)
    amp.disable()
    assert moved == [after == 1, False]
    assert waits == (after == 0)
    assert agree


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_hook_after_the_step_fails_too_late(start: Any, optimizer: str) -> None:
    run, undisturbed = start("O2", optimizer), start("O2", optimizer)
    for i in range(3):
        handle = run.optimizer.register_step_post_hook(raises(ZeroDivisionError))
        with pytest.raises(ZeroDivisionError):
            run.step(i)
        handle.remove()
        run.optimizer.zero_grad()
        undisturbed.step(i)
    assert same(run.stored(), undisturbed.stored())
    assert run.numbers() == undisturbed.numbers()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_a_hook_before_the_step_leaves_is_judged(start: Any, optimizer: str) -> None:
    """The fused step judges after the hooks; other optimizers' hooks see true gradients, so they
    are left to them.
    """
    run = start("O2", optimizer)
    run.step(0)
    before = run.stored()
    seen = []

    def hook(*args: Any) -> None:
        seen.append(args)
        run.model.first.weight.grad.fill_(float("inf"))

    run.optimizer.register_step_pre_hook(hook)
    run.step(1)
    assert len(seen) == 1
    if optimizer == "AdamW":
        assert same(run.stored(), before)
        assert run.amp.stats()["skipped"] == 1


class OutOfMemory(TorchDispatchMode):
    """The n-th operation that takes memory finds none."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten" and not func._schema.is_mutable and not func.is_view:
            self.left -= 1
            if self.left == 0:
                raise torch.OutOfMemoryError("on purpose")
        return func(*args, **(kwargs or {}))


@pytest.mark.steps
@pytest.mark.parametrize("optimizer", FUSED)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_out_of_memory_anywhere_in_the_step(start: Any, level: str, optimizer: str) -> None:
    """The state of a fused step is that of before, and the step can be repeated."""
    run, undisturbed = (start(level, optimizer, backend="eager") for _ in range(2))
    for one in (run, undisturbed):
        one.step(0)
        one.amp.backward(one.loss(1))
    before, numbers, at = run.stored(), run.numbers(), 0
    while True:
        at += 1
        try:
            with OutOfMemory(at):
                run.optimizer.step()
        except torch.OutOfMemoryError:
            assert same(run.stored(), before), at
            assert run.numbers() == numbers, at
        else:
            break
    assert at > 50
    undisturbed.optimizer.step()
    assert same(run.stored(), undisturbed.stored())
    assert run.numbers() == undisturbed.numbers()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_one_warning_where_kernels_do_not_compile(
    start: Any, level: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, eager = start(level), start(level, backend="eager")
    if device.type == "cpu":
        monkeypatch.setitem(hardware._answers, torch.device("cpu"), True)  # as on a GPU
    with compile_failure():
        with pytest.warns(
            RuntimeWarning, match="runs in eager torch from now on: .* cannot be compiled"
        ) as warned:
            run.step(0)
        operations = [str(w.message).split()[0] for w in warned]
        assert len(operations) == len(set(operations))
        assert (
            set(run.amp.stats()["kernel_failures"])
            == set(operations)
            >= {"grad_stats", "decide", "adamw"}
        )
        run.step(1)  # without another warning
    assert not run.amp.stats()["kernel_failures"]
    eager.step(0)
    eager.step(1)
    assert same(run.stored(), eager.stored())


@pytest.mark.parametrize("broken", ["count_steps_kernel", "update_kernel"])
def test_a_step_of_which_one_kernel_does_not_compile_is_taken_once(
    start: Any, device: torch.device, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that do compile must not have run before eager torch takes the step."""

    def check(kernel: Any) -> None:
        if kernel.__name__ == broken:
            raise _launch.KernelError(f"{broken} cannot be compiled: on purpose")

    runs = [start("O2"), start("O2", backend="eager")]
    monkeypatch.setitem(hardware._answers, device, True)
    monkeypatch.setattr(_implementations, "failures", {})
    monkeypatch.setattr(_launch, "_compiled", {})
    monkeypatch.setattr(_launch, "_check_compiler", check)
    with pytest.warns(
        RuntimeWarning, match=f"adamw runs in eager torch from now on: {broken} cannot be compiled"
    ):
        runs[0].step(0)
    runs[1].step(0)
    assert all(
        torch.allclose(p, q, rtol=1e-6, atol=0)
        for p, q in zip(runs[0].stored(), runs[1].stored(), strict=True)
    )


# Ctrl-C

CTRL_C = """
import random, signal, sys, torch, tritonamp
from torch import nn

torch.set_num_threads(1)

def make(level, optimizer):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    kind, _, momentum = optimizer.partition(" ")
    rest = {"momentum": 0.9} if momentum else {}
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=1e-2, **rest)
    return model, optimizer, tritonamp.enable(model, optimizer, level=level)

def step(model, optimizer, amp, i):
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(i))
    optimizer.zero_grad()
    amp.backward(model(x).square().mean())
    optimizer.step()

def bits(model, optimizer, amp):
    state = optimizer.state_dict()["state"]
    return [t.clone() for t in [*model.parameters(), *amp.master_params(),
            *(v for s in state.values() for v in s.values() if isinstance(v, torch.Tensor))]]

def interrupt(*args):
    signal.raise_signal(signal.SIGINT)

run, undisturbed = make(*sys.argv[1:]), make(*sys.argv[1:])
signal.signal(signal.SIGALRM, interrupt)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
step(*run, 0); step(*undisturbed, 0)
draw, done, interrupted = random.Random(0), 1, 0
while interrupted < 40:
    begun = done
    try:
        signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-4, 8e-3))
        for i in range(begun, begun + 100):
            step(*run, i)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        interrupted += 1
    done = run[2].stats()["steps"]
    for i in range(begun, done):
        step(*undisturbed, i)
    same = map(torch.equal, bits(*run), bits(*undisturbed))
    assert list(same).count(False) == 0, (interrupted, begun, done)
    assert run[2].state_dict() == undisturbed[2].state_dict()
print("interrupted", interrupted, "steps", done)
"""


@pytest.mark.crash
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs signal.setitimer")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_ctrl_c_at_any_time(level: str, optimizer: str, tmp_path: Path) -> None:
    """A real SIGINT: the step that it hits is undone or complete."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", textwrap.dedent(CTRL_C), level, optimizer]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=environment, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.startswith("interrupted 40 ")


class InterruptedAt:
    """Raises KeyboardInterrupt once, before one of the instructions that enter or leave a policy.

    Args:
        instruction: number of the instruction, from 1.
    """

    INNER: ClassVar = [
        function.__code__
        for function in (
            context._enter,
            context._restore,
            active.push_policy,
            active.pop_policies,
        )
    ]

    def __init__(self, instruction: int) -> None:
        self.left = instruction
        lines, first = inspect.getsourcelines(context.run_under)
        self._guarded = first + [line.strip() for line in lines].index("try:")

    def __call__(self, frame: Any, event: str, arg: Any) -> Any:
        is_inner = frame.f_code in self.INNER
        if not is_inner and frame.f_code is not context.run_under.__code__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and (is_inner or frame.f_lineno > self._guarded):
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt
        return self


def in_a_block(run: Seeded) -> None:
    with run.amp.autocast():
        torch.ones(2, device=run.device).sum()


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("enter", [lambda run: run.loss(0), in_a_block], ids=["forward", "block"])
def test_ctrl_c_while_a_policy_is_entered_or_left(
    start: Any, enter: Callable[[Seeded], Any], outer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block in C++ has a test of its own (tests/casts/test_block.py)."""
    monkeypatch.setattr(_facts, "_native", _facts._InPython)
    run = start("O1", "AdamW")
    kind, tracing = run.device.type, sys.gettrace()

    def now() -> list[Any]:
        dtype, cache = torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
        nesting = torch.autocast_increment_nesting()
        torch.autocast_decrement_nesting()
        return [torch.is_autocast_enabled(kind), dtype, cache, nesting, active.active()]

    with torch.autocast(kind, dtype=torch.bfloat16, enabled=outer):
        before, interrupted = now(), 0
        while True:
            tracer = InterruptedAt(interrupted + 1)
            sys._getframe().f_trace_opcodes = True  # before settrace, for Python 3.12
            sys.settrace(tracer)
            try:
                enter(run)
                break
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                sys.settrace(tracing)
            assert now() == before
        assert tracer.left > 0 and interrupted > 50


def test_an_error_of_another_signals_handler_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python runs handlers of signals that have arrived before it installs one."""

    def alarm(*args: Any) -> None:
        raise ValueError("on purpose")

    def installed(number: int, handler: Any) -> Any:
        signal.raise_signal(signal.SIGALRM)
        return signal.signal(number, handler)

    interrupt, before = signal.getsignal(signal.SIGINT), signal.signal(signal.SIGALRM, alarm)
    try:
        fake = mock.Mock(wraps=interrupts._signal, signal=installed)
        monkeypatch.setattr(interrupts, "_signal", fake)
        with pytest.raises(ValueError, match="on purpose"), interrupts.Uninterrupted():
            pass
        assert signal.getsignal(signal.SIGINT) is interrupt
    finally:
        signal.signal(signal.SIGALRM, before)


def test_the_handler_of_ctrl_c_is_left_as_it_was(start: Any) -> None:
    """It hears of a signal that came in the step at its end; of a second one at once."""
    heard: list[str] = []
    run = start()
    mine = signal.signal(signal.SIGINT, lambda *args: heard.append("handler"))
    try:
        ours = signal.getsignal(signal.SIGINT)

        def hook(*args: Any) -> None:
            signal.raise_signal(signal.SIGINT)
            heard.append("hook")
            signal.raise_signal(signal.SIGINT)

        run.optimizer.register_step_pre_hook(hook)
        run.step(0)
        assert heard == ["hook", "handler", "handler"]
        assert signal.getsignal(signal.SIGINT) is ours
    finally:
        signal.signal(signal.SIGINT, mine)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_failed_step_takes_back_no_record_but_its_own(start: Any, level: str) -> None:
    """The record of the step before has not been read when memory runs out, at any point."""
    run, undisturbed = start(level, backend="eager"), start(level, backend="eager")
    for at in range(1, 40):
        for one in (run, undisturbed):
            one.amp.backward(one.loss(at))
        with pytest.raises(torch.OutOfMemoryError), OutOfMemory(at):
            run.optimizer.step()
        for one in (run, undisturbed):
            one.finish()
    assert run.numbers() == undisturbed.numbers()
    assert len(run.amp.history) == 39


def test_what_cannot_be_undone_keeps_its_record(start: Any) -> None:
    """Kernels keep no copies of the old values, so the decision stands if the step fails."""
    if start("O0").device.type == "cpu" and not _launch.INTERPRETED:
        pytest.skip("no kernels here")
    run = start("O2", backend="triton")
    run.step(0)
    run.amp.backward(run.loss(1))
    betas = run.optimizer.param_groups[0].pop("betas")
    with pytest.raises(KeyError):
        run.optimizer.step()
    run.optimizer.param_groups[0]["betas"] = betas
    assert len(run.amp.history) == 2
    run.optimizer.step()
    assert run.causes == [None, None]
