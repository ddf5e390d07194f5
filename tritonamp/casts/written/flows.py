"""Where the probabilities of a function go: into a logarithm, under a fraction, or to its caller.

Statements are read in their order. A name stands for the probabilities in its last value. The code
of other functions is not read, so probabilities that they get are not followed. Only the dtype of a
softmax depends on the result: a mistake costs memory, or leaves a result in half.
"""

import ast
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from tritonamp.casts.norm_terms import is_number
from tritonamp.casts.written.flow_names import (
    BINARY,
    DIVISIONS,
    KEEPS,
    LOGS,
    SUMS,
    VIEWS,
    WIDE,
    name_of,
)
from tritonamp.casts.written.reader import Reader

Values = frozenset[tuple[ast.Call, bool]]
"""The calls whose probabilities are in a value. True: the value consists of such probabilities;
False: it was computed from them, like a sum.
"""

_NONE: Values = frozenset()


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
            case ast.Assign(targets=targets, value=value):
                self._assign(targets, value)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._bind(target, self._value(value))
            case ast.AugAssign(target=target, op=op, value=value):
                self._bind(target, self._value(ast.BinOp(target, op, value)))
            case ast.Return(value=ast.expr() as value):
                self.returned |= {call for call, is_one in self._value(value) if is_one}
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                pass
            case _ if hasattr(node, "body") or isinstance(node, ast.Match):
                self._compound(node)
            case _:
                self._inside(node)

    def _compound(self, node: Any) -> None:
        """Follow a statement with blocks."""
        match node:
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

    def _assign(self, targets: list[ast.expr], value: ast.expr) -> None:
        parts = getattr(targets[0], "elts", [])
        given = getattr(value, "elts", [])
        has_star = any(isinstance(part, ast.Starred) for part in (*parts, *given))
        if len(targets) == 1 and len(parts) == len(given) > 0 and not has_star:
            for target, values in zip(parts, [*map(self._value, given)], strict=True):
                self._bind(target, values)
            return
        values = self._value(value)
        for target in targets:
            self._bind(target, values)

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
        """Follow an expression, and return its values."""
        match node:
            case ast.Name(id=name):
                return self._names.get(name, _NONE)
            case ast.Call():
                return self._call(node)
            case ast.BinOp(left=left, op=op, right=right):
                return self._binary(op, left, right, self._value(left), self._value(right))
            case ast.UnaryOp(op=ast.USub(), operand=part) | ast.Starred(value=part):
                return self._value(part)
            case ast.Subscript(value=value, slice=index):
                self._value(index)
                return self._value(value)
            case ast.Attribute(value=value, attr=name):
                values = self._value(value)
                return values if name in VIEWS else _NONE
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
                return self._comprehension(node)
            case ast.Lambda() | None:
                return _NONE
        self._inside(node)
        return _NONE

    def _comprehension(self, node: Any) -> Values:
        for each in node.generators:
            self._bind(each.target, self._value(each.iter))
            for condition in each.ifs:
                self._value(condition)
        return self._value(node.value if isinstance(node, ast.DictComp) else node.elt)

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
                return a | b if is_plain else _as_operands(a | b)
            case ast.Pow():
                if isinstance(right, ast.UnaryOp):  # a negative power
                    self._read(a)
                return self._product(a)
        return _NONE

    def _call(self, node: ast.Call) -> Values:
        named = {k.arg: self._value(k.value) for k in node.keywords}
        args, places = [*map(self._value, node.args)], [*node.args]
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
        if called is not None:
            name = name_of(called)
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
        if name in LOGS or (name == "log1p" and _is_negated(places[0])):
            self._read(first)
        elif name in ("xlogy", "xlog1py"):
            self._read(others)
        elif name == "kl_div":
            self._read(first | others)
        elif name in DIVISIONS:
            self._read(others)
            return self._product(first)
        elif name in SUMS:
            return self._product(first)
        elif name == "where":
            return first | others
        elif name in KEEPS:
            return first
        elif name in ("to", "type"):
            return first if self._is_wide_cast(node, places) else _NONE
        elif name in BINARY and len(places) == 2:
            return self._binary(BINARY[name](), places[0], places[1], first, others)
        return _NONE

    def _is_wide_cast(self, node: ast.Call, places: list[ast.expr]) -> bool:
        """Return whether a call of ``to`` or ``type`` keeps FP32 values."""
        wanted = [*places[1:], *(k.value for k in node.keywords if k.arg == "dtype")]
        return all(
            self._reader.object(part) in WIDE
            or isinstance(part, ast.Constant)  # a device
            or getattr(part, "attr", getattr(part, "id", "")) == "device"
            for part in wanted
        )

    def _read(self, values: Values) -> None:
        self.read |= {call for call, _ in values}

    def _product(self, values: Values) -> Values:
        """Return the values in a product or a sum, without sigmoids: as gates, those stay half."""
        return frozenset((c, False) for c, _ in values if self._kind_of(c) == "softmax")


def _as_operands(values: Values) -> Values:
    return frozenset((call, False) for call, _ in values)


def _joined(values: Iterable[Values]) -> Values:
    return _NONE.union(*values)


def _is_constant(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp):
        node = node.operand
    return isinstance(node, ast.Constant) and is_number(node.value)


def _is_negated(node: ast.expr) -> bool:
    """Return whether an expression is ``-p`` or ``p.neg()``."""
    is_method = isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "neg"
    return is_method or isinstance(getattr(node, "op", None), ast.USub)
