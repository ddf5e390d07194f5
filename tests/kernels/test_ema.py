"""ema against FP64 with derived bounds, skips, special values, bytes."""

from typing import Any

import pytest
import torch

from tests.kernels.conftest import Traffic, U, assert_within, made, numpy_warns, unaligned
from tritonamp.kernels._multi_tensor import TensorLists
from tritonamp.kernels.ema import ema

pytestmark = numpy_warns

SHAPES = [(0,), (), (1,), (1023,), (1024,), (1025,), (4107,), (5, 7), (3, 0)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("place", [lambda x: x, unaligned], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("decay", [0.0, 0.25, 0.5, 0.9, 0.9999])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_fp64(
    device: torch.device, backend: str, dtype: torch.dtype, decay: float, place: Any
) -> None:
    """At most: the difference, the smaller weight and their product are off by u each, and by u
    the weight that it is made of; the sum by u of the result.
    """
    averages = [place(t) for t in made(SHAPES, device, torch.float32, 0)]
    params = made(SHAPES, device, dtype, 1)
    before = [t.double() for t in averages]
    kept = [t.clone() for t in params]
    ema(TensorLists(averages=averages, params=params), decay, None, backend)
    for average, param, start, unchanged in zip(averages, params, before, kept, strict=True):
        exact = decay * start + (1.0 - decay) * param.double()
        share = 4 * (1 - decay) if decay > 0.5 else 4
        difference = (param.double() - start).abs()
        assert_within(average, exact, U * (exact.abs() + share * difference))
        assert torch.equal(param, unchanged)
    if place is unaligned:
        memory = torch.as_strided(averages[6], (4107 + 16,), (1,), 0)
        assert memory[0] == 7 and (memory[4108:] == 7).all(), "written out of bounds"


@pytest.mark.parametrize("decay", [0.25, 0.75])
def test_the_eager_form_has_torchs_bits(device: torch.device, decay: float) -> None:
    averages, params = (made(SHAPES, device, torch.float32, seed) for seed in (0, 1))
    expected = [torch.lerp(a, p, 1.0 - decay) for a, p in zip(averages, params, strict=True)]
    ema(TensorLists(averages=averages, params=params), decay, None, "eager")
    assert all(map(torch.equal, averages, expected))


@pytest.mark.parametrize("decay", [0.0, 0.1, 0.999])
def test_an_average_that_is_equal_to_its_value_stays(
    device: torch.device, backend: str, decay: float
) -> None:
    params = made(SHAPES, device, torch.float32, 0)
    averages = [p.clone() for p in params]
    ema(TensorLists(averages=averages, params=params), decay, None, backend)
    assert all(map(torch.equal, averages, params))


@pytest.mark.parametrize("found_inf", [1.0, 2.0, NAN])
@pytest.mark.parametrize("decay", [0.25, 0.999])
def test_a_skip_writes_nothing(
    device: torch.device, backend: str, decay: float, found_inf: float
) -> None:
    averages = made(SHAPES, device, torch.float32, 0)
    before = [t.clone() for t in averages]
    bad = [torch.full_like(t, INF) for t in averages]
    flag = torch.tensor(found_inf, device=device)
    ema(TensorLists(averages=averages, params=bad), decay, flag, backend)
    assert all(map(torch.equal, averages, before))
    ema(TensorLists(averages=averages, params=bad), decay, torch.zeros_like(flag), backend)
    assert not any(average.isfinite().any() for average in averages)


@pytest.mark.parametrize("decay", [0.25, 0.999])
def test_special_values_are_torchs(device: torch.device, backend: str, decay: float) -> None:
    values = torch.tensor([INF, -INF, NAN, 3e38, -3e38, 1e-42, -0.0, 1.0], device=device)
    averages, params = torch.meshgrid(values, values, indexing="ij")
    expected = torch.lerp(averages, params, 1.0 - decay)
    average = averages.clone()
    ema(TensorLists(averages=[average], params=[params.contiguous()]), decay, None, backend)
    torch.testing.assert_close(average, expected, rtol=4 * U, atol=2.0**-149, equal_nan=True)


def test_parameters_of_fp64(device: torch.device, backend: str) -> None:
    """Their averages are FP64, those of other parameters FP32."""
    dtypes = torch.float64, torch.float32
    params = [torch.full((3,), 0.1, dtype=dtype, device=device) for dtype in dtypes]
    averages = [torch.zeros_like(p) for p in params]
    ema(TensorLists(averages=averages, params=params), 0.75, None, backend)
    for average, param in zip(averages, params, strict=True):
        assert average.tolist() == (0.25 * param).tolist()


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_bytes(traffic: Traffic, device: torch.device, dtype: torch.dtype) -> None:
    """4 + 4 of the average, and the parameter."""
    size = 1 << 16
    average, param = torch.zeros(size, device=device), torch.ones(size, device=device, dtype=dtype)
    lists = TensorLists(averages=[average], params=[param])
    ema(lists, 0.9, None, "triton")
    reads = 4 + dtype.itemsize
    assert reads * size <= traffic.read <= 1.01 * reads * size
    assert traffic.written == 4 * size
    ema(lists, 0.9, torch.ones((), device=device), "triton")
    assert traffic.written == 4 * size
