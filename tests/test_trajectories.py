"""Whole training runs under torch's engines, held against the plain run of the same enabled model.

Every run has clean steps, a growth of the loss scale, and a step that is skipped for its overflow.
"""

import contextlib
import functools
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
from covering import more
from helpers import snapshot
from runs import LEVELS, Training
from torch import Tensor, nn
from torch.nn.parallel import replicate
from torch.utils.checkpoint import checkpoint

import tritonamp

pytestmark = pytest.mark.steps

STEPS = 12
OVERFLOWS = 5  # the step whose loss is finite, and too large to be scaled
TOO_LARGE = 2.0**120
SCALE = 2.0**12
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, eps=0.25, weight_decay=0.0),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.5),
}
# by how much a step moves a parameter at most, for each unit of gradient: AdamW's lr / eps, twice
# for its two moments; SGD's lr / (1 - momentum)
STEP_SIZES = {"AdamW": 2 * 0.01 / 0.25, "SGD": 0.05 / (1 - 0.5)}

HALF_RUNS = [("O1", "SGD"), ("O2", "AdamW"), *more([("O1", "AdamW"), ("O2", "SGD")])]
each_run = pytest.mark.parametrize(
    ("level", "optimizer"), [*HALF_RUNS, ("O0", "AdamW"), ("O3", "SGD")]
)
each_half_run = pytest.mark.parametrize(("level", "optimizer"), HALF_RUNS)
needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and not torch.cuda.is_available(),
    reason="inductor needs a C++ compiler on the CPU",
)

# the same as "default" on the CPU, where compiling takes its time
COMPILED = [("O2", "reduce-overhead")]
if torch.cuda.is_available():
    COMPILED += [("O2", "default"), ("O1", "reduce-overhead"), ("O1", "default")]


@pytest.fixture(autouse=True)
def _convolutions_of_the_same_bits() -> Iterator[None]:
    with torch.backends.cudnn.flags(benchmark=False, deterministic=True, allow_tf32=False):
        yield


class Mixing(nn.Module):
    """A convolution, norms, a softmax and dropout; ``part`` runs its middle."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.query, self.value = nn.Linear(16, 16), nn.Linear(16, 16)
        self.last_norm, self.last = nn.LayerNorm(16), nn.Linear(16, 3)
        self.dropout = dropout
        self.part: Callable[..., Tensor] = lambda function, *args: function(*args)

    def middle(self, tokens: Tensor) -> Tensor:
        scores = self.query(tokens) @ tokens.transpose(-1, -2) / 4
        mixed = scores.softmax(-1) @ self.value(tokens)
        return self.last_norm(tokens + nn.functional.dropout(mixed, self.dropout, self.training))

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.tanh(self.norm(self.conv(x))).flatten(2)
        return self.last(self.part(self.middle, tokens)).mean(1)


class Small(nn.Module):
    """What a C++ compiler is done with in seconds."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(32, 16), nn.LayerNorm(16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(torch.tanh(self.first(x.flatten(1)))).softmax(-1))


class Engine(Training):
    """``step`` is the plain way to train; ``net`` is the enabled model, and ``model`` what runs."""

    def __init__(
        self,
        device: torch.device,
        level: str,
        optimizer: str,
        dropout: float = 0.0,
        make: Callable[..., nn.Module] = Mixing,
        inside: Callable[[], Any] = contextlib.nullcontext,
        **fields: Any,
    ) -> None:
        def enable(*args: Any, **fields: Any) -> Any:
            with inside():
                return tritonamp.enable(*args, **fields)

        scaler = tritonamp.GradScaler(device.type, init_scale=SCALE, growth_interval=3)
        fields |= {"scaler": scaler, "enable": enable, "lr": None}
        super().__init__(lambda: make(dropout), OPTIMIZERS[optimizer], level, device, **fields)
        self.net = self.model
        self.largest = 0.0  # true gradient so far

    def batches(self) -> Iterator[tuple[int, Tensor, Tensor, float]]:
        """Number, input, target, and what to multiply the loss by."""
        generator = torch.Generator().manual_seed(1)
        for number in range(STEPS):
            x, y = (
                torch.randn(*shape, generator=generator).to(self.device)
                for shape in ((8, 2, 4, 4), (8, 3))
            )
            torch.manual_seed(number)  # for dropout
            yield number, x, y, TOO_LARGE if number == OVERFLOWS else 1.0

    def loss(self, x: Tensor, y: Tensor, factor: float = 1.0) -> Tensor:
        return (self.model(x) - y).square().mean() * factor

    def step(self, x: Tensor, y: Tensor, factor: float) -> Tensor:
        loss = self.loss(x, y, factor)
        self.backward(loss)
        self.take()
        return loss

    def take(self) -> None:
        scale = self.amp.scaler.get_scale()
        grads = [
            float(p.grad.float().abs().max()) / scale
            for p in self.net.parameters()
            if p.grad is not None
        ]
        self.largest = max([self.largest] + [g for g in grads if g < float("inf")])
        self.finish()


Step = Callable[[Engine, Tensor, Tensor, float], Tensor]


class Trajectory(NamedTuple):
    """What a run has passed through, and where it has come to."""

    losses: list[Tensor]
    masters: list[Tensor]  # what the optimizer steps on
    others: list[Tensor]  # parameters, the optimizer's state
    scales: list[float]
    counts: dict[str, Any]
    largest: float


def followed(run: Engine, step: Step = Engine.step, without: int | None = None) -> Trajectory:
    losses, scales = [], []
    for number, x, y, factor in run.batches():
        if number != without:
            losses.append(step(run, x, y, factor).detach() / factor)
            scales.append(run.amp.scaler.get_scale())
    return ended(run, losses, scales)


def ended(run: Engine, losses: list[Tensor], scales: list[float]) -> Trajectory:
    keys = ("steps", "skipped", "scale_overflows", "forward_faults", "growth_tracker")
    counts = {key: value for key, value in run.amp.stats().items() if key in keys}
    masters, others = run.masters(), snapshot(run.net, run.optimizer)
    run.amp.disable()
    return Trajectory(losses, masters, others, scales, counts, run.largest)


@functools.cache
def plain(device: torch.device, level: str, optimizer: str, **options: Any) -> Trajectory:
    trajectory = followed(Engine(device, level, optimizer, **options))
    assert trajectory.counts["skipped"] == trajectory.counts["scale_overflows"] == 1
    assert trajectory.counts["steps"] == STEPS - 1
    assert (
        max(trajectory.scales) > SCALE
        and trajectory.scales[OVERFLOWS] < trajectory.scales[OVERFLOWS - 1]
    )
    return trajectory


def assert_same_bits(found: Trajectory, expected: Trajectory) -> None:
    assert (found.scales, found.counts) == (expected.scales, expected.counts)
    ours, theirs = ([*t.losses, *t.masters, *t.others] for t in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def assert_close(found: Trajectory, expected: Trajectory, optimizer: str, roundings: int) -> None:
    """The same decisions, and values that differ by what other roundings of the gradients can do.

    ``roundings`` of each gradient are half a float16 unit of at most the largest one, 2: what a
    difference of one step adds in the later ones.
    """
    assert (found.scales, found.counts) == (expected.scales, expected.counts)
    bound = STEPS * STEP_SIZES[optimizer] * expected.largest * 2 * roundings * 2.0**-11
    for ours, theirs in zip(found.masters, expected.masters, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=bound)


# Other ways to take the same step


def accumulating(run: Engine, x: Tensor, y: Tensor, factor: float) -> Tensor:
    """Half of the gradients, twice: exact."""
    for _ in range(2):
        loss = run.loss(x, y, factor)
        run.amp.backward(loss / 2)
    run.take()
    return loss


def autograd_grad(run: Engine, x: Tensor, y: Tensor, factor: float) -> Tensor:
    loss, params = run.loss(x, y, factor), list(run.net.parameters())
    with run.amp.scale_loss(loss) as scaled:
        for param, grad in zip(params, torch.autograd.grad(scaled, params), strict=True):
            param.grad = grad
    run.take()
    return loss


def functional_call(run: Engine, x: Tensor, y: Tensor, factor: float) -> Tensor:
    params = dict(run.net.named_parameters())
    run.model = lambda x: torch.func.functional_call(run.net, params, (x,))
    return run.step(x, y, factor)


def keeping_gradients(run: Engine, x: Tensor, y: Tensor, factor: float) -> Tensor:
    loss = run.loss(x, y, factor)
    run.amp.backward(loss)
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in run.net.parameters())
    return loss


def clearing_the_model(run: Engine, x: Tensor, y: Tensor, factor: float) -> Tensor:
    loss = run.loss(x, y, factor)
    run.amp.backward(loss)
    run.optimizer.step()
    run.net.zero_grad(set_to_none=False)
    return loss


def evaluating(run: Engine, x: Tensor, y: Tensor, factor: float, mode: Any) -> Tensor:
    """Between backward and step, and after it; also on a batch that no step would survive."""
    loss = run.loss(x, y, factor)
    run.amp.backward(loss)
    for _ in range(2):
        run.net.eval()
        with mode():
            run.model(x)
            run.model(torch.full_like(x, float("inf")))
        run.net.train()
        if run.net.conv.weight.grad is not None:
            run.take()
    return loss


def without_grad(run: Engine, x: Tensor, y: Tensor, factor: float) -> Tensor:
    return evaluating(run, x, y, factor, torch.no_grad)


def in_inference_mode(run: Engine, x: Tensor, y: Tensor, factor: float) -> Tensor:
    return evaluating(run, x, y, factor, torch.inference_mode)


def watched(run: Engine, x: Tensor, y: Tensor, factor: float) -> Tensor:
    with torch.autograd.detect_anomaly(check_nan=False):
        return run.step(x, y, factor)


WAYS: list[Step] = [
    accumulating,
    autograd_grad,
    functional_call,
    keeping_gradients,
    clearing_the_model,
    without_grad,
    in_inference_mode,
    watched,
]


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("way", WAYS)
@each_run
def test_the_same_bits(device: torch.device, way: Step, level: str, optimizer: str) -> None:
    found = followed(Engine(device, level, optimizer), way)
    assert_same_bits(
        found._replace(largest=0.0), plain(device, level, optimizer)._replace(largest=0.0)
    )


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@each_half_run
def test_a_batch_that_anomaly_detection_stops_never_was(
    device: torch.device, level: str, optimizer: str
) -> None:
    def step(run: Engine, x: Tensor, y: Tensor, factor: float) -> Tensor:
        with torch.autograd.detect_anomaly():
            if factor == 1.0:
                return run.step(x, y, factor)
            with pytest.raises(RuntimeError, match="returned nan values"):
                run.step(x, y, factor)
            run.optimizer.zero_grad()
        return torch.zeros((), device=device)

    stopped = followed(Engine(device, level, optimizer), step)
    for per_step in (stopped.losses, stopped.scales):
        del per_step[OVERFLOWS]
    assert_same_bits(stopped, followed(Engine(device, level, optimizer), without=OVERFLOWS))


@each_run
def test_deterministic_algorithms(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, level: str, optimizer: str
) -> None:
    """Which also fills with NaN all memory that is not written yet."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        found = followed(Engine(device, level, optimizer))
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same_bits(found, plain(device, level, optimizer))


@pytest.mark.parametrize("use_reentrant", [True, False])
@each_run
def test_activation_checkpointing(
    device: torch.device, level: str, optimizer: str, use_reentrant: bool
) -> None:
    run = Engine(device, level, optimizer, dropout=0.2)
    run.net.part = functools.partial(checkpoint, use_reentrant=use_reentrant)
    assert_same_bits(followed(run), plain(device, level, optimizer, dropout=0.2))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_of_two_models_that_take_turns(
    device: torch.device, use_reentrant: bool
) -> None:
    """Each is recomputed under its own policy, whichever ran last."""
    kinds = [("O1", {"softmax_dtype": torch.float32}), ("O2", {})]

    def runs(part: Callable[..., Tensor]) -> list[Trajectory]:
        both = [Engine(device, level, "SGD", **fields) for level, fields in kinds]
        losses: list[list[Tensor]] = [[], []]
        for run in both:
            run.net.part = part
        for _, x, y, _ in both[0].batches():
            now = [run.loss(x, y) for run in both]
            for run, loss, seen in zip(both, now, losses, strict=True):
                run.amp.backward(loss)
                run.take()
                seen.append(loss.detach())
        return [ended(run, seen, []) for run, seen in zip(both, losses, strict=True)]

    kept = runs(lambda function, *args: function(*args))
    recomputed = runs(functools.partial(checkpoint, use_reentrant=use_reentrant))
    for found, expected in zip(recomputed, kept, strict=True):
        assert_same_bits(found, expected)


@each_run
def test_replicas_in_threads(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, level: str, optimizer: str
) -> None:
    """What nn.DataParallel does, with copies on one device."""

    def broadcast(
        tensors: list[Tensor], devices: list[int], detach: bool = False
    ) -> list[list[Tensor]]:
        return [[(t.detach() if detach else t).clone() for t in tensors] for _ in devices]

    monkeypatch.setattr(
        sys.modules[replicate.__module__], "_broadcast_coalesced_reshape", broadcast
    )

    def model(run: Engine, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(2) as threads:
            return torch.cat(
                list(threads.map(lambda m, part: m(part), replicate(run.net, [0, 1]), x.chunk(2)))
            )

    threaded, plainly = Engine(device, level, optimizer), Engine(device, level, optimizer)
    threaded.model = functools.partial(model, threaded)
    plainly.model = lambda x: torch.cat([plainly.net(part) for part in x.chunk(2)])
    assert_same_bits(followed(threaded), followed(plainly))


@pytest.mark.parametrize("level", LEVELS)
def test_enabling_in_inference_mode(device: torch.device, level: str) -> None:
    """For inference, and the training that comes after it."""
    run = Engine(device, level, "AdamW", inside=torch.inference_mode)
    with torch.inference_mode():
        run.model(torch.randn(2, 2, 4, 4, device=device))
    assert_same_bits(followed(run), plain(device, level, "AdamW"))


# Arithmetic in another order


def chunks(run: Engine, x: Tensor, y: Tensor, factor: float) -> Tensor:
    losses = [run.loss(*part, factor) for part in zip(x.chunk(2), y.chunk(2), strict=True)]
    for loss in losses:
        run.amp.backward(loss / 2)
    run.take()
    return torch.stack(losses).mean()


@each_half_run
def test_micro_batches(device: torch.device, level: str, optimizer: str) -> None:
    """Rounded in each of two parts, and in their sum."""
    assert_close(
        followed(Engine(device, level, optimizer), chunks),
        plain(device, level, optimizer),
        optimizer,
        3,
    )


@pytest.mark.parametrize("order", ["before", "after"])
@each_half_run
def test_channels_last(device: torch.device, level: str, optimizer: str, order: str) -> None:
    """Another convolution: its output and two gradients may be rounded the other way."""

    def make(dropout: float) -> nn.Module:
        net = Mixing(dropout)
        return net.to(memory_format=torch.channels_last) if order == "before" else net  # type: ignore[call-overload]

    def step(run: Engine, x: Tensor, y: Tensor, factor: float) -> Tensor:
        assert run.net.conv.weight.is_contiguous(memory_format=torch.channels_last)
        return run.step(x.to(memory_format=torch.channels_last), y, factor)

    run = Engine(device, level, optimizer, make=make)
    if order == "after":
        run.net.to(memory_format=torch.channels_last)
    assert_close(followed(run, step), plain(device, level, optimizer), optimizer, 3)


@each_half_run
def test_gradient_penalty(device: torch.device, level: str, optimizer: str) -> None:
    """A backward through a backward, held against FP32: each passes some eight roundings."""

    def step(run: Engine, x: Tensor, y: Tensor, factor: float) -> Tensor:
        x.requires_grad_()
        output = run.model(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        penalty = slope.flatten(1).norm(dim=1).sub(1).square().mean()
        loss = ((output - y).square().mean() + penalty) * factor
        run.amp.backward(loss)
        run.take()
        return loss

    expected = followed(Engine(device, "O0", optimizer), step)
    assert_close(followed(Engine(device, level, optimizer), step), expected, optimizer, 16)


# torch.compile


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:.*torch._dynamo")
@pytest.mark.parametrize(("level", "optimizer"), [("O1", "SGD"), ("O2", "AdamW")])
def test_traced(device: torch.device, level: str, optimizer: str) -> None:
    torch.compiler.reset()
    run = Engine(device, level, optimizer)
    run.model = torch.compile(run.net, backend="aot_eager", fullgraph=True)
    assert_same_bits(followed(run), plain(device, level, optimizer))


@pytest.mark.compiled
@needs_compiler
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("level", "mode"), COMPILED)
def test_compiled(device: torch.device, level: str, mode: str) -> None:
    """Between operations that it makes one, inductor does not round to half: eight times on the way
    back.
    """
    torch.compiler.reset()
    run = Engine(device, level, "AdamW", make=Small)
    run.model = torch.compile(run.net, mode=mode, fullgraph=True)
    assert_close(followed(run), plain(device, level, "AdamW", make=Small), "AdamW", 8)


# CUDA graphs


@pytest.mark.long
@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("level", LEVELS)
def test_a_captured_training_step(cuda: torch.device, level: str, max_norm: float | None) -> None:
    """Forward, backward and step, replayed with other learning rates, an overflow, and a batch with
    NaN.
    """
    trajectories = []
    for captured in (False, True):
        run = Engine(cuda, level, "AdamW")
        (group,) = run.optimizer.param_groups
        group["lr"] = torch.tensor(0.01, device=cuda)
        batch = [x.clone() for x in next(run.batches())[1:3]] + [torch.ones((), device=cuda)]
        step = functools.partial(_step_of, run, *batch, max_norm)
        losses, scales, graph, loss = [], [], torch.cuda.CUDAGraph(), None
        for number, x, y, factor in run.batches():
            group["lr"].mul_(0.9)
            for static, new in zip(batch, (x, y, torch.tensor(factor)), strict=True):
                static.copy_(new)
            if number == 8:
                batch[0][0, 0] = float("nan")
            if captured and number == 3:
                with torch.cuda.graph(graph):
                    loss = step()
            if loss is None:
                # warm-up, as torch.cuda.graph wants it
                with torch.cuda.stream(torch.cuda.Stream()):
                    torch.cuda.synchronize()
                    losses.append(step().clone())
                    torch.cuda.synchronize()
            else:
                graph.replay()
                losses.append(loss.clone())
            scales.append(run.amp.scaler.get_scale())
        trajectories.append(ended(run, [x.nan_to_num(7.0) for x in losses], scales))
    eager, replayed = trajectories
    assert (eager.counts["scale_overflows"], eager.counts["forward_faults"]) == (1, 1)
    assert_same_bits(replayed, eager)


def _step_of(run: Engine, x: Tensor, y: Tensor, factor: Tensor, max_norm: float | None) -> Tensor:
    run.optimizer.zero_grad()
    loss = (run.model(x) - y).square().mean() * factor
    run.amp.backward(loss)
    if max_norm is not None:
        run.amp.clip_grad_norm_(max_norm)
    run.optimizer.step()
    return loss.detach()
