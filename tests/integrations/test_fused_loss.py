"""Losses of transformers that read half logits."""

import copy
import os
import pickle
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F

if sys.version_info < (3, 11):
    pytest.skip("transformers 5.23 needs Python 3.11", allow_module_level=True)
os.environ["HF_HUB_OFFLINE"] = "1"  # before it is imported

import transformers
from transformers.loss import loss_utils

from tritonamp import functional
from tritonamp.integrations.fused_loss import FusedLoss, fuse_loss

pytestmark = pytest.mark.clients


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Type and dtype of the logits that our cross entropy was given."""
    found = []
    original = functional.cross_entropy

    def noting(logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        found.append((type(logits), logits.dtype))
        return original(logits, *args, **kwargs)

    monkeypatch.setattr(functional, "cross_entropy", noting)
    return found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("items", [None, 7])
@pytest.mark.parametrize("stock", [loss_utils.ForCausalLMLoss, loss_utils.ForMaskedLMLoss])
def test_half_logits_stay_half(
    seen: list[Any], stock: Any, items: int | None, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 5, 17).to(dtype), torch.randint(17, (2, 5))
    labels[0, :3] = -100
    results = []
    for loss_function in (stock, FusedLoss(stock)):
        x = logits.clone().requires_grad_()
        loss = loss_function(logits=x, labels=labels, vocab_size=17, num_items_in_batch=items)
        (1024 * loss).backward()
        results.append((loss, x.grad))
    assert seen == [(torch.Tensor, dtype)]
    (expected, expected_grad), (loss, grad) = results
    assert type(loss) is torch.Tensor and loss.dtype is torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    # rounded once, either way
    torch.testing.assert_close(grad, expected_grad, rtol=torch.finfo(dtype).eps, atol=1e-7)


def test_other_logits_go_to_the_loss_as_it_was(seen: list[Any]) -> None:
    logits, labels = torch.randn(2, 5, 17), torch.randint(17, (2, 5))
    loss = FusedLoss(loss_utils.ForCausalLMLoss)(logits, labels, 17)
    assert torch.equal(loss, loss_utils.ForCausalLMLoss(logits, labels, 17)) and seen == []


def model(kind: Any) -> Any:
    config = transformers.BertConfig(
        vocab_size=17,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=8,
    )
    return kind(config)


def test_which_models_get_it() -> None:
    token = model(transformers.BertForTokenClassification)
    wrapped = torch.nn.Sequential(token)
    fuse_loss(wrapped)
    assert isinstance(token.loss_function, FusedLoss)
    assert "_loss_function" not in vars(token.bert)
    others = model(transformers.BertForSequenceClassification), torch.nn.Linear(2, 2)
    for other in others:
        fuse_loss(other)
    assert others[0].loss_function is loss_utils.ForSequenceClassificationLoss


def test_a_loss_of_the_users_stays() -> None:
    token = model(transformers.BertForTokenClassification)
    token.loss_function = F.cross_entropy
    fuse_loss(token)
    assert token.loss_function is F.cross_entropy


def test_pickles_and_copies_hold_the_loss_it_stands_for() -> None:
    fused = FusedLoss(loss_utils.ForCausalLMLoss)
    for other in (pickle.loads(pickle.dumps(fused)), copy.deepcopy(fused)):
        assert other.func is loss_utils.ForCausalLMLoss
