"""softmax and log_softmax, kernels and twins against FP64."""

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import Shrink, assert_within, numpy_warns, softmax_and_error, ulp
from tritonamp.kernels.device import INTERPRETED
from tritonamp.kernels.softmax import softmax

pytestmark = numpy_warns

HALF, BF16, WIDE = torch.float16, torch.bfloat16, torch.float32


class Layout(NamedTuple):
    """Attributes:
    many: see ``small_tiles``; 0: lines are never shared.
    """

    shape: tuple[int, ...]
    dim: int
    many: int | None = None


SHORT = [1, 2, 3, 7, 8, 9, 255, 256, 257, 511, 512, 513, 1023, 1024, 1025]
LAYOUTS = {f"{n}": Layout((3, n), 1) for n in SHORT} | {
    "one line": Layout((1, 5), 1),
    "two tiles of lines": Layout((513, 8), 1),
    "more lines": Layout((9, 512), -1),
    "columns": Layout((33, 7), 0),
    "middle": Layout((3, 65, 2), 1),
    "two tiles of columns": Layout((2, 5, 65), 1),
    "nothing to add": Layout((2, 1, 3), 1),
    "vector": Layout((9,), 0),
    "0-d": Layout((), 0),
    "no rows": Layout((0, 5), 1),
    "no columns": Layout((5, 0), 1),
    "nothing in the middle": Layout((4, 0, 3), 1),
    "whole at most": Layout((3, 128), 1, 0),
    "long from": Layout((3, 129), 1, 0),
    "long": Layout((3, 257), 1, 0),
    "long, no masks": Layout((2, 256), 1, 0),
    "long columns": Layout((2, 100, 3), 1, 0),
    "long, two tiles of columns": Layout((1, 9, 65), 1, 0),
    "shared from": Layout((3, 129), 1, 4),
    "shared, several steps": Layout((2, 900), 1, 3),
    "shared, no masks": Layout((1, 512), 1, 4),
    "shared columns": Layout((2, 100, 3), 1, 4),
    "shared columns, several steps": Layout((1, 300, 3), 1, 2),
    "shared, two tiles of columns": Layout((1, 9, 65), 1, 4),
}
REGIMES = ["257", "columns", "long", "shared columns"]
REAL = {
    "longest": Layout((2, 32768), 1),
    "longest backward": Layout((1, 16384), 1),
    "over": Layout((1, 32769), 1),
}

each_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
each_real_layout = pytest.mark.parametrize("layout", REAL.values(), ids=REAL.keys())
each_kind = pytest.mark.parametrize("log", [False, True], ids=["softmax", "log_softmax"])
each_regime = pytest.mark.parametrize("layout", [LAYOUTS[name] for name in REGIMES], ids=REGIMES)


def inputs(layout: Layout, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Lines of different spread, in memory from ``empty_like``, which may be guarded."""
    shape = list(layout.shape)
    x = torch.randn(shape, device=device)
    if shape:
        shape[layout.dim] = 1
    spread = torch.tensor([3.0, 100.0, 0.1], device=device).repeat(-(-math.prod(shape) // 3))[
        : math.prod(shape)
    ]
    x = (x * spread.view(shape)).to(dtype)
    return torch.empty_like(x).copy_(x)


def check_softmax(
    log: bool,
    layout: Layout,
    dtype: torch.dtype,
    result: torch.dtype,
    device: torch.device,
    backend: str,
) -> None:
    """FP32's errors, and the result rounded; for softmax in half at most one ulp, the numerics
    contract.
    """
    x = inputs(layout, dtype, device)
    exact, error = softmax_and_error(log, x, layout.dim)
    y = softmax(x, layout.dim, result, log, backend)
    assert y.dtype is result
    bound = ulp(exact, result) / 2 + error
    assert_within(
        y,
        exact,
        bound.minimum(ulp(exact, result)) if not log and result is not WIDE else bound,
    )


@each_layout
@each_kind
@pytest.mark.usefixtures("tiles_of_layout")
def test_results(device: torch.device, backend: str, log: bool, layout: Layout) -> None:
    check_softmax(log, layout, HALF, HALF, device, backend)


@pytest.mark.parametrize(
    ("dtype", "result"), [(BF16, BF16), (HALF, WIDE), (WIDE, BF16), (WIDE, WIDE)], ids=str
)
@each_regime
@each_kind
@pytest.mark.usefixtures("tiles_of_layout")
def test_dtypes(
    device: torch.device,
    backend: str,
    log: bool,
    layout: Layout,
    dtype: torch.dtype,
    result: torch.dtype,
) -> None:
    check_softmax(log, layout, dtype, result, device, backend)


@each_real_layout
@each_kind
def test_results_at_real_boundaries(
    device: torch.device, backend: str, log: bool, layout: Layout
) -> None:
    check_softmax(log, layout, HALF, WIDE if log else HALF, device, backend)


@pytest.fixture
def flushed_exp2(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU's exp2: results below 2**-126 are 0."""
    if INTERPRETED:
        from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

        exp2 = InterpreterBuilder.create_exp2

        def flushed(self: InterpreterBuilder, arg: TensorHandle) -> TensorHandle:
            result = exp2(self, arg)
            result.data[result.data < 2.0**-126] = 0
            return result

        monkeypatch.setattr(InterpreterBuilder, "create_exp2", flushed)


@pytest.mark.usefixtures("flushed_exp2")
@pytest.mark.parametrize("many", [None, 0, 4])
def test_smallest_bfloat16_results(
    device: torch.device, backend: str, small_tiles: Shrink, many: int | None
) -> None:
    """exp(-d) down to bfloat16's smallest subnormal, 2**-133."""
    d = torch.cat([torch.zeros(1), torch.linspace(80, 93, 105)])
    x = -d.to(BF16).to(device)
    exact = torch.softmax(x.double(), 0)
    assert 0 < exact.min() < 2.0**-133
    small_tiles(many)
    for copies in (1, 2):  # lines of up to 128, and longer
        line = x.repeat(copies)
        exact = torch.softmax(line.double(), 0)
        assert_within(softmax(line, 0, BF16, False, backend), exact, ulp(exact, BF16))


def test_rows_longer_than_half_can_count(device: torch.device, backend: str) -> None:
    """70000 equal values: the denominator 70000 is beyond fp16."""
    y = softmax(torch.zeros(70_000, dtype=HALF, device=device), 0, HALF, False, backend)
    assert torch.equal(y, torch.full_like(y, 1 / 70_000))
