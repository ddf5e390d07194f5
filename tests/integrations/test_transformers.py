"""Hugging Face's Trainer walks the steps of a loop written by hand; the model is tiny and of random
weights.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_same
from torch import Tensor, nn

if sys.version_info < (3, 11):
    pytest.skip("transformers 5.23 needs Python 3.11", allow_module_level=True)
os.environ["HF_HUB_OFFLINE"] = "1"  # before it is imported

import transformers
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

import tritonamp
from tritonamp.integrations.transformers import enable

pytestmark = pytest.mark.clients

BATCHES, SIZE = 6, 4


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
    trainer = make_trainer(tmp_path, language_model())
    enable(trainer, level="O2", fused_loss=fused_loss)
    trainer.train()
    assert dtypes == ({torch.float16} if fused_loss else set())
    assert trainer.accelerator.amp.stats()["skipped"] == 0
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


@pytest.mark.parametrize("argument", ["fp16", "bf16"])
def test_fp16_and_bf16_are_the_dtype(argument: str, tmp_path: Path) -> None:
    states = []
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[argument]
    for arguments, settings in [({argument: True}, {}), ({}, {"dtype": dtype})]:
        trainer = make_trainer(tmp_path, language_model(), **arguments)
        enable(trainer, level="O2", **settings)
        trainer.train()
        states.append(state(trainer.model))
        assert trainer.accelerator.amp.policy.dtype is dtype
        trainer.accelerator.free_memory()
        AcceleratorState._reset_state(True)
    assert_same(*states)


def test_full_evaluation_in_half_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, language_model(), bf16_full_eval=True)
    with pytest.raises(ValueError, match=r"bf16_full_eval False.*would round the model that train"):
        enable(trainer, level="O2")


# models that were loaded in half


def loaded(folder: Path, dtype: torch.dtype) -> Any:
    language_model().to(dtype).save_pretrained(folder)
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
    model, name = loaded(tmp_path / "base", dtype), str(dtype).removeprefix("torch.")
    names = set(from_files(tmp_path / "base")[0])
    trainer = make_trainer(tmp_path / "run", model, save_strategy="steps", save_steps=BATCHES)
    enable(trainer, level=level)
    trainer.train()
    trained = state(trainer.model)
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
        assert_same(state(again), state(trainer.model))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_resuming_a_half_model_is_not_stopping(
    level: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    trainers = []
    for start in (None, str(tmp_path / "0" / "checkpoint-3")):
        model = loaded(tmp_path / "base", dtype)
        folder = tmp_path / str(len(trainers))
        trainer = make_trainer(folder, model, save_strategy="steps", save_steps=3)
        enable(trainer, level=level)
        trainer.train(resume_from_checkpoint=start)
        trainers.append(trainer)
    assert_same(*(state(trainer.model) for trainer in trainers))
    assert trainers[0].accelerator.amp.policy.dtype is dtype
    for trainer in trainers:
        trainer.accelerator.free_memory()
        assert {p.dtype for p in trainer.model.parameters()} == {dtype}
