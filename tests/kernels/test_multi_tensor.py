"""Pointer tables: each element once, tensors that lie in memory in any way, and what a change of
the lists costs.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from tests.kernels.conftest import unaligned
from tritonamp.kernels import _device_tables, _multi_tensor, _tables
from tritonamp.kernels import device as hardware
from tritonamp.kernels._device_tables import MAX_CHUNK, MIN_CHUNK, PROGRAMS, _chunk
from tritonamp.kernels._launch import Launch
from tritonamp.kernels._multi_tensor import Memory, TensorLists
from tritonamp.kernels._tables import Table, chunk_bounds, element_pointer
from tritonamp.kernels.cast import CAST
from tritonamp.kernels.device import INTERPRETED, tl, triton

pytestmark = pytest.mark.usefixtures("triton_device", "plans")

HALF, BF16, WIDE = torch.float16, torch.bfloat16, torch.float32
SHAPES = [
    (0,),
    (),
    (1,),
    (3,),
    (4,),
    (7, 5),
    (4095,),
    (4096,),
    (4097,),
    (3, 0),
    (2, 4099),
    (12289,),
]


@triton.jit(do_not_specialize=("chunk",))
def add_kernel(
    x_ptr, y_ptr, numel_ptr, first_ptr, rows_ptr, chunk,
    X: tl.constexpr, Y: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y += x, as the kernels of the package walk over their chunks."""
    row = tl.load(rows_ptr + tl.program_id(0))
    begin, whole, end = chunk_bounds(numel_ptr, first_ptr, row, tl.program_id(0), chunk, VEC)
    x, y = element_pointer(x_ptr, row, X, VEC), element_pointer(y_ptr, row, Y, VEC)
    j = tl.arange(0, BLOCK)
    for at in range(begin, whole, BLOCK):
        total = tl.load(y + at + j, mask=at + j < whole) + tl.load(x + at + j, mask=at + j < whole)
        tl.store(y + at + j, total.to(Y), mask=at + j < whole)
    if whole < end:
        offs = whole + tl.arange(0, VEC)
        total = tl.load(y + offs, mask=offs < end) + tl.load(x + offs, mask=offs < end)
        tl.store(y + offs, total.to(Y), mask=offs < end)


def add(lists: TensorLists) -> list[Table]:
    with lists.launches(("y",)) as plan:
        for t in plan.tables:
            vec = 4 if t.aligned else 1
            arrays = t.pointers["x"], t.pointers["y"], t.numel, t.first, t.rows
            Launch(
                add_kernel, (t.chunks, 1, 1), (t.chunk,), (t.type("x"), t.type("y"), vec, 1024), 1
            )(*arrays)
    return plan.tables


def takes(lists: TensorLists) -> bool:
    return lists.uses_triton("triton", CAST)


def copied(lists: TensorLists) -> list[str]:
    """The lists of the tensors that kernels work on in copies."""
    return [name for name, _, _ in lists.plan().copies]


def numbered(shape: tuple[int, ...], device: Any = "cpu", dtype: torch.dtype = WIDE) -> Tensor:
    """1, 2, ... 999, 1, ...: exact in FP16, and in FP16 as sums of two, too."""
    numel = torch.Size(shape).numel()
    return (torch.arange(numel, device=device) % 999 + 1).to(dtype).view(shape)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """How often tables were built, and (parts of) them sent to a device."""
    counts = SimpleNamespace(builds=0, sent=0)
    tables = _device_tables.DeviceTables
    build, send = tables.__init__, tables._send

    def counted_build(self: Any, *args: Any) -> None:
        counts.builds += 1
        build(self, *args)

    def counted_send(self: Any, *args: Any) -> None:
        counts.sent += 1
        send(self, *args)

    monkeypatch.setattr(tables, "__init__", counted_build)
    monkeypatch.setattr(tables, "_send", counted_send)
    return counts


# Tables and chunks


@pytest.mark.parametrize("place", [lambda x: x, unaligned], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("dtype", [HALF, BF16, WIDE], ids=str)
def test_each_element_once(
    triton_device: torch.device, dtype: torch.dtype, place: Callable[[Tensor], Tensor]
) -> None:
    x = [place(numbered(shape, triton_device, dtype)) for shape in SHAPES]
    y = [numbered(shape, triton_device) for shape in SHAPES]
    tables = add(TensorLists(x=x, y=y))
    assert all(
        torch.equal(b, numbered(shape, triton_device) + a)
        for a, b, shape in zip(x, y, SHAPES, strict=True)
    )
    assert sorted(n for t in tables for n in t.number.tolist()) == [
        i for i, a in enumerate(x) if a.numel()
    ]
    for t in tables:
        assert t.numel.tolist() == [x[i].numel() for i in t.number.tolist()]
        chunks = [-(-n // MIN_CHUNK) for n in t.numel.tolist()]
        assert t.first.tolist() == [sum(chunks[:row]) for row in range(len(chunks))]
        assert t.rows.tolist() == [row for row, many in enumerate(chunks) for _ in range(many)]
        assert (t.chunk, t.chunks) == (MIN_CHUNK, sum(chunks))
    in_copies = dtype is BF16 and INTERPRETED  # in FP32, and aligned
    one_element = {1, 2}  # these are read alone in any case
    expected = {True} if place is not unaligned or in_copies else {True, False}
    assert {t.aligned for t in tables} == expected
    assert (
        len(expected) == 1
        or {i for t in tables if t.aligned for i in t.number.tolist()} == one_element
    )


@pytest.mark.parametrize(
    ("numel", "chunk"),
    [
        (1, MIN_CHUNK),
        (PROGRAMS * MIN_CHUNK, MIN_CHUNK),
        (PROGRAMS * MIN_CHUNK + 1, 2 * MIN_CHUNK),
        (PROGRAMS * 2 * MIN_CHUNK, 2 * MIN_CHUNK),
        (PROGRAMS * 3 * MIN_CHUNK - 1, 3 * MIN_CHUNK),
        (PROGRAMS * MAX_CHUNK, MAX_CHUNK),
        (PROGRAMS * MAX_CHUNK + 1, MAX_CHUNK),
        (2**40, MAX_CHUNK),
    ],
)
def test_chunks_grow_with_the_model(numel: int, chunk: int) -> None:
    assert _chunk(numel) == chunk
    assert chunk % (32 * _tables.NUM_WARPS * 8) == 0, "whole tiles"


def test_large_chunks(triton_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_device_tables, "PROGRAMS", 2)
    x, y = ([numbered((n,), triton_device) for n in (1, 8192, 9000)] for _ in range(2))
    (table,) = add(TensorLists(x=x, y=y))
    assert (table.chunk, table.rows.tolist(), table.first.tolist()) == (
        3 * MIN_CHUNK,
        [0, 1, 2],
        [0, 1, 2],
    )
    assert all(torch.equal(b, 2 * a) for a, b in zip(x, y, strict=True))


def test_tables_by_dtypes_and_alignment(triton_device: torch.device) -> None:
    x = [
        numbered((n,), triton_device, dtype)
        for n, dtype in [(5, HALF), (5, WIDE), (4097, HALF), (5, HALF)]
    ]
    x.append(unaligned(x[3]))
    y = [numbered((len(a),), triton_device) for a in x]
    tables = add(TensorLists(x=x, y=y))
    assert [t.number.tolist() for t in tables] == [[0, 2, 3], [1], [4]]
    assert [t.dtypes for t in tables] == [{"x": a.dtype, "y": WIDE} for a in (x[0], x[1], x[4])]
    assert [t.aligned for t in tables] == [True, True, False]
    assert [(t.before, t.chunks) for t in tables] == [(0, 4), (4, 1), (5, 1)]
    assert all(torch.equal(b, 2 * a.float()) for a, b in zip(x, y, strict=True))
    if INTERPRETED:
        assert tables[0].type("x") == tl.float16 and tables[0].type("y") == tl.float32


def test_columns_of_tables_are_aligned(triton_device: torch.device) -> None:
    """Kernels are compiled for arrays at multiples of 16 bytes."""
    x = [numbered((3,), triton_device, dtype) for dtype in (HALF, WIDE, WIDE, HALF, HALF)]
    for t in add(TensorLists(x=x, y=[a.clone() for a in x])):
        columns = t.numel, t.first, t.number, *t.pointers.values()
        assert [c.data_ptr() % 16 for c in columns] == [0] * 5


def test_one_unaligned_list_makes_the_row_unaligned(triton_device: torch.device) -> None:
    x, y = (numbered((9,), triton_device) for _ in range(2))
    for pair in ([x], [unaligned(y)]), ([unaligned(x)], [y]):
        assert [t.aligned for t in add(TensorLists(x=pair[0], y=pair[1]))] == [False]


@pytest.mark.parametrize("dtype", [HALF, WIDE], ids=str)
def test_aligned_is_a_multiple_of_16_bytes(triton_device: torch.device, dtype: torch.dtype) -> None:
    memory = torch.zeros(32, dtype=dtype, device=triton_device)
    lists = TensorLists(x=[memory[offset : offset + 8] for offset in range(17)])
    assert takes(lists)
    aligned = [n for t in lists.plan().tables for n in t.number.tolist() if t.aligned]
    assert aligned == [offset for offset in range(17) if offset * dtype.itemsize % 16 == 0]
    for offset in range(17):  # the same when pointers change
        step = Again(x=[memory[:8]])
        lists = step.lists(x=[memory[offset : offset + 8]])
        takes(lists)
        assert lists.plan().tables[0].aligned == (offset in aligned)


def test_devices_have_tables_of_their_own() -> None:
    """The meta device stands for another GPU."""
    x = [torch.zeros(4097, device=device) for device in ("cpu", "meta", "cpu", "meta")]
    lists = TensorLists(x=x, y=[torch.zeros_like(a) for a in x])
    assert takes(lists) == hardware.INTERPRETED  # it is no GPU
    if hardware.INTERPRETED:
        assert [(t.device.type, t.before, t.chunks) for t in lists.plan().tables] == [
            ("cpu", 0, 4),
            ("meta", 4, 4),
        ]
        first, second = lists.plan().tables
        assert first.number.tolist() == [0, 2]
        assert second.numel.device.type == second.rows.device.type == "meta"


def test_numbers_of_chunks_and_elements_beyond_32_bits() -> None:
    """Nothing is allocated: tensors on the meta device, with a table on the CPU."""
    sizes = [3, 2**31 + 5, 2**33, 1]
    x = [torch.empty(n, dtype=HALF, device="meta") for n in sizes]
    part = _device_tables.DeviceTables(
        torch.device("cpu"), {"x": x}, frozenset(), [0, 1, 2, 3], [0, 1, 2, 3], 0
    )
    (table,) = part.tables
    assert table.numel.tolist() == sizes
    assert table.chunk == MAX_CHUNK
    assert table.first.tolist() == [0, 1, 1 + 2**15 + 1, 1 + 2**15 + 1 + 2**17]
    assert table.chunks == len(table.rows) == 1 + 2**15 + 1 + 2**17 + 1
    assert torch.bincount(table.rows).tolist() == [1, 2**15 + 1, 2**17, 1]


@triton.jit(do_not_specialize=("chunk",))
def bounds_kernel(out_ptr, numel_ptr, first_ptr, chunk, VEC: tl.constexpr):
    begin, whole, end = chunk_bounds(numel_ptr, first_ptr, 0, tl.program_id(0), chunk, VEC)
    out_ptr += 3 * tl.program_id(0)
    tl.store(out_ptr, begin)
    tl.store(out_ptr + 1, whole)
    tl.store(out_ptr + 2, end)


@pytest.mark.parametrize("first", [0, -(2**15), -(2**17) - 1])
@pytest.mark.parametrize("vec", [1, 4, 8])
def test_bounds_beyond_32_bits(triton_device: torch.device, vec: int, first: int) -> None:
    """With a first chunk below zero the programs 0 and 1 stand for late ones."""
    start = -first * MAX_CHUNK
    for rest in (1, 7, 8, MAX_CHUNK - 1, MAX_CHUNK):
        numbers = torch.tensor([[start + MAX_CHUNK + rest], [first]], device=triton_device)
        out = torch.zeros(2, 3, dtype=torch.int64, device=triton_device)
        Launch(bounds_kernel, (2, 1, 1), (MAX_CHUNK,), (vec,), 1)(out, numbers[0], numbers[1])
        middle, end = start + MAX_CHUNK, start + MAX_CHUNK + rest
        assert out.tolist() == [[start, middle, middle], [middle, end // vec * vec, end]]


# How tensors lie in memory


def dense() -> list[tuple[Tensor, Tensor]]:
    image = numbered((2, 3, 4, 5))
    return [
        (image.to(memory_format=torch.channels_last), image.to(memory_format=torch.channels_last)),
        (numbered((5, 7)).t(), numbered((5, 7)).t()),
        (numbered((6, 1, 4)).permute(2, 0, 1), numbered((6, 1, 4)).permute(2, 0, 1)),
    ]


@pytest.mark.parametrize("case", range(3))
def test_dense_tensors_are_worked_on_where_they_are(triton_device: torch.device, case: int) -> None:
    x, y = (t.to(triton_device) for t in dense()[case])
    lists, expected = TensorLists(x=[x], y=[y]), x + y
    (table,) = add(lists)
    assert torch.equal(y, expected)
    assert [t.item() for t in table.pointers.values()] == [x.data_ptr(), y.data_ptr()]
    assert not copied(lists)


MISMATCHES = {
    "transposed y": (lambda at: numbered((5, 7), at), lambda at: numbered((7, 5), at).t(), "y"),
    "transposed x": (lambda at: numbered((7, 5), at).t(), lambda at: numbered((5, 7), at), "y"),
    "strided x": (lambda at: numbered((5, 14), at)[:, ::2], lambda at: numbered((5, 7), at), "x"),
    "strided y": (lambda at: numbered((5, 7), at), lambda at: numbered((5, 14), at)[:, ::2], "y"),
    "both strided": (lambda at: numbered((9,), at)[::2], lambda at: numbered((9,), at)[::2], "xy"),
    "expanded x": (
        lambda at: numbered((5, 1), at).expand(5, 7),
        lambda at: numbered((5, 7), at),
        "x",
    ),
    "expanded row": (
        lambda at: numbered((7,), at).expand(5, 7),
        lambda at: numbered((5, 7), at),
        "x",
    ),
    "columns": (
        lambda at: numbered((5, 9), at)[:, 1:8],
        lambda at: numbered((5, 9), at)[:, 1:8],
        "xy",
    ),
    "one element": (
        lambda at: numbered((5,), at)[3:4],
        lambda at: numbered((5, 5), at).diagonal()[4:],
        "",
    ),
    "no dimension": (lambda at: numbered((5,), at)[3], lambda at: numbered((5, 5), at)[2, 2], ""),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_others_are_worked_on_in_copies_that_are_written_back(
    triton_device: torch.device, name: str
) -> None:
    make_x, make_y, names = MISMATCHES[name]
    x, y = make_x(triton_device), make_y(triton_device)
    lists = TensorLists(x=[x], y=[y])
    for _ in range(2):
        before = x.clone()
        expected = x + y
        add(lists)
        assert torch.equal(y, expected) and torch.equal(x, before)
    assert "".join(copied(lists)) == names


def test_what_lies_between_is_left_alone(triton_device: torch.device) -> None:
    around = numbered((5, 14), triton_device)
    before = around.clone()
    add(TensorLists(x=[numbered((5, 7), triton_device)], y=[around[:, ::2]]))
    assert torch.equal(around[:, 1::2], before[:, 1::2])
    assert not torch.equal(around[:, ::2], before[:, ::2])


def test_only_lists_that_kernels_write_are_written_back(triton_device: torch.device) -> None:
    lists = TensorLists(
        x=[numbered((5, 14), triton_device)[:, ::2]], y=[numbered((5, 14), triton_device)[:, ::2]]
    )
    versions = [lists[name][0]._version for name in "xy"]
    add(lists)
    assert [
        lists[name][0]._version - version for name, version in zip("xy", versions, strict=True)
    ] == [0, 1]


def test_copies_are_made_anew_for_each_launch(triton_device: torch.device) -> None:
    x, y = numbered((9,), triton_device)[::2], torch.zeros(5, device=triton_device)
    lists = TensorLists(x=[x], y=[y])
    add(lists)
    x.fill_(100)
    add(lists)
    assert torch.equal(y, numbered((9,), triton_device)[::2] + 100)


@pytest.mark.parametrize("name", ["x", "y"])
def test_other_tensors_with_gaps(triton_device: torch.device, name: str) -> None:
    """Of the same kind, at another place: the copies, not the tensors, go into the table."""
    step = Again(x=[numbered((9,), triton_device)[::2]], y=[numbered((9,), triton_device)[::2]])
    add(step.lists())
    for turn in range(2):
        memory = numbered((9,), triton_device) + 10 + turn
        before = memory.clone()
        lists = step.lists(**{name: [memory[::2]]})
        expected = lists["x"][0] + lists["y"][0]
        add(lists)
        assert torch.equal(lists["y"][0], expected)
        assert torch.equal(memory[1::2], before[1::2])


def test_a_tensor_of_an_earlier_list_is_not_copied_twice(triton_device: torch.device) -> None:
    x = [numbered((5,), triton_device, HALF), numbered((5,), triton_device, HALF)]
    lists = TensorLists(params=x, copies=[x[0], x[1].float()], grads=[x[0].clone(), x[1]])
    assert takes(lists)
    assert [t.dtypes for t in lists.plan().tables] == [
        {"params": HALF, "copies": None, "grads": HALF},
        {"params": HALF, "copies": WIDE, "grads": HALF},  # that one is only read
    ]
    assert lists.plan().tables[0].type("copies") is None
    strided = numbered((9,), triton_device, BF16)[::2]
    lists = TensorLists(params=[strided], copies=[strided])
    takes(lists)
    assert copied(lists) == ["params"]


def test_an_equal_tensor_is_no_repetition(triton_device: torch.device) -> None:
    """Another tensor object over the same memory counts as another one."""
    x = numbered((5,), triton_device)
    lists = TensorLists(x=[x], y=[x.detach()])
    assert takes(lists)
    assert lists.plan().tables[0].dtypes == {"x": WIDE, "y": WIDE}


# What kernels do not take


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_other_dtypes_are_for_the_twin(triton_device: torch.device, dtype: torch.dtype) -> None:
    x = [torch.zeros(3, device=triton_device), torch.zeros(3, dtype=dtype, device=triton_device)]
    assert not takes(TensorLists(x=x))
    assert takes(TensorLists(x=x[:1]))


def test_wrapper_subclasses_are_for_the_twin(triton_device: torch.device) -> None:
    x = torch.zeros(3, device=triton_device)
    assert not takes(TensorLists(x=[x, TwoTensor(x, x.clone())]))
    assert takes(TensorLists(x=[x, torch.nn.Parameter(x)]))


def test_rows_over_two_devices_are_for_the_twin(triton_device: torch.device) -> None:
    x = torch.zeros(3, device=triton_device)
    assert not takes(TensorLists(x=[x], y=[x.to("meta")]))


def test_nothing_is_for_the_twin(triton_device: torch.device) -> None:
    empty = torch.zeros(0, device=triton_device)
    assert not takes(TensorLists(x=[]))
    assert not takes(TensorLists())
    assert not takes(TensorLists(x=[empty, empty]))


def test_the_backend_is_asked(triton_device: torch.device) -> None:
    lists = TensorLists(x=[torch.zeros(3, device=triton_device)])
    assert not lists.uses_triton("eager", CAST)
    assert lists.uses_triton("auto", CAST) == (triton_device.type == "cuda")


# Numbers, and lists that change


def test_numbers_with_gaps(triton_device: torch.device) -> None:
    memory = Memory()
    for numbers, expected in (([1, 4, 6], [[1, 6], [4]]), ([0, 4, 6], [[0, 6], [4]])):
        x = [numbered((n,), triton_device, dtype) for n, dtype in [(3, HALF), (4, WIDE), (5, HALF)]]
        lists = TensorLists(memory=memory, numbers=numbers, size=9, x=x)
        assert takes(lists)
        assert [t.number.tolist() for t in lists.plan().tables] == expected
        assert (len(lists), lists.size, lists.numbers) == (3, 9, numbers)


def test_a_plan_is_for_numbers_out_of_a_size(
    triton_device: torch.device, counts: SimpleNamespace
) -> None:
    x, memory = [numbered((3,), triton_device)], Memory()
    for _ in range(3):
        assert takes(TensorLists(memory=memory, numbers=[2], size=5, x=x))
    assert counts.builds == 1
    # more numbers: kernels write into other memory
    assert takes(TensorLists(memory=memory, numbers=[2], size=6, x=x))
    assert counts.builds == 2


def test_fewer_tensors(triton_device: torch.device) -> None:
    memory, tensor = Memory(), numbered((3,), triton_device)
    both = TensorLists(memory=memory, x=[tensor] * 2, y=[tensor.clone()] * 2)
    assert (len(both), both.size, list(both.numbers)) == (2, 2, [0, 1])
    assert takes(both)
    one = TensorLists(memory=memory, x=[tensor])
    assert (len(one), one.size, list(one.numbers)) == (1, 1, [0])
    assert takes(one)
    assert [t.number.tolist() for t in one.plan().tables] == [[0]]


def test_kept_memory_stays_while_its_shape_does(triton_device: torch.device) -> None:
    memory = Memory()
    first = memory.kept("a", (2,), WIDE, triton_device)
    assert (first.tolist(), first.dtype) == ([0.0, 0.0], WIDE)
    first.fill_(1)
    assert memory.kept("a", (2,), WIDE, triton_device) is first
    assert memory.kept("b", (2,), WIDE, triton_device) is not first
    assert memory.kept("a", (2,), WIDE, torch.device("meta")) is not first
    assert memory.kept("a", (3,), WIDE, triton_device).tolist() == [0.0] * 3
    assert memory.all_kept("a", 3)[0].shape == (3,)


def test_numbers_are_sent_where_they_changed(
    triton_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = []
    monkeypatch.setattr(_multi_tensor, "upload", lambda values, target: sent.append(values))
    memory = Memory()
    for rows in ([[1.0, None]], [[1.0, None]], [[1.0, 0.0]], [[1.0, 0.0], [2.0, 0.0]]):
        memory.sent_rows("rules", rows, torch.float64, triton_device)
    assert [values.tolist() for values in sent] == [
        [[1.0, 0.0]],
        [[1.0, 0.0]],  # None is not 0: somebody else has written there
        [[1.0, 0.0], [2.0, 0.0]],
    ]


class Again:
    """Lists of a step after the other, with one memory."""

    def __init__(self, **lists: list[Tensor]) -> None:
        self.memory, self.given = Memory(), lists
        assert takes(self.lists())

    def lists(self, **changed: list[Tensor]) -> TensorLists:
        self.given |= changed
        return TensorLists(memory=self.memory, **self.given)


def fresh(device: torch.device) -> Again:
    return Again(
        x=[numbered((n,), device) for n in (3, 4099)],
        y=[numbered((n,), device) for n in (3, 4099)],
    )


def test_unchanged_lists_cost_nothing(triton_device: torch.device, counts: SimpleNamespace) -> None:
    step = fresh(triton_device)
    assert (counts.builds, counts.sent) == (1, 1)
    for _ in range(2):
        add(step.lists())
    # other objects at the same places
    add(step.lists(y=[t.view_as(t) for t in step.given["y"]]))
    assert (counts.builds, counts.sent) == (1, 1)


def test_new_tensors_of_the_same_kind_cost_one_upload(
    triton_device: torch.device, counts: SimpleNamespace
) -> None:
    step = fresh(triton_device)
    for turn in range(1, 4):
        lists = step.lists(x=[x.clone() + 1 for x in step.given["x"]])
        expected = [x + y for x, y in zip(lists["x"], lists["y"], strict=True)]
        add(lists)
        assert (counts.builds, counts.sent) == (1, 1 + turn)
        assert all(map(torch.equal, step.given["y"], expected))


def test_two_values_take_turns_with_one_plan(triton_device: torch.device) -> None:
    """Each launch finds its own pointers in the tables, whoever had them before."""
    step = fresh(triton_device)
    x = [x.clone() + 1 for x in step.given["x"]]
    one, other = step.lists(), step.lists(x=x)
    for lists in (one, other, one):
        expected = [x + y for x, y in zip(lists["x"], lists["y"], strict=True)]
        add(lists)
        assert all(map(torch.equal, lists["y"], expected))


def test_one_element_may_lie_anywhere(triton_device: torch.device, counts: SimpleNamespace) -> None:
    x, y = numbered((9,), triton_device), numbered((9,), triton_device)
    step = Again(x=[x[:1]], y=[y[:1]])
    for k in range(1, 9):
        before = y[0].clone()
        add(step.lists(x=[x[k : k + 1]]))
        assert y[0] == before + x[k]
    assert counts.builds == 1


def test_several_tables_are_sent_together(
    triton_device: torch.device, counts: SimpleNamespace
) -> None:
    x = [
        numbered((n,), triton_device, dtype)
        for n, dtype in [(3, HALF), (4, WIDE), (5, HALF), (6, WIDE), (7, HALF)]
    ]
    y = [numbered((len(a),), triton_device) for a in x]
    step = Again(x=x, y=y)
    x = [2 * a for a in x]
    expected = [a + b for a, b in zip(x, y, strict=True)]
    add(step.lists(x=x))
    assert all(map(torch.equal, y, expected))
    assert (counts.builds, counts.sent) == (1, 2)


def test_each_device_costs_one_upload(counts: SimpleNamespace) -> None:
    if not hardware.INTERPRETED:
        pytest.skip("the meta device stands for another GPU")
    step = Again(x=[torch.zeros(3), torch.zeros(3, device="meta")])
    lists = step.lists(x=[torch.zeros(3) + 1, torch.zeros(3, device="meta")])
    with lists.launches():
        pass
    assert (counts.builds, counts.sent) == (2, 4)


def test_one_tensor_given_other_memory_costs_one_upload(
    triton_device: torch.device, counts: SimpleNamespace
) -> None:
    step = fresh(triton_device)
    given = step.given
    given["x"][1].data = given["x"][1] + 1
    expected = [x + y for x, y in zip(given["x"], given["y"], strict=True)]
    add(step.lists())
    assert all(map(torch.equal, given["y"], expected))
    assert (counts.builds, counts.sent) == (1, 2)


def test_tensors_given_other_memory(triton_device: torch.device, counts: SimpleNamespace) -> None:
    step = fresh(triton_device)
    given = step.given
    for tensors in given.values():
        for tensor in tensors:
            tensor.data = tensor + 1
    expected = [x + y for x, y in zip(given["x"], given["y"], strict=True)]
    add(step.lists())
    assert all(map(torch.equal, given["y"], expected))
    assert counts.builds == 1


def test_a_tensor_in_the_place_of_one_that_is_gone(triton_device: torch.device) -> None:
    """Python gives a new tensor the address of one that was freed, and the allocator the same
    memory: gradients, from step to step.
    """
    memory, y = numbered((2, 6), triton_device), numbered((6, 2), triton_device)
    x = memory.view(6, 2)
    step, before = Again(x=[x], y=[y]), id(x)
    del x, step.given["x"]
    others = []
    while len(others) < 1000:
        others.append(memory.t())
        if id(others[-1]) == before:
            break
    else:
        pytest.skip("Python did not use the address again")
    expected = others[-1] + y
    add(TensorLists(memory=step.memory, x=[others[-1]], y=[y]))
    assert torch.equal(y, expected)


def test_a_tensor_that_is_transposed_in_place(triton_device: torch.device) -> None:
    """The same object at the same place."""
    x, y = numbered((4, 4), triton_device), torch.zeros(4, 4, device=triton_device)
    step = Again(x=[x], y=[y])
    add(step.lists())
    add(step.lists(x=[x.t_()]))
    assert torch.equal(y, x + x.t())


def other_dtype(x: Tensor) -> Tensor:
    """At the same place: the first bytes of it."""
    memory = x.view(-1).view(HALF)[: x.numel()]
    return memory.copy_(numbered((x.numel(),))).view(x.shape)


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "dtype": lambda x: x.half(),
    "dtype at the same place": other_dtype,
    "strides": lambda x: x.clone().view(2, 6).t(),
    "strides at the same place": lambda x: x.view(2, 6).t(),
    "alignment": unaligned,
    "gaps": lambda x: torch.stack([x, x], -1)[..., 0],
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_kind_builds_anew(
    triton_device: torch.device, counts: SimpleNamespace, change: str
) -> None:
    x, y = numbered((6, 2), triton_device), numbered((6, 2), triton_device)
    step = Again(x=[x], y=[y])
    changed = CHANGES[change](x)
    expected = changed + y
    add(step.lists(x=[changed]))
    assert counts.builds == 2
    assert torch.equal(y, expected)


@pytest.mark.parametrize("shape", [(2, 4), (9, 4), (0, 4)])
def test_another_shape_builds_anew(triton_device: torch.device, shape: tuple[int, int]) -> None:
    """Its strides are those of before."""
    step = Again(x=[numbered((6, 4), triton_device)], y=[numbered((6, 4), triton_device)])
    x, y = numbered(shape, triton_device), numbered(shape, triton_device)
    lists = step.lists(x=[x], y=[y])
    assert takes(lists) == (x.numel() > 0)
    assert [t.numel.tolist() for t in lists.plan().tables] == [[x.numel()]] * (x.numel() > 0)


def test_a_list_that_no_longer_repeats_another_builds_anew(triton_device: torch.device) -> None:
    """And one that does from now on: amsgrad may be switched on and off."""
    x, y = [numbered((6,), triton_device)], [numbered((6,), triton_device)]
    step = Again(params=x, copies=x)
    for second, dtype in ((x, None), (y, WIDE), (list(x), None), (y, WIDE)):
        lists = step.lists(copies=second)
        assert takes(lists)
        assert lists.plan().tables[0].dtypes["copies"] is dtype


def test_from_the_twin_to_kernels_and_back(triton_device: torch.device) -> None:
    x = torch.zeros(3, device=triton_device)
    step = Again(x=[x])
    for tensor, taken in [(x, True), (x.double(), False), (x, True), (x[:0], False), (x, True)]:
        assert takes(step.lists(x=[tensor])) == taken


def test_parameters_and_copies_get_a_new_version(triton_device: torch.device) -> None:
    """Autograd then refuses a backward through what it had saved of them."""
    names = "params", "copies", "exp_avgs"
    lists = TensorLists(**{name: [numbered((n,), triton_device) for n in (3, 0)] for name in names})
    before = {name: [t._version for t in lists[name]] for name in names}
    with lists.launches(("params", "exp_avgs")):
        pass
    with lists.launches(("copies",)):
        pass
    for name in ("params", "copies"):
        assert [t._version for t in lists[name]] == [version + 1 for version in before[name]]
