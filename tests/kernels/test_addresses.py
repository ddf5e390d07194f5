"""Where kernels look for elements in tensors of more than 2**31: addresses against Python's
integers.
"""

import itertools
import operator
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

from tests.kernels.conftest import numpy_warns
from tritonamp.kernels import reduce, softmax, softmax_backward
from tritonamp.kernels._launch import Launch
from tritonamp.kernels._lines import column_offsets, line_offsets
from tritonamp.kernels.device import INTERPRETED, tl, triton

pytestmark = numpy_warns

ROWS, BLOCK, STEPS = 4, 8, 2


class Place(NamedTuple):
    """A program, ``split`` its second number, of a launch on groups of ``rows`` lines of ``n``
    elements. It works on ROWS lines at a time; on one, where vectors do not fit into them.
    """

    row_major: bool
    pid: int
    rows: int
    n: int
    split: int = 0
    vec: int = 1

    def lines(self) -> list[tuple[int, int]]:
        """Start and number of each line."""
        if self.row_major:
            return [
                (i * self.n, i)
                for i in range(self.pid * self.tile, (self.pid + 1) * self.tile)
                if i < self.rows
            ]
        group, first = self.pid // self.blocks, self.pid % self.blocks * self.tile
        rows = range(first, min(first + self.tile, self.rows))
        return [(group * self.n * self.rows + i, group * self.rows + i) for i in rows]

    def elements(self, begin: int, end: int) -> list[int]:
        distance = 1 if self.row_major else self.rows
        columns = range(begin, min(end, self.n))
        return [start + j * distance for start, _ in self.lines() for j in columns]

    def numbers(self) -> list[int]:
        return [number for _, number in self.lines()]

    @property
    def tile(self) -> int:
        return ROWS if self.vec == 1 else 1

    @property
    def blocks(self) -> int:
        return -(-self.rows // self.tile)

    @property
    def layout(self) -> tuple[bool, int, int, int, int]:
        return self.row_major, 1, self.vec, self.tile, BLOCK


BIG = 1 << 33
WHOLE = [
    Place(True, (1 << 31) - 2, BIG, 1),
    Place(True, (1 << 31) - 2, BIG - 5, 7),
    Place(True, 1 << 29, BIG, 8),
    Place(False, (1 << 31) - 2, 3, 7),
    Place(False, 9, 1 << 30, 8),
    Place(False, 1 << 30, (1 << 32) + 3, 8),
    Place(False, (1 << 30) + 1, BIG, 8),
]
LONG = [
    Place(True, (1 << 31) - 2, BIG - 5, 21),
    Place(False, (1 << 31) - 2, 3, 21),
    Place(False, (1 << 28) + 1, 1 << 30, 19),
]
SHARED = [
    Place(True, 0, 5, BIG, 1 << 28),
    Place(True, 1, 6, (1 << 31) + 5, 1 << 27),
    Place(True, 1 << 20, 1 << 23, (1 << 31) - 3, (1 << 27) - 1),
    Place(False, 1, 7, BIG, 1 << 28),
    Place(False, 5, 7, (1 << 31) - 3, (1 << 27) - 1),
]
UNEVEN = [  # of long or shared lines
    Place(True, (1 << 31) - 2, BIG - 5, n, vec=vec) for n in (21, 3, 9) for vec in (4, 8)
]
UNEVEN_SHARED = [
    Place(True, 1, 6, (1 << 31) + 5, 1 << 27, 8),
    Place(True, 3, 6, (1 << 31) - 3, 5, 8),
    Place(True, 1 << 20, 1 << 23, (1 << 31) - 3, (1 << 27) - 1, 4),
]
TILES = [
    Place(True, 0, 3, (1 << 34) - 9, (1 << 31) - 2),
    Place(True, 1 << 20, 1 << 23, BIG, 2000),
    Place(True, (1 << 31) - 2, BIG, 5),
    Place(False, 1, 7, BIG, 1 << 29),
    Place(False, 5, 7, (1 << 31) - 3, (1 << 28) - 1),
    Place(False, 1 << 20, BIG, 1 << 20, 1 << 10),
    Place(True, 1, 3, (1 << 34) - 9, (1 << 29) - 2, 8),
    Place(True, 1 << 20, 1 << 23, BIG + 3, 2000, 4),
]


@triton.jit(do_not_specialize=("pid", "start", "rows", "n", "blocks"))
def offsets_kernel(
    offs_ptr, numbers_ptr, valid_ptr, exist_ptr, pid, start, rows, n, blocks,
    ROW_MAJOR: tl.constexpr, ALIGN: tl.constexpr, VEC: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    i, j = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    lines, numbers, valid = line_offsets(pid, rows, n, blocks, ROW_MAJOR, ALIGN, VEC, ROWS)
    columns, exist = column_offsets(start, n, rows, ROW_MAJOR, ALIGN, VEC, BLOCK)
    tl.store(offs_ptr + i * BLOCK + j, lines + columns)
    tl.store(numbers_ptr + i, numbers)
    tl.store(valid_ptr + i, valid)
    tl.store(exist_ptr + j, exist)


@pytest.mark.parametrize("place", WHOLE + LONG + SHARED)
def test_offsets_beyond_32_bits(triton_device: torch.device, place: Place) -> None:
    start = place.split * STEPS * BLOCK
    offs = torch.empty(ROWS, BLOCK, dtype=torch.int64, device=triton_device)
    numbers = torch.empty(ROWS, dtype=torch.int64, device=triton_device)
    valid = torch.empty(ROWS, dtype=torch.int8, device=triton_device)
    exist = torch.empty(BLOCK, dtype=torch.int8, device=triton_device)
    sizes = place.pid, start, place.rows, place.n, place.blocks
    Launch(offsets_kernel, (1, 1, 1), sizes, place.layout, 1)(offs, numbers, valid, exist)
    rows, columns = len(place.lines()), min(place.n - start, BLOCK)
    assert (valid.tolist(), exist.tolist()) == (
        [i < rows for i in range(ROWS)],
        [j < columns for j in range(BLOCK)],
    )
    assert offs[:rows, :columns].flatten().tolist() == place.elements(start, start + BLOCK)
    assert numbers[:rows].tolist() == place.numbers()


class Accesses(NamedTuple):
    """Elements that a program reads and writes, by the type of the tensor they are in."""

    read: dict[str, list[int]]
    written: dict[str, list[int]]


Run = Callable[[Any, list[torch.dtype], Place, list[int], list[Any]], Accesses]


@pytest.fixture
def accesses(triton_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs one program of a kernel. It is told that it is another; its loads find nothing and its
    stores do nothing.
    """
    if not INTERPRETED:
        pytest.skip("addresses are observed in Triton's interpreter")
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    load = InterpreterBuilder.create_masked_load

    def wide_range(begin: Any, end: Any, step: Any) -> Iterator[Any]:
        """As compiled: the counter is as wide as the bounds. The interpreter's has no type."""
        wide = any(
            isinstance(bound, tl.tensor) and bound.dtype == tl.int64 for bound in (begin, end)
        )
        for at in range(*(operator.index(bound) for bound in (begin, end, step))):
            handle = TensorHandle(
                np.array([at], dtype=np.int64 if wide else np.int32), tl.int64 if wide else tl.int32
            )
            yield tl.tensor(handle, handle.dtype)

    def run(
        kernel: Any, dtypes: list[torch.dtype], place: Place, sizes: list[int], constants: list[Any]
    ) -> Accesses:
        tensors = [torch.empty(16, dtype=dtype) for dtype in dtypes]
        bases = {
            triton.runtime.jit.mangle_type(tensor).removeprefix("*"): tensor.data_ptr()
            for tensor in tensors
        }
        found = Accesses(defaultdict(list), defaultdict(list))

        def note(where: dict[str, list[int]], ptrs: Any, mask: Any) -> None:
            dtype = ptrs.get_element_ty()
            addresses = ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)].tolist()
            size, base = dtype.primitive_bitwidth // 8, bases[str(dtype)]
            where[str(dtype)] += [(address - base) // size for address in addresses]

        def noted_load(self: Any, ptrs: Any, mask: Any, *args: Any) -> Any:
            note(found.read, ptrs, mask)
            return load(self, ptrs, TensorHandle(np.zeros_like(mask.data), mask.dtype), *args)

        def program_id(self: Any, axis: int) -> Any:
            return TensorHandle(
                np.array([(place.pid, place.split, 0)[axis]], dtype=np.int32), tl.int32
            )

        def noted_store(self: Any, ptrs: Any, value: Any, mask: Any, *args: Any) -> None:
            note(found.written, ptrs, mask)

        monkeypatch.setattr(InterpreterBuilder, "create_masked_load", noted_load)
        monkeypatch.setattr(InterpreterBuilder, "create_masked_store", noted_store)
        monkeypatch.setattr(InterpreterBuilder, "create_get_program_id", program_id)
        for module in (softmax, softmax_backward):
            monkeypatch.setattr(module, "range", wide_range, raising=False)
        given = place.rows, place.n, place.blocks, *sizes, *constants, *place.layout
        kernel[(1, 1, 1)](*tensors, *given)
        return found

    return run


X, Y, PART, OTHER = (
    torch.float16,
    torch.float64,
    torch.float32,
    torch.bfloat16,
)  # one for each tensor of a launch
COUNT = 1 << 32  # lines, in 64 bits: the splits are not 256 here but up to 2**28
FORWARD, BACKWARD = [False, 0.0], [False]
each_whole = pytest.mark.parametrize("place", WHOLE)
each_long = pytest.mark.parametrize("place", LONG)
each_shared = pytest.mark.parametrize("place", SHARED)


@each_whole
def test_addresses_of_whole_lines(accesses: Run, place: Place) -> None:
    elements = place.elements(0, place.n)
    assert accesses(softmax.softmax_kernel, [X, Y], place, [], FORWARD) == (
        {"fp16": elements},
        {"fp64": elements},
    )
    found = accesses(softmax_backward.softmax_backward_kernel, [X, OTHER, Y], place, [], BACKWARD)
    assert found == ({"fp16": elements, "bf16": elements}, {"fp64": elements})


@each_long
def test_addresses_of_long_lines(accesses: Run, place: Place) -> None:
    tiles = [place.elements(at, at + BLOCK) for at in range(0, place.n, BLOCK)]
    there, back = (list(itertools.chain.from_iterable(order)) for order in (tiles, tiles[::-1]))
    found = accesses(softmax.softmax_long_kernel, [X, Y], place, [], FORWARD)
    assert found == ({"fp16": there + back}, {"fp64": back})
    found = accesses(
        softmax_backward.softmax_backward_long_kernel, [X, OTHER, Y], place, [], BACKWARD
    )
    assert found == ({"fp16": there + back, "bf16": there + back}, {"fp64": back})


@each_shared
def test_addresses_of_shared_lines(accesses: Run, place: Place) -> None:
    begin, splits = place.split * STEPS * BLOCK, 3
    tiles = [place.elements(at, at + BLOCK) for at in (begin, begin + BLOCK)]
    there, back = tiles[0] + tiles[1], tiles[1] + tiles[0]
    own = [place.split * COUNT + number for number in place.numbers()]
    parts = [split * COUNT + number for number in place.numbers() for split in range(splits)]
    sizes = [STEPS, COUNT]
    found = accesses(softmax.softmax_part_kernel, [X, PART, OTHER], place, sizes, [0.0])
    assert found == ({"fp16": there}, {"fp32": own, "bf16": own})
    found = accesses(
        softmax.softmax_rest_kernel, [X, PART, OTHER, Y], place, [*sizes, splits], [*FORWARD, 4]
    )
    assert found == ({"fp32": parts, "bf16": parts, "fp16": back}, {"fp64": back})
    found = accesses(
        softmax_backward.softmax_backward_part_kernel, [X, OTHER, PART], place, sizes, BACKWARD
    )
    assert found == ({"fp16": there, "bf16": there}, {"fp32": own})
    found = accesses(
        softmax_backward.softmax_backward_rest_kernel,
        [X, OTHER, PART, Y],
        place,
        [*sizes, splits],
        [*BACKWARD, 4],
    )
    assert found == ({"fp32": parts, "fp16": back, "bf16": back}, {"fp64": back})


def in_order(found: Accesses) -> list[dict[str, list[int]]]:
    return [{name: sorted(elements) for name, elements in kind.items()} for kind in found]


@pytest.mark.parametrize("place", UNEVEN)
def test_addresses_of_lines_between_vectors(accesses: Run, place: Place) -> None:
    elements = place.elements(0, place.n)
    twice = sorted(2 * elements)
    found = accesses(softmax.softmax_long_kernel, [X, Y], place, [], FORWARD)
    assert in_order(found) == [{"fp16": twice}, {"fp64": elements}]
    if place.n > 2 * place.vec:  # otherwise there are edges alone
        assert found.read["fp16"][0] % place.vec == 0
    found = accesses(
        softmax_backward.softmax_backward_long_kernel, [X, OTHER, Y], place, [], BACKWARD
    )
    assert in_order(found) == [{"fp16": twice, "bf16": twice}, {"fp64": elements}]


@pytest.mark.parametrize("place", UNEVEN_SHARED)
def test_addresses_of_segments_between_vectors(accesses: Run, place: Place) -> None:
    begin = place.split * STEPS * BLOCK
    elements, sizes = place.elements(begin, begin + STEPS * BLOCK), [STEPS, COUNT]
    [own] = [place.split * COUNT + number for number in place.numbers()]
    found = accesses(softmax.softmax_part_kernel, [X, PART, OTHER], place, sizes, [0.0])
    assert in_order(found) == [{"fp16": elements}, {"fp32": [own], "bf16": [own]}]
    found = accesses(
        softmax.softmax_rest_kernel, [X, PART, OTHER, Y], place, [*sizes, 3], [*FORWARD, 4]
    )
    assert in_order(found)[0]["fp16"] == in_order(found)[1]["fp64"] == elements
    found = accesses(
        softmax_backward.softmax_backward_rest_kernel,
        [X, OTHER, PART, Y],
        place,
        [*sizes, 3],
        [*BACKWARD, 4],
    )
    assert in_order(found)[0]["bf16"] == in_order(found)[1]["fp64"] == elements


@pytest.mark.parametrize("place", TILES)
def test_addresses_of_sums(accesses: Run, place: Place) -> None:
    """The programs of all tiles of the lines have one row of numbers; ``split`` is the tile."""
    programs, count = place.pid + 1, 1 << 20
    told = place._replace(pid=place.split * programs + place.pid)
    assert told.pid < 1 << 31
    found = accesses(reduce.sum_kernel, [X, PART], told, [programs, count], [])
    elements = place.elements(place.split * BLOCK, (place.split + 1) * BLOCK)
    assert {name: sorted(read) for name, read in found.read.items()} == {"fp16": sorted(elements)}
    assert found.written == {"fp32": [place.split * count + number for number in place.numbers()]}
