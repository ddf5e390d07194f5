"""The small model of clients under Lightning, a quiet Trainer, and a Fabric with our plugin."""

import os
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from clients import LOSS, client_net, optimizer_and_scheduler
from torch import Tensor
from torch.utils.data import DataLoader

pytest.importorskip("lightning")

from lightning.fabric import Fabric
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import LightningModule, Trainer

from tritonamp.integrations.fabric import MixedPrecision

IGNORED = [
    # Lightning's advice: more workers in the loader, a validation loop
    "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning",
    # Lightning 2.6 with torch 2.15
    "ignore:.*LeafSpec.* is deprecated:FutureWarning",
]
QUIET: dict[str, Any] = dict(
    accelerator="cpu",
    devices=1,
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    enable_checkpointing=False,
    max_epochs=1,
)


class Regression(LightningModule):
    """The model of clients, with their optimizer and scheduler.

    Attributes:
        rates: the learning rate after each batch.
    """

    def __init__(self, optimizer: str = "AdamW") -> None:
        super().__init__()
        self.net = client_net()
        self.optimizer, self.rates = optimizer, list[float]()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]

    def training_step(self, batch: list[Tensor], _: int) -> Any:
        return LOSS(self(batch[0]), batch[1])

    def make_optimizer(self) -> tuple[Any, Any]:
        return optimizer_and_scheduler(self, self.optimizer)

    def configure_optimizers(self) -> Any:
        optimizer, scheduler = self.make_optimizer()
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def on_train_batch_end(self, *_: Any) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])


def loader(batches: Sequence[Any]) -> DataLoader[Any]:
    """Return a loader for Lightning, which takes a list for several loaders."""
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def fitted(
    model: Any, plugin: Any, batches: Sequence[Any], start: Any = None, **settings: Any
) -> Trainer:
    """Train with a plugin, perhaps from a checkpoint, and return the Trainer."""
    torch.manual_seed(1)  # for what the loader draws
    trainer = Trainer(plugins=[plugin], **{**QUIET, **settings})
    trainer.fit(model, loader(batches), ckpt_path=start)
    return trainer


def fabric_of(**settings: Any) -> Any:
    """Return a Fabric of one process whose plugin has these settings."""
    return Fabric(accelerator="cpu", devices=1, plugins=MixedPrecision(**settings))


def on_this_rank() -> None:
    """Tell Lightning the rank of this process, and ignore its warnings."""
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated", FutureWarning)
    warnings.filterwarnings("ignore", category=PossibleUserWarning)
