"""What check says of half gradients that are added up over many batches."""

from typing import Any

import pytest
import torch
from helpers import Net
from outputs import relative_error

import tritonamp
from tritonamp.forecast.accumulation import lost_share

CASES = [(torch.bfloat16, 16), (torch.bfloat16, 256), (torch.float16, 256)]


@pytest.mark.parametrize(("dtype", "steps"), CASES, ids=str)
def test_the_share_is_what_sums_lose(dtype: torch.dtype, steps: int) -> None:
    """Within a tenth: the means of 4000 sums scatter by a hundredth."""
    torch.manual_seed(0)
    grads = torch.randn(steps, 4000).to(dtype)
    total = torch.zeros(4000, dtype=dtype)
    for grad in grads:
        total += grad
    exact = grads.double().sum(0)
    lost = relative_error(total, exact)
    assert lost_share(dtype, steps) == pytest.approx(lost, rel=0.1)


def advice(steps: int, **options: Any) -> list[str]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    found = tritonamp.check(
        model, optimizer, (torch.randn(4, 6),), accumulation_steps=steps, **options
    )
    return [f"{f.why}: {f.advice}" for f in found.findings if f.kind == "accumulation"]


def test_where_it_is_said() -> None:
    bf16 = {"dtype": torch.bfloat16}
    (text,) = advice(256, **bf16)
    assert text.startswith("bfloat16 gradients of 256 batches are added up in bfloat16: about 1.9%")
    assert "grad_dtype=torch.float32" in text
    assert advice(8, **bf16) == advice(256) == advice(256, level="O1", **bf16) == []
    wide = tritonamp.Policy(
        **{**vars(tritonamp.O2), **bf16, "loss_scale": 1.0, "grad_dtype": torch.float32}
    )
    assert advice(256, level=wide) == []
    assert len(advice(2000)) == 1


@pytest.mark.parametrize("given", [0, -1, 2.0, True, None])
def test_bad_numbers(given: Any) -> None:
    with pytest.raises(ValueError, match="accumulation_steps: expected how many batches"):
        advice(given)
