"""Float masks of attention: what FP32 holds and half does not is a low value, not -inf."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tritonamp

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
EMBED = 8


def _tensors() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, 2, 4, EMBED), torch.randn(2, 2, 4, EMBED), torch.randn(2, 2, 4, EMBED)


def _self_attention(mask: Tensor, **how: bool) -> Tensor:
    torch.manual_seed(0)
    attention, x = nn.MultiheadAttention(EMBED, 2, batch_first=True), torch.randn(2, 4, EMBED)
    return attention(x, x, x, attn_mask=mask, **how)[0]


def _padded(mask: Tensor, **how: bool) -> Tensor:
    torch.manual_seed(0)
    attention, x = nn.MultiheadAttention(EMBED, 2, batch_first=True), torch.randn(2, 4, EMBED)
    return attention(x, x, x, key_padding_mask=mask[:2].contiguous(), **how)[0]


def _scores(mask: Tensor) -> Tensor:
    q, k, v = (t.flatten(0, 1) for t in _tensors())
    scores = torch.baddbmm(mask.expand(4, 4, 4), q, k.mT, alpha=EMBED**-0.5)
    return scores.softmax(-1) @ v


def _added(mask: Tensor) -> Tensor:
    q, k, v = _tensors()
    return (q @ k.mT / EMBED**0.5 + mask).softmax(-1) @ v


def _encoder(mask: Tensor) -> Tensor:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(EMBED, 2, 16, 0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)(
        torch.randn(2, 4, EMBED), mask=mask
    )


ATTENTION: dict[str, Callable[[Tensor], Tensor]] = {
    "scaled_dot_product_attention": lambda mask: F.scaled_dot_product_attention(*_tensors(), mask),
    "MultiheadAttention": lambda mask: _self_attention(mask, need_weights=False),
    "MultiheadAttention with weights": lambda mask: _self_attention(mask, need_weights=True),
    "key_padding_mask": lambda mask: _padded(mask, need_weights=False),
    "key_padding_mask with weights": lambda mask: _padded(mask, need_weights=True),
    "TransformerEncoder": _encoder,
    "baddbmm": _scores,
    "scores + mask": _added,
}
LOW = {"finfo.min": torch.finfo(FP32).min, "-1e9": -1e9, "-3e38": -3e38, "-inf": float("-inf")}


def mask_of(value: float, whole_row: bool) -> Tensor:
    mask = torch.zeros(4, 4)
    mask[:, 2:] = value
    if whole_row:
        mask[1] = value
    return mask


@pytest.mark.filterwarnings("ignore:Support for mismatched")  # torch's, of float padding masks
@pytest.mark.parametrize("half", [FP16, BF16], ids=str)
@pytest.mark.parametrize("value", LOW)
@pytest.mark.parametrize("how", ATTENTION)
def test_masked_places_are_those_of_fp32(how: str, value: str, half: torch.dtype) -> None:
    """A row that is masked completely is finite: of a low value, and also of -inf in torch's op."""
    mask = mask_of(LOW[value], False)
    whole = mask_of(LOW[value], True)
    expected = ATTENTION[how](mask).detach()
    finite_in_fp32 = bool(ATTENTION[how](whole).isfinite().all())
    with tritonamp.enable(nn.Linear(1, 1), dtype=half) as amp, amp.autocast():
        found, of_whole = ATTENTION[how](mask).detach(), ATTENTION[how](whole).detach()
    # weights and values are rounded, and so are the layers around them
    eps = torch.finfo(half).eps
    torch.testing.assert_close(found.float(), expected, rtol=8 * eps, atol=8 * eps)
    assert bool(of_whole.isfinite().all()) == finite_in_fp32


@pytest.mark.parametrize("half", [FP16, BF16], ids=str)
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
def test_the_mask_that_an_op_gets(dtype: torch.dtype, half: torch.dtype) -> None:
    """Clamped to the format where it is finite, and nothing else; -inf, inf and NaN stay."""
    values = torch.tensor([0.0, -0.5, -65504, torch.finfo(dtype).min, torch.finfo(dtype).max])
    given = torch.cat([values, torch.tensor([float("-inf"), float("inf")])]).to(dtype)
    zeros = torch.zeros(1, 7, 1), torch.zeros(1, 1, 1)
    with tritonamp.enable(nn.Linear(1, 1), dtype=half) as amp, amp.autocast():
        found = torch.baddbmm(given.reshape(1, 7, 1), *zeros).flatten()
    limit = torch.finfo(half).max
    expected = torch.where(given.isinf(), given.double(), given.double().clamp(-limit, limit))
    assert found.dtype is half
    assert torch.equal(found, expected.to(half))


def test_gradients_pass_through_a_learned_bias() -> None:
    bias = torch.randn(4, 4, requires_grad=True)
    with tritonamp.enable(nn.Linear(1, 1)) as amp, amp.autocast():
        F.scaled_dot_product_attention(*_tensors(), bias + mask_of(-1e9, False)).sum().backward()
    assert bias.grad is not None
    assert bias.grad[:, :2].abs().min() > 0
    assert torch.equal(bias.grad[:, 2:], torch.zeros(4, 2))
