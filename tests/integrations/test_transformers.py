"""Hugging Face's Trainer walks the steps of a loop written by hand; the model is tiny and of random
weights.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from clients import ByHandOfTaken, state_of
from helpers import assert_same
from tiny_models import VOCABULARY, gpt2_config, rows_of, trainer_of, transformers
from torch import Tensor, nn

import tritonamp
from tritonamp.integrations.transformers import enable

load_file = pytest.importorskip("safetensors.torch").load_file
AcceleratorState = pytest.importorskip("accelerate.state").AcceleratorState

pytestmark = pytest.mark.clients

BATCHES, SIZE = 6, 4


def small_gpt2(kind: type = transformers.GPT2LMHeadModel) -> Any:
    torch.manual_seed(3)
    return kind(gpt2_config(8))


def token_rows(batches: int = BATCHES) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return rows_of(torch.randint(0, VOCABULARY, (SIZE * batches, 8), generator=generator))


class Poisoned(transformers.GPT2LMHeadModel):
    """A GPT-2 whose third loss in training is inf."""

    losses = 0

    def forward(self, input_ids: Tensor, labels: Tensor, **kwargs: Any) -> Any:
        output = super().forward(input_ids=input_ids, labels=labels, **kwargs)
        if self.training:
            self.losses += 1
            if self.losses == 3:
                output.loss = output.loss * torch.inf
        return output


def small_trainer(folder: Path, model: nn.Module, **arguments: Any) -> Any:
    settings: dict[str, Any] = dict(max_steps=BATCHES, train_sampling_strategy="sequential")
    settings |= dict(
        learning_rate=0.01, per_device_train_batch_size=SIZE, per_device_eval_batch_size=SIZE
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)  # Trainer's own has several groups
    more = {"eval_dataset": token_rows(1), "optimizers": (optimizer, None)}
    return trainer_of(folder, model, token_rows(), more=more, **{**settings, **arguments})


def has_trained(
    folder: Path, level: str, kind: type = transformers.GPT2LMHeadModel, **arguments: Any
) -> Any:
    trainer = small_trainer(folder, small_gpt2(kind), **arguments)
    enable(trainer, level=level)
    trainer.train()
    return trainer


class TrainerByHand(ByHandOfTaken):
    """The same in a loop by hand, with the learning rates of its steps."""

    def __init__(self, level: str, accumulate: int) -> None:
        self._accumulate, self.rates = accumulate, list[float]()
        super().__init__(level=level)

    def parts_of(self, kind: str) -> tuple[nn.Module, Any, Any]:
        model = small_gpt2(Poisoned).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        steps = BATCHES // self._accumulate
        rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: max(0.0, (steps - i) / steps))
        return model, optimizer, rate

    def loss(self, rows: Any = None) -> Tensor:
        """Return the loss, which ``walk`` divides once more: the model divides by all tokens."""
        tokens = torch.stack([row["input_ids"] for row in rows])
        # all: Trainer does not know that this class shifts labels
        total = SIZE * 8 * self._accumulate
        found = self.model(input_ids=tokens, labels=tokens, num_items_in_batch=total)
        return found.loss * self._accumulate  # type: ignore[no-any-return]

    def schedule(self) -> None:
        self.rates.append(self.scheduler.get_last_lr()[0])
        super().schedule()


@pytest.mark.parametrize(
    ("level", "accumulate", "norm"),
    [("O1", 1, 0.5), ("O1", 2, 0.0), ("O2", 1, 0.0), ("O2", 2, 0.5), ("O5", 1, 0.5)],
)
def test_trainer_walks_our_steps(level: str, accumulate: int, norm: float, tmp_path: Path) -> None:
    trainer = has_trained(
        tmp_path,
        level,
        Poisoned,
        gradient_accumulation_steps=accumulate,
        max_grad_norm=norm,
        max_steps=BATCHES // accumulate,
    )
    rows, hand = token_rows(), TrainerByHand(level, accumulate)
    batches = [rows[i : i + SIZE] for i in range(0, len(rows), SIZE)]
    expected = hand.walk(batches, accumulate, norm or float("inf"))
    assert_same(state_of(trainer.model), expected)
    logged = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    # the true one; NaN is itself there
    assert str([entry["grad_norm"] for entry in logged]) == str(hand.norms)
    assert [entry["learning_rate"] for entry in logged] == hand.rates
    assert trainer.accelerator.amp.stats()["forward_faults"] == 1
    trainer.accelerator.free_memory()
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_resuming_is_not_stopping(level: str, tmp_path: Path) -> None:
    saving = dict(save_strategy="steps", save_steps=3)
    whole = has_trained(tmp_path / "whole", level, Poisoned, **saving)
    amp = whole.accelerator.amp
    resumed = small_trainer(tmp_path / "resumed", small_gpt2())  # its losses are all finite
    enable(resumed, level=level)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert_same(state_of(resumed.model), state_of(whole.model))
    assert resumed.accelerator.amp.stats()["steps"] == amp.stats()["steps"]
    assert resumed.accelerator.amp.stats()["forward_faults"] == 1
    for trainer in (whole, resumed):
        trainer.accelerator.free_memory()


@pytest.mark.parametrize("fused_loss", [True, False])
def test_the_models_loss_reads_half_logits(
    fused_loss: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtypes = set()
    original = tritonamp.functional.cross_entropy
    monkeypatch.setattr(
        tritonamp.functional,
        "cross_entropy",
        lambda x, *args, **kwargs: dtypes.add(x.dtype) or original(x, *args, **kwargs),
    )
    trainer = small_trainer(tmp_path, small_gpt2())
    enable(trainer, level="O2", fused_loss=fused_loss)
    trainer.train()
    assert dtypes == ({torch.float16} if fused_loss else set())
    assert trainer.accelerator.amp.stats()["skipped"] == 0
    trainer.accelerator.free_memory()


def test_evaluation_smoothing_and_what_is_saved(tmp_path: Path) -> None:
    trainer = has_trained(
        tmp_path, "O2", label_smoothing_factor=0.1, eval_strategy="steps", eval_steps=3
    )
    half = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(tmp_path / "saved"))
    expected = state_of(trainer.model)
    trainer.accelerator.free_memory()
    exact = small_trainer(tmp_path, trainer.model, label_smoothing_factor=0.1).evaluate()[
        "eval_loss"
    ]
    assert half != exact
    # some roundings to half of activations, the loss itself in FP32
    assert abs(half - exact) <= 2.0**-9 * exact
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["dtype"] == "float32"
    assert_same(
        state_of(transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "saved")), expected
    )


def test_trainers_own_optimizer_and_a_second_training(tmp_path: Path) -> None:
    trainer = small_trainer(tmp_path, small_gpt2())
    trainer.optimizer = None
    enable(trainer, level="O2")
    before = state_of(trainer.model)
    for _ in range(2):
        trainer.train()
        assert any(
            not torch.equal(before[name], value) for name, value in state_of(trainer.model).items()
        )
        before = state_of(trainer.model)
    trainer.accelerator.free_memory()


@pytest.mark.parametrize("argument", ["fp16", "bf16"])
def test_fp16_and_bf16_are_the_dtype(argument: str, tmp_path: Path) -> None:
    states = []
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[argument]
    for arguments, settings in [({argument: True}, {}), ({}, {"dtype": dtype})]:
        trainer = small_trainer(tmp_path, small_gpt2(), **arguments)
        enable(trainer, level="O2", **settings)
        trainer.train()
        states.append(state_of(trainer.model))
        assert trainer.accelerator.amp.policy.dtype is dtype
        trainer.accelerator.free_memory()
        AcceleratorState._reset_state(True)
    assert_same(*states)


def test_full_evaluation_in_half_is_refused(tmp_path: Path) -> None:
    trainer = small_trainer(tmp_path, small_gpt2(), bf16_full_eval=True)
    with pytest.raises(ValueError, match=r"bf16_full_eval False.*would round the model that train"):
        enable(trainer, level="O2")


# models that were loaded in half


def small_gpt2_from_files(folder: Path, dtype: torch.dtype) -> Any:
    small_gpt2().to(dtype).save_pretrained(folder)
    return transformers.GPT2LMHeadModel.from_pretrained(folder, dtype="auto")


def from_files(folder: Path) -> tuple[dict[str, Tensor], str]:
    """What the files hold, and the dtype that the config says."""
    dtype = json.loads((folder / "config.json").read_text())["dtype"]
    return load_file(folder / "model.safetensors"), dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_files_say_and_hold_the_dtype_that_was_loaded(
    level: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model, name = small_gpt2_from_files(tmp_path / "base", dtype), str(dtype).removeprefix("torch.")
    names = set(from_files(tmp_path / "base")[0])
    trainer = small_trainer(tmp_path / "run", model, save_strategy="steps", save_steps=BATCHES)
    enable(trainer, level=level)
    trainer.train()
    trained = state_of(trainer.model)
    trainer.save_model(str(tmp_path / "by trainer"))
    trainer.model.save_pretrained(tmp_path / "by model")
    trainer.accelerator.free_memory()
    trainer.save_model(str(tmp_path / "disabled"))
    for folder in ("by trainer", "by model", "disabled"):
        saved, said = from_files(tmp_path / folder)
        assert said == name and set(saved) == names, folder
        assert all(
            v.dtype is dtype and torch.equal(v, trained[n].to(dtype)) for n, v in saved.items()
        )
    checkpoint = tmp_path / "run" / f"checkpoint-{BATCHES}"
    saved, said = from_files(checkpoint)
    assert said == name and set(saved) == names  # loads as before, and yet rounds nothing
    assert all(v.dtype is torch.float32 and torch.equal(v, trained[n]) for n, v in saved.items())
    for folder in (tmp_path / "by model", checkpoint):
        again = transformers.GPT2LMHeadModel.from_pretrained(folder)
        assert {p.dtype for p in again.parameters()} == {dtype}
        assert_same(state_of(again), state_of(trainer.model))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_resuming_a_half_model_is_not_stopping(
    level: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    trainers = []
    for start in (None, str(tmp_path / "0" / "checkpoint-3")):
        model = small_gpt2_from_files(tmp_path / "base", dtype)
        folder = tmp_path / str(len(trainers))
        trainer = small_trainer(folder, model, save_strategy="steps", save_steps=3)
        enable(trainer, level=level)
        trainer.train(resume_from_checkpoint=start)
        trainers.append(trainer)
    assert_same(*(state_of(trainer.model) for trainer in trainers))
    assert trainers[0].accelerator.amp.policy.dtype is dtype
    for trainer in trainers:
        trainer.accelerator.free_memory()
        assert {p.dtype for p in trainer.model.parameters()} == {dtype}
