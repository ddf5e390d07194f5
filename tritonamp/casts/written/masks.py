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

    def size(self, *dim: int) -> Any:
        return self.x.size(*dim)

    def computed(self, count: int | None = None) -> Any:
        """Return the scores after the first ``count`` steps, or after all."""
        result: Any = self.x
        for step in self.steps[:count]:
            result = step.function(result, *step.arguments)
        return result


def _noted(scores: Any, step: _Step) -> Any:
    """Return scores with a step noted, or computed if no pass has it."""
    if not isinstance(scores, Scores) and step.kind and takes(scores):
        scores = Scores(scores, (), scores.dtype)
    if not isinstance(scores, Scores):
        return step.function(scores, *step.arguments)
    if not step.kind or scores.dtype not in HALF_DTYPES:
        return step.function(scores.computed(), *step.arguments)
    return Scores(scores.x, (*scores.steps, step), step.dtype or scores.dtype)


def _scale(function: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    def step(scores: Any, factor: Any) -> Any:
        is_number = type(factor) in (int, float) and factor != 0
        return _noted(scores, _Step("scale" if is_number else "", function, (factor,)))

    return step


def _add(function: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    def step(scores: Any, mask: Any) -> Any:
        kind, dtype = "", None
        if _broadcasts(mask, scores) and mask.dtype in (scores.dtype, torch.float32):
            dtype = mask.dtype
            kind = "add" if function is operator.add or dtype is scores.dtype else ""
        return _noted(scores, _Step(kind, function, (mask,), dtype))

    return step


def _fill(function: Callable[..., Any], kind: str) -> Callable[[Any, Any, Any], Any]:
    def step(scores: Any, mask: Any, number: Any) -> Any:
        fits = type(number) in (int, float) and _broadcasts(mask, scores)
        fits = fits and mask.dtype is torch.bool
        return _noted(scores, _Step(kind if fits else "", function, (mask, number)))

    return step


def _broadcasts(mask: Any, scores: Any) -> bool:
    if not is_plain(mask) or mask.device != scores.device or mask.dim() > scores.dim():
        return False
    pairs = zip(reversed(mask.shape), reversed(scores.shape), strict=False)
    return all(size in (1, whole) for size, whole in pairs)


def _where(scores: Any, mask: Any, number: Any) -> Any:
    return torch.where(mask, scores, number)


scaled, scaled_ = _scale(operator.mul), _scale(operator.imul)
divided, divided_ = _scale(operator.truediv), _scale(operator.itruediv)
added, added_ = _add(operator.add), _add(operator.iadd)
filled, filled_ = _fill(Tensor.masked_fill, "fill"), _fill(Tensor.masked_fill_, "fill")
kept = _fill(_where, "keep")


def softmax(scores: Any, dtype: torch.dtype | None, to: Any) -> Any:
    """Return the softmax of scores along the last dimension, with noted steps in the same pass.

    Each step is rounded as its op rounds, so that masked and uniform rows stay what they are.

    Args:
        scores: a tensor, or ``Scores``.
        dtype: ``dtype`` of the softmax as code has it.
        to: argument of the cast behind it; None: no cast.
    """
    if not isinstance(scores, Scores):
        result = functional.softmax(scores, dim=-1, dtype=dtype)
        return result if to is None else result.to(to)
    found = active()
    inner = dtype or (found and found.policy.softmax_dtype) or scores.dtype
    narrows = to in HALF_DTYPES and inner is torch.float32
    result = _one_pass(scores, to if narrows else inner)
    if result is None:
        return softmax(scores.computed(), dtype, to)
    return result if to is None else result.to(to)


def _one_pass(scores: Scores, dtype: torch.dtype) -> Tensor | None:
    """Return the softmax of the last steps in one pass; None for a ``dtype`` that no pass has."""
    if dtype not in (*HALF_DTYPES, torch.float32):
        return None
    *steps, last = scores.steps
    mask, fill, keep, factor = None, -torch.inf, True, 1.0
    if last.kind != "scale":
        mask, *number = last.arguments
        keep = last.kind == "keep"
        if number:
            fill = fitted_number(number[0], scores.x.dtype)
        last = steps.pop() if steps else None
    if last is not None and last.kind == "scale":
        (factor,) = last.arguments
        if last.function in (operator.truediv, operator.itruediv):  # as on a GPU, in FP32
            factor = 1 / struct.unpack("f", struct.pack("f", factor))[0]
    elif last is not None:
        steps.append(last)
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
