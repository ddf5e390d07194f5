"""Losses on a GPU: which kernels run, and that nothing waits for them."""

import contextlib
import copy
from typing import Any

import pytest
import torch
from gpuless.fake_cuda import FakeCuda
from gpuless.real_cuda import AnyCuda
from gpuless.tensors import CudaTensor
from torch import nn

import tritonamp
from tritonamp import functional
from tritonamp.casts import model_losses
from tritonamp.casts.unread import Unread

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


def test_a_loss_in_a_plain_loop_reads_half_logits(gpu: AnyCuda) -> None:
    model = nn.Linear(FEATURES, CLASSES).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, target = torch.randn(ROWS, FEATURES).cuda(), torch.randint(CLASSES, (ROWS,)).cuda()
    expected = nn.functional.cross_entropy(model(x), target).item()
    with tritonamp.enable(model, optimizer, level="O2", fuse_loss=True) as amp:
        for _ in range(2):  # the first step builds
            before = len(gpu.launches)
            with gpu.watch() as records:
                logits = model(x)
                loss = nn.functional.cross_entropy(logits.float().view(-1, CLASSES), target)
                amp.backward(loss)
            names = [name for name in gpu.launches[before:] if "entropy" in name]
            assert records == []
            assert names == ["cross_entropy_kernel", "cross_entropy_backward_kernel"]
        # products of 8 half numbers below 4, rounded to half
        assert abs(loss.item() - expected) <= FEATURES * 2.0**-10


@pytest.mark.parametrize("first", [nn.LayerNorm(CLASSES), nn.GroupNorm(4, CLASSES), nn.Softmax(-1)])
@pytest.mark.parametrize("outputs", [torch.float32, None])
def test_kernels_get_the_memory_of_unread_inputs(
    gpu: AnyCuda, outputs: torch.dtype | None, first: nn.Module
) -> None:
    """The second model's kernel reads the first one's outputs, forward and backward."""
    results = []
    for fuse in (False, True):
        torch.manual_seed(0)
        models = [
            nn.Linear(FEATURES, CLASSES).cuda(),
            nn.Sequential(copy.deepcopy(first), nn.Linear(CLASSES, 2)).cuda(),
        ]
        x, fields = torch.randn(ROWS, FEATURES).cuda(), {"cast_outputs": outputs}
        with tritonamp.enable(models, level="O2", fuse_loss=fuse, loss_scale=1.0, **fields):
            features = models[0](x)
            assert isinstance(features, Unread) is fuse
            models[1](features).float().square().sum().backward()
        results.append([p.grad.cpu() for m in models for p in m.parameters()])
    for plain, found in zip(*results, strict=True):
        atol = 2.0**-8 * plain.abs().max().item()  # roundings to half, forward and backward
        torch.testing.assert_close(found, plain, rtol=0, atol=atol)
