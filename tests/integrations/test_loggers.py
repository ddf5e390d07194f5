"""The numbers of a run reach the logger that the run already has, and no read waits."""

import csv
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from clients import LOSS, client_batches, client_net
from lightning_models import IGNORED, Regression, fitted
from torch import Tensor, nn

import tritonamp
from tritonamp.readback import Readback

pytest.importorskip("accelerate")
pytest.importorskip("lightning")
pytest.importorskip("tensorboard")

from accelerate import Accelerator
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger as FabricLogger
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from tritonamp.integrations import accelerate
from tritonamp.integrations.fabric import MixedPrecision as FabricPrecision
from tritonamp.integrations.lightning import MixedPrecision

pytestmark = [pytest.mark.clients, *map(pytest.mark.filterwarnings, IGNORED)]

BATCHES = 6  # of which the second has an inf


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether those who read what came from the device would have waited for it."""
    seen, ready = list[bool](), Readback.ready

    def noted(self: Readback, wait: bool = False) -> Any:
        seen.append(wait)
        return ready(self, wait)

    monkeypatch.setattr(Readback, "ready", noted)
    return seen


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def rows_of(folder: Path) -> list[dict[str, str]]:
    """What Lightning's CSVLogger has written."""
    with (folder / "run" / "0" / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


# Lightning


class Logging(Regression):
    """A model that logs its loss; ``manual``: trained by two optimizers, and by hand."""

    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not manual

    def training_step(self, batch: list[Tensor], number: int) -> Any:
        loss = super().training_step(batch, number)
        self.log("loss", loss)
        if not self.automatic_optimization:
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()
        return loss

    def configure_optimizers(self) -> Any:
        if self.automatic_optimization:
            return super().configure_optimizers()
        return [torch.optim.AdamW(part.parameters()) for part in (self.net[0], self.net[3])]


def fit(model: Logging, **settings: Any) -> tritonamp.Amp:
    plugin = MixedPrecision(level="O2")
    fitted(model, plugin, client_batches(BATCHES, 1), **settings)
    assert plugin.amp is not None
    return plugin.amp


@pytest.mark.parametrize("every", [1, 2])
def test_lightnings_loggers(every: int, tmp_path: Path, waits: list[bool]) -> None:
    """At the steps of the run's own metrics."""
    amp = fit(Logging(), logger=CSVLogger(tmp_path, "run", "0"), log_every_n_steps=every)
    assert waits
    assert not any(waits)
    found = [row for row in rows_of(tmp_path) if row["amp/scale"]]
    steps = [int(row["step"]) for row in found]
    assert steps == [int(row["step"]) for row in rows_of(tmp_path) if row["loss"]]
    assert steps == list(range(every - 1, BATCHES, every))
    norms = [record.grad_norm for record in amp.history]
    norms[1] = norms[0]  # where a step was skipped, the norm is that of the one before
    for step, row in zip(steps, found, strict=True):
        assert float(row["amp/grad_norm"]) == norms[step]
        assert float(row["amp/scale"]) == 65536.0
        assert float(row["amp/skipped"]) == (step >= 1)
        assert row["amp/skipped_data"] == ("1.0" if step >= 1 else "")


def test_two_optimizers_of_lightnings_log_once_a_batch(tmp_path: Path) -> None:
    fit(Logging(manual=True), logger=CSVLogger(tmp_path, "run", "0"), log_every_n_steps=1)
    found = [int(row["step"]) for row in rows_of(tmp_path) if row["amp/scale"]]
    assert len(found) == len(set(found)) == BATCHES


def test_without_a_logger_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tritonamp.Amp, "metrics", None)
    fit(Logging(), logger=False)


def test_tensorboard_under_lightning(tmp_path: Path) -> None:
    fit(Logging(), logger=TensorBoardLogger(str(tmp_path), "run", "0"), log_every_n_steps=1)
    shown = scalars(tmp_path / "run" / "0")
    assert shown["amp/scale"] == [(step, 65536.0) for step in range(BATCHES)]
    assert shown["amp/skipped"] == [(step, float(step >= 1)) for step in range(BATCHES)]
    assert shown["amp/skipped_data"] == [(step, 1.0) for step in range(1, BATCHES)]
    assert len(shown["amp/grad_norm"]) == BATCHES


def test_the_loggers_of_fabric(tmp_path: Path, waits: list[bool]) -> None:
    plugin, net = FabricPrecision(level="O2"), client_net()
    fabric: Any = Fabric(
        accelerator="cpu", devices=1, plugins=plugin, loggers=FabricLogger(tmp_path, "run", "0")
    )
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters()))
    for step, (x, y) in enumerate(client_batches(BATCHES, 1)):
        fabric.backward(LOSS(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        assert plugin.amp is not None
        fabric.log_dict(plugin.amp.metrics(), step)
    fabric.logger.save()
    assert waits and not any(waits)
    last = rows_of(tmp_path)[-1]
    assert int(last["step"]) == BATCHES - 1
    assert float(last["amp/skipped_data"]) == float(last["amp/skipped"]) == 1


# Accelerate


def test_tensorboard_under_accelerate(tmp_path: Path, waits: list[bool]) -> None:
    """``accelerator.log`` adds them to what the loop logs, whose own values win."""
    accelerator: Any = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
    accelerate.enable(accelerator, level="O2")
    accelerator.init_trackers("run")
    accelerator.log({"before": 1.0}, step=0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for step, (x, y) in enumerate(client_batches(BATCHES, 1)):
        accelerator.backward(0.01 * LOSS(model(x), y))  # so that the first scale fits
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"amp/scale": 7.0} if step == 5 else {"loss": 1.0}, step=step)
    assert not any(waits)
    accelerator.end_training()
    shown = scalars(tmp_path / "run")
    assert len(shown["loss"]) == 5
    assert shown["amp/scale"] == [*((step, 65536.0) for step in range(5)), (5, 7.0)]
    assert shown["amp/skipped"] == [(step, float(step >= 1)) for step in range(BATCHES)]
    assert shown["amp/skipped_data"] == [(step, 1.0) for step in range(1, BATCHES)]
    accelerator.free_memory()


# transformers


@pytest.mark.skipif(sys.version_info < (3, 11), reason="transformers 5.23 needs Python 3.11")
def test_what_transformers_trainer_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stand in the rows of the training, and there alone."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    from tritonamp.integrations.transformers import enable

    config = transformers.GPT2Config(
        vocab_size=17, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    tokens = torch.randint(0, 17, (8, 8))
    texts = [{"input_ids": row, "labels": row} for row in tokens]
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    trainer = transformers.Trainer(
        model=transformers.GPT2LMHeadModel(config),
        args=transformers.TrainingArguments(
            str(tmp_path / "out"),
            use_cpu=True,
            report_to=["tensorboard"],
            max_steps=3,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=3,
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=texts,
        eval_dataset=texts,
    )
    enable(trainer, level="O2")
    trainer.train()
    logged = trainer.state.log_history
    assert [entry["step"] for entry in logged if "amp/scale" in entry] == [1, 2, 3]
    assert all(("loss" in entry) == ("amp/scale" in entry) for entry in logged)
    for entry in logged[:3]:
        assert entry["amp/scale"] == 65536.0
        assert entry["amp/skipped"] == 0.0
        assert entry["amp/grad_norm"] == entry["grad_norm"]
    (folder,) = {path.parent for path in tmp_path.rglob("events.out.tfevents*")}
    assert scalars(folder)["train/amp/scale"] == [(step, 65536.0) for step in (1, 2, 3)]
    trainer.accelerator.free_memory()
