"""Find the functions that a model runs, and give rewritten code to those with activations."""

import functools
import inspect
import weakref
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import NamedTuple

from torch import nn

from tritonamp.casts.written import ops
from tritonamp.casts.written.modules import note_rewritten, of_module
from tritonamp.casts.written.rewriting import rewritten
from tritonamp.casts.written.trees import NAME

_NOT_USERS = "torch", "tritonamp", "builtins"


class _Row(NamedTuple):
    """Both codes of a function.

    Attributes:
        original: its own code.
        code: the code that runs while a model is enabled.
        modules: attributes of ``self`` that count as modules with an activation.
        lines: lines of the activations.
    """

    original: CodeType
    code: CodeType
    modules: frozenset[str]
    lines: tuple[int, ...]


# for the whole process
_rows: "weakref.WeakKeyDictionary[FunctionType, _Row]" = weakref.WeakKeyDictionary()


def install(model: nn.Module) -> list[str]:
    """Rewrite the functions that a model's forwards run, until ``restore``.

    Returns:
        Name and line of each activation that runs as one op, such as "MLP.forward:12".
    """
    found = []
    for function, owners in _functions_of(model).items():
        modules = {
            name
            for owner in owners
            for name, child in owner._modules.items()
            if of_module(child) is not None
        }
        row = _rewrite(function, frozenset(modules))
        if row is not None:
            found += [f"{function.__qualname__}:{line}" for line in row.lines]
    place()
    return sorted(found)


def place() -> None:
    """Give the functions that ``install`` has rewritten their new code, again after ``restore``."""
    for function, row in _rows.items():
        if function.__code__ is row.original:
            function.__globals__[NAME] = ops
            function.__code__ = row.code


def restore() -> None:
    """Give all functions their own code back."""
    for function, row in _rows.items():
        if function.__code__ is row.code:  # else other code has replaced it since
            function.__code__ = row.original
        function.__globals__.pop(NAME, None)


def _rewrite(function: FunctionType, modules: frozenset[str]) -> _Row | None:
    row = _rows.get(function)
    if row is not None and function.__code__ in (row.original, row.code):
        if modules <= row.modules:
            return row
        function.__code__, modules = row.original, modules | row.modules
    new = rewritten(function, modules.__contains__)
    if new is None:
        return None
    note_rewritten(function, new.code)
    row = _rows[function] = _Row(function.__code__, new.code, modules, new.lines)
    return row


def _functions_of(model: nn.Module) -> dict[FunctionType, list[nn.Module]]:
    """Return the functions that forwards of a model may run, with the modules they belong to.

    They are found by the names in the code of forwards, and of functions found so.
    """
    found: dict[FunctionType, list[nn.Module]] = {}
    for module in model.modules():
        seen: set[FunctionType] = set()
        pending = [*_own_functions(module)]
        while pending:
            function = pending.pop()
            if function in seen or not _is_users(function):
                continue
            seen.add(function)
            found.setdefault(function, []).append(module)
            pending += _named_functions(function, type(module))
    return found


def _own_functions(module: nn.Module) -> Iterator[FunctionType]:
    """Yield the forward of a module, and functions in its attributes."""
    for value in (type(module).forward, *vars(module).values()):
        while isinstance(value, functools.partial):
            value = value.func
        function = inspect.unwrap(getattr(value, "__func__", value)) if callable(value) else None
        if isinstance(function, FunctionType):
            yield function


def _named_functions(function: FunctionType, cls: type) -> Iterator[FunctionType]:
    """Yield functions that code names: globals, those in global modules, methods of ``cls``."""
    names = function.__code__.co_names
    outer = function.__globals__
    owners = [outer[name] for name in names if isinstance(outer.get(name), ModuleType)]
    for name in names:
        for value in (
            outer.get(name),
            inspect.getattr_static(cls, name, None),
            *(vars(owner).get(name) for owner in owners),
        ):
            if isinstance(value, (FunctionType, staticmethod, classmethod)):
                unwrapped = inspect.unwrap(getattr(value, "__func__", value))
                if isinstance(unwrapped, FunctionType):
                    yield unwrapped


def _is_users(function: FunctionType) -> bool:
    return function.__module__.partition(".")[0] not in _NOT_USERS
