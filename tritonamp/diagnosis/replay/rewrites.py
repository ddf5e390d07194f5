"""The results of calls after an edit of the user's code."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tritonamp.casts.user_functions import disable_casts
from tritonamp.diagnosis.replay.user_calls import Change

_SHORT = {
    **dict.fromkeys("truediv rtruediv rdiv divide true_divide".split(), "div"),
    "rpow": "pow",
    "multiply": "mul",
}
_DIVISOR_FIRST = ("__rtruediv__", "__rdiv__", "rdiv")


def name_of(function: Any) -> str:
    """Return the name of a function of torch as users write it: ``x / y`` is "div"."""
    name = getattr(function, "__name__", "").strip("_")
    return _SHORT.get(name, name)


def _is_in_place(function: Any) -> bool:
    name = getattr(function, "__name__", "")
    return name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))


def on_argument(number: int, change: Callable[[Tensor], Any]) -> Change:
    """Return the change of one positional argument, if that is a tensor.

    Args:
        number: index of the argument.
        change: function of the tensor; NotImplemented: this tensor cannot be changed like that.
    """

    def changed(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        at = number
        if getattr(function, "__name__", "") in _DIVISOR_FIRST:
            at = 1 - number
        if len(args) <= at or not isinstance(args[at], Tensor):
            return NotImplemented
        in_place = _is_in_place(function) and at == 0
        # on a copy, because the change may keep it for the backward
        new = change(args[at].clone() if in_place else args[at])
        if new is NotImplemented:
            return NotImplemented
        result = function(*args[:at], new, *args[at + 1 :], **kwargs)
        return args[0].copy_(result) if in_place else result

    return changed


def with_keywords(**more: Any) -> Change:
    """Return the change that adds keywords, or replaces those of the same names."""

    def changed(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return function(*args, **{**kwargs, **more})
        except TypeError:  # given by position, or unknown to this function
            return NotImplemented

    return changed


def on_numbers(change: Callable[[float, torch.dtype], float]) -> Change:
    """Return the change of the numbers among the arguments, given the dtype of the tensor."""

    def changed(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        dtype = next((a.dtype for a in args if isinstance(a, Tensor)), torch.float32)

        def of(value: Any) -> Any:
            return change(value, dtype) if type(value) in (int, float) else value

        new_args = tuple(map(of, args))
        new_kwargs = {key: of(value) for key, value in kwargs.items()}
        if all(new is old for new, old in zip(new_args, args, strict=True)) and all(
            new_kwargs[key] is kwargs[key] for key in kwargs
        ):
            return NotImplemented
        return function(*new_args, **new_kwargs)

    return changed


def within(number: float, dtype: torch.dtype) -> float:
    """Return a number, clamped to the range of a dtype."""
    limit = torch.finfo(dtype).max if dtype.is_floating_point else math.inf
    return max(-limit, min(limit, number))


def in_fp32(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a call on FP32 values, without casts."""
    if _is_in_place(function):
        return NotImplemented
    with disable_casts():
        return function(*_floats(args), **_floats(kwargs))


def _floats(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _floats(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_floats, value))
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def unmasked(scores: Tensor) -> Tensor:
    """Return scores in which rows of only -inf are zero."""
    return torch.where((scores == -math.inf).all(-1, keepdim=True), 0, scores)


def where_masked(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the product of a mask and an infinite number without 0 * inf.

    A factor whose values count, such as probabilities, is no mask.
    """
    masks = [a for a in args if isinstance(a, Tensor) and bool(a.isfinite().all())]
    infinite = [a for a in args if not any(a is mask for mask in masks)]
    if len(masks) != 1 or len(infinite) != 1 or _is_in_place(function):
        return NotImplemented
    result = torch.where(masks[0] != 0, infinite[0], 0.0)
    same = (result == function(*args, **kwargs)) | (masks[0] == 0)
    return result if bool(same.all()) else NotImplemented


def without_infinities(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a product with 0 in place of the infinite factor where the other factor is 0."""
    if len(args) != 2 or not all(isinstance(a, Tensor) for a in args) or _is_in_place(function):
        return NotImplemented
    first, second = args
    if bool(first.isfinite().all()):
        return function(first, torch.where(first == 0, 0.0, second), **kwargs)
    return function(torch.where(second == 0, 0.0, first), second, **kwargs)


def finite_infinities(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a call with infinities clamped to the range of the dtype."""
    if _is_in_place(function):
        return NotImplemented

    def of(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            limit = torch.finfo(value.dtype).max
            return value.clamp(-limit, limit)
        return value

    finite = tuple(map(of, args))
    result = on_numbers(within)(function, finite, kwargs)
    return function(*finite, **kwargs) if result is NotImplemented else result


def mean_or_zero(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the mean of all elements, which is 0 where there are none."""
    if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
        return NotImplemented
    return args[0].sum() / max(args[0].numel(), 1)


def std_by_var(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a standard deviation whose gradient is finite at 0."""
    return (torch.var(*args, **kwargs) + 1e-6).sqrt()


def norm_by_squares(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a 2-norm whose gradient is finite at 0."""
    x, *rest = args
    order = kwargs.get("p", kwargs.get("ord", rest[0] if rest else 2))
    dim = kwargs.get("dim", rest[1] if len(rest) > 1 else None)
    keepdim = kwargs.get("keepdim", rest[2] if len(rest) > 2 else False)
    if order not in (2, 2.0, None, "fro"):
        return NotImplemented
    return (x.square().sum(dim, keepdim) + 1e-6).sqrt()


def mean_over_targets(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a loss as a mean over the targets that count, which is 0 where none does."""
    target = kwargs.get("target", args[1] if len(args) > 1 else None)
    if not isinstance(target, Tensor) or target.is_floating_point():
        return NotImplemented
    count = (target != kwargs.get("ignore_index", -100)).sum().clamp(min=1)
    return function(*args, **{**kwargs, "reduction": "sum"}) / count


def at_least(least: float) -> Change:
    """Return the change that clamps the result of a call from below."""

    def changed(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return function(*args, **kwargs).clamp(min=least)

    return changed
