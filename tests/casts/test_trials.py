"""Enabled models for a moment under another policy: what they compute in, and what stays theirs."""

import pytest
import torch
from torch import Tensor, nn

import tritonamp


class TiedAroundRnn(nn.Module):
    """One weight in two modules, an RNN that keeps a list of its weights, and a buffer."""

    def __init__(self, half: torch.dtype) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.rnn = nn.GRU(4, 4)
        self.register_buffer("offset", torch.ones(4, dtype=half))

    def forward(self, index: Tensor) -> Tensor:
        hidden, _ = self.rnn(self.embedding(index) + self.offset)
        self.dtypes = {t.dtype for t in (*self.parameters(), *self.buffers())}
        self.head_dtype = self.head.weight.dtype
        logits: Tensor = self.head(hidden)
        return logits.sum()


def started(half: torch.dtype) -> tuple[TiedAroundRnn, tritonamp.Amp]:
    torch.manual_seed(0)
    model = TiedAroundRnn(half)
    optimizer = torch.optim.AdamW(model.parameters())
    amp = tritonamp.enable(model, optimizer, level="O2", dtype=half)
    return model, amp


@pytest.mark.parametrize("trial", ["in_fp32", "in_bfloat16"])
def test_tensors_are_replaced_for_the_block_and_keep_their_hooks(trial: str) -> None:
    """DDP's are on what accumulates the gradient, which a change of dtype would replace."""
    model, amp = started(torch.float16)
    tensors = [*model.parameters(), *model.buffers()]
    stored = [(id(t), t.data_ptr(), t.dtype) for t in tensors]
    lists = [id(t) for t in model.rnn._flat_weights]
    heard: list[Tensor] = []
    weight = model.head.weight
    node = weight.expand_as(weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    node.register_hook(lambda *_: heard.append(weight))
    with getattr(amp._parts.healing, trial)():
        model(torch.arange(5))
        assert model.dtypes == {torch.float32}
    after = [*model.parameters(), *model.buffers()]
    assert [(id(t), t.data_ptr(), t.dtype) for t in after] == stored
    assert [id(t) for t in model.rnn._flat_weights] == lists
    amp.backward(model(torch.arange(5)))
    assert len(heard) == 1 and weight.grad is not None and weight.grad.dtype is torch.float16


def test_a_weight_that_several_modules_hold_is_fp32_in_all_of_them() -> None:
    model, amp = started(torch.bfloat16)
    with amp._parts.healing.in_fp32(["embedding"]):
        model(torch.arange(5))
        assert model.embedding.weight is model.head.weight
    assert model.head_dtype is torch.float32 and torch.bfloat16 in model.dtypes
