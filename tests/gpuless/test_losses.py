"""Losses on a GPU: which kernels run, and that nothing waits for them."""

import contextlib
import copy
import sys
from typing import Any

import pytest
import torch
from gpuless.fake_cuda import FakeCuda
from gpuless.real_cuda import AnyCuda
from gpuless.tensors import CudaTensor

from tritonamp import functional
from tritonamp.casts import model_losses

ROWS, CLASSES, FEATURES = 70, 1024, 8  # more logits than torch's kernels are left with


def test_cross_entropy_waits_for_nobody(gpu: AnyCuda) -> None:
    x = torch.randn(ROWS, CLASSES, device="cuda").half().requires_grad_()
    target = torch.randint(CLASSES, (ROWS,), device="cuda")
    with gpu.watch() as records:
        functional.cross_entropy(x, target).backward()
    assert records == []
    assert gpu.launches == ["cross_entropy_kernel", "cross_entropy_backward_kernel"]


def test_linear_cross_entropy_waits_for_nobody(gpu: AnyCuda) -> None:
    x = torch.randn(2 * ROWS, FEATURES, device="cuda").half().requires_grad_()
    weight = torch.randn(CLASSES, FEATURES, device="cuda").requires_grad_()
    target = torch.randint(CLASSES, (2 * ROWS,), device="cuda")
    with gpu.watch() as records:
        loss = functional.linear_cross_entropy(x, weight, target, chunk_rows=ROWS)
        loss.backward()
    assert records == []
    assert gpu.launches == 2 * ["cross_entropy_kernel", "cross_entropy_backward_kernel"]
    on_host = [t.detach().cpu().requires_grad_() for t in (x, weight)]
    expected = functional.linear_cross_entropy(*on_host, target.cpu())
    expected.backward()
    torch.testing.assert_close(loss.cpu(), expected, rtol=0, atol=2.0**-9)
    for found, wanted in zip((x, weight), on_host, strict=True):
        atol = 2.0**-8 * wanted.grad.abs().max().item()
        torch.testing.assert_close(found.grad.cpu(), wanted.grad, rtol=0, atol=atol)


@pytest.mark.clients
@pytest.mark.skipif(sys.version_info < (3, 11), reason="transformers 5.23 needs Python 3.11")
@pytest.mark.parametrize("unread", [False, True])
def test_fused_losses_of_transformers(
    fake_cuda: FakeCuda, unread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half logits stay half, and unread ones are never computed, as on a CPU."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=CLASSES, hidden_size=FEATURES, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.randint(CLASSES, (2, 2 * ROWS))
    own = copy.deepcopy(model).cuda()
    chunk = staticmethod(lambda features: ROWS)
    monkeypatch.setattr(functional.LinearHead, "chunk_rows", chunk)
    monkeypatch.setattr(model_losses, "_PLAIN", {torch.nn.Parameter, CudaTensor})
    model_losses.install_loss(own)

    def loss_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
        with (
            torch.autocast(tokens.device.type, dtype=torch.float16),
            model_losses.without_logits(model) if unread else contextlib.nullcontext(),
        ):
            loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
        (1024 * loss).backward()
        return loss

    found, expected = loss_of(own, tokens.cuda()), loss_of(model, tokens)
    assert type(found) is CudaTensor
    kernels = ["cross_entropy_kernel", "cross_entropy_backward_kernel"]
    assert fake_cuda.launches == (4 * kernels if unread else kernels)
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=2.0**-9)
    for x, y in zip(own.parameters(), model.parameters(), strict=True):
        atol = 2.0**-7 * y.grad.abs().max().item()
        torch.testing.assert_close(x.grad.cpu(), y.grad, rtol=0, atol=atol)
