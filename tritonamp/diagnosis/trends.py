"""When a magnitude that grows will leave its format, by the trend of its last readings."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

_POINTS = 8  # readings that a trend is made of
_FEWEST = 4


class _Line(NamedTuple):
    """A straight line through points: by least squares, from the mean of all."""

    x: float
    y: float
    slope: float

    @classmethod
    def through(cls, xs: Sequence[float], ys: Sequence[float]) -> "_Line":
        x, y = sum(xs) / len(xs), sum(ys) / len(ys)
        products = sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True))
        return cls(x, y, products / sum((a - x) ** 2 for a in xs))

    def at(self, x: float) -> float:
        return self.y + self.slope * (x - self.x)

    def reaches(self, y: float) -> float:
        return self.x + (y - self.y) / self.slope


def steps_left(points: Sequence[tuple[int, float]], limit: float) -> int | None:
    """Return in how many steps a magnitude will pass ``limit``, 0 if it has.

    Growth by a constant factor and growth by a constant amount are tried; the one that is nearer to
    the points, in powers of two, decides.

    Args:
        points: step and magnitude, oldest first; the last eight count.
        limit: the largest number of the format.

    Returns:
        None where there are fewer than four readings, where no growth stands out of the noise, and
        where the end is further away than the trend is long, in steps or in powers of two.
    """
    points = points[-_POINTS:]
    step, last = points[-1]
    if not last < limit:  # NaN, too
        return 0
    if len(points) < _FEWEST or any(not 0 < magnitude < math.inf for _, magnitude in points):
        return None
    xs, bits = [float(x) for x, _ in points], [math.log2(y) for _, y in points]
    factor, amount = _Line.through(xs, bits), _Line.through(xs, [y for _, y in points])
    by_factor = _miss(xs, bits, factor.at)
    by_amount = _miss(xs, bits, lambda x: math.log2(max(amount.at(x), 1e-300)))
    span, end = xs[-1] - xs[0], math.log2(limit)
    grown = factor.slope * span
    if grown < 3 * min(by_factor, by_amount) or grown < end - bits[-1]:
        return None
    reached = factor.reaches(end) if by_factor <= by_amount else amount.reaches(limit)
    left = max(reached - step, 1.0)
    return round(left) if left <= span else None


def _miss(xs: Sequence[float], bits: Sequence[float], line: Callable[[float], float]) -> float:
    """Return the root mean square distance of the points from a line, in powers of two."""
    squares = [(y - line(x)) ** 2 for x, y in zip(xs, bits, strict=True)]
    return math.sqrt(sum(squares) / len(squares))
