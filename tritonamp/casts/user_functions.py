"""The user's own functions on the cast lists, by decorator or by name."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from tritonamp.ambient import device_types
from tritonamp.casts import linear_losses
from tritonamp.casts.active import half_dtype
from tritonamp.casts.op_rules import floating_dtypes
from tritonamp.casts.tree import cast_tree, from_half, to_half

F = TypeVar("F", bound=Callable[..., Any])


@contextlib.contextmanager
def disable_casts() -> Iterator[None]:
    """Turn the op policy off inside the block. Ops then run in the dtype of their inputs."""
    with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
        if len(device_types) == 2:
            yield
        else:  # a process has one kind of other accelerators
            with torch.autocast(device_types[-1], enabled=False):
                yield


def half_function(function: F) -> F:
    """Return ``function`` with FP32 tensor arguments cast to half, inside an enabled forward."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        half = half_dtype()
        if half is not None:
            args, kwargs = cast_tree((args, kwargs), to_half(half))
        return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


def float_function(function: F) -> F:
    """Return ``function`` with half tensor arguments cast to FP32, inside an enabled forward.

    The function itself runs without further casts.
    """

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if half_dtype() is None:
            return function(*args, **kwargs)
        args, kwargs = cast_tree((args, kwargs), from_half(torch.float32))
        with disable_casts():
            return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


def promote_function(function: F) -> F:
    """Return ``function`` with mixed half and FP32 arguments cast to FP32, in enabled forwards."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if half_dtype() is not None and len(set(floating_dtypes((args, kwargs)))) > 1:
            args, kwargs = cast_tree((args, kwargs), from_half(torch.float32))
        return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


class _Registered:
    """Functions registered by name. Wrappers replace them while a model is enabled.

    The first is torch's own linear cross entropy.

    Attributes:
        wanted: owner and name of each function, and the decorator that makes its wrapper.
        in_place: whether a model is enabled.
    """

    def __init__(self) -> None:
        self.wanted: list[tuple[Any, str, Callable[[Any], Any]]] = []
        if hasattr(torch.nn.functional, linear_losses.NAME):  # torch 2.13 and later
            row = torch.nn.functional, linear_losses.NAME, linear_losses.ours_inside
            self.wanted.append(row)
        self.in_place = False
        self._undo = contextlib.ExitStack()

    def replace_originals(self) -> None:
        """Replace the registered functions, unless they are replaced already."""
        if not self.in_place:
            self.in_place = True
            for module, name, wrap in self.wanted:
                self.replace(module, name, wrap)

    def replace(self, module: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        """Replace one function by its wrapper."""
        if name in vars(module):
            self._undo.callback(setattr, module, name, vars(module)[name])
        else:  # it is inherited
            self._undo.callback(delattr, module, name)
        found = inspect.getattr_static(module, name)
        if isinstance(found, (staticmethod, classmethod)):
            setattr(module, name, type(found)(wrap(found.__func__)))
        else:
            setattr(module, name, wrap(getattr(module, name)))

    def restore_originals(self) -> None:
        """Put all originals back."""
        self.in_place = False
        self._undo.close()


registered = _Registered()


def _register(module: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    if not callable(getattr(module, name, None)):
        where = getattr(module, "__name__", repr(module))
        raise ValueError(
            f"name: expected the name of a function in {where}, got {name!r}: it has none"
        )
    registered.wanted.append((module, name, wrap))
    if registered.in_place:
        registered.replace(module, name, wrap)


def register_half_function(module: Any, name: str) -> None:
    """Put ``module.name`` on the half list while any model is enabled.

    Args:
        module: module or class that has the function.
        name: name of the function in ``module``.

    Raises:
        ValueError: ``module`` has no function of that name.
    """
    _register(module, name, half_function)


def register_float_function(module: Any, name: str) -> None:
    """Put ``module.name`` on the FP32 list while any model is enabled.

    Args:
        module: module or class that has the function.
        name: name of the function in ``module``.

    Raises:
        ValueError: ``module`` has no function of that name.
    """
    _register(module, name, float_function)


def register_promote_function(module: Any, name: str) -> None:
    """Put ``module.name`` on the promote list while any model is enabled.

    Args:
        module: module or class that has the function.
        name: name of the function in ``module``.

    Raises:
        ValueError: ``module`` has no function of that name.
    """
    _register(module, name, promote_function)
