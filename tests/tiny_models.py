"""Models of Hugging Face's libraries, tiny, of random weights, and made without a network."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

os.environ["HF_HUB_OFFLINE"] = "1"  # before they are imported

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

VOCABULARY = 17
LINES = ["the cat sat on the mat", "a dog ran in the park", "the dog sat on a mat", "a cat ran"]


def gpt2_config(width: int = 32) -> Any:
    return transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=8,
        n_embd=width,
        n_layer=1,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )


def loaded_gpt2(folder: Path, dtype: torch.dtype, width: int = 32) -> Any:
    """Return a GPT-2 as it comes from files in ``dtype``."""
    torch.manual_seed(3)
    transformers.GPT2LMHeadModel(gpt2_config(width)).to(dtype).save_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")


def make_tokenizer() -> Any:
    """Return one that knows the words of ``LINES``."""
    tokenizers = pytest.importorskip("tokenizers")
    words = ["<pad>", "<eos>", "<unk>", *sorted({word for line in LINES for word in line.split()})]
    numbers = {word: i for i, word in enumerate(words)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def make_llama(tokenizer: Any, layers: int = 1) -> Any:
    """Return a Llama for the words of ``tokenizer``, in FP32."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        max_position_embeddings=16,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return transformers.LlamaForCausalLM(config)


def loaded_llama(folder: Path, dtype: torch.dtype, as_dtype: Any, tokenizer: Any) -> Any:
    """Return a Llama as it comes from files in ``dtype``, loaded as ``as_dtype``."""
    make_llama(tokenizer).to(dtype).save_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=as_dtype)


def tokens() -> Tensor:
    return torch.randint(0, VOCABULARY, (4, 8), generator=torch.Generator().manual_seed(1))


def rows_of(tokens: Tensor) -> list[dict[str, Tensor]]:
    """Return rows whose labels are their tokens."""
    return [{"input_ids": row, "labels": row} for row in tokens]


def quiet(folder: Path | str, **arguments: Any) -> dict[str, Any]:
    """Return arguments of a Trainer that logs each step, to no other program."""
    settings = dict(output_dir=str(folder), use_cpu=True, report_to=[], disable_tqdm=True)
    return {**settings, "logging_steps": 1, "save_strategy": "no", **arguments}


def trainer_of(
    folder: Path | str,
    model: nn.Module,
    data: Any,
    kind: type = transformers.Trainer,
    more: dict[str, Any] | None = None,
    **arguments: Any,
) -> Any:
    """Return a quiet Trainer, or one of another ``kind``.

    Args:
        folder: where it writes.
        model: the model.
        data: rows to train on.
        kind: the class.
        more: further arguments of the class.
        arguments: arguments of TrainingArguments.
    """
    args = transformers.TrainingArguments(**quiet(folder, **arguments))
    return kind(model=model, args=args, train_dataset=data, **(more or {}))


def sft_trainer_of(
    folder: Path | str, model: nn.Module, tokenizer: Any, lora: bool, **arguments: Any
) -> Any:
    """Return TRL's SFTTrainer on ``LINES``, with ``lora`` for adapters alone."""
    datasets = pytest.importorskip("datasets")
    trl = pytest.importorskip("trl")
    targets = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    torch.manual_seed(1)
    return trl.SFTTrainer(
        model=model,
        args=trl.SFTConfig(**quiet(folder, max_length=16, **arguments)),
        train_dataset=datasets.Dataset.from_dict({"text": LINES}),
        processing_class=tokenizer,
        peft_config=peft.LoraConfig(r=2, target_modules=targets) if lora else None,
    )


def losses_of(trainer: Any) -> list[float]:
    """Return the losses that a Trainer has logged."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def with_lora(base: Any, targets: list[str], **arguments: Any) -> Any:
    """Return ``base`` with trainable adapters of rank 2."""
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=2,
        lora_alpha=16,
        target_modules=targets,
        task_type="CAUSAL_LM",
        fan_in_fan_out="c_attn" in targets,  # GPT-2 has it instead of linear layers
    )
    return peft.get_peft_model(base, config, **arguments)


def stored(model: nn.Module, trains: bool) -> dict[str, tuple[torch.dtype, int]]:
    """Return dtype and address of the trainable parameters, or of the frozen ones."""
    return {
        name: (p.dtype, p.data_ptr())
        for name, p in model.named_parameters()
        if p.requires_grad is trains
    }


def param_dtypes(model: nn.Module, trains: bool) -> set[torch.dtype]:
    return {dtype for dtype, _ in stored(model, trains).values()}
