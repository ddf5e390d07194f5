"""Outliers: kernel and twin alike over a run; what counts, the warm-up, and the most in a row."""

import pytest
import torch
from covering import more

from tests.kernels.conftest import numpy_warns
from tritonamp.kernels._decision import LIMITS, OUTLYING, RECORD, Evidence
from tritonamp.kernels.outliers import Limit, new_window, outliers

pytestmark = numpy_warns


@pytest.mark.parametrize("lowest", [1.0, *more([-1.0, float("nan")])])
def test_a_run_step_by_step(triton_device: torch.device, lowest: float) -> None:
    """The window bit by bit but for the norm, which is summed in another order."""
    torch.manual_seed(0)
    at, backends = triton_device, ("eager", "triton")
    windows = [new_window(at) for _ in backends]
    numbers = [torch.zeros(RECORD, dtype=torch.float64, device=at) for _ in backends]
    found, zero, scale = [], torch.zeros((), device=at), torch.full((), 4.0, device=at)
    for step in range(120):
        squares = torch.rand(3, device=at) * (1e8 if step in (75, 76, 77, 78, 79, 100) else 1.0)
        loss, bad = torch.rand((), device=at) * 2 + lowest, zero + (step == 20)
        flags = [torch.zeros((), device=at) for _ in backends]
        evidence = Evidence(torch.ones(3, device=at), squares, bad, zero)
        for backend, window, told, flag in zip(backends, windows, numbers, flags, strict=True):
            outliers(evidence, scale, loss, Limit(window, 6.0), told, flag, backend)
        assert torch.equal(*flags)
        torch.testing.assert_close(*windows, rtol=1e-6, atol=0, equal_nan=True)
        torch.testing.assert_close(*numbers, rtol=1e-5, atol=0, equal_nan=True)
        found += [step] if flags[0] == OUTLYING else []
    assert found == [75, 76, 77, 78], "four of 64"
    assert windows[0][-1] == 64 + (119 - 64), "the fault of step 20 was not kept"
    assert numbers[0][LIMITS + 3] > numbers[0][LIMITS + 5]
