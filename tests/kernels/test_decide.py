"""Skip or go, and the loss-scale state machine against a model of it in plain Python; kernel and
twin alike.
"""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.conftest import numpy_warns
from tritonamp.kernels._decision import (
    COUNTS,
    EXCEEDING,
    FAULT,
    HUGE,
    LIMITS,
    LOSS,
    RECORD,
    SQUARES,
    VETO,
    VETOED,
    Evidence,
    Record,
    Undo,
    new_verdicts,
)
from tritonamp.kernels._loss_scale import ScaleRule, ScaleState
from tritonamp.kernels._multi_tensor import TensorLists
from tritonamp.kernels._squares import LARGEST_SQUARE, NO_SQUARES, Squares
from tritonamp.kernels.decide import decide
from tritonamp.kernels.device import INTERPRETED, why_not_triton
from tritonamp.kernels.grad_stats import grad_stats

pytestmark = numpy_warns

INF, NAN = float("inf"), float("nan")
FORMS = (
    ["eager", "triton"]
    if INTERPRETED or why_not_triton(torch.device("cuda")) is None
    else ["eager"]
)
AT = torch.device("cpu" if INTERPRETED or FORMS == ["eager"] else "cuda")


# the loss scale

RULES = st.builds(
    ScaleRule,
    growth_factor=st.sampled_from([2.0, 4.0]),
    backoff_factor=st.sampled_from([0.5, 0.25]),
    growth_interval=st.integers(1, 3),
    hysteresis=st.integers(1, 3),
    min_scale=st.sampled_from([2.0**-3, 1.0]),
    max_scale=st.sampled_from([1.0, 2.0**3]),
    headroom=st.just(0.0),
)
CLEAN = (0.0, 0.0)
OVERFLOWS = [(1.0, 0.0), (2.0, 0.0), (INF, 0.0), (NAN, 0.0)]  # found_inf, loss_nonfinite
FAULTS = [(1.0, 1.0), (0.0, 1.0), (2.0, 2.0), (0.0, 3.0)]  # the last one is a veto
EVENTS = st.one_of(st.just(CLEAN), st.sampled_from(OVERFLOWS), st.sampled_from(FAULTS))


class Specification:
    """The docstring of ``ScaleRule`` in other words."""

    def __init__(self, rule: ScaleRule) -> None:
        self.rule, self.scale = rule, 1.0
        self.clean_in_a_row = 0
        self.overflows_since_clean = 0

    def see(self, found_inf: float, loss_nonfinite: float) -> None:
        if loss_nonfinite:
            return
        if found_inf:  # NaN too
            self.clean_in_a_row = 0
            self.overflows_since_clean += 1
            if self.overflows_since_clean >= self.rule.hysteresis:
                self.scale = max(self.scale * self.rule.backoff_factor, self.rule.min_scale)
            return
        self.overflows_since_clean = 0
        self.clean_in_a_row += 1
        if self.clean_in_a_row == self.rule.growth_interval:
            self.clean_in_a_row = 0
            self.scale = min(self.scale * self.rule.growth_factor, self.rule.max_scale)


class Machine:
    def __init__(self, rule: ScaleRule, backend: str, device: torch.device) -> None:
        self.rule, self.backend = rule, backend
        self.tensors = ScaleState(
            torch.tensor(1.0, device=device),
            torch.tensor(0, dtype=torch.int32, device=device),
            torch.tensor(rule.hysteresis, dtype=torch.int32, device=device),
            torch.tensor(float(rule.max_scale), device=device),
        )

    def see(self, found_inf: float, loss_nonfinite: float, largest: float = 0.0) -> None:
        judge(
            [largest],
            loss_nonfinite=loss_nonfinite,
            found_earlier=found_inf,
            state=self.tensors,
            rule=self.rule,
            device=self.tensors.scale.device,
            backend=self.backend,
        )

    @property
    def state(self) -> tuple[float, int, int]:
        scale, growth_tracker, hysteresis_tracker, _ = self.tensors
        return scale.item(), int(growth_tracker), int(hysteresis_tracker)


@settings(max_examples=100, deadline=None, database=None, derandomize=True)
@given(RULES, st.lists(EVENTS, max_size=30))
def test_the_scale_moves_as_specified(rule: ScaleRule, events: list[tuple[float, float]]) -> None:
    follow(rule, events, "eager")


@pytest.mark.skipif("triton" not in FORMS, reason="no kernels here")
@settings(max_examples=40, deadline=None, database=None, derandomize=True)
@given(RULES, st.lists(EVENTS, max_size=15))
def test_the_scale_moves_as_specified_in_the_kernel(
    rule: ScaleRule, events: list[tuple[float, float]]
) -> None:
    follow(rule, events, "triton")


def follow(rule: ScaleRule, events: list[tuple[float, float]], backend: str) -> None:
    specification, machine = Specification(rule), Machine(rule, backend, AT)
    for event in events:
        before = machine.state
        specification.see(*event)
        machine.see(*event)
        patience = max(rule.hysteresis - specification.overflows_since_clean, 0)
        assert machine.state == (specification.scale, specification.clean_in_a_row, patience)
        assert rule.min_scale <= machine.state[0] <= rule.max_scale
        assert torch.frexp(machine.tensors.scale).mantissa == 0.5, "a power of two"
        assert event not in FAULTS or machine.state == before


def test_the_defaults_by_hand(device: torch.device, backend: str) -> None:
    machine = Machine(ScaleRule(2.0, 0.5, 2, 2, 2.0**-24, 2.0**24), backend, device)
    seen = []
    for event in [
        OVERFLOWS[0],
        OVERFLOWS[0],
        OVERFLOWS[0],
        CLEAN,
        CLEAN,
        OVERFLOWS[0],
        FAULTS[0],
        CLEAN,
        CLEAN,
        CLEAN,
    ]:
        machine.see(*event)
        seen.append(machine.state)
    assert seen == [
        (1.0, 0, 1),  # one overflow is forgiven
        (0.5, 0, 0),
        (0.25, 0, 0),  # patience comes back with a clean step only
        (0.25, 1, 2),
        (0.5, 0, 2),
        (0.5, 0, 1),
        (0.5, 0, 1),  # a fault: nothing
        (0.5, 1, 2),
        (1.0, 0, 2),
        (1.0, 1, 2),
    ]


def test_equal_bounds_fix_the_scale(device: torch.device, backend: str) -> None:
    machine = Machine(ScaleRule(2.0, 0.5, 1, 1, 1.0, 1.0), backend, device)
    for event in [CLEAN, *OVERFLOWS, CLEAN, *FAULTS]:
        machine.see(*event)
        assert machine.tensors.scale.item() == 1.0


def test_it_moves_in_place_and_keeps_dtypes(device: torch.device, backend: str) -> None:
    machine = Machine(ScaleRule(2.0, 0.5, 1, 1, 1.0, 8.0), backend, device)
    pointers = [t.data_ptr() for t in machine.tensors]
    for event in (CLEAN, OVERFLOWS[0]):
        machine.see(*event)
    assert [t.data_ptr() for t in machine.tensors] == pointers
    assert [t.dtype for t in machine.tensors] == [
        torch.float32,
        torch.int32,
        torch.int32,
        torch.float32,
    ]
    assert machine.state == (1.0, 0, 0)


def test_the_rule_may_hold_integers(device: torch.device, backend: str) -> None:
    machine = Machine(ScaleRule(2, 0.5, 1.0, 1.0, 1, 8), backend, device)
    for _ in range(4):
        machine.see(*CLEAN)
    assert machine.state == (8.0, 0, 1)


@pytest.mark.parametrize("scale", [2.0**-149, 2.0**-126, 1.0, 2.0**127])
def test_the_ends_of_fp32(device: torch.device, backend: str, scale: float) -> None:
    """Scales are rounded to FP32; the product may not pass the bounds, though infinite."""
    machine = Machine(ScaleRule(4.0, 0.25, 1, 1, 2.0**-149, 2.0**127), backend, device)
    machine.tensors.scale.fill_(scale)
    machine.see(*OVERFLOWS[0])
    assert machine.state[0] == max(scale / 4, 2.0**-149)
    machine.tensors.scale.fill_(scale)
    machine.see(*CLEAN)
    assert machine.state[0] == min(scale * 4, 2.0**127)


# decide


ROOMY = ScaleRule(2.0, 0.5, 5, 1, 2.0**-24, 2.0**24, headroom=2.0**12)
GRADIENTS = st.sampled_from([0.0, 2.0**-30, 1e-3, 1.0, 2.0**4, 1e6])


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=40, deadline=None, database=None, derandomize=True)
@given(st.lists(st.tuples(EVENTS, GRADIENTS), max_size=15))
def test_headroom_keeps_the_scale_within_bounds(
    form: str, events: list[tuple[tuple[float, float], float]]
) -> None:
    machine = Machine(ROOMY, form, AT)
    ceiling = ROOMY.max_scale
    for event, largest in events:
        scale, tracker, _ = machine.state
        machine.see(*event, largest)
        after = machine.state[0]
        assert (
            ROOMY.min_scale <= after <= ROOMY.max_scale
            and torch.frexp(torch.tensor(after)).mantissa == 0.5
        )
        due = tracker + 1 == ROOMY.growth_interval
        if event in FAULTS:
            assert after == scale
        elif event[0] != 0.0:
            assert after == max(scale / 2, ROOMY.min_scale)
            ceiling = after if tracker > 0 else ceiling
        else:
            room = (
                2 * scale <= ceiling and largest * min(2 * scale, ROOMY.max_scale) <= ROOMY.headroom
            )
            assert after == min(2 * scale, ROOMY.max_scale) if room or due else after == scale
            ceiling = ROOMY.max_scale if due else ceiling


def test_headroom_recovers_from_a_burst_within_fifty_steps(
    device: torch.device, backend: str
) -> None:
    """Forty overflows in a row; then back to just below where they began, not to where the next one
    would follow.
    """
    machine = Machine(ROOMY._replace(growth_interval=2000), backend, device)
    for _ in range(60):
        machine.see(0.0, 0.0, 2.0**-6)
    assert machine.state[0] == 2.0**18, "2**-6 times that is the headroom"
    for _ in range(40):
        machine.see(1.0, 0.0, INF)
    assert machine.state[0] == 2.0**-22
    for _ in range(50):
        machine.see(0.0, 0.0, 2.0**-6)
    assert machine.state[0] == 2.0**17


RULE = ScaleRule(2.0, 0.5, 2, 1, 2.0**-24, 2.0**24)


def judge(
    amax: Any,
    square_sum: Any = None,
    loss_nonfinite: float | None = 0.0,
    scale: float = 1.0,
    max_norm: float | None = None,
    found_earlier: float | None = 0.0,
    state: ScaleState | None = None,
    rule: ScaleRule = RULE,
    record: Record | None = None,
    *,
    squares: Squares = NO_SQUARES,
    loss: Tensor | None = None,
    undo: Undo | None = None,
    device: torch.device,
    backend: str,
) -> tuple[float, float, float]:
    square_sum = [0.0] * len(amax) if square_sum is None else square_sum
    nonfinite, earlier, used_scale = (
        None if value is None else torch.tensor(value, device=device)
        for value in (loss_nonfinite, found_earlier, scale)
    )
    stats = (
        torch.as_tensor(values, dtype=torch.float32, device=device) for values in (amax, square_sum)
    )
    verdict = new_verdicts(1, torch.device(device))[0]
    verdict.numbers.fill_(-7.0)
    evidence = Evidence(*stats, nonfinite, earlier, loss)
    decide(evidence, used_scale, max_norm, state, rule, squares, record, verdict, backend, undo)
    found_inf, norm, factor, flag = verdict.numbers.tolist()
    if loss_nonfinite is None:
        loss_nonfinite = float(loss is not None and not loss.isfinite())
    assert flag in (loss_nonfinite, EXCEEDING) or loss_nonfinite != loss_nonfinite
    return found_inf, norm, factor


def test_verdicts_of_one_piece_are_apart(device: torch.device) -> None:
    """Each tensor is at a multiple of 16 bytes, and a number belongs to one verdict."""
    verdicts = new_verdicts(3, device)
    for k, verdict in enumerate(verdicts):
        verdict.numbers.copy_(torch.arange(4.0) + 10 * k)
    for k, verdict in enumerate(verdicts):
        parts = verdict.found_inf, verdict.norm, verdict.grad_scale, verdict.flag
        assert [float(part) for part in parts] == [10.0 * k + i for i in range(4)]
        assert not any(part.data_ptr() & 15 for part in parts)


@pytest.mark.parametrize(
    ("amax", "scale", "skips"),
    [
        ([], 1.0, False),
        ([0.0, 65504.0, 3.4e38], 1.0, False),
        ([1.0, INF, 2.0], 1.0, True),
        ([1.0, 2.0, NAN], 1.0, True),
        ([NAN, INF, 1.0], 1.0, True),
        # finite as it is, not once it is unscaled
        ([1.0, 1.5], 2.0**-127, False),
        ([1.0, 2.0], 2.0**-127, True),
        ([1e30], 2.0**-24, False),
        ([1e33], 2.0**-24, True),
        # 1/scale itself leaves FP32
        ([0.0], 2.0**-128, True),
        ([], 2.0**-149, True),
        ([0.0], 0.0, True),
        ([], NAN, True),
        ([0.0], INF, False),
    ],
)
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_what_skips(
    device: torch.device,
    backend: str,
    amax: list[float],
    scale: float,
    skips: bool,
    max_norm: float | None,
) -> None:
    found = judge(amax, scale=scale, max_norm=max_norm, device=device, backend=backend)[0]
    assert found == float(skips)


@pytest.mark.parametrize("bad", [INF, NAN])
@pytest.mark.parametrize("place", [0, 1023, 1024, 2048])
def test_one_bad_gradient_of_many(
    device: torch.device, backend: str, place: int, bad: float
) -> None:
    """At both ends of the kernel's tiles."""
    amax = torch.ones(2049)
    assert judge(amax, device=device, backend=backend)[0] == 0.0
    amax[place] = bad
    assert judge(amax, device=device, backend=backend)[0] == 1.0


@pytest.mark.parametrize("amax", [1.0, INF])
def test_a_fault_of_the_loss_skips(device: torch.device, backend: str, amax: float) -> None:
    assert judge([amax], loss_nonfinite=1.0, device=device, backend=backend)[0] == 1.0


@pytest.mark.parametrize("found_earlier", [1.0, 2.0, INF])
def test_what_was_found_earlier_skips(
    device: torch.device, backend: str, found_earlier: float
) -> None:
    assert judge([1.0], found_earlier=found_earlier, device=device, backend=backend)[0] != 0.0


@pytest.mark.parametrize("flag", ["found_earlier", "loss_nonfinite"])
def test_a_flag_that_is_not_a_number_skips(device: torch.device, backend: str, flag: str) -> None:
    assert judge([1.0], **{flag: NAN}, device=device, backend=backend)[0] != 0.0


@pytest.mark.parametrize("scale", [2.0**-24, 1.0, 3.0, 2.0**16])
def test_norm_and_factor(device: torch.device, backend: str, scale: float) -> None:
    """sqrt(9 + 16 + 0 + 144) = 13, over the scale; 1/scale is rounded once, the norm twice."""
    at = {"device": device, "backend": backend}
    found_inf, norm, factor = judge([3.0] * 4, [9.0, 16.0, 0.0, 144.0], scale=scale, **at)
    assert found_inf == 0.0
    assert factor == torch.tensor(1 / scale).item()
    assert norm == pytest.approx(13 / scale, rel=2**-23)
    assert judge([], scale=scale, **at) == (0.0, 0.0, factor)


def test_the_squares_are_summed_beyond_fp32(device: torch.device, backend: str) -> None:
    """In FP32 one after another, the 2**6 are lost after a while, the 2**127 overflow at once."""
    at = {"device": device, "backend": backend}
    norm = judge([1.0] * 4096, [2.0**24 + 2.0**6] * 4096, **at)[1]
    assert norm == pytest.approx(2.0**18 * (1 + 2.0**-19), rel=2**-23)
    assert judge([1.0] * 16, [2.0**127] * 16, **at)[1] == pytest.approx(2.0**65.5, rel=2**-23)


@pytest.mark.parametrize("parts", [0, 1, 1023, 1024, 1025, 2049])
def test_every_part_counts_once(device: torch.device, backend: str, parts: int) -> None:
    """More parts than gradients, and fewer. The sum is a square: no rounding at all but one in the
    FP64 root.
    """
    squares = torch.arange(parts).square().float()
    exact = torch.arange(parts).double().square().sum().sqrt().float().item()
    assert judge([1.0] * 3, squares, device=device, backend=backend)[1] == exact
    assert judge([1.0] * 2000, squares, device=device, backend=backend)[1] == exact


SPLIT = ([3.0, -4.0], [12.0])  # norms 5, 12; together 13, without any rounding


@pytest.mark.parametrize("max_norm", [0.0, 1e-6, 1.0, 12.99, 13.0, 13.01, 100.0, INF])
@pytest.mark.parametrize("size", [1.0, 2.0**-20, 2.0**-30])
@pytest.mark.parametrize("scale", [2.0**-10, 1.0, 2.0**16])
def test_clipping_is_torchs(
    device: torch.device, backend: str, size: float, scale: float, max_norm: float
) -> None:
    """At the small sizes torch's 1e-6 in the denominator tells. Roundings: sum, quotient, product,
    and in our form the norm's: within 4 u = 2**-22; powers of two cost none.
    """
    grads = [torch.tensor(values, device=device) * size for values in SPLIT]
    params = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    norm_of_torch = torch.nn.utils.clip_grad_norm_(params, max_norm)

    scaled = [grad * scale for grad in grads]
    stats = grad_stats(TensorLists(grads=scaled), device, backend)
    found_inf, norm, factor = judge(
        *stats, scale=scale, max_norm=max_norm, device=device, backend=backend
    )
    assert found_inf == 0.0
    torch.testing.assert_close(norm, norm_of_torch.item(), rtol=2**-22, atol=0)
    for param, grad in zip(params, scaled, strict=True):
        torch.testing.assert_close(grad * factor, param.grad, rtol=2**-22, atol=0)
    if max_norm > 13 * size + 1e-6:
        assert factor == 1 / scale, "below the limit: untouched"


def squares_overflow(device: torch.device, backend: str) -> tuple[Tensor, Tensor]:
    grads = [torch.full((4,), 1e30, dtype=torch.bfloat16, device=device)]
    return grad_stats(TensorLists(grads=grads), device, backend)


def test_a_norm_beyond_fp32_is_inf_and_clips_to_zero_as_in_torch(
    device: torch.device, backend: str
) -> None:
    """Finite bf16 gradients whose squares leave FP32 are not non-finite gradients."""
    param = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16, device=device))
    param.grad = torch.full_like(param, 1e30)
    assert torch.nn.utils.clip_grad_norm_(param, 1.0) == INF
    assert not param.grad.any()
    stats, at = squares_overflow(device, backend), {"device": device, "backend": backend}
    assert judge(*stats, **at) == (0.0, INF, 1.0)
    assert judge(*stats, max_norm=1.0, **at) == (0.0, INF, 0.0)


def test_a_factor_that_is_not_a_number_skips(device: torch.device, backend: str) -> None:
    """inf / inf: limit and norm are both infinite. torch makes all gradients NaN here."""
    stats = squares_overflow(device, backend)
    found_inf, norm, factor = judge(*stats, max_norm=INF, device=device, backend=backend)
    assert (found_inf, norm) == (1.0, INF)
    assert factor != factor


# the loss scale, and the record


def scale_state(device: torch.device, scale: float, growth: int, hysteresis: int) -> ScaleState:
    counts = (torch.tensor(n, dtype=torch.int32, device=device) for n in (growth, hysteresis))
    return ScaleState(
        torch.tensor(scale, device=device), *counts, torch.tensor(2.0**24, device=device)
    )


@pytest.mark.parametrize("fault", [0.0, 1.0])
def test_a_gradient_moves_the_scale_like_a_flag(
    device: torch.device, backend: str, fault: float
) -> None:
    for growth, hysteresis in itertools.product((0, 1), (0, 1, 2)):
        moved, expected = (scale_state(device, 8.0, growth, hysteresis) for _ in range(2))
        how = {"rule": RULE._replace(hysteresis=2), "device": device, "backend": backend}
        judge([1.0, INF], loss_nonfinite=fault, state=moved, **how)
        judge([1.0], loss_nonfinite=fault, found_earlier=1.0, state=expected, **how)
        assert moved == expected


def test_the_scale_that_the_backward_used_may_be_the_one_that_moves(
    device: torch.device, backend: str
) -> None:
    """The gradients are unscaled by what it was."""
    state, verdict = scale_state(device, 8.0, 1, 1), new_verdicts(1, device)[0]
    stats, zero = torch.ones(1, device=device), torch.zeros((), device=device)
    numbers = torch.zeros(RECORD, dtype=torch.float64, device=device)
    record = Record(numbers, torch.zeros(0, dtype=torch.int64, device=device), [])
    how = None, state, RULE, NO_SQUARES, record, verdict, backend
    decide(Evidence(stats, stats, zero, zero, zero + 5.0), state.scale, *how)
    assert (state.scale.item(), verdict.numbers.tolist()) == (16.0, [0.0, 0.125, 0.125, 0.0])
    stats = stats * INF
    decide(Evidence(stats, stats, zero, zero, zero + 6.0), state.scale, *how)
    assert state.scale.item() == 8.0
    numbers = numbers.tolist()
    assert numbers == [1.0, 1.0, *[0.0] * 4, 0.125, 0.125, 0.0, 16.0, 1.0, 16.0, 6.0, *[0.0] * 7]


def record_of(device: torch.device, places: list[int]) -> Record:
    numbers = torch.arange(100.0, 100.0 + RECORD + len(places), dtype=torch.float64, device=device)
    return Record(numbers, torch.tensor(places, dtype=torch.int64, device=device), [])


def known(record: Record) -> list[float]:
    """Return the numbers that a decision without a loss writes, but for NaN as its loss.

    The count of outliers and their numbers stay.

    No optimizer squares here, so that the bound of squares is 0 from the first clean one on.
    """
    clean, overflow, fault, outlier, veto, huge, norm, amax, bound, *others = (
        record.numbers.tolist()
    )
    assert (outlier, huge, others[4:11]) == (103, 105, list(range(113, 120)))
    assert bound == (0.0 if clean > 100 else 108) and math.isnan(others[3])
    return [clean, overflow, fault, veto, norm, amax, *others[:3], *others[11:]]


def test_the_record_by_hand(device: torch.device, backend: str) -> None:
    record = record_of(device, [2, -1, 0, 2])
    pointer, at = (
        record.numbers.data_ptr(),
        {"record": record, "device": device, "backend": backend},
    )
    judge([1.0, 2.0, 3.0], [4.0], scale=0.5, **at)
    assert known(record) == [101, 101, 102, 104, 4.0, 6.0, 0.5, 110, 111, *range(120, 124)]
    judge([1.0, 2.0, INF], [9.0], scale=4.0, **at)
    assert known(record) == [101, 102, 102, 104, 4, 6, 4.0, 1.0, 4.0, INF, 0.0, 1.0, INF]
    judge([5.0, 2.0, 3.0], [9.0], scale=8.0, loss_nonfinite=1.0, **at)
    assert known(record) == [101, 102, 103, 104, 4, 6, 8.0, 2.0, 8.0, 3.0, 0.0, 5.0, 3.0]
    judge([5.0, 2.0, 7.0], [9.0], found_earlier=1.0, **at)
    assert known(record) == [101, 103, 103, 104, 4, 6, 1.0, 1.0, 1.0, 7.0, 0.0, 5.0, 7.0]
    judge([5.0, INF, 9.0], [9.0], scale=2.0, loss_nonfinite=VETOED, **at)
    assert known(record) == [101, 103, 103, 105, 4, 6, 2.0, 4.0, 2.0, 9.0, 0.0, 5.0, 9.0]
    judge([8.0] * 3, [36.0], **at)
    assert known(record) == [102, 103, 103, 105, 6, 8, 1.0, 4.0, 2.0, 9.0, 0.0, 5.0, 9.0]
    assert record.numbers.data_ptr() == pointer
    assert record.places.tolist() == [2, -1, 0, 2]


@pytest.mark.parametrize("names", [0, 1, 1023, 1024, 1025, 2050])
def test_the_record_of_many(device: torch.device, backend: str, names: int) -> None:
    amax = torch.arange(1.0, 1500.0)
    amax[7] = NAN
    places = torch.randint(-1, 1499, (names,))
    record = record_of(device, places.tolist())
    judge(amax, record=record, device=device, backend=backend)
    expected = torch.where(places < 0, 0.0, amax[places]).double()
    torch.testing.assert_close(
        record.numbers[RECORD:].cpu(), expected, rtol=0, atol=0, equal_nan=True
    )
    counts = [100, 102, 102, 103, 104, 105]
    found = record.numbers[:RECORD].tolist()
    assert math.isnan(found.pop(LOSS))
    assert found == [*counts, 106, 107, 108, 1, 1, 1, *range(113, 120)]


def test_a_record_of_nothing(device: torch.device, backend: str) -> None:
    """No gradient at all, and names for some."""
    record = record_of(device, [-1, -1])
    at = {"record": record, "device": device, "backend": backend}
    assert judge([], **at) == (0.0, 0.0, 1.0)
    judge([], loss_nonfinite=1.0, scale=2.0, **at)
    assert known(record) == [101, 101, 103, 104, 0.0, 0.0, 2.0, 2.0, 2.0, 0.0, 0.0]


LOSSES = [
    (5.0, torch.float32),
    (0.0, torch.float32),
    (-3.4e38, torch.float32),
    (INF, torch.float32),
    (-INF, torch.float32),
    (NAN, torch.float32),
    (1e300, torch.float64),
    (INF, torch.float64),
]


@pytest.mark.parametrize(("value", "dtype"), LOSSES)
@pytest.mark.parametrize("flag", [None, 0.0, 1.0, VETOED])
def test_the_loss_is_noted_and_judged_unless_there_is_a_flag(
    device: torch.device, backend: str, value: float, dtype: torch.dtype, flag: float | None
) -> None:
    record, loss = record_of(device, []), torch.tensor(value, dtype=dtype, device=device)
    flags = {"loss_nonfinite": flag, "found_earlier": flag}
    found = judge([1.0], **flags, loss=loss, record=record, device=device, backend=backend)[0]
    counts, noted = record.numbers[:6].tolist(), record.numbers[LOSS].cpu()
    assert torch.equal(noted, loss.double().cpu()) or noted.isnan() & loss.isnan().cpu()
    clean = COUNTS["clean"]
    outcome = FAULT if flag is None and not math.isfinite(value) else clean
    outcome = {1.0: FAULT, VETOED: VETO}.get(flag, outcome)
    assert counts == [100 + i + (i == outcome) for i in range(6)]
    assert (found != 0.0) == (outcome != clean)


def test_an_unknown_loss_without_a_flag_is_finite(device: torch.device, backend: str) -> None:
    at = {"loss_nonfinite": None, "found_earlier": None, "device": device, "backend": backend}
    assert judge([1.0], **at)[0] == 0.0
    assert judge([INF], **at)[0] == 1.0


@pytest.mark.parametrize("names", [0, 3, 1024, 1100])
@pytest.mark.parametrize("moves", [True, False])
@pytest.mark.parametrize("amax", [1.0, INF])
def test_a_decision_is_undone_to_the_bit(
    device: torch.device, backend: str, names: int, moves: bool, amax: float
) -> None:
    """And decided again with the same result; a decision that is kept stays as it is."""
    record, state = record_of(device, [0] * names), scale_state(device, 3.0, 7, 2)
    at = {"state": state if moves else None, "record": record, "device": device}
    moved = record.numbers, *state
    before, after = [tensor.clone() for tensor in moved], []
    for unless in (None, 0.0, 2.0):
        undo = Undo(record, state if moves else None)
        judge([amax], scale=3.0, undo=undo, backend=backend, **at)
        after.append([tensor.tolist() for tensor in moved])
        assert not torch.equal(record.numbers, before[0])
        undo(None if unless is None else torch.tensor(unless, device=device))
        if unless != 2.0:
            assert all(map(torch.equal, moved, before))
        undo()  # only once
    assert str(after[0]) == str(after[1]) == str(after[2])
    assert str([tensor.tolist() for tensor in moved]) == str(after[2])


def test_nothing_is_restored_that_no_decision_has_moved(device: torch.device) -> None:
    record, other = record_of(device, [0]), torch.ones(3, device=device)
    undo = Undo(record, None, [other, record.numbers[LIMITS:RECORD]])
    undo.memory.fill_(-1.0)
    record.numbers[LIMITS:RECORD] = other.zero_()[0]
    undo()
    assert other.tolist() == [1.0] * 3
    assert record.numbers.tolist() == list(range(100, 100 + RECORD + 1))


EDGE = LARGEST_SQUARE**0.5  # the largest gradient whose square is within the bound


@pytest.mark.parametrize("scale", [1.0, 2.0**-10, 2.0**30])
@pytest.mark.parametrize("decay", [0.0, 0.5, 0.75])
def test_a_gradient_whose_square_leaves_fp32(
    device: torch.device, backend: str, decay: float, scale: float
) -> None:
    """Just below the edge it is clean, just above a skip of its own, after which nothing moves."""
    edge = EDGE / (1 - decay) ** 0.5
    for largest, is_huge in ((0.999 * edge, False), (1.001 * edge, True), (INF, False)):
        record, state = record_of(device, [0]), scale_state(device, 4.0, 1, 0)
        record.numbers[SQUARES] = 0.0
        at = {"state": state, "record": record, "device": device, "backend": backend}
        squares = Squares(decay, 1 - decay)
        amax = [1.0, largest * scale]
        skips, _, factor = judge(amax, scale=scale, squares=squares, **at)
        numbers = record.numbers.tolist()
        assert (numbers[HUGE], skips) == (105 + is_huge, is_huge or largest == INF)
        assert factor == 1 / scale
        assert not is_huge or (state == scale_state(device, 4.0, 1, 0) and numbers[SQUARES] == 0.0)
        assert (
            is_huge
            or largest == INF
            or numbers[SQUARES] == pytest.approx(0.998 * LARGEST_SQUARE, 1e-3)
        )


MAGNITUDES = st.one_of(
    st.sampled_from([0.0, INF, NAN, 2.0**-149, 3.4e38, 65504.0]),
    st.floats(0, 2.0**127, width=32, allow_nan=False),
)
SCALES = st.sampled_from(
    [*(2.0**k for k in (-149, -148, -127, -126, -24, 0, 16, 24, 127)), 0.0, 3.0, 1e-40, INF]
)
FLAGS = st.sampled_from([0.0, 0.0, 1.0, 2.0, VETOED, INF])


@pytest.mark.skipif("triton" not in FORMS, reason="no kernels here")
@settings(max_examples=120, deadline=None, database=None, derandomize=True)
@given(
    st.lists(MAGNITUDES, max_size=3),
    st.lists(MAGNITUDES, max_size=3),
    FLAGS,
    FLAGS,
    SCALES,
    st.sampled_from([None, 0.0, 1e-6, 1.0, 3.0, 1e30, INF]),
    st.sampled_from([None, (1.0, 0, 1), (2.0**-24, 1, 0), (2.0**24, 1, 3), (3.0, 0, 2)]),
    st.one_of(st.none(), st.lists(st.integers(-1, 2), max_size=3)),
    st.sampled_from([NO_SQUARES, Squares(0.75, 0.25), Squares(1.0, 1.0), Squares(0.0, 2.0**20)]),
    st.sampled_from([None, 0.5, INF, NAN]),
    st.booleans(),
)
def test_the_kernel_decides_like_its_twin(
    amax: list[float],
    square_sum: list[float],
    fault: float,
    earlier: float,
    scale: float,
    max_norm: float | None,
    state: tuple[float, int, int] | None,
    places: list[int] | None,
    squares: Squares,
    value: float | None,
    flagged: bool,
) -> None:
    """Bit by bit, but for the norm in FP64: summed in another order it may round to the next
    FP32 number, and the clip coefficient adds two roundings of its own.
    """
    rule = RULE._replace(hysteresis=2)
    loss = None if value is None else torch.tensor(value, device=AT)
    results = []
    for backend in FORMS:
        moved = scale_state(AT, *state) if state else None
        record = (
            None
            if places is None
            else record_of(AT, [min(place, len(amax) - 1) for place in places])
        )
        verdict = judge(
            amax,
            square_sum,
            fault if flagged else None,
            scale,
            max_norm,
            earlier if flagged else None,
            moved,
            rule,
            record,
            squares=squares,
            loss=loss,
            device=AT,
            backend=backend,
        )
        numbers = [] if record is None else record.numbers.tolist()
        results.append((verdict, [t.item() for t in moved or ()], numbers))
    (verdict, moved, numbers), other = results
    close = {"rtol": 2**-22, "atol": 2.0**-148, "equal_nan": True}
    assert verdict[0] == other[0][0]
    torch.testing.assert_close(torch.tensor(verdict), torch.tensor(other[0]), **close)
    assert moved == other[1]
    torch.testing.assert_close(torch.tensor(numbers), torch.tensor(other[2]), **close)
    for found in numbers, other[2]:
        # the loss is compared above; NaN is equal to nothing
        del found[LOSS : LOSS + 1]
    assert numbers[:6] + numbers[7 : RECORD - 1] == other[2][:6] + other[2][7 : RECORD - 1]


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_what_a_decision_reads_and_writes(
    triton_device: torch.device, traffic: Any, max_norm: float | None
) -> None:
    """Gradients' numbers once, and the three flags."""
    judge([1.0] * 1500, [1.0] * 1100, max_norm=max_norm, device=triton_device, backend="triton")
    assert (traffic.read, traffic.written) == (4 * (1500 + 1100 + 3), 16)
