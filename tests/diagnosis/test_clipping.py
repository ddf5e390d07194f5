"""Clipping of gradients that carry the loss scale is warned of however it is done; linear work on
them is not.
"""

import inspect
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import warnings_with
from runs import Training, started
from torch import Tensor, nn

STEPS = 5
RATES = {"SGD": 1e-2, "AdamW": 1e-3, "NAdam": 1e-3}  # the last one steps by itself


def mlp() -> nn.Module:
    layers = nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 4)
    return nn.Sequential(*layers)


def convolutions() -> nn.Module:
    layers = nn.Conv2d(2, 8, 2), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.Flatten()
    return nn.Sequential(nn.Unflatten(1, (2, 2, 2)), *layers)


MODELS = {"mlp": mlp, "convolutions": convolutions}


class Worked(Training):
    """Trains on other batches each time, or on one alone.

    Args:
        model: a name in ``MODELS``; "sums" has the same gradient in each element.
        one_batch: whether every step has the same batch.
    """

    def __init__(
        self,
        model: str = "mlp",
        level: str = "O2",
        optimizer: str = "SGD",
        one_batch: bool = False,
        **fields: Any,
    ) -> None:
        self.sums = model == "sums"
        models = {**MODELS, "sums": lambda: nn.Linear(8, 4)}
        super().__init__(models[model], optimizer, level, lr=RATES[optimizer], **fields)
        self.batches = [torch.randn(16, 8).to(self.device) for _ in range(STEPS)]
        if one_batch:
            self.batches = self.batches[:1] * STEPS

    def loss(self, x: Any = None) -> Tensor:
        if self.sums:
            return self.model(torch.ones_like(x[:2])).sum() / 64
        return (self.model(x) - 1).square().mean()

    def grads(self) -> list[Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def train_with(self, work: Callable[["Worked"], Any], by_scaler: bool = False) -> None:
        """Call ``work`` between each backward and its step."""
        for x in self.batches:
            self.backward(self.loss(x), by_scaler)
            work(self)
            self.finish(by_scaler=by_scaler)


start = started(Worked)


warned = warnings_with("loss scale")


def unitwise_norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=tuple(range(1, x.dim())) or None, keepdim=True)


def adaptive(run: Worked, factor: float) -> None:
    """As in "High-performance large-scale image recognition without normalization"."""
    for p in run.model.parameters():
        assert p.grad is not None
        weight, grad = p.detach().float(), p.grad.detach().float()
        most = unitwise_norm(weight).clamp(min=1e-3) * factor
        norm = unitwise_norm(grad)
        p.grad.copy_(torch.where(norm > most, grad * (most / norm.clamp(min=1e-6)), grad))


def by_norm(run: Worked, most: float, on_host: bool) -> None:
    norm = torch.stack([g.float().square().sum() for g in run.grads()]).sum().sqrt()
    factor: Any = (most / (norm + 1e-6)).clamp(max=1.0)
    for grad in run.grads():
        grad.mul_(float(factor) if on_host else factor)


def each_by_norm(run: Worked, most: float = 1.0) -> None:
    for grad in run.grads():
        grad.mul_(min(1.0, most / float(grad.float().norm())))


def foreach(run: Worked) -> None:
    for grads in ([g for g in run.grads() if g.dtype is d] for d in (torch.half, torch.float)):
        if grads:
            torch._foreach_clamp_max_(grads, 1.0)
            torch._foreach_clamp_min_(grads, -1.0)


def assign(run: Worked) -> None:
    for param in run.model.parameters():
        assert param.grad is not None
        param.grad = param.grad.clamp(-1, 1)


def on_each(change: Callable[[Tensor], Any]) -> Callable[[Worked], None]:
    def work(run: Worked) -> None:
        for grad in run.grads():
            change(grad)

    return work


CLIPPINGS: dict[str, Callable[[Worked], Any]] = {
    "clamp_": on_each(lambda g: g.clamp_(-1, 1)),
    "clip_": on_each(lambda g: g.clip_(-0.5, 0.5)),
    "clamp_ of another range": on_each(lambda g: g.clamp_(-0.37, 0.37)),
    "clamp_ of one side": on_each(lambda g: g.clamp_(max=1.0)),
    "clamp_ through data": on_each(lambda g: g.data.clamp_(-1, 1)),
    "clamp_ of one parameter": lambda run: run.grads()[0].clamp_(-1, 1),
    "foreach": foreach,
    "assigned": assign,
    "sign_": on_each(lambda g: g.sign_()),
    "adaptive, 0.01": lambda run: adaptive(run, 0.01),
    "adaptive, 0.16": lambda run: adaptive(run, 0.16),
    "norm": lambda run: by_norm(run, 1.0, on_host=False),
    "norm, no round number": lambda run: by_norm(run, 0.73, on_host=False),
    "norm, on the host": lambda run: by_norm(run, 5.0, on_host=True),
    "norm of each": each_by_norm,
}
LINEAR: dict[str, Callable[[Worked], Any]] = {
    "nothing": lambda _: None,
    "average": on_each(lambda g: g.div_(4)),
    "factor": on_each(lambda g: g.mul_(1e-4)),
    "through data": on_each(lambda g: g.data.mul_(0.5)),
    "zeroed rows": on_each(lambda g: g[:1].zero_()),
    "mask": on_each(lambda g: g.mul_(torch.arange(g.numel(), device=g.device).view_as(g) % 2)),
    "negative ones cut off": on_each(lambda g: g.clamp_(min=0)),
    "noise": on_each(lambda g: g.add_(torch.randn_like(g))),
    "by layer": lambda run: [g.mul_(0.9**i) for i, g in enumerate(run.grads())],
    "weight decay": lambda run: [
        p.grad.add_(p.detach(), alpha=64) for p in run.model.parameters() if p.grad is not None
    ],
    "a penalty of weights alone": lambda run: [
        p.grad.copy_(p.detach() * 13) for p in run.model.parameters() if p.grad is not None
    ],
}


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("optimizer", RATES)
@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_clipping(
    start: Any,
    device: torch.device,
    level: str,
    model: str,
    optimizer: str,
    clipping: str,
    warned: Callable[[], list[str]],
) -> None:
    run = start(model, level, optimizer)
    run.train_with(CLIPPINGS[clipping])
    (message,) = warned()
    assert message.startswith(
        "gradients of 0.weight" if model == "mlp" else "gradients of 1.weight"
    )
    assert "call amp.clip_grad_norm_(max_norm) instead of your own clipping" in message


@pytest.mark.parametrize("one_batch", [False, True], ids=["batches", "one batch"])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("model", [*MODELS, "sums"])
@pytest.mark.parametrize("optimizer", ["SGD", "NAdam"])  # one of ours, one that steps by itself
@pytest.mark.parametrize("work", LINEAR)
def test_linear_work(
    start: Any,
    device: torch.device,
    level: str,
    model: str,
    optimizer: str,
    one_batch: bool,
    work: str,
    warned: Callable[[], list[str]],
) -> None:
    run = start(model, level, optimizer, one_batch)
    run.train_with(LINEAR[work])
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
    start: Any,
    device: torch.device,
    level: str,
    of_all: bool,
    hook: str,
    warned: Callable[[], list[str]],
) -> None:
    run = start(level=level)
    register, function, clips = HOOKS[hook]
    for param in list(run.model.parameters())[: None if of_all else 1]:
        getattr(param, register)(function)
    run.train_with(lambda _: None)
    messages = warned()
    assert len(messages) == clips
    line = f"{os.path.abspath(__file__)}:{inspect.getsourcelines(function)[1]}"
    assert all(f" by the hook at {line}:" in message for message in messages)


@pytest.mark.parametrize("clipping", ["clamp_", "norm", "adaptive, 0.01"])
def test_a_loss_that_was_scaled_by_hand(
    start: Any,
    device: torch.device,
    clipping: str,
    warned: Callable[[], list[str]],
) -> None:
    start().train_with(CLIPPINGS[clipping], by_scaler=True)
    assert len(warned()) == 1


@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_the_advice_is_right(
    start: Any,
    device: torch.device,
    clipping: str,
    warned: Callable[[], list[str]],
) -> None:
    """After ``amp.unscale_()`` the same clipping is as in FP32: it is not warned of."""
    run = start()

    def work(run: Worked) -> None:
        run.amp.unscale_()
        CLIPPINGS[clipping](run)

    before = [p.detach().clone() for p in run.amp.master_params()]
    run.train_with(work)
    assert warned() == []
    moved = [not torch.equal(a, b) for a, b in zip(before, run.amp.master_params(), strict=True)]
    assert all(moved)


def test_ours(start: Any, device: torch.device, warned: Callable[..., Any]) -> None:
    start().train_with(lambda run: run.amp.clip_grad_norm_(1e-3))
    assert warned() == []


@pytest.mark.parametrize(
    "work",
    [on_each(lambda g: g.clamp_(-1e-3, 1e-3)), lambda run: each_by_norm(run, 5e-4)],
    ids=["values", "norms"],
)
@pytest.mark.parametrize(
    "settings", [{"level": "O0"}, {"level": "O2", "dtype": torch.bfloat16}], ids=["O0", "bfloat16"]
)
def test_levels_without_a_scale(
    start: Any,
    settings: dict[str, Any],
    work: Callable[[Worked], Any],
    warned: Callable[[], list[str]],
) -> None:
    start(**settings).train_with(work)
    assert warned() == []


def test_torchs_own_clipping_is_said_once(
    start: Any, device: torch.device, warned: Callable[[], list[str]]
) -> None:
    def work(run: Worked) -> None:
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)

    start().train_with(work)
    (message,) = warned()
    assert message.startswith("torch.nn.utils.clip_grad_norm_ at ")
