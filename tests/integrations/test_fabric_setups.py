"""Which models and optimizers of Lightning Fabric our plugin enables, and when."""

import os
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from clients import LOSS, client_batches, client_net, state_of
from helpers import assert_same
from lightning_models import IGNORED, fabric_of
from torch import Tensor, nn

import tritonamp

pytest.importorskip("lightning")

from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from lightning.pytorch import LightningModule

from tritonamp.integrations.fabric import MixedPrecision

pytestmark = [pytest.mark.clients, *map(pytest.mark.filterwarnings, IGNORED)]

BATCHES = 8


class Both(nn.Module):
    """Two networks, the second trained against the first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(6, 4), nn.Linear(4, 3)

    def optimizers(self) -> list[Any]:
        return [
            torch.optim.AdamW(self.first.parameters(), lr=0.05),
            torch.optim.SGD(self.second.parameters(), lr=0.1),
        ]

    def forward(self, x: Tensor, detach: bool) -> Tensor:
        y = self.first(x)
        return self.second(y.detach() if detach else y)  # type: ignore[no-any-return]


def train_both(call: Any, optimizers: Sequence[Any], backward: Any, clip: Any) -> None:
    """Take a step of each optimizer on each batch.

    Args:
        call: the forward of `Both`.
        optimizers: the optimizers.
        backward: function of a loss and its optimizer.
        clip: function of an optimizer.
    """
    for x, y in client_batches(BATCHES, 3):
        for optimizer, sign in zip(optimizers, (1, -1), strict=True):
            optimizer.zero_grad()
            backward(LOSS(call(x, sign < 0), sign * y), optimizer)
            clip(optimizer)
            optimizer.step()


@pytest.mark.parametrize("clip", [0.0, 0.05])
@pytest.mark.parametrize("setup", ["pairs", "models first", "one model"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_two_optimizers(level: str, setup: str, clip: float) -> None:
    both, hand, fabric = Both(), Both(), fabric_of(level=level)
    plain, by_hand = both.optimizers(), hand.optimizers()
    nets: list[nn.Module] = [both.first, both.second]
    if setup == "pairs":
        pairs = [fabric.setup(*pair) for pair in zip(nets, plain, strict=True)]
        _, optimizers = zip(*pairs, strict=True)
    elif setup == "models first":
        for net in nets:
            fabric.setup_module(net)
        optimizers = fabric.setup_optimizers(*plain)
    else:
        _, *optimizers = fabric.setup(both, *plain)
    whole = setup == "one model"
    amp = tritonamp.enable(hand if whole else [hand.first, hand.second], by_hand, level=level)

    def clip_by_hand(optimizer: Any) -> None:
        if clip:
            amp.unscale_(optimizer)
            params = [p for group in optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(params, clip)

    def clip_by_fabric(optimizer: Any) -> None:
        if clip:
            fabric.clip_gradients(both, optimizer, max_norm=clip)

    train_both(hand, by_hand, lambda loss, o: amp.backward(loss, amp.fed_by(loss)), clip_by_hand)
    train_both(both, optimizers, lambda loss, _: fabric.backward(loss), clip_by_fabric)
    assert_same(both.state_dict(), hand.state_dict())
    stats = fabric.strategy.precision.amp.stats()
    assert stats == amp.stats() and stats["skipped"] > 0


def test_inference() -> None:
    fabric = fabric_of(level="O2", loss_scale=1024.0)
    with fabric.init_module(empty_init=False):
        net = client_net()
    before, x = state_of(net), client_batches(1)[0][0]
    exact = net(x)
    model = fabric.setup(net)
    assert {p.dtype for p in net.parameters()} == {torch.float32}  # until the first forward
    with torch.no_grad():
        found = model(x)
    assert {p.dtype for p in net[0].parameters()} == {torch.float16}
    assert found.dtype is torch.float32 and not torch.equal(found, exact)
    # eight roundings of values below 1 to float16
    torch.testing.assert_close(found, exact, rtol=0, atol=8 * 2.0**-11)
    assert_same(model.state_dict(), before)
    with pytest.raises(RuntimeError, match=r"no optimizer was set up.*fabric\.setup_optimizers"):
        fabric.backward(model(x).sum())
    optimizer = fabric.setup_optimizers(torch.optim.SGD(net.parameters()))
    fabric.backward(model(x).sum())
    optimizer.step()
    assert not torch.equal(model.state_dict()["0.weight"], before["0.weight"])


class Stepped(LightningModule):
    """A model with steps of its own, of which one calls a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.net = client_net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]

    def training_step(self, batch: Any) -> Tensor:
        return LOSS(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any) -> Tensor:
        return self(batch[0])  # type: ignore[no-any-return]


@pytest.fixture
def ddp_alone() -> Iterator[Any]:
    """A Fabric with DDP of one process."""
    # Lightning sets ranks and addresses, by which Accelerate would later start a group of its own
    with mock.patch.dict(os.environ):
        strategy = DDPStrategy(process_group_backend="gloo")
        plugin = MixedPrecision(level="O2")
        fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy, plugins=plugin)
        fabric.launch()
        yield fabric
        torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_methods_through_the_forward_of_ddp(ddp_alone: Any) -> None:
    net, batch = Stepped(), client_batches(1)[0]
    exact = net(batch[0])
    model = ddp_alone.setup(net)
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"Stepped.*enter fabric\.autocast\(\)"):
        model.validation_step(batch)
    with torch.no_grad(), ddp_alone.autocast():
        found = model.validation_step(batch)
    assert found.dtype is torch.float32 and not torch.equal(found, exact)
    optimizer = ddp_alone.setup_optimizers(torch.optim.SGD(net.parameters(), lr=0.1))
    for _ in range(3):
        ddp_alone.backward(model.training_step(batch))
        optimizer.step()
        optimizer.zero_grad()
        assert model(batch[0]).dtype is torch.float32
    ddp_alone.strategy.precision.teardown()
    assert "forward" not in vars(net)
    assert not torch.equal(net(batch[0]), exact)


def test_autocast() -> None:
    fabric = fabric_of(level="O1", dtype=torch.bfloat16)
    a = torch.ones(2, 2)
    assert (a @ a).dtype is torch.float32
    with fabric.autocast():  # nothing is set up yet
        assert (a @ a).dtype is torch.float32
    fabric.setup(client_net())
    with fabric.autocast():
        assert (a @ a).dtype is torch.bfloat16
    assert fabric.strategy.precision.precision == "bf16-mixed"
