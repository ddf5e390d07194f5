"""Training on a device without float64, such as Apple's GPUs: a tensor of float64 there raises."""

import math
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from gpuless.fake_cuda import FakeCuda, without_float64
from runs import FORMS, LEVELS, OPTIMIZERS, Training
from torch import Tensor, nn

import tritonamp
from tritonamp.kernels import device as hardware
from tritonamp.kernels._cpu_steps import corrected_rates
from tritonamp.kernels._decision import unscaling
from tritonamp.kernels._optimizers import FUSED, keeping
from tritonamp.kernels.adamw import AdamRule

NARROW = {torch.device("cpu"): torch.float32}
EPS = 2.0**-23
# without SparseAdam, which needs sparse gradients, and LBFGS, which needs a closure
TRAINED = [name for name in OPTIMIZERS if name not in ("SparseAdam", "LBFGS")]


@pytest.fixture
def narrow(fake_cuda: FakeCuda) -> Iterator[None]:
    with without_float64(fake_cuda):
        yield


def test_float64_is_refused(narrow: None) -> None:
    x = torch.ones(3, device="cuda")
    for make in (
        x.double,
        lambda: torch.zeros(3, device="cuda", dtype=torch.float64),
        lambda: torch.ones(3, dtype=torch.float64).cuda(),
        lambda: x.sum(dtype=torch.float64),
        lambda: x.new_zeros(3, dtype=torch.float64),
    ):
        with pytest.raises(TypeError, match="no float64"):
            make()


def trained(make: Callable[..., Any], **fields: Any) -> list[Tensor]:
    """Return master weights after two steps, of which the second is clipped, and a skip."""
    model = nn.Sequential(nn.Linear(6, 16, bias=False), nn.GELU(), nn.Linear(16, 3, bias=False))
    with Training(model, make, device="cuda", **fields) as run:
        run.lower_scale()
        run.step()
        run.step(bad=True)
        run.step(max_norm=0.1)
        stats = run.amp.stats()
        assert (stats["steps"], stats["skipped"]) == (2, 1)
        assert stats["backend"] == "eager"
        return [master.cpu() for master in run.masters()]


def agree(fake_cuda: FakeCuda, make: Callable[..., Any], **fields: Any) -> None:
    """Assert that masters are the same, up to FP32 roundings, without float64."""
    torch.manual_seed(0)
    expected = trained(make, backend="eager", **fields)
    torch.manual_seed(0)
    with without_float64(fake_cuda):
        found = trained(make, **fields)
    torch.testing.assert_close(found, expected, rtol=8 * EPS, atol=1e-8)


@pytest.mark.parametrize("optimizer", TRAINED)
@pytest.mark.parametrize("level", LEVELS)
def test_steps_are_the_same(fake_cuda: FakeCuda, optimizer: str, level: str) -> None:
    eps = {"eps": 1e-3} if level == "O3" and optimizer in ("NAdam", "RAdam") else {}
    agree(fake_cuda, lambda params, lr: OPTIMIZERS[optimizer](params, lr=lr, **eps), level=level)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("optimizer", FUSED)
def test_small_state(fake_cuda: FakeCuda, optimizer: str, form: str) -> None:
    if optimizer in keeping(FORMS[form]["state"]):
        agree(fake_cuda, OPTIMIZERS[optimizer], level="O2", **FORMS[form])


@pytest.mark.parametrize("beta", [0.0, 0.9, 0.999, 0.999999])
@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_bias_corrections(beta: float, kind: Callable[[float], Any]) -> None:
    """FP32 ``1 - beta ** step`` is off by 1e-2 of its value at the first step of the last beta."""
    rule = AdamRule(1e-3, kind(beta), kind(beta), 1e-8, 0.0, True, False, False)
    for count in (1, 2, 10, 1000, 10**6, 2**24):
        step = torch.tensor(float(count))
        exact = corrected_rates(rule, step, torch.float32)
        with mock.patch.dict(hardware._wide_dtypes, NARROW):
            found = corrected_rates(rule, step, torch.float32)
        torch.testing.assert_close(found, exact, rtol=4 * EPS, atol=0.0)


@pytest.mark.parametrize("parts", [0, 1, 7, 1024])
@pytest.mark.parametrize("size", [0.0, 2.0**-140, 1.0, 2.0**124, math.inf, math.nan])
def test_norms(parts: int, size: float) -> None:
    """The sum of squares may leave FP32, and an inf of FP32 stays inf."""
    squares, scale = (1 + torch.rand(parts)) * size, torch.tensor(3.0)
    exact = unscaling(squares, scale)
    with mock.patch.dict(hardware._wide_dtypes, NARROW):
        found = unscaling(squares, scale)
    torch.testing.assert_close(found, exact, rtol=4 * EPS, atol=0.0, equal_nan=True)


class Watched(Training):
    """Uses much of the handle in each step."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(skip_outliers=6.0, track_lost_updates=True, **fields)
        self.amp.watch(every=1)
        self.ema = self.amp.ema(0.9)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)

    def finish(self, max_norm: float | None = None, by_scaler: bool = False) -> None:
        log_probs = torch.arange(-8.0, 0.0, device=self.device)
        self.amp.log_mismatch(tritonamp.functional.mismatch(log_probs, log_probs))
        super().finish(max_norm, by_scaler)
        self.ema.update()
        self.amp.step_schedulers(self.scheduler)


def test_what_watches(narrow: None, handles: Callable[..., Any]) -> None:
    run = Watched(device="cuda", enable=handles)
    run.lower_scale()
    for size in (1.0, 6e4, 1.0):
        run.step(run.x * size)
    assert run.amp.stats()["steps"] == 2
    assert [record.step for record in run.amp.history] == [1, 2, 3]
    # the op ran again in float64, on the CPU
    assert re.search(r"a finite 1\.\d+e\+05 was cast to float16", run.amp.explain(replay=True))
    assert run.scheduler.last_epoch == 2
    assert {record.module for record in run.amp.ranges()} >= {"first", "last"}
    run.amp.metrics()
    run.amp.load_state_dict(run.amp.state_dict())
    run.step()
    assert run.amp.stats()["steps"] == 3
