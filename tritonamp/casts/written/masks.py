"""Attention scores whose scaling and masking is noted, and computed together with the softmax."""

import operator
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from tritonamp.casts.active import active
from tritonamp.casts.op_rules import fitted_number
from tritonamp.casts.written.conditions import backend, is_plain, takes
from tritonamp.functional.masked_rows import softmax_of_scores
from tritonamp.policy import HALF_DTYPES


class _Step(NamedTuple):
    """One step of attention scores.

    Attributes:
        kind: "scale", "add", "fill" or "keep"; "": no pass has it.
        function: the step as code has it, a function of the scores and ``arguments``.
        arguments: its further arguments.
        dtype: dtype of half scores after the step.
    """

    kind: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    dtype: torch.dtype | None = None


class Scores(NamedTuple):
    """Half scores, and steps that are not computed yet. Steps keep the shape.

    Attributes:
        x: the scores before all steps.
        steps: the steps.
        dtype: dtype after the steps.
    """

    x: Tensor
    steps: tuple[_Step, ...]
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        return self.x.device

    @property
    def shape(self) -> torch.Size:
        return self.x.shape

    @property
    def ndim(self) -> int:
        return self.x.ndim

    def dim(self) -> int:
        return self.x.dim()

    def size(self, dim: int | None = None) -> Any:
        return self.x.size(dim)

    def computed(self, count: int | None = None) -> Any:
        """Return the scores after the first ``count`` steps, or after all."""
        result: Any = self.x
        for step in self.steps[:count]:
            result = step.function(result, *step.arguments)
        return result


def _noted(
    function: Callable[..., Any], of: Callable[..., tuple[str, torch.dtype | None]]
) -> Callable[..., Any]:
    """Return a function that notes a step of scores, or computes it if no pass has it.

    Args:
        function: the step, a function of the scores and further arguments.
        of: returns kind and dtype of the step; a function of ``function``, scores and arguments.
    """

    def step(scores: Any, *arguments: Any) -> Any:
        if not isinstance(scores, Scores):
            if not takes(scores):
                return function(scores, *arguments)
            scores = Scores(scores, (), scores.dtype)
        kind, dtype = "", None
        if scores.dtype in HALF_DTYPES:
            kind, dtype = of(function, scores, *arguments)
        if not kind:
            return function(scores.computed(), *arguments)
        noted = _Step(kind, function, arguments, dtype)
        return Scores(scores.x, (*scores.steps, noted), dtype or scores.dtype)

    return step


def _scale(_: Any, scores: Scores, factor: Any) -> tuple[str, None]:
    return "scale" if type(factor) in (int, float) and factor != 0 else "", None


def _add(function: Any, scores: Scores, mask: Any) -> tuple[str, torch.dtype | None]:
    # a tensor without dimensions does not widen the sum
    if not _broadcasts(mask, scores) or mask.dim() == 0:
        return "", None
    fits = mask.dtype is scores.dtype
    fits = fits or (mask.dtype is torch.float32 and function is operator.add)
    return "add" if fits else "", mask.dtype


def _replaces(kind: str) -> Callable[..., tuple[str, None]]:
    def of(_: Any, scores: Scores, mask: Any, number: Any) -> tuple[str, None]:
        fits = type(number) in (int, float) and _broadcasts(mask, scores)
        return kind if fits and mask.dtype is torch.bool else "", None

    return of


def _broadcasts(mask: Any, scores: Scores) -> bool:
    if not is_plain(mask) or mask.device != scores.device or mask.dim() > scores.dim():
        return False
    pairs = zip(reversed(mask.shape), reversed(scores.shape), strict=False)
    return all(size in (1, whole) for size, whole in pairs)


def _masked_fill(scores: Any, mask: Any, number: Any) -> Any:
    return scores.masked_fill(mask, number)


def _masked_fill_(scores: Any, mask: Any, number: Any) -> Any:
    return scores.masked_fill_(mask, number)


def _where(scores: Any, mask: Any, number: Any) -> Any:
    return torch.where(mask, scores, number)


scaled, scaled_ = _noted(operator.mul, _scale), _noted(operator.imul, _scale)
divided, divided_ = _noted(operator.truediv, _scale), _noted(operator.itruediv, _scale)
added, added_ = _noted(operator.add, _add), _noted(operator.iadd, _add)
filled = _noted(_masked_fill, _replaces("fill"))
filled_ = _noted(_masked_fill_, _replaces("fill"))
kept = _noted(_where, _replaces("keep"))


def softmax(scores: Any, dtype: torch.dtype | None, to: Any) -> Any:
    """Return the softmax of scores along the last dimension, with noted steps in the same pass.

    Each step is rounded as its op rounds, so that masked and uniform rows stay what they are.

    Args:
        scores: a tensor, or ``Scores``.
        dtype: ``dtype`` of the softmax as code has it.
        to: argument of the cast behind it; None: no cast.
    """
    if not isinstance(scores, Scores):
        return _cast(functional.softmax(scores, dim=-1, dtype=dtype), to)
    found = active()
    inner = dtype or (found and found.policy.softmax_dtype) or scores.dtype
    narrows = to in HALF_DTYPES and inner is torch.float32
    result = _one_pass(scores, to if narrows else inner)
    if result is None:
        return softmax(scores.computed(), dtype, to)
    return _cast(result, to)


def _cast(result: Any, to: Any) -> Any:
    if isinstance(to, type) or (isinstance(to, str) and "Tensor" in to):  # torch.FloatTensor
        return result.type(to)
    return result if to is None else result.to(to)


def _rounded(number: float, dtype: torch.dtype) -> float:
    """Return a number as its step would write it: rows that two steps fill are uniform."""
    wide = struct.pack("f", fitted_number(number, dtype))
    (number,) = struct.unpack("f", wide)
    if dtype is torch.bfloat16 and number == number:  # not NaN
        (bits,) = struct.unpack("I", wide)
        bits += 0x7FFF + (bits >> 16 & 1)
        (number,) = struct.unpack("f", struct.pack("I", bits & 0xFFFF0000))
    elif dtype is torch.float16:
        (number,) = struct.unpack("e", struct.pack("e", number))
    return number


def _one_pass(scores: Scores, dtype: torch.dtype) -> Tensor | None:
    """Return the softmax of the last steps in one pass; None for a ``dtype`` that no pass has."""
    if dtype not in (*HALF_DTYPES, torch.float32):
        return None
    steps = [*scores.steps]
    mask, fill, keep, factor = None, -torch.inf, True, 1.0
    if steps[-1].kind != "scale":
        last = steps.pop()
        mask, *number = last.arguments
        keep = last.kind == "keep"
        if number:
            fill = _rounded(number[0], scores.x.dtype)
    if steps and steps[-1].kind == "scale":
        last = steps.pop()
        (factor,) = last.arguments
        if last.function in (operator.truediv, operator.itruediv):  # as on a GPU, in FP32
            factor = 1 / struct.unpack("f", struct.pack("f", factor))[0]
    x = scores.computed(len(steps))
    return softmax_of_scores(
        x,
        mask,
        factor,
        dtype=dtype,
        keep=keep,
        fill=fill,
        zero=False,
        rounds=True,
        backend=backend(),
    )
