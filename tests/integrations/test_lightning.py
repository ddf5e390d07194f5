"""Lightning's Trainer with our plugin walks the steps of a loop written by hand, bit for bit; its
own plugin takes our GradScaler and AdamW.

The two ranks are this file run as a script, see two_ranks.py.
"""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from clients import (
    LEVELS_AND_KINDS,
    ByHand,
    client_batches,
    optimizer_and_scheduler,
    state_of,
)
from helpers import assert_same
from lightning_models import IGNORED, QUIET, Regression, fitted, loader, on_this_rank
from torch import Tensor, nn
from two_ranks import Pair, enable, on_ranks, serve

import tritonamp

pytest.importorskip("lightning")

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision as StockMixedPrecision
from lightning.pytorch.utilities import grad_norm

from tritonamp.integrations.lightning import MixedPrecision

pytestmark = [pytest.mark.clients, *map(pytest.mark.filterwarnings, IGNORED)]

BATCHES = 8


class Validated(Regression):
    """A model whose steps may go around the enabled forward, with a loss of validation."""

    def __init__(self, optimizer: str = "AdamW", direct: bool = False) -> None:
        super().__init__(optimizer)
        self.direct = direct

    def training_step(self, batch: list[Tensor], number: int) -> Any:
        if self.direct:
            return nn.functional.mse_loss(self.net(batch[0]), batch[1])
        return super().training_step(batch, number)

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self(batch[0]), batch[1]))


class Walked(ByHand):
    """The same run in a loop by hand; its names are those of the Lightning model."""

    def parts_of(self, kind: str) -> tuple[nn.Module, Any, Any]:
        model = Validated()
        return (model, *optimizer_and_scheduler(model, kind))


def fit(model: Any, plugin: Any, bad: int | None = None, **settings: Any) -> Trainer:
    return fitted(model, plugin, client_batches(BATCHES, bad), **settings)


@pytest.mark.parametrize(("level", "kind"), LEVELS_AND_KINDS)
def test_the_trainer_walks_our_steps(level: str, kind: str) -> None:
    model, plugin = Validated(kind), MixedPrecision(level=level)
    fit(model, plugin, bad=3)
    hand = Walked(kind, level)
    expected, stats = hand.walk(client_batches(BATCHES, 3)), hand.amp.stats()
    assert_same(model.state_dict(), expected)
    assert plugin.amp is not None
    assert plugin.amp.stats() == stats
    assert stats["skipped"] > 0
    assert {p.dtype for p in model.parameters()} == {torch.float32}  # put back


@pytest.mark.parametrize(
    ("settings", "hand"),
    [
        ({"gradient_clip_val": 0.1}, {"norm": 0.1}),
        ({"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, {"value": 0.01}),
        ({"accumulate_grad_batches": 2}, {"accumulate": 2}),
        ({"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, {"accumulate": 2, "norm": 0.1}),
    ],
    ids=["norm", "value", "accumulate", "accumulate and norm"],
)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_clipping_and_accumulation(
    level: str, settings: dict[str, Any], hand: dict[str, Any]
) -> None:
    model = Validated()
    fit(model, MixedPrecision(level=level), bad=5, **settings)
    data = client_batches(BATCHES, 5)
    expected, unclipped = Walked(level=level).walk(data, **hand), Walked(level=level).walk(data)
    assert_same(model.state_dict(), expected)
    assert any(not torch.equal(unclipped[name], value) for name, value in expected.items())


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_steps_that_call_submodules(level: str) -> None:
    """``self.net(x)`` in place of ``self(x)`` goes around the enabled forward."""
    model = Validated(direct=True)
    fit(model, MixedPrecision(level=level))
    assert not torch.equal(model.net[0].weight, Validated().net[0].weight)
    expected = Walked(level=level).walk(client_batches(BATCHES))
    for name, value in model.state_dict().items():
        # outputs are half here, so the loss's gradient is: 8 AdamW steps of lr 0.05 may each turn
        # their sign by it
        assert (value - expected[name]).abs().max() <= 0.05


def test_a_scheduler_made_before_moves_the_rate() -> None:
    model = Validated()
    fit(model, MixedPrecision(level="O2"))
    assert model.rates == [0.05 * 0.5 ** ((i + 1) // 2) for i in range(BATCHES)]


class NormLogger(Callback):
    """Lightning's own recipe for gradient norms."""

    def __init__(self) -> None:
        self.norms: list[Tensor] = []

    def on_before_optimizer_step(
        self, trainer: Trainer, module: LightningModule, optimizer: Any
    ) -> None:
        self.norms.append(grad_norm(module, 2)["grad_2.0_norm_total"])


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_hooks_see_true_gradients(level: str) -> None:
    clip, norms, plain = 0.1, NormLogger(), NormLogger()
    model = Validated()
    fit(model, MixedPrecision(level=level), callbacks=[norms], gradient_clip_val=clip)
    fit(Validated(), MixedPrecision(level="O0"), callbacks=[plain], gradient_clip_val=clip)
    taken = [(a, b) for a, b in zip(norms.norms, plain.norms, strict=True) if a.isfinite()]
    assert len(taken) >= BATCHES - 2
    for found, expected in taken[:1]:  # later ones are of other weights
        # half activations and gradients: some roundings of 2^-11 each
        torch.testing.assert_close(found, expected, rtol=2.0**-6, atol=0)
    expected_state = Walked(level=level).walk(client_batches(BATCHES), norm=clip)
    for name, value in model.state_dict().items():
        # the unscaled gradients take the clip coefficient in a rounding of their own
        torch.testing.assert_close(
            value, expected_state[name], rtol=2.0**-11 if level == "O2" else 1e-5, atol=1e-6
        )


@pytest.mark.parametrize(("level", "kind"), LEVELS_AND_KINDS[2:7])
def test_resuming_is_not_stopping(level: str, kind: str, tmp_path: Path) -> None:
    # the epoch ends with a skip; in the middle of one Lightning would begin it again
    last = BATCHES - 1
    whole = Validated(kind)
    fit(whole, MixedPrecision(level=level), bad=last, max_epochs=2)
    plugin = MixedPrecision(level=level)
    trainer = fit(Validated(kind), plugin, bad=last)
    assert plugin.amp is not None and plugin.amp.history[-1].cause is not None
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    second, resumed = Validated(kind), MixedPrecision(level=level)
    fit(second, resumed, bad=last, max_epochs=2, start=tmp_path / "run.ckpt")
    assert_same(second.state_dict(), whole.state_dict())
    assert resumed.amp is not None and resumed.amp.stats()["steps"] > plugin.amp.stats()["steps"]


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_resuming_a_half_model_is_not_stopping(
    level: str, half: torch.dtype, tmp_path: Path
) -> None:
    models, states = [Validated().to(half) for _ in range(2)], list[dict[str, Tensor]]()
    for model, path in zip(models, [None, tmp_path / "epoch 0.ckpt"], strict=True):
        plugin = MixedPrecision(level=level)
        kept = KeepStates(tmp_path, states)
        fit(model, plugin, max_epochs=2, start=path, callbacks=[kept])
        assert plugin.amp is not None and plugin.amp.policy.dtype is half
    first, second, resumed = states
    assert {value.dtype for value in first.values()} == {torch.float32}
    assert not torch.equal(first["net.0.weight"], second["net.0.weight"])
    assert_same(resumed, second)
    assert_same(*(model.state_dict() for model in models))
    assert {p.dtype for model in models for p in model.parameters()} == {half}


class KeepStates(Callback):
    """Notes the state after each epoch, and saves a checkpoint then."""

    def __init__(self, folder: Path, states: list[dict[str, Tensor]]) -> None:
        self.folder, self.states = folder, states

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.states.append(state_of(module))
        trainer.save_checkpoint(self.folder / f"epoch {trainer.current_epoch}.ckpt")


def test_a_checkpoint_of_lightnings_own_plugin(tmp_path: Path) -> None:
    stock = StockMixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**7))
    fit(Validated(), stock, max_steps=2).save_checkpoint(tmp_path / "run.ckpt")
    plugin = MixedPrecision(level="O2")
    fit(Validated(), plugin, start=tmp_path / "run.ckpt")
    assert plugin.amp is not None and plugin.amp.scaler.get_scale() == 2.0**7


def test_validation_predictions_and_a_second_fit() -> None:
    plugin = MixedPrecision(level="O2")
    trainer = Trainer(plugins=[plugin], **QUIET)
    model, data = Validated(), loader(client_batches(BATCHES))
    trainer.validate(model, data, verbose=False)
    half = trainer.callback_metrics["val_loss"]
    with torch.no_grad():
        x, y = map(torch.cat, zip(*client_batches(BATCHES), strict=True))
        exact = nn.functional.mse_loss(model(x), y)
    assert half != exact
    torch.testing.assert_close(half, exact, rtol=2.0**-8, atol=0)
    trainer.fit(model, data, data)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, data, data)
    assert trainer.global_step == 2 * BATCHES


class NoLoss(Validated):
    def training_step(self, batch: list[Tensor], number: int) -> Tensor | None:  # type: ignore[override]
        return None if number % 2 else super().training_step(batch, number)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning")
def test_a_training_step_without_a_loss() -> None:
    model, plugin = NoLoss(), MixedPrecision(level="O2")
    fit(model, plugin, gradient_clip_val=0.5, callbacks=[NormLogger()])
    assert plugin.amp is not None
    assert plugin.amp.stats()["steps"] + plugin.amp.stats()["skipped"] == BATCHES // 2


class Two(LightningModule):
    """Two networks, the second trained against the first, in Lightning's three ways of manual
    optimization.
    """

    def __init__(self, way: str, clip: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.automatic_optimization = False
        self.first, self.second = nn.Linear(6, 4), nn.Linear(4, 3)
        self.way, self.clip = way, clip

    def losses(self, batch: list[Tensor]) -> Iterator[Tensor]:
        x, y = batch
        yield nn.functional.mse_loss(self.second(self.first(x)), y)
        yield nn.functional.mse_loss(self.second(self.first(x).detach()), -y)

    def training_step(self, batch: list[Tensor], _: int) -> None:
        for optimizer, loss in zip(self.optimizers(), self.losses(batch), strict=True):
            # after the loss: gradients of what is toggled off are computed all the same
            if self.way == "toggled":
                self.toggle_optimizer(optimizer)
            else:
                optimizer.zero_grad()
            if self.way == "closure":
                optimizer.step(lambda loss=loss: self.manual_backward(loss))
                continue
            self.manual_backward(loss)
            if self.clip:
                self.clip_gradients(optimizer, self.clip, "norm")
            optimizer.step()
            if self.way == "toggled":  # the loss leaves gradients in the other network
                optimizer.zero_grad()
                self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.AdamW(self.first.parameters(), lr=0.05),
            torch.optim.SGD(self.second.parameters(), lr=0.1),
        ]


def two_by_hand(level: str, clip: float, toggled: bool) -> dict[str, Tensor]:
    model = Two("")
    optimizers = model.configure_optimizers()
    amp = tritonamp.enable(model, optimizers, level=level)
    with amp.autocast():
        for batch in client_batches(BATCHES):
            for optimizer, loss in zip(optimizers, model.losses(batch), strict=True):
                optimizer.zero_grad()
                amp.backward(loss, optimizer if toggled or optimizer is optimizers[1] else None)
                if clip:
                    amp.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(
                        [p for group in optimizer.param_groups for p in group["params"]], clip
                    )
                optimizer.step()
    state = state_of(model)
    amp.disable()
    return state


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(
    ("way", "clip"), [("plain", 0.0), ("closure", 0.0), ("plain", 0.05), ("toggled", 0.0)]
)
def test_manual_optimization(level: str, way: str, clip: float) -> None:
    model = Two(way, clip)
    fit(model, MixedPrecision(level=level))
    assert_same(model.state_dict(), two_by_hand(level, clip, way == "toggled"))


# Lightning's own plugin


@pytest.mark.parametrize("kind", ["AdamW", "optim.AdamW", "SGD"])
def test_our_scaler_in_lightnings_plugin(kind: str) -> None:
    scaler = tritonamp.GradScaler("cpu", init_scale=2.0**10)
    model = Validated(kind)
    fit(model, StockMixedPrecision("16-mixed", "cpu", scaler), bad=3)
    assert scaler.get_scale() == 2.0**10  # the loss was inf, which is no matter of the scale
    plain = Validated(kind)
    fit(
        plain,
        StockMixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10)),
        bad=3,
    )
    for name, value in model.state_dict().items():
        assert not torch.equal(value, Validated().state_dict()[name]) or "net.1" in name
        # of our AdamW and torch's, roundings of eight updates; and the halved scale only moves
        # powers of two
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-5, atol=1e-6)


def stock_by_hand(
    kind: str, clip: dict[str, float], dtype: torch.dtype, bad: int
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The steps that Lightning's own plugin documents, in a loop of our own."""
    model = Validated(kind).to(dtype)
    optimizer, scheduler = optimizer_and_scheduler(model, kind)
    scaler, losses = tritonamp.GradScaler("cpu", init_scale=2.0**10), []
    for x, y in client_batches(BATCHES, bad):
        with torch.autocast("cpu", torch.float16):
            losses.append(nn.functional.mse_loss(model(x), y))
        optimizer.zero_grad()
        scaler.scale(losses[-1]).backward()
        if clip:
            scaler.unscale_(optimizer)
        if "norm" in clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip["norm"])
        if "value" in clip:
            nn.utils.clip_grad_value_(model.parameters(), clip["value"])
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
    return losses, model.state_dict()


class LossLogger(Callback):
    def __init__(self) -> None:
        self.losses: list[Tensor] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.losses.append(args[2]["loss"])


@pytest.mark.parametrize(
    ("clip", "dtype"),
    [
        ({}, torch.float32),
        ({"norm": 0.1}, torch.float32),
        ({"value": 0.01}, torch.float32),
        ({}, torch.float16),
    ],
    ids=["plain", "norm", "value", "float16"],
)
@pytest.mark.parametrize("kind", ["optim.AdamW", "optim.SGD", "optim.Lion"])
def test_our_optimizers_and_scaler_in_lightnings_plugin(
    kind: str, clip: dict[str, float], dtype: torch.dtype
) -> None:
    scaler, logger = tritonamp.GradScaler("cpu", init_scale=2.0**10), LossLogger()
    settings: dict[str, Any] = {"gradient_clip_val": next(iter(clip.values()), None)}
    if clip:
        settings["gradient_clip_algorithm"] = next(iter(clip))
    model = Validated(kind).to(dtype)
    plugin = StockMixedPrecision("16-mixed", "cpu", scaler)
    fit(model, plugin, bad=3, callbacks=[logger], **settings)
    losses, state = stock_by_hand(kind, clip, dtype, bad=3)
    torch.testing.assert_close(
        torch.stack(logger.losses), torch.stack(losses), rtol=0, atol=0, equal_nan=True
    )
    assert_same(model.state_dict(), state)
    assert not torch.equal(state["net.0.weight"], Validated().to(dtype).net[0].weight)


def test_half_weights_are_not_clipped_in_lightnings_plugin() -> None:
    """It refuses by an attribute that torch's GradScaler needs for half weights."""
    scaler = tritonamp.GradScaler("cpu", init_scale=2.0**10)
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fit(
            Validated("optim.AdamW").half(),
            StockMixedPrecision("16-mixed", "cpu", scaler),
            gradient_clip_val=0.1,
        )


# Two ranks


def batches_of_rank(bad: int) -> list[Any]:
    """Every other batch; number ``bad`` of all has an inf, so that one rank alone sees it."""
    return client_batches(BATCHES, bad)[torch.distributed.get_rank() :: 2]


@on_ranks
def ddp(level: str, accumulate: int) -> dict[str, Any]:
    from lightning.pytorch.strategies import DDPStrategy

    on_this_rank()
    model, plugin = Validated(), MixedPrecision(level=level)
    fitted(
        model,
        plugin,
        batches_of_rank(bad=2),
        devices=2,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=0.1,
        strategy=DDPStrategy(process_group_backend="gloo"),
        use_distributed_sampler=False,
    )
    assert plugin.amp is not None and "forward" not in vars(model)

    hand = Validated()
    optimizer, scheduler = optimizer_and_scheduler(hand)
    wrapped = nn.parallel.DistributedDataParallel(hand)
    amp = enable(wrapped, optimizer, level=level)
    for i, (x, y) in enumerate(batches_of_rank(bad=2)):
        boundary = (i + 1) % accumulate == 0
        with contextlib.nullcontext() if boundary else wrapped.no_sync():
            amp.backward(nn.functional.mse_loss(wrapped(x), y) / accumulate)
        if boundary:
            amp.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    assert_same(model.state_dict(), hand.state_dict())
    assert plugin.amp.stats() == amp.stats()
    result = {name: value.tolist() for name, value in model.state_dict().items()}
    return {"state": result, "skipped": amp.stats()["skipped"]}


class Discarding(Validated):
    """Throws its first batch away after it has clipped."""

    def __init__(self) -> None:
        super().__init__("SGD")
        self.automatic_optimization = False
        self.moves: list[float] = []

    def training_step(self, batch: list[Tensor], index: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        self.manual_backward(super().training_step(batch, index))
        self.clip_gradients(optimizer, 1e-3, "value")
        masters = list(self.trainer.precision_plugin.amp.master_params())
        before = [p.detach().clone() for p in masters]
        if index > 0:
            optimizer.step()
            self.moves.append(
                max(
                    float((p.detach() - q).abs().max())
                    for p, q in zip(masters, before, strict=True)
                )
            )
        optimizer.zero_grad()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gradients_that_were_clipped_and_dropped(level: str) -> None:
    model = Discarding()
    fit(model, MixedPrecision(level=level, loss_scale=2.0**8))
    # the largest gradient is at the limit: one step is the limit times the learning rate, rounded
    # at weights below 2
    assert model.moves == pytest.approx([0.05 * 1e-3] * (BATCHES - 1), abs=2.0**-24)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
@pytest.mark.parametrize(("level", "accumulate"), [("O1", 2), ("O2", 1)])
def test_two_ranks(pair: Pair, level: str, accumulate: int) -> None:
    first, second = ddp(pair, level=level, accumulate=accumulate)
    assert first == second
    assert first["skipped"] > 0


if __name__ == "__main__":
    serve(*sys.argv[1:])
