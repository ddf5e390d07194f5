"""Overflows in a row: a scale that is far too high, or a backward that no scale helps."""

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import take_step
from torch import Tensor, nn
from torch.nn import functional

import tritonamp
from tritonamp.diagnosis.causes import find_cause
from tritonamp.diagnosis.skips import Cause, Overflow, Skip
from tritonamp.kernels._decision import OVERFLOW

INF, NAN = math.inf, math.nan
A = frozenset("a")
USUAL = Skip(
    outcome=OVERFLOW,
    step=3,
    exact=True,
    skipped=3,
    since=3,
    scale=16384.0,
    lowest=2.0**-24,
    fixed=False,
    amax={"a": NAN, "b": 1.0},
    before=0.0,
    limit=65504.0,
    loss=1.5,
    row=(Overflow(65536.0, A), Overflow(32768.0, A)),
)


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({}, Cause.BACKWARD),
        ({"row": USUAL.row[:1]}, Cause.SCALE),
        ({"row": (Overflow(131072.0, frozenset("ab")), *USUAL.row)}, Cause.BACKWARD),
        # halving has changed the gradients
        ({"row": (Overflow(65536.0, frozenset("ab")), USUAL.row[1])}, Cause.SCALE),
        ({"row": (USUAL.row[0], Overflow(32768.0, frozenset()))}, Cause.SCALE),
        ({"amax": {"a": INF, "b": 1.0}}, Cause.SCALE),
        ({"amax": {"a": NAN, "b": INF}}, Cause.SCALE),
        # no lower scale was tried
        ({"row": (Overflow(16384.0, A),) * 2}, Cause.SCALE),
        # a loss that is large at this scale
        ({"loss": 3.99}, Cause.BACKWARD),
        ({"loss": -4.0}, Cause.SCALE),
        ({"scale": 65536.0, "row": (Overflow(2.0**18, A), Overflow(2.0**17, A))}, Cause.SCALE),
        # no loss is known: the largest gradient decides
        ({"loss": None}, Cause.BACKWARD),
        ({"loss": None, "amax": {"a": NAN, "b": 4094.0}}, Cause.BACKWARD),
        ({"loss": None, "amax": {"a": NAN, "b": 4095.0}}, Cause.SCALE),
        ({"loss": None, "amax": {"a": NAN}}, Cause.SCALE),
    ],
    ids=lambda value: value.value if isinstance(value, Cause) else ",".join(value),
)
def test_nan_at_three_scales(fields: dict[str, Any], cause: Cause) -> None:
    assert find_cause(USUAL._replace(**fields), [], {}).cause is cause


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"row": (), "before": 0.01},  # sudden
        {"row": (), "scale": 1.0},
        {"row": (), "scale": 0.5, "amax": {"a": INF}},
    ],
    ids=str,
)
def test_the_scale_may_be_the_cause_of_a_nan_in_the_loss(fields: dict[str, Any]) -> None:
    """The loss contains the gradient of a scaled tensor, so it is not known to be finite."""
    skip = USUAL._replace(loss=None, **fields)
    assert find_cause(skip, [], {}).cause is Cause.BACKWARD
    found = find_cause(skip._replace(has_gradient_in_loss=True), [], {})
    assert found.cause is Cause.SCALE and "the loss was finite" not in found.reason
    at_minimum = skip._replace(has_gradient_in_loss=True, scale=2.0**-24)
    assert find_cause(at_minimum, [], {}).cause is Cause.EXHAUSTED


def test_what_was_tried_stands_in_the_text() -> None:
    text = find_cause(USUAL, [], {}).reason
    assert text.startswith(
        "the loss was finite, but at loss scale 16384 the gradients of 1 parameter(s) were NaN: a. "
        "At loss scales 65536, 32768 and 16384 the same gradients were NaN, so a lower scale has "
        "not helped. Look in the loss, "
    )
    low = find_cause(USUAL._replace(scale=1.0, loss=None, amax={"a": INF}), [], {})
    assert low.cause is Cause.BACKWARD
    assert "At loss scales 65536, 32768 and 1 gradients were not finite, so a lower" in low.reason
    for scale in (1.0, 0.5):
        alone = find_cause(USUAL._replace(scale=scale, row=()), [], {})
        assert alone.cause is Cause.BACKWARD and "lower scale" not in alone.reason
    sudden = find_cause(USUAL._replace(row=(), before=1e-6), [], {})
    assert sudden.cause is Cause.BACKWARD and "lower scale" not in sudden.reason
    assert "In the last good step no gradient was above 1e-06, far below 65504" in sudden.reason


@pytest.mark.parametrize(
    ("loss", "cause"), [(3.99, Cause.BACKWARD), (-4.0, Cause.SCALE), (None, Cause.BACKWARD)]
)
def test_nan_after_small_gradients_may_come_with_a_large_loss(loss: Any, cause: Cause) -> None:
    skip = USUAL._replace(row=(), before=1e-6, loss=loss)
    assert find_cause(skip, [], {}).cause is cause


def test_single_skips_are_not_spoken_of_from_the_third_on() -> None:
    skip = USUAL._replace(amax={"a": INF})
    for count in (0, 1):
        assert (
            "single skips of this kind"
            in find_cause(skip._replace(row=skip.row[:count]), [], {}).reason
        )
    third = find_cause(skip, [], {})
    assert third.reason.endswith(
        "were inf: a. The scale was lowered. It was overflow 3 in a row, at loss scales 65536, "
        "32768 and 16384."
    )
    assert "amp.explain(replay=lambda: criterion(model(x), y))" in third.hint
    many = skip._replace(row=tuple(Overflow(2.0**i, A) for i in range(24, 14, -1)))
    assert (
        "overflow 11 in a row, at loss scales from 1.67772e+07 to 16384."
        in find_cause(many, [], {}).reason
    )


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_a_scale_that_waits_is_not_called_lowered(hysteresis: int) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = tritonamp.GradScaler("cpu", hysteresis=hysteresis)
    with tritonamp.enable(model, optimizer, level="O2", scaler=scaler) as amp:
        for i in range(1, 4):
            take_step(amp, optimizer, 1e8 * model(torch.ones(1, 4)).sum())
            text, scale = amp.explain(), amp.stats()["scale"]
            assert ("The scale was lowered" in text) is (i >= hysteresis)
            assert (scale < amp.history[-1].scale) is (i >= hysteresis)
            if i < hysteresis:
                assert f"is lowered at overflow {hysteresis} without a step between" in text


def test_kinds_are_said_once_where_all_are_alike() -> None:
    def reason(**amax: float) -> str:
        return find_cause(USUAL._replace(amax=amax, row=()), [], {}).reason

    assert "of 2 parameter(s) were inf: a, c. " in reason(a=INF, b=1.0, c=INF)
    assert "of 2 parameter(s) were NaN: a, c. " in reason(a=NAN, b=1.0, c=NAN)
    assert "of 2 parameter(s) were not: a (inf), c (NaN). " in reason(a=INF, b=1.0, c=NAN)


class Middle(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(16, 16), nn.Linear(16, 4), function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(torch.relu(self.first(x))))


def root_of_zero(x: Tensor) -> Tensor:
    return x + (x - x.detach()).square().sum(-1, keepdim=True).sqrt()


def train(
    model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], level: str, steps: int
) -> Any:
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    amp = tritonamp.enable(model, optimizer, level=level, backend="eager")
    for _ in range(steps):
        y = torch.randint(0, 4, (32,))
        take_step(amp, optimizer, loss(model(torch.randn(32, 16)), y))
    return amp


def cross_entropy(output: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(output, y)


def with_root(output: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(output, y) + (output - output.detach()).square().sum().sqrt()


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(
    ("make", "loss"),
    [
        pytest.param(lambda: Middle(root_of_zero), cross_entropy, id="model"),
        pytest.param(lambda: Middle(torch.abs), with_root, id="loss"),
    ],
)
def test_a_root_of_zero_is_told_at_the_third_skip(
    level: str, make: Any, loss: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "tritonamp"), train(make(), loss, level, 4) as amp:
        causes = [record.cause for record in amp.history]
    assert causes == ["scale overflow"] * 2 + ["backward fault"] * 2
    first, text, short = caplog.messages
    assert first.startswith("step 1 skipped (1 of 1): scale overflow: ")
    assert text.startswith("step 3 skipped (3 of 3): backward fault: ")
    assert "At loss scales 65536, 32768 and 16384 the same gradients were NaN" in text
    assert short == "step 4 skipped (4 of 4): backward fault, as in step 3 (loss scale 8192)"


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(lambda o, y: functional.mse_loss(o, 1e4 * functional.one_hot(y, 4)), id="mse"),
        pytest.param(lambda o, y: 1e4 * cross_entropy(o, y), id="factor"),
        pytest.param(lambda o, y: 1e3 * o.sum(), id="sum"),
    ],
)
def test_a_scale_far_too_high_stays_one(level: str, loss: Any) -> None:
    model = nn.Sequential(
        nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)
    )
    with train(model, loss, level, 17) as amp:
        causes = [record.cause for record in amp.history]
    assert causes.count("scale overflow") > 5 and causes[-1] is None
    assert set(causes) == {"scale overflow", None}
