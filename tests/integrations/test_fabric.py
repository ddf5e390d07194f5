"""A loop of Lightning Fabric with our plugin takes the steps of a loop by hand, bit for bit."""

import copy
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from clients import (
    LEVELS_AND_KINDS,
    LOSS,
    ByHand,
    client_batches,
    client_net,
    optimizer_and_scheduler,
    state_of,
)
from helpers import assert_same
from lightning_models import IGNORED
from torch import Tensor, nn

import tritonamp

pytest.importorskip("lightning")

from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy, FSDPStrategy
from lightning.pytorch import LightningModule

from tritonamp.integrations.fabric import MixedPrecision

pytestmark = [pytest.mark.clients, *map(pytest.mark.filterwarnings, IGNORED)]

BATCHES = 8


def fabric_of(**settings: Any) -> Any:
    return Fabric(accelerator="cpu", devices=1, plugins=MixedPrecision(**settings))


class Fabricated:
    """The training of `ByHand` in a loop of Fabric.

    Args:
        kind: name of the optimizer.
        apart: whether model and optimizer are set up apart.
        half: dtype in which the model comes.
        settings: arguments of the plugin.
    """

    def __init__(
        self, kind: str = "AdamW", apart: bool = False, half: Any = None, **settings: Any
    ) -> None:
        self.fabric = fabric_of(**settings)
        self.net = client_net().to(half)
        if apart:
            self.model = self.fabric.setup_module(self.net)
            self.plain, self.scheduler = optimizer_and_scheduler(self.net, kind)
            self.optimizer = self.fabric.setup_optimizers(self.plain)
        else:
            self.plain, self.scheduler = optimizer_and_scheduler(self.net, kind)
            self.model, self.optimizer = self.fabric.setup(self.net, self.plain)
        self.norms: list[float] = []

    @property
    def amp(self) -> tritonamp.Amp:
        return self.fabric.strategy.precision.amp  # type: ignore[no-any-return]

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def walk(self, data: Sequence[Any], accumulate: int = 1, **clip: float) -> dict[str, Tensor]:
        """Train on all batches, and return the state of the model."""
        for i, (x, y) in enumerate(data):
            last = (i + 1) % accumulate == 0
            with self.fabric.no_backward_sync(self.model, enabled=not last):
                self.fabric.backward(LOSS(self.model(x), y) / accumulate)
            if last:
                if clip:
                    norm = self.fabric.clip_gradients(self.model, self.optimizer, **clip)
                    self.norms.append(math.nan if norm is None else float(norm))
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.scheduler.step()
        return state_of(self.model)


@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
@pytest.mark.parametrize(("level", "kind"), LEVELS_AND_KINDS)
def test_fabric_takes_our_steps(level: str, kind: str, apart: bool) -> None:
    run, hand = Fabricated(kind, apart, level=level), ByHand(kind, level)
    assert_same(run.walk(client_batches(BATCHES, 3)), hand.walk(client_batches(BATCHES, 3)))
    stats = run.amp.stats()
    assert stats == hand.amp.stats() and stats["skipped"] > 0
    run.fabric.strategy.precision.teardown()
    assert tritonamp.handle(run.net) is None
    assert {p.dtype for p in run.net.parameters()} == {torch.float32}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    ("clip", "hand"),
    [
        ({}, {}),
        ({"max_norm": 0.1}, {"norm": 0.1}),
        ({"clip_val": 0.01}, {"value": 0.01}),
    ],
    ids=["plain", "norm", "value"],
)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_clipping_and_accumulation(
    level: str, clip: dict[str, float], hand: dict[str, float], accumulate: int
) -> None:
    data = client_batches(BATCHES, 5)  # has an inf, which skips a step and raises nothing
    run, by_hand = Fabricated(level=level), ByHand(level=level)
    found = run.walk(data, accumulate, **clip)
    expected = by_hand.walk(data, accumulate, **hand)
    assert_same(found, expected)
    if "max_norm" in clip:
        assert list(map(str, run.norms)) == list(map(str, by_hand.norms))


def test_clipping_by_the_largest_gradient() -> None:
    run = Fabricated("SGD", level="O2", loss_scale=2.0**8)
    x, y = client_batches(1)[0]
    before = state_of(run.model)
    run.fabric.backward(LOSS(run.model(x), y))
    norm = run.fabric.clip_gradients(run.model, run.optimizer, max_norm=1e-3, norm_type=math.inf)
    run.optimizer.step()
    assert norm > 1e-3
    moves = [(value - before[name]).abs().max() for name, value in run.model.state_dict().items()]
    # learning rate times limit, rounded at weights below 2; torch divides by the norm plus 1e-6
    assert float(max(moves)) == pytest.approx(0.05 * 1e-3, abs=0.05 * 1e-5 + 2.0**-24)


@pytest.mark.parametrize("half", [None, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_resuming_is_not_stopping(level: str, half: Any, tmp_path: Path) -> None:
    first, second = client_batches(BATCHES, 3), client_batches(BATCHES, 1)
    run = Fabricated(level=level, half=half)
    run.walk(first, max_norm=0.1)
    run.fabric.save(tmp_path / "run.pt", {**run.state, "batch": BATCHES})
    expected = run.walk(second, max_norm=0.1)

    again = Fabricated(level=level, half=half)
    state = {**again.state, "batch": 0}
    rest = again.fabric.load(tmp_path / "run.pt", state)
    assert rest == {} and state["batch"] == BATCHES
    assert_same(again.walk(second, max_norm=0.1), expected)
    assert {value.dtype for value in expected.values()} == {torch.float32}
    for key in ("scale", "growth_tracker"):
        assert again.amp.stats()[key] == run.amp.stats()[key]


def test_files_of_plain_fabric(tmp_path: Path) -> None:
    """Without our key the scale begins afresh; files without an optimizer hold no key of ours."""
    plain: Any = Fabric(accelerator="cpu", devices=1)
    net = client_net()
    model, optimizer = plain.setup(net, optimizer_and_scheduler(net)[0])
    plain.backward(model(client_batches(1)[0][0]).sum())
    optimizer.step()
    plain.save(tmp_path / "plain.pt", {"model": model, "optimizer": optimizer})
    run = Fabricated(level="O2")
    run.fabric.load(tmp_path / "plain.pt", {"model": run.model, "optimizer": run.optimizer})
    assert_same(run.model.state_dict(), net.state_dict())
    assert run.amp.scaler.get_scale() == tritonamp.GradScaler("cpu").get_scale()

    run.fabric.save(tmp_path / "weights.pt", {"model": run.model})
    weights = plain.load(tmp_path / "weights.pt")
    assert weights.keys() == {"model"}
    run.fabric.save(tmp_path / "state.pt", run.model.state_dict())
    other = fabric_of(level="O2")
    loaded = other.setup(client_net())
    other.load_raw(tmp_path / "state.pt", loaded)
    assert_same(loaded.state_dict(), net.state_dict())


# several models and optimizers


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


# the rest of Fabric


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
def ddp_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A Fabric with DDP of one process."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):  # Lightning sets them
        monkeypatch.delenv(name, raising=False)
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


def test_a_closure() -> None:
    run, data = Fabricated("SGD", level="O2"), client_batches(BATCHES, 3)
    for x, y in data:

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            run.optimizer.zero_grad()
            loss = LOSS(run.model(x), y)
            run.fabric.backward(loss)
            return loss

        assert isinstance(run.optimizer.step(closure), Tensor)
        run.scheduler.step()
    assert_same(state_of(run.model), ByHand("SGD", "O2").walk(data))


def test_a_scheduler_and_an_average_of_the_wrappers() -> None:
    run = Fabricated(level="O2", loss_scale=1024.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 0.5**step)
    average = torch.optim.swa_utils.AveragedModel(run.model)
    x, y = client_batches(1)[0]
    run.fabric.backward(LOSS(run.model(x), y))
    run.optimizer.step()
    scheduler.step()
    assert run.plain.param_groups[0]["lr"] == 0.025
    before = average(x)
    average.update_parameters(run.model)
    assert not torch.equal(average(x), before)
    assert_same(copy.deepcopy(run.model).state_dict(), run.model.state_dict())


def test_a_pickle_of_the_whole_model(tmp_path: Path) -> None:
    """It holds FP32 values and an unused plugin."""
    run = Fabricated(level="O2")
    run.walk(client_batches(2))
    torch.save(run.model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert_same(loaded.state_dict(), run.model.state_dict())
    assert loaded._strategy.precision.amp is None
    assert loaded(client_batches(1)[0][0]).dtype is torch.float32


@pytest.mark.parametrize("mode", ["heal", "raise"])
def test_faults(mode: str) -> None:
    run = Fabricated(level="O2", on_nonfinite=mode)
    x, y = client_batches(1)[0]
    with torch.no_grad():
        run.net[0].weight.mul_(3e4)  # finite in float16, and the product is not
    if mode == "raise":
        with pytest.raises(tritonamp.NonFiniteError):
            run.walk([(x * 1e3, y)])
    else:
        run.walk([(x * 1e3, y)] * 2)
        assert run.amp.stats()["healed"]


def test_the_same_setup_again() -> None:
    run, hand = Fabricated(level="O2"), ByHand(level="O2")
    run.model, run.optimizer = run.fabric.setup(run.net, run.plain)
    assert_same(run.walk(client_batches(3), max_norm=0.1), hand.walk(client_batches(3), norm=0.1))


# errors


def test_a_late_setup() -> None:
    run = Fabricated(level="O2")
    run.walk(client_batches(2))
    for late in (
        lambda: run.fabric.setup(nn.Linear(2, 2)),
        lambda: run.fabric.setup_optimizers(torch.optim.SGD(run.net[0].parameters())),
    ):
        with pytest.raises(RuntimeError, match=r"before the first fabric.backward.*teardown\(\)"):
            late()
    run.fabric.strategy.precision.teardown()
    model = run.fabric.setup(nn.Linear(6, 2))
    assert model(torch.ones(1, 6)).dtype is torch.float32
    assert tritonamp.handle(model.module) is run.amp


def test_errors() -> None:
    x, y = client_batches(1)[0]
    run = Fabricated(level="O2")
    with pytest.raises(RuntimeError, match=r"call `fabric.backward\(loss\)`"):
        LOSS(run.model(x), y).backward()
    with pytest.raises(RuntimeError, match=r"expected a call by fabric\.setup"):
        MixedPrecision().convert_module(run.net)
    with pytest.raises(RuntimeError, match=r"not in use: give it to Fabric.*fabric\.setup"):
        MixedPrecision().unscale_gradients(run.plain)
    fabric, net = fabric_of(level="O2"), client_net()
    fabric.setup(net)
    with pytest.raises(ValueError, match="optimizer"):
        fabric.setup_optimizers(torch.optim.SGD(client_net().parameters()))
    fabric.setup_optimizers(torch.optim.SGD(net.parameters()))
    assert tritonamp.handle(net) is fabric.strategy.precision.amp is not None
    with pytest.raises(ValueError, match="levle"):
        fabric_of(levle="O2").setup(net, optimizer_and_scheduler(net)[0])
    with pytest.raises(TypeError, match="can only work with the `FSDPPrecision` plugin"):
        FSDPStrategy().precision = MixedPrecision()
