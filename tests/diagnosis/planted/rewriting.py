"""Advice about code, followed to the letter: the line of the report is edited as the words say.

The source of the method with the fault is parsed, edited and compiled. Nothing of the library's own
trial of the same words runs here.
"""

import ast
import copy
import inspect
import math
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

import tritonamp

Edit = Callable[[ast.expr], ast.expr | None]
"""Returns the expression that replaces another one; None: that one stays."""

MODULES = ("torch", "F")  # whose functions take all operands as arguments
OPERATORS: dict[type[ast.operator], tuple[str, str]] = {
    ast.Div: ("div", "/"),
    ast.Mult: ("mul", "*"),
    ast.MatMult: ("matmul", "@"),
    ast.Pow: ("pow", "**"),
    ast.Add: ("add", "+"),
    ast.Sub: ("sub", "-"),
}


class Unknown(ValueError):
    """The advice cannot be followed."""


def rewritten(function: FunctionType, line: int, op: str, words: str) -> FunctionType:
    """Return a function with one of its lines edited.

    Args:
        function: a method.
        line: number of the line in its file.
        op: op that the report names.
        words: the advice.

    Raises:
        Unknown: the words are not understood, or fit nothing on the line.
    """
    source = textwrap.dedent(inspect.getsource(function))
    words = words.replace("second argument x", f"second argument x of {op}")
    here = line - function.__code__.co_firstlineno + 1
    everywhere = words.startswith("take eps")  # the line that adds it is not reported
    editor = _Editor(_edit(words), None if everywhere else here)
    tree = ast.fix_missing_locations(editor.visit(ast.parse(source)))
    if not editor.edits:
        raise Unknown(f"{words!r} fits nothing in {source.splitlines()[here - 1].strip()!r}")
    names = {**function.__globals__, "in_fp32": in_fp32, "math": math, "torch": torch}
    exec(compile(tree, "<edited>", "exec"), names)
    edited: Any = names[function.__name__]
    return edited


def in_fp32(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the result of a call of FP32 tensors, without casts."""

    def full(value: Any) -> Any:
        return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value

    with tritonamp.disable_casts():
        return function(*map(full, args), **{key: full(value) for key, value in kwargs.items()})


class _Editor(ast.NodeTransformer):
    """Edits the expressions on a line; None: on all lines."""

    def __init__(self, edit: Edit, line: int | None) -> None:
        self.edit, self.line, self.edits = edit, line, 0

    def visit(self, node: ast.AST) -> Any:
        node = super().generic_visit(node)
        if not isinstance(node, ast.expr) or not self.is_here(node):
            return node
        new = self.edit(node)
        self.edits += new is not None
        return node if new is None else ast.copy_location(new, node)

    def is_here(self, node: ast.expr) -> bool:
        return self.line is None or node.lineno <= self.line <= (node.end_lineno or 0)


@dataclass
class _Call:
    """A call of an op, in one of its spellings: ``torch.f(x, y)``, ``x.f(y)``, ``x / y``."""

    name: str
    operands: list[ast.expr]
    function: ast.expr  # that takes the operands as arguments
    keywords: list[ast.keyword]

    @classmethod
    def of(cls, node: ast.expr) -> "_Call | None":
        if isinstance(node, ast.BinOp):
            name, symbol = OPERATORS.get(type(node.op), ("", ""))
            function = _parsed(f"lambda x, y: x {symbol} y") if name else node
            return cls(name, [node.left, node.right], function, [])
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            return None
        owner, name = node.func.value, node.func.attr
        if isinstance(owner, ast.Name) and owner.id in MODULES:
            return cls(name, node.args, node.func, node.keywords)
        if isinstance(owner, ast.Name) and owner.id == "self":  # a layer
            return cls("layer", node.args, node.func, node.keywords)
        method = _parsed(f"torch.Tensor.{name}")
        return cls(name, [owner, *node.args], method, node.keywords)

    def again(self, **keywords: ast.expr) -> ast.expr:
        """Return the call with its present operands, and some keywords."""
        kept = [k for k in self.keywords if k.arg not in keywords]
        more = [ast.keyword(key, value) for key, value in keywords.items()]
        return ast.Call(self.function, self.operands, [*kept, *more])


def _parsed(text: str) -> ast.expr:
    return ast.parse(re.sub(r"(?<![\w.])-inf\b", "-math.inf", text), mode="eval").body


def _filled(template: str, **operands: ast.expr) -> ast.expr:
    """Return a template with expressions in place of its names."""

    class Fill(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return copy.deepcopy(operands.get(node.id, node))

    filled: ast.expr = Fill().visit(_parsed(template))
    return filled


def _is_number(node: ast.expr, number: float) -> bool:
    """Return whether an expression is this number, perhaps as ``float("-inf")``."""
    try:
        value = eval(ast.unparse(node), {"torch": torch, "math": math})
    except Exception:
        return False
    return type(value) in (int, float) and value == number


# forms of advice


def _edit(words: str) -> Edit:
    words = re.sub(r", in each \w+ of this line$", "", words)  # as edits do here, said or not
    for pattern, make in FORMS:
        found = re.fullmatch(pattern, words)
        if found:
            return make(*found.groups())
    raise Unknown(f"{words!r} is not understood")


def _of_calls(name: str, change: Callable[[_Call], ast.expr | None]) -> Edit:
    """Return the edit of all calls of an op. "linear" may be a layer of the module."""

    def edit(node: ast.expr) -> ast.expr | None:
        call = _Call.of(node)
        is_layer = call is not None and call.name == "layer" and name in LAYERS
        return change(call) if call is not None and (is_layer or call.name == name) else None

    return edit


LAYERS = ("linear", "conv1d", "bilinear")


def _operand(name: str, template: str, number: int = 0, variable: str = "x") -> Edit:
    """Return the edit of one operand of a call to a template with ``variable`` in it."""

    def change(call: _Call) -> ast.expr | None:
        if len(call.operands) <= number:
            return None
        call.operands[number] = _filled(template, **{variable: call.operands[number]})
        return call.again()

    return _of_calls(name, change)


def _divisor(template: str) -> Edit:
    return _operand("div", template, 1, "d")


def _second(template: str, name: str) -> Edit:
    return _operand(name, template, 1)


def _scaled(name: str, exponent: str) -> Edit:
    return _operand(name, f"x * 2.0**{exponent}")


def _keyword(name: str, key: str, value: str) -> Edit:
    return _of_calls(name, lambda call: call.again(**{key: _parsed(value)}))


def _passed(key: str, value: str, name: str) -> Edit:
    return _keyword(name, key, value)


def _number(new: str, old: str) -> Edit:
    return lambda node: _parsed(new) if _is_number(node, float(old)) else None


def _result(name: str, change: str) -> Edit:
    return _of_calls(name, lambda call: _filled(f"r{change}", r=call.again()))


def _where_masked() -> Edit:
    def change(call: _Call) -> ast.expr | None:
        first, second = call.operands
        for mask, infinite in ((first, second), (second, first)):
            if _is_number(infinite, -math.inf):
                return _filled("torch.where(mask != 0, -torch.inf, 0)", mask=mask)
        return None

    return _of_calls("mul", change)


def _mean_over_targets(name: str) -> Edit:
    def change(call: _Call) -> ast.expr:
        count = _filled("(y != -100).sum().clamp(min=1)", y=call.operands[1])
        return ast.BinOp(call.again(reduction=ast.Constant("sum")), ast.Div(), count)

    return _of_calls(name, change)


def _uncast(name: str) -> Edit:
    def change(call: _Call) -> ast.expr:
        return ast.Call(_parsed("in_fp32"), [call.function, *call.operands], call.keywords)

    return _of_calls(name, change)


def _in_place_of(template: str, name: str) -> Edit:
    """Return the edit of ``x.name(...)`` to a template with ``x`` and ``...``."""

    def edit(node: ast.expr) -> ast.expr | None:
        call = _Call.of(node)
        if call is None or not call.name.endswith(name):
            return None
        rest = ", ".join(map(ast.unparse, [*call.operands[1:], *call.keywords]))
        return _filled(template.replace("...", rest), x=call.operands[0])

    return edit


_NAME = r"([a-z_0-9]+)"
FORMS: list[tuple[str, Callable[..., Edit]]] = [
    (r"write zeros over rows .*, before the (softmax): (torch\.where.*)", _operand),
    (r"write (.*) in place of the divisor d", _divisor),
    (r"clamp the divisor d: (d\..*)", _divisor),
    (rf"clamp the result of {_NAME}(?: at \S+)?: .*\)(\.clamp\(.*\))", _result),
    (rf"write with tritonamp\.disable_casts\(\): {_NAME}\(x\.float\(\)(?:, .*)?\)", _uncast),
    (rf"write {_NAME}\(x\.float\(\), .*\)", _uncast),
    (rf"(?:write |.*: ){_NAME}\((x(?:\.| - ).*)\)", _operand),
    (rf"write {_NAME}\(\.\.\., reduction='sum'\) divided by .*", _mean_over_targets),
    (rf"(?:write |.*: ){_NAME}\((?:x, |\.\.\., )?(\w+)=([^,]+)\)", _keyword),
    (rf"pass (\w+)=(\w+) to {_NAME}", _passed),
    (r"take a larger eps: (\S+) in place of (\S+)", _number),
    (r"write (torch\.finfo\(x\.dtype\)\.m..) in place of (\S+)", _number),
    (r"write torch\.where\(mask != 0, -torch\.inf, 0\).* mask \* -inf", _where_masked),
    (r"write (torch\.where\(x.*\)) in place of the second argument x of (\w+)", _second),
    (
        rf"scale the first factor (?:of|before) {_NAME},?(?: and so its result,)? by 2\^(-?\d+)",
        _scaled,
    ),
    (r"write (\(?x\.\S* .*\)) in place of (?:the )?(\w+).*", _in_place_of),
]
"""Patterns of advice, and functions of their groups."""
