"""flex_attention in an enabled forward, as far as a CPU has it: it has no backward there."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import disabled_after
from outputs import relative_error
from torch import Tensor, nn

import tritonamp

flex = pytest.importorskip("torch.nn.attention.flex_attention")

# of torch, to those who do not compile it
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
HEADS, LENGTH, WIDTH = 2, 8, 16


class FlexAttention(nn.Module):
    """flex_attention, or the same by SDPA; keys stay FP32 if ``mixed``."""

    def __init__(self, by_flex: bool, mixed: bool) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(WIDTH, HEADS * WIDTH) for _ in range(3))
        self.by_flex, self.mixed = by_flex, mixed

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for p in self.projections)
        if self.mixed:
            k = k.float()
        if self.by_flex:
            mask = flex.create_block_mask(_is_causal, None, None, LENGTH, LENGTH, device=x.device)
            return flex.flex_attention(q, k, v, block_mask=mask)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _is_causal(batch: Any, head: Any, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


class Inference:
    """A model that was enabled for inference."""

    def __init__(self, by_flex: bool, mixed: bool, level: str, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.model = FlexAttention(by_flex, mixed)
        self.exact = FlexAttention(False, False).double()
        self.exact.load_state_dict(self.model.state_dict())
        self.amp = tritonamp.enable(self.model, level=level, dtype=dtype, cast_outputs=None)
        self.x = torch.randn(2, LENGTH, WIDTH)

    def output(self) -> Tensor:
        with torch.no_grad():
            return self.model(self.x)

    def miss(self) -> float:
        with torch.no_grad():
            return relative_error(self.output(), self.exact(self.x.double()))


@pytest.fixture
def run() -> Iterator[Any]:
    yield from disabled_after(Inference)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_as_exact_as_sdpa(run: Any, level: str, dtype: torch.dtype, mixed: bool) -> None:
    by_flex, by_sdpa = (run(by_flex, mixed, level, dtype) for by_flex in (True, False))
    assert by_flex.miss() <= 1.3 * by_sdpa.miss()
    assert by_flex.output().dtype is by_sdpa.output().dtype


def test_its_backward_is_torchs_own_error(run: Any) -> None:
    """On a CPU; the day that torch has one, this fails, and training is to be tested here."""
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        run(True, False, "O2", FP16).model(torch.randn(2, LENGTH, WIDTH))
