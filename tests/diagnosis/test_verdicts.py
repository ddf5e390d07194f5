"""The table of verdicts, and the report made of it."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from tritonamp.diagnosis.replay.faults import WHOLE, FaultReport, Remedy
from tritonamp.diagnosis.replay.known_ops import family
from tritonamp.diagnosis.replay.verdicts import VERDICTS, Eps, Event, OpInput, judge
from tritonamp.watched.places import Place

PLACE = Place("encoder.layer.3.attn", "Attention", "matmul", str(Path(__file__)), 1)


def event(
    op: str = "mul", phase: str = "forward", dtype: torch.dtype = torch.float16, **fields: object
) -> Event:
    place = Place(PLACE.module, PLACE.kind, op, PLACE.file, PLACE.number)
    operand = OpInput(dtype, (2, 3), 12.5)
    return Event(place, phase, dtype, "aten.x", (operand,), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seen", "kind"),
    [
        (event("baddbmm", exact=1e5), "matmul_overflow"),
        (event("convolution", exact=1e5), "matmul_overflow"),
        (event("pow", exact=1e5), "square_overflow"),
        (event("mul", exact=1e5, squares=True), "square_overflow"),
        (event("var", exact=1e5), "square_overflow"),
        (event("cumsum", exact=1e5), "reduction_overflow"),
        (event("exp", dtype=torch.float32, exact=math.inf), "exp_overflow"),
        (event("add", exact=1e5), "overflow"),
        (event("mul", exact=1e9, scalars=(-1e9,)), "constant_overflow"),
        (event("mul", exact=8.75e5, scalars=(7e4,)), "overflow"),
        (event("add", dtype=torch.float32, exact=math.inf, scalars=(-1e9,)), "unknown"),
        (event("to_copy", exact=1e5, rounding=True), "cast_overflow"),
        (event("softmax", nan=True, exact=math.nan, masked=True), "masked_row"),
        (event("div", nan=True, exact=math.nan, zero=True), "zero_by_zero"),
        (event("div", exact=math.inf, zero=True), "division_by_zero"),
        (event("lgamma", exact=math.inf), "domain_error"),
        (event("lgamma", exact=1e5), "overflow"),
        (event("weight_norm", nan=True, exact=math.nan), "zero_by_zero"),
        (event("div", exact=math.inf, zero=True, eps=Eps(1e-8, torch.float16)), "vanished_eps"),
        (event("sqrt", nan=True, exact=math.nan), "domain_error"),
        (event("mul", nan=True, exact=math.nan, constant=True), "infinite_constant"),
        (event("mul", quiet=True), "infinite_constant"),
        (event("mul", source="data"), "data"),
        (event("mm", "backward", exact=1e5), "gradient_overflow"),
        (event("div", "backward", nan=True, exact=math.nan), "backward_nan"),
        (event("unknown_op"), "unknown"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_judge(seen: Event, kind: str) -> None:
    assert judge(seen) == kind


@pytest.mark.parametrize(
    ("op", "why", "advice"),
    [
        ("log", "to 0, and their logarithm is finite", "Write log_softmax(x, dim) in place of"),
        ("div", "to 0", "Clamp the result of the softmax from below."),
    ],
)
def test_only_a_logarithm_of_a_softmax_is_mended_by_log_softmax(
    op: str, why: str, advice: str
) -> None:
    report = FaultReport("softmax_zero", event(op, softmax=PLACE, zero=True))
    assert report.why.endswith(f"rounds small probabilities {why}")
    assert report.advice.startswith(advice)


@pytest.mark.parametrize(
    ("op", "reason"),
    [
        ("log1p", "the slope of log1p at -1 is infinite"),
        ("linalg_svd", "two are equal or one is 0"),
        ("linalg_eigh", "two are equal"),
    ],
)
def test_the_reason_of_a_gradient_without_a_value(op: str, reason: str) -> None:
    report = FaultReport("backward_nan", event(op, "backward", nan=True, exact=math.nan))
    assert report.why.endswith(reason)


@pytest.mark.parametrize(
    ("fits", "kind"),
    [(2.0**8, "scale_too_high"), (1.0, "scale_too_high"), (0.5, "gradient_overflow")],
)
def test_judge_by_scale(fits: float, kind: str) -> None:
    assert judge(event("mm", "backward", exact=1e5), fits) == kind


@pytest.mark.parametrize("name", ["_softmax", "softmax", "_softmax.int", "native_softmax"])
def test_family(name: str) -> None:
    assert family(name) == {"softmax"}


@pytest.mark.parametrize("kind", VERDICTS)
@pytest.mark.parametrize("module", ["encoder.layer.3.attn", "", None])
def test_every_verdict_can_be_told(kind: str, module: str | None) -> None:
    place = Place(module, "Attention", "div", None, 0)
    seen = Event(
        place, "forward", torch.float16, exact=None, eps=Eps(1e-8, torch.float16), scalars=(-1e9,)
    )
    fault = FaultReport(kind, seen, names=("a.weight",), fits=256.0)
    assert "{" not in fault.why + fault.advice
    assert place.name in str(fault)


def test_report() -> None:
    seen = event("matmul", exact=131008.0, later=3, first_nan=PLACE)
    fault = FaultReport(
        "matmul_overflow", seen, outcome="the loss is NaN", replayed="bit-identical to the first"
    )
    lines = str(fault).splitlines()
    assert lines[0] == f"matmul overflow, forward: encoder.layer.3.attn, op matmul at {__file__}:1"
    assert lines[1] == '  code:    """The table of verdicts, and the report made of it."""'
    why = "the product is 1.31e+05, 2 times the largest number of float16, 65504"
    assert lines[2] == f"  why:     {why}"
    assert lines[3] == "  inputs:  float16[2, 3] up to 12.5 (aten.x)"
    assert lines[4].startswith(
        "  then:    3 later ops not finite; first NaN in encoder.layer.3.attn"
    )
    assert lines[4].endswith("; the loss is NaN")
    assert lines[6].endswith("(Not tried: the batch could not run again.)")
    untried = dataclasses.replace(fault, remedy=Remedy(vain=(WHOLE,))).advice
    assert untried.endswith("(Not tried: no edit of this call alone does it.)")
    assert lines[5] == "  replay:  forward output bit-identical to the first"
    assert (fault.module, fault.amax, fault.multiple) == ("encoder.layer.3.attn", 12.5, 2.0)
