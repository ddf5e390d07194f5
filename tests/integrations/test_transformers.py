"""Hugging Face's Trainer walks the steps of a loop written by hand; the model is tiny and of random
weights.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

if sys.version_info < (3, 11):
    pytest.skip("transformers 5.23 needs Python 3.11", allow_module_level=True)
os.environ["HF_HUB_OFFLINE"] = "1"  # before it is imported

import transformers
from accelerate.state import AcceleratorState, GradientState, PartialState

import tritonamp
from tritonamp.integrations.transformers import enable

pytestmark = pytest.mark.clients

BATCHES, SIZE = 6, 4


@pytest.fixture(autouse=True)
def _no_shared_state() -> Iterator[None]:
    """Accelerate keeps one state for the process."""
    yield
    AcceleratorState._reset_state()
    GradientState._reset_state()
    PartialState._reset_state()


def language_model(kind: type = transformers.GPT2LMHeadModel) -> Any:
    torch.manual_seed(3)
    config = transformers.GPT2Config(
        vocab_size=17,
        n_positions=8,
        n_embd=8,
        n_layer=1,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return kind(config)


def data(batches: int = BATCHES) -> list[dict[str, Tensor]]:
    tokens = torch.randint(0, 17, (SIZE * batches, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]


class Poisoned(transformers.GPT2LMHeadModel):
    """Its third loss in training is inf, other than that a GPT-2."""

    losses = 0

    def forward(self, input_ids: Tensor, labels: Tensor, **kwargs: Any) -> Any:
        output = super().forward(input_ids=input_ids, labels=labels, **kwargs)
        if self.training:
            self.losses += 1
            if self.losses == 3:
                output.loss = output.loss * torch.inf
        return output


def make_trainer(folder: Path, model: nn.Module, **arguments: Any) -> transformers.Trainer:
    settings: dict[str, Any] = dict(
        output_dir=str(folder),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        max_steps=BATCHES,
        logging_steps=1,
        per_device_train_batch_size=SIZE,
        per_device_eval_batch_size=SIZE,
        learning_rate=0.01,
        save_strategy="no",
        train_sampling_strategy="sequential",
    )
    training_arguments = transformers.TrainingArguments(**{**settings, **arguments})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)  # Trainer's own has several groups
    return transformers.Trainer(
        model=model,
        args=training_arguments,
        train_dataset=data(),
        eval_dataset=data(1),
        optimizers=(optimizer, None),
    )


def train(
    folder: Path, level: str, kind: type = transformers.GPT2LMHeadModel, **arguments: Any
) -> Any:
    trainer = make_trainer(folder, language_model(kind), **arguments)
    enable(trainer, level=level)
    trainer.train()
    return trainer


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def by_hand(level: str, kind: type, accumulate: int, norm: float) -> Any:
    """The same in a loop of our own: parameters, norms, learning rates."""
    model = language_model(kind).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    steps = BATCHES // accumulate
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: max(0.0, (steps - step) / steps)
    )
    amp = tritonamp.enable(model, optimizer, level=level)
    norms, rates = [], []
    # all: Trainer does not know that this class shifts labels
    rows, tokens_in_batch = data(), SIZE * 8 * accumulate
    for i in range(BATCHES):
        tokens = torch.stack([row["input_ids"] for row in rows[SIZE * i : SIZE * (i + 1)]])
        loss = model(input_ids=tokens, labels=tokens, num_items_in_batch=tokens_in_batch).loss
        amp.backward(loss)
        if (i + 1) % accumulate:
            continue
        norms.append(float(amp.clip_grad_norm_(norm)))
        optimizer.step()
        optimizer.zero_grad()
        rates.append(scheduler.get_last_lr()[0])
        if amp.history[-1].cause is None:
            scheduler.step()
    result = state(model), norms, rates
    amp.disable()
    return result


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(
    ("level", "accumulate", "norm"),
    [("O1", 1, 0.5), ("O1", 2, 0.0), ("O2", 1, 0.0), ("O2", 2, 0.5), ("O5", 1, 0.5)],
)
def test_trainer_walks_our_steps(level: str, accumulate: int, norm: float, tmp_path: Path) -> None:
    trainer = train(
        tmp_path,
        level,
        Poisoned,
        gradient_accumulation_steps=accumulate,
        max_grad_norm=norm,
        max_steps=BATCHES // accumulate,
    )
    expected, norms, rates = by_hand(level, Poisoned, accumulate, norm or float("inf"))
    assert_same(state(trainer.model), expected)
    logged = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    # the true one; NaN is itself there
    assert str([entry["grad_norm"] for entry in logged]) == str(norms)
    assert [entry["learning_rate"] for entry in logged] == rates
    assert trainer.accelerator.amp.stats()["forward_faults"] == 1
    trainer.accelerator.free_memory()
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_resuming_is_not_stopping(level: str, tmp_path: Path) -> None:
    saving = dict(save_strategy="steps", save_steps=3)
    whole = train(tmp_path / "whole", level, Poisoned, **saving)
    amp = whole.accelerator.amp
    resumed = make_trainer(tmp_path / "resumed", language_model())  # its losses are all finite
    enable(resumed, level=level)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert_same(state(resumed.model), state(whole.model))
    assert resumed.accelerator.amp.stats()["steps"] == amp.stats()["steps"]
    assert resumed.accelerator.amp.stats()["forward_faults"] == 1
    for trainer in (whole, resumed):
        trainer.accelerator.free_memory()


def test_evaluation_smoothing_and_what_is_saved(tmp_path: Path) -> None:
    trainer = train(tmp_path, "O2", label_smoothing_factor=0.1, eval_strategy="steps", eval_steps=3)
    half = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(tmp_path / "saved"))
    expected = state(trainer.model)
    trainer.accelerator.free_memory()
    exact = make_trainer(tmp_path, trainer.model, label_smoothing_factor=0.1).evaluate()[
        "eval_loss"
    ]
    assert half != exact
    # some roundings to half of activations, the loss itself in FP32
    assert abs(half - exact) <= 2.0**-9 * exact
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["dtype"] == "float32"
    assert_same(state(transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "saved")), expected)


def test_trainers_own_optimizer_and_a_second_training(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, language_model())
    trainer.optimizer = None
    enable(trainer, level="O2")
    before = state(trainer.model)
    for _ in range(2):
        trainer.train()
        assert any(
            not torch.equal(before[name], value) for name, value in state(trainer.model).items()
        )
        before = state(trainer.model)
    trainer.accelerator.free_memory()


def test_a_trainer_that_casts_by_itself_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, language_model(), bf16=True)
    with pytest.raises(
        ValueError, match=r"mixed_precision='no', got 'bf16'.*leave fp16 and bf16 False"
    ):
        enable(trainer, level="O2")
