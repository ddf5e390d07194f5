"""Lightning's ModelParallelStrategy on two gloo ranks, with FSDP2 in ``configure_model``: losses of
one process on the joint batch, one decision of both ranks, and a resume that is not a stop.

The ranks are this file run as a script, see two_ranks.py.
"""

import math
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision as StockMixedPrecision
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, TensorDataset
from two_ranks import RANKS, Pair, on_ranks, serve

import tritonamp
from tritonamp.integrations.lightning import MixedPrecision

pytestmark = [
    pytest.mark.clients,
    pytest.mark.ranks,
    pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed"),
]

STEPS, BAD, EPOCHS = 3, 2, 2
ROUNDINGS = 4
"""Between weights and loss: of two layers' weights, and of what they return."""


class Model(LightningModule):
    """Sharded as told; in the third batch of an epoch gradients overflow, on rank 1 or alone."""

    def __init__(self, policy: MixedPrecisionPolicy | None, half: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))
        if half:
            self.net.half()
        self.policy = policy
        self.losses: list[float] = []
        self.rates: list[float] = []

    def configure_model(self) -> None:
        if self.policy is not None:
            mesh = self.device_mesh["data_parallel"]
            for part in (self.net[0], self.net):
                fully_shard(part, mesh=mesh, mp_policy=self.policy)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        output = self.net(batch[0])
        if index == BAD and (not dist.is_initialized() or dist.get_rank() == 1):
            output.register_hook(lambda grad: grad * math.inf)
        loss = nn.functional.mse_loss(output, batch[1])
        self.losses.append(loss.item())
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, eps=0.25)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def loader(rank: int | None) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(STEPS, 8, n, generator=generator) for n in (6, 3))
    if rank is not None:
        x, y = (t.chunk(RANKS, 1)[rank] for t in (x, y))
    return DataLoader(TensorDataset(x.flatten(0, 1), y.flatten(0, 1)), batch_size=x.shape[1])


class SaveFirst(Callback):
    """Saves a checkpoint when the first epoch ends; in the middle Lightning would begin it anew."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.folder)


def scaler() -> tritonamp.GradScaler:
    return tritonamp.GradScaler("cpu", init_scale=2.0**10)


def fit(model: Model, plugin: Any, rank: int | None, **settings: Any) -> Any:
    """Train with the plugin on the share of a rank, None: on all, alone; return the plugin."""
    torch.manual_seed(1)  # for what the loader draws
    how: dict[str, Any] = dict(accelerator="cpu", devices=1, logger=False, max_epochs=EPOCHS)
    how |= dict(enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
    start = settings.pop("start", None)
    how |= dict(use_distributed_sampler=False, gradient_clip_val=1.0)
    trainer = Trainer(plugins=[plugin], **{**how, **settings})
    trainer.fit(model, loader(rank), ckpt_path=start)
    return plugin


def causes(plugin: MixedPrecision) -> list[str]:
    assert plugin.amp is not None
    return [str(record.cause) for record in plugin.amp.history]


def whole(model: nn.Module) -> list[list[float]]:
    full: list[Any] = [p.full_tensor() for p in model.parameters()]  # type: ignore[operator]
    return [p.double().flatten().tolist() for p in full]


def fit_sharded(model: Model, plugin: Any, saves_shards: bool, **settings: Any) -> Any:
    """The same on all ranks, with FSDP2."""
    from lightning.pytorch.strategies import ModelParallelStrategy

    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated", FutureWarning)
    warnings.filterwarnings("ignore", category=PossibleUserWarning)
    strategy = ModelParallelStrategy(RANKS, 1, saves_shards, process_group_backend="gloo")
    how = dict(strategy=strategy, devices=RANKS, **settings)
    return fit(model, plugin, dist.get_rank(), **how)


@on_ranks
def parallel(
    level: str, policy: bool, half: bool, saves_shards: bool, folder: str
) -> dict[str, Any]:
    given = MixedPrecisionPolicy(param_dtype=torch.float16 if policy else None)

    def run(**settings: Any) -> tuple[Model, MixedPrecision]:
        model, plugin = Model(given, half), MixedPrecision(level=level, scaler=scaler())
        return model, fit_sharded(model, plugin, saves_shards, **settings)

    model, plugin = run(callbacks=[SaveFirst(folder)])
    assert Path(folder).is_dir() is saves_shards
    assert {type(p).__name__ for p in model.parameters()} == {"DTensor"}
    resumed, plugin_again = run(start=folder)
    assert plugin.amp is not None and plugin_again.amp is not None
    assert whole(resumed) == whole(model) and resumed.losses == model.losses[STEPS:]
    for key in ("steps", "scale"):
        assert plugin.amp.stats()[key] == plugin_again.amp.stats()[key]
    return {
        "losses": model.losses,
        "rates": model.rates,
        "causes": causes(plugin),
        "end": whole(model),
    }


@pytest.mark.parametrize(
    ("level", "policy", "half", "saves_shards"),
    [("O2", True, False, True), ("O1", False, False, False), ("O2", False, True, True)],
)
@pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning")
@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning")
def test_model_parallel_strategy(
    pair: Pair, tmp_path: Path, level: str, policy: bool, half: bool, saves_shards: bool
) -> None:
    how = dict(level=level, policy=policy, half=half, saves_shards=saves_shards)
    answers = parallel(pair, folder=str(tmp_path / "saved"), **how)
    alone = Model(None, half)
    plugin = fit(alone, MixedPrecision(level=level, scaler=scaler()), None)
    for answer in answers:
        assert answer["end"] == answers[0]["end"]
        assert answer["causes"] == causes(plugin) == ["None", "None", "scale overflow"] * EPOCHS
        assert answer["rates"] == alone.rates
    pairs = zip(*(answer["losses"] for answer in answers), alone.losses, strict=True)
    for one, other, joint in pairs:
        assert one != other
        assert abs((one + other) / 2 - joint) <= ROUNDINGS * 2.0**-11 * joint


@on_ranks
def by_scaler() -> dict[str, Any]:
    """Lightning's own plugin, with our scaler alone."""
    model, ours = Model(MixedPrecisionPolicy()), scaler()
    fit_sharded(model, StockMixedPrecision("16-mixed", "cpu", ours), True, gradient_clip_val=None)
    return {"losses": model.losses, "scale": ours.get_scale(), "end": whole(model)}


@pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning")
@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning")
def test_our_scaler_in_lightnings_own_plugin(pair: Pair) -> None:
    first, second = by_scaler(pair)
    assert first["end"] == second["end"]
    assert first["scale"] == second["scale"] == 2.0**10 / 2**EPOCHS  # an overflow in each
    alone = Model(None)
    fit(alone, StockMixedPrecision("16-mixed", "cpu", scaler()), None, gradient_clip_val=None)
    for one, other, joint in zip(first["losses"], second["losses"], alone.losses, strict=True):
        assert abs((one + other) / 2 - joint) <= ROUNDINGS * 2.0**-11 * joint


if __name__ == "__main__":
    serve(*sys.argv[1:])
