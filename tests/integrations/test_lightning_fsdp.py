"""Lightning's ModelParallelStrategy on two gloo ranks, with FSDP2 in ``configure_model``: losses of
one process on the joint batch, one decision of both ranks, and a resume that is not a stop.

The ranks are this file run as a script, see two_ranks.py.
"""

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning_models import IGNORED, Regression, fitted, on_this_rank
from ranks import SMALL_STEPS, scaler, sharded, share
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from two_ranks import RANKS, Pair, on_ranks, serve, whole

pytest.importorskip("lightning")

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision as StockMixedPrecision

from tritonamp.integrations.lightning import MixedPrecision

pytestmark = [
    pytest.mark.clients,
    pytest.mark.ranks,
    pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed"),
    *map(pytest.mark.filterwarnings, IGNORED),
]

STEPS, BAD, EPOCHS = 3, 2, 2
ROUNDINGS = 4
"""Between weights and loss: of two layers' weights, and of what they return."""


class Overflowing(Regression):
    """Sharded with a policy; in the third batch of an epoch gradients overflow, on rank 1 or alone.

    Args:
        policy: the MixedPrecisionPolicy; None: the model is not sharded.
        half: whether the model comes in float16.
    """

    def __init__(self, policy: MixedPrecisionPolicy | None, half: bool = False) -> None:
        super().__init__()
        if half:
            self.net.half()
        self.policy = policy
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.policy is not None:
            mesh = self.device_mesh["data_parallel"]
            sharded(self.net, [self.net[0]], mesh=mesh, mp_policy=self.policy)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        output = self.net(batch[0])
        if index == BAD and (not dist.is_initialized() or dist.get_rank() == 1):
            output.register_hook(lambda grad: grad * math.inf)
        loss = nn.functional.mse_loss(output, batch[1])
        self.losses.append(loss.item())
        return loss

    def make_optimizer(self) -> tuple[Any, Any]:
        optimizer = SMALL_STEPS["AdamW"](self.parameters())
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)

    def values(self) -> list[list[float]]:
        return [whole(p) for p in self.parameters()]


def pairs_of_batches() -> list[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(STEPS, 8, n, generator=generator) for n in (6, 3))
    return list(zip(x, y, strict=True))


class SaveFirst(Callback):
    """Saves when the first epoch ends; in the middle of an epoch Lightning would begin it again."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.folder)


def fit_alone(model: Overflowing, plugin: Any, data: Any = None, **settings: Any) -> Any:
    """Train with the plugin on all batches, and return it."""
    how = dict(max_epochs=EPOCHS, use_distributed_sampler=False, gradient_clip_val=1.0)
    fitted(model, plugin, data or pairs_of_batches(), **{**how, **settings})
    return plugin


def causes_in(plugin: MixedPrecision) -> list[str]:
    assert plugin.amp is not None
    return [str(record.cause) for record in plugin.amp.history]


def fit_sharded(model: Overflowing, plugin: Any, saves_shards: bool, **settings: Any) -> Any:
    """The same on all ranks, with FSDP2."""
    from lightning.pytorch.strategies import ModelParallelStrategy

    on_this_rank()
    strategy = ModelParallelStrategy(RANKS, 1, saves_shards, process_group_backend="gloo")
    data = [(share(x), share(y)) for x, y in pairs_of_batches()]
    return fit_alone(model, plugin, data, strategy=strategy, devices=RANKS, **settings)


@on_ranks
def by_model_parallel(
    level: str, policy: bool, half: bool, saves_shards: bool, folder: str
) -> dict[str, Any]:
    given = MixedPrecisionPolicy(param_dtype=torch.float16 if policy else None)

    def run(**settings: Any) -> tuple[Overflowing, MixedPrecision]:
        model, plugin = Overflowing(given, half), MixedPrecision(level=level, scaler=scaler())
        return model, fit_sharded(model, plugin, saves_shards, **settings)

    model, plugin = run(callbacks=[SaveFirst(folder)])
    assert Path(folder).is_dir() is saves_shards
    assert {type(p).__name__ for p in model.parameters()} == {"DTensor"}
    resumed, plugin_again = run(start=folder)
    assert plugin.amp is not None and plugin_again.amp is not None
    assert resumed.values() == model.values() and resumed.losses == model.losses[STEPS:]
    for key in ("steps", "scale"):
        assert plugin.amp.stats()[key] == plugin_again.amp.stats()[key]
    return {
        "losses": model.losses,
        "rates": model.rates,
        "causes": causes_in(plugin),
        "end": model.values(),
    }


@pytest.mark.parametrize(
    ("level", "policy", "half", "saves_shards"),
    [("O2", True, False, True), ("O1", False, False, False), ("O2", False, True, True)],
)
def test_model_parallel_strategy(
    pair: Pair, tmp_path: Path, level: str, policy: bool, half: bool, saves_shards: bool
) -> None:
    how = dict(level=level, policy=policy, half=half, saves_shards=saves_shards)
    answers = by_model_parallel(pair, folder=str(tmp_path / "saved"), **how)
    alone = Overflowing(None, half)
    plugin = fit_alone(alone, MixedPrecision(level=level, scaler=scaler()))
    for answer in answers:
        assert answer["end"] == answers[0]["end"]
        assert answer["causes"] == causes_in(plugin) == ["None", "None", "scale overflow"] * EPOCHS
        assert answer["rates"] == alone.rates
    pairs = zip(*(answer["losses"] for answer in answers), alone.losses, strict=True)
    for one, other, joint in pairs:
        assert one != other
        assert abs((one + other) / 2 - joint) <= ROUNDINGS * 2.0**-11 * joint


@on_ranks
def by_our_scaler() -> dict[str, Any]:
    """Lightning's own plugin, with our scaler alone."""
    model, ours = Overflowing(MixedPrecisionPolicy()), scaler()
    fit_sharded(model, StockMixedPrecision("16-mixed", "cpu", ours), True, gradient_clip_val=None)
    return {"losses": model.losses, "scale": ours.get_scale(), "end": model.values()}


def test_our_scaler_in_lightnings_own_plugin(pair: Pair) -> None:
    first, second = by_our_scaler(pair)
    assert first["end"] == second["end"]
    assert first["scale"] == second["scale"] == 2.0**10 / 2**EPOCHS  # an overflow in each
    alone = Overflowing(None)
    fit_alone(alone, StockMixedPrecision("16-mixed", "cpu", scaler()), gradient_clip_val=None)
    for one, other, joint in zip(first["losses"], second["losses"], alone.losses, strict=True):
        assert abs((one + other) / 2 - joint) <= ROUNDINGS * 2.0**-11 * joint


if __name__ == "__main__":
    serve(*sys.argv[1:])
