"""A step of each update against its reference in FP64, many against torch, hyperparameters."""

import itertools
from typing import Any

import pytest
import torch

from tests.kernels.conftest import numpy_warns
from tests.kernels.update_rows import FP64, HALF, INF, NAN, ROWS, WIDE, Row, each_form, each_row
from tests.kernels.updates import SHAPES, SMALL, Updates, same_bits

pytestmark = numpy_warns

TORCHS = {name: row for name, row in ROWS.items() if row.drift is not None}


def referred(run: Updates, place: int, dtype: torch.dtype = FP64) -> tuple[Any, Any]:
    """Return a parameter and its optimizer, which have the values of the run at one place."""
    rule = run.rules[run.groups[place]]
    param = torch.nn.Parameter(run.lists["params"][place].to(dtype, copy=True))
    optimizer = run.row.reference([param], **rule._asdict())
    state = optimizer.state[param]
    for name in run.row.states(rule):
        state[name[:-1]] = run.lists[name][place].to(dtype, copy=True)
    if "steps" in run.lists:
        state["step"] = run.lists["steps"][place].clone()
    return param, optimizer


@pytest.mark.parametrize("steps", [0.0, 9.0, 100_000.0])
@pytest.mark.parametrize("form", ["fp32", "masters", "masters bfloat16", "fp64"])
@each_row
def test_a_step_is_the_references_in_fp64(
    device: torch.device, backend: str, row: Row, form: str, steps: float
) -> None:
    """Groups of all kinds in one call. u is half an ulp of 1.

    Without cancellation relative errors add up, see ``Row.errors``. The rest of a parameter's
    change, decay and the difference, has 4 roundings.
    """
    rules, shapes = (row.rules[:3], SHAPES) if form == "fp32" else (row.rules, [(3,)])
    run = Updates(row, device, form, rules, shapes, steps)
    before = [g.clone() for g in run.lists["grads"]]
    references = [referred(run, i) for i in range(len(run.groups))]
    strides = [p.stride() for p in run.lists["params"]]
    start = [param.detach().clone() for param, _ in references]
    for (param, optimizer), grad in zip(references, before, strict=True):
        param.grad = grad.double() * 0.5
        optimizer.step()
    run.step(backend, 0.5)
    u = torch.finfo(run.lists["params"][0].dtype).eps / 2
    for i, (param, optimizer) in enumerate(references):
        p, size = run.lists["params"][i], (param - start[i]).abs()
        update = size.amax().item() if size.numel() else 0.0
        atol = row.errors["step"] * u * update
        torch.testing.assert_close(p.double(), param.detach(), rtol=4 * u, atol=atol)
        assert p.stride() == strides[i] and torch.equal(run.lists["grads"][i], before[i])
        copy = run.lists["copies"][i]
        assert torch.equal(copy, p.to(copy.dtype))
        for name in row.states(run.rules[run.groups[i]]):
            found, right = run.lists[name][i].double(), optimizer.state[param][name[:-1]]
            torch.testing.assert_close(found, right, rtol=row.errors[name] * u, atol=0)
        if "steps" in run.lists:
            assert run.lists["steps"][i].item() == steps + 1


@pytest.mark.parametrize("n", [20, pytest.param(100, marks=pytest.mark.long)])
@pytest.mark.parametrize("lr", [1e-3, 1e-7])
@pytest.mark.parametrize("row", TORCHS.values(), ids=TORCHS)
def test_many_steps_are_torchs(
    device: torch.device, backend: str, row: Row, lr: float, n: int
) -> None:
    """In a step two correct implementations drift apart by 4 |p| u, because each rounds decay and
    sum, and by ``Row.drift`` times lr u. L2 decay feeds a difference back, less than 1 %.

    Gradients have magnitudes from 0.5 to 1.5 = G, so sqrt(v_hat) is at least 0.5 and |m_hat| /
    sqrt(v_hat) at most 3. Of Adam, m drifts by 28 G / 0.5 = 84, because it rounds by 1.4 G u a
    step, which fades with 0.9, and v by 3 (2 t + 12) in step t <= 100. SGD's buffer of up to 15 G
    rounds by 2 u a step, which fades with 0.9.
    """
    rules = [r._replace(lr=lr) for r in row.rules[:2]]
    rules = [r._replace(eps=1e-8, beta2=0.999) if hasattr(r, "beta2") else r for r in rules]
    run = Updates(row, device, "fp32", rules, [], 0.0)
    for name in ("params", *row.update.states):
        for own in run.lists[name]:
            own.copy_(torch.randn(own.shape) * n * lr if name == "params" else own.zero_())
    theirs = [referred(run, i, WIDE) for i in range(len(rules))]
    start, largest = [p.clone() for p in run.lists["params"]], [0.0] * len(rules)
    for _ in range(n):
        run.lists["grads"] = [
            (torch.rand_like(p) + 0.5) * torch.randn_like(p).sign() for p in start
        ]
        for i, (param, optimizer) in enumerate(theirs):
            param.grad = run.lists["grads"][i].clone()
            optimizer.step()
            largest[i] = max(largest[i], param.detach().abs().max().item())
        run.step(backend)
    for i, (param, _) in enumerate(theirs):
        bound = 1.01 * n * 2.0**-24 * (4 * largest[i] + row.drift * lr)
        moved = (param.detach() - start[i]).abs().max().item()
        assert bound < 0.01 * moved, "a bound that can fail"
        torch.testing.assert_close(run.lists["params"][i], param.detach(), rtol=0, atol=bound)


@each_form()
@each_row
def test_a_step_of_many_tensors_is_that_of_each_alone(
    device: torch.device, backend: str, row: Row, form: str
) -> None:
    """Rules, step counts, flags and random bits go by the tensors' numbers, which have gaps. A warp
    counts the steps of fewer tensors.
    """
    many = Updates(row, device, form, row.rules[:2], [(3,)] * 19)
    places, numbers = range(7, 40), [i + i // 8 for i in range(40)]
    many.groups = [0] * numbers[20] + [1] * (44 - numbers[20])
    for i, step in enumerate(many.lists.get("steps", ())):
        step.fill_(3.0 * i)
    largest = torch.finfo(many.lists["params"][15].dtype).max
    many.lists["params"][15].fill_(min(7e4, largest))
    alone = many.clone()
    many.step(backend, places=places, numbers=numbers, size=44)
    for i in places[::8]:
        alone.step(backend, places=[i], numbers=numbers, size=44)
    for name, own in many.lists.items():
        for i in (*range(7), *places[::8]):
            assert torch.equal(own[i], alone.lists[name][i]), name
    assert many.overflow() == alone.overflow()
    assert sum(many.overflow()) == (many.form.copy is HALF)


@pytest.mark.parametrize("as_tensor", [False, True])
@each_row
def test_hyperparameters_may_change(
    device: torch.device, backend: str, row: Row, as_tensor: bool
) -> None:
    """Between steps on the same memory: schedules, added groups, tensors that are written to."""
    run = Updates(row, device, rules=[row.rules[0]] * 2)
    lr = torch.tensor(0.5, device=device)
    for turn, now in enumerate((0.5, 0.25, 0.25, 0.125)):
        lr.fill_(now)
        expected = run.clone()
        rule = row.rules[0]._replace(weight_decay=turn / 8)
        run.rules[1] = rule._replace(lr=lr if as_tensor else now)
        expected.rules = [row.rules[0], rule._replace(lr=lr.clone() if as_tensor else now)]
        assert same_bits(run.step(backend), expected.step(backend))
    first, other, n = row.rules[0], row.rules[0]._replace(lr=0.75), len(SMALL) + 1
    for rules, groups in [
        ([first, other], [1, 0]),
        ([first, other, first], [1, 0]),
        ([first, first, other], [0, 2]),
        ([other], [0, 0]),
    ]:
        expected = run.clone()
        for both in (run, expected):
            both.rules, both.groups = rules, [g for g in groups for _ in range(n)]
        assert same_bits(run.step(backend), expected.step(backend))


@pytest.mark.parametrize("dtype", [WIDE, FP64], ids=str)
@each_form("fp32", "packed", "8bit")
@each_row
def test_hyperparameters_may_be_tensors(
    device: torch.device, backend: str, row: Row, form: str, dtype: torch.dtype
) -> None:
    """FP32 holds these values exactly, so nothing differs but the twin's lerp, which may contract
    product and sum: two ulps of values below 2. Codes may differ by one.
    """
    exact = {"lr": 0.125, "beta1": 0.875, "beta2": 0.96875}
    fields = {k: v for k, v in exact.items() if k in row.rules[0]._fields}
    rules = [rule._replace(**fields) for rule in row.rules[:2]]
    start = Updates(row, device, form, rules)
    numbers = start.clone().step(backend)
    for at in {device, torch.device("cpu")}:
        tensors = {k: torch.tensor(v, dtype=dtype, device=at) for k, v in fields.items()}
        run = start.clone()
        run.rules = [rules[0], rules[1]._replace(**tensors)]
        run.step(backend)
        if backend == "triton":
            assert same_bits(run, numbers)
        for a, b in zip(run.masters(), numbers.masters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=2**-21)
        for name, i in run.states() if form != "8bit" else ():
            a, b = run.value(name, i), numbers.value(name, i)
            torch.testing.assert_close(a, b, rtol=2**-22, atol=2**-22)


@each_form("fp32", "masters")
@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.update.optional])
def test_an_optional_state_may_be_switched(
    device: torch.device, backend: str, name: str, form: str
) -> None:
    """With the same memory. Tables change, because other lists repeat the parameters."""
    row = ROWS[name]
    with_state, without = Updates(row, device, form, row.rules[1:2]), row.rules[0]
    without = without._replace(**dict.fromkeys(row.update.optional.values(), 0))
    kept = {state: with_state.lists[state] for state in row.update.optional}
    for rule in (row.rules[1], without, row.rules[1]):
        with_state.rules = [rule]
        for state in row.update.optional:
            absent = state not in row.states(rule)
            with_state.lists[state] = with_state.lists["params"] if absent else kept[state]
        expected = with_state.clone().step(backend)
        assert same_bits(with_state.step(backend), expected), rule


@each_form("fp32", "half", "8bit")
@each_row
def test_zero_gradients_move_nothing(
    device: torch.device, backend: str, row: Row, form: str
) -> None:
    run = Updates(row, device, form, [row.rules[0]._replace(weight_decay=0.0)])
    for own in itertools.chain(run.lists["grads"], *(run.lists[s] for s in row.update.states)):
        if own not in set(run.lists["params"]):
            own.zero_()
    before = run.masters()
    assert all(map(torch.equal, run.step(backend).masters(), before))


@pytest.mark.parametrize("bad", [INF, NAN])
@each_form("fp32", "masters", "half", "bf16", "packed")
@each_row
def test_bad_numbers_are_not_hidden(
    device: torch.device, backend: str, row: Row, form: str, bad: float
) -> None:
    """Without found_inf, inf and NaN follow the formulas: an infinite parameter stays, without
    weight decay. Lion steps by a sign, and the sign of NaN is 0.
    """
    rules = [rule for rule in row.rules if rule.weight_decay == 0.0] or row.rules[:2]
    rules = [rule._replace(weight_decay=0.0) for rule in rules]
    run = Updates(row, device, form, rules, [(300,)])
    for param, grad in zip(run.lists["params"][::2], run.lists["grads"][::2], strict=True):
        param[1], grad[2] = INF, bad
    before = run.masters()
    run.step(backend)
    for i in range(0, len(run.groups), 2):
        master = run.masters()[i]
        wrong = (~master.isfinite()).nonzero().flatten().tolist()
        assert wrong == ([1] if row is ROWS["lion"] else [1, 2])
        assert master[1].abs() == INF
        assert wrong == [1, 2] or (master[2] == before[i][2]) == (bad != bad)
        for name in row.states(run.rules[run.groups[i]]):
            state = run.value(name, i)
            assert (~state.isfinite()).nonzero().flatten().tolist() == [2], name
            assert name != "max_exp_avg_sqs" or bool(state.isnan().any()) == (bad != bad)


@pytest.mark.parametrize("factor", [0.3, 2.0**-15, 2.0**-5, 2.0, 2.0**10])
@each_form("fp32", "packed bf16", "8bit")
@each_row
def test_the_gradient_factor_is_one_fp32_product(
    device: torch.device, backend: str, row: Row, form: str, factor: float
) -> None:
    """Therefore a loss scale that is a power of two cancels exactly."""
    start, scale = Updates(row, device, form, row.rules[:2], grad=HALF), torch.tensor(factor)
    scaled = start.clone()
    scaled.lists["grads"] = [g.float() * scale.to(device) for g in start.lists["grads"]]
    assert same_bits(start.step(backend, factor), scaled.step(backend))
