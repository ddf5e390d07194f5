"""The updates of tritonamp.apex.amp_C against the papers' formulas in FP64, tensor by tensor."""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tritonamp.apex import amp_C
from tritonamp.apex.multi_tensor_apply import multi_tensor_applier

U32 = torch.finfo(torch.float32).eps
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
SHAPES: list[tuple[int, ...]] = [(7, 5), (), (333,)]
LR, BETA1, BETA2, EPS, DECAY, STEP = 0.125, 0.75, 0.9375, 1e-3, 0.0625, 3
Lists = list[list[Tensor]]


def several(device: torch.device, dtype: torch.dtype, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in SHAPES]


def given(device: torch.device, names: str, dtype: torch.dtype) -> Lists:
    """Return lists by letter: g, p half where ``dtype`` is, u written only; m, v as they can be."""
    lists = []
    for seed, name in enumerate(names):
        tensors = several(device, dtype, seed)
        lists.append([t.abs() for t in tensors] if name == "v" else tensors)
    return lists


def flag(device: torch.device, value: int = 0) -> Tensor:
    return torch.full((1,), value, dtype=torch.int32, device=device)


def sgd(g: Tensor, p: Tensor, m: Tensor, copy: Tensor | None = None, **args: Any) -> Lists:
    g = g * args["scale"]
    if not args["late"]:
        g = g + args["decay"] * p
    if args["momentum"]:
        kept = args["momentum"] * m + (1 - args["dampening"]) * g
        m = g if args["first"] else kept
        g = g + args["momentum"] * m if args["nesterov"] else m
    if args["late"]:
        g = g + args["decay"] * p
    p = p - LR * g
    return [p, m] if copy is None else [p, m, p]


def moments(g: Tensor, m: Tensor, v: Tensor, weight1: float = 1 - BETA1) -> tuple[Tensor, Tensor]:
    return BETA1 * m + weight1 * g, BETA2 * v + (1 - BETA2) * g * g


def quotient(m: Tensor, v: Tensor, step: int, corrects: bool = True) -> Tensor:
    c1, c2 = (1 - BETA1**step, 1 - BETA2**step) if corrects else (1.0, 1.0)
    return (m / c1) / ((v / c2).sqrt() + EPS)


def adam(g: Tensor, p: Tensor, m: Tensor, v: Tensor, mode: int, corrects: bool) -> list[Tensor]:
    m, v = moments(g + (DECAY * p if mode == 0 else 0), m, v)
    update = quotient(m, v, STEP, corrects) + (DECAY * p if mode == 1 else 0)
    return [p - LR * update, m, v]


def stage1(
    g: Tensor, p: Tensor, m: Tensor, v: Tensor, u: Tensor, decay: float, shrinks: float
) -> list[Tensor]:
    m, v = moments(g / shrinks, m, v)
    return [m, v, quotient(m, v, STEP + 1) + decay * p]


def trusting(p: Tensor, u: Tensor, norms: tuple[float, float], decay: float, nv: bool) -> Tensor:
    ratio = norms[0] / norms[1] if (decay or nv) and all(norms) else 1.0
    return p - LR * ratio * u


def novograd(
    g: Tensor, p: Tensor, m: Tensor, before: float, mode: int, averaging: bool, order: int
) -> tuple[list[Tensor], float]:
    now = float(g.norm(order or math.inf))
    if order == 2:
        size = math.sqrt(BETA2 * before**2 + (1 - BETA2) * now**2)
    else:
        size = BETA2 * before + (1 - BETA2) * now
    denom = size / math.sqrt(1 - BETA2**STEP) + EPS
    weight, c1 = (1 - BETA1 if averaging else 1.0), 1 - BETA1**STEP
    if mode == 0:
        m = BETA1 * m + weight * (g / denom + DECAY * p)
        return [p - LR * m / c1, m], size
    m = BETA1 * m + weight * g
    return [p - LR * (m / c1 / denom + DECAY * p), m], size


def compare(found: Lists, before: Lists, formula: Callable[..., list[Tensor]]) -> None:
    """Compare written lists with ``formula``, tensor by tensor: FP32 arithmetic, rounded once."""
    for i, row in enumerate(zip(*before, strict=True)):
        expected = formula(i, *(t.double() for t in row))
        for written, value in zip(found, expected, strict=True):
            result = written[i]
            # some twenty roundings of values that stay below 16 here
            tolerance = {"rtol": torch.finfo(result.dtype).eps, "atol": 20 * 16 * U32}
            torch.testing.assert_close(result.double(), value, **tolerance)


def cloned(lists: Lists) -> Lists:
    return [[t.clone() for t in tensors] for tensors in lists]


def flat(lists: Lists) -> list[Tensor]:
    return [t for tensors in lists for t in tensors]


SGD = {"decay": DECAY, "momentum": 0.75, "dampening": 0.25, "nesterov": False, "first": False}
SGD |= {"late": False, "scale": 0.5}
VARIANTS = [
    {},
    {"momentum": 0.0},
    {"nesterov": True, "dampening": 0.0},
    {"first": True},
    {"late": True},
    {"decay": 0.0, "scale": 1.0},
]


def call_sgd(noop: Tensor | None, lists: Lists, **args: Any) -> None:
    multi_tensor_applier(
        amp_C.multi_tensor_sgd,
        noop,
        lists,
        args["decay"],
        args["momentum"],
        args["dampening"],
        LR,
        args["nesterov"],
        args["first"],
        args["late"],
        args["scale"],
    )


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("dtypes", ["hhh", "fff", "hffh", "fffh", "bbb"])
def test_sgd(variant: dict[str, Any], dtypes: str, device: torch.device) -> None:
    """All combinations of apex, and bfloat16: gradients, parameters, buffers, half copies."""
    kinds = {"h": torch.float16, "f": torch.float32, "b": torch.bfloat16}
    lists = [several(device, kinds[kind], seed) for seed, kind in enumerate(dtypes)]
    args = {**SGD, **variant}
    for noop in (None, flag(device)):
        before, now = cloned(lists), cloned(lists)
        call_sgd(noop, now, **args)
        compare(now[1:], before, lambda _, *row: sgd(*row, **args))
        assert all(torch.equal(a, b) for a, b in zip(now[0], before[0], strict=True))
        if args["momentum"] == 0:
            assert all(torch.equal(a, b) for a, b in zip(now[2], before[2], strict=True))


@pytest.mark.parametrize("dtypes", ["hhh", "hffh"])
def test_sgd_skips_where_the_flag_is_not_0(dtypes: str, device: torch.device) -> None:
    kinds = {"h": torch.float16, "f": torch.float32}
    lists = [several(device, kinds[kind], seed) for seed, kind in enumerate(dtypes)]
    lists[0][0][0, 0] = float("nan")
    before = cloned(lists)
    call_sgd(flag(device, 1), lists, **SGD)
    for now, then in zip(lists[1:], before[1:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(now, then, strict=True))
    call_sgd(None, lists, **SGD)
    assert lists[1][0].isnan().any()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("corrects", [0, 1])
def test_adam(dtype: torch.dtype, mode: int, corrects: int, device: torch.device) -> None:
    """Moments of half parameters are FP32, as in apex."""
    lists = given(device, "gp", dtype) + given(device, "xxmv", torch.float32)[2:]
    before = cloned(lists)
    args = LR, BETA1, BETA2, EPS, STEP, mode, corrects, DECAY
    multi_tensor_applier(amp_C.multi_tensor_adam, flag(device, 1), lists, *args)
    compare(lists[1:], before, lambda _, *row: adam(*row, mode, bool(corrects)))
    assert all(torch.equal(a, b) for a, b in zip(lists[0], before[0], strict=True))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("norm", [0.5, 8.0])
def test_lamb_stage1(dtype: torch.dtype, norm: float, device: torch.device) -> None:
    half, wide = given(device, "gp", dtype), given(device, "xxmvu", torch.float32)[2:]
    lists, decays = [*half, *wide], [0.0, 0.25, 0.0625]
    before = cloned(lists)
    multi_tensor_applier(
        amp_C.multi_tensor_lamb_stage1_cuda,
        flag(device, 1),
        lists,
        torch.tensor(decays, device=device),
        STEP,
        BETA1,
        BETA2,
        EPS,
        torch.tensor([norm], device=device),
        2.0,
    )
    shrinks = max(1.0, norm / 2.0)
    compare(lists[2:], before, lambda i, *row: stage1(*row, decays[i], shrinks))
    assert all(torch.equal(a, b) for a, b in zip(lists[1], before[1], strict=True))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("decay", "nv"), [(0.0, None), (0.0, True), (DECAY, None), (DECAY, False)])
def test_lamb_stage2(
    dtype: torch.dtype, decay: float, nv: bool | None, device: torch.device
) -> None:
    lists = given(device, "pu", dtype)
    before = cloned(lists)
    norms = [2.0, 0.0, 3.0], [4.0, 1.0, 0.0]  # where one is 0 there is no ratio
    tensors = (torch.tensor(values, device=device) for values in norms)
    arguments = (*tensors, LR, decay) if nv is None else (*tensors, LR, decay, nv)
    multi_tensor_applier(amp_C.multi_tensor_lamb_stage2_cuda, flag(device, 1), lists, *arguments)

    def formula(i: int, p: Tensor, u: Tensor) -> list[Tensor]:
        return [trusting(p, u, (norms[0][i], norms[1][i]), decay, bool(nv))]

    compare(lists[:1], before, formula)
    assert all(torch.equal(a, b) for a, b in zip(lists[1], before[1], strict=True))


def test_both_stages_are_one_step_of_lamb(device: torch.device) -> None:
    """As callers of the stages put them together; ``multi_tensor_lamb`` counts from 1."""
    one = given(device, "gpmv", torch.float32)
    two, zeros = cloned(one), [torch.zeros_like(t) for t in one[1]]
    norm = torch.tensor([4.0], device=device)
    betas = BETA1, BETA2
    amp_C.multi_tensor_lamb(
        1, flag(device), one, LR, *betas, EPS, STEP + 1, 1, DECAY, 1, 1, norm, 1.0
    )
    decays = torch.full((3,), DECAY, device=device)
    amp_C.multi_tensor_lamb_stage1_cuda(
        1, flag(device), [*two, zeros], decays, STEP, *betas, EPS, norm, 1.0
    )
    norms = [amp_C.multi_tensor_l2norm(1, flag(device), [ts], True)[1] for ts in (two[1], zeros)]
    amp_C.multi_tensor_lamb_stage2_cuda(1, flag(device), [two[1], zeros], *norms, LR, DECAY)
    for a, b in zip(flat(one), flat(two), strict=True):
        torch.testing.assert_close(a, b, rtol=8 * U32, atol=8 * U32)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize(("averaging", "order"), [(1, 2), (0, 0)])
def test_novograd(
    dtype: torch.dtype, mode: int, averaging: int, order: int, device: torch.device
) -> None:
    lists = given(device, "gp", dtype) + given(device, "xxm", torch.float32)[2:]
    before, sizes = cloned(lists), [1.0, 0.5, 2.0]
    norms = torch.tensor(sizes, device=device)
    args = norms, LR, BETA1, BETA2, EPS, STEP, 1, DECAY, averaging, mode, order
    multi_tensor_applier(amp_C.multi_tensor_novograd, flag(device, 1), lists, *args)
    running = {}

    def formula(i: int, *row: Tensor) -> list[Tensor]:
        values, running[i] = novograd(*row, sizes[i], mode, bool(averaging), order)
        return values

    compare(lists[1:], before, formula)
    expected = torch.tensor([running[i] for i in range(3)], dtype=torch.float64)
    torch.testing.assert_close(norms.cpu().double(), expected, rtol=400 * U32, atol=0)


ONE = functools.partial(torch.ones, 1)
CALLS: dict[str, tuple[int, tuple[Any, ...]]] = {
    "multi_tensor_scale": (2, (1.0,)),
    "multi_tensor_axpby": (3, (1.0, 1.0, -1)),
    "multi_tensor_l2norm": (1, ()),
    "multi_tensor_sgd": (3, (0.0, 0.0, 0.0, LR, False, False, False, 1.0)),
    "multi_tensor_adam": (4, (LR, BETA1, BETA2, EPS, 1, 1, 1, 0.0)),
    "multi_tensor_adagrad": (3, (LR, EPS, 0, 0.0)),
    "multi_tensor_novograd": (3, (ONE(), LR, BETA1, BETA2, EPS, 1, 1, 0.0, 1, 1, 2)),
    "multi_tensor_lamb": (4, (LR, BETA1, BETA2, EPS, 1, 1, 0.0, 1, 1, ONE(), 1.0)),
    "multi_tensor_lamb_stage1_cuda": (5, (ONE(), 1, BETA1, BETA2, EPS, ONE(), 1.0)),
    "multi_tensor_lamb_stage2_cuda": (2, (ONE(), ONE(), LR, 0.0)),
}


@pytest.mark.parametrize("name", CALLS)
def test_lists_that_do_not_fit(name: str) -> None:
    """Wrong depth, lengths or sizes: an error that names them, and nothing is written."""
    depth, args = CALLS[name]
    call = functools.partial(getattr(amp_C, name), 1, flag(torch.device("cpu")))
    call([[] for _ in range(depth)], *args)  # nothing to do
    lists = [[torch.ones(2), torch.ones(3)] for _ in range(depth)]
    before = cloned(lists)
    allowed = "3 or 4" if name == "multi_tensor_sgd" else str(depth)
    with pytest.raises(RuntimeError, match=f"{name}: expected {allowed} lists of tensors .*got 7"):
        call((lists * 7)[:7], *args)
    if depth > 1:
        with pytest.raises(RuntimeError, match=rf"{name}: expected lists of one length, got \[2, "):
            call([*lists[:-1], lists[-1][:1]], *args)
        with pytest.raises(RuntimeError, match=r"one size at place 1 of the lists, got \[3, .*2\]"):
            call([*lists[:-1], [torch.ones(2), torch.ones(2)]], *args)
    assert all(torch.equal(a, b) for a, b in zip(flat(lists), flat(before), strict=True))


def test_every_function_is_there_by_name() -> None:
    assert set(CALLS) <= set(amp_C.__all__)
    assert all(callable(getattr(amp_C, name)) for name in amp_C.__all__)
