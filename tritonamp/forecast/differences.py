"""Comparison of two levels, result by result, and its report."""

import dataclasses
import linecache
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tritonamp.diagnosis.terminal import fitted, table
from tritonamp.forecast.ulps import PARTS, Difference
from tritonamp.names import short

GROWN = 1.5  # the text shows an op with an error this many times that of its inputs
UNMATCHED = 0.1  # share of results: some are only how a level computes the same
SHOWN = 12  # rows in the text


@dataclass(frozen=True)
class Comparison:
    """One batch at two levels, result by result. ``str()`` returns the report.

    Attributes:
        level: name of the compared level, like "float16 (O2)".
        reference: name of the level to compare with, like "FP32 (O0)".
        dtype: the half dtype whose ulps are the unit.
        differences: differences in the order of computation: parameters and inputs, forward,
            backward, gradients of parameters.
        unmatched: number of results without a counterpart.
        losses: loss at the level and loss at the reference; the first is NaN if the run failed.
        failed: error of the run at the level, or "".
        tried: comparison with FP32 in the module where the levels part; None if there is no such
            module.
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
        """The first result whose own operation makes the levels part; None if there is none."""
        return next((each for each in self.differences if each.parts), None)

    @property
    def furthest(self) -> Difference | None:
        """The result with the largest ``ulps``; None without results."""
        return max(self.differences, key=lambda each: each.ulps, default=None)

    def __str__(self) -> str:
        return "\n".join(_report(self))


def _report(compared: Comparison) -> Iterator[str]:
    yield from map(fitted, _found(compared))
    rows = _shown(compared)
    if rows:
        name, eps = short(compared.dtype), math.log2(torch.finfo(compared.dtype).eps)
        yield fitted(
            f"where it grows most, in the order they ran; ulps of {name}: 2^{eps:.0f} of a result; "
            "before: of what it was made from; worst: of the element that is furthest off"
        )
        header = ("", "module", "operation", "line", "before", "ulps", "worst")
        yield table(header, map(_row, rows))
    yield from map(fitted, _gradients(compared))
    if compared.unmatched > UNMATCHED * len(compared.differences):
        yield fitted(
            f"{compared.unmatched} results are of one level only, {len(compared.differences)} of "
            "both: the two took different ways"
        )


def _found(compared: Comparison) -> Iterator[str]:
    title = f"{compared.level} against {compared.reference}, the same batch"
    got, expected = compared.losses
    yield f"{title}: {compared.failed or f'loss {got:.6g} instead of {expected:.6g}'}"
    yield from _parting(compared)


def _parting(compared: Comparison) -> Iterator[str]:
    first, furthest = compared.first, compared.furthest
    if first is not None:
        yield (
            f"they part first in {_where(first)}: {_number(first.ulps)} ulps, before it "
            f"{_number(first.before)}"
        )
        yield from _to_do(compared, first)
    elif furthest is not None and furthest.ulps:
        until = "until then " if compared.failed else ""
        yield (
            f"{until}they part nowhere: no operation gives {PARTS:g} times what its inputs were "
            f"off; furthest is {_where(furthest)}, {_number(furthest.ulps)} ulps"
        )
    else:
        yield "every result is the same"


def _to_do(compared: Comparison, parted: Difference) -> Iterator[str]:
    code = linecache.getline(parted.place.file or "", parted.place.number).strip()
    if code:
        yield f"  code: {code}"
    if compared.tried is not None:
        yield f"  to do: {_cure(compared.tried, parted)}"


def _cure(tried: Comparison, parted: Difference) -> str:
    """Return the setting that was tried, with the result of trying it."""
    then, setting = tried.first, f"fp32_modules=[{parted.place.module!r}]"
    if then is None:
        return f"{setting} (tried: they part nowhere)"
    if then.place.module != parted.place.module:
        return (
            f"{setting} (tried: they then part first in {_where(then)}, {_number(then.ulps)} ulps)"
        )
    if math.isinf(then.ulps):
        return f"{setting} was tried in vain: what it gives on leaves {short(tried.dtype)}"
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
    """Return the differences that grow most, in the order they ran, for the table."""
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
        each.place.module or "",
        each.op,
        each.place.line,
        *map(_number, (each.before, each.ulps, each.worst)),
    )


def _number(ulps: float) -> str:
    return f"{ulps:.1f}" if ulps < 100 else f"{ulps:.3g}" if ulps < 1e6 else f"{ulps:.1e}"
