"""What operations read and write, counted in Triton's interpreter; and the same bits again."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import SAMPLES, SampleCall, Shrink, each_sample, numpy_warns
from tritonamp.kernels import reduce, softmax
from tritonamp.kernels._launch import Launch

pytestmark = numpy_warns

HALF, WIDE = torch.float16, torch.float32


WHOLE = [((3, 9), 1), ((3, 64), 1), ((9, 1025), 1), ((9, 7), 0), ((2, 33, 5), 1)]
SEVERAL = [((3, 300), 1), ((2, 256), 1), ((129, 3), 0), ((1, 9, 65), 1)]

COUNTED = {name: call for name, call in SAMPLES.items() if call.sample.reads is not None}
SHARED = {name: call for name, call in COUNTED.items() if call.sample.parts}

each_counted = pytest.mark.parametrize("call", COUNTED.values(), ids=COUNTED)
each_shared = pytest.mark.parametrize("call", SHARED.values(), ids=SHARED)


@pytest.fixture
def x(triton_device: torch.device, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, device=triton_device).to(HALF)


@pytest.mark.parametrize(("shape", "dim"), WHOLE)
@each_counted
def test_whole_lines_are_read_once(traffic: Any, call: SampleCall, x: Tensor, dim: int) -> None:
    sample = call.sample
    call(x, dim)
    lines = x.numel() // x.shape[dim]
    assert (traffic.read, traffic.written) == (
        x.numel() * sample.reads + lines * sample.of_line[0],
        x.numel() * sample.writes + lines * sample.of_line[1],
    )


@pytest.mark.parametrize(("shape", "dim"), SEVERAL)
@each_shared
@pytest.mark.usefixtures("small_loops")
def test_long_lines_are_read_twice(traffic: Any, call: SampleCall, x: Tensor, dim: int) -> None:
    sample = call.sample
    call(x, dim)
    assert (traffic.read, traffic.written) == (
        2 * x.numel() * sample.reads,
        x.numel() * sample.writes,
    )


@pytest.mark.parametrize(("shape", "dim"), SEVERAL)
@each_shared
def test_shared_lines_are_read_twice(
    small_tiles: Shrink, traffic: Any, call: SampleCall, x: Tensor, dim: int
) -> None:
    """Every segment leaves its numbers, in FP32, and reads those of all segments of its line."""
    small_tiles(4)
    sample = call.sample
    call(x, dim)
    parts = traffic.written - x.numel() * sample.writes
    splits, rest = divmod(parts, 4 * sample.parts * x.numel() // x.shape[dim])
    assert splits > 1 and rest == 0
    assert traffic.read == 2 * x.numel() * sample.reads + splits * parts


@pytest.mark.parametrize(
    "shape", [(8, 1 << 20), (1, 1 << 24), (64, 100_000), (1, 40_000), (2, 1 << 20, 3)]
)
def test_partial_results_are_next_to_nothing(shape: tuple[int, ...]) -> None:
    """At most 1 % of softmax's own bytes in memory; segments read them out of L2."""
    t = softmax.tiling(shape, 1, 1, softmax.PER_THREAD, softmax.LONGEST, 8)
    assert t.splits > 1
    assert t.splits * 2 * 2 * 4 <= 0.01 * t.n * 4


@pytest.mark.parametrize("dtype", [HALF, WIDE], ids=str)
@pytest.mark.parametrize(("shape", "dim"), WHOLE)
def test_a_sum_reads_once(traffic: Any, x: Tensor, dim: int, dtype: torch.dtype) -> None:
    y = reduce.sum(x, (dim,), False, dtype, "triton")
    assert (traffic.read, traffic.written) == (x.numel() * 2, y.numel() * y.element_size())


@pytest.mark.parametrize(("shape", "dim"), SEVERAL)
@pytest.mark.usefixtures("small_loops")
def test_a_sum_of_tiles_reads_once(traffic: Any, x: Tensor, dim: int) -> None:
    """The partial sums of the tiles, in FP32, are written and read in addition. Here one more
    launch adds them.
    """
    y = reduce.sum(x, (dim,), False, HALF, "triton")
    block = reduce.tiling(x.shape, dim, dim, reduce.PER_THREAD, reduce.LONGEST, 8).layout[-1]
    parts = 4 * y.numel() * -(-x.shape[dim] // block)
    assert traffic.written >= parts + 2 * y.numel()
    assert traffic.read - 2 * x.numel() == traffic.written - 2 * y.numel()


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 40_000), (0, 5, 3), (3, 5, 0)])
@each_sample
def test_empty_tensors_launch_nothing(
    monkeypatch: pytest.MonkeyPatch, call: SampleCall, x: Tensor
) -> None:
    """A grid of no programs is an error on a GPU."""
    launched: list[Any] = []
    monkeypatch.setattr(Launch, "__call__", lambda *args: launched.append(args))
    for dim in range(x.dim()):
        call(x, dim)
    assert not launched


@pytest.mark.parametrize(
    ("shape", "dim", "many"), [((5, 300), 1, None), ((2, 200, 3), 1, 0), ((2, 300), 1, 4)]
)
@each_sample
def test_the_same_bits_again(
    small_tiles: Shrink, call: SampleCall, x: Tensor, dim: int, many: int | None
) -> None:
    small_tiles(many)
    for first, again in zip(call(x, dim), call(x, dim), strict=True):
        assert torch.equal(first, again)
