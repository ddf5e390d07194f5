"""Ten thousand steps in which everything goes wrong now and then: each decision is right, and
leaves the right bits.
"""

import math
from typing import NamedTuple

import pytest
import torch
from helpers import same
from runs import Training
from torch import Tensor, nn

import tritonamp
from tritonamp.testing import KINDS, Fault, FaultInjector, InjectedError

# ten thousand in all
STEPS = {
    ("O1", "AdamW"): 1500,
    ("O1", "SGD momentum"): 4500,
    ("O2", "AdamW"): 1200,
    ("O2", "SGD momentum"): 2800,
}
LOWEST, HIGHEST, INTERVAL = 2.0**5, 2.0**14, 12  # of the loss scale
RATES = {"AdamW": 1e-3, "SGD momentum": 1e-2}


class Faulty(Training):
    """GELU lets no inf or NaN vanish."""

    def __init__(
        self, device: torch.device, level: str, optimizer: str, growth_interval: int
    ) -> None:
        def model() -> nn.Module:
            return nn.Sequential(nn.Linear(4, 8, bias=False), nn.GELU(), nn.Linear(8, 2))

        bounds = {"init_scale": 2.0**10, "min_scale": LOWEST, "max_scale": HIGHEST}
        self.scaler = tritonamp.GradScaler(device.type, growth_interval=growth_interval, **bounds)
        rate = RATES[optimizer]
        super().__init__(model, optimizer, level, device, lr=rate, scaler=self.scaler)

    def loss(self, x: Tensor) -> Tensor:
        return (self.model(x) - x[:, :2]).square().mean()

    def stored(self) -> list[Tensor]:
        """Return stored tensors and the loss scale."""
        scale = torch.tensor([self.scaler.get_scale(), self.scaler._get_growth_tracker()])
        return [*super().stored(), scale]

    def gradients(self) -> Tensor:
        """Return a flat copy of all gradients."""
        return torch.cat(
            [p.grad.flatten().float() for p in self.model.parameters() if p.grad is not None]
        )


class Decided(NamedTuple):
    """Expected record of a step in ``amp.history``."""

    step: int
    cause: str | None
    scale: float


class Expected:
    """The rules of the loss scale and of the causes, in plain Python."""

    def __init__(self, scale: float) -> None:
        self.scale, self.clean = scale, 0
        self.records: list[Decided] = []
        self.largest = 0.0  # unscaled gradient of the last good step

    def decide(self, fault: Fault | None, gradients: Tensor) -> str | None:
        """The cause of a skip, or None, of one step; ``gradients`` are scaled."""
        scale, largest, cause = self.scale, float(gradients.abs().max()), None
        if fault is not None and fault.kind in ("batch", "loss", "overflow"):
            cause = fault.causes[0]
        elif not math.isfinite(largest):
            cause = self._of_gradients(math.isnan(largest))
            self.scale, self.clean = max(scale / 2, LOWEST), 0
        else:
            self.largest = largest / scale
            self.clean += 1
            if self.clean == INTERVAL:
                self.scale, self.clean = min(scale * 2, HIGHEST), 0
        self.records.append(Decided(len(self.records) + 1, cause, scale))
        return cause

    def _of_gradients(self, nan: bool) -> str:
        if self.scale == LOWEST:
            return "scale exhausted"
        sudden = 0 < self.largest * self.scale * 256 < torch.finfo(torch.float16).max
        return "backward fault" if nan and sudden else "scale overflow"


@pytest.mark.long
@pytest.mark.parametrize(("level", "optimizer"), STEPS)
def test_thousands_of_steps_with_faults_of_all_kinds(
    device: torch.device, level: str, optimizer: str
) -> None:
    run = Faulty(device, level, optimizer, INTERVAL)
    # sees the good steps only, at the same scales
    clean = Faulty(device, level, optimizer, growth_interval=10**6)
    clean.scaler.scale_tensor(device)  # there is something to set from the beginning
    injector = FaultInjector(run.model, run.optimizer, rate=0.25, seed=len(level + optimizer))
    expected, raised = Expected(2.0**10), 0
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS[level, optimizer]):
        x = torch.randn(3, 4, generator=generator).to(device)
        scale, happened, gradients = expected.scale, len(injector.injected), None
        try:
            with injector.step() as due:
                before = run.stored() if due is not None else []
                run.amp.backward(injector.loss(run.loss(x)))
                gradients = run.gradients()
                run.optimizer.step()
        except (InjectedError, torch.OutOfMemoryError):
            gradients, raised = None, raised + 1
        run.optimizer.zero_grad()
        fault = injector.injected[-1] if len(injector.injected) > happened else None
        cause = None if gradients is None else expected.decide(fault, gradients)
        if gradients is None:
            assert fault is not None and fault.raises
            assert same(run.stored(), before), fault
        elif cause is not None:
            assert fault is not None and cause in fault.causes
            assert same(run.stored()[:-1], before[:-1]), fault
            assert run.stored()[-1].tolist() == [expected.scale, expected.clean]
        else:
            clean.scaler.update(scale)
            clean.amp.backward(clean.loss(x))
            if fault is not None and fault.kind == "missing gradient":
                clean.model.get_parameter(fault.place).grad = None
            clean.optimizer.step()
            clean.optimizer.zero_grad()
    history = [Decided(r.step, r.cause, r.scale) for r in run.amp.history]
    assert history == expected.records[-len(history) :]
    assert same(run.stored()[:-1], clean.stored()[:-1])
    assert all(bool(t.isfinite().all()) for t in run.stored())
    causes = [record.cause for record in expected.records]
    of_scale = sum(
        cause in ("scale overflow", "backward fault", "scale exhausted") for cause in causes
    )
    stats = run.amp.stats()
    assert (stats["steps"], stats["scale_overflows"]) == (causes.count(None), of_scale)
    assert stats["forward_faults"] == causes.count("data") + causes.count("forward fault")
    assert raised + len(causes) == STEPS[level, optimizer]
    assert {f.kind for f in injector.injected} == set(KINDS) - {"bitflip"}
    assert {"data", "forward fault", "scale overflow", "backward fault", "scale exhausted"} <= set(
        causes
    )
    assert min(r.scale for r in expected.records) == LOWEST < max(r.scale for r in expected.records)
    run.amp.disable()
    clean.amp.disable()
