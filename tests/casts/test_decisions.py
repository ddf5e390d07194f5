"""A forward that decides: rounding may change the decision, unless what it is made of is FP32."""

import pytest
import torch
from torch import Tensor, nn

import tritonamp

ROWS = 4096


class Spoken(nn.Module):
    """Predicts how long each row lasts, in whole frames, and what it sounds like."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16))
        self.duration, self.sound = nn.Linear(16, 1), nn.Linear(16, 4)
        self.held: Tensor | None = None  # durations that are given, not predicted

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.encoder(x)
        frames = torch.ceil(torch.exp(self.duration(x)).squeeze(-1))
        frames = frames if self.held is None else self.held
        return frames, self.sound(x) * frames[:, None]


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
def test_a_decision_is_that_of_fp32_where_the_modules_before_it_are(
    half: torch.dtype, level: str
) -> None:
    torch.manual_seed(0)
    model, x = Spoken(), torch.randn(ROWS, 8)
    frames, sound = model(x)
    with tritonamp.enable(model, level=level, dtype=half):
        assert not torch.equal(model(x)[0], frames)  # some are close to a whole number
        model.held = frames
        close = 16 * torch.finfo(half).eps * sound.detach().abs().max()
        torch.testing.assert_close(model(x)[1], sound, rtol=0, atol=float(close))
        model.held = None
    before = ["encoder", "duration"]
    with tritonamp.enable(model, level=level, dtype=half, fp32_modules=before):
        assert torch.equal(model(x)[0], frames)
