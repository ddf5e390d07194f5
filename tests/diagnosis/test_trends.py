"""When a growing magnitude passes the end of its format."""

import math
import random

import pytest

from tritonamp.diagnosis.trends import steps_left

LIMIT = 65504.0
STEPS = range(100, 1000, 100)


@pytest.mark.parametrize("per_step", [1.002, 1.005, 1.01])
def test_growth_by_a_factor(per_step: float) -> None:
    """Its end is known exactly: the line through its logarithms."""
    end = STEPS[-1] + 300
    points = [(step, LIMIT * per_step ** (step - end)) for step in STEPS]
    assert steps_left(points, LIMIT) == 300


def test_growth_by_an_amount() -> None:
    points = [(step, 50.0 * step) for step in STEPS]
    assert steps_left(points, LIMIT) == round(LIMIT / 50.0) - STEPS[-1]


def test_noise_moves_the_end_a_little() -> None:
    draw = random.Random(0)
    end = STEPS[-1] + 300
    points = [(s, LIMIT * 1.005 ** (s - end) * 1.1 ** draw.uniform(-1, 1)) for s in STEPS]
    left = steps_left(points, LIMIT)
    assert left is not None and 240 < left < 360


@pytest.mark.parametrize(
    "magnitudes",
    [
        [100.0] * 9,  # stands still
        [1000.0 / (i + 1) for i in range(9)],  # falls
        [100.0, 300.0, 90.0, 280.0, 110.0, 310.0, 95.0, 290.0, 105.0],  # noise
        [2e4, 6e4, 1.5e4, 5e4, 1.8e4, 6.2e4, 2.1e4, 6.4e4],  # noise close to the end
        [1.0 + 0.1 * i for i in range(9)],  # grows, the end is far
        [1.0, 10.0, 100.0],  # too few
        [0.0] * 9,
        [math.inf, 1.0, 2.0, 3.0, 4.0],
    ],
    ids=["still", "falls", "noise", "close", "far", "few", "zeros", "inf"],
)
def test_no_end_in_sight(magnitudes: list[float]) -> None:
    points = list(zip(STEPS, magnitudes, strict=False))
    assert steps_left(points, LIMIT) is None


@pytest.mark.parametrize("last", [LIMIT, math.inf, math.nan])
def test_there_already(last: float) -> None:
    assert steps_left([(100, 1.0), (200, last)], LIMIT) == 0
