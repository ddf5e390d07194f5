"""QK-clip, as the page of this package has it, on a model whose attention logits grow."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from covering import more
from runs import Training, started_on_cpu
from torch import Tensor, nn

import tritonamp

PAGE = Path(tritonamp.__file__).parent / "diagnosis" / "ranges.md"
HEADS, WIDTH, LENGTH, BATCH = 2, 8, 8, 64
SIZE = HEADS * WIDTH
TAU = 10.0
STEPS = 100


def recipe() -> str:
    """The block of the page, with our threshold."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (block,) = (block for block in blocks if "def qk_clip" in block)
    first = "watch.remove()\n"  # that of the block before it
    assert block.startswith(first) and block.count("100.0") == 1
    return block.removeprefix(first).replace("100.0", str(TAU))


class Attention(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(SIZE, SIZE, bias=False) for _ in range(3))
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            y = F.softmax(q @ k.mT * WIDTH**-0.5, dim=-1) @ v
        return y.transpose(1, 2).flatten(2)


class Finding(Training):
    """Learns to find the token whose first number is the largest, which sharp attention can."""

    def __init__(self, fused: bool = True, lr: float = 0.05, **fields: Any) -> None:
        model = lambda: nn.Sequential(Attention(fused), nn.Linear(SIZE, SIZE))  # noqa: E731
        super().__init__(model, lr=lr, **fields)
        self.generator = torch.Generator().manual_seed(1)

    def loss(self, x: Any = None) -> Tensor:
        x = torch.randn(BATCH, LENGTH, SIZE, generator=self.generator)
        wanted = x[torch.arange(BATCH), x[..., 0].argmax(1)][:, None]
        return (self.model(x).float() - wanted).square().mean()

    def watched(self, clips: bool, bad: tuple[int, ...] = ()) -> list[float]:
        """Train, and return the largest logit of each step."""
        names = {"torch": torch, "amp": self.amp}
        exec(recipe() if clips else "watch = amp.watch(every=1)", names)
        found = []
        for step in range(STEPS):
            self.step(bad=step in bad)
            found.append(float(max(t.max() for t in names["watch"].logits().values())))
        return found


run = started_on_cpu(Finding)


def test_it_is_short() -> None:
    assert len(recipe().splitlines()) + 1 <= 15


@pytest.mark.long
@pytest.mark.parametrize(
    ("fused", "fields"),
    [
        (True, {"level": "O2"}),
        (False, {"level": "O1"}),
        (True, {"level": "O2", "masters": "packed"}),
        *more(
            [
                (False, {"level": "O0"}),
                (True, {"level": "O2", "dtype": torch.bfloat16}),
                (True, {"level": "O2", "state": "8bit"}),
                (True, {"level": "O3", "dtype": torch.bfloat16}),
            ]
        ),
    ],
)
def test_logits_are_bounded(run: Any, fused: bool, fields: dict[str, Any]) -> None:
    plain = run(fused, **fields).watched(clips=False)
    assert max(plain) > 8 * TAU
    clipped = run(fused, **fields).watched(clips=True)
    assert max(clipped) < 2 * TAU  # a forward has what the last update has added
    assert clipped[-1] < 1.3 * TAU


def test_a_skip_clips_nothing(run: Any) -> None:
    training = run()
    names = {"torch": torch, "amp": training.amp}
    exec(recipe(), names)
    with torch.no_grad():
        for name in ("q", "k"):
            dict(training.amp.named_master_params())[f"0.{name}.weight"].mul_(20.0)
    before = training.masters()
    training.step(bad=True)
    assert names["watch"].logits()["0"].min() > TAU
    assert all(map(torch.equal, training.masters(), before))
    training.optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
    training.step()
    largest = names["watch"].logits()["0"]
    for old, new, clips in zip(before, training.masters(), (1, 1, 0, 0, 0), strict=True):
        factor = (TAU / largest).sqrt().repeat_interleave(WIDTH)[:, None] if clips else 1.0
        torch.testing.assert_close(new, old * factor)
