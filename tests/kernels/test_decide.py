"""Skip or go, and the loss-scale state machine against a model of it in plain Python."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tritonamp.kernels.decide import ScaleRule, decide, update_scale
from tritonamp.kernels.grad_stats import grad_stats

INF, NAN = float("inf"), float("nan")


# update_scale

RULES = st.builds(
    ScaleRule,
    growth_factor=st.sampled_from([2.0, 4.0]),
    backoff_factor=st.sampled_from([0.5, 0.25]),
    growth_interval=st.integers(1, 3),
    hysteresis=st.integers(1, 3),
    min_scale=st.sampled_from([2.0**-3, 1.0]),
    max_scale=st.sampled_from([1.0, 2.0**3]),
)
CLEAN = (0.0, 0.0)
OVERFLOWS = [(1.0, 0.0), (2.0, 0.0), (INF, 0.0), (NAN, 0.0)]  # found_inf, loss_nonfinite
FAULTS = [(1.0, 1.0), (0.0, 1.0), (2.0, 2.0)]
EVENTS = st.one_of(st.just(CLEAN), st.sampled_from(OVERFLOWS), st.sampled_from(FAULTS))


class Specification:
    """The docstring of ``update_scale`` in other words."""

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
    def __init__(self, rule: ScaleRule, device: torch.device | None = None) -> None:
        self.rule = rule
        self.scale = torch.tensor(1.0, device=device)
        self.growth_tracker = torch.tensor(0, dtype=torch.int32, device=device)
        self.hysteresis_tracker = torch.tensor(rule.hysteresis, dtype=torch.int32, device=device)

    def see(self, found_inf: float, loss_nonfinite: float) -> None:
        flags = (torch.tensor(flag, device=self.scale.device) for flag in (found_inf, loss_nonfinite))
        update_scale(self.scale, self.growth_tracker, self.hysteresis_tracker, *flags, self.rule)

    @property
    def state(self) -> tuple[float, int, int]:
        return self.scale.item(), int(self.growth_tracker), int(self.hysteresis_tracker)


@settings(max_examples=300, deadline=None, database=None, derandomize=True)
@given(RULES, st.lists(EVENTS, max_size=30))
def test_the_scale_moves_as_specified(rule: ScaleRule, events: list[tuple[float, float]]) -> None:
    specification, machine = Specification(rule), Machine(rule)
    for event in events:
        before = machine.state
        specification.see(*event)
        machine.see(*event)
        patience = max(rule.hysteresis - specification.overflows_since_clean, 0)
        assert machine.state == (specification.scale, specification.clean_in_a_row, patience)
        assert rule.min_scale <= machine.state[0] <= rule.max_scale
        assert torch.frexp(machine.scale).mantissa == 0.5, "a power of two"
        assert event not in FAULTS or machine.state == before


def test_the_defaults_by_hand(device: torch.device) -> None:
    machine = Machine(ScaleRule(2.0, 0.5, 2, 2, 2.0**-24, 2.0**24), device)
    seen = []
    for event in [OVERFLOWS[0], OVERFLOWS[0], OVERFLOWS[0], CLEAN, CLEAN, OVERFLOWS[0], FAULTS[0], CLEAN, CLEAN, CLEAN]:
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


def test_equal_bounds_fix_the_scale(device: torch.device) -> None:
    machine = Machine(ScaleRule(2.0, 0.5, 1, 1, 1.0, 1.0), device)
    for event in [CLEAN, *OVERFLOWS, CLEAN, *FAULTS]:
        machine.see(*event)
        assert machine.scale.item() == 1.0


def test_it_moves_in_place_and_keeps_dtypes(device: torch.device) -> None:
    machine = Machine(ScaleRule(2.0, 0.5, 1, 1, 1.0, 8.0), device)
    tensors = (machine.scale, machine.growth_tracker, machine.hysteresis_tracker)
    for event in (CLEAN, OVERFLOWS[0]):
        machine.see(*event)
    assert [t.dtype for t in tensors] == [torch.float32, torch.int32, torch.int32]
    assert machine.state == (1.0, 0, 0)


# decide


def judge(
    amax: list[float],
    square_sum: list[float] | None = None,
    loss_nonfinite: float = 0.0,
    scale: float = 1.0,
    max_norm: float | None = None,
    device: torch.device | None = None,
) -> tuple[float, float, float]:
    square_sum = [0.0] * len(amax) if square_sum is None else square_sum
    flags = (torch.tensor(value, device=device) for value in (loss_nonfinite, scale))
    stats = (torch.tensor(values, dtype=torch.float32, device=device) for values in (amax, square_sum))
    result = decide(*stats, *flags, max_norm)
    assert all(t.dtype is torch.float32 and t.shape == () for t in result)
    found_inf, norm, grad_scale = (t.item() for t in result)
    return found_inf, norm, grad_scale


@pytest.mark.parametrize(
    ("amax", "scale", "skips"),
    [
        ([], 1.0, False),
        ([0.0, 65504.0, 3.4e38], 1.0, False),
        ([1.0, INF, 2.0], 1.0, True),
        ([1.0, 2.0, NAN], 1.0, True),
        # finite as it is, not once it is unscaled
        ([1.0, 1.5], 2.0**-127, False),
        ([1.0, 2.0], 2.0**-127, True),
        ([1e30], 2.0**-24, False),
        ([1e33], 2.0**-24, True),
        # 1/scale itself leaves FP32
        ([0.0], 2.0**-128, True),
        ([], 2.0**-149, True),
        ([0.0], 0.0, True),
    ],
)
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_what_skips(device: torch.device, amax: list[float], scale: float, skips: bool, max_norm: float | None) -> None:
    assert bool(judge(amax, scale=scale, max_norm=max_norm, device=device)[0]) == skips


@pytest.mark.parametrize("amax", [1.0, INF])
def test_a_fault_of_the_loss_skips(device: torch.device, amax: float) -> None:
    assert judge([amax], loss_nonfinite=1.0, device=device)[0] == 1.0


@pytest.mark.parametrize("scale", [2.0**-24, 1.0, 3.0, 2.0**16])
def test_norm_and_factor(device: torch.device, scale: float) -> None:
    """sqrt(9 + 16 + 0 + 144) = 13, over the scale; 1/scale is rounded once, the norm twice."""
    found_inf, norm, grad_scale = judge([3.0] * 4, [9.0, 16.0, 0.0, 144.0], scale=scale, device=device)
    assert found_inf == 0.0
    assert grad_scale == torch.tensor(1 / scale).item()
    assert norm == pytest.approx(13 / scale, rel=2**-23)
    assert judge([], scale=scale, device=device) == (0.0, 0.0, grad_scale)


def test_the_squares_are_summed_beyond_fp32(device: torch.device) -> None:
    """In FP32 one after another, the 2**6 are lost after a while, and the 2**127 overflow at once."""
    assert judge([1.0] * 4096, [2.0**24 + 2.0**6] * 4096, device=device)[1] == pytest.approx(
        2.0**18 * (1 + 2.0**-19), rel=2**-23
    )
    assert judge([1.0] * 16, [2.0**127] * 16, device=device)[1] == pytest.approx(2.0**65.5, rel=2**-23)


SPLIT = ([3.0, -4.0], [12.0])  # norms 5, 12; together 13, without any rounding


@pytest.mark.parametrize("max_norm", [0.0, 1e-6, 1.0, 12.99, 13.0, 13.01, 100.0, INF])
@pytest.mark.parametrize("size", [1.0, 2.0**-20, 2.0**-30])
@pytest.mark.parametrize("scale", [2.0**-10, 1.0, 2.0**16])
def test_clipping_is_torchs(device: torch.device, size: float, scale: float, max_norm: float) -> None:
    """At the small sizes torch's 1e-6 in the denominator tells. Roundings: sum, quotient, product, and in our form the
    norm's: within 4 u = 2**-22; powers of two cost none."""
    grads = [torch.tensor(values, device=device) * size for values in SPLIT]
    params = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    norm_of_torch = torch.nn.utils.clip_grad_norm_(params, max_norm)

    scaled = [grad * scale for grad in grads]
    zero, scale_tensor = torch.zeros((), device=device), torch.tensor(scale, device=device)
    found_inf, norm, grad_scale = decide(*grad_stats(scaled, device), zero, scale_tensor, max_norm)
    assert found_inf.item() == 0.0
    torch.testing.assert_close(norm, norm_of_torch, rtol=2**-22, atol=0)
    for param, grad in zip(params, scaled, strict=True):
        torch.testing.assert_close(grad * grad_scale, param.grad, rtol=2**-22, atol=0)
    if max_norm > 13 * size + 1e-6:
        assert grad_scale.item() == 1 / scale, "below the limit: untouched"


def squares_overflow(device: torch.device) -> tuple[Tensor, Tensor]:
    return grad_stats([torch.full((4,), 1e30, dtype=torch.bfloat16, device=device)], device)


def test_a_norm_beyond_fp32_is_inf_and_clips_to_zero_as_in_torch(device: torch.device) -> None:
    """Finite bf16 gradients whose squares leave FP32 are not non-finite gradients."""
    param = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16, device=device))
    param.grad = torch.full_like(param, 1e30)
    assert torch.nn.utils.clip_grad_norm_(param, 1.0) == INF
    assert not param.grad.any()
    zero, one = torch.zeros((), device=device), torch.ones((), device=device)
    assert [t.item() for t in decide(*squares_overflow(device), zero, one, None)] == [0.0, INF, 1.0]
    assert [t.item() for t in decide(*squares_overflow(device), zero, one, 1.0)] == [0.0, INF, 0.0]


def test_a_factor_that_is_not_a_number_skips(device: torch.device) -> None:
    """inf / inf: limit and norm are both infinite. torch makes all gradients NaN here."""
    zero, one = torch.zeros((), device=device), torch.ones((), device=device)
    found_inf, norm, _ = decide(*squares_overflow(device), zero, one, INF)
    assert (found_inf.item(), norm.item()) == (1.0, INF)
