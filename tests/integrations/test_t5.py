"""T5 of transformers, whose ``wo`` has results that float16 does not hold."""

from typing import Any

import pytest
import torch
from tiny_models import transformers
from torch import nn

FP16 = torch.float16
WORDS = 32
STEPS = 4


def t5(feed_forward: str) -> nn.Module:
    """A model in which each ``wo`` returns values far above 65504."""
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2,
        feed_forward_proj=feed_forward, decoder_start_token_id=0, dropout_rate=0.0,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config)
    for name, param in model.named_parameters():
        if name.endswith("wo.weight"):
            param.data *= 3e5
    return model


def losses(handles: Any, feed_forward: str, **fields: Any) -> list[float]:
    model = t5(feed_forward)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    amp = handles(model, optimizer, **fields)
    words = torch.randint(1, WORDS, (2, 4, 8), generator=torch.Generator().manual_seed(1))
    found = []
    for _ in range(STEPS):
        loss = model(input_ids=words[0], labels=words[1]).loss
        amp.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    assert amp.stats()["skipped"] == 0
    return found


@pytest.mark.parametrize("feed_forward", ["relu", "gated-gelu"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_it_trains_as_in_fp32(handles: Any, level: str, feed_forward: str) -> None:
    expected = losses(handles, feed_forward, level="O0")
    found = losses(handles, feed_forward, level=level, dtype=FP16)
    # roundings of weights and activations, as in other models
    assert found == pytest.approx(expected, rel=0, abs=16 * torch.finfo(FP16).eps)
