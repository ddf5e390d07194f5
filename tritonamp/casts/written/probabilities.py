"""Give softmaxes and sigmoids an FP32 result if code takes its logarithm, or returns it.

In float16 probabilities below 3e-8 are 0, and sigmoids of numbers above 8.3 are 1. A logarithm or a
fraction of these is not finite, in a model or in the loss.
"""

import ast
import copy
from collections.abc import Hashable, Iterable, Mapping
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from tritonamp.casts.written.flows import Flows
from tritonamp.casts.written.reader import Reader
from tritonamp.casts.written.trees import call, name_node, of_ops, placed

_SOFTMAXES = torch.softmax, functional.softmax, functional.softmin, torch.special.softmax
_SIGMOIDS = torch.sigmoid, functional.sigmoid, torch.special.expit
_NAMES = frozenset({"expit", "sigmoid", "softmax", "softmin"})
_MODULES: dict[type, str] = {
    nn.Softmax: "softmax",
    nn.Softmax2d: "softmax",
    nn.Softmin: "softmax",
    nn.Sigmoid: "sigmoid",
}


class Widened(NamedTuple):
    """A definition in which probabilities that are read, or returned, are FP32.

    Attributes:
        tree: the definition.
        read: lines of softmaxes and sigmoids whose results are read.
        returned: lines of softmaxes and sigmoids whose results are only returned.
        modules_read: attributes of ``self`` that are modules whose results are read.
        modules_returned: attributes of ``self`` that are modules whose results are only returned.
    """

    tree: ast.FunctionDef
    read: tuple[int, ...] = ()
    returned: tuple[int, ...] = ()
    modules_read: frozenset[str] = frozenset()
    modules_returned: frozenset[str] = frozenset()


def last_of(module: Any) -> nn.Module | None:
    """Return the softmax or sigmoid of torch that computes a module's result; None: none does."""
    while isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        if not len(module) or "forward" in vars(module):
            return None
        module = module[-1]
    return module if type(module) in _MODULES and "forward" not in vars(module) else None


def kind_of_module(module: Any) -> str:
    """Return "softmax" or "sigmoid" for a module that ``last_of`` knows, else ""."""
    return _MODULES.get(type(last_of(module)), "")


def widened(
    function: FunctionType, tree: ast.FunctionDef, modules: Mapping[str, str], is_result: bool
) -> Widened:
    """Return a definition with FP32 probabilities.

    Args:
        function: the function.
        tree: its definition.
        modules: kind of the probabilities of attributes of ``self``, by name.
        is_result: whether results of the function are results of a model.
    """
    code = function.__code__
    names = {*code.co_names}
    if _NAMES.isdisjoint(names) and names.isdisjoint(modules):
        return Widened(tree)
    owner = code.co_varnames[0] if code.co_argcount else ""
    own = copy.deepcopy(tree)
    calls = _Calls(Reader(function), owner, modules)
    flows = Flows(calls.reader, calls.kind_of)
    flows.block(own.body)
    read = flows.read
    returned = flows.returned - read if is_result and owner else set()
    modules_read, modules_returned = calls.modules(read), calls.modules(returned)
    lines_read, lines_returned = list[int](), list[int]()
    logs = _logs_of(own, calls)
    for node in ast.walk(own):
        if not isinstance(node, ast.Call) or calls.module(node):
            continue
        if node in returned:
            lines_returned.append(node.lineno)
            _make_wide(node, calls, name_node(owner))
        elif node in read:
            lines_read.append(node.lineno)
            if node in logs:
                _make_log_softmax(logs[node], node, calls)
            else:
                _make_wide(node, calls)
    if not (lines_read or lines_returned):
        own = tree
    return Widened(own, tuple(lines_read), tuple(lines_returned), modules_read, modules_returned)


class _Calls:
    """Knows the calls in a function that make probabilities.

    Args:
        reader: reader of the function.
        owner: name of its first argument.
        modules: kind of the probabilities of attributes of ``owner``, by name.
    """

    def __init__(self, reader: Reader, owner: str, modules: Mapping[str, str]) -> None:
        self.reader, self._owner, self._modules = reader, owner, modules

    def module(self, node: ast.Call) -> str:
        """Return the attribute of the owner that is called, if it makes probabilities, else ""."""
        match node.func:
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if owner == self._owner:
                return name if name in self._modules else ""
        return ""

    def modules(self, nodes: Iterable[ast.Call]) -> frozenset[str]:
        """Return the attributes of the owner that are called."""
        return frozenset(filter(None, map(self.module, nodes)))

    def kind_of(self, node: ast.Call) -> str:
        """Return "softmax" or "sigmoid" for a call that makes probabilities, else ""."""
        if module := self.module(node):
            return self._modules[module]
        called, func = self.reader.object(node.func), node.func
        known = called if callable(called) and isinstance(called, Hashable) else None
        # another handle may watch attention, and have replaced torch's function
        known = getattr(known, "_tritonamp_original", known)
        named = [k.arg for k in node.keywords if not _is_none(k)]
        if any(isinstance(part, ast.Starred) for part in node.args):
            return ""
        if known in _SIGMOIDS:
            return "sigmoid" if len(node.args) == 1 and not named else ""
        if known in _SOFTMAXES:
            return "softmax" if len(node.args) + len(named) in (1, 2) and _fits(node, named) else ""
        if called is not None or not isinstance(func, ast.Attribute) or self._is_own(func.value):
            return ""
        if func.attr == "sigmoid":
            return "" if node.args or named else "sigmoid"
        is_softmax = func.attr == "softmax" and len(node.args) + len(named) == 1
        return "softmax" if is_softmax and set(named) <= {"dim"} else ""

    def is_method(self, node: ast.Call) -> bool:
        """Return whether the call is that of a method, such as ``x.softmax(-1)``."""
        return self.reader.object(node.func) is None

    def operands(self, node: ast.Call) -> list[ast.expr]:
        """Return the function of a softmax and its positional arguments; a method as a function."""
        if self.is_method(node):
            return [of_ops("softmax_of"), node.func.value, *node.args]  # type: ignore[attr-defined]
        return [node.func, *node.args]

    def _is_own(self, node: ast.expr) -> bool:
        """Return whether an expression is the owner, whose methods are not a tensor's."""
        return isinstance(node, ast.Name) and node.id == self._owner == "self"


def _fits(node: ast.Call, named: list[str | None]) -> bool:
    """Return whether a call has its tensor by position, and no keyword except ``dim``."""
    return bool(node.args) and set(named) <= {"dim"}


def _is_none(keyword: ast.keyword) -> bool:
    """Return whether a keyword is ``dtype=None``."""
    is_none = isinstance(keyword.value, ast.Constant) and keyword.value.value is None
    return keyword.arg == "dtype" and is_none


def _logs_of(tree: ast.AST, calls: _Calls) -> dict[ast.AST, ast.Call]:
    """Return each softmax that is the argument of ``log``, with that call of ``log``."""
    found: dict[ast.AST, ast.Call] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=func, args=[ast.Call() as inner], keywords=[]):
                is_log = calls.reader.object(func) is torch.log
            case ast.Call(func=ast.Attribute(value=ast.Call() as inner, attr="log"), args=[]):
                is_log = not node.keywords
            case _:
                continue
        is_other = calls.module(inner) or calls.reader.object(inner.func) is functional.softmin
        if is_log and not is_other and calls.kind_of(inner) == "softmax":
            found[inner] = node
    return found


def _make_log_softmax(log: ast.Call, softmax: ast.Call, calls: _Calls) -> None:
    """Make ``log(softmax(x, dim))`` a call of ``ops.log_softmax``, in place."""
    log.args, log.keywords = calls.operands(softmax), softmax.keywords
    log.func = of_ops("log_softmax")
    placed(log, log)


def _make_wide(node: Any, calls: _Calls, owner: ast.expr | None = None) -> None:
    """Make a call return FP32, in place.

    Args:
        node: call of a softmax or a sigmoid.
        calls: calls of the function.
        owner: module whose forward returns the result; None: code reads the result.
    """
    owners = [] if owner is None else [owner]
    if calls.kind_of(node) == "sigmoid":
        if calls.is_method(node):
            node.func.value = call("fp32", node.func.value, *owners)
        else:
            node.args = [call("fp32", *node.args, *owners)]
    elif not calls.is_method(node) and isinstance(node.args[0], ast.Name):
        # scores.py knows this form
        dtype = ast.keyword("dtype", call("wide", node.args[0], *owners))
        node.keywords = [*(k for k in node.keywords if k.arg != "dtype"), dtype]
    else:
        node.args = [owner or ast.Constant(None), *calls.operands(node)]
        node.func = of_ops("widened")
    placed(node, node)
