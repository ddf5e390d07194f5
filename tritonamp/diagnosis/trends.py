"""When a magnitude that grows will leave its format, by the trend of its last readings."""

import math
import statistics
from collections.abc import Iterable, Sequence

POINTS = 8  # readings that a trend is made of, at most
_FEWEST = 4


def steps_left(points: Sequence[tuple[int, float]], limit: float) -> int | None:
    """Return the number of steps until a magnitude passes ``limit``; 0: it has; None: no trend.

    Two trends are fitted: growth by a constant factor, and growth by a constant amount. The one
    that is nearer to the points, in powers of two, decides. There is no trend with fewer than four
    points. Growth must stand out of the noise. The limit must not be further away than the trend is
    long, in steps and in powers of two.

    Args:
        points: step and magnitude, oldest first, at most ``POINTS``.
        limit: largest number of the format.
    """
    step, last = points[-1]
    if not last < limit:  # NaN, too
        return 0
    if len(points) < _FEWEST or any(not 0 < magnitude < math.inf for _, magnitude in points):
        return None
    xs, bits = [x - step for x, _ in points], [math.log2(y) for _, y in points]
    factor, bits_now = statistics.linear_regression(xs, bits)
    amount, now = statistics.linear_regression(xs, [y for _, y in points])
    # how far points are from each line: root mean square, in powers of two
    by_factor = _rms(y - (bits_now + factor * x) for x, y in zip(xs, bits, strict=True))
    by_amount = _rms(
        y - math.log2(max(now + amount * x, 1e-300)) for x, y in zip(xs, bits, strict=True)
    )
    span, end = -xs[0], math.log2(limit)
    grown = factor * span
    if grown < 3 * min(by_factor, by_amount) or grown < end - bits[-1]:
        return None
    reached = (end - bits_now) / factor if by_factor <= by_amount else (limit - now) / amount
    left = max(reached, 1.0)
    return round(left) if left <= span else None


def _rms(values: Iterable[float]) -> float:
    return math.sqrt(statistics.fmean(value**2 for value in values))
