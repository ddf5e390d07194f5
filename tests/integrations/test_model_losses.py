"""Losses of transformers, from ``labels=``, that read half logits."""

import copy
import os
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

os.environ["HF_HUB_OFFLINE"] = "1"  # before it is imported
pytest.importorskip("transformers")

import transformers
from transformers.loss import loss_utils

import tritonamp
from tritonamp import functional
from tritonamp.casts.model_losses import ModelLoss
from tritonamp.functional import linear_head

pytestmark = pytest.mark.clients

WORDS = 37


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
    for loss_function in (stock, ModelLoss(stock)):
        x = logits.clone().requires_grad_()
        loss = loss_function(logits=x * 1, labels=labels, vocab_size=17, num_items_in_batch=items)
        (1024 * loss).backward()
        results.append((loss, x.grad))
    assert seen == [(torch.Tensor, dtype)]
    (expected, expected_grad), (loss, grad) = results
    assert type(loss) is torch.Tensor and loss.dtype is torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    # rounded once, either way
    torch.testing.assert_close(grad, expected_grad, rtol=torch.finfo(dtype).eps, atol=1e-7)


def test_other_logits_go_to_the_loss_as_it_was(seen: list[Any]) -> None:
    logits, labels = torch.randn(2, 5, 17, requires_grad=True) * 1, torch.randint(17, (2, 5))
    loss = ModelLoss(loss_utils.ForCausalLMLoss)(logits, labels, 17)
    assert torch.equal(loss, loss_utils.ForCausalLMLoss(logits, labels, 17)) and seen == []


def config(**more: Any) -> Any:
    sizes = dict(vocab_size=17, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    return transformers.BertConfig(
        **sizes, intermediate_size=8, max_position_embeddings=8, num_labels=5, **more
    )


def gpt2() -> Any:
    sizes = dict(vocab_size=WORDS, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    drops = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    torch.manual_seed(3)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, **drops, bos_token_id=0, eos_token_id=0)
    )


@pytest.mark.parametrize(
    "kind",
    [
        transformers.BertForTokenClassification,
        transformers.BertForMaskedLM,
        transformers.BertForSequenceClassification,
    ],
)
def test_disable_restores_the_loss(kind: Any) -> None:
    own = kind(config())
    before = own.loss_function
    wrapped = torch.nn.Sequential(own)
    with tritonamp.enable(wrapped, level="O2", fuse_loss=True):
        assert isinstance(own.loss_function, ModelLoss)
        assert "_loss_function" not in vars(own.bert)
    assert own.loss_function is before and "_loss_function" not in vars(own)


def test_models_without_a_loss_have_none() -> None:
    model = transformers.BertModel(config())
    with tritonamp.enable(model, level="O2", fuse_loss=True):
        assert "_loss_function" not in vars(model)


def test_a_loss_of_the_users_comes_back() -> None:
    token = transformers.BertForTokenClassification(config())
    token.loss_function = F.cross_entropy
    with tritonamp.enable(token, level="O2", fuse_loss=True):
        assert isinstance(token.loss_function, ModelLoss)
    assert token.loss_function is F.cross_entropy
    with tritonamp.enable(token, level="O2", fuse_loss=True):
        token.loss_function = F.nll_loss  # while it is enabled
    assert token.loss_function is F.nll_loss


def test_a_loss_that_is_set_while_the_model_is_enabled() -> None:
    model, tokens, seen = gpt2(), torch.randint(WORDS, (4, 8)), list[Any]()

    def loss(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
        seen.append(type(logits))
        return logits.float().square().mean()

    with tritonamp.enable(model, level="O2", fuse_loss=True):
        model.loss_function = loss
        assert model(input_ids=tokens, labels=tokens).loss.isfinite()
    assert seen == [Tensor]


def test_a_compiled_part_keeps_its_loss() -> None:
    own = gpt2()
    with tritonamp.enable(torch.nn.Sequential(torch.compile(own)), level="O2", fuse_loss=True):
        assert "_loss_function" not in vars(own)


def test_pickles_and_copies_hold_the_loss_it_stands_for() -> None:
    fused = ModelLoss(loss_utils.ForCausalLMLoss)
    for other in (pickle.loads(pickle.dumps(fused)), copy.deepcopy(fused)):
        assert other.func is loss_utils.ForCausalLMLoss


# Plain loops


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of logits of each call of a linear layer. Chunks have 16 rows."""
    monkeypatch.setattr(linear_head, "MIN_ROWS", 12)
    found, linear = [], F.linear

    def noting(*args: Any) -> Tensor:
        made = linear(*args)
        if made.shape[-1] == WORDS:
            found.append(made.numel() // WORDS)
        return made

    monkeypatch.setattr(F, "linear", noting)
    return found


def step(
    model: Any, read: str = "", level: str = "O2", fuse: bool = True, **fields: Any
) -> tuple[float, Any, dict[str, Tensor]]:
    """Return the loss of a step on 32 tokens, the logits that were read, and what it subtracted."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    torch.manual_seed(0)
    tokens = torch.randint(WORDS, (4, 8))
    logits = None
    with tritonamp.enable(
        model, optimizer, level=level, fuse_loss=fuse, loss_scale=2.0**15, **fields
    ) as amp:
        out = model(input_ids=tokens, labels=tokens)
        if read == "before":
            logits = out.logits.detach().clone() + 0
        amp.backward(out.loss)
        if read == "after":
            with torch.no_grad():
                logits = out.logits + 0
        optimizer.step()
        if read == "after the step":
            logits = out.logits + 0
    steps = {name: before[name] - p.detach() for name, p in model.named_parameters()}
    return out.loss.item(), logits, steps


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O5"])
@pytest.mark.parametrize("read", ["", "before", "after"])
def test_logits_are_computed_if_they_are_read(read: str, level: str, computed: list[int]) -> None:
    loss, logits, steps = step(gpt2(), read, level)
    rows = list(computed)
    expected, all_logits, expected_steps = step(gpt2(), read, level, fuse=False)
    forward, backward = [16, 16], [32] if read else []
    assert rows == forward + backward and computed[len(rows) :] == [32]
    eps = torch.finfo(torch.bfloat16 if level == "O5" else torch.float16).eps
    assert abs(loss - expected) <= eps * expected
    if read:
        assert logits.dtype is torch.float32
        # sums of 8 products below 1, rounded to half
        torch.testing.assert_close(logits, all_logits, rtol=eps, atol=eps)
    for name, expected_step in expected_steps.items():
        assert (steps[name] - expected_step).norm() <= 2 * eps * expected_step.norm(), name


def test_logits_of_weights_that_have_changed_are_refused(computed: list[int]) -> None:
    with pytest.raises(RuntimeError, match="compute with the logits before"):
        step(gpt2(), "after the step")


def test_a_hook_on_logits_gets_their_gradient(computed: list[int]) -> None:
    sizes = []
    for fuse in (True, False):
        model, grads = gpt2(), list[Tensor]()

        def watch(module: Any, args: Any, out: Tensor, grads: list[Tensor] = grads) -> None:
            out.register_hook(grads.append)

        model.lm_head.register_forward_hook(watch)
        step(model, fuse=fuse)
        (grad,) = grads
        sizes.append(grad.float().norm())
    # gradients of half an ulp off in some places
    torch.testing.assert_close(*sizes, rtol=torch.finfo(torch.float16).eps, atol=0)


def test_a_hook_of_the_last_layer_gets_its_gradients(computed: list[int]) -> None:
    for register in ("register_full_backward_hook", "register_full_backward_pre_hook"):
        norms = []
        for fuse in (True, False):
            model, seen = gpt2(), list[Any]()
            getattr(model.lm_head, register)(lambda *args, seen=seen: seen.append(args[-1]))
            step(model, fuse=fuse)
            ((grad,),) = seen
            norms.append(grad.float().norm())
        # gradients of half an ulp off in some places
        torch.testing.assert_close(*norms, rtol=torch.finfo(torch.float16).eps, atol=0)


def test_a_validation_has_its_logits(computed: list[int]) -> None:
    model, tokens = gpt2(), torch.randint(WORDS, (4, 8))
    with tritonamp.enable(model, level="O2", fuse_loss=True), torch.no_grad():
        out = model(input_ids=tokens, labels=tokens)
        assert type(out.logits) is Tensor and computed == [32]


def test_a_fault_in_the_last_layer_is_named(computed: list[int]) -> None:
    model, tokens = gpt2(), torch.randint(WORDS, (4, 8))
    with torch.no_grad():
        model.transformer.ln_f.weight.fill_(6e4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with tritonamp.enable(
        model, optimizer, level="O2", fuse_loss=True, on_nonfinite="explain"
    ) as amp:
        amp.backward(model(input_ids=tokens, labels=tokens).loss)
        optimizer.step()
        text = str(amp.explain())
    assert "lm_head" in text or "ln_f" in text
