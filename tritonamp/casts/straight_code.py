"""Read a norm's formula from the code of its forward: a proof, where that is possible."""

import ast
import inspect
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn

from tritonamp.casts.norm_terms import (
    GIVEN,
    OPS,
    Term,
    Unproved,
    add,
    divide,
    is_number,
    multiply,
    power,
    subtract,
)
from tritonamp.casts.source import source_of

_MODULES = torch, torch.nn, torch.nn.functional
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: add,
    ast.Sub: subtract,
    ast.Mult: multiply,
    ast.Div: divide,
    ast.Pow: power,
}

Values = dict[str, Any]
"""Values of local variables: terms, numbers, dtypes, shapes, None, and the module itself."""


class Computed(NamedTuple):
    """The result of a forward, and the conditions under which it holds."""

    result: Term  # of ``forward(x)``
    weight: str  # name of the parameter in it; "" where there is none
    attributes: tuple[tuple[str, Any], ...]  # attributes that the code reads, with their values
    methods: tuple[tuple[str, CodeType, Any], ...]  # methods that run, with their code and defaults

    def still_holds(self, module: Any, forward: Any) -> bool:
        """Return whether attributes and methods of the module are unchanged.

        Args:
            module: module that was read.
            forward: function that would run. It may have been set on the instance since.
        """
        own = vars(module)
        for name, value in self.attributes:
            now = own.get(name)
            if type(now) is not type(value) or now != value:
                return False
        for name, code, defaults in self.methods:
            method: Any = forward if name == "forward" else getattr(type(module), name, None)
            if name in own or getattr(method, "__code__", None) is not code:
                return False
            if method.__defaults__ is not defaults:
                return False
        return True


def computed_by(module: nn.Module, n: int) -> Computed | None:
    """Return the result of ``module.forward(x)`` for every ``x`` whose rows have ``n`` elements.

    The result is None where the code proves nothing. Only straight-line code can be read:
    assignments to local names, the operations of ``norm_terms``, methods of the module that are
    such code themselves, its parameter, and attributes that are numbers, dtypes or shapes. An
    ``if`` may test dtypes, where both branches compute the same.
    """
    reader = _Reader(module, n)
    try:
        result = reader.call("forward", (Term(n, x=1),), {})
    except Exception:  # Unproved, or what Python says of code that could not run either
        return None
    if not isinstance(result, Term) or len(reader.weights) > 1:
        return None
    weight = next(iter(reader.weights), "")
    return Computed(result, weight, (*reader.attributes.items(),), (*reader.methods,))


class _Reader:
    """Evaluates code of a module. An unknown construct raises ``Unproved``."""

    def __init__(self, module: nn.Module, n: int) -> None:
        self.module, self.n = module, n
        self.weights: set[str] = set()
        self.attributes: Values = {}
        self.methods: list[tuple[str, CodeType, Any]] = []

    def call(self, method: str, args: tuple[Any, ...], keywords: Values) -> Any:
        """Return the result of a method of the module."""
        cls: Any = type(self.module)
        function = inspect.getattr_static(cls, method)
        if method in vars(self.module) or method in [name for name, *_ in self.methods]:
            raise Unproved(method)
        if cls.__getattribute__ is not object.__getattribute__ or cls.__getattr__ is not _getattr:
            raise Unproved(cls)
        statements = _statements(function)
        self.methods.append((method, function.__code__, function.__defaults__))
        bound = inspect.signature(function).bind(self.module, *args, **keywords)
        bound.apply_defaults()
        return self._run(statements, dict(bound.arguments), function.__globals__)

    def _run(self, statements: list[ast.stmt], local: Values, outer: Values) -> Any:
        """Return the value of the ``return`` among statements; None where there is none."""
        for statement in statements:
            match statement:
                case ast.Return(value=ast.expr() as value):
                    return self._value(value, local, outer)
                case (
                    ast.Assign(targets=[ast.Name(id=name)], value=value)
                    | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
                ):
                    local[name] = self._value(value, local, outer)
                case ast.If(test=test, body=body, orelse=orelse):
                    self._check_dtypes(test, local, outer)
                    other = dict(local)
                    results = self._run(body, local, outer), self._run(orelse, other, outer)
                    if results != (None, None) or local != other:
                        raise Unproved("two ways")
                case ast.Expr(value=ast.Constant()):
                    pass
                case _:
                    raise Unproved(type(statement))
        return None

    def _check_dtypes(self, test: ast.expr, local: Values, outer: Values) -> None:
        """Raise where a condition tests anything but dtypes. Such a test could have effects."""
        if not isinstance(test, ast.Compare):
            raise Unproved(type(test))
        for node in (test.left, *test.comparators):
            value = self._value(node, local, outer)
            for one in value if isinstance(value, tuple) else (value,):
                if one is not GIVEN and not isinstance(one, torch.dtype):
                    raise Unproved(one)

    def _value(self, node: ast.expr, local: Values, outer: Values) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return local[name] if name in local else _torch_or_error(outer[name])
            case ast.Tuple(elts=nodes) | ast.List(elts=nodes):
                return tuple(self._value(n, local, outer) for n in nodes)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return multiply(-1, self._value(operand, local, outer))
            case ast.BinOp(left=left, op=op, right=right):
                values = (self._value(n, local, outer) for n in (left, right))
                return _OPERATORS[type(op)](*values)
            case ast.Attribute(value=base, attr=name):
                return self._attribute(self._value(base, local, outer), name)
            case ast.Subscript(value=base, slice=index):
                return _indexed(self._value(base, local, outer), ast.unparse(index))
            case ast.Call(func=ast.Attribute(value=base, attr=name), args=args, keywords=keywords):
                given = [self._value(n, local, outer) for n in args]
                named = {str(k.arg): self._value(k.value, local, outer) for k in keywords}
                return self._called(self._value(base, local, outer), name, given, named)
        raise Unproved(type(node))

    def _called(self, base: Any, name: str, args: list[Any], keywords: Values) -> Any:
        if base is self.module:
            return self.call(name, (*args,), keywords)
        if _is_torch(base):
            return OPS[name](*args, **keywords)
        if isinstance(base, Term):
            return OPS[name](base, *args, **keywords)
        raise Unproved(name)

    def _attribute(self, base: Any, name: str) -> Any:
        if base is self.module:
            return self._own(name)
        if isinstance(base, Term) and name in ("dtype", "shape"):
            return GIVEN if name == "dtype" else base.shape
        if _is_torch(base):
            return _torch_or_error(getattr(base, name))
        raise Unproved(name)

    def _own(self, name: str) -> Any:
        """Return the value of an attribute of the module: its parameter, or a plain value."""
        own = vars(self.module)
        if hasattr(type(self.module), name):
            raise Unproved(name)
        if name in own["_parameters"] and name not in own:
            self.weights.add(name)
            return Term(self.n, weight=1)
        value = own[name]
        is_shape = isinstance(value, tuple) and all(type(size) is int for size in value)
        if not (is_number(value) or value is None or value is torch.float32 or is_shape):
            raise Unproved(name)
        self.attributes[name] = value
        return tuple(value) if is_shape else value


_getattr = nn.Module.__getattr__


def _is_torch(value: Any) -> bool:
    return any(value is module for module in _MODULES)


def _torch_or_error(value: Any) -> Any:
    """Return a global, or an attribute of torch, if code may use it outside of a call."""
    if _is_torch(value) or isinstance(value, torch.dtype):
        return value
    raise Unproved(value)


def _indexed(shape: Any, index: str) -> Any:
    """Return the last size of a shape, or the shape of the last dimension."""
    if not isinstance(shape, tuple) or not shape or index not in ("-1", "-1:"):
        raise Unproved(index)
    return shape[-1] if index == "-1" else shape[-1:]


def _statements(function: Any) -> list[ast.stmt]:
    """Return the statements of a function whose source is the code that runs."""
    if not isinstance(function, FunctionType) or hasattr(function, "__wrapped__"):
        raise Unproved(function)
    if function.__closure__ or function.__kwdefaults__:
        raise Unproved(function)
    return source_of(function).tree.body
