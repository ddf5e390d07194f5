"""Wrappers that cast a function's arguments while the casts of ``_amp_state.handle`` are on."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from tritonamp.apex.amp._amp_state import _amp_state
from tritonamp.apex.amp.properties import HALF_DTYPES

F = TypeVar("F", bound=Callable[..., Any])
FLOATING = (torch.float32, *HALF_DTYPES)  # FP64 passes: whoever has it asked for it


def _map(value: Any, cast: Callable[[Tensor], Tensor]) -> Any:
    """Return ``value`` with ``cast`` applied to every tensor in it that is to be cast.

    Those are the floating ones on a device that has casts.
    """
    if isinstance(value, Tensor):
        return cast(value) if _concerned(value) else value
    if type(value) in (list, tuple):
        return type(value)(_map(item, cast) for item in value)
    if type(value) is dict:
        return {key: _map(item, cast) for key, item in value.items()}
    return value


def _concerned(tensor: Tensor) -> bool:
    return tensor.dtype in FLOATING and tensor.device.type in _amp_state.handle.device_types


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in ``value`` that are to be cast."""
    if isinstance(value, Tensor):
        if _concerned(value):
            yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def _float(tensor: Tensor) -> Tensor:
    return tensor.float()


def half(function: F, dtype: torch.dtype | None = None) -> F:
    """Wrap ``function`` to get ``dtype`` arguments; None: the half dtype of the casts."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        handle = _amp_state.handle
        if not handle.is_active():
            return function(*args, **kwargs)
        target = dtype or handle.dtype
        args, kwargs = _map((args, kwargs), lambda t: handle.cast(t, target))
        return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


def half_op(function: F) -> F:
    """Wrap an op of torch as ``half`` does; on CPU it is computed in FP32 and rounded once.

    It starts from the half arguments there: half kernels are slow or missing on CPU, and it is what
    a Tensor Core does.
    """

    def compute(*args: Any, **kwargs: Any) -> Any:
        handle = _amp_state.handle
        if not handle.is_active() or next(_tensors((args, kwargs)), _NOWHERE).device.type != "cpu":
            return function(*args, **kwargs)
        with handle._disable_casts():
            args, kwargs = _map((args, kwargs), _float)
            result = function(*args, **kwargs)
        return _map(result, lambda t: t.to(handle.dtype))

    return half(functools.wraps(function)(compute))  # type: ignore[return-value]


_NOWHERE = torch.empty(0, device="meta")


def half_layer(function: F) -> F:
    """Wrap a layer of a recurrent net as ``half_op`` does.

    On CUDA autocast does it, which lays the half weights out as cuDNN wants them.
    """
    on_cpu = half_op(function)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        handle = _amp_state.handle
        if not handle.is_active() or next(_tensors((args, kwargs)), _NOWHERE).device.type != "cuda":
            return on_cpu(*args, **kwargs)
        with torch.autocast("cuda", dtype=handle.dtype, cache_enabled=False):
            return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


def any_input_dtype(check: F) -> F:
    """Wrap ``check(layer, input, ...)`` of a recurrent layer to see the dtype of the weights.

    The check insists that the input has it.
    """

    @functools.wraps(check)
    def wrapper(layer: Any, input: Tensor, *args: Any) -> Any:
        if _amp_state.handle.is_active() and _concerned(input):
            input = torch.empty(input.shape, dtype=layer._flat_weights[0].dtype, device="meta")
        return check(layer, input, *args)

    return wrapper  # type: ignore[return-value]


def float_(function: F) -> F:
    """Wrap ``function`` to get FP32 arguments."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _amp_state.handle.is_active():
            args, kwargs = _map((args, kwargs), _float)
        return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


def promote(function: F) -> F:
    """Wrap ``function`` to get FP32 arguments where half and FP32 ones meet."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _amp_state.handle.is_active() and len({t.dtype for t in _tensors((args, kwargs))}) > 1:
            args, kwargs = _map((args, kwargs), _float)
        return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


def match_first(function: F) -> F:
    """Wrap an in-place ``function`` to get all arguments in the dtype of the first."""

    @functools.wraps(function)
    def wrapper(first: Any, *args: Any, **kwargs: Any) -> Any:
        if _amp_state.handle.is_active() and isinstance(first, Tensor) and _concerned(first):
            args, kwargs = _map((args, kwargs), lambda t: t.to(first.dtype))
        return function(first, *args, **kwargs)

    return wrapper  # type: ignore[return-value]


def refuse_half(function: F, message: str | None = None) -> F:
    """Wrap ``function`` to raise NotImplementedError for half arguments."""
    name = getattr(function, "__name__", str(function))
    text = message or (
        f"{name} in place on a half tensor: its result belongs in FP32. Use {name.rstrip('_')} out "
        "of place, or call .float() first"
    )

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _amp_state.handle.is_active() and any(
            t.dtype in HALF_DTYPES for t in _tensors((args, kwargs))
        ):
            raise NotImplementedError(text)
        return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]
