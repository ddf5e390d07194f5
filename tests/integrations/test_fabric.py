"""A loop of Lightning Fabric with our plugin takes the steps of a loop by hand, bit for bit."""

import copy
import math
from collections.abc import Sequence
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
from lightning_models import IGNORED, fabric_of
from torch import Tensor, nn

import tritonamp

pytest.importorskip("lightning")

from lightning.fabric import Fabric
from lightning.fabric.strategies import FSDPStrategy

from tritonamp.integrations.fabric import MixedPrecision

pytestmark = [pytest.mark.clients, *map(pytest.mark.filterwarnings, IGNORED)]

BATCHES = 8


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


def test_a_checkpoint_into_a_model_alone(tmp_path: Path) -> None:
    run, path = Fabricated(level="O2"), tmp_path / "run.ckpt"
    trained = run.walk(client_batches(2))
    run.fabric.save(path, run.state)
    fabric = fabric_of(level="O2")
    model = fabric.setup(client_net())
    rest = fabric.load(path, {"model": model})
    assert_same(model.state_dict(), trained)
    assert sorted(rest) == ["optimizer", "scheduler"]


def test_an_optimizer_before_its_model() -> None:
    fabric, net = fabric_of(level="O2"), client_net()
    fabric.setup_optimizers(torch.optim.SGD(net.parameters()))
    model = fabric.setup_module(net)
    with pytest.raises(RuntimeError, match=r"no optimizer.*together with a model or after it"):
        fabric.backward(model(client_batches(1)[0][0]).sum())


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


def test_calls_that_pass_by_fabric() -> None:
    x, y = client_batches(1)[0]
    run = Fabricated(level="O2")
    with pytest.raises(RuntimeError, match=r"call `fabric.backward\(loss\)`"):
        LOSS(run.model(x), y).backward()
    with pytest.raises(RuntimeError, match=r"expected a call by fabric\.setup"):
        MixedPrecision().convert_module(run.net)
    with pytest.raises(RuntimeError, match=r"not in use: give it to Fabric.*fabric\.setup"):
        MixedPrecision().unscale_gradients(run.plain)


def test_another_optimizer_may_follow_one_that_was_refused() -> None:
    fabric, net = fabric_of(level="O2"), client_net()
    fabric.setup(net)
    with pytest.raises(ValueError, match="optimizer"):
        fabric.setup_optimizers(torch.optim.SGD(client_net().parameters()))
    fabric.setup_optimizers(torch.optim.SGD(net.parameters()))
    assert tritonamp.handle(net) is fabric.strategy.precision.amp is not None


def test_wrong_settings() -> None:
    net = client_net()
    with pytest.raises(ValueError, match="levle"):
        fabric_of(levle="O2").setup(net, optimizer_and_scheduler(net)[0])


def test_fsdp1_is_refused() -> None:
    with pytest.raises(TypeError, match="can only work with the `FSDPPrecision` plugin"):
        FSDPStrategy().precision = MixedPrecision()
