"""The closed form of a tiling, and the elements that its programs visit."""

import inspect
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kernels.conftest import numpy_warns
from tritonamp.kernels import _lines, reduce, softmax
from tritonamp.kernels._launch import Launch
from tritonamp.kernels._lines import (
    Tiling,
    column_offsets,
    edge_offsets,
    line_lead,
    line_offsets,
    power_of_two,
    whole_vectors,
)
from tritonamp.kernels.device import tl, triton

pytestmark = numpy_warns

tiling = inspect.unwrap(_lines.tiling)  # remembers nothing


# the closed form


@pytest.mark.parametrize(
    ("shape", "whole", "lines", "block", "num_warps"),
    [
        ((9000, 1), True, 4096, 1, 4),
        ((9000, 3), True, 1024, 4, 4),
        ((9000, 512), True, 8, 512, 4),
        ((5, 512), True, 8, 512, 4),
        ((2, 512), True, 2, 512, 1),
        ((9000, 513), True, 1, 1024, 1),
        ((9000, 4096), True, 1, 4096, 4),
        ((9000, 32768), True, 1, 32768, 32),
        ((9000, 32769), False, 1, 8192, 8),
        ((9000, 3, 2), True, 2, 4, 1),
        ((9000, 3, 64), True, 64, 4, 1),
        ((9000, 64, 65), True, 64, 64, 4),
        ((9000, 65, 65), False, 64, 64, 8),
        ((9000, 1024, 3), True, 4, 1024, 4),
        ((9000, 1025, 3), False, 4, 1024, 8),
    ],
)
def test_regimes_of_softmax(
    shape: tuple[int, ...], whole: bool, lines: int, block: int, num_warps: int
) -> None:
    """Several short lines, a line of up to 32768, a tile that moves along; a warp for each 1024
    elements, 512 where it moves along lines that are not rows.
    """
    t = tiling(shape, 1, 1, softmax.PER_THREAD, softmax.LONGEST, 8)
    assert (t.whole, *t.layout[3:], t.num_warps) == (whole, lines, block, num_warps)
    assert t.splits == 1


@pytest.mark.parametrize(
    ("shape", "lines"),
    [
        ((9000, 512), 8),
        ((9000, 513), 4),
        ((9000, 2049), 1),
        ((257, 1024), 4),
        ((256, 1024), 2),
        ((128, 1024), 1),
        ((100, 512), 8),
        ((0, 1024), 1),
        ((9000, 8193), 1),
    ],
)
def test_tiles_over_lines(shape: tuple[int, ...], lines: int) -> None:
    """They hold 4096 elements, but for few long lines, which 128 programs share evenly."""
    t = tiling(shape, 1, 1, 8, 8192, 8, over_lines=True)
    assert t.layout[3] == lines
    assert t.grid[0] * lines >= shape[0]


@pytest.mark.parametrize(
    ("columns", "lines", "block"), [(64, 64, 64), (65, 32, 128), (128, 32, 128), (129, 32, 128)]
)
def test_tiles_with_fewer_lines_side_by_side(columns: int, lines: int, block: int) -> None:
    """As many lines are given up as make the tile whole, and no more than allowed."""
    t = tiling((3, columns, 640), 1, 1, reduce.PER_THREAD, reduce.LONGEST, 4, 32)
    assert (t.whole, *t.layout[3:]) == (columns <= block, lines, block)


@pytest.mark.parametrize(
    ("shape", "splits", "steps"),
    [
        ((128, 100_000), 1, 13),
        ((127, 100_000), 5, 3),
        ((1, 32768), 1, 1),
        ((1, 32769), 5, 1),
        ((1, 1 << 20), 128, 1),
        ((1, 1 << 24), 256, 8),
        ((2, 1 << 24), 256, 8),
        ((3, 1 << 24), 171, 12),
        ((127, 1025, 3), 2, 1),
        ((128, 1025, 3), 1, 2),
        ((2, 1025, 64 * 64), 1, 17),
        ((1, 1025, 64 * 64), 6, 3),
    ],
)
def test_few_long_lines_are_shared(shape: tuple[int, ...], splits: int, steps: int) -> None:
    """Fewer than 128 programs become 512, or as many as there are tiles, at most 256 to a line."""
    t = tiling(shape, 1, 1, softmax.PER_THREAD, softmax.LONGEST, 8)
    assert (t.splits, t.steps) == (splits, steps)


@pytest.mark.parametrize(
    ("shape", "dim", "align"),
    [
        ((5, 24), 1, 8),
        ((5, 20), 1, 4),
        ((5, 22), 1, 2),
        ((5, 23), 1, 1),
        ((3, 23, 24), 1, 8),
        ((3, 24, 23), 1, 1),
        ((24, 1), 0, 8),
        ((5, 1024), 1, 1024),
        ((5, 1000), 1, 8),
        ((5, 512), 1, 8),  # eight lines in a tile, five there
        ((1, 512), 1, 512),
        ((5, 65536), 1, 8192),
        ((5, 65544), 1, 8),
        ((1024, 5), 0, 1),
    ],
)
def test_alignment_is_what_divides_the_distance_of_lines(
    shape: tuple[int, ...], dim: int, align: int
) -> None:
    """Or of columns; BLOCK where no tile needs a mask."""
    assert tiling(shape, dim, dim, softmax.PER_THREAD, softmax.LONGEST, 8).layout[1] == align


@pytest.mark.parametrize(
    ("shape", "dim", "widest", "vec"),
    [
        ((5, 24), 1, 8, 8),
        ((5, 24), 1, 4, 4),
        ((5, 20), 1, 8, 4),
        ((5, 23), 1, 8, 1),
        ((5, 1024), 1, 4, 4),
        ((5, 32767), 1, 8, 1),
        ((5, 32769), 1, 8, 8),  # begins and ends within vectors
        ((5, 65537), 1, 4, 4),
        ((3, 23, 24), 1, 8, 4),  # four lines side by side
        ((3, 23, 22), 1, 8, 2),
        ((3, 40_000, 23), 1, 8, 1),
    ],
)
def test_vectors_fit_into_lines_unless_these_are_long(
    shape: tuple[int, ...], dim: int, widest: int, vec: int
) -> None:
    t = tiling(shape, dim, dim, softmax.PER_THREAD, softmax.LONGEST, widest)
    assert t.layout[2] == vec


@pytest.mark.parametrize(
    "shape",
    [
        (0,),
        (0, 5),
        (0, 40_000),
        (5, 0),
        (40_000, 0),
        (0, 5, 3),
        (0, 40_000, 3),
        (3, 5, 0),
        (3, 40_000, 0),
    ],
)
def test_empty_tensors_have_a_tiling(shape: tuple[int, ...]) -> None:
    for dim in range(len(shape)):
        for per_thread, longest in (
            (softmax.PER_THREAD, softmax.LONGEST),
            (reduce.PER_THREAD, reduce.LONGEST),
        ):
            t = tiling(shape, dim, dim, per_thread, longest, 8)
            assert t.n == shape[dim]
            assert t.n * t.lines == 0


def test_powers_of_two() -> None:
    assert [power_of_two(n) for n in (0, 1, 2, 3, 4, 5, 1023, 1024, 1025)] == [
        1,
        1,
        2,
        4,
        4,
        8,
        1024,
        1024,
        2048,
    ]
    assert [power_of_two(100, limit) for limit in (1, 3, 4, 127, 128, 200)] == [
        1,
        2,
        4,
        64,
        128,
        128,
    ]


# which elements are visited


@triton.jit(do_not_specialize=("rows", "n", "blocks", "steps"))
def visit_kernel(
    seen_ptr, visits_ptr, rows, n, blocks, steps,
    ROW_MAJOR: tl.constexpr, ALIGN: tl.constexpr, VEC: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Notes each element's line and column, as the kernels know them, and counts visits."""
    pid = tl.program_id(0)
    lines, numbers, valid = line_offsets(pid, rows, n, blocks, ROW_MAJOR, ALIGN, VEC, ROWS)
    lead = line_lead(pid, n, ALIGN, VEC)
    begin = lead + tl.program_id(1).to(tl.int64) * steps * BLOCK
    end = min(begin + steps * BLOCK, lead + n)
    first, last = whole_vectors(begin, end, ALIGN, VEC)
    for at in range(first, last, BLOCK):
        columns, exist = column_offsets(at, last, rows, ROW_MAJOR, ALIGN, VEC, BLOCK)
        offs, there = lines + columns, valid & exist
        column = at - lead + tl.arange(0, BLOCK)[None, :]
        tl.store(seen_ptr + offs, numbers * n + column, mask=there)
        tl.atomic_add(visits_ptr + offs, 1, mask=there)
    if ALIGN < VEC:
        edges, mask = edge_offsets(begin, end, first, last, VEC)
        tl.store(seen_ptr + lines + edges, numbers * n + edges - lead, mask=mask)
        tl.atomic_add(visits_ptr + lines + edges, 1, mask=mask)


def assert_visits_each_once(
    shape: tuple[int, ...], first: int, last: int, t: Tiling, device: torch.device
) -> None:
    outer, n, inner = (
        math.prod(shape[:first]),
        math.prod(shape[first : last + 1]),
        math.prod(shape[last + 1 :]),
    )
    line = torch.arange(outer)[:, None, None] * inner + torch.arange(inner)
    expected = line * n + torch.arange(n)[:, None]
    guard, size = 64, expected.numel()
    seen = torch.full((size + 2 * guard,), -1, device=device)
    visits = torch.zeros(size + 2 * guard, dtype=torch.int32, device=device)
    Launch(visit_kernel, t.grid, (*t.sizes, t.steps), t.layout, t.num_warps)(
        seen[guard:], visits[guard:]
    )
    inside = slice(guard, guard + size)
    assert torch.equal(seen[inside].cpu(), expected.flatten())
    assert (visits[inside] == 1).all()
    assert visits.sum() == size


@pytest.mark.parametrize(
    ("shape", "first", "last", "many"),
    [
        ((3, 512), 1, 1, None),
        ((9, 512), 1, 1, None),
        ((9, 513), 1, 1, None),
        ((4097, 1), 1, 1, None),
        ((1025, 3), 1, 1, None),
        ((2, 32768), 1, 1, None),
        ((2, 32769), 1, 1, None),
        ((2, 32769), 1, 1, 0),
        ((2, 65536), 1, 1, 0),
        ((2, 300_000), 1, 1, 7),
        ((2, 7, 128), 1, 1, None),
        ((2, 40, 65), 1, 1, None),
        ((2, 65, 65), 1, 1, None),
        ((3, 3000, 3), 1, 1, None),
        ((3, 3000, 3), 1, 1, 0),
        ((3, 4, 5, 6), 1, 2, None),
        ((3, 4, 50, 60), 2, 3, None),
    ],
)
def test_every_element_is_visited_once(
    triton_device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, ...],
    first: int,
    last: int,
    many: int | None,
) -> None:
    if many is not None:
        monkeypatch.setattr(_lines, "MANY", many)
    t = tiling(shape, first, last, softmax.PER_THREAD, softmax.LONGEST, 8)
    assert_visits_each_once(shape, first, last, t, triton_device)


@pytest.mark.parametrize("lines", [1, 2, 4])
@pytest.mark.parametrize("shape", [(3, 13, 1), (2, 13, 3)])
def test_the_last_tile_of_lines_is_not_full(
    triton_device: torch.device, shape: tuple[int, ...], lines: int
) -> None:
    row_major = shape[2] == 1
    blocks, groups = -(-3 // lines), 1 if row_major else 2
    layout = row_major, 1, 1, lines, 16
    t = Tiling(13, 3 * groups, True, 1, 1, (groups * blocks, 1, 1), (3, 13, blocks), layout, 1)
    assert_visits_each_once(shape, 1, 1, t, triton_device)


@given(
    shape=st.lists(st.sampled_from([1, 2, 3, 5, 8, 33]), min_size=1, max_size=3),
    n=st.sampled_from([1, 2, 7, 8, 13, 32, 33, 64, 65, 200]),
    data=st.data(),
    many=st.sampled_from([0, 4, 100]),
    longest=st.sampled_from([32, 64]),
    vec=st.sampled_from([4, 8]),
)
@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_every_element_is_visited_once_in_small_tiles(
    triton_device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    shape: list[int],
    n: int,
    data: st.DataObject,
    many: int,
    longest: int,
    vec: int,
) -> None:
    for name, value in {"SHORT": 32, "LOOP_WARPS": 1, "MANY": many, "MAX_SPLITS": 4}.items():
        monkeypatch.setattr(_lines, name, value)
    first = data.draw(st.integers(0, len(shape) - 1))
    last = data.draw(st.integers(first, len(shape) - 1))
    shape[last] = n
    while math.prod(shape) > 2000:
        shape[shape.index(max(shape))] //= 2
    t = tiling(shape, first, last, 2, longest, vec)
    assert t.whole == (t.n <= t.layout[-1])
    assert t.splits * t.steps * t.layout[-1] >= t.n > (t.splits - 1) * t.steps * t.layout[-1]
    assert 1 <= t.splits <= 4
    assert_visits_each_once(tuple(shape), first, last, t, triton_device)
