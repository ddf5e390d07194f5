"""sum against FP64."""

import math

import pytest
import torch
from torch import Tensor

from tritonamp.kernels.reduce import sum

HALVES = [torch.float16, torch.bfloat16]
INF, NAN = float("inf"), float("nan")
each_half = pytest.mark.parametrize("half", HALVES, ids=str)
each_result = pytest.mark.parametrize("dtype", [None, torch.float32], ids=str)


def ulp(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance of ``dtype``'s values around each FP64 value; in the subnormal range that of the smallest."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(exact.abs().clamp(min=info.tiny)).exponent
    return torch.ldexp(torch.full_like(exact, info.eps), exponent - 1)


def assert_is_sum(result: Tensor, x: Tensor, dims: tuple[int, ...], keepdim: bool = False) -> None:
    """The bound of the numerics contract: u (log2 n + 2) sum |x| for FP32 u, and half an ulp of the result."""
    wide = x.double()
    exact = torch.sum(wide, dims, keepdim)
    n = max(x.numel() // max(exact.numel(), 1), 1)
    bound = 2.0**-24 * (math.log2(n) + 2) * torch.sum(wide.abs(), dims, keepdim) + ulp(exact, result.dtype) / 2
    assert result.shape == exact.shape
    assert ((result.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("n", [0, 1, 2, 1023, 1024, 1025, 100_003, 2**20])
@pytest.mark.parametrize("values", ["normal", "uniform", "steps"])
@each_result
@each_half
def test_long_sums(device: torch.device, half: torch.dtype, dtype: torch.dtype | None, values: str, n: int) -> None:
    """The "steps" are 1 + eps everywhere: one after another in FP32, each eps is rounded away from 2**17 on."""
    x = {
        "normal": lambda: torch.randn(n, device=device),
        "uniform": lambda: torch.rand(n, device=device),
        "steps": lambda: torch.full((n,), 1 + torch.finfo(half).eps, device=device),
    }[values]().to(half) / (32 if n > 1e5 else 1)
    result = sum(x, (), False, dtype or half)
    assert result.dtype is (dtype or half)
    assert_is_sum(result, x, ())


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dims", [(), (0,), (1,), (-1,), (0, 1), (0, -1), (2, 0), (0, 1, 2)])
@each_half
def test_dims_and_strides(device: torch.device, half: torch.dtype, dims: tuple[int, ...], keepdim: bool) -> None:
    x = torch.randn(33, 17, 65, device=device).to(half)
    for view in (x, x.transpose(0, 2), x[::2, 1:, ::3], x[:1].expand(9, 17, 65), x[:, :0], x[..., :1]):
        assert_is_sum(sum(view, dims, keepdim, half), view, dims, keepdim)


@each_half
def test_a_scalar(device: torch.device, half: torch.dtype) -> None:
    x = torch.tensor(1.5, dtype=half, device=device)
    for dims in ((), (0,), (-1,)):
        assert torch.equal(sum(x, dims, False, half), x)


def test_it_never_overflows_on_the_way(device: torch.device) -> None:
    x = torch.full((4096,), 65504.0, dtype=torch.float16, device=device)
    assert sum(torch.cat([x, -x]), (), False, torch.float16) == 0
    assert sum(x, (), False, torch.float32) == 4096 * 65504.0
    assert sum(x, (), False, torch.float16) == INF


@pytest.mark.parametrize(
    ("terms", "expected"),
    [
        ([2048.0, 1.0], 2048.0),
        ([2048.0, 3.0], 2052.0),
        ([2048.0, 1.0, 2.0**-10], 2050.0),
        ([2048.0] + [1.0] * 6, 2054.0),
    ],
)
def test_it_is_rounded_once(device: torch.device, terms: list[float], expected: float) -> None:
    """Ties to even; in half each 1 would be lost beside 2048. FP32 holds 2049 + 2**-10 exactly."""
    assert sum(torch.tensor(terms, dtype=torch.float16, device=device), (), False, torch.float16) == expected


@pytest.mark.parametrize(
    ("terms", "expected"),
    [([INF, 1.0], INF), ([-INF, 1.0], -INF), ([INF, -INF], NAN), ([NAN, 1.0], NAN), ([], 0.0), ([-0.0, 1e-7], 1e-7)],
)
@each_half
def test_special_values(device: torch.device, half: torch.dtype, terms: list[float], expected: float) -> None:
    result = sum(torch.tensor(terms, dtype=half, device=device), (0,), False, half)
    torch.testing.assert_close(
        result, torch.tensor(expected, dtype=half, device=device), rtol=0, atol=0, equal_nan=True
    )


def test_fp32_input(device: torch.device) -> None:
    x = torch.randn(1025, device=device)
    assert_is_sum(sum(x, (0,), False, torch.float32), x, (0,))
    assert_is_sum(sum(x, (0,), False, torch.float16), x, (0,))
    terms = torch.full((1945,), 1 + 2.0**-11 - 2.0**-20, device=device)  # each would be 1 in fp16
    assert sum(terms, (), False, torch.float16) == 1946
