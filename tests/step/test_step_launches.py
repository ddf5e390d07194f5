"""The launches of a steady step: kernels, and torch's own."""

from collections.abc import Iterator
from typing import Any

import host_stubs
import pytest
import steps
import torch
from gpuless.facts import facts
from torch.utils._python_dispatch import TorchDispatchMode

import tritonamp

ALLOCATES = {"empty", "new_empty", "empty_like", "empty_strided"}


class Launching(TorchDispatchMode):
    """Notes the operations of torch that launch something on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        known = facts(func)
        if not known.is_view and known.name not in ALLOCATES:
            self.ops.append(known.name)
        return func(*args, **(kwargs or {}))


class Run:
    """Steps on the parameters of the model whose step has 148 tensors."""

    def __init__(self, count: list[int], level: str) -> None:
        self.model = steps.SETS["148 small"][1]()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        how: dict[str, Any] = {"level": level, "dtype": torch.float16}
        self.amp = tritonamp.enable(self.model, self.optimizer, **how)
        for param in self.model.parameters():
            param.grad = torch.rand_like(param)
        self.loss = torch.ones((), requires_grad=True)
        self.count = count

    def step(self, clips: bool) -> None:
        with self.amp.scale_loss(self.loss):
            pass
        if clips:
            self.amp.clip_grad_norm_(1.0)
        self.optimizer.step()

    def launches(self, clips: bool) -> tuple[int, list[str]]:
        """Return the number of kernels, and torch's operations, of one more step."""
        before, seen = self.count[0], Launching()
        with seen:
            self.step(clips)
        return self.count[0] - before, seen.ops


@pytest.fixture
def count(plans: None) -> Iterator[list[int]]:
    with host_stubs.stub_launches() as launches:
        yield launches


# the scaled loss, the magnitudes that grad_stats adds to, and the numbers for the host
OF_TORCH = ["mul", "zero_", "copy_"]


@pytest.mark.parametrize("clips", [True, False])
@pytest.mark.parametrize(
    ("level", "kernels"),
    [
        ("O1", 4),  # grad_stats, the decision, the count of steps, AdamW
        ("O2", 6),  # grad_stats and AdamW in two tables each, for two dtypes of gradients
    ],
)
def test_the_launches_of_a_steady_step(
    count: list[int], level: str, kernels: int, clips: bool
) -> None:
    run = Run(count, level)
    for _ in range(40):  # the first ones look at gradients and weights
        run.step(clips)
    for _ in range(3):
        assert run.launches(clips) == (kernels, OF_TORCH)
    run.amp.disable()
