"""softmax and log_softmax of infinities, NaN and the ends of half's range, in whole, long and
shared lines.
"""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import Shrink, numpy_warns, softmax_and_error, ulp
from tritonamp.kernels.softmax import softmax
from tritonamp.kernels.softmax_backward import softmax_backward

pytestmark = numpy_warns

HALF, BF16 = torch.float16, torch.bfloat16
INF, NAN = float("inf"), float("nan")


class Regime(NamedTuple):
    """Attributes:
    dim: dimension of a matrix's lines.
    many: argument of ``small_tiles``.
    """

    dim: int
    many: int | None


REGIMES = {
    "whole": Regime(1, None),
    "whole columns": Regime(0, None),
    "long": Regime(1, 0),
    "shared": Regime(1, 30),
    "long columns": Regime(0, 0),
    "shared columns": Regime(0, 4),
}
N = 200
SPECIAL: dict[
    str, list[tuple[int, int, float]]
] = {  # values for columns from, to; tiles have 128, and 4 of columns
    "all -inf": [(0, N, -INF)],
    "-inf first": [(0, 150, -INF)],
    "-inf in a segment": [(0, 128, -INF)],
    "-inf last": [(1, N, -INF)],
    "one left": [(0, 100, -INF), (101, N, -INF)],
    "last one left": [(0, N - 1, -INF)],
    "+inf first": [(0, 1, INF)],
    "+inf late": [(170, 171, INF)],
    "+inf after -inf": [(0, 170, -INF), (199, N, INF)],
    "two +inf": [(3, 4, INF), (170, 171, INF)],
    "NaN first": [(0, 1, NAN)],
    "NaN late": [(199, N, NAN)],
    "NaN after -inf": [(0, 199, -INF), (199, N, NAN)],
    "NaN and +inf": [(5, 6, NAN), (190, 191, INF)],
    "largest": [(0, N, 65504.0)],
    "smallest": [(0, N, -65504.0)],
    "rising extremes": [(0, 130, -65504.0), (130, 199, 0.0), (199, N, 65504.0)],
    "falling extremes": [(0, 1, 65504.0), (1, 130, 0.0), (130, N, -65504.0)],
    "near": [(0, 1, 65504.0), (150, 151, 65472.0)],
    "subnormal": [(0, 130, 6e-8), (130, N, -6e-8)],
    "bfloat16's subnormal": [(0, 130, 1e-39), (130, N, -1e-40)],
    "zeros": [(0, 130, -0.0), (130, N, 0.0)],
}

each_regime = pytest.mark.parametrize("regime", REGIMES.values(), ids=REGIMES.keys())
each_kind = pytest.mark.parametrize("log", [False, True], ids=["softmax", "log_softmax"])


def by_line(x: Tensor, dim: int) -> Tensor:
    """The same memory as [line, column]."""
    return x if dim == 1 else x.t()


def random(lines: int, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """In memory from ``empty_like``, which may be guarded."""
    x = torch.randn((lines, N) if dim == 1 else (N, lines), device=device).to(dtype)
    return torch.empty_like(x).copy_(x)


@pytest.mark.parametrize(
    ("regime", "half"), [*((regime, HALF) for regime in REGIMES), ("shared", BF16)], ids=str
)
@each_kind
def test_special_lines_are_torchs_and_leave_their_neighbours_alone(
    device: torch.device,
    backend: str,
    small_tiles: Shrink,
    log: bool,
    regime: str,
    half: torch.dtype,
) -> None:
    dim, many = REGIMES[regime]
    small_tiles(many)
    names = [*SPECIAL, "usual"]
    x = random(len(names), dim, half, device)
    for line, name in zip(by_line(x, dim), names, strict=True):
        for start, end, value in SPECIAL.get(name, []):
            line[start:end] = value
    exact, error = softmax_and_error(log, x, dim)
    rounded = exact.to(
        half
    ).double()  # -131008 is beyond fp16: the nearest there is -inf, never the largest finite
    result = softmax(x, dim, half, log, backend).double()
    right = (result - exact).abs() <= (ulp(exact, half) / 2 + error if log else ulp(exact, half))
    right = torch.where(
        rounded.isfinite(), right, (result == rounded) | (result.isnan() & rounded.isnan())
    )
    wrong = ~by_line(right, dim).all(1)
    assert not wrong.any(), [name for name, bad in zip(names, wrong, strict=True) if bad]


@each_kind
def test_masked_lines_of_attention(
    device: torch.device, backend: str, small_tiles: Shrink, log: bool
) -> None:
    """Triangles of -inf: probabilities are exactly zero there, and add up to one."""
    for many in (None, 0):
        small_tiles(many)
        x = torch.zeros(9, 140, device=device, dtype=HALF)
        x = x.masked_fill(torch.ones_like(x, dtype=torch.bool).triu(1).flip(1), -INF)
        y = softmax(x, 1, HALF, log, backend).double()
        y = y.exp() if log else y
        assert (y[x == -INF] == 0).all()
        torch.testing.assert_close(
            y.sum(1), torch.ones_like(y[:, 0]), rtol=2 * torch.finfo(HALF).eps, atol=0
        )


@each_regime
@each_kind
def test_backward_never_hides_a_bad_gradient(
    device: torch.device, backend: str, small_tiles: Shrink, log: bool, regime: Regime
) -> None:
    small_tiles(regime.many)
    grad = random(7, regime.dim, HALF, device)
    for i, bad in enumerate((INF, -INF, NAN)):
        by_line(grad, regime.dim)[2 * i + 1, 170 + i] = bad
    y = torch.full_like(grad, -6.0 if log else 2.0**-9)
    result = softmax_backward(grad, y, regime.dim, HALF, log, backend)
    finite = by_line(result.isfinite(), regime.dim)
    assert finite[0::2].all()
    assert not finite[1::2].any()


@each_regime
def test_backward_of_masked_elements(
    device: torch.device, backend: str, small_tiles: Shrink, regime: Regime
) -> None:
    """Where y is 0, or log y is -inf, softmax has gradient 0 and log_softmax its incoming one."""
    small_tiles(regime.many)
    grad = random(3, regime.dim, HALF, device)
    y = torch.full_like(grad, 2.0**-8)
    log_y = torch.full_like(grad, -5.5)
    for tensor, value in ((y, 0.0), (log_y, -INF)):
        by_line(tensor, regime.dim)[1, 100:180] = value
    assert (softmax_backward(grad, y, regime.dim, HALF, False, backend)[y == 0] == 0).all()
    result = softmax_backward(grad, log_y, regime.dim, HALF, True, backend)
    assert torch.equal(result[log_y == -INF], grad[log_y == -INF])
