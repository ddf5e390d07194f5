"""Find the functions that a model runs, and give rewritten code to those with activations."""

import functools
import inspect
import weakref
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import nn

from tritonamp.casts.written import ops
from tritonamp.casts.written.modules import note_rewritten, of_module
from tritonamp.casts.written.rewriting import Site, rewritten
from tritonamp.casts.written.trees import NAME

_NOT_USERS = "torch", "tritonamp", "builtins"


class _Row(NamedTuple):
    """Both codes of a function.

    Attributes:
        original: its own code.
        code: the code that runs while a model is enabled.
        modules: attributes of ``self`` that count as modules with an activation.
        sites: the formulas.
    """

    original: CodeType
    code: CodeType
    modules: frozenset[str]
    sites: tuple[Site, ...]


# for the whole process
_rows: "weakref.WeakKeyDictionary[FunctionType, _Row]" = weakref.WeakKeyDictionary()


def install(model: nn.Module) -> list[str]:
    """Rewrite the functions that a model's forwards run, until ``restore``.

    Returns:
        Function and line of each formula that runs as one op, such as "model.MLP.forward:12".
    """
    found: set[str] = set()
    for function, owners in _functions_of(model).items():
        modules = {
            name
            for owner in owners
            for name, child in owner._modules.items()
            if of_module(child) is not None
        }
        row = _rewrite(function, frozenset(modules))
        if row is not None:
            name = f"{str(function.__module__).rpartition('.')[2]}.{function.__qualname__}"
            found |= {f"{name}:{s.line}" for s in row.sites if not s.module or s.module in modules}
    place()
    return sorted(found)


def place() -> None:
    """Give the functions that ``install`` has rewritten their new code, again after ``restore``."""
    for function, row in _rows.items():
        if function.__code__ is row.original:
            function.__globals__[NAME] = ops
            function.__code__ = row.code


def restore() -> None:
    """Give all functions their own code back.

    The global for ``ops`` stays, because other threads may be inside rewritten code.
    """
    for function, row in _rows.items():
        if function.__code__ is row.code:  # else other code has replaced it since
            function.__code__ = row.original


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
    row = _rows[function] = _Row(function.__code__, new.code, modules, new.sites)
    return row


def _functions_of(model: nn.Module) -> dict[FunctionType, list[nn.Module]]:
    """Return the functions that forwards of a model may run, with the modules they belong to.

    They are methods and attributes of its modules, and functions that their code names.
    """
    found: dict[FunctionType, list[nn.Module]] = {}
    of_class: dict[tuple[type, frozenset[FunctionType]], set[FunctionType]] = {}
    for module in model.modules():
        cls = type(module)
        key = cls, frozenset(_plain_functions(vars(module).values()))
        if key not in of_class:  # modules of one class run the same functions
            of_class[key] = _reachable([*_methods(cls), *key[1]])
        for function in of_class[key]:
            found.setdefault(function, []).append(module)
    return found


def _reachable(functions: list[FunctionType]) -> set[FunctionType]:
    """Return functions, and the functions that their code names."""
    found: set[FunctionType] = set()
    while functions:
        function = functions.pop()
        if function not in found and _is_users(function):
            found.add(function)
            functions += _named_functions(function)
    return found


def _methods(cls: type) -> Iterator[FunctionType]:
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] not in _NOT_USERS:
            yield from _plain_functions(vars(base).values())


def _plain_functions(values: Iterable[Any]) -> Iterator[FunctionType]:
    """Yield the functions in values, without decorators, partial arguments and binding."""
    for value in values:
        while isinstance(value, functools.partial):
            value = value.func
        # other objects may answer any question about attributes, or raise
        if isinstance(value, (MethodType, staticmethod, classmethod)):
            value = value.__func__
        seen: set[int] = set()
        while isinstance(value, FunctionType) and id(value) not in seen:
            seen.add(id(value))
            below = vars(value).get("__wrapped__")
            if below is None:
                yield value
            value = below


def _named_functions(function: FunctionType) -> Iterator[FunctionType]:
    """Yield functions that code names: globals, and attributes of global modules."""
    names, outer = function.__code__.co_names, function.__globals__
    owners = [outer[name] for name in names if isinstance(outer.get(name), ModuleType)]
    for name in names:
        yield from _plain_functions([outer.get(name), *(vars(o).get(name) for o in owners)])


def _is_users(function: FunctionType) -> bool:
    if inspect.isgeneratorfunction(function):  # it may go on after ``restore``
        return False
    return str(function.__module__).partition(".")[0] not in _NOT_USERS
