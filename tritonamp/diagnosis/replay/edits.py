"""Edits of the user's code that may cure a fault. A replay tries each of them on the batch.

Each edit is a few words of advice, and a function that does to a call exactly what the words say.
"""

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tritonamp.casts.user_functions import disable_casts
from tritonamp.diagnosis.replay.faults import FaultReport
from tritonamp.diagnosis.replay.known_ops import DIVISORS, family
from tritonamp.diagnosis.replay.softmax_logs import LogSoftmax
from tritonamp.diagnosis.replay.user_calls import Change, Patch, Site
from tritonamp.watched.places import Place

_INSIDE = "acos asin arccos arcsin atanh arctanh erfinv".split()  # of -1 to 1
_OUTSIDE = "acosh arccosh".split()  # above 1


def edits_for(fault: FaultReport) -> Iterator[Patch]:
    """Yield the edits to try, the one to prefer first; none where the call was not seen.

    Where a value did not survive its cast, the call that made the value is edited.
    """
    event = fault.event
    place = event.maker or event.place
    if event.own or place.function is None:
        return
    if event.softmax is not None and "log" in family(place.op):
        yield LogSoftmax(Site.of(event.softmax), Site.of(place))
    if event.eps is not None and event.eps.place is not None:
        yield from _larger_eps(event.eps.value, event.eps.place)
    for words, change in _changes(fault, place):
        yield Patch(words, {Site.of(place): change}, _form(words))
    if fault.kind in _COMPUTED_IN_FP32:
        yield _in_fp32(place)


_COMPUTED_IN_FP32 = frozenset(
    """square_overflow reduction_overflow exp_overflow overflow constant_overflow vanished_eps
    zero_by_zero division_by_zero domain_error unknown""".split()
)


def _changes(fault: FaultReport, place: Place) -> Iterator[tuple[str, Change]]:
    """Yield the changes of the call at a place."""
    event = fault.event
    op = place.op.split(".")[0].strip("_")
    name = _name(place.function)
    kinds = family(op)
    if "ctc" in op or "ctc" in name:
        yield "pass zero_infinity=True to ctc_loss", _with(zero_infinity=True)
    if event.masked:
        yield (
            (
                "write zeros over rows that are masked completely, before the softmax: "
                "torch.where((x == -inf).all(-1, keepdim=True), 0, x)"
            ),
            _on_argument(0, _unmasked),
        )
    if name in ("normalize", "cosine_similarity", "layer_norm", "rms_norm", "pairwise_distance"):
        for eps in (1e-6, 1e-3):
            yield f"write {name}(..., eps={eps:g})", _with(eps=eps)
    if event.nan and "average" in kinds and name in ("cross_entropy", "nll_loss"):
        yield (
            (
                f"write {name}(..., reduction='sum') divided by the number of targets that count, "
                "at least 1"
            ),
            _mean_over_targets,
        )
    if name in ("std", "var") and event.phase == "forward":
        yield f"write {name}(..., correction=0)", _with(correction=0)
    if op in ("std", "std_mean") and name == "std":
        yield "write (x.var(...) + 1e-6).sqrt() in place of std", _std_by_var
    if event.phase == "backward" and "norm" in name:
        yield "write (x.square().sum(...) + 1e-6).sqrt() in place of the norm", _norm_by_squares
    if "exp" in kinds and event.phase == "forward":
        yield (
            (f"subtract the maximum before {name}: {name}(x - x.amax(-1, keepdim=True))"),
            _on_argument(0, lambda x: x - x.amax(-1, keepdim=True)),
        )
        most = math.floor(math.log(torch.finfo(event.dtype).max))
        yield f"write {name}(x.clamp(max={most}))", _on_argument(0, lambda x: x.clamp(max=most))
    constants = [s for s in event.scalars if abs(s) > torch.finfo(event.dtype).max]
    if constants:
        yield (
            (
                f"write torch.finfo(x.dtype).{'min' if constants[0] < 0 else 'max'} in place of "
                f"{constants[0]:g}"
            ),
            _on_numbers(_within),
        )
    if event.constant and op in ("mul", "multiply"):
        yield "write torch.where(mask != 0, -inf, 0) in place of mask * -inf", _where_masked
    if event.constant:
        yield "write torch.finfo(x.dtype).min in place of -inf", _finite_infinities
    if "matmul" in kinds and event.overflowed and event.phase == "forward":
        factor = 2.0 ** -math.ceil(math.log2(max(fault.multiple or 1.0, 1.0)) + 1)
        yield (
            f"multiply the first factor of {name} by 2^{int(math.log2(factor))}",
            _on_argument(0, lambda x: x * factor),
        )
    if "reduction" in kinds and name in ("sum", "mean", "prod", "cumsum", "cumprod"):
        yield f"write {name}(..., dtype=torch.float32)", _with(dtype=torch.float32)
    yield from _into_range(fault, op, name)


def _into_range(fault: FaultReport, op: str, name: str) -> Iterator[tuple[str, Change]]:
    """Yield changes that keep an argument away from where the op has no value, or no slope."""
    event = fault.event
    if event.overflowed and event.phase == "forward":
        return
    smallest = (1e-3,) if event.dtype is torch.float16 else (1e-6, 1e-3)
    for c in smallest:
        if op in ("div", "divide", "true_divide"):
            yield (
                (f"write torch.where(d == 0, {c:g}, d) in place of the divisor d"),
                _on_argument(1, lambda d, c=c: torch.where(d == 0, c, d)),
            )
            yield (
                f"write d.clamp(min={c:g}) in place of the divisor d",
                _on_argument(1, lambda d, c=c: d.clamp(min=c)),
            )
        elif op in DIVISORS or op in ("sqrt", "log1p", "lgamma", "norm", "linalg_vector_norm"):
            low = c - 1 if op == "log1p" else c
            if op == "logit":
                yield f"write {name}(x, eps={c:g})", _with(eps=c)
            elif "norm" not in op:
                yield (
                    f"write {name}(x.clamp(min={low:g}))",
                    _on_argument(0, lambda x, low=low: x.clamp(min=low)),
                )
        elif op in _INSIDE:
            yield (
                f"write {name}(x.clamp(-1 + {c:g}, 1 - {c:g}))",
                _on_argument(0, lambda x, c=c: x.clamp(-1 + c, 1 - c)),
            )
        elif op in _OUTSIDE:
            yield (
                f"write {name}(x.clamp(min=1 + {c:g}))",
                _on_argument(0, lambda x, c=c: x.clamp(min=1 + c)),
            )
        elif op in ("atan2", "arctan2"):
            yield (
                f"write torch.where(x == 0, {c:g}, x) in place of the second argument x",
                _on_argument(1, lambda x, c=c: torch.where(x == 0, c, x)),
            )


def _larger_eps(value: float, place: Place) -> Iterator[Patch]:
    for eps in (1e-4, 1e-3):

        def larger(number: float, dtype: torch.dtype, eps: float = eps) -> float:
            return eps if number == value else number

        words = f"take eps={eps:g} in place of {value:g}"
        yield Patch(words, {Site.of(place): _on_numbers(larger)}, "eps")


def _in_fp32(place: Place) -> Patch:
    name = _name(place.function)
    if place.module is None:
        words = f"give {name} x.float()"
    else:
        words = f"write with tritonamp.disable_casts(): {name}(x.float())"

    def change(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _is_in_place(function):
            return NotImplemented
        with disable_casts():
            return function(*_floats(args), **_floats(kwargs))

    return Patch(words, {Site.of(place): change})


# the forms of a change


def _form(words: str) -> str:
    """Return the words without their numbers, so that edits of one form are known."""
    return re.sub(r"\de-\d+|0\.\d+", "", words)


def _name(function: Any) -> str:
    """Return the name of a function of torch as users write it: ``x / y`` is "div"."""
    name = getattr(function, "__name__", "").strip("_")
    return {"truediv": "div", "rtruediv": "div", "rdiv": "div"}.get(name, name)


def _is_in_place(function: Any) -> bool:
    name = getattr(function, "__name__", "")
    return name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))


def _on_argument(number: int, change: Callable[[Tensor], Tensor]) -> Change:
    """Return the change of one positional argument, a floating or integer tensor."""

    def changed(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        at = number
        if getattr(function, "__name__", "") in ("__rtruediv__", "__rdiv__", "rdiv"):
            at = 1 - number  # the divisor comes first
        if _is_in_place(function) or len(args) <= at or not isinstance(args[at], Tensor):
            return NotImplemented
        return function(*args[:at], change(args[at]), *args[at + 1 :], **kwargs)

    return changed


def _with(**more: Any) -> Change:
    """Return the change that gives keywords, in place of the same ones."""

    def changed(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return function(*args, **{**kwargs, **more})
        except TypeError:  # given by position, or unknown to this function
            return NotImplemented

    return changed


def _on_numbers(change: Callable[[float, torch.dtype], Any]) -> Change:
    """Return the change of all numbers among the arguments, given the dtype of the tensor."""

    def changed(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        dtype = next((a.dtype for a in args if isinstance(a, Tensor)), torch.float32)

        def of(value: Any) -> Any:
            return change(value, dtype) if type(value) in (int, float) else value

        return function(*map(of, args), **{key: of(value) for key, value in kwargs.items()})

    return changed


def _where_masked(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a product of a mask and an infinite number without 0 * inf."""
    tensors = [a for a in args if isinstance(a, Tensor) and a.isfinite().all()]
    infinite = [a for a in args if not isinstance(a, Tensor) or not a.isfinite().all()]
    if len(tensors) != 1 or len(infinite) != 1 or _is_in_place(function):
        return NotImplemented
    return torch.where(tensors[0] != 0, infinite[0], 0.0)


def _finite_infinities(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a call with infinities as the ends of the range."""
    if _is_in_place(function):
        return NotImplemented

    def of(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            limit = torch.finfo(value.dtype).max
            return value.clamp(-limit, limit)
        return value

    finite = tuple(map(of, args))
    return _on_numbers(_within)(function, finite, kwargs)


def _within(number: float, dtype: torch.dtype) -> float:
    """Return a number that the dtype does not hold as the end of its range."""
    limit = torch.finfo(dtype).max if dtype.is_floating_point else math.inf
    return max(-limit, min(limit, number))


def _unmasked(scores: Tensor) -> Tensor:
    return torch.where((scores == -math.inf).all(-1, keepdim=True), 0, scores)


def _floats(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _floats(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_floats, value))
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def _std_by_var(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return (torch.var(*args, **kwargs) + 1e-6).sqrt()


def _norm_by_squares(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, *rest = args
    order = kwargs.get("p", kwargs.get("ord", rest[0] if rest else 2))
    dim = kwargs.get("dim", rest[1] if len(rest) > 1 else None)
    keepdim = kwargs.get("keepdim", rest[2] if len(rest) > 2 else False)
    if order not in (2, 2.0, None, "fro"):
        return NotImplemented
    return (x.square().sum(dim, keepdim) + 1e-6).sqrt()


def _mean_over_targets(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target = kwargs.get("target", args[1] if len(args) > 1 else None)
    if not isinstance(target, Tensor) or target.is_floating_point():
        return NotImplemented
    count = (target != kwargs.get("ignore_index", -100)).sum().clamp(min=1)
    return function(*args, **{**kwargs, "reduction": "sum"}) / count
