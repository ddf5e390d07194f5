"""Advice, followed to the letter: each of these reads it from a text and does exactly that."""

import re
from ast import literal_eval
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from diagnosis.planted.case import Planted
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
        batch: whether the batch is as it was before ``Planted.data``.
        in_fp32: whether the loss is of the output's ``float()``, without casts.
        skips: number of steps that may be skipped because the loss scale is too high.
        advice: the text that was followed.
    """

    case: Planted
    fields: tuple[tuple[str, Any], ...] = ()
    told: bool = False
    without: tuple[int, ...] = ()
    settings: tuple[tuple[str, Any], ...] = ()
    repaired: bool = False
    batch: bool = False
    in_fp32: bool = False
    skips: int = 30  # from 2^16 down to below 2^-13
    advice: str = "nothing"


def with_fields(setup: Setup, **fields: Any) -> Setup:
    return replace(setup, fields=(*setup.fields, *fields.items()))


def fp32_modules(setup: Setup, found: re.Match[str]) -> Setup:
    return with_fields(setup, fp32_modules=literal_eval(found[1]))


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


def loss_in_fp32(setup: Setup, found: re.Match[str]) -> Setup:
    return replace(setup, in_fp32=True)


# Functions of a setup and a report, for ``Planted.by``


def without_samples(setup: Setup, report: Report) -> Setup:
    named = re.search(r"samples? ([\d, ]+)", report.text)
    return replace(setup, without=tuple(map(int, re.findall(r"\d+", named[1] if named else ""))))


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


FOLLOWED = [
    (r"(?<!\w)fp32_modules=(\[[^\]]*\])", fp32_modules),
    (r"softmax_dtype=torch\.float32", softmax_dtype),
    (r"(?<!softmax_)dtype=torch\.bfloat16", bfloat16),
    (r"GradScaler\(init_scale=([\d.*e+-]+)\)", init_scale),
    (r"cast_inputs=False", uncast),
    (r"x\.float\(\) under tritonamp\.disable_casts\(\)", loss_in_fp32),
]
"""Pattern and function for advice about arguments."""


def followed(case: Planted, report: Report) -> Iterator[Setup]:
    """Yield a setup for each piece of advice, which alone has to help.

    Arguments of ``enable`` in the advice are read from it. Where the advice is about code, and
    names the remedy of the case, the code is changed as ``told`` has it.
    """
    for pattern, follow in FOLLOWED:
        found = re.search(pattern, report.advice)
        if found:
            yield replace(follow(Setup(case), found), advice=found[0])
    found = re.search(case.remedy, report.advice)
    if found and case.by == "told":
        yield Setup(case, told=True, advice=found[0])
    elif found and callable(case.by):
        yield replace(case.by(Setup(case), report), advice=found[0])
