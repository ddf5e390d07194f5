"""Updates in main memory go over large tensors block by block, and have the bits of eager twins."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tritonamp.kernels import _blocks, _cpu_steps, grad_stats
from tritonamp.kernels._blocks import blocks, may_overflow, overflows
from tritonamp.kernels._cpu_steps import adamw_on_cpu, lion_on_cpu, sgd_on_cpu
from tritonamp.kernels._multi_tensor import TensorLists
from tritonamp.kernels._update import Update
from tritonamp.kernels._update_lists import UpdateLists
from tritonamp.kernels.adamw import ADAMW, AdamRule
from tritonamp.kernels.cast import cast_torch
from tritonamp.kernels.grad_stats import grad_stats_torch
from tritonamp.kernels.lion import LION, LionRule
from tritonamp.kernels.sgd import SGD, SGDRule

HALVES = [torch.float16, torch.bfloat16]
CPU = torch.device("cpu")
INF, NAN = float("inf"), float("nan")

RATE = torch.tensor(0.01)
BETAS = 1 - RATE, 1 - RATE / 10
UPDATES: dict[str, tuple[Any, ...]] = {  # operation, its form in main memory, rule, state's dtype
    "adamw": (ADAMW, adamw_on_cpu, AdamRule(0.01, 0.9, 0.99, 1e-8, 0.01, True, True, True)),
    "adamw, L2": (ADAMW, adamw_on_cpu, AdamRule(RATE, 0.9, 0.99, 1e-8, 0.01, False, False, False)),
    "adamw, no decay": (ADAMW, adamw_on_cpu, AdamRule(RATE, *BETAS, 1e-8, 0.0, True, False, False)),
    "sgd": (SGD, sgd_on_cpu, SGDRule(0.01, 0.9, 0.1, 0.01, True, False)),
    "sgd, no decay": (SGD, sgd_on_cpu, SGDRule(RATE, 0.9, 0.0, 0.0, False, True)),
    "sgd, no momentum": (SGD, sgd_on_cpu, SGDRule(0.01, 0.0, 0.0, 0.01, False, False)),
    "lion": (LION, lion_on_cpu, LionRule(0.01, 0.9, 0.99, 0.01, False)),
    "sgd, bfloat16": (SGD, sgd_on_cpu, SGDRule(0.01, 0.9, 0.1, 0.01, True, False), torch.bfloat16),
    "lion, bfloat16": (LION, lion_on_cpu, LionRule(0.01, 0.9, 0.99, 0.01, False), torch.bfloat16),
    "lion, no decay": (LION, lion_on_cpu, LionRule(RATE, 0.9, 0.99, 0.0, True)),
}


def make_blocks(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    for module in (_blocks, _cpu_steps, grad_stats):
        monkeypatch.setattr(module, "block_size", lambda: size)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 64 elements, a whole number of vectors."""
    make_blocks(monkeypatch, 64)


def tensors() -> list[Tensor]:
    """Sizes around blocks; one lies transposed, one with gaps."""
    generator = torch.Generator().manual_seed(0)
    shapes: list[tuple[int, ...]] = [(63,), (64,), (65,), (7, 41), (), (0,), (3, 5, 8, 8)]
    made = [torch.randn(shape, generator=generator) for shape in shapes]
    made.append(torch.randn(21, 13, generator=generator).t())
    made.append(torch.randn(30, 20, generator=generator)[:, ::2])
    made.append(torch.randn(2, 4, 6, 6, generator=generator).to(memory_format=torch.channels_last))
    return made


def updated(
    op: Callable[..., None],
    update: Update,
    rule: Any,
    half: torch.dtype,
    scale: float,
    skip: float,
    moment: torch.dtype = torch.float32,
) -> list[Tensor]:
    params = tensors()
    copies = [p.to(half) for p in params]
    steps = [torch.full((), 2.0) for _ in params]
    given = TensorLists(
        params=params,
        grads=[(100 * p).to(half) for p in params],
        **{
            name: [p.square().to(moment) for p in params] if update.has(name, rule) else params
            for name in update.states
        },
        copies=copies,
        **({"steps": steps} if update.counts_steps else {}),
    )
    lists = UpdateLists(given, [rule], [0] * len(params))
    params[3][0, 0] = params[0][0] = 1e5  # inf in float16
    op(lists, torch.tensor(scale), torch.tensor(skip))
    kept = [t for t in given.memory.all_kept("overflow", len(params)) if t.any()]
    return [*params, *copies, *steps, *kept, *(t for s in update.states for t in given[s])]


@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("name", UPDATES)
@pytest.mark.parametrize(("scale", "skip"), [(0.125, 0.0), (1.0, 0.0), (0.125, 1.0), (0.125, NAN)])
def test_bits(
    name: str, half: torch.dtype, scale: float, skip: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of whole tensors, and of blocks, are those of the specification."""
    update, on_cpu, rule, *moment = UPDATES[name]
    how = update, rule, half, scale, skip, *moment
    expected = updated(update.in_torch, *how)
    whole = updated(on_cpu, *how)
    make_blocks(monkeypatch, 64)
    monkeypatch.setattr(_cpu_steps, "_MOST_WAITING", 256)  # results are written at once
    for found in (whole, updated(on_cpu, *how)):
        for a, b in zip(expected, found, strict=True):
            assert torch.equal(a, b)
    before = updated(lambda *args: None, *how)
    same = all(torch.equal(a, b) for a, b in zip(expected, before, strict=False))
    assert same == (skip != 0)


def test_blocks_are_views_of_all_elements(small_blocks: None) -> None:
    for tensor in tensors():
        other, seen = torch.zeros_like(tensor), 0
        for a, b, again in blocks(tensor, other, tensor):
            assert again is a
            b.copy_(a)
            seen += 1
        assert torch.equal(tensor, other)
        dense = tensor.numel() > 64 and tensor.stride() != (20, 2)
        assert seen == (-(-tensor.numel() // 64) if dense else 1)


def test_tensors_that_lie_differently_come_whole(small_blocks: None) -> None:
    a = torch.randn(21, 13)
    ((x, y),) = blocks(a, a.t().contiguous().t())
    assert x is a and y.shape == a.shape


@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("extra", [1.0, INF, -INF, NAN, 65519.0, 65520.0, -1e6, 3.4e38, -3.4e38])
def test_overflow_is_of_finite_values(half: torch.dtype, extra: float) -> None:
    """Whatever inf and NaN stand next to them."""
    for beside in (0.0, INF, NAN):
        value = torch.tensor([1.0, beside, extra])
        expected = (value.to(half).isinf() & value.isfinite()).any()
        found = overflows(value, half)
        assert bool(False if found is None else found) == bool(expected)
        lists = TensorLists(params=[value], copies=[torch.zeros(3, dtype=half)])
        cast_torch(lists)
        noted = [bool(t.any()) for t in lists.memory.all_kept("overflow", 1)]
        assert noted in (
            [bool(expected)],
            [],
        )


@pytest.mark.parametrize("extra", [1.0, INF, 65520.0])
def test_one_look_at_several_tensors_finds_an_overflow(extra: float) -> None:
    """In whichever tensor it is, whatever the others hold."""
    quiet = torch.zeros(0), torch.ones(3), torch.full((2,), -65519.0, dtype=torch.float64)
    values = [*quiet, torch.tensor(extra)]
    assert not may_overflow(quiet[:2], HALVES)
    assert may_overflow(values, HALVES)  # FP64 is not looked at
    assert may_overflow([*quiet[:2], values[-1]], HALVES) == (extra != 1.0)
    assert may_overflow(values[-1:], [torch.bfloat16]) == (extra == INF)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES, torch.float64], ids=str)
@pytest.mark.parametrize("value", [0.0, INF, -INF, NAN])
def test_statistics_are_those_of_each_tensor_alone(dtype: torch.dtype, value: float) -> None:
    """Half gradients pass through one piece of memory."""
    grads = [t.to(dtype) for t in tensors()]
    grads[2][1] = value or grads[2][1]
    amax, squares = grad_stats_torch(TensorLists(grads=grads), CPU)
    for grad, largest, square in zip(grads, amax, squares, strict=True):
        wide = grad.to(torch.promote_types(dtype, torch.float32))
        wide = wide if wide.numel() else torch.zeros(1)
        torch.testing.assert_close(
            largest, wide.abs().max().float(), rtol=0, atol=0, equal_nan=True
        )
        norm = torch.linalg.vector_norm(wide).square().float()
        torch.testing.assert_close(square, norm, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("count", "numel"), [(1, 1 << 20), (32, 1 << 15)])
def test_memory_of_an_update_does_not_grow_with_the_parameters(
    count: int, numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scratch of blocks, and results that wait; of whole tensors 14 bytes a parameter and more."""
    make_blocks(monkeypatch, 1 << 17)
    largest = 0
    store = _cpu_steps.CpuUpdate.store

    def noting(self: Any, *results: Any) -> None:
        nonlocal largest
        store(self, *results)
        values = (value for _, value in self.waiting)
        kept = {id(v): v for v in (*self._scratch.values(), *values)}.values()
        largest = max(largest, sum(v.nbytes for v in kept))

    params = [torch.randn(numel) for _ in range(count)]
    given = TensorLists(
        params=params,
        grads=[p.half() for p in params],
        exp_avgs=[p.clone() for p in params],
        copies=[p.half() for p in params],
    )
    lists = UpdateLists(given, [UPDATES["lion"][2]], [0] * count)
    monkeypatch.setattr(_cpu_steps.CpuUpdate, "store", noting)
    lion_on_cpu(lists, None, torch.zeros(()))
    assert 0 < largest <= 2 << 20
