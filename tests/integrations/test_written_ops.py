"""Twenty architectures of transformers, in which activations and masked softmax run as one op."""

from typing import Any, NamedTuple

import pytest
import torch
from tiny_models import transformers
from torch import Tensor

import tritonamp

pytestmark = pytest.mark.clients

SMALL = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
OLD = {
    "vocab_size": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
QUIET = {
    name: 0.0
    for name in (
        "attention_dropout hidden_dropout_prob attention_probs_dropout_prob resid_pdrop embd_pdrop "
        "attn_pdrop hidden_dropout dropout dropout_rate activation_dropout embedding_dropout"
    ).split()
}


class Case(NamedTuple):
    """An architecture.

    Attributes:
        config: further settings of its tiny configuration.
        sites: how many formulas run as one op, at least.
        task: class of the model, by the prefix of its name.
    """

    config: dict[str, Any]
    sites: int
    task: str = "ForCausalLM"


CASES = {
    "Llama": Case({"num_key_value_heads": 2}, 2),
    "Mistral": Case({"num_key_value_heads": 2, "sliding_window": 4}, 2),
    "Qwen2": Case({"num_key_value_heads": 2}, 2),
    "Qwen3": Case({"num_key_value_heads": 2, "head_dim": 8}, 2),
    "Gemma": Case({"num_key_value_heads": 2, "head_dim": 8}, 2),
    "Gemma2": Case({"num_key_value_heads": 2, "head_dim": 8}, 1),
    "Phi": Case({}, 2),
    "Phi3": Case({"num_key_value_heads": 2, "pad_token_id": 0}, 2),
    "GPT2": Case(OLD, 2, "LMHeadModel"),
    "GPTNeo": Case({"num_layers": 2, "num_heads": 4,
                    "attention_types": [[["global", "local"], 1]]}, 1),
    "GPTJ": Case(OLD | {"rotary_dim": 4}, 1),
    "GPTNeoX": Case({}, 1),
    "OPT": Case({"ffn_dim": 48, "word_embed_proj_dim": 32}, 1),
    "Cohere": Case({"num_key_value_heads": 2}, 2),
    "Olmo": Case({"num_key_value_heads": 2}, 2),
    "StableLm": Case({"num_key_value_heads": 2}, 2),
    "Granite": Case({"num_key_value_heads": 2}, 2),
    "Bert": Case({"hidden_act": "gelu_new"}, 2, "ForMaskedLM"),
    "Roberta": Case({"hidden_act": "gelu_new"}, 2, "ForMaskedLM"),
    "Albert": Case({"embedding_size": 16}, 2, "ForMaskedLM"),
    "Electra": Case({"embedding_size": 16, "hidden_act": "gelu_new"}, 1, "ForMaskedLM"),
    "XGLM": Case({"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4}, 0),
    "T5": Case({"d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4,
                "decoder_start_token_id": 0,
                "feed_forward_proj": "gated-gelu"}, 1, "ForConditionalGeneration"),
}  # fmt: skip


def made(name: str) -> Any:
    case = CASES[name]
    given = SMALL | QUIET | case.config
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**given)
    config._attn_implementation = "eager"
    return getattr(transformers, name + case.task)(config).train()


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 32, (2, 8), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0  # padding in front
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def trained(name: str, level: str, dtype: torch.dtype, **fields: Any) -> tuple[list[float], Any]:
    """Return the losses of two steps and one more, and what ``stats`` says."""
    model = made(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    with tritonamp.enable(
        model, optimizer, level=level, dtype=dtype, loss_scale=64.0, **fields
    ) as amp:
        for step in range(3):
            loss = model(**batch()).loss
            losses.append(float(loss.detach()))
            if step < 2:
                optimizer.zero_grad()
                amp.backward(loss)
                optimizer.step()
        stats = amp.stats()
    assert stats["skipped"] == 0
    return losses, stats["fused"]


@pytest.mark.parametrize("name", CASES)
def test_two_steps_are_as_close_to_fp32_as_without(name: str) -> None:
    exact, _ = trained(name, "O0", torch.float16)
    for level, dtype in (("O1", torch.float16), ("O2", torch.float16), ("O2", torch.bfloat16)):
        fused, found = trained(name, level, dtype)
        plain, _ = trained(name, level, dtype, fuse_ops=False)
        sites = [site for site in found if ":" in site]
        assert len(sites) >= CASES[name].sites, found
        errors = [
            max(abs(a - b) for a, b in zip(losses, exact, strict=True)) for losses in (fused, plain)
        ]
        # a rounding more or less of activations near 1; losses are near 3.5
        assert errors[0] <= errors[1] + 4 * torch.finfo(dtype).eps, (level, dtype, errors)
