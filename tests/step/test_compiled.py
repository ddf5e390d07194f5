"""torch.compile of whole training steps: the graphs it makes, and the bits they train to."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from helpers import Net, same
from runs import Training
from torch import Tensor, nn

import tritonamp
from tritonamp.apex import amp as apex
from tritonamp.apex.amp import _amp_state
from tritonamp.kernels import _facts
from tritonamp.kernels._dynamo import between_graphs

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.steps,
    # torch's own, which it makes while it traces, and hides where warnings are no errors
    pytest.mark.filterwarnings("ignore:.*torch._dynamo"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

STEPS = 7
OVERFLOWS = 4  # the step whose loss is finite, and too large to be scaled
TOO_LARGE = 2.0**120


class CompiledSteps(Training):
    """A classifier, its schedule and the average of its weights."""

    def __init__(
        self, level: str, dtype: torch.dtype, optimizer: str, dropout: float = 0.0
    ) -> None:
        def model() -> nn.Module:
            return nn.Sequential(Net(), nn.Softmax(-1), nn.Dropout(dropout))

        self.scaler = tritonamp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        super().__init__(model, optimizer, level, dtype=dtype, scaler=self.scaler)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.ema = self.amp.ema(0.5)

    def loss(self, x: Tensor, y: Tensor, factor: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.model(x), y) * factor

    @staticmethod
    def batches() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield inputs, targets, and a factor of the loss."""
        torch.manual_seed(1)
        for number in range(STEPS):
            factor = torch.tensor(TOO_LARGE if number == OVERFLOWS else 1.0)
            yield torch.randn(8, 6), torch.randint(0, 3, (8,)), factor


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> None:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()


# ways to take a step


def plain(run: CompiledSteps, x: Tensor, y: Tensor, factor: Tensor) -> Tensor:
    run.optimizer.zero_grad()
    loss = run.loss(x, y, factor)
    run.amp.backward(loss)
    run.optimizer.step()
    return loss


def with_all_there_is(run: CompiledSteps, x: Tensor, y: Tensor, factor: Tensor) -> Tensor:
    loss = run.loss(x, y, factor)
    run.amp.backward(loss)
    run.amp.clip_grad_norm_(0.1)
    run.optimizer.step()
    run.amp.step_schedulers(run.schedule)
    run.ema.update()
    run.optimizer.zero_grad()
    return loss


def of_two_losses(run: CompiledSteps, x: Tensor, y: Tensor, factor: Tensor) -> Tensor:
    """Take two steps, as adversarial networks do; the code after the first is compiled, too."""
    first = plain(run, x, y, factor)
    loss = run.loss(x, y, factor) + first.detach()
    run.amp.backward(loss)
    run.optimizer.step()
    run.optimizer.zero_grad()
    return loss


def in_a_block(run: CompiledSteps, x: Tensor, y: Tensor, factor: Tensor) -> Tensor:
    loss = run.loss(x, y, factor)
    with run.amp.scale_loss(loss, run.optimizer) as scaled:
        scaled.backward()
    run.amp.unscale_()
    run.optimizer.step()
    run.optimizer.zero_grad()
    return loss


def as_in_torch(run: CompiledSteps, x: Tensor, y: Tensor, factor: Tensor) -> Tensor:
    run.optimizer.zero_grad()
    loss = run.loss(x, y, factor)
    run.scaler.scale(loss).backward()
    run.scaler.unscale_(run.optimizer)
    run.scaler.step(run.optimizer)
    run.scaler.update()
    return loss


Step = Callable[[CompiledSteps, Tensor, Tensor, Tensor], Tensor]


class Case(NamedTuple):
    """A way to take a step, its settings, and the graphs that torch.compile makes."""

    step: Step
    level: str
    dtype: torch.dtype
    optimizer: str
    backend: str
    breaks: int
    graphs: int


FP16, BF16 = torch.float16, torch.bfloat16
CASES = [
    Case(plain, "O1", FP16, "AdamW", "eager", breaks=3, graphs=1),
    Case(with_all_there_is, "O2", FP16, "AdamW", "aot_eager", breaks=6, graphs=1),
    # one more: at the call of ``plain``
    Case(of_two_losses, "O2", BF16, "SGD", "aot_eager", breaks=7, graphs=2),
    Case(in_a_block, "O3", FP16, "SGD", "aot_eager", breaks=1, graphs=1),
    Case(as_in_torch, "O2", FP16, "NAdam", "aot_eager", breaks=6, graphs=1),
]


def counts() -> tuple[int, int]:
    """Return graph breaks and graphs since the last reset."""
    counters = torch._dynamo.utils.counters
    return sum(counters["graph_break"].values()), counters["stats"]["unique_graphs"]


def trained(
    case: Case, step: Step, after: Callable[[], Any] = lambda: None
) -> tuple[list[Tensor], Any, list[Any]]:
    """Return all numbers of a run, its history, and the result of ``after`` for each step."""
    dropout = 0.1 if case.backend == "eager" else 0.0  # which others round otherwise
    numbers, said = [], []
    with CompiledSteps(case.level, case.dtype, case.optimizer, dropout) as run:
        for batch in run.batches():
            numbers += [step(run, *batch).detach(), torch.tensor(run.scaler.get_scale())]
            said.append(after())
        numbers += [*run.everything(), torch.tensor(run.schedule.get_last_lr())]
        numbers += run.ema.state_dict().values()
        numbers = [t.detach().clone() for t in numbers]
        return numbers, ([repr(r) for r in run.amp.history], run.amp.explain()), said


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.step.__name__}-{case.level}")
def test_a_whole_step(case: Case) -> None:
    """The graphs of its losses and no more, also when scale and rates change, and after a skip."""
    compiled = torch.compile(case.step, backend=case.backend)
    numbers, history, made = trained(case, compiled, counts)
    expected, expected_history, _ = trained(case, case.step)
    torch.testing.assert_close(numbers, expected, rtol=0, atol=0)
    assert history == expected_history
    assert "0.first.weight" in history[1]
    assert made == [(case.breaks, case.graphs)] * STEPS


@pytest.mark.parametrize("case", CASES[:3], ids=lambda case: case.level)
def test_forward_and_loss_are_one_graph(case: Case) -> None:
    def step(run: CompiledSteps, *batch: Tensor) -> Tensor:
        run.loss = functools.partial(compiled, run)  # type: ignore[method-assign]
        return plain(run, *batch)

    compiled = torch.compile(CompiledSteps.loss, backend=case.backend, fullgraph=True)
    numbers, history, made = trained(case, step, counts)
    expected, expected_history, _ = trained(case, plain)
    torch.testing.assert_close(numbers, expected, rtol=0, atol=0)
    assert history == expected_history
    assert made == [(0, 1)] * STEPS


@pytest.fixture
def _apex_is_off_afterwards() -> Iterator[None]:
    yield
    _amp_state.handle._deactivate()


def trained_by_apex(level: str, compiled: Callable[[Any], Any]) -> tuple[list[Tensor], list[Any]]:
    """Return losses and weights of a loop in apex's words, and graph counts after each step."""
    torch.manual_seed(0)
    net = Net()
    model, optimizer = apex.initialize(
        net, torch.optim.AdamW(net.parameters(), lr=0.01), opt_level=level, verbosity=0
    )

    def step(x: Tensor, y: Tensor, factor: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y) * factor
        with apex.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        nn.utils.clip_grad_norm_(apex.master_params(optimizer), 0.1)
        optimizer.step()
        return loss

    run, numbers, made = compiled(step), [], []
    for batch in CompiledSteps.batches():
        numbers.append(run(*batch).detach())
        made.append(counts())
    return [*numbers, *(p.detach().clone() for p in apex.master_params(optimizer))], made


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.usefixtures("_apex_is_off_afterwards")
# torch 2.11 does not know the operators of tensors, which O1 wraps: it breaks there
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")
def test_a_step_in_the_words_of_apex(level: str) -> None:
    numbers, made = trained_by_apex(level, functools.partial(torch.compile, backend="eager"))
    _amp_state.handle._deactivate()
    expected, _ = trained_by_apex(level, lambda step: step)
    torch.testing.assert_close(numbers, expected, rtol=0, atol=0)
    assert made == [made[0]] * STEPS
    assert made[0][1] > 0


def half_weights(compiled: Callable[[Any], Any]) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(6, 3).half()
    optimizer = tritonamp.optim.AdamW(model.parameters(), lr=0.1)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).float().square().sum().backward()
        optimizer.step()

    run = compiled(step)
    for _ in range(3):
        run(torch.randn(8, 6).half())
    return [p.detach() for p in model.parameters()]


def test_half_parameters_without_enable() -> None:
    weights = half_weights(functools.partial(torch.compile, backend="eager"))
    assert counts()[1] == 1
    assert same(weights, half_weights(lambda step: step))


class Broken(nn.Module):
    """A forward with a graph break, after which each frame is compiled by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.last(x)


def weights_of_broken(compiled: Callable[..., Any]) -> list[Tensor]:
    torch.manual_seed(0)
    model = Broken()
    optimizer = torch.optim.AdamW(model.parameters())
    with tritonamp.enable(model, optimizer, level="O2") as amp:
        run = compiled(model)
        for _ in range(3):
            optimizer.zero_grad()
            amp.backward(run(torch.randn(8, 6)).square().mean())
            optimizer.step()
        return [p.detach().clone() for p in amp.master_params()]


def test_a_broken_forward_asks_cpp_nothing_in_graphs() -> None:
    """``push``, which rounds values that were written to masters, is a frame of its own then."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    _facts.use_native()
    weights = weights_of_broken(functools.partial(torch.compile, backend="eager"))
    reasons = torch._dynamo.utils.counters["graph_break"]
    assert not [reason for reason in reasons if "_facts" in reason]
    assert same(weights, weights_of_broken(lambda model: model))


def test_a_whole_step_is_no_single_graph() -> None:
    with CompiledSteps("O2", FP16, "AdamW") as run:
        compiled = torch.compile(plain, backend="eager", fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="function that returns the loss"):
            compiled(run, *next(run.batches()))
        assert run.amp.stats()["steps"] == 0


def test_a_call_between_graphs_has_no_frame_of_its_own() -> None:
    def function() -> None:
        """Do nothing."""

    assert between_graphs(function) is function


def weights_of_a_step(
    compiled: Callable[..., Any], optimizer_of: Any, **fields: Any
) -> list[Tensor]:
    """Return the FP32 values that a step, compiled as a whole, has trained."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False))
    optimizer = optimizer_of(model.parameters())
    with tritonamp.enable(model, optimizer, level="O2", **fields) as amp:

        @compiled
        def step(x: Tensor, factor: Tensor) -> None:
            optimizer.zero_grad()
            amp.backward(model(x).square().mean() * factor)
            optimizer.step()

        for number in range(4):  # the third overflows
            step(torch.randn(8, 6), torch.tensor(TOO_LARGE if number == 2 else 1.0))
        assert amp.stats()["skipped"] == 1
        return [p.detach().clone() for p in amp.master_params()]


@pytest.mark.parametrize(
    ("optimizer", "fields"),
    [
        (functools.partial(tritonamp.optim.Muon, lr=0.01), {}),
        (functools.partial(torch.optim.AdamW, lr=0.01), {"state": "bf16"}),
        (functools.partial(torch.optim.AdamW, lr=0.01), {"state": "8bit"}),
    ],
    ids=["Muon", "bf16", "8bit"],
)
def test_optimizers_in_a_compiled_step(optimizer: Any, fields: dict[str, str]) -> None:
    compiled = functools.partial(torch.compile, backend="eager")
    weights = weights_of_a_step(compiled, optimizer, **fields)
    assert same(weights, weights_of_a_step(lambda step: step, optimizer, **fields))
