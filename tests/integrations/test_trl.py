"""TRL's SFTTrainer on a few lines of text: models that come in half, with and without adapters."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_same
from tiny_models import (
    LINES,
    loaded_llama,
    losses_of,
    make_tokenizer,
    param_dtypes,
    quiet,
    sft_trainer_of,
    stored,
)

from tritonamp.integrations.transformers import enable

datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")
load_file = pytest.importorskip("safetensors.torch").load_file

pytestmark = [
    pytest.mark.clients,
    # of PEFT and TRL to transformers
    pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing.*` is deprecated"),
]

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
STEPS = 6
LORA = pytest.mark.parametrize("lora", [True, False], ids=["LoRA", "all weights"])
HALVES = pytest.mark.parametrize("half", [FP16, BF16], ids=str)
LEVELS = pytest.mark.parametrize("level", ["O1", "O2"])


def trainer_of_loaded(
    folder: Path, dtype: torch.dtype, lora: bool, as_dtype: Any = "auto", **arguments: Any
) -> Any:
    tokenizer = make_tokenizer()
    return sft_trainer_of(
        folder,
        loaded_llama(folder / "base", dtype, as_dtype, tokenizer),
        tokenizer,
        lora,
        max_steps=STEPS,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        save_strategy="steps",
        save_steps=STEPS // 2,
        **arguments,
    )


def trained_values(model: Any) -> dict[str, torch.Tensor]:
    names = stored(model, trains=True)
    return {name: value.clone() for name, value in model.state_dict().items() if name in names}


@LORA
@HALVES
@LEVELS
def test_fine_tuning(level: str, half: torch.dtype, lora: bool, tmp_path: Path) -> None:
    exact = trainer_of_loaded(tmp_path / "exact", half, lora, as_dtype=FP32, bf16=False)
    exact.train()
    trainer = trainer_of_loaded(tmp_path / "run", half, lora, bf16=False)
    base = stored(trainer.model, trains=False)
    enable(trainer, level=level)
    trainer.train()
    amp = trainer.accelerator.amp
    assert amp.policy.dtype is half and amp.stats()["skipped"] == 0
    assert stored(trainer.model, trains=False) == base and {d for d, _ in base.values()} <= {half}
    # rounding logits moves the loss by twice their half ulp; as much again for what comes before
    tokens = exact.processing_class(LINES, padding=True, return_tensors="pt").input_ids
    rounding = 2 * torch.finfo(half).eps * exact.model(tokens).logits.abs().max().item()
    pairs = zip(losses_of(trainer), losses_of(exact), strict=True)
    assert max(abs(a - b) for a, b in pairs) < rounding
    assert losses_of(exact)[0] - losses_of(exact)[-1] > rounding

    values = trained_values(trainer.model)
    assert {value.dtype for value in values.values()} == {FP32}
    trainer.save_model(str(tmp_path / "saved"))
    name = "adapter_model" if lora else "model"
    saved = load_file(tmp_path / "saved" / f"{name}.safetensors")
    trainer.accelerator.free_memory()
    # PEFT makes adapters in FP32
    assert {v.dtype for v in saved.values()} == param_dtypes(trainer.model, trains=True)
    assert param_dtypes(trainer.model, trains=True) == {FP32 if lora else half}
    expected = {n.replace(".default.", "."): v for n, v in values.items()}
    assert_same(saved, {n: expected[n].to(v.dtype) for n, v in saved.items()})


@LORA
@LEVELS
def test_resuming_is_not_stopping(level: str, lora: bool, tmp_path: Path) -> None:
    """With TRL's default, which is bf16=True."""
    trainers = []
    for start in (None, str(tmp_path / "0" / f"checkpoint-{STEPS // 2}")):
        trainer = trainer_of_loaded(tmp_path / str(len(trainers)), BF16, lora)
        enable(trainer, level=level)
        trainer.train(resume_from_checkpoint=start)
        trainers.append(trainer)
    assert_same(*(trained_values(trainer.model) for trainer in trainers))
    for trainer in trainers:
        assert trainer.args.bf16 and trainer.accelerator.amp.policy.dtype is BF16
        trainer.accelerator.free_memory()


def make_grpo(folder: Path, half: torch.dtype, as_dtype: torch.dtype) -> Any:
    tokenizer = make_tokenizer()
    settings = quiet(
        folder,
        max_steps=4,
        num_generations=4,
        max_completion_length=6,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        bf16=False,
    )
    model = loaded_llama(folder / "base", half, as_dtype, tokenizer)
    torch.manual_seed(1)
    return trl.GRPOTrainer(
        model=model,
        args=trl.GRPOConfig(**settings),
        reward_funcs=lambda completions, **_: [float(c.count("cat")) for c in completions],
        train_dataset=datasets.Dataset.from_dict({"prompt": LINES * 2}),
        processing_class=tokenizer,
    )


@HALVES
def test_grpo(half: torch.dtype, tmp_path: Path) -> None:
    """The first answers are those of FP32, and their gradient but for rounding; later ones part."""
    exact = make_grpo(tmp_path / "exact", half, FP32)
    exact.train()
    trainer = make_grpo(tmp_path / "run", half, half)
    enable(trainer, level="O2")
    before = trained_values(trainer.model)
    trainer.train()
    stats = trainer.accelerator.amp.stats()
    assert (stats["steps"], stats["skipped"]) == (4, 0)
    first, same = (t.state.log_history[0] for t in (trainer, exact))
    assert first["reward"] == same["reward"] and first["reward_std"] > 0
    assert first["grad_norm"] == pytest.approx(same["grad_norm"], rel=20 * torch.finfo(half).eps)
    after = trained_values(trainer.model)
    assert all(not torch.equal(before[name], after[name]) for name in before)
    trainer.accelerator.free_memory()
    assert param_dtypes(trainer.model, trains=True) == {half}
