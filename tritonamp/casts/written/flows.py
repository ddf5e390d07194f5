"""Where the probabilities of a function go: into a logarithm, under a fraction, or to its caller.

Statements are read in their order, and a name stands for the probabilities that its last value was
made of. Only code that follows is read: a function that gets probabilities may do anything. No more
than the dtype of a softmax depends on the result, so that a wrong one costs memory and no digits.
"""

import ast
import dataclasses
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch.nn import functional

from tritonamp.casts.norm_terms import is_number
from tritonamp.casts.written.reader import Reader

Values = frozenset[tuple[ast.Call, bool]]
"""Calls that make the probabilities in a value, each with whether a value is one of these still."""

_NONE: Values = frozenset()
_LOGS = frozenset({"entr", "log", "log10", "log2", "logit", "reciprocal", "rsqrt"})
_DIVISIONS = frozenset({"div", "divide", "true_divide"})
_SUMS = frozenset({"cumprod", "cumsum", "mean", "prod", "sum"})
_BINARY: dict[str, type[ast.operator]] = {
    "add": ast.Add, "sub": ast.Sub, "subtract": ast.Sub, "rsub": ast.Sub, "mul": ast.Mult,
    "multiply": ast.Mult, "pow": ast.Pow,
}  # fmt: skip
_KEEPS = frozenset(
    """
    abs amax amin cat chunk clamp clamp_max clamp_min clip clone concat contiguous cpu cuda detach
    diagonal double expand expand_as flatten flip float gather hstack index_select masked_fill
    masked_select max maximum min minimum movedim nan_to_num narrow neg permute ravel repeat reshape
    reshape_as select sort split squeeze stack swapaxes swapdims t take take_along_dim topk
    transpose unbind unflatten unsqueeze view view_as vstack
    """.split()
)
"""Functions and methods whose results are some of the values of their first argument."""
_VIEWS = frozenset({"H", "T", "data", "mH", "mT", "values"})
_WIDE = torch.float32, torch.float64
_READ = _LOGS | _DIVISIONS | _SUMS | _BINARY.keys() | _KEEPS
_OTHERS = frozenset({"kl_div", "log1p", "where", "xlog1py", "xlogy"})
_OF_TORCH = {
    function: name
    for owner in (functional, torch.special, torch)
    for name in _READ | _OTHERS
    if callable(function := getattr(owner, name, None))
}


class Flows:
    """Follows the probabilities through a function.

    Args:
        reader: reader of the function.
        kind_of: returns "softmax" or "sigmoid" for a call that makes probabilities, else "".

    Attributes:
        read: calls whose probabilities are read by a logarithm or a division.
        returned: calls whose probabilities the function returns.
    """

    def __init__(self, reader: Reader, kind_of: Callable[[ast.Call], str]) -> None:
        self._reader, self._kind_of = reader, kind_of
        self._names: dict[str, Values] = {}
        self.read: set[ast.Call] = set()
        self.returned: set[ast.Call] = set()

    def block(self, statements: Iterable[ast.stmt]) -> None:
        """Follow statements in their order."""
        for statement in statements:
            self._statement(statement)

    def _statement(self, node: Any) -> None:
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=to)], value=ast.Tuple(elts=of)) if (
                len(to) == len(of) and not any(isinstance(n, ast.Starred) for n in (*to, *of))
            ):
                for target, values in zip(to, [self._value(part) for part in of], strict=True):
                    self._bind(target, values)
            case ast.Assign(targets=targets, value=value):
                values = self._value(value)
                for target in targets:
                    self._bind(target, values)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._bind(target, self._value(value))
            case ast.AugAssign(target=target, op=op, value=value):
                self._bind(target, self._value(ast.BinOp(target, op, value)))
            case ast.Return(value=ast.expr() as value):
                self.returned |= {call for call, is_one in self._value(value) if is_one}
            case ast.If(test=test, body=body, orelse=orelse):
                self._value(test)
                self._branches(body, orelse)
            case ast.For(target=target, iter=iterated, body=body, orelse=orelse):
                for _ in range(2):  # values of a round are read in the next one
                    self._bind(target, self._value(iterated))
                    self._branches(body, [])
                self.block(orelse)
            case ast.While(test=test, body=body, orelse=orelse):
                for _ in range(2):
                    self._value(test)
                    self._branches(body, [])
                self.block(orelse)
            case ast.With(items=items, body=body):
                for item in items:
                    self._bind(item.optional_vars, self._value(item.context_expr))
                self.block(body)
            case ast.Try(body=body, handlers=handlers, orelse=orelse, finalbody=final):
                self._branches(body, [])
                self._branches(orelse, *(handler.body for handler in handlers))
                self.block(final)
            case ast.Match(subject=subject, cases=cases):
                self._value(subject)
                self._branches([], *(case.body for case in cases))
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                pass
            case _:
                self._inside(node)

    def _branches(self, *blocks: list[ast.stmt]) -> None:
        before, after = self._names, dict[str, Values]()
        for block in blocks:
            self._names = dict(before)
            self.block(block)
            after |= {name: after.get(name, _NONE) | v for name, v in self._names.items()}
        self._names = after

    def _bind(self, target: ast.expr | None, values: Values) -> None:
        match target:
            case ast.Name(id=name):
                self._names[name] = values
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                for part in parts:
                    self._bind(part, values)
            case ast.Starred(value=part):
                self._bind(part, values)
            case ast.Subscript(value=ast.Name(id=name), slice=index):
                self._value(index)
                self._names[name] = self._names.get(name, _NONE) | values

    def _value(self, node: Any) -> Values:
        match node:
            case ast.Name(id=name):
                return self._names.get(name, _NONE)
            case ast.Call():
                return self._call(node)
            case ast.BinOp(left=left, op=op, right=right):
                values = self._value(left), self._value(right)
                return self._binary(op, left, right, *values)
            case ast.UnaryOp(op=ast.USub(), operand=part) | ast.Starred(value=part):
                return self._value(part)
            case ast.Subscript(value=value, slice=index):
                self._value(index)
                return self._value(value)
            case ast.Attribute(value=value, attr=name):
                values = self._value(value)
                return values if name in _VIEWS else _NONE
            case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Dict(values=parts):
                return _joined(map(self._value, parts))
            case ast.IfExp(test=test, body=body, orelse=orelse):
                self._value(test)
                return self._value(body) | self._value(orelse)
            case ast.NamedExpr(target=target, value=value):
                values = self._value(value)
                self._bind(target, values)
                return values
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                for part in node.generators:
                    self._bind(part.target, self._value(part.iter))
                    list(map(self._value, part.ifs))
                return self._value(getattr(node, "value", None) or node.elt)
            case ast.Lambda() | None:
                return _NONE
        self._inside(node)
        return _NONE

    def _inside(self, node: ast.AST) -> None:
        for part in ast.iter_child_nodes(node):
            if isinstance(part, ast.expr):
                self._value(part)

    def _binary(
        self, op: ast.operator, left: ast.expr, right: ast.expr, a: Values, b: Values
    ) -> Values:
        """Return the values of ``left op right``, given those of both sides."""
        is_plain = _is_constant(left) or _is_constant(right)
        match op:
            case ast.Div():
                self._read(b)
                return a if is_plain else self._product(a)
            case ast.Mult():
                return a | b if is_plain else self._product(a | b)
            case ast.Add() | ast.Sub():
                return a | b if is_plain else _apart(a | b)
            case ast.Pow():
                if isinstance(right, ast.UnaryOp):  # a negative power
                    self._read(a)
                return self._product(a)
        return _NONE

    def _call(self, node: ast.Call) -> Values:
        args, named = [*map(self._value, node.args)], {k.arg: self._value(k.value) for k in node.keywords}
        places = [*node.args]
        called, name = self._reader.object(node.func), ""
        if isinstance(node.func, ast.Attribute):
            receiver = self._value(node.func.value)
            if called is None:
                name = node.func.attr.rstrip("_")
                args, places = [receiver, *args], [node.func.value, *places]
        if self._kind_of(node):
            return frozenset({(node, True)})
        if isinstance(called, type):
            return self._made(called, args, named)
        if callable(called) and isinstance(called, Hashable):
            name = _OF_TORCH.get(called, "")
        if "input" in named:
            args.insert(0, named["input"])
        return self._result(name, node, places, args, named) if args else _NONE

    def _made(self, cls: type, args: list[Values], named: dict[str | None, Values]) -> Values:
        """Return the values in an object of a class that stands in the code."""
        if cls.__module__.startswith("torch.distributions"):
            self._read(_joined([*args[:1], named.get("probs", _NONE)]))
        if issubclass(cls, (tuple, dict)) or dataclasses.is_dataclass(cls):
            return _joined([*args, *named.values()])
        return _NONE

    def _result(
        self,
        name: str,
        node: ast.Call,
        places: list[ast.expr],
        args: list[Values],
        named: dict[str | None, Values],
    ) -> Values:
        """Return the values of a function or method of torch.

        Args:
            name: its name.
            node: the call.
            places: operands.
            args: values of the operands.
            named: values of the keyword arguments.
        """
        first, others = args[0], _joined([*args[1:], *named.values()])
        if name in _LOGS or (name == "log1p" and _is_negated(places[0])):
            self._read(first)
        elif name in ("xlogy", "xlog1py"):
            self._read(others)
        elif name == "kl_div":
            self._read(first | others)
        elif name in _DIVISIONS:
            self._read(others)
            return self._product(first)
        elif name in _SUMS:
            return self._product(first)
        elif name == "where":
            return first | others
        elif name in _KEEPS:
            return first
        elif name in ("to", "type"):
            return first if self._is_wide_cast(node, places) else _NONE
        elif name in _BINARY and len(places) == 2:
            return self._binary(_BINARY[name](), places[0], places[1], first, others)
        return _NONE

    def _is_wide_cast(self, node: ast.Call, places: list[ast.expr]) -> bool:
        """Return whether a call of ``to`` leaves FP32 as it is."""
        wanted = [*places[1:], *(k.value for k in node.keywords if k.arg == "dtype")]
        return all(
            self._reader.object(part) in _WIDE
            or isinstance(part, ast.Constant)  # a device
            or getattr(part, "attr", getattr(part, "id", "")) == "device"
            for part in wanted
        )

    def _read(self, values: Values) -> None:
        self.read |= {call for call, _ in values}

    def _product(self, values: Values) -> Values:
        """Return the values in a product or sum: gates are there for these, and need no digits."""
        return frozenset((c, False) for c, _ in values if self._kind_of(c) == "softmax")


def _apart(values: Values) -> Values:
    return frozenset((call, False) for call, _ in values)


def _joined(values: Iterable[Values]) -> Values:
    return _NONE.union(*values)


def _is_constant(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp):
        node = node.operand
    return isinstance(node, ast.Constant) and is_number(node.value)


def _is_negated(node: ast.expr) -> bool:
    """Return whether an expression may be ``-p``, or ``p * -1``."""
    return any(
        isinstance(part, ast.USub) or getattr(part, "attr", "") == "neg" for part in ast.walk(node)
    )
