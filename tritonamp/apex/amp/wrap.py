"""Wrappers that cast a function's arguments while the casts of ``_amp_state.handle`` are on."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from tritonamp.apex.amp._amp_state import _amp_state
from tritonamp.policy import HALF_DTYPES

F = TypeVar("F", bound=Callable[..., Any])
Arguments = tuple[Any, dict[str, Any]]  # args, kwargs
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


def _adapting(function: F, adapt: Callable[[Arguments], Arguments]) -> F:
    """Wrap ``function`` to get what ``adapt`` makes of its arguments while casts are on."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _amp_state.handle.is_active():
            args, kwargs = adapt((args, kwargs))
        return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


def half(function: F, dtype: torch.dtype | None = None) -> F:
    """Wrap ``function`` to get ``dtype`` arguments; None: the half dtype of the casts."""

    def to_half(arguments: Arguments) -> Any:
        handle = _amp_state.handle
        return _map(arguments, lambda t: handle.cast(t, dtype or handle.dtype))

    return _adapting(function, to_half)


def half_op(function: F) -> F:
    """Wrap an op of torch as ``half`` does; on CPU it is computed in FP32 and rounded once.

    It starts from the half arguments there: half kernels are slow or missing on CPU, and it is what
    a Tensor Core does.
    """

    def compute(*args: Any, **kwargs: Any) -> Any:
        handle = _amp_state.handle
        if not handle.is_active() or _device_type((args, kwargs)) != "cpu":
            return function(*args, **kwargs)
        with handle._disable_casts():
            args, kwargs = _to_float((args, kwargs))
            result = function(*args, **kwargs)
        return _map(result, lambda t: t.to(handle.dtype))

    return half(functools.wraps(function)(compute))  # type: ignore[return-value]


def half_layer(function: F) -> F:
    """Wrap a layer of a recurrent net as ``half_op`` does.

    On CUDA autocast does it, which lays the half weights out as cuDNN wants them.
    """
    on_cpu = half_op(function)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        handle = _amp_state.handle
        if not handle.is_active() or _device_type((args, kwargs)) != "cuda":
            return on_cpu(*args, **kwargs)
        with torch.autocast("cuda", dtype=handle.dtype, cache_enabled=False):
            return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


def _device_type(arguments: Arguments) -> str | None:
    """Return where the first tensor is that is to be cast; None: there is none."""
    return next((tensor.device.type for tensor in _tensors(arguments)), None)


def any_input_dtype(check: F) -> F:
    """Wrap ``check(layer, input, ...)`` of a recurrent layer to see the dtype of the weights.

    The check insists that the input has it.
    """

    def like_weights(arguments: Arguments) -> Arguments:
        (layer, input, *others), kwargs = arguments
        if _concerned(input):
            input = torch.empty(input.shape, dtype=layer._flat_weights[0].dtype, device="meta")
        return (layer, input, *others), kwargs

    return _adapting(check, like_weights)


def float_function(function: F) -> F:
    """Give ``function`` its half tensors in FP32 while casts are on; a decorator."""
    return _adapting(function, _to_float)


def _to_float(arguments: Arguments) -> Any:
    return _map(arguments, lambda t: t.float())


def promote_function(function: F) -> F:
    """Give ``function`` FP32 where half and FP32 tensors meet, while casts are on; a decorator."""

    def to_widest(arguments: Arguments) -> Any:
        dtypes = {tensor.dtype for tensor in _tensors(arguments)}
        return _to_float(arguments) if len(dtypes) > 1 else arguments

    return _adapting(function, to_widest)


def match_first(function: F) -> F:
    """Wrap an in-place ``function`` to get all arguments in the dtype of the first."""

    def like_first(arguments: Arguments) -> Any:
        first = next(iter(arguments[0]), None)
        if isinstance(first, Tensor) and _concerned(first):
            return _map(arguments, lambda t: t.to(first.dtype))
        return arguments

    return _adapting(function, like_first)


def refuse_half(function: F, message: str | None = None) -> F:
    """Wrap ``function`` to raise NotImplementedError for half arguments."""
    name = getattr(function, "__name__", str(function))
    text = message or (
        f"{name} in place on a half tensor: its result belongs in FP32. Use {name.rstrip('_')} out "
        "of place, or call .float() first"
    )

    def refuse(arguments: Arguments) -> Arguments:
        if any(t.dtype in HALF_DTYPES for t in _tensors(arguments)):
            raise NotImplementedError(text)
        return arguments

    return _adapting(function, refuse)
