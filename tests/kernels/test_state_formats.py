"""Another number format of state is one entry of the table, and every update steps with it."""

import pytest
import torch

from tests.kernels.conftest import numpy_warns
from tests.kernels.update_rows import FORMS, HALF, Form, Row, each_row
from tests.kernels.updates import Updates
from tritonamp.kernels._codes import SIGNED, UNSIGNED
from tritonamp.kernels._random_bits import rounded
from tritonamp.kernels._state_formats import STATE_DTYPES, StateFormat
from tritonamp.kernels.device import tl, triton

pytestmark = numpy_warns


@triton.jit
def load_half(state, offs, mask, blocks, whole, stride):
    return tl.load(state + offs, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_half(state, offs, mask, blocks, whole, stride, x, random):
    tl.store(state + offs, rounded(x, random, 13).to(tl.float16), mask=mask)


IN_HALF = StateFormat(
    HALF,
    {SIGNED: load_half, UNSIGNED: load_half},
    {SIGNED: store_half, UNSIGNED: store_half},
    dropped_bits=13,
)


@each_row
def test_float16_with_stochastic_rounding(
    triton_device: torch.device, row: Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(STATE_DTYPES, HALF, IN_HALF)
    monkeypatch.setitem(FORMS, "float16", Form(copy=HALF, state=HALF))
    kernel = Updates(row, triton_device, "float16", row.rules[:2], [(1029,), (5, 7), (4097,)])
    twin, wide = kernel.clone(), kernel.wide()
    kernel.step("triton")
    twin.step("eager")
    wide.step("triton")
    states = unlike_twin = not_nearest = 0
    for name, i in kernel.states():
        found, right = kernel.lists[name][i], wide.lists[name][i]
        torch.testing.assert_close(found.float(), right, rtol=2**-10, atol=0)
        states += found.numel()
        unlike_twin += int((found != twin.lists[name][i]).sum())
        not_nearest += int((found != right.half()).sum())
    # an FP32 ulp apart, a value is rounded the other way once in 2^13
    assert states > 10_000 and unlike_twin <= 12
    # without a count of steps there are no random bits, and values are rounded to the nearest
    assert not_nearest > states // 8 if row.update.counts_steps else not_nearest == 0
