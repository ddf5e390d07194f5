"""``module:function`` on the command line: finds the function, and calls it."""

import contextlib
import difflib
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn
from torch.optim import Optimizer

RETURNS = (
    "(model, optimizer, batch), (model, optimizer, batch, loss_fn), or (model, batch); batch is a "
    "tuple of inputs, or a mapping of keywords"
)


def made(factory: str) -> tuple[Any, ...]:
    """Call ``module:function`` or ``file.py:function``; return the arguments for a forecast.

    A module that parses the command line finds no arguments there.

    Raises:
        ValueError: file, module or function are missing, one of them raises or exits, or the result
            is something else than ``RETURNS``.
    """
    place, _, name = factory.rpartition(":")
    if not place or not name or place.endswith(":"):
        raise ValueError(f"expected module:factory, such as train:make, got {factory!r}")
    is_file = place.endswith(".py") or os.sep in place
    path = Path(place)
    if is_file and not path.is_file():
        raise ValueError(f"{place}: there is no such file{_near(path.name, _scripts(path.parent))}")
    with _on_path(path.parent if is_file else Path()):
        module = _imported(path.stem if is_file else place)
        if is_file and Path(module.__file__ or "").resolve() != path.resolve():
            raise ValueError(
                f"{place}: {path.stem!r} is also the name of another module, {module.__file__}: "
                "rename the file"
            )
        return _arguments(factory, _result(factory, module, name))


@contextlib.contextmanager
def _on_path(folder: Path) -> Iterator[None]:
    """Find modules in ``folder`` and in the current one, as ``python train.py`` does."""
    added, arguments = [str(folder.resolve()), str(Path.cwd())], sys.argv[1:]
    sys.path[:0] = added
    sys.argv[1:] = []
    try:
        yield
    finally:
        sys.argv[1:] = arguments
        for each in added:
            if each in sys.path:
                sys.path.remove(each)


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == name
        near = _near(name, [script.removesuffix(".py") for script in _scripts(Path())])
        said = near if is_missing else _at(error)
        raise ValueError(
            f"cannot import {name!r}: {type(error).__name__}: {error}{said}"
        ) from error


def _result(factory: str, module: ModuleType, name: str) -> Any:
    function = getattr(module, name, None)
    if not callable(function):
        own = [
            key
            for key, value in vars(module).items()
            if callable(value)
            and not key.startswith("_")
            and getattr(value, "__module__", "") == module.__name__
        ]
        listed = ", ".join(own) or "none"
        raise ValueError(
            f"{module.__name__!r} has no function {name!r}; it has {listed}{_near(name, own)}"
        )
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise ValueError(
            f"{factory}: expected a function without arguments, got "
            f"{name}{inspect.signature(function)}: {error}"
        ) from error
    except ValueError:  # a builtin has no signature
        pass
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise ValueError(f"{factory} raised {type(error).__name__}: {error}{_at(error)}") from error


def _arguments(factory: str, result: Any) -> tuple[Any, ...]:
    parts = tuple(result) if isinstance(result, (tuple, list)) else ()
    wrong = _wrong(parts)
    if wrong:
        kinds = ", ".join(type(part).__name__ for part in parts)
        got = f"a tuple of {kinds}: {wrong}" if parts else type(result).__name__
        raise ValueError(f"{factory}: expected {RETURNS}, got {got}")
    return (parts[0], None, parts[1]) if len(parts) == 2 else parts


def _wrong(parts: tuple[Any, ...]) -> str:
    """Return what is wrong with the result of a factory, or ""."""
    if not 2 <= len(parts) <= 4:
        return f"these are {len(parts)}"
    model, *rest = parts
    if not isinstance(model, nn.Module):
        return "the first is no torch.nn.Module"
    if len(rest) == 1:
        return "the second is an optimizer, and no batch" * isinstance(rest[0], Optimizer)
    optimizers = rest[0] if isinstance(rest[0], (list, tuple)) else [rest[0]]
    if rest[0] is not None and not all(isinstance(each, Optimizer) for each in optimizers):
        return "the second is no optimizer"
    return "the fourth is no function" * (len(rest) == 3 and not callable(rest[2]))


def _scripts(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.py"))


def _near(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _at(error: BaseException) -> str:
    """Return the innermost line of a traceback that is in the user's folders, or ""."""
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if any(Path(frame.filename).is_relative_to(folder) for folder in sys.path[:2])
        and "site-packages" not in frame.filename
    ]
    return f" ({os.path.relpath(own[-1].filename)}:{own[-1].lineno})" if own else ""
