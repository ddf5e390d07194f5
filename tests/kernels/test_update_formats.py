"""What each format of parameters and states loses of a step in FP32, and the bytes it moves."""

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import Traffic, numpy_warns
from tests.kernels.update_rows import (
    BF16,
    CODES,
    FORMS,
    HALF,
    INF,
    NAN,
    ROWS,
    WIDE,
    Form,
    Row,
    each_form,
    each_row,
)
from tests.kernels.updates import SHAPES, Updates
from tritonamp.kernels._memory_order import BLOCK, in_order_of_memory
from tritonamp.kernels._packed_masters import split_master
from tritonamp.kernels._tables import stored
from tritonamp.kernels.adamw import AdamRule
from tritonamp.kernels.sgd import SGDRule

pytestmark = numpy_warns

# a step of lr, whatever the gradient
SIGN = AdamRule(2.0**-14, 0.9, 0.999, 1e-12, 0.0, True, False, False)


def is_rounded(run: Updates, place: int, master: Tensor) -> bool:
    """Tell whether the half values at a place are those of an FP32 parameter."""
    param, copy = run.lists["params"][place], run.lists["copies"][place]
    if run.form.packed:
        half, _ = split_master(in_order_of_memory(master), param.dtype)
        return torch.equal(in_order_of_memory(param), half)
    return torch.equal(copy, master.to(copy.dtype))


def state_error(run: Updates) -> float:
    """Return the largest relative error of a state that is rounded once."""
    if run.form.state is not BF16:
        return 1 / 8 if run.form.state is CODES else 0.0
    # one of two neighbours if the update counts steps, else the nearest
    return 1.01 * 2**-7 if run.row.update.counts_steps else 1.01 * 2**-8


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
    wide.step(backend, 0.5)
    run.step(backend, 0.5)
    moved = 0
    for i, (found, right) in enumerate(zip(run.masters(), wide.lists["params"], strict=True)):
        if run.form.param is WIDE or run.form.packed:
            off = 2**-39 if run.form.param is HALF else 0.0
            torch.testing.assert_close(found, right, rtol=0, atol=off)
        assert is_rounded(run, i, found if run.form.packed else right)
        moved += int((found != before[i]).sum())
    for name, i in run.states():
        torch.testing.assert_close(
            run.value(name, i), wide.lists[name][i], rtol=state_error(run), atol=0
        )
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
def test_many_tensors_half_and_fp32(triton_device: torch.device, row: Row) -> None:
    """In two tables, half ones between FP32 ones: each as in a list of its own kind."""
    shapes = [(130 + i,) for i in range(46)]
    both = [Updates(row, triton_device, form, shapes=shapes) for form in ("8bit", "8bit fp32")]
    mixed, other = both[0].clone(), both[1].clone()
    other.lists["remainders"] = other.lists["params"]
    for name, own in mixed.lists.items():
        own[1::2] = other.lists[name][1::2]
    for run in (mixed, *both):
        run.step("triton")
    for i in range(47):
        for name in ("params", "steps", *row.update.states):
            assert torch.equal(mixed.lists[name][i], both[i % 2].lists[name][i])


@each_form("packed", "packed bfloat16", "8bit", "8bit bfloat16")
def test_packed_masters_add_up_what_half_values_cannot_hold(
    device: torch.device, backend: str, form: str
) -> None:
    """20 steps of 2^-14, a quarter of float16's ulp below 1; codes of a constant gradient's moments
    are off by an eighth each. Weight decay alone does the same.
    """
    decay = SIGN._replace(weight_decay=1.0)
    run = Updates(ROWS["adamw"], device, form, [SIGN, decay], [(200,)], 0.0)
    for i, param in enumerate(run.lists["params"]):
        for name in ("remainders", *run.row.states(SIGN)):
            run.lists[name][i].zero_()
        param.fill_(1.0)
        run.lists["grads"][i].fill_(0.5 if run.groups[i] == 0 else 0.0)
    for turn in range(20):
        run.step(backend)
        if turn == 0:
            assert all((m == 1.0 - 2.0**-14).all() for m in run.masters()[2:])
    allowed = 5 if run.form.state is CODES else 0.05
    for i, master in enumerate(run.masters()):
        assert ((1 - master) * 2.0**14 - 20).abs().max() < allowed
        assert is_rounded(run, i, master)


DECAYS = {  # format, rule, state, its decay in a step, and the weight of a gradient in it
    "adamw": ("bf16", SIGN._replace(lr=0.0), "exp_avg_sqs", 0.999, 1.0),
    "lion": ("8bit", ROWS["lion"].rules[0]._replace(lr=1e-3), "exp_avgs", 0.99, 0.01),
    "sgd": ("8bit", SGDRule(0.0, 0.99, 0.0, 0.0, False, False), "momentum_buffers", 0.99, 1.0),
}


@pytest.mark.parametrize("name", DECAYS)
def test_a_state_decays_and_follows(device: torch.device, backend: str, name: str) -> None:
    """A state decays in the mean without a gradient, and then follows one, although a step is a
    fourth of bfloat16's distance and a sixth of that of codes. Rounded to the nearest, the state
    would never change.

    6 deviations of the mean of 3000: a step adds p (1 - p) of a distance squared.
    """
    form, rule, state, beta, weight = DECAYS[name]
    runs = [Updates(ROWS[name], device, form, [rule], [(3000,)]) for _ in range(2)]
    for run in runs:
        if form == "bf16":
            run.lists[state][0].fill_(1.0)
        start = run.value(state, 0)
        run.lists["grads"] = [torch.zeros_like(g) for g in run.lists["grads"]]
        for _ in range(12):
            run.step(backend)
    distance, p = (2**-8, 1 / 4) if form == "bf16" else (1 / 8, 1 / 6)
    deviation = (12 * p * (1 - p) / 3000) ** 0.5 * distance
    assert 6 * deviation < 0.2 * (1 - beta**12), "a bound that can fail"
    ratio = run.value(state, 0) / start
    assert abs(ratio.mean().item() - beta**12) <= 6 * deviation
    assert torch.equal(runs[0].value(state, 0), run.value(state, 0))
    if form == "bf16":
        assert 1 < len(ratio.unique()) <= 4, "successive roundings spread evenly"
        return
    run.lists["grads"] = [torch.full_like(g, -0.02 / weight) for g in run.lists["grads"]]
    for _ in range(12):
        run.step(backend)
    expected = start * beta**24 - 2 * (1 - beta**12)
    assert abs((run.value(state, 0) - expected).mean().item()) <= 12 * deviation


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


def moved_bytes(form: Form, states: int, changes: bool, size: str = "real") -> tuple[float, float]:
    """Return the bytes that a step reads and writes for each element."""

    def of(dtype: torch.dtype) -> int:
        # the interpreter has bfloat16 in FP32
        return (dtype if size == "real" else stored(dtype)).itemsize

    state = (1 + 1 / BLOCK if form.state is CODES else of(form.state)) * states
    stays = of(form.param) + 2 * form.packed + state
    copied = of(form.copy) if form.copy else 0
    # the old copies are read, and the bits of earlier steps
    return stays + of(form.grad) + changes * (copied + 1 / 8), stays + copied + changes / 4


HEADLINES = {  # bytes of a parameter in each format; 2 more for statistics of gradients
    "adamw": {"masters": 28, "bf16": 20, "packed": 26, "packed bf16": 18, "8bit": 14 + 4 / BLOCK},
    "lion": {"masters": 20, "bf16": 16, "8bit": 12 + 2 / BLOCK},
    "sgd": {"masters": 20, "bf16": 16, "8bit": 12 + 2 / BLOCK},
    "rmsprop": {"masters": 20, "bf16": 16, "8bit": 12 + 2 / BLOCK},
}


@pytest.mark.parametrize("changes", [False, True])
@each_form()
@each_row
def test_bytes(
    triton_device: torch.device, traffic: Traffic, row: Row, form: str, changes: bool
) -> None:
    """256 elements more of the same programs move just the bytes of ``moved_bytes`` more. For the
    rest, numbers and pointers of each program, 2 % are enough. A skip reads the flag alone.
    """
    for rule in row.rules[:2]:
        found = []
        for n in (1 << 13, (1 << 13) - 256):
            run = Updates(row, triton_device, form, [rule], [(n,)], changes=changes)
            run.lists = {name: own[:1] for name, own in run.lists.items()}
            traffic.read = traffic.written = 0
            run.step("triton")
            found.append((traffic.read, traffic.written))
        expected = moved_bytes(run.form, len(row.states(rule)), changes, "stored")
        for more, less, each in zip(*found, expected, strict=True):
            assert more - less == 256 * each
            assert more <= 1.02 * each * (1 << 13)
        traffic.read = traffic.written = 0
        run.step("triton", None, 1.0)
        assert (traffic.read, traffic.written) == (4 * (2 + ("steps" in run.lists)), 0)
    if not changes and form in HEADLINES.get(row.update.name, {}):
        real = sum(moved_bytes(FORMS[form], len(row.states(row.rules[0])), False))
        assert real == HEADLINES[row.update.name][form]
