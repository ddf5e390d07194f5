"""How far the results of a run at one level are from those at another, in ulps."""

import dataclasses
import linecache
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tritonamp.forecast.findings import short
from tritonamp.forecast.places import Location
from tritonamp.policy import HALF_DTYPES

PARTS = 4.0  # times what its inputs were off: an op that adds so much is where two runs part
ROUNDED = 8.0  # ulps that inputs may always be off: of values that were rounded a few times
GROWN = 1.5  # times what its inputs were off: what the text shows
UNMATCHED = 0.1  # share of results: some are only how a level computes the same
SHOWN = 12  # rows in the text


@dataclass(frozen=True)
class Difference:
    """One result of an operation at two levels.

    Attributes:
        place: of the operation; in backward, of the forward operation that the gradient belongs to.
        op: its name in aten; "to float16" for a cast, "output" of a module, "input", "parameter",
            "gradient".
        shape: of the result.
        backward: it was computed in backward.
        parameter: the full name, for a parameter and its gradient.
        ulps: root of the mean square of what the result is off, in ulps of the half format at the
            root mean square of the reference; inf where it has inf or NaN and the reference not.
        worst: the most that one element is off, in the same unit.
        before: the largest ``ulps`` of what it was computed from.
    """

    place: Location
    op: str
    shape: tuple[int, ...]
    backward: bool
    parameter: str
    ulps: float
    worst: float
    before: float

    @property
    def growth(self) -> float:
        """How many times further off it is than what it was computed from."""
        return 1.0 if math.isinf(self.before) else self.ulps / max(self.before, ROUNDED)

    @property
    def parts(self) -> bool:
        """Whether the two runs part here."""
        return self.growth >= PARTS


@dataclass(frozen=True)
class Comparison:
    """One batch at two levels, result by result. ``str()`` of it is the report.

    Attributes:
        level: "float16 (O2)": the level that was asked about.
        reference: "FP32 (O0)": what it is compared with.
        dtype: the half format whose ulps are counted.
        differences: in the order in which they were computed: parameters and inputs, forward,
            backward, gradients of parameters.
        unmatched: how many results of the one have no counterpart in the other.
        losses: of the level, and of the reference; the first is NaN where the run failed.
        failed: why the run at the level came to no end, or "".
        tried: the same, with the module in FP32 in which the two part first; None: they part
            nowhere, or in no module.
    """

    level: str
    reference: str
    dtype: torch.dtype
    differences: tuple[Difference, ...] = dataclasses.field(repr=False)
    unmatched: int
    losses: tuple[float, float]
    failed: str = ""
    tried: "Comparison | None" = dataclasses.field(default=None, repr=False)

    @property
    def first(self) -> Difference | None:
        """Where they part first; None: nowhere."""
        return next((each for each in self.differences if each.parts), None)

    @property
    def furthest(self) -> Difference | None:
        """The result that is off most; None: there are none."""
        return max(self.differences, key=lambda each: each.ulps, default=None)

    def __str__(self) -> str:
        return "\n".join(_report(self))

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison as plain values, for JSON; inf and NaN are strings."""
        plain = {
            **dataclasses.asdict(self),
            "dtype": short(self.dtype),
            "tried": None if self.tried is None else self.tried.as_dict(),
            "losses": list(self.losses),
            "differences": [
                {**dataclasses.asdict(each), **each.place._asdict()} for each in self.differences
            ],
            "first": None if self.first is None else self.differences.index(self.first),
        }
        for each in plain["differences"]:
            del each["place"]
        return _for_json(plain)


def ulps_between(result: Tensor, reference: Tensor, dtype: torch.dtype) -> tuple[float, float]:
    """Return how far ``result`` is from ``reference``: typically, and where it is furthest.

    Where the reference itself is inf or NaN, nothing is compared; finite values that the dtype of
    the result does not hold count as its largest, which stands for them in masks.

    Args:
        result: floating or complex.
        reference: of the same shape, likewise.
        dtype: the half format whose ulps are counted: of eps times the root mean square of the
            reference; where that is zero throughout, of the smallest subnormal.

    Returns:
        Root of the mean square, and maximum, of the difference.
    """
    info = torch.finfo(dtype)
    if reference.is_complex():
        result, reference = map(torch.view_as_real, (result, reference))
    known = reference.isfinite()
    got, expected = result[known].double(), reference[known].double()
    if result.dtype in HALF_DTYPES:
        expected = expected.clamp(torch.finfo(result.dtype).min, torch.finfo(result.dtype).max)
    if not expected.numel():
        return 0.0, 0.0
    if not bool(got.isfinite().all()):
        return math.inf, math.inf
    ulp = info.eps * (_rms(expected) or info.smallest_normal)
    off = (got - expected).abs()
    return _rms(off) / ulp, float(off.max()) / ulp


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def _report(compared: Comparison) -> Iterator[str]:
    title = f"{compared.level} against {compared.reference}, the same batch"
    got, expected = compared.losses
    yield f"{title}: {compared.failed or f'loss {got:.6g} instead of {expected:.6g}'}"
    yield from _first(compared)
    rows = _shown(compared)
    if rows:
        name, eps = short(compared.dtype), math.log2(torch.finfo(compared.dtype).eps)
        yield (
            f"where it grows most, in the order they ran; ulps of {name}: 2^{eps:.0f} of a result;"
        )
        yield "before: of what it was made from; worst: of the element that is furthest off"
        header = ("", "module", "operation", "line", "before", "ulps", "worst")
        yield from _aligned([header, *map(_row, rows)])
    yield from _gradients(compared)
    if compared.unmatched > UNMATCHED * len(compared.differences):
        yield (
            f"{compared.unmatched} results are of one level only, {len(compared.differences)} of "
            "both: the two took different ways"
        )


def _first(compared: Comparison) -> Iterator[str]:
    first, furthest = compared.first, compared.furthest
    if first is not None:
        yield (
            f"they part first in {_where(first)}: {_number(first.ulps)} ulps, before it "
            f"{_number(first.before)}"
        )
        file, _, number = first.place.line.rpartition(":")
        code = linecache.getline(file, int(number)).strip() if file else ""
        if code:
            yield f"  code: {code}"
        if compared.tried is not None:
            yield f"  to do: {_cure(compared.tried, first)}"
    elif furthest is not None and furthest.ulps:
        until = "until then " if compared.failed else ""
        yield (
            f"{until}they part nowhere: no operation gives {PARTS:g} times what its inputs were "
            f"off; furthest is {_where(furthest)}, {_number(furthest.ulps)} ulps"
        )
    else:
        yield "every result is the same"


def _cure(tried: Comparison, parted: Difference) -> str:
    """Say what became of it with the module in FP32."""
    then, setting = tried.first, f"fp32_modules=[{parted.place.module!r}]"
    if then is None:
        return f"{setting} (tried: they part nowhere)"
    if then.place.module != parted.place.module:
        return (
            f"{setting} (tried: they then part first in {_where(then)}, {_number(then.ulps)} ulps)"
        )
    in_vain = f"{setting} was tried in vain: what it is given is rounded before"
    return in_vain if parted.backward else f"{in_vain}; scale or centre that"


def _gradients(compared: Comparison) -> Iterator[str]:
    grads = [each for each in compared.differences if each.op == "gradient"]
    if grads:
        middle = statistics.median(each.ulps for each in grads)
        furthest = max(grads, key=lambda each: each.ulps)
        yield (
            f"gradients of {len(grads)} parameters: median {_number(middle)} ulps, furthest "
            f"{_number(furthest.ulps)}, {furthest.parameter}"
        )


def _shown(compared: Comparison) -> list[Difference]:
    """Return the rows of the table: where it grows most, in the order they ran."""
    grown = sorted(
        (each for each in compared.differences if each.growth > GROWN and not each.parameter),
        key=lambda each: (each is not compared.first, -each.growth),
    )
    chosen = {id(each) for each in grown[:SHOWN]}
    return [each for each in compared.differences if id(each) in chosen]


def _where(each: Difference) -> str:
    """Return "module, op x at file:number"."""
    if each.parameter:
        return f"{each.parameter}, {each.op}"
    line = f" at {each.place.line}" if each.place.line else ""
    side = ", backward" if each.backward else ""
    return f"{each.place.module or 'the model itself'}{side}, op {each.op}{line}"


def _row(each: Difference) -> tuple[str, ...]:
    return (
        "backward" if each.backward else "",
        each.place.module,
        each.op,
        each.place.line,
        *map(_number, (each.before, each.ulps, each.worst)),
    )


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(map(str.ljust, row, widths)).rstrip()


def _number(ulps: float) -> str:
    return f"{ulps:.1f}" if ulps < 100 else f"{ulps:.3g}" if ulps < 1e6 else f"{ulps:.1e}"


def _for_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _for_json(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_for_json(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
