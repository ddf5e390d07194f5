"""Advice, followed to the letter: each of these reads it from a text and does exactly that."""

import re
from ast import literal_eval
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from diagnosis.planted.case import SAMPLES, Planted
from diagnosis.planted.report import Report

import tritonamp


@dataclass(frozen=True)
class Setup:
    """A planted fault, and the advice that is followed.

    Attributes:
        case: the fault.
        fields: arguments of ``enable``, more than those of the case.
        told: whether the code is as the advice says.
        without: numbers of the samples to leave out.
        settings: settings of the optimizer, instead of the case's.
        repaired: whether the model is as it was before ``Planted.spoil``.
        nan_to_num: whether zeros replace inf and NaN in the batch.
        batch: whether the batch is as it was before ``Planted.data``.
        edit: number of a line, its op, and words that say how to edit it.
        skips: number of steps that may be skipped because the loss scale is too high.
        advice: the text that was followed.
    """

    case: Planted
    fields: tuple[tuple[str, Any], ...] = ()
    told: bool = False
    without: tuple[int, ...] = ()
    settings: tuple[tuple[str, Any], ...] = ()
    repaired: bool = False
    nan_to_num: bool = False
    batch: bool = False
    edit: tuple[int, str, str] | None = None
    skips: int = 30  # from 2^16 down to below 2^-13
    advice: str = "nothing"


def with_fields(setup: Setup, **fields: Any) -> Setup:
    return replace(setup, fields=(*setup.fields, *fields.items()))


def fp32_modules(setup: Setup, found: re.Match[str]) -> Setup:
    return with_fields(setup, fp32_modules=literal_eval(found[1]))


def fp32_results(setup: Setup, found: re.Match[str]) -> Setup:
    return with_fields(setup, fp32_results=literal_eval(found[1]))


def softmax_dtype(setup: Setup, found: re.Match[str]) -> Setup:
    return with_fields(setup, softmax_dtype=torch.float32)


def bfloat16(setup: Setup, found: re.Match[str]) -> Setup:
    return with_fields(setup, dtype=torch.bfloat16)


def init_scale(setup: Setup, found: re.Match[str]) -> Setup:
    base, _, exponent = found[1].partition("**")
    scaler = tritonamp.GradScaler(init_scale=float(base) ** float(exponent or 1))
    return replace(with_fields(setup, scaler=scaler), skips=0)


def uncast(setup: Setup, found: re.Match[str]) -> Setup:
    return with_fields(setup, cast_inputs=False)


def in_fp32(setup: Setup, found: re.Match[str]) -> Setup:
    return with_fields(setup, level="O0")


# Functions of a setup and a report, for ``Planted.by``


def without_samples(setup: Setup, report: Report) -> Setup:
    """Follow "drop samples 1, 4"; where all are named, another batch takes their place."""
    named = re.search(r"samples? ([\d, ]+)", report.text)
    numbers = tuple(map(int, re.findall(r"\d+", named[1] if named else "")))
    return replace(
        setup, without=numbers if len(numbers) < SAMPLES else (), batch=len(numbers) == SAMPLES
    )


def with_eps(setup: Setup, report: Report) -> Setup:
    named = re.search(r"eps of ([\d.e-]+)", report.text)
    return with_setting("eps", float(named[1].rstrip(".")) if named else 0.0)(setup, report)


def with_setting(name: str, value: float) -> Callable[[Setup, Report], Setup]:
    """Return a function that gives the optimizer another setting."""
    return lambda setup, report: replace(setup, settings=((name, value),))


def clean_batch(setup: Setup, report: Report) -> Setup:
    """Follow "repair such samples": the batch as it was."""
    return replace(setup, batch=True)


def checkpoint(setup: Setup, report: Report) -> Setup:
    """Follow "load the last checkpoint that is finite": the model as it was."""
    return replace(setup, repaired=True)


ARGUMENTS = [
    (r"(?<!\w)fp32_modules=(\[[^\]]*\])", fp32_modules),
    (r"(?<!\w)fp32_results=(\[[^\]]*\])", fp32_results),
    (r"softmax_dtype=torch\.float32", softmax_dtype),
    (r"(?<!softmax_)dtype=torch\.bfloat16$", bfloat16),
    (r"level=\"O0\"", in_fp32),
    (r"GradScaler\(init_scale=([\d.*e+-]+)\)", init_scale),
    (r"cast_inputs=False", uncast),
]
"""Pattern and function for advice about arguments of ``enable``."""


def followed(case: Planted, report: Report) -> Iterator[Setup]:
    """Yield a setup for each piece of advice that the report calls tried. Each alone has to help.

    If the report names the remedy of the case, and says that it was not tried, this is followed as
    ``Planted.by`` has it.
    """
    for claim in report.claims:
        yield following(Setup(case, advice=claim), report)
        if "x.nan_to_num(0, 0, 0)" in claim:
            yield Setup(case, nan_to_num=True, advice="x.nan_to_num(0, 0, 0)")
    found = re.search(case.remedy, report.advice)
    if found and case.by == "told":
        yield Setup(case, told=True, advice=found[0])
    elif found and callable(case.by):
        yield replace(case.by(Setup(case), report), advice=found[0])


def following(setup: Setup, report: Report) -> Setup:
    """Return a setup that does as its advice says."""
    found = [(re.search(pattern, setup.advice), follow) for pattern, follow in ARGUMENTS]
    matches = [(match, follow) for match, follow in found if match]
    for match, follow in matches:
        setup = follow(setup, match)
    if matches:
        return setup
    if setup.advice.startswith("drop or repair"):
        return without_samples(setup, report)
    if setup.advice.lower().startswith("repair it"):  # all samples are bad
        return replace(setup, nan_to_num=True)
    if "log_softmax" in setup.advice:
        return replace(setup, told=True)
    other = re.search(r" at \S+:(\d+): ", setup.advice)  # the line of the argument
    line = int(other[1]) if other else report.line
    return replace(setup, edit=(line, report.op, setup.advice))
