"""Pretraining of a GPT as litgpt does it, with Fabric and our plugin, or with ``enable`` by hand:
accumulation, clipping, a learning rate by hand, evaluation, and a resume. Bits are equal.
"""

import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from clients import state_of
from helpers import assert_same
from lightning_models import IGNORED
from torch import Tensor, nn
from torch.utils.data import DataLoader

import tritonamp

pytest.importorskip("lightning")

from lightning.fabric import Fabric

from tritonamp.integrations.fabric import MixedPrecision

pytestmark = [pytest.mark.clients, *map(pytest.mark.filterwarnings, IGNORED)]

TOKENS, LENGTH, WIDTH = 13, 6, 16
STEPS, ACCUMULATE, SAVED_AT = 6, 2, 4  # batches in a step; the step after which a run is saved


class Block(nn.Module):
    """Causal attention and an MLP, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).view(*x.shape[:2], 3, 2, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    """Tokens in, logits out; the head is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embed.weight
        self.max_length = LENGTH  # an attribute that the loop reads from the wrapper

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.places.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]


class Loop(NamedTuple):
    """A training: its objects, and the calls in which the two loops differ."""

    model: Any
    optimizer: Any
    data: Any
    backward: Callable[[Tensor], None]
    clip: Callable[[], Tensor]
    unsynced: Callable[[bool], contextlib.AbstractContextManager[Any]]
    save: Callable[[Path, int], None]
    load: Callable[[Path], int]
    amp: tritonamp.Amp


def parts() -> tuple[GPT, DataLoader[Any]]:
    torch.manual_seed(3)
    rows = torch.randint(0, TOKENS, (STEPS * ACCUMULATE * 4, LENGTH + 1))
    return GPT(), DataLoader(rows, batch_size=4)  # type: ignore[arg-type]


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    params = list(model.parameters())
    decayed = {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1}
    others = {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0}
    return torch.optim.AdamW([decayed, others], lr=0.01, betas=(0.9, 0.95))


def by_fabric(level: str, compiled: bool) -> Loop:
    plugin = MixedPrecision(level=level)
    fabric: Any = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    with fabric.init_module(empty_init=False):
        net, rows = parts()
    model = fabric.setup(torch.compile(net, backend="eager") if compiled else net)
    optimizer = fabric.setup_optimizers(optimizer_of(model))
    assert plugin.amp is not None

    def load(path: Path) -> int:
        state = {"model": model, "optimizer": optimizer, "step": 0}
        fabric.load(path, state)
        return state["step"]

    return Loop(
        model,
        optimizer,
        fabric.setup_dataloaders(rows),
        fabric.backward,
        lambda: fabric.clip_gradients(model, optimizer, max_norm=1.0),
        lambda enabled: fabric.no_backward_sync(model, enabled=enabled),
        lambda path, step: fabric.save(
            path, {"model": model, "optimizer": optimizer, "step": step}
        ),
        load,
        plugin.amp,
    )


def by_hand(level: str) -> Loop:
    model, rows = parts()
    optimizer = optimizer_of(model)
    amp = tritonamp.enable(model, optimizer, level=level)
    objects = {"model": model, "optimizer": optimizer, "amp": amp}

    def load(path: Path) -> int:
        saved = torch.load(path)
        for name, part in objects.items():
            part.load_state_dict(saved[name])
        return int(saved["step"])

    return Loop(
        model,
        optimizer,
        rows,
        amp.backward,
        lambda: amp.clip_grad_norm_(1.0),
        lambda enabled: contextlib.nullcontext(),
        lambda path, step: torch.save(
            {**{name: part.state_dict() for name, part in objects.items()}, "step": step}, path
        ),
        load,
        amp,
    )


def rate_at(step: int) -> float:
    """A warmup, and then a cosine."""
    return 0.01 * min((step + 1) / 2, 0.5 + 0.5 * math.cos(math.pi * step / STEPS))


def loss_of(model: Any, rows: Tensor) -> Tensor:
    logits = model(rows[:, : model.max_length])
    return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def validated(loop: Loop) -> Tensor:
    loop.model.eval()
    with torch.no_grad():
        losses = [loss_of(loop.model, rows) for rows in loop.data]
    loop.model.train()
    return torch.stack(losses).mean()


def pretrain(loop: Loop, path: Path, resume: bool) -> list[Tensor]:
    """Train to the end, and return losses, norms and losses of evaluations since ``SAVED_AT``."""
    first = loop.load(path) if resume else 0
    found: list[Tensor] = []
    for i, rows in enumerate(loop.data):
        step, last = i // ACCUMULATE, (i + 1) % ACCUMULATE == 0
        if step < first:
            continue
        for group in loop.optimizer.param_groups:
            group["lr"] = rate_at(step)
        with loop.unsynced(not last):
            loss = loss_of(loop.model, rows)
            if i == 3:
                loss.register_hook(lambda grad: grad * math.inf)
            loop.backward(loss / ACCUMULATE)
        if step >= SAVED_AT:
            found.append(loss.detach())
        if last:
            norm = loop.clip()
            loop.optimizer.step()
            loop.optimizer.zero_grad()
            if step + 1 == SAVED_AT and not resume:
                loop.save(path, step + 1)
            if step >= SAVED_AT:
                found += [norm, validated(loop)]
    return found


@pytest.mark.parametrize(("level", "compiled"), [("O1", False), ("O2", False), ("O2", True)])
def test_the_loop_of_litgpt(level: str, compiled: bool, tmp_path: Path) -> None:
    runs = [by_fabric(level, compiled), by_hand(level), by_fabric(level, compiled), by_hand(level)]
    paths = [tmp_path / "fabric.pt", tmp_path / "hand.pt"] * 2
    found = [
        pretrain(run, path, i > 1) for i, (run, path) in enumerate(zip(runs, paths, strict=True))
    ]
    fabric, hand = runs[:2]
    expected, stats = state_of(hand.model), hand.amp.stats()
    assert fabric.amp.stats() == stats and stats["skipped"] > 0
    for run, losses in zip(runs, found, strict=True):
        assert all(map(torch.equal, losses, found[0]))
        assert_same(run.model.state_dict(), expected)
        assert run.amp.scaler.get_scale() == stats["scale"]
    assert not torch.equal(found[0][0], found[0][-3])  # it trains
