"""Losses on a GPU: which kernels run, and that nothing waits for them."""

import torch
from gpuless.real_cuda import AnyCuda

from tritonamp import functional

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
