"""Distance in ulps between one result of two runs, and whether the runs part there."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tritonamp.kernels.device import widened
from tritonamp.policy import HALF_DTYPES
from tritonamp.watched.places import Place

PARTS = 4.0  # an error this many times that of the inputs: two runs part at the op
ROUNDED = 8.0  # ulps that inputs may always be off: of values that were rounded a few times


@dataclass(frozen=True)
class Difference:
    """One result of an operation at two levels.

    Attributes:
        place: place of the operation; in a backward, place of the forward operation of the
            gradient.
        op: aten name of the operation, "to float16" for a cast, "output" of a module, "input",
            "parameter" or "gradient".
        shape: shape of the result.
        backward: whether a backward computed the result.
        parameter: full name of the parameter, for a parameter or its gradient.
        ulps: root mean square of the error, in ulps of the half dtype at the root mean square of
            the reference; inf if an element is inf or NaN at one of the two levels.
        worst: largest error of one element, in the same unit.
        before: largest ``ulps`` among the operation's inputs.
    """

    place: Place
    op: str
    shape: tuple[int, ...]
    backward: bool
    parameter: str
    ulps: float
    worst: float
    before: float

    @property
    def growth(self) -> float:
        """Ratio of the result's error to that of its inputs, which counts as at least 8 ulps."""
        return 1.0 if math.isinf(self.before) else self.ulps / max(self.before, ROUNDED)

    @property
    def parts(self) -> bool:
        """Whether the two runs part here."""
        return self.growth >= PARTS


def ulps_between(result: Tensor, reference: Tensor, dtype: torch.dtype) -> tuple[float, float]:
    """Return root mean square and maximum of ``result - reference``, in ulps of a half format.

    An ulp is eps of ``dtype`` times the root mean square of the reference, or the smallest
    subnormal if that is zero. Elements that are inf or NaN in both are left out; one that is so
    in only one of them makes both numbers inf. A reference that exceeds the range of a half result
    is clamped to it, because masks hold such values.
    """
    info = torch.finfo(dtype)
    if reference.is_complex():
        result, reference = map(torch.view_as_real, (result, reference))
    known = reference.isfinite()
    if bool((known != result.isfinite()).any()):
        return math.inf, math.inf
    got, expected = widened(result[known]), widened(reference[known])
    if result.dtype in HALF_DTYPES:
        expected = expected.clamp(torch.finfo(result.dtype).min, torch.finfo(result.dtype).max)
    if not expected.numel():
        return 0.0, 0.0
    ulp = info.eps * (_rms(expected) or info.smallest_normal)
    off = (got - expected).abs()
    return _rms(off) / ulp, float(off.max()) / ulp


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())
