"""The errors of each format of parameters and states against a step in FP32."""

import pytest
import torch

from tests.kernels.conftest import numpy_warns
from tests.kernels.update_rows import (
    BF16,
    CODES,
    HALF,
    INF,
    NAN,
    ROWS,
    WIDE,
    Row,
    each_form,
    each_row,
)
from tests.kernels.updates import SHAPES, Updates
from tritonamp.kernels._memory_order import BLOCK, in_order_of_memory
from tritonamp.kernels._packed_masters import split_master

pytestmark = numpy_warns

DISTANCES = {BF16: 2**-7, CODES: 1 / 8}
"""Largest distance of neighbouring values of a state, relative to the value."""


@each_form()
@each_row
def test_a_step_is_the_fp32_step_on_the_same_values(
    device: torch.device, backend: str, row: Row, form: str
) -> None:
    """In two groups, the arithmetic is that of FP32, bit for bit; each result is rounded once.

    A master in two float16 parts is off by 2^-40 (1 + 2^-24) at most.
    """
    run = Updates(row, device, form, row.rules[:2], SHAPES)
    wide, before = run.wide(), run.masters()
    if run.form.copy is not None:  # one parameter has no copy
        run.lists["copies"][1] = run.lists["params"][1]
    is_nearest = run.form.state is BF16 and not row.update.counts_steps
    state_error = DISTANCES.get(run.form.state, 0.0) / (2 if is_nearest else 1)
    wide.step(backend, 0.5)
    run.step(backend, 0.5)
    moved = 0
    for i, (found, right) in enumerate(zip(run.masters(), wide.lists["params"], strict=True)):
        param, copy = run.lists["params"][i], run.lists["copies"][i]
        if run.form.param is WIDE or run.form.packed:
            off = 2**-39 if param.dtype is HALF else 0.0
            torch.testing.assert_close(found, right, rtol=0, atol=off)
        if run.form.packed:
            half, _ = split_master(in_order_of_memory(found), param.dtype)
            assert torch.equal(in_order_of_memory(param), half)
        else:
            assert torch.equal(copy, right.to(copy.dtype))
        moved += int((found != before[i]).sum())
    for name, i in run.states():
        right = wide.lists[name][i]
        torch.testing.assert_close(run.value(name, i), right, rtol=state_error, atol=0)
    assert moved > 100
    assert all(s.item() == 4.0 for s in run.lists.get("steps", ()))


@each_form()
@each_row
def test_kernel_and_twin_are_alike(triton_device: torch.device, row: Row, form: str) -> None:
    """A state that is off by an FP32 ulp is rounded the other way once in 2^16, a code in 2^20."""
    kernel = Updates(row, triton_device, form, row.rules[:2], [(1029,), (5, 7), (4097,)])
    twin = kernel.clone()
    has_wide = kernel.form.packed or kernel.form.param is WIDE
    of_states = 2**-12 if kernel.form.state is BF16 else 2**-20
    atol = of_states if has_wide else torch.finfo(kernel.form.param).eps
    states = different = 0
    for _ in range(2):
        kernel.step("triton")
        twin.step("eager")
        for a, b in zip(kernel.masters(), twin.masters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=atol)
        for name, i in kernel.states():
            a, b = kernel.lists[name][i], twin.lists[name][i]
            if kernel.form.state is WIDE:
                torch.testing.assert_close(a, b, rtol=2**-20, atol=2**-20)
                continue
            states += a.numel()
            different += int((a != b).sum())
    assert different <= 4 and (states > 20_000 or kernel.form.state is WIDE)
    assert all(map(torch.equal, kernel.lists.get("steps", ()), twin.lists.get("steps", ())))


@each_row
def test_half_and_fp32_parameters_in_one_call(device: torch.device, backend: str, row: Row) -> None:
    """They alternate in two tables, and each steps as in a list of its own kind."""
    shapes = [(130 + i,) for i in range(46)]
    both = [Updates(row, device, form, shapes=shapes) for form in ("8bit", "8bit fp32")]
    for param in both[1].lists["params"]:
        param.mul_(64.0)  # so that it would show if they were taken for their own remainders
    mixed, other = both[0].clone(), both[1].clone()
    other.lists["remainders"] = other.lists["params"]
    for name, own in mixed.lists.items():
        own[1::2] = other.lists[name][1::2]
    for run in (mixed, *both):
        run.step(backend)
    for i in range(47):
        for name in ("params", "steps", *row.update.states):
            assert torch.equal(mixed.lists[name][i], both[i % 2].lists[name][i])


STOCHASTIC = [
    (name, form)
    for name, row in ROWS.items()
    for form in ("bf16", "8bit")
    if form == "8bit" or row.update.counts_steps
]


@pytest.mark.parametrize(("name", "form"), STOCHASTIC)
def test_states_decay_in_the_mean(device: torch.device, backend: str, name: str, form: str) -> None:
    """A step is a fourth of bfloat16's distance or less, and a sixth of that of codes. Rounded to
    the nearest, a state would never change.

    6 deviations of the mean of 3000: a step adds its size times the distance to the variance.
    """
    rule, decay = ROWS[name].rules[0], 0.999 if form == "bf16" else 0.99
    decays = [k for k in ("beta1", "beta2", "momentum", "alpha") if getattr(rule, k, 0)]
    rule = rule._replace(lr=0.0, weight_decay=0.0, **dict.fromkeys(decays, decay))
    run = Updates(ROWS[name], device, form, [rule], [(3000,)])
    run.lists["grads"] = [torch.zeros_like(g) for g in run.lists["grads"]]
    wide = run.wide()
    for _ in range(12):
        run.step(backend)
        wide.step(backend)
    bound = 6 * (12 * (1 - decay) * DISTANCES[run.form.state] / 3000) ** 0.5
    assert bound < 0.2 * (1 - decay**12), "a bound that can fail"
    for state in run.row.states(rule):
        ratio = run.value(state, 0) / wide.lists[state][0]
        assert abs(ratio.mean().item() - 1) <= bound


@each_row
def test_a_bad_gradient_marks_its_block_alone(device: torch.device, backend: str, row: Row) -> None:
    run = Updates(row, device, "8bit", row.rules[1:2], [(1000,)])
    run.lists["grads"][0][300] = NAN
    run.step(backend)
    for name in row.states(run.rules[0]):
        bad = run.value(name, 0).isnan().nonzero().flatten()
        assert bad.tolist() == list(range(2 * BLOCK, 3 * BLOCK)), name
    isnan = run.masters()[0].isnan().nonzero().flatten().tolist()
    assert isnan == ([] if row is ROWS["lion"] else [300])  # the sign of NaN is 0


@each_form("masters", "bf16", "packed", "8bit")
@each_row
def test_parameters_beyond_half_are_noted(
    device: torch.device, backend: str, row: Row, form: str
) -> None:
    """Parameters overflow in a whole tile, at its end, in a tail and in a 0-d tensor. A parameter
    that is inf or NaN itself is no overflow. A flag stays until it is cleared.
    """
    rule = row.rules[0]._replace(lr=1e8, weight_decay=0.0)
    run = Updates(row, device, form, [rule], [(4099,), (4099,), (1029,), (), (130,), (130,)])
    for name in ("grads", *row.states(rule)):
        for own in run.lists[name]:
            own.zero_()
    places = {0: 5, 1: 4098, 2: 1023, 3: ()}
    for i, place in places.items():
        run.lists["grads"][i][place] = 1.0
    run.lists["params"][4][7], run.lists["params"][5][8] = INF, NAN
    run.step(backend)
    expected = [1, 1, 1, 1, 0, 0, 0]
    assert run.overflow() == expected
    assert all(run.lists["copies"][i][place].isinf() for i, place in places.items())
    run.lists["grads"] = [torch.zeros_like(g) for g in run.lists["grads"]]
    run.lists["params"] = [p.zero_() for p in run.lists["params"]]
    run.rules = [rule._replace(lr=0.0)]
    assert run.step(backend).overflow() == expected
    run.last.overflow(device).zero_()
    assert run.step(backend).overflow() == [0] * 7


@each_row
def test_the_range_of_half_copies(device: torch.device, backend: str, row: Row) -> None:
    rule = row.rules[0]._replace(lr=0.0, weight_decay=0.0)
    run = Updates(row, device, "masters", [rule], [(1029,)] * 6)
    values = [65519.9, 65520.0, -65520.0, INF, NAN, 1e38, 0.0]
    places = [(0,), (1028,), (1023,), (5,), (1024,), (77,), (0, 0)]
    for param, place, value in zip(run.lists["params"], places, values, strict=True):
        param[place] = value
    assert run.step(backend).overflow() == [0, 1, 1, 0, 0, 1, 0]
