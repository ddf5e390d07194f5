"""Models of Hugging Face's libraries, tiny, of random weights, and made without a network."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

os.environ["HF_HUB_OFFLINE"] = "1"  # before they are imported

transformers = pytest.importorskip("transformers", reason="there is none for Python 3.10")
peft = pytest.importorskip("peft", reason="peft is not installed")

VOCABULARY = 17


def loaded_gpt2(folder: Path, dtype: torch.dtype, width: int = 32) -> Any:
    """Return a GPT-2 as it comes from files in ``dtype``."""
    torch.manual_seed(3)
    config = transformers.GPT2Config(
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
    transformers.GPT2LMHeadModel(config).to(dtype).save_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")


def tokens() -> Tensor:
    return torch.randint(0, VOCABULARY, (4, 8), generator=torch.Generator().manual_seed(1))


def with_lora(base: Any, targets: list[str], **arguments: Any) -> Any:
    """Return ``base`` with adapters of rank 2 that train."""
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=2,
        lora_alpha=16,
        target_modules=targets,
        task_type="CAUSAL_LM",
        fan_in_fan_out="c_attn" in targets,  # what GPT-2 has in the place of linear layers
    )
    return peft.get_peft_model(base, config, **arguments)


def stored(model: nn.Module, trains: bool) -> dict[str, tuple[torch.dtype, int]]:
    """Return dtype and address of the parameters that train, or of the frozen ones."""
    return {
        name: (p.dtype, p.data_ptr())
        for name, p in model.named_parameters()
        if p.requires_grad is trains
    }


def dtypes(model: nn.Module, trains: bool) -> set[torch.dtype]:
    return {dtype for dtype, _ in stored(model, trains).values()}
