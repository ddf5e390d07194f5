"""Models that are used past ``forward``: their other methods run as it does."""

import contextlib
import copy
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tritonamp.casts import active
from tritonamp.casts.methods import entered_methods

FP16, FP32 = torch.float16, torch.float32


def undecorated(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that does not say what it wraps."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 4)
        self.decoder = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.scale = nn.Parameter(torch.ones(4))
        self.criterion = nn.BCELoss()
        self.dtypes: list[torch.dtype] = []

    def noted(self, x: Tensor) -> Tensor:
        self.dtypes.append(x.dtype)
        return x

    def encode(self, x: Tensor) -> Tensor:
        return self.noted(self.encoder(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))

    def decode(self, z: Tensor) -> Tensor:
        return self.noted(self.decoder(z))


class Used(Base):
    """One method of each kind that is entered."""

    def encode(self, x: Tensor) -> Tensor:
        return super().encode(x)

    def mode_of(self, x: Tensor, name: str) -> Tensor:
        return self.noted(getattr(self, "encoder" if name == "encode" else name)(x))

    @torch.no_grad()
    def without_gradients(self, x: Tensor) -> Tensor:
        return self.noted(self.encoder(x))

    @undecorated
    def hidden(self, x: Tensor) -> Tensor:
        return self.noted(self.encoder(x))

    def lazily(self, x: Tensor) -> Tensor:
        return (lambda y: self.noted(self.encoder(y)))(x)

    def by_another(self, x: Tensor) -> Tensor:
        return self._private(x)

    def _private(self, x: Tensor) -> Tensor:
        return self.noted(self._the_encoder(x))

    @property
    def _the_encoder(self) -> nn.Module:
        return self.encoder

    def recursive(self, x: Tensor, times: int = 3) -> Tensor:
        return self.recursive(self.noted(self.encoder(x)), times - 1) if times else x

    def by_forward(self, x: Tensor) -> Tensor:
        return self.encoder(self(x))

    def linear(self, x: Tensor, name: str = "encoder") -> Tensor:
        return self.noted(F.linear(x, self.encoder.weight))

    only_x = functools.partialmethod(linear, name="encoder")


ENTERED = [
    *("decode", "encode", "without_gradients", "hidden", "lazily", "by_another", "recursive"),
    *("by_forward", "linear", "only_x", "mode_of"),
]


class Left(Base):
    """One method of each kind that is not."""

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return self.criterion(output.sigmoid(), target)

    def score(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self(x), target)

    def train_on(self, x: Tensor) -> None:
        self.encoder(x).sum().backward()

    def set_scale(self, scale: Tensor) -> None:
        with torch.no_grad():
            self.scale.copy_(scale)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.encoder.parameters())

    def stream(self, x: Tensor) -> Iterator[Tensor]:
        yield self.encoder(x)

    async def answer(self, x: Tensor) -> Tensor:
        return self.encoder(x)

    @contextlib.contextmanager
    def without_encoder(self) -> Iterator[None]:
        kept, self.encoder = self.encoder, nn.Identity()
        yield
        self.encoder = kept

    @staticmethod
    def of_the_class(x: Tensor) -> Tensor:
        return x

    @functools.cached_property
    def width(self) -> int:
        return self.encoder.in_features

    @property
    def bound(self) -> Any:
        return self.encode


def test_which_methods_are_entered() -> None:
    assert sorted(entered_methods(Used(), Used)) == sorted(ENTERED)
    assert sorted(entered_methods(Left(), Left)) == ["decode", "encode"]
    for model in (nn.LSTM(2, 2), nn.MultiheadAttention(2, 1)):
        assert entered_methods(model, type(model)) == ()  # torch's own


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("name", ENTERED)
def test_a_method_runs_as_forward_does(
    handles: Any, device: torch.device, name: str, level: str
) -> None:
    if name == "by_forward" and level == "O3":
        pytest.skip("forward gives FP32, which half layers refuse where there is no op table")
    torch.manual_seed(0)
    model, x = Used().to(device), torch.randn(3, 4, device=device)
    args = (x, "encode") if name == "mode_of" else (x,)
    expected = getattr(model, name)(*args)
    model.dtypes.clear()
    handles(model, level=level)
    output = getattr(model, name)(*args)
    assert output.dtype is FP32
    assert set(model.dtypes) == {FP32 if level == "O0" else FP16}
    # three layers of 4 products, each rounded by 2^-11 of about 1
    torch.testing.assert_close(output, expected, rtol=0, atol=0 if level == "O0" else 8e-3)
    assert not active.thread.stack and not torch.is_autocast_enabled(device.type)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_what_is_not_entered_is_as_without_us(handles: Any, level: str) -> None:
    model = Left()
    parameter_free = model.loss(torch.zeros(2, 4), torch.full((2, 4), 0.3))
    handles(model, level=level)
    assert torch.equal(model.loss(torch.zeros(2, 4), torch.full((2, 4), 0.3)), parameter_free)
    target = torch.full((2, 4), 1280.7)
    expected = (model(torch.zeros(2, 4)) - target).square().mean()
    assert torch.equal(model.score(torch.zeros(2, 4), target), expected)
    for name in ("stream", "answer", "without_encoder", "set_scale", "train_on"):
        assert getattr(type(model), name) is vars(Left)[name]
    model.set_scale(torch.full((4,), 1e-8))
    assert model.state_dict()["scale"][0] == (torch.tensor(1e-8).half() if level == "O2" else 1e-8)
    assert model.bound(torch.ones(1, 4)).dtype is FP32 and model.dtypes[-1] is FP16


def test_generators_hold_no_context_while_they_wait(handles: Any) -> None:
    model = Left()
    handles(model, level="O1")
    for output in model.stream(torch.ones(1, 4)):
        assert not active.thread.stack and not torch.is_autocast_enabled("cpu")
        assert output.dtype is FP32


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_inside_a_forward_a_method_is_the_class_s_own(
    handles: Any, device: torch.device, level: str
) -> None:
    """Its half results stay half, also where a segment is computed again."""

    class Inside(Used):
        def forward(self, x: Tensor) -> Tensor:
            hidden = checkpoint(self.encode, x, use_reentrant=False)
            self.dtypes.append(hidden.dtype)
            return self.decode(hidden)

    model = Inside().to(device)
    amp = handles(model, torch.optim.SGD(model.parameters(), lr=0.1), level=level)
    amp.backward(model(torch.ones(2, 4, device=device)).sum() * 1e-3)
    assert set(model.dtypes) == {FP16}
    model.dtypes.clear()
    output = checkpoint(model.encode, torch.ones(2, 4, device=device), use_reentrant=False)
    assert output.dtype is FP32
    amp.backward(output.sum() * 1e-3)
    assert set(model.dtypes) == {FP16}


def test_under_amp_autocast_nothing_is_cast(handles: Any) -> None:
    """As before there were entered methods: whoever wrote it gets half results."""
    model = Used()
    amp = handles(model, level="O1")
    with amp.autocast():
        assert model.encode(torch.ones(1, 4)).dtype is FP16


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_copies_replicas_threads_and_healed_models(handles: Any, level: str) -> None:
    model, seen = Used(), list[torch.dtype]()
    amp = handles(model, level=level)

    def run(other: Any) -> None:
        other.dtypes = seen
        assert other.encode(torch.ones(1, 4)).dtype is FP32

    run(copy.deepcopy(model))
    run(copy.copy(model))
    run(model._replicate_for_data_parallel())
    thread = threading.Thread(target=run, args=(model,))
    thread.start()
    thread.join()
    assert seen == [FP16] * 4
    amp.heal("")
    run(model)
    assert seen[-1] is FP32
    amp.unheal("")
    run(model)
    assert seen[-1] is FP16
    amp.disable()
    assert model.encode.__func__ is Used.encode


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_method_that_raises_leaves_nothing_behind(handles: Any, level: str) -> None:
    model = Used()
    handles(model, level=level)
    with pytest.raises(RuntimeError):
        model.encode(torch.ones(1, 5))
    assert not active.thread.stack and not torch.is_autocast_enabled("cpu")


class Agent(nn.Module):
    """Actor and critic, called by methods only."""

    def __init__(self) -> None:
        super().__init__()
        self.critic, self.actor = nn.Linear(4, 1), nn.Linear(4, 3)

    def get_value(self, x: Tensor) -> Tensor:
        return self.critic(x)

    def policy(self, x: Tensor) -> torch.distributions.Categorical:
        return torch.distributions.Categorical(logits=self.actor(x))

    def get_action_and_value(self, x: Tensor) -> tuple[Tensor, ...]:
        policy = self.policy(x)
        action = policy.sample()
        return action, policy.log_prob(action), policy.entropy(), self.critic(x)

    def weights(self) -> list[Tensor]:
        return [self.critic.weight, self.actor.weight]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_agent_trains_and_its_faults_are_replayed(handles: Any, level: str) -> None:
    torch.manual_seed(0)
    model = Agent()
    optimizer = torch.optim.Adam(model.parameters())
    amp = handles(model, optimizer, level=level)
    before = [p.detach().clone() for p in amp.master_params()]
    action, *floats = model.get_action_and_value(torch.randn(5, 4))
    assert action.dtype is torch.int64 and {t.dtype for t in floats} == {FP32}
    amp.backward(sum(t.mean() for t in floats) * 1e-2)
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(before, amp.master_params(), strict=True))
    policy = model.policy(torch.randn(5, 4))  # of FP32, for what is computed of it outside
    assert policy.logits.dtype is FP32 and type(policy) is torch.distributions.Categorical
    assert model.weights()[0] is model.critic.weight  # handed out, not computed
    optimizer.zero_grad()
    amp.backward(model.get_value(torch.ones(2, 4)).sum() * float("inf"))
    optimizer.step()
    calls: list[torch.dtype] = []
    model.critic.register_forward_hook(lambda module, args, result: calls.append(result.dtype))
    amp.explain(replay=True)
    assert calls and set(calls) == {FP16}


def test_compiled(handles: Any) -> None:
    model = Used()
    handles(model, level="O2")
    expected = model.encode(torch.ones(2, 4)), model(torch.ones(2, 4))
    encode = torch.compile(model.encode, backend="eager", fullgraph=True)
    forward = torch.compile(model, backend="eager", fullgraph=True)
    model.noted = lambda x: x  # type: ignore[method-assign]
    assert torch.equal(encode(torch.ones(2, 4)), expected[0])
    assert torch.equal(forward(torch.ones(2, 4)), expected[1])
    assert not active.thread.stack


def test_functional_calls_and_transforms(handles: Any) -> None:
    model = Used()
    handles(model, level="O1")
    model.noted = lambda x: x  # type: ignore[method-assign]
    x = torch.randn(3, 4)
    batched = torch.func.vmap(model.encode)(x)
    assert batched.dtype is FP32
    torch.testing.assert_close(batched, model.encode(x), rtol=0, atol=2e-3)
    assert torch.func.grad(lambda v: model.encode(v).sum())(x).dtype is FP32


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_loss_computed_past_all_of_them_is_told_once(
    handles: Any, caplog: pytest.LogCaptureFixture, level: str
) -> None:
    model = Left()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = handles(model, optimizer, level=level)
    x = torch.ones(1, 4, dtype=model.encoder.weight.dtype)
    with caplog.at_level(logging.WARNING, "tritonamp"):
        for _ in range(2):
            amp.backward(next(model.stream(x)).sum() * 1e-3)
    (line,) = [r.getMessage() for r in caplog.records if "op table" in r.getMessage()]
    assert "parameters were used (encoder.weight, encoder.bias)" in line
    assert "Left.stream" in line and "with amp.autocast():" in line


@pytest.mark.parametrize("how", ["forward", "method", "autocast", "compiled"])
def test_a_loss_of_an_enabled_forward_is_not(
    handles: Any, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    model = Used()
    amp = handles(model, torch.optim.SGD(model.parameters(), lr=0.1), level="O1")
    x = torch.ones(1, 4)
    if how == "autocast":
        with amp.autocast():
            output = model.encoder(x)
    elif how == "compiled":
        model.noted = lambda x: x  # type: ignore[method-assign]
        output = torch.compile(model, backend="eager")(x)
    else:
        output = model(x) if how == "forward" else model.encode(x)
    with caplog.at_level(logging.WARNING, "tritonamp"):
        amp.backward(output.sum() * 1e-3)
    assert not caplog.records
