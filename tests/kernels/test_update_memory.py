"""Updates at a skip, on memory of any layout, and with bits of the changes."""

import itertools

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import numpy_warns, unaligned
from tests.kernels.update_rows import (
    BF16,
    CODES,
    FP64,
    HALF,
    INF,
    NAN,
    ROWS,
    WIDE,
    Row,
    each_form,
    each_row,
)
from tests.kernels.updates import Updates, bits, same_bits
from tritonamp.kernels import _device_tables
from tritonamp.kernels._change_bits import unpacked_bits
from tritonamp.kernels._memory_order import in_order_of_memory

pytestmark = numpy_warns

SIZES = [(n,) for n in (*range(10), 127, 128, 129, 1023, 1024, 1025, 4097)]
FLAGS = [
    *(torch.tensor(x) for x in (1.0, -1.0, INF, NAN, True)),
    torch.tensor(2, dtype=torch.int32),
    torch.tensor(0.5, dtype=HALF),
    torch.tensor(1e-300, dtype=FP64),
]


@pytest.mark.parametrize("found_inf", FLAGS, ids=lambda x: f"{x.item()} {x.dtype}")
@each_form("masters", "bf16", "packed", "packed bf16", "8bit")
@each_row
def test_any_found_inf_leaves_every_bit(
    device: torch.device, backend: str, row: Row, form: str, found_inf: Tensor
) -> None:
    """A flag of any dtype. The steps before and after it have the same plan and memory."""
    skip, go = (t.to(device) for t in (found_inf, torch.tensor(-0.0, dtype=found_inf.dtype)))
    run = Updates(row, device, form, row.rules[:2], changes=2)
    run.step(backend, 0.5, 0.0)
    if run.form.param is not BF16:  # which the interpreter copies, with another NaN
        run.lists["params"][-1][0, 0] = NAN
    if run.form.state is not CODES:
        run.lists[row.update.states[0]][-1][0, 0] = -0.0
    expected, before, grads = run.clone(), run.bits(), run.lists["grads"]
    bad = itertools.cycle([INF, NAN, 65504.0])
    run.lists["grads"] = [torch.full_like(g, x) for g, x in zip(grads, bad, strict=False)]
    run.step(backend, 8.0, skip)
    assert all(map(torch.equal, run.bits(), before))
    assert run.overflow() == [0] * len(run.groups)
    run.lists["grads"] = grads
    assert same_bits(run.step(backend, 0.25, go), expected.step(backend, 0.25))
    assert not all(map(torch.equal, run.bits(), before))


@pytest.mark.parametrize("programs", [_device_tables.PROGRAMS, 1])
@each_form("fp32", "masters", "half", "packed", "8bit", "8bit fp32")
@each_row
def test_memory_that_is_not_aligned(
    device: torch.device,
    backend: str,
    row: Row,
    form: str,
    programs: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Small and large chunks take other loops, with the same bits, and write to no other memory."""
    shapes = [(), (1,), (127,), (129,), (257,), (4099,)]
    run = Updates(row, device, form, shapes=shapes, changes=2)
    aligned = run.clone().step(backend)
    monkeypatch.setattr(_device_tables, "PROGRAMS", programs)
    moved = {t: unaligned(t) for t in itertools.chain(*run.lists.values()) if t.dim()}
    run.lists = {name: [moved.get(t, t) for t in own] for name, own in run.lists.items()}
    assert same_bits(run.step(backend), aligned)
    for tensor in moved.values():
        memory = torch.as_strided(tensor, (tensor.numel() + 16,), (1,), 0)
        assert memory[0] == 7 and (memory[1 + tensor.numel() :] == 7).all()


@each_form()
@each_row
def test_memory_with_gaps(device: torch.device, backend: str, row: Row, form: str) -> None:
    """Gradients are slices, parameters are columns, and states are transposed. All parameters and
    copies get a new version; they may be leaves that require gradients.
    """
    run = Updates(row, device, form, shapes=[(5, 7), (8, 3)])
    expected = run.clone().step(backend)
    lists, first = run.lists, row.update.states[0]
    lists["grads"] = [torch.stack([g, g], -1)[..., 0] for g in lists["grads"]]
    lists["grads"][1] = lists["grads"][1].t().contiguous().t()
    if run.form.copy is not None:
        lists["copies"][0] = lists["copies"][0].t().contiguous().t()
    param = lists["params"][0]
    columns = torch.cat([param, param], 1)[:, :7]
    for own in lists.values():  # a missing copy or state is the parameter
        own[0] = columns if own[0] is param else own[0]
    if run.form.state is WIDE:
        lists[first][1] = lists[first][1].t().contiguous().t()
    written = [*lists["params"], *lists["copies"]]
    before = [t.requires_grad_()._version for t in written]
    grads = [g._version for g in lists["grads"]]
    with torch.no_grad():
        assert same_bits(run.step(backend), expected)
    assert all(t._version > version for t, version in zip(written, before, strict=True))
    assert [g._version for g in lists["grads"]] == grads


@each_row
def test_nothing_to_do(device: torch.device, backend: str, row: Row) -> None:
    run = Updates(row, device, "masters", shapes=[(0,)])
    run.lists = {name: own[:1] for name, own in run.lists.items()}
    run.step(backend)
    assert all(s == 4.0 for s in run.lists.get("steps", ())), "without elements steps count, too"
    run.lists, run.groups = {name: [] for name in run.lists}, []
    run.step(backend, None, 0.0)


def model_bits(run: Updates) -> list[Tensor]:
    """Return the bits of the values that a model computes with, in their order of memory."""
    return [
        in_order_of_memory(bits(t), like=p)
        for t, p in zip(run.lists["copies"], run.lists["params"], strict=True)
    ]


@each_form()
@each_row
def test_changes_are_those_of_the_models_bits(
    device: torch.device, backend: str, row: Row, form: str
) -> None:
    """Row 1 has those of the last step, row 0 collects them; a skip leaves both.

    lr is so small that some half values stay, and gradients of 0 leave all.
    """
    rule = row.rules[0]._replace(lr=2.0**-12, weight_decay=0.0)
    run = Updates(row, device, form, [rule], SIZES, changes=2)
    for param, copy in zip(run.lists["params"], run.lists["copies"], strict=True):
        copy.copy_(param)  # the half copy is the rounded master, also for a kernel
    since = [torch.zeros(p.numel(), dtype=torch.bool, device=device) for p in run.lists["params"]]
    share = []
    for turn in range(4):
        if turn == 2:  # the reader clears what it has read
            for memory, collected in zip(run.lists["changes"], since, strict=True):
                memory[0].zero_(), collected.zero_()
        before = model_bits(run)
        run.step(backend)
        kept = [memory.clone() for memory in run.lists["changes"]]
        run.step(backend, None, 1.0)
        assert all(map(torch.equal, kept, run.lists["changes"]))
        for i, (old, new) in enumerate(zip(before, model_bits(run), strict=True)):
            n, changed = old.numel(), old != new
            since[i] |= changed
            for memory, expected in zip(kept[i], (since[i], changed), strict=True):
                assert torch.equal(unpacked_bits(memory, n), expected)
                assert unpacked_bits(memory, memory.numel() * 8).sum() == expected.sum()
            share.append(changed.float().mean().item() if n > 1000 else 0.5)
    assert min(share) < 1 and max(share) > 0


@pytest.mark.parametrize("rows", [1, 2])
@each_form("fp32", "masters", "masters bfloat16", "half", "packed", "8bit")
def test_bits_of_changes(device: torch.device, backend: str, form: str, rows: int) -> None:
    """Bit k of byte b is element 8 b + k. Another sign of 0 is a change. An inf that stays is none,
    and one NaN for another is none.
    """
    rule = ROWS["sgd"].rules[-1]._replace(lr=1.0)
    run = Updates(ROWS["sgd"], device, form, [rule], [(70,)], changes=rows, grad=WIDE)
    values = {1: 0.0, 2: 0.0, 3: NAN, 4: INF, 5: -INF}
    steps = {0: 1.0, 2: 1e-30, 3: 1.0, 4: 1.0, 5: 1.0, 6: NAN, 9: 1.0, 23: 1.0, 69: 1.0}
    start = torch.tensor([values.get(i, 1.0) for i in range(70)])
    for name in ("params", "copies"):
        run.lists[name][0].copy_(start)
    run.lists["params" if run.form.param is WIDE else "copies"][0][3] = -NAN
    run.lists["grads"][0].copy_(torch.tensor([steps.get(i, 0.0) for i in range(70)]))
    if run.form.packed:
        run.lists["remainders"][0].zero_()
    run.step(backend)
    expected = [1 + 4 + 64, 2, 128, 0, 0, 0, 0, 0, 32, *[0] * 7]  # of 0, 2, 6, 9, 23 and 69
    assert run.lists["changes"][0].tolist() == [expected] * rows
