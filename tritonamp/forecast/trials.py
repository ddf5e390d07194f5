"""Changes of one line of the user's code, each tried in a dry run before it is advised."""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from tritonamp.casts.tree import cast_tree, from_half
from tritonamp.watched.places import Place

EPS = (1e-6, 1e-4, 1e-2)  # the smallest that helps is advised; half holds each
FITS_EXP = 10.0  # exp of 11.09 leaves float16

CALLS = {
    "reciprocal": "reciprocal __rdiv__ __rtruediv__",
    "div": "div divide true_divide __truediv__ __rdiv__ __rtruediv__",
    "pow": "pow __pow__",
    "square": "square",
    "add": "add __add__ __radd__",
    "sub": "sub __sub__",
    "rsub": "rsub __rsub__",
    "mul": "mul __mul__ __rmul__",
    "clamp": "clamp",
    "clamp_min": "clamp clamp_min",
}
"""Names of the functions that call an aten op, and of the ops that ``in_fp32`` knows."""
SOFTMAX_CALLS = ("softmax", "log_softmax")
PASSES = "float to type double add __add__ __radd__ clamp clamp_min contiguous".split()
"""Functions between a softmax and a logarithm whose result ``log_softmax`` replaces as well."""


class Patch(NamedTuple):
    """Replaces the calls of some functions at one place.

    Attributes:
        place: module and line.
        calls: names of the functions.
        text: the new code.
        new: function that returns the result of a call from its function and arguments.
        log_softmax: ``new`` takes input and dimension of the softmax that the call reads.
    """

    place: Place
    calls: tuple[str, ...]
    text: str
    new: Callable[..., Any]
    log_softmax: bool = False

    def run(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], here: Callable[[], Place]
    ) -> Any:
        """Run a call of the model, replaced if it is one of the patch's."""
        name = getattr(func, "__name__", "")
        made_of: Any = getattr(args[0], "_softmax_of", None) if args else None
        if name not in self.calls or (self.log_softmax and not made_of) or here() != self.place:
            if made_of and name in PASSES and isinstance(args[-1], float):
                return args[0]  # an eps that log_softmax does not need
            result = func(*args, **kwargs)
            if self.log_softmax and isinstance(result, Tensor):
                if name == "softmax":
                    made_of = args[0], kwargs["dim"] if "dim" in kwargs else args[1]
                elif name not in PASSES:
                    made_of = None
                result._softmax_of = made_of  # type: ignore[attr-defined]
            return result
        return self.new(*made_of) if self.log_softmax else self.new(func, *args, **kwargs)


def patches_for(place: Place, reads_softmax: bool = False) -> Iterator[Patch]:
    """Yield changes of the line at ``place`` that may keep its op, ``place.op``, finite."""
    op = place.op.strip("_")
    calls = tuple(CALLS.get(op, f"{op} {op}_").split())
    if reads_softmax and op in _LOGS:
        yield Patch(place, calls, "log_softmax in place of softmax and log", _LOGS[op], True)
    if op in ("exp", "expm1", "sinh", "cosh"):
        text = f"{op}(x.clamp(max={FITS_EXP:g}))"
        yield Patch(place, calls, text, functools.partial(_clamped, 0, None, FITS_EXP))
    for eps in EPS:
        if op in (*_LOGS, "sqrt", "rsqrt", "pow"):
            text = f"{op}(x.clamp(min={eps:g}))"
            yield Patch(place, calls, text, functools.partial(_clamped, 0, eps, None))
        elif op in ("div", "reciprocal"):
            text = f"dividing by d.clamp(min={eps:g})"
            yield Patch(place, calls, text, functools.partial(_divided, eps))
            new = functools.partial(_with, {"eps": eps})
            yield Patch(place, ("normalize",), f"normalize(x, eps={eps:g})", new)
    if op == "log1p":
        text = f"log1p(x.clamp(min={EPS[0]:g} - 1))"
        yield Patch(place, calls, text, functools.partial(_clamped, 0, EPS[0] - 1, None))
    if op == "ctc_loss":
        new = functools.partial(_with, {"zero_infinity": True})
        yield Patch(place, calls, "ctc_loss(..., zero_infinity=True)", new)
    if op.endswith("softmax"):
        text = "s.masked_fill((s == -inf).all(dim, True), 0) as its scores, for rows without any"
        yield Patch(place, SOFTMAX_CALLS, text, _of_hidden_rows)


def in_fp32(place: Place) -> Iterator[Patch]:
    """Yield the change of the line at ``place`` that computes its op, ``place.op``, in FP32."""
    op = place.op.strip("_")
    if op in CALLS:
        yield Patch(place, tuple(CALLS[op].split()), f"{op} of x.float()", _of_fp32)


def _of_fp32(func: Any, *args: Any, **kwargs: Any) -> Any:
    return func(*cast_tree(args, from_half(torch.float32)), **kwargs)


def _clamped(at: int, least: float | None, most: float | None, func: Any, *args: Any) -> Any:
    """Call a function with its argument number ``at`` clamped."""
    return func(*args[:at], args[at].clamp(least, most), *args[at + 1 :])


def _with(changed: dict[str, Any], func: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function with some keywords replaced."""
    return func(*args, **{**kwargs, **changed})


def _divided(eps: float, func: Any, *args: Any) -> Any:
    divisor = int(len(args) > 1 and "__r" not in func.__name__)  # of x / d; else of 1 / d
    return _clamped(divisor, eps, None, func, *args)


def _of_hidden_rows(func: Any, scores: Tensor, dim: int, *rest: Any, **kwargs: Any) -> Any:
    hidden = (scores == -math.inf).all(dim, True)
    return func(scores.masked_fill(hidden, 0.0), dim, *rest, **kwargs)


def _log_of_softmax(base: float, x: Tensor, dim: int) -> Tensor:
    return functional.log_softmax(x, dim) / math.log(base)


_LOGS: dict[str, Callable[..., Any]] = {
    "log": functional.log_softmax,
    "log2": functools.partial(_log_of_softmax, 2.0),
    "log10": functools.partial(_log_of_softmax, 10.0),
}
