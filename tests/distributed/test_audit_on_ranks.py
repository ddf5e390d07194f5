"""``amp.audit`` on gloo ranks: all skip where one has made other bits, and the log names it.

The ranks are this file run as a script, see two_ranks.py.
"""

import contextlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from flipped_bits import Flipping
from ranks import Replica, Shared, alike, joint, joint_batches, listening, sharded
from runs import FORMS
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from two_ranks import Pair, of_ranks, on_ranks, serve

pytestmark = of_ranks

STEPS = 4
NUMBERS = [2, 4]


@pytest.fixture(scope="module", params=NUMBERS, ids=lambda number: f"{number} ranks")
def group(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    made = Pair(tmp_path_factory.mktemp("ranks"), str(Path(__file__)), request.param)
    yield made
    made.stop()


class OfRanks(torch.autograd.Function):
    """The identity, whose backward adds up over the ranks, as that of a batch norm over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        total = grad.float()
        dist.all_reduce(total)
        return (total / dist.get_world_size()).to(grad.dtype)


def network() -> Flipping:
    torch.manual_seed(0)
    return Flipping()


def replica(level: str, fields: Any = None, **options: Any) -> Replica:
    """Return a training under DDP; ``options`` are those of DDP, ``fields`` those of ``enable``."""
    hook = (None, default_hooks.fp16_compress_hook) if options.pop("hook", False) else None
    return Replica(network(), torch.optim.AdamW, level, hook=hook, ddp=options, **(fields or {}))


def plant(run: Shared, net: Flipping, rank: int, steps: int = STEPS, micro: int = 1) -> list[str]:
    """Take steps, with a flipped bit on one rank in the second; return the warnings."""
    with listening(logging.WARNING) as texts:
        for step, x in enumerate(joint_batches(steps)):
            for i in range(micro):
                bad = step == 1 and i == 0 and dist.get_rank() == rank
                net.flip.__dict__.update(passes=(3,) if bad else (), site=4, bit=9)
                last = i == micro - 1
                with contextlib.nullcontext() if last else run.no_sync():
                    run.backward(run.loss(x))
            run.finish()
    return without_first_veto(texts)


def without_first_veto(texts: list[str]) -> list[str]:
    """Leave out the line by which rank 0 alone shows the first skip of a kind."""
    return [text for text in texts if "skipped (1 of " not in text]


@on_ranks
def replicated(level: str, rank: int, micro: int, every: int, **options: Any) -> Any:
    run = replica(level, **options)
    run.amp.audit(every=every)
    texts = plant(run, run.net, rank, micro=micro)
    return [texts, run.causes, run.amp.stats()["audits"], run.outcome()]


@pytest.mark.parametrize(
    ("level", "micro", "options"),
    [
        ("O2", 1, {}),
        ("O1", 1, {}),
        ("O2", 2, {}),
        ("O2", 1, {"static_graph": True}),
        ("O2", 1, {"find_unused_parameters": True}),
        ("O2", 1, {"hook": True}),
        ("O2", 1, {"gradient_as_bucket_view": True}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value),
)
def test_all_ranks_skip_and_name_the_one(
    group: Pair, level: str, micro: int, options: dict[str, bool]
) -> None:
    """And end up alike. With a static graph DDP's first backward is not audited."""
    texts, causes, audits, _ = alike(
        replicated(group, level=level, rank=1, micro=micro, every=1, **options)
    )
    first = not options.get("static_graph")
    assert audits == {"clean": STEPS - 2 + first, "unclear": 0, "suspected": 1}
    assert causes == [None, "veto", None, None]
    (text,) = texts
    assert text.startswith(
        "step 2: other bits on rank 1: one of three backwards of the same graph differs in second.w"
    )


@pytest.mark.parametrize("form", FORMS)
def test_an_audit_leaves_every_bit(group: Pair, form: str) -> None:
    """Of steps without a fault, and finds the same masters and state on all ranks."""
    how = {"level": "O2", "rank": -1, "micro": 2, "fields": FORMS[form]}
    texts, *_, found = alike(replicated(group, every=1, **how))
    *_, expected = alike(replicated(group, every=100, **how))
    assert found == expected and texts == []


@on_ranks
def apart(rank: int, of_state: bool) -> Any:
    """A master, or optimizer state, changes on one rank alone after the first step."""
    run = replica("O2")
    run.amp.audit(every=2)
    with listening(logging.WARNING) as texts:
        for step, x in enumerate(joint_batches(5)):
            if step == 1 and dist.get_rank() == rank:
                ((_, master), *_) = run.amp.named_master_params()
                part = run.optimizer.state[master]["exp_avg"] if of_state else master
                with torch.no_grad():
                    part.view(-1).view(torch.int32)[3] ^= 1
            run.backward(run.loss(x))
            run.finish()
    return [without_first_veto(texts), run.causes, run.amp.stats()["audits"]]


@pytest.mark.parametrize("of_state", [False, True])
def test_masters_that_differ_are_named(group: Pair, of_state: bool) -> None:
    texts, causes, audits = alike(apart(group, rank=1, of_state=of_state))
    assert causes == [None] * 5 and audits == {"clean": 3, "unclear": 0, "suspected": 0}
    (text,) = texts
    two = group._number == 2
    whose = "ranks 0, 1 have different values" if two else "rank 1 has other values than 3 of 4"
    assert text.startswith(f"amp.audit: {whose}") and "first.weight" in text


@on_ranks
def with_collectives(rank: int) -> Any:
    net = network()
    forward = net.at

    def at(site: int, x: Tensor) -> Tensor:
        out = forward(site, x)
        return OfRanks.apply(out) if site == 3 else out  # type: ignore[no-untyped-call]

    net.at = at  # type: ignore[method-assign]
    run = Replica(net, "AdamW", "O2")
    run.amp.audit(every=1)
    texts = plant(run, net, rank)
    return [texts, run.causes, run.amp.stats()["audits"]]


class Split(nn.Module):
    """Layers that split their neurons, with a site behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.flipping = nn.Linear(6, 16), nn.Linear(16, 6), network()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.flipping.at(4, self.down(self.up(x).tanh()))
        return out


@on_ranks
def split(rank: int) -> Any:
    model = Split()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    run = Shared(model, "SGD", "O2", share=joint)
    run.amp.audit(every=1)
    texts = plant(run, model.flipping, rank)
    return [texts, run.causes, run.amp.stats()["audits"]]


def test_tensor_parallelism(group: Pair) -> None:
    texts, causes, audits = alike(split(group, rank=1))
    assert audits == {"clean": STEPS - 1, "unclear": 0, "suspected": 1}
    assert causes == [None, "veto", None, None]
    assert len(texts) == 1 and "other bits on rank 1: one of three" in texts[0]


@on_ranks
def shards(level: str, rank: int, every: int) -> Any:
    net = network()
    run = Shared(sharded(net), "AdamW", level)
    run.amp.audit(every=every)
    texts = plant(run, net, rank)
    return [texts, run.causes, run.amp.stats()["audits"], run.outcome()]


def test_backwards_with_collectives(group: Pair) -> None:
    """All ranks run as many passes, so that none waits for another."""
    texts, causes, audits = alike(with_collectives(group, rank=1))
    assert audits == {"clean": STEPS - 1, "unclear": 0, "suspected": 1}
    assert causes == [None, "veto", None, None]
    assert len(texts) == 1 and "other bits on rank 1: one of three" in texts[0]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_shards(group: Pair, level: str) -> None:
    *_, found = alike(shards(group, level=level, rank=-1, every=1))
    *_, expected = alike(shards(group, level=level, rank=-1, every=100))
    assert found == expected
    texts, causes, audits, _ = alike(shards(group, level=level, rank=1, every=1))
    assert audits == {"clean": STEPS - 1, "unclear": 0, "suspected": 1}
    assert causes == [None, "veto", None, None]
    (text,) = texts
    assert text.startswith("step 2: other bits on rank 1: one of three backwards of the same graph")


if __name__ == "__main__":
    serve(*sys.argv[1:])
