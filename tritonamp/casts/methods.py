"""The methods, other than ``forward``, by which a model is used: ``encode``, ``generate``...

A method that reaches the model's parameters runs as ``forward`` does. Its code decides: a method
reaches the attributes that it takes from ``self`` by name, itself or through methods that it names.
So a loss that happens to be a method is left alone. So is a method that changes a model, or trains
it.
"""

import dis
import functools
import inspect
from collections import ChainMap
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from torch import nn

from tritonamp.class_swap import base_class

_LIBRARIES = ("torch", "builtins", "abc", "typing")

_CHANGES = tuple(
    """
    add_ configure_ convert_ create_ delete_ disable_ enable_ export_ freeze fuse_
    gradient_checkpointing_ init_ initialize load merge_ on_ prune_ push_to_ quantize_ register_
    remove_ replace_ reset resize_ save set_ setup tie_ to_ unfreeze unfuse_ unload unmerge_
    """.split()
)
"""Beginnings of the names of methods that change a model, and compute nothing with it."""

_TRAINS = {"backward", "manual_backward", "zero_grad"}
"""Calls that mark a whole training step. The forward inside such a step is entered by itself."""

_LOADS = ("LOAD_FAST", "LOAD_DEREF")
_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")


class UsedNames(NamedTuple):
    """The names in a function's code."""

    of_self: frozenset[str]  # attributes of its first argument
    all: frozenset[str]  # all attributes and globals


def entered_methods(model: nn.Module, cls: type) -> tuple[str, ...]:
    """Return the methods of ``cls``, the model's class, that run as its ``forward`` does."""
    classes = _written_classes(cls)
    candidates = list(_candidates(classes))
    if not candidates:
        return ()
    named = model.named_parameters(remove_duplicate=False)
    reached = {name.partition(".")[0] for name, _ in named}
    return tuple(name for name in candidates if _reaches(classes, name, reached))


def other_users(model: nn.Module, names: set[str]) -> list[str]:
    """Return the names of the model's other methods that take one of ``names`` from ``self``."""
    cls = base_class(type(model))
    classes, entered = _written_classes(cls), entered_methods(model, cls)
    methods = {name for cls in classes for name in vars(cls)} - {"__init__", "forward", *entered}

    def takes(method: str) -> bool:
        return any(used.of_self & names for used in _used(classes, method))

    return sorted(filter(takes, methods))


def _used(classes: tuple[type, ...], method: str) -> Iterator[UsedNames]:
    """Yield the names in each function of a method."""
    for cls in classes:
        for function in _functions(vars(cls).get(method)):
            code = function.__code__
            yield _names(code, code.co_varnames[0] if code.co_argcount else "")


def _written_classes(cls: type) -> tuple[type, ...]:
    """Return the class and its bases, without those of torch and Python."""
    return tuple(c for c in cls.__mro__ if c.__module__.partition(".")[0] not in _LIBRARIES)


def _candidates(classes: Iterable[type]) -> Iterator[str]:
    """Yield the names of public methods that nn.Module does not have."""
    for name, value in ChainMap(*[dict(vars(cls)) for cls in classes]).items():
        if name.startswith(("_", *_CHANGES)) or hasattr(nn.Module, name):
            continue
        if isinstance(value, (FunctionType, functools.partialmethod)) and _returns_at_once(value):
            yield name


def _returns_at_once(method: Any) -> bool:
    """Return whether a method's code has run when it returns. Generators run later."""
    later = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    return not any(is_kind(f) for f in _functions(method) for is_kind in later)


def _reaches(classes: tuple[type, ...], method: str, reached: set[str]) -> bool:
    """Return whether a method takes one of the names ``reached`` from ``self``, and does not train.

    A call of ``forward`` does not count, because it casts by itself.
    """
    seen, todo, found = {"forward"}, [method], False
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        found = found or name in reached
        for used in _used(classes, name):
            if used.all & _TRAINS:
                return False
            todo += used.of_self
    return found


def _functions(attribute: Any) -> list[FunctionType]:
    """Return the functions inside a method, a property or the like, decorated or not."""
    for inner in ("__func__", "func", "fget"):  # of static methods, partials, properties
        attribute = getattr(attribute, inner, attribute)
    found: list[FunctionType] = []
    todo = [attribute]
    while todo:
        function = todo.pop()
        if isinstance(function, FunctionType) and function not in found:
            found.append(function)
            todo.append(getattr(function, "__wrapped__", None))
            todo += [_content(cell) for cell in function.__closure__ or ()]
    return found


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty still
        return None


@functools.cache
def _names(code: CodeType, me: str) -> UsedNames:
    """Return the names in a function's code. ``me`` is the name of its first argument."""
    of_self: set[str] = set()
    loaded: Any = None
    for step in dis.get_instructions(code):
        if step.opname in _ATTRIBUTE and loaded == me:
            of_self.add(step.argval)
        if step.opname.startswith(_LOADS):
            # from Python 3.13 on one instruction may load two names
            loaded = step.argval[-1] if isinstance(step.argval, tuple) else step.argval
        elif step.opname != "EXTENDED_ARG":
            loaded = None
    names = {*code.co_names}
    texts = {text for text in code.co_consts if isinstance(text, str)}
    if "getattr" in names:
        of_self |= texts
    if "super" in names:
        of_self |= names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):  # a lambda, a comprehension
            found = _names(inner, me if me in inner.co_freevars else "")
            of_self, names = of_self | found.of_self, names | found.all
    return UsedNames(frozenset(of_self), frozenset(names))
