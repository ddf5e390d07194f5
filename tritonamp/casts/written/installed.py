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
from tritonamp.casts.written.probabilities import kind_of_module, last_of
from tritonamp.casts.written.rewriting import Rewritten, rewritten
from tritonamp.casts.written.trees import NAME

_NOT_USERS = "torch", "tritonamp", "builtins"


class _Facts(NamedTuple):
    """Facts about the modules that run a function.

    Attributes:
        activations: attributes of ``self`` that count as modules with an activation.
        probabilities: attributes of ``self`` that count as modules with probabilities, each with
            its kind.
        is_result: whether the function is the forward of an enabled model.
    """

    activations: frozenset[str]
    probabilities: frozenset[tuple[str, str]]
    is_result: bool

    def joined(self, other: "_Facts") -> "_Facts":
        """Return the facts about all modules that one of the two is about."""
        return _Facts(
            self.activations | other.activations,
            self.probabilities | other.probabilities,
            self.is_result or other.is_result,
        )


class _Row(NamedTuple):
    """The two codes of a function.

    Attributes:
        original: its own code.
        new: the code that runs while a model is enabled, and the formulas in it.
        facts: facts that the new code depends on.
    """

    original: CodeType
    new: Rewritten
    facts: _Facts


class Installed(NamedTuple):
    """The rewritten formulas of a model.

    Attributes:
        sites: function and line of each formula, such as "model.MLP.forward:12".
        wide: modules whose probabilities have to be FP32.
    """

    sites: list[str]
    wide: list[nn.Module]


# for the whole process
_rows: "weakref.WeakKeyDictionary[FunctionType, _Row]" = weakref.WeakKeyDictionary()


def install(model: nn.Module, returns: bool = True) -> Installed:
    """Rewrite the functions that a model's forwards run, until ``restore``.

    Args:
        model: the model, before it is enabled.
        returns: whether half results of the model become FP32.
    """
    sites: set[str] = set()
    last = last_of(model) if returns else None
    wide: dict[nn.Module | None, None] = {last: None}
    forwards = {*_plain_functions([vars(model).get("forward", type(model).forward)])}
    for function, owners in _functions_of(model).items():
        is_result = returns and function in forwards
        facts = _facts_of(owners, is_result)
        row = _rewrite(function, facts)
        if row is None:
            continue
        name = f"{str(function.__module__).rpartition('.')[2]}.{function.__qualname__}"
        for site in row.new.sites:
            is_used = is_result or not site.is_result
            if is_used and site.module in ("", *facts.activations):
                sites.add(f"{name}:{site.line}")
        for owner in owners:
            names = row.new.read | (row.new.returned if is_result and owner is model else set())
            wide |= dict.fromkeys(last_of(owner._modules.get(name)) for name in names)
    place()
    return Installed(sorted(sites), [m for m in wide if m is not None and m is not model])


def _facts_of(owners: Iterable[nn.Module], is_result: bool) -> _Facts:
    children = [(name, m) for owner in owners for name, m in owner._modules.items()]
    return _Facts(
        frozenset(name for name, m in children if of_module(m) is not None),
        frozenset((name, kind) for name, m in children if (kind := kind_of_module(m))),
        is_result,
    )


def place() -> None:
    """Give the functions that ``install`` has rewritten their new code, again after ``restore``."""
    for function, row in _rows.items():
        if function.__code__ is row.original:
            function.__globals__[NAME] = ops
            function.__code__ = row.new.code


def restore() -> None:
    """Give all functions their own code back.

    The global for ``ops`` stays, because other threads may be inside rewritten code.
    """
    for function, row in _rows.items():
        if function.__code__ is row.new.code:  # else other code has replaced it since
            function.__code__ = row.original


def _rewrite(function: FunctionType, facts: _Facts) -> _Row | None:
    row = _rows.get(function)
    if row is not None and function.__code__ in (row.original, row.new.code):
        joined = facts.joined(row.facts)
        if joined == row.facts:
            return row
        function.__code__, facts = row.original, joined
    kinds = dict(facts.probabilities)
    new = rewritten(function, facts.activations.__contains__, kinds, facts.is_result)
    if new is None:
        return None
    note_rewritten(function, new.code)
    row = _rows[function] = _Row(function.__code__, new, facts)
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
