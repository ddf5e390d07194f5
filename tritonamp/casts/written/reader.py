"""Read expressions of a function as terms of the algebra of activations."""

import ast
import math
from collections.abc import Callable, Hashable, Mapping
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.nn import functional

from tritonamp.casts.norm_terms import Unproved, is_number
from tritonamp.casts.written import terms
from tritonamp.casts.written.trees import changes

_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: terms.add,
    ast.Sub: terms.subtract,
    ast.Mult: terms.multiply,
    ast.Div: terms.divide,
    ast.Pow: terms.power,
}
_METHODS: dict[str, Callable[..., Any]] = {
    "add": terms.add,
    "div": terms.divide,
    "erf": terms.erf,
    "exp": terms.exp,
    "mul": terms.multiply,
    "pow": terms.power,
    "relu": terms.relu,
    "sigmoid": terms.sigmoid,
    "square": lambda a: terms.power(a, 2),
    "sub": terms.subtract,
    "tanh": terms.tanh,
}
"""Methods of tensors that are also functions of torch, with the same positional arguments."""
_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    **{getattr(torch, name): function for name, function in _METHODS.items()},
    functional.gelu: terms.gelu,
    functional.relu: terms.relu,
    functional.sigmoid: terms.sigmoid,
    functional.silu: terms.silu,
    functional.tanh: terms.tanh,
    math.sqrt: lambda a: terms.power(a, 0.5),
}
_CONSTANT = math, torch
"""Modules whose numbers do not change."""
ONE_OP = functional.gelu, functional.silu
"""Functions that are one op already."""
_NAMES = frozenset(
    {"erf", "exp", "expit", "gelu", "relu", "sigmoid", "silu", "softmax", "softmin", "tanh"}
)
_UNSAFE = ast.NamedExpr, ast.Yield, ast.YieldFrom, ast.Await, ast.Starred


def may_have_formulas(function: FunctionType) -> bool:
    """Return whether the names in a function's code leave room for an activation or a softmax."""
    names, outer = function.__code__.co_names, function.__globals__
    if not _NAMES.isdisjoint(names):
        return True
    found = (outer.get(name) for name in names)
    # a tuple may be Hashable without a hash
    return any(callable(f) and isinstance(f, Hashable) and f in _FUNCTIONS for f in found)


class Reader:
    """Reads expressions of one function.

    Args:
        function: the function.
        known: values of local names that expressions may read.

    Attributes:
        opaque: expressions that stand for a variable, by the variable's name. Each occurs once.
    """

    def __init__(self, function: FunctionType, known: Mapping[str, Any] | None = None) -> None:
        code = function.__code__
        # values of cells may change at any call, so that their names are no variables
        self._cells = frozenset(code.co_cellvars) | frozenset(code.co_freevars)
        self._locals = frozenset(code.co_varnames) - self._cells
        self._globals = function.__globals__
        self._known = known or {}
        self.opaque: dict[str, ast.expr] = {}

    def read(self, node: ast.expr) -> Any:
        """Return the value of an expression: a number or a ``Polynomial``.

        Raises:
            Unproved: the algebra has no such expression.
        """
        match node:
            case ast.Constant(value=value) if is_number(value):
                return value
            case ast.Name(id=name) if name in self._locals:
                return self._known[name] if name in self._known else terms.variable(name)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return terms.multiply(-1, self.read(operand))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](self.read(left), self.read(right))
            case ast.Attribute() if is_number(value := self.object(node)):
                if self.object(node.value) not in _CONSTANT:  # of others, it may change
                    raise Unproved(node.attr)
                return value
            case ast.Call(func=func, args=args, keywords=keywords):
                called = self.object(func)
                if called in _FUNCTIONS:
                    named = {str(k.arg): _constant(k.value) for k in keywords}
                    return _FUNCTIONS[called](*map(self.read, args), **named)
                if isinstance(func, ast.Attribute) and func.attr in _METHODS and not keywords:
                    return self._method(node, func, args)
        return self._opaque(node)

    def _method(self, node: ast.Call, func: ast.Attribute, args: list[ast.expr]) -> Any:
        """Return the value of a method's call on a tensor."""
        root = func.value
        while isinstance(root, ast.Attribute):
            root = root.value
        if isinstance(root, ast.Name) and root.id not in self._locals:
            raise Unproved(func.attr)  # a function of a module that is not torch
        if isinstance(func.value, ast.Attribute):
            return self._opaque(node)  # a method of an object, not of a tensor
        return _METHODS[func.attr](self.read(func.value), *map(self.read, args))

    def _opaque(self, node: ast.expr) -> Any:
        """Return a variable for an expression that is evaluated once, before the activation."""
        if changes(node) or any(isinstance(inner, _UNSAFE) for inner in ast.walk(node)):
            raise Unproved(type(node))
        if not isinstance(node, (ast.Call, ast.Subscript, ast.Attribute)):
            raise Unproved(type(node))
        name = f"_tritonamp_{len(self.opaque)}"
        self.opaque[name] = node
        return terms.variable(name)

    def object(self, node: ast.expr) -> Any:
        """Return the global, or the attribute of a global module, that an expression names."""
        match node:
            case ast.Name(id=name) if name not in self._locals | self._cells:
                return self._globals.get(name)
            case ast.Attribute(value=value, attr=name):
                owner = self.object(value)
                return getattr(owner, name, None) if isinstance(owner, ModuleType) else None
        return None


def _constant(node: ast.expr) -> Any:
    """Return a constant argument."""
    if not isinstance(node, ast.Constant):
        raise Unproved(type(node))
    return node.value
