"""Clipping of gradients that carry the loss scale is warned of however it is done; linear work on
them is not.
"""

import functools
import inspect
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import disabled_after, warnings_with
from torch import Tensor, nn

import tritonamp

STEPS = 5
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": functools.partial(torch.optim.SGD, lr=1e-2),
    "AdamW": functools.partial(torch.optim.AdamW, lr=1e-3),
    "RMSprop": functools.partial(torch.optim.RMSprop, lr=1e-3),  # steps by itself
}


def mlp() -> nn.Module:
    layers = nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 4)
    return nn.Sequential(*layers)


def convolutions() -> nn.Module:
    layers = nn.Conv2d(2, 8, 2), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.Flatten()
    return nn.Sequential(nn.Unflatten(1, (2, 2, 2)), *layers)


MODELS = {"mlp": mlp, "convolutions": convolutions}


class Loop:
    """A model that is trained on other batches each time, or on one alone.

    Args:
        model: of ``MODELS``; "sums" has the same gradient in each element.
        level: of the Amp.
        optimizer: of ``OPTIMIZERS``.
        one_batch: train on one batch.
    """

    def __init__(
        self,
        device: torch.device,
        model: str = "mlp",
        level: str = "O2",
        optimizer: str = "SGD",
        one_batch: bool = False,
    ) -> None:
        torch.manual_seed(0)
        self.sums = model == "sums"
        self.model = (nn.Linear(8, 4) if self.sums else MODELS[model]()).to(device)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.amp = tritonamp.enable(self.model, self.optimizer, level=level)
        self.batches = [torch.randn(16, 8).to(device) for _ in range(STEPS)]
        if one_batch:
            self.batches = self.batches[:1] * STEPS

    def loss(self, x: Tensor) -> Tensor:
        if self.sums:
            return self.model(torch.ones_like(x[:2])).sum() / 64
        return (self.model(x) - 1).square().mean()

    def grads(self) -> list[Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def train(self, work: Callable[["Loop"], Any] = lambda _: None, by_hand: bool = False) -> None:
        for x in self.batches:
            if by_hand:
                self.amp.scaler.scale(self.loss(x)).backward()
                work(self)
                self.amp.scaler.step(self.optimizer)
                self.amp.scaler.update()
            else:
                self.amp.backward(self.loss(x))
                work(self)
                self.optimizer.step()
            self.optimizer.zero_grad()


@pytest.fixture
def make() -> Iterator[Callable[..., Loop]]:
    yield from disabled_after(Loop)


warned = warnings_with("loss scale")


def unitwise_norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=tuple(range(1, x.dim())) or None, keepdim=True)


def adaptive(loop: Loop, factor: float) -> None:
    """As in "High-performance large-scale image recognition without normalization"."""
    for p in loop.model.parameters():
        assert p.grad is not None
        weight, grad = p.detach().float(), p.grad.detach().float()
        most = unitwise_norm(weight).clamp(min=1e-3) * factor
        norm = unitwise_norm(grad)
        p.grad.copy_(torch.where(norm > most, grad * (most / norm.clamp(min=1e-6)), grad))


def by_norm(loop: Loop, most: float, on_host: bool) -> None:
    norm = torch.stack([g.float().square().sum() for g in loop.grads()]).sum().sqrt()
    factor: Any = (most / (norm + 1e-6)).clamp(max=1.0)
    for grad in loop.grads():
        grad.mul_(float(factor) if on_host else factor)


def each_by_norm(loop: Loop) -> None:
    for grad in loop.grads():
        grad.mul_(min(1.0, 1.0 / float(grad.float().norm())))


def foreach(loop: Loop) -> None:
    for grads in ([g for g in loop.grads() if g.dtype is d] for d in (torch.half, torch.float)):
        if grads:
            torch._foreach_clamp_max_(grads, 1.0)
            torch._foreach_clamp_min_(grads, -1.0)


def assign(loop: Loop) -> None:
    for param in loop.model.parameters():
        assert param.grad is not None
        param.grad = param.grad.clamp(-1, 1)


def on_each(change: Callable[[Tensor], Any]) -> Callable[[Loop], None]:
    def work(loop: Loop) -> None:
        for grad in loop.grads():
            change(grad)

    return work


CLIPPINGS: dict[str, Callable[[Loop], Any]] = {
    "clamp_": on_each(lambda g: g.clamp_(-1, 1)),
    "clip_": on_each(lambda g: g.clip_(-0.5, 0.5)),
    "clamp_ of another range": on_each(lambda g: g.clamp_(-0.37, 0.37)),
    "clamp_ of one side": on_each(lambda g: g.clamp_(max=1.0)),
    "clamp_ through data": on_each(lambda g: g.data.clamp_(-1, 1)),
    "clamp_ of one parameter": lambda loop: loop.grads()[0].clamp_(-1, 1),
    "foreach": foreach,
    "assigned": assign,
    "sign_": on_each(lambda g: g.sign_()),
    "adaptive, 0.01": lambda loop: adaptive(loop, 0.01),
    "adaptive, 0.16": lambda loop: adaptive(loop, 0.16),
    "norm": lambda loop: by_norm(loop, 1.0, on_host=False),
    "norm, on the host": lambda loop: by_norm(loop, 5.0, on_host=True),
    "norm of each": each_by_norm,
}
LINEAR: dict[str, Callable[[Loop], Any]] = {
    "nothing": lambda _: None,
    "average": on_each(lambda g: g.div_(4)),
    "factor": on_each(lambda g: g.mul_(1e-4)),
    "through data": on_each(lambda g: g.data.mul_(0.5)),
    "zeroed rows": on_each(lambda g: g[:1].zero_()),
    "mask": on_each(lambda g: g.mul_(torch.arange(g.numel(), device=g.device).view_as(g) % 2)),
    "negative ones cut off": on_each(lambda g: g.clamp_(min=0)),
    "noise": on_each(lambda g: g.add_(torch.randn_like(g))),
    "by layer": lambda loop: [g.mul_(0.9**i) for i, g in enumerate(loop.grads())],
    "weight decay": lambda loop: [
        p.grad.add_(p.detach(), alpha=64) for p in loop.model.parameters() if p.grad is not None
    ],
    "a penalty of weights alone": lambda loop: [
        p.grad.copy_(p.detach() * 13) for p in loop.model.parameters() if p.grad is not None
    ],
}


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_clipping(
    make: Callable[..., Loop],
    device: torch.device,
    level: str,
    model: str,
    optimizer: str,
    clipping: str,
    warned: Callable[[], list[str]],
) -> None:
    loop = make(device, model, level, optimizer)
    loop.train(CLIPPINGS[clipping])
    (message,) = warned()
    assert message.startswith(
        "gradients of 0.weight" if model == "mlp" else "gradients of 1.weight"
    )
    assert "call amp.clip_grad_norm_(max_norm) instead of your own clipping" in message


@pytest.mark.parametrize("one_batch", [False, True], ids=["batches", "one batch"])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("model", [*MODELS, "sums"])
@pytest.mark.parametrize("optimizer", ["SGD", "RMSprop"])  # one of ours, one that steps by itself
@pytest.mark.parametrize("work", LINEAR)
def test_linear_work(
    make: Callable[..., Loop],
    device: torch.device,
    level: str,
    model: str,
    optimizer: str,
    one_batch: bool,
    work: str,
    warned: Callable[[], list[str]],
) -> None:
    loop = make(device, model, level, optimizer, one_batch)
    loop.train(LINEAR[work])
    assert warned() == []


def clamp_accumulated(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.clamp_(-1, 1)


def halve_accumulated(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(0.5)


def clamp_given(grad: Tensor) -> Tensor:
    return grad.clamp(-1, 1)


HOOKS: dict[str, tuple[str, Callable[..., Any], bool]] = {
    "on the gradient": ("register_hook", clamp_given, True),
    "after accumulation": ("register_post_accumulate_grad_hook", clamp_accumulated, True),
    "a factor": ("register_hook", lambda grad: grad / 4, False),
    "a mask": ("register_hook", lambda grad: grad * (grad > 0), False),
    "a factor after accumulation": (
        "register_post_accumulate_grad_hook",
        halve_accumulated,
        False,
    ),
}


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("of_all", [False, True], ids=["one parameter", "all"])
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks(
    make: Callable[..., Loop],
    device: torch.device,
    level: str,
    of_all: bool,
    hook: str,
    warned: Callable[[], list[str]],
) -> None:
    loop = make(device, level=level)
    register, function, clips = HOOKS[hook]
    for param in list(loop.model.parameters())[: None if of_all else 1]:
        getattr(param, register)(function)
    loop.train()
    messages = warned()
    assert len(messages) == clips
    line = f"{os.path.abspath(__file__)}:{inspect.getsourcelines(function)[1]}"
    assert all(f" by the hook at {line}:" in message for message in messages)


@pytest.mark.parametrize("clipping", ["clamp_", "norm", "adaptive, 0.01"])
def test_a_loss_that_was_scaled_by_hand(
    make: Callable[..., Loop],
    device: torch.device,
    clipping: str,
    warned: Callable[[], list[str]],
) -> None:
    make(device).train(CLIPPINGS[clipping], by_hand=True)
    assert len(warned()) == 1


@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_the_advice_is_right(
    make: Callable[..., Loop],
    device: torch.device,
    clipping: str,
    warned: Callable[[], list[str]],
) -> None:
    """After ``amp.unscale_()`` the same clipping is as in FP32: it is not warned of."""
    loop = make(device)

    def work(loop: Loop) -> None:
        loop.amp.unscale_()
        CLIPPINGS[clipping](loop)

    before = [p.detach().clone() for p in loop.amp.master_params()]
    loop.train(work)
    assert warned() == []
    moved = [not torch.equal(a, b) for a, b in zip(before, loop.amp.master_params(), strict=True)]
    assert all(moved)


def test_ours(make: Callable[..., Loop], device: torch.device, warned: Callable[..., Any]) -> None:
    make(device).train(lambda loop: loop.amp.clip_grad_norm_(1e-3))
    assert warned() == []


@pytest.mark.parametrize(
    "settings", [{"level": "O0"}, {"level": "O2", "dtype": torch.bfloat16}], ids=["O0", "bfloat16"]
)
def test_levels_without_a_scale(settings: dict[str, Any], warned: Callable[[], list[str]]) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with tritonamp.enable(model, optimizer, **settings) as amp:
        for _ in range(STEPS):
            amp.backward(model(torch.randn(16, 8)).square().mean())
            for param in model.parameters():
                assert param.grad is not None
                param.grad.clamp_(-1e-3, 1e-3)
            optimizer.step()
            optimizer.zero_grad()
    assert warned() == []


def test_torchs_own_clipping_is_said_once(
    make: Callable[..., Loop], device: torch.device, warned: Callable[[], list[str]]
) -> None:
    def work(loop: Loop) -> None:
        torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)

    make(device).train(work)
    (message,) = warned()
    assert message.startswith("torch.nn.utils.clip_grad_norm_ at ")
