"""sum, both forms against FP64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import Shrink, assert_rounded, numpy_warns, sum_and_error
from tritonamp.kernels._launch import Launch
from tritonamp.kernels.reduce import sum

pytestmark = numpy_warns

HALVES = [torch.float16, torch.bfloat16]
INF, NAN = float("inf"), float("nan")

LENGTHS = [(n, None) for n in (0, 1, 2, 1023, 1024, 1025, 8191, 8192, 8193)]  # tiles of 8192
LENGTHS += [(n, 0) for n in (127, 128, 129, 255, 256, 257)]  # of 128
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {  # of [5, 6, 7]
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, 2),
    "steps": lambda x: x[::2, 1:, ::3],
    "expanded": lambda x: x[:1].expand(9, 6, 7),
    "flipped": lambda x: x.flip(1, 2),
    "offset": lambda x: x.flatten()[1:].narrow(0, 0, 180).view(3, 5, 12),
    "empty": lambda x: x[:, :0],
    "one column": lambda x: x[..., :1],
}

DIMS = [(), (0,), (1,), (-1,), (0, 1), (1, 2), (0, -1), (2, 0), (0, 1, 2), (-3, -2, -1)]

each_half = pytest.mark.parametrize("half", HALVES, ids=str)
each_tile = pytest.mark.parametrize("many", [None, 0])


def assert_is_sum(result: Tensor, x: Tensor, dims: tuple[int, ...], keepdim: bool = False) -> None:
    assert_rounded(result, result.dtype, *sum_and_error(x, dims, keepdim))


def steps(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """1 + eps everywhere: one after another in FP32, each eps is rounded away from 2**17 on."""
    return torch.full((n,), 1 + torch.finfo(dtype).eps, dtype=dtype, device=device)


@pytest.mark.parametrize(("n", "many"), LENGTHS)
@pytest.mark.parametrize(
    ("half", "dtype"),
    [
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32),
    ],
    ids=str,
)
def test_sums_at_the_ends_of_tiles(
    device: torch.device,
    backend: str,
    small_tiles: Shrink,
    half: torch.dtype,
    dtype: torch.dtype,
    n: int,
    many: int | None,
) -> None:
    small_tiles(many)
    for x in (torch.randn(n, device=device).to(half), steps(n, half, device)):
        result = sum(x, (), False, dtype, backend)
        assert result.dtype is dtype
        assert_is_sum(result, x, ())


@pytest.mark.parametrize(
    ("n", "many"),
    [
        (2**18, None),
        (300_007, None),
        (128 * 128, 0),
        (128 * 128 + 1, 0),
    ],  # the last in three launches
)
def test_long_sums(
    device: torch.device, backend: str, small_tiles: Shrink, n: int, many: int | None
) -> None:
    small_tiles(many)
    x = steps(n, torch.float16, device)
    assert_is_sum(sum(x, (), False, torch.float32, backend), x, ())


@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((3, 129), 1),  # lines of two tiles
        ((7, 128), 1),
        ((130, 3), 1),  # tiles of lines
        ((129, 3), 0),
        ((2, 100, 3), 1),  # tiles of columns, in two groups
        ((1, 9, 65), 1),  # of two columns: four launches
        ((2, 2, 65), 1),
    ],
)
def test_lines_of_one_tile_and_several(
    device: torch.device, backend: str, small_tiles: Shrink, shape: tuple[int, ...], dim: int
) -> None:
    small_tiles(0)
    x = torch.randn(shape, device=device).to(torch.float16)
    assert_is_sum(sum(x, (dim,), False, torch.float32, backend), x, (dim,))


@pytest.mark.parametrize("rows", [64, 65, 128, 129])
def test_one_launch_adds_128_rows(
    device: torch.device, backend: str, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """Of FP32, which is what a norm's backward leaves."""
    launched: list[Launch] = []
    run = Launch.__call__

    def noted(launch: Launch, *given: Tensor) -> tuple[Tensor, ...]:
        launched.append(launch)
        return run(launch, *given)

    monkeypatch.setattr(Launch, "__call__", noted)
    x = torch.randn(2, rows, 70, device=device)
    assert_is_sum(sum(x, (1,), False, torch.float32, backend), x, (1,))
    assert len(launched) == (0 if backend == "eager" else 1 if rows <= 128 else 2)


@pytest.mark.parametrize("view", VIEWS)
def test_dims_and_strides(device: torch.device, backend: str, view: str) -> None:
    x = VIEWS[view](torch.randn(5, 6, 7, device=device).to(torch.float16))
    for dims in DIMS:
        assert_is_sum(sum(x, dims, False, torch.float16, backend), x, dims)


def test_keepdim_is_a_matter_of_shape(device: torch.device, backend: str) -> None:
    x = torch.randn(5, 6, 7, device=device)
    for dims in DIMS:
        kept = sum(x, dims, True, torch.float32, backend)
        assert torch.equal(kept.flatten(), sum(x, dims, False, torch.float32, backend).flatten())
        assert kept.shape == x.sum(dims, keepdim=True).shape


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 3), (0, 40_000)])
def test_no_elements(device: torch.device, backend: str, shape: tuple[int, ...]) -> None:
    """Zeros where nothing is added up, nothing where there is no line."""
    x = torch.ones(shape, dtype=torch.float16, device=device)
    for dim in range(len(shape)):
        result = sum(x, (dim,), False, torch.float32, backend)
        assert torch.equal(result, x.float().sum(dim))


@each_half
def test_a_scalar(device: torch.device, backend: str, half: torch.dtype) -> None:
    x = torch.tensor(1.5, dtype=half, device=device)
    for dims in ((), (0,), (-1,)):
        assert torch.equal(sum(x, dims, False, half, backend), x)
        assert torch.equal(sum(x, dims, True, half, backend), x)


@each_tile
def test_it_never_overflows_on_the_way(
    device: torch.device, backend: str, small_tiles: Shrink, many: int | None
) -> None:
    small_tiles(many)
    x = torch.full((1300,), 65504.0, dtype=torch.float16, device=device)
    assert sum(torch.cat([x, -x]), (), False, torch.float16, backend) == 0
    assert sum(x, (), False, torch.float32, backend) == 1300 * 65504.0
    assert sum(x, (), False, torch.float16, backend) == INF
    assert sum(-x, (), False, torch.float16, backend) == -INF


@pytest.mark.parametrize(
    ("terms", "expected"),
    [
        ([2048.0, 1.0], 2048.0),
        ([2048.0, 3.0], 2052.0),
        ([2048.0, 1.0, 2.0**-10], 2050.0),
        ([2048.0] + [1.0] * 6, 2054.0),
        ([2048.0] + [0.0] * 127 + [1.0] + [0.0] * 127 + [2.0**-10], 2050.0),
    ],
)
@each_tile
def test_it_is_rounded_once(
    device: torch.device,
    backend: str,
    small_tiles: Shrink,
    many: int | None,
    terms: list[float],
    expected: float,
) -> None:
    """Ties to even; in half each 1 would be lost next to 2048. FP32 holds 2049 + 2**-10 exactly."""
    small_tiles(many)
    x = torch.tensor(terms, dtype=torch.float16, device=device)
    assert sum(x, (), False, torch.float16, backend) == expected


@pytest.mark.parametrize(
    ("terms", "expected"),
    [
        ([INF, 1.0], INF),
        ([-INF, 1.0], -INF),
        ([INF, INF], INF),
        ([INF, -INF], NAN),
        ([NAN, 1.0], NAN),
        ([NAN, INF], NAN),
        ([], 0.0),
        ([-0.0, 0.0], 0.0),
        ([-0.0, 1e-7], 1e-7),
        ([2.0**-24] * 3, 3 * 2.0**-24),  # fp16's smallest subnormal
    ],
)
@pytest.mark.parametrize("apart", [1, 128])
@each_half
def test_special_values(
    device: torch.device,
    backend: str,
    small_tiles: Shrink,
    half: torch.dtype,
    apart: int,
    terms: list[float],
    expected: float,
) -> None:
    """In one tile, and one in each."""
    small_tiles(0)
    x = torch.zeros(3, len(terms), apart, dtype=half, device=device)
    x[1, :, 0] = torch.tensor(terms)
    result = sum(x.flatten(1), (1,), False, half, backend)
    torch.testing.assert_close(
        result,
        torch.tensor([0.0, expected, 0.0], dtype=half, device=device),
        rtol=0,
        atol=0,
        equal_nan=True,
    )


def test_smallest_bfloat16_terms(device: torch.device, backend: str) -> None:
    x = torch.full((1000,), 2.0**-133, dtype=torch.bfloat16, device=device)
    assert sum(x, (), False, torch.float32, backend).item() == 1000 * 2.0**-133


@each_tile
def test_fp32_input(
    device: torch.device, backend: str, small_tiles: Shrink, many: int | None
) -> None:
    small_tiles(many)
    x = torch.randn(1025, device=device)
    assert_is_sum(sum(x, (0,), False, torch.float32, backend), x, (0,))
    assert_is_sum(sum(x, (0,), False, torch.float16, backend), x, (0,))
    terms = torch.full((1945,), 1 + 2.0**-11 - 2.0**-20, device=device)  # each would be 1 in fp16
    assert sum(terms, (), False, torch.float16, backend) == 1946


def test_the_input_stays(device: torch.device, backend: str) -> None:
    x = torch.randn(3, 5, device=device)
    before = x.clone()
    for dims in ((0,), (1,), ()):
        assert sum(x, dims, True, torch.float32, backend).data_ptr() != x.data_ptr()
    assert torch.equal(x, before)
