"""The user's own functions in the cast lists, by decorator or by name."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from tritonamp.casts.active import under_op_policy
from tritonamp.casts.tree import Cast, cast_tree, from_half, to_half
from tritonamp.policy import HALF_DTYPES

F = TypeVar("F", bound=Callable[..., Any])

_DEVICE_TYPES = ("cuda", "cpu")


def _half_dtype() -> torch.dtype | None:
    """The half dtype of the op policy that we are under, or None outside."""
    for device_type in _DEVICE_TYPES:
        if torch.is_autocast_enabled(device_type) and under_op_policy():
            return torch.get_autocast_dtype(device_type)
    return None


@contextlib.contextmanager
def disable_casts() -> Iterator[None]:
    """Turns the op policy off inside an enabled forward: every op runs in the dtype of its inputs."""
    with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
        yield


def half_function(function: F) -> F:
    """Inside an enabled forward, ``function`` gets its floating tensors in the half dtype."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        half = _half_dtype()
        if half is not None:
            args, kwargs = cast_tree((args, kwargs), to_half(half))
        return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


def float_function(function: F) -> F:
    """Inside an enabled forward, ``function`` gets its half tensors in FP32 and runs without casts."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _half_dtype() is None:
            return function(*args, **kwargs)
        args, kwargs = cast_tree((args, kwargs), from_half(torch.float32))
        with disable_casts():
            return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


def promote_function(function: F) -> F:
    """Inside an enabled forward, ``function`` gets its floating tensors in the widest dtype among
    them.
    """

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if (
            _half_dtype() is not None
            and len(_dtypes((args, kwargs)) & {*HALF_DTYPES, torch.float32}) > 1
        ):
            args, kwargs = cast_tree((args, kwargs), Cast(HALF_DTYPES, torch.float32))
        return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


def _dtypes(value: Any) -> set[torch.dtype]:
    if isinstance(value, Tensor):
        return {value.dtype}
    items = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, (list, tuple))
        else ()
    )
    return set().union(*map(_dtypes, items))


class _Registered:
    """Functions registered by name; in place of the originals while a model is enabled."""

    def __init__(self) -> None:
        self.wanted: list[tuple[Any, str, Callable[[Any], Any]]] = []
        self.originals: list[tuple[Any, str, Any]] = []  # what vars() held, or _INHERITED
        self.owners = 0

    def put(self) -> None:
        for module, name, wrap in self.wanted[len(self.originals) :]:
            self.originals.append((module, name, vars(module).get(name, _INHERITED)))
            found = inspect.getattr_static(module, name)
            if isinstance(found, (staticmethod, classmethod)):
                setattr(module, name, type(found)(wrap(found.__func__)))
            else:
                setattr(module, name, wrap(getattr(module, name)))

    def take_back(self) -> None:
        while self.originals:
            module, name, original = self.originals.pop()
            if original is _INHERITED:
                delattr(module, name)
            else:
                setattr(module, name, original)


_INHERITED = object()
_registered = _Registered()


def _register(module: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    if not callable(getattr(module, name, None)):
        where = getattr(module, "__name__", repr(module))
        raise ValueError(
            f"no function named {name!r} in {where}: allowed is the name of a function that it has"
        )
    _registered.wanted.append((module, name, wrap))
    if _registered.owners:
        _registered.put()


def register_half_function(module: Any, name: str) -> None:
    """Puts ``module.name`` on the half list, from now (or the first ``enable``) to the last
    ``disable``.

    Raises:
        ValueError: ``module`` has no function of that name.
    """
    _register(module, name, half_function)


def register_float_function(module: Any, name: str) -> None:
    """Puts ``module.name`` on the FP32 list; see ``register_half_function``."""
    _register(module, name, float_function)


def register_promote_function(module: Any, name: str) -> None:
    """Puts ``module.name`` on the promote list; see ``register_half_function``."""
    _register(module, name, promote_function)


def acquire() -> None:
    """One more model is enabled."""
    _registered.owners += 1
    _registered.put()


def release() -> None:
    """One less; the last one puts the originals back."""
    _registered.owners -= 1
    if _registered.owners == 0:
        _registered.take_back()
