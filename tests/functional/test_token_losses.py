"""token_log_probs and linear_token_log_probs against FP64."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tritonamp
from tritonamp.functional import linear_token_log_probs, token_log_probs

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
each_half = pytest.mark.parametrize("half", [FP16, BF16], ids=str)
each_temperature = pytest.mark.parametrize("temperature", [1.0, 0.6, 3.0])
ROWS, CLASSES, FEATURES = 96, 300, 16


def by_torch(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_p = (logits / temperature).log_softmax(-1)
    return log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def layer(device: Any, dtype: torch.dtype) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    torch.manual_seed(0)
    shapes: Any = (ROWS, FEATURES), (CLASSES, FEATURES), (CLASSES,)
    given = tuple(torch.randn(s, device=device).to(dtype).requires_grad_() for s in shapes)
    return given, torch.randint(CLASSES, (ROWS,), device=device)  # type: ignore[return-value]


@each_half
@each_temperature
def test_values_and_gradients(device: torch.device, half: torch.dtype, temperature: float) -> None:
    """Of both results, each row with a factor of its own, under a loss scale of 2**16."""
    torch.manual_seed(0)
    logits = (3 * torch.randn(4, 24, CLASSES, device=device)).to(half).requires_grad_()
    targets = torch.randint(CLASSES, (4, 24), device=device)
    found = token_log_probs(logits, targets, temperature=temperature, return_entropy=True)
    exact = logits.detach().double().requires_grad_()
    expected = by_torch(exact, targets, temperature)
    seeds = [torch.randn(4, 24, device=device) / 4096 for _ in range(2)]
    for got, wanted in zip(found, expected, strict=True):
        assert got.dtype is FP32
        torch.testing.assert_close(got.double(), wanted, rtol=1e-6, atol=1e-5)
    loss = sum((r * s).sum() for r, s in zip(found, seeds, strict=True))
    (dx,) = torch.autograd.grad(loss * 2.0**16, logits)
    loss = sum((r * s).sum() for r, s in zip(expected, seeds, strict=True))
    (wanted,) = torch.autograd.grad(loss, exact)
    assert dx.dtype is half
    error = dx.double() / 2.0**16 - wanted
    assert error.norm() < torch.finfo(half).eps / 2 * wanted.norm()
    alone = token_log_probs(logits, targets, temperature=temperature)
    assert torch.equal(alone, found[0])


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("chunk_rows", [1, 40, None])
@each_half
@each_temperature
def test_by_parts_as_at_once(
    device: torch.device,
    half: torch.dtype,
    temperature: float,
    chunk_rows: int | None,
    bias: bool,
) -> None:
    """Against FP64 on the same half operands: half logits are off by half an ulp of up to 20."""
    (x, weight, b), targets = layer(device, half)
    given = (x, weight, b)[: 2 + bias]
    options: Any = {"temperature": temperature, "return_entropy": True}
    found = linear_token_log_probs(
        x, weight, targets, b if bias else None, chunk_rows=chunk_rows, **options
    )
    exact = [t.detach().double().requires_grad_() for t in given]
    logits = nn.functional.linear(exact[0], exact[1], exact[2] if bias else None)
    expected = by_torch(logits, targets, temperature)
    seeds = [torch.randn(ROWS, device=device) / ROWS for _ in range(2)]
    atol = 16 * torch.finfo(half).eps / temperature
    for got, wanted in zip(found, expected, strict=True):
        assert got.dtype is FP32
        torch.testing.assert_close(got.double(), wanted, rtol=0, atol=atol)
    loss = sum((r * s).sum() for r, s in zip(found, seeds, strict=True))
    gradients = torch.autograd.grad(loss * 2.0**16, given)
    loss = sum((r * s).sum() for r, s in zip(expected, seeds, strict=True))
    for got, wanted in zip(gradients, torch.autograd.grad(loss, exact), strict=True):
        error = got.double() / 2.0**16 - wanted
        assert error.norm() < (0.01 if half is FP16 else 0.04) * wanted.norm()


def test_fp64_logits_pass_gradcheck_twice(device: torch.device) -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 7, device=device, dtype=FP64).requires_grad_()
    targets = torch.arange(4, device=device)

    def results(logits: Tensor) -> Any:
        return token_log_probs(logits, targets, temperature=0.7, return_entropy=True)

    assert torch.autograd.gradcheck(results, (logits,))
    assert torch.autograd.gradgradcheck(results, (logits,))
    assert token_log_probs(logits[:0], targets[:0]).shape == (0,)


def test_the_same_as_of_logits(device: torch.device) -> None:
    (x, weight, bias), targets = layer(device, FP32)
    logits = nn.functional.linear(x, weight, bias)
    expected = token_log_probs(logits, targets, temperature=0.6)
    found = linear_token_log_probs(x, weight, targets, bias, temperature=0.6, chunk_rows=7)
    torch.testing.assert_close(found, expected)
    shaped = linear_token_log_probs(
        x.view(4, 24, FEATURES), weight, targets.view(4, 24), bias, temperature=0.6
    )
    assert torch.equal(shaped.flatten(), found) and shaped.shape == (4, 24)


@each_half
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_in_an_enabled_forward(device: torch.device, level: str, half: torch.dtype) -> None:
    """Of FP32 rows and weights logits are half there; the results stay FP32, and train."""

    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body, self.head = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)

        def forward(self, x: Tensor, targets: Tensor) -> Any:
            h = torch.tanh(self.body(x))
            return linear_token_log_probs(
                h, self.head.weight, targets, self.head.bias, return_entropy=True
            )

    model = Policy().to(device)
    (x, _, _), targets = layer(device, FP32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with tritonamp.enable(model, optimizer, level=level, dtype=half, loss_scale=2.0**16) as amp:
        losses = []
        for _ in range(10):
            log_probs, entropy = model(x.detach(), targets)
            assert log_probs.dtype is entropy.dtype is FP32
            loss = -(log_probs.mean() + 0.01 * entropy.mean())
            amp.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert amp.stats()["skipped"] == 0
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": torch.zeros(8).long()}, r"targets: expected int64 classes of shape \(2,\)"),
        ({"targets": torch.zeros(2)}, r"int64 classes of shape \(2,\).*got torch.float32"),
        ({"temperature": 0.0}, "temperature: expected a number above 0, got 0.0"),
        ({"temperature": -1.0}, "temperature: expected a number above 0, got -1.0"),
        ({"temperature": float("nan")}, "temperature: expected a number above 0, got nan"),
    ],
)
def test_errors_of_both(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"targets": torch.zeros(2).long()} | change
    with pytest.raises(ValueError, match=message):
        token_log_probs(torch.zeros(2, 5), **given)
    with pytest.raises(ValueError, match=message):
        linear_token_log_probs(torch.zeros(2, 3), torch.zeros(5, 3), **given)


@pytest.mark.parametrize("bad", [5, -1, -100])
def test_targets_that_are_no_class_are_refused(bad: int) -> None:
    text = (
        rf"Target {bad} is out of bounds\..* also not -100: give targets\.clamp\(min=0\), and mul"
    )
    with pytest.raises(IndexError, match=text):
        token_log_probs(torch.zeros(2, 5).half(), torch.tensor([0, bad]))
    with pytest.raises(IndexError, match=text):
        linear_token_log_probs(torch.zeros(2, 3), torch.zeros(5, 3), torch.tensor([0, bad]))
    with pytest.raises(ValueError, match="logits: expected floating numbers"):
        token_log_probs(torch.zeros(2, 5).long(), torch.tensor([0, 1]))
