"""Edits of the user's code that may cure a fault. A replay tries each of them on the batch.

An edit is advice in words, and a function that does to a call exactly what the words say.
"""

import contextlib
import io
import itertools
import linecache
import math
import re
import tokenize
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tritonamp.diagnosis.replay import rewrites
from tritonamp.diagnosis.replay.faults import FaultReport
from tritonamp.diagnosis.replay.known_ops import family
from tritonamp.diagnosis.replay.rewrites import name_of, on_argument, with_keywords
from tritonamp.diagnosis.replay.softmax_logs import LogSoftmax
from tritonamp.diagnosis.replay.user_calls import Change, Patch, Site
from tritonamp.diagnosis.replay.verdicts import Eps, Event, is_too_large
from tritonamp.watched.places import Place

Edits = Iterator[tuple[str, Change]]
"""Words and changes."""

_COMPUTED_IN_FP32 = frozenset(
    """square_overflow reduction_overflow exp_overflow overflow constant_overflow vanished_eps
    zero_by_zero division_by_zero domain_error unknown""".split()
)
_PRODUCTS = "matmul mm bmm mv linear conv1d conv2d conv3d".split()
_WITH_EPS = """normalize cosine_similarity pairwise_distance layer_norm rms_norm group_norm
    instance_norm batch_norm""".split()
_NORMS = "norm linalg_norm linalg_vector_norm linalg_matrix_norm".split()
_GROWING = "exp exp2 expm1 sinh cosh i0 special_i0".split()
_INSIDE = "acos asin arccos arcsin atanh arctanh erfinv".split()  # have a value from -1 to 1
_ABOVE = {
    **dict.fromkeys("log log2 log10 sqrt rsqrt reciprocal pow lgamma digamma".split(), 0),
    "log1p": -1,
    **dict.fromkeys("acosh arccosh".split(), 1),
}
"""Functions that have a value, and a slope, above a number only, and this number."""


def edits_for(fault: FaultReport) -> Iterator[Patch]:
    """Yield the edits to try, the one to prefer first; none where the call was not seen."""
    return edits_of(fault.event, fault.kind in _COMPUTED_IN_FP32)


def edits_of(event: Event, in_fp32: bool) -> Iterator[Patch]:
    """Yield the edits of the call behind an event, the one to prefer first.

    Where a value did not survive its cast, the call that made the value is edited.

    Args:
        event: the event, with the function of its place.
        in_fp32: whether FP32 may help.
    """
    place = event.place if event.maker is None or event.phase == "backward" else event.maker
    if event.own or place.function is None:
        return
    if event.softmax is not None and "log" in family(place.op):
        yield LogSoftmax(Site.of(event.softmax), Site.of(place))
    if (
        event.eps is not None
        and event.eps.place is not None
        and name_of(place.function) not in _WITH_EPS
    ):
        yield from _larger_eps(event.eps, event.eps.place)
    for words, change in _changes(event, name_of(place.function)):
        yield Patch(words + _of_each(place), {Site.of(place): change}, _form(words))
    softmax = event.softmax
    if softmax is not None and softmax.function is not None and "log" not in family(place.op):
        name = name_of(softmax.function)
        at = f" at {softmax.line}" if softmax.line else ""
        words = f"clamp the result of {name}{at}: {name}(x, dim).clamp(min=1e-06)"
        yield Patch(words, {Site.of(softmax): rewrites.at_least(1e-6)})
    if in_fp32:
        call = f"{name_of(place.function)}({_floats(event, place)})"
        inside = place.module is not None
        words = f"write with tritonamp.disable_casts(): {call}" if inside else f"write {call}"
        yield Patch(words, {Site.of(place): rewrites.in_fp32})


def _of_each(place: Place) -> str:
    """Return words for a line with several such calls, because a patch changes all of them."""
    name = name_of(place.function)
    code = linecache.getline(place.file or "", place.number)
    tokens: list[str] = []
    # a line may end within a statement
    with contextlib.suppress(tokenize.TokenError, SyntaxError):
        tokens.extend(t.string for t in tokenize.generate_tokens(io.StringIO(code).readline))
    calls = sum(pair == (name, "(") for pair in itertools.pairwise(tokens))
    return f", in each {name} of this line" if calls > 1 else ""


def _floats(event: Event, place: Place) -> str:
    """Return the arguments of the call at ``place`` in FP32, in words."""
    if place is not event.place or event.phase == "backward":  # its inputs are not known
        return "x.float()"
    tensors = [f"{name}.float()" for name in "xyz"[: len(event.inputs)]] or ["x.float()"]
    has_more = bool(event.scalars) or len(event.inputs) > len(tensors)
    return ", ".join([*tensors, *["..."] * has_more])


def _form(words: str) -> str:
    """Return the words without numbers, so that edits that differ in a number are known."""
    return re.sub(r"\d[\d.]*(e-\d+)?", "", words)


def _larger_eps(eps: Eps, place: Place) -> Iterator[Patch]:
    for value in (1e-4, 1e-3):

        def larger(number: float, dtype: torch.dtype, value: float = value) -> float:
            return value if number == eps.value else number

        words = f"take a larger eps: {value:g} in place of {eps.value:g}"
        yield Patch(words, {Site.of(place): rewrites.on_numbers(larger)}, "eps")


def _changes(event: Event, name: str) -> Edits:
    """Yield the changes of the call of a function."""
    forward = event.phase == "forward"
    yield from _of_losses(event, name)
    yield from _of_statistics(event, name)
    if forward:
        yield from _of_constants(event, name)
    if forward and (event.overflowed or name in _GROWING):
        yield from _of_size(event, name)
    else:
        yield from _into_range(event, name)


def _of_losses(event: Event, name: str) -> Edits:
    if name == "ctc_loss":
        yield "pass zero_infinity=True to ctc_loss", with_keywords(zero_infinity=True)
    if event.nan and name in ("cross_entropy", "nll_loss"):
        words = f"write {name}(..., reduction='sum') divided by the number of targets that count"
        yield f"{words}, at least 1", rewrites.mean_over_targets


def _of_statistics(event: Event, name: str) -> Edits:
    forward = event.phase == "forward"
    if name in _WITH_EPS:
        for eps in (1e-6, 1e-3):
            yield f"write {name}(..., eps={eps:g})", with_keywords(eps=eps)
    if name == "mean" and event.nan and not event.inputs:
        words = "write x.sum() / max(x.numel(), 1) in place of mean, which is 0/0 where x is empty"
        yield words, rewrites.mean_or_zero
    if name in ("std", "var") and forward:
        yield f"write {name}(..., correction=0)", with_keywords(correction=0)
    if name == "std":
        yield "write (x.var(...) + 1e-6).sqrt() in place of std", rewrites.std_by_var
    if name in _NORMS and not forward:
        words = "write (x.square().sum(...) + 1e-6).sqrt() in place of the norm"
        yield words, rewrites.norm_by_squares


def _of_constants(event: Event, name: str) -> Edits:
    if event.masked and "softmax" in name:
        words = (
            "write zeros over rows that are masked completely, before the softmax: "
            "torch.where((x == -torch.inf).all(-1, keepdim=True), 0, x)"
        )
        yield words, on_argument(0, rewrites.unmasked)
    for constant in [s for s in event.scalars if is_too_large(s, event)][:1]:
        end = "min" if constant < 0 else "max"
        words = f"write torch.finfo(x.dtype).{end} in place of {constant:g}"
        yield words, rewrites.on_numbers(rewrites.within)
    if event.constant and name == "mul":
        words = "write torch.where(mask != 0, -torch.inf, 0), which is masked_fill, for mask * -inf"
        yield words, rewrites.where_masked
        words = "write torch.where(p == 0, 0, x) in place of the infinite factor x of p * x"
        yield words, rewrites.without_infinities
    if event.constant:
        yield "write torch.finfo(x.dtype).min in place of -inf", rewrites.finite_infinities


def _of_size(event: Event, name: str) -> Edits:
    """Yield changes of a call whose result is too large."""
    if name in _GROWING:
        # below the logarithm of the end, 11 or 88; a half gradient may follow
        for most in (10,) if event.dtype is torch.float16 else (80, 10):
            least = None if name.startswith("exp") else -most
            limits = f"max={most}" if least is None else f"{least}, {most}"
            yield (
                f"clamp the argument: {name}(x.clamp({limits}))",
                on_argument(0, _clamped(least, most)),
            )
    if name in ("exp", "exp2"):
        words = (
            "if it is a softmax by hand, subtract the maximum of each sum first, here of dim -1: "
        )
        yield (
            f"{words}{name}(x - x.amax(-1, keepdim=True))",
            on_argument(0, lambda x: x - x.amax(-1, keepdim=True)),
        )
    if name in _PRODUCTS:
        power = -math.ceil(math.log2(max(event.multiple or 1.0, 1.0)) + 1)
        words = f"scale the first factor of {name}, and so its result, by 2^{power}"
        yield words, on_argument(0, _scaled(power))
    if name == "div":
        for c in (1e-3, 1e-2):
            yield from _clamped_divisor(c)
    if name in ("sum", "mean", "prod", "cumsum", "cumprod"):
        yield (
            f"sum in FP32: {name}(dtype=torch.float32)",
            with_keywords(dtype=torch.float32),
        )


def _into_range(event: Event, name: str) -> Edits:
    """Yield changes that keep an argument away from where there is no value, or no slope."""
    # the backward of a division divides by c twice
    for c in (1e-3, 1e-2) if event.dtype is torch.float16 else (1e-6, 1e-3):
        if name == "div":
            yield (
                f"write torch.where(d == 0, {c:g}, d) in place of the divisor d",
                on_argument(1, _nonzero(c)),
            )
            yield from _clamped_divisor(c)
        elif name == "logit":
            yield f"write logit(x, eps={c:g})", with_keywords(eps=c)
        elif name in _ABOVE:
            low = c + _ABOVE[name]
            yield (
                f"clamp the argument: {name}(x.clamp(min={low:g}))",
                on_argument(0, _clamped(low, None)),
            )
        elif name in _INSIDE:
            yield (
                f"clamp the argument: {name}(x.clamp(-1 + {c:g}, 1 - {c:g}))",
                on_argument(0, _clamped(-1 + c, 1 - c)),
            )
        elif name in ("atan2", "arctan2", "hypot"):
            yield (
                f"write torch.where(x == 0, {c:g}, x) in place of the second argument x",
                on_argument(1, _nonzero(c)),
            )


def _clamped_divisor(c: float) -> Edits:
    """Yield changes that keep a divisor ``c`` away from 0: one if it is positive, else another."""

    def above(d: Tensor) -> Any:
        return NotImplemented if bool((d < -c).any()) else d.clamp(min=c)

    def outside(d: Tensor) -> Any:
        return torch.where(d.abs() < c, c, d) if bool((d < -c).any()) else NotImplemented

    yield f"clamp the divisor d: d.clamp(min={c:g})", on_argument(1, above)
    words = f"write torch.where(d.abs() < {c:g}, {c:g}, d) in place of the divisor d"
    yield words, on_argument(1, outside)


def _clamped(least: float | None, most: float | None) -> Callable[[Tensor], Tensor]:
    return lambda x: x.clamp(least, most)


def _nonzero(c: float) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.where(x == 0, c, x)


def _scaled(power: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x * 2.0**power
