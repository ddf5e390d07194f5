"""Rewrite attention scores that code scales and masks before a softmax.

In a row of statements that only scale and mask the scores, steps are noted instead of computed, and
the softmax at the end computes all of them in one pass (``masks.Scores``). Nothing else in the row
reads the scores' values, so the notes never leave the function.
"""

import ast
import copy
from collections.abc import Iterator
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from tritonamp.casts.written.reader import Reader
from tritonamp.casts.written.trees import (
    NAME,
    call,
    changed_names,
    changes,
    loads,
    name_node,
    of_ops,
    placed,
    private_names,
    replace,
    target_and_value,
)

_STEPS: dict[type[ast.operator], str] = {ast.Mult: "scaled", ast.Div: "divided", ast.Add: "added"}
_PRODUCTS = frozenset({"baddbmm", "bmm", "einsum", "matmul"})
_SEEN = frozenset({"device", "dim", "dtype", "ndim", "shape", "size"})
"""Attributes of scores that do not depend on their values."""
_PURE = _SEEN | frozenset(
    """
    arange bool contiguous eq expand expand_as finfo float full int len logical_not max min ne
    new_full new_zeros ones permute reshape sqrt squeeze tensor to transpose tril triu type type_as
    unsqueeze view view_as zeros
    """.split()
)
"""Names of functions and methods that change nothing."""
# code of inner functions has other names, and code that catches an error might read notes
_NOT_ENTERED = (
    ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Try, getattr(ast, "TryStar", ast.Try),
)  # fmt: skip
_PARTS = (
    ast.Attribute, ast.BinOp, ast.BoolOp, ast.Call, ast.Compare, ast.Constant, ast.IfExp, ast.List,
    ast.Name, ast.Slice, ast.Subscript, ast.Tuple, ast.UnaryOp, ast.keyword, ast.expr_context,
    ast.operator, ast.unaryop, ast.boolop, ast.cmpop,
)  # fmt: skip


class _Softmax(NamedTuple):
    """A softmax along the last dimension, with the cast of its result.

    Attributes:
        node: the expression.
        scores: name of the scores.
        dtype: ``dtype`` of the softmax, or None.
        to: dtype that the result is cast to, or None.
    """

    node: ast.expr
    scores: str
    dtype: ast.expr | None
    to: ast.expr | None = None


def masked_softmaxes(
    function: FunctionType, tree: ast.FunctionDef
) -> tuple[ast.FunctionDef, list[int]]:
    """Return a definition in which rows of steps and a softmax are one pass, and their lines."""
    if "softmax" not in function.__code__.co_names:
        return tree, []
    tree, reader = copy.deepcopy(tree), Reader(function)
    private, changed = private_names(function, tree), changed_names(tree)
    lines = []
    for block in _blocks(tree):
        for end, statement in enumerate(block):
            found = _softmax_of(statement, reader)
            row = [] if found is None else _noted_row(block[:end], found.scores)
            if found is None or not row or found.scores not in private:
                continue
            # a cast between makes a copy, which code may change before the backward
            if found.to is not None and target_and_value(statement)[0] in changed - {found.scores}:
                continue
            # other code may read the name of the scores only if the softmax is assigned to it
            reads = (
                loads([tree])[found.scores] - loads(block[end - len(row) : end + 1])[found.scores]
            )
            if reads and target_and_value(statement)[0] != found.scores:
                continue
            block[end - len(row) : end] = row
            one_pass = call(
                "softmax",
                name_node(found.scores),
                found.dtype or ast.Constant(None),
                found.to or ast.Constant(None),
            )
            replace(statement, found.node, placed(one_pass, found.node))
            lines.append(found.node.lineno)
    return tree, lines


def _blocks(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield the blocks of a function, without those in which notes might leave their row."""
    for _, value in ast.iter_fields(tree):
        if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
            yield value
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, ast.AST) and not isinstance(part, _NOT_ENTERED):
                yield from _blocks(part)


def _softmax_of(statement: ast.stmt, reader: Reader) -> _Softmax | None:
    """Return the softmax in a statement's value, if nothing else in it reads the scores."""
    _, value = target_and_value(statement)
    if value is None:
        return None
    for node in ast.walk(value):
        if isinstance(node, ast.expr) and (found := _cast_softmax(node, reader)) is not None:
            inside = loads([found.node])[found.scores]
            return found if loads([value])[found.scores] == inside else None
    return None


def _cast_softmax(node: ast.expr, reader: Reader) -> _Softmax | None:
    """Return ``softmax(scores)`` or ``softmax(scores).to(dtype)``."""
    match node:
        case ast.Call(func=ast.Attribute(value=inner, attr="to" | "type"), args=[to], keywords=[]):
            pass
        case ast.Call(func=ast.Attribute(value=inner, attr="type_as"), args=[like], keywords=[]):
            to = ast.Attribute(like, "dtype", ast.Load())
        case _:
            return _plain_softmax(node, reader)
    found = _plain_softmax(inner, reader)
    if found is None or not _is_pure(to, found.scores):
        return found
    return found._replace(node=node, to=to)


def _plain_softmax(node: ast.expr, reader: Reader) -> _Softmax | None:
    if not isinstance(node, ast.Call):
        return None
    args = [*node.args]
    is_attribute = isinstance(node.func, ast.Attribute) and node.func.attr == "softmax"
    if is_attribute and reader.object(node.func) is None:
        args.insert(0, node.func.value)  # type: ignore[attr-defined]  # a method of the scores
    elif reader.object(node.func) not in (torch.softmax, functional.softmax):
        return None
    named = {keyword.arg: keyword.value for keyword in node.keywords}
    if len(args) == 2:
        named["dim"] = args.pop()
    if len(args) != 1 or not named.keys() <= {"dim", "dtype"} or "dim" not in named:
        return None
    if ast.unparse(named["dim"]) != "-1":
        return None
    match args[0]:
        case ast.Name(id=name):
            return _Softmax(node, name, named.get("dtype"))
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="float"), args=[]):
            return _Softmax(node, name, named.get("dtype") or of_ops("float32"))
    return None


def _noted_row(before: list[ast.stmt], scores: str) -> list[ast.stmt]:
    """Return the statements in front of a softmax with their steps noted, as many as possible.

    There are none if no step is among them, or if one changes scores that other code may hold.
    """
    row: list[ast.stmt] = []
    is_fresh = False
    for statement in reversed(before):
        start = _noted_start(statement, scores)
        if start is not None:
            row.insert(0, start)
            is_fresh = _is_product(statement)
            break
        noted = _noted(statement, scores)
        if noted is None:
            break
        row.insert(0, noted)
    steps = {
        inner.func.attr
        for statement in row
        for inner in ast.walk(statement)
        if isinstance(inner, ast.Call)
        and isinstance(inner.func, ast.Attribute)
        and isinstance(inner.func.value, ast.Name)
        and inner.func.value.id == NAME
    }
    changes = any(name.endswith("_") for name in steps)
    return row if steps and (is_fresh or not changes) else []


def _noted_start(statement: ast.stmt, scores: str) -> ast.stmt | None:
    """Return a statement that makes the scores, with its factor noted; None for others."""
    target, value = target_and_value(statement)
    if target != scores or value is None or loads([value])[scores]:
        return None
    result: Any = copy.copy(statement)
    if isinstance(value, ast.BinOp) and isinstance(value.op, (ast.Mult, ast.Div)):
        result.value = placed(call(_STEPS[type(value.op)], value.left, value.right), value)
    return result


def _is_product(statement: ast.stmt) -> bool:
    """Return whether a statement assigns a tensor that no other code holds."""
    _, value = target_and_value(statement)
    match value:
        case ast.BinOp(op=ast.MatMult() | ast.Mult() | ast.Div()):
            return True
        case ast.Call(func=ast.Attribute(attr=name)):
            return name in _PRODUCTS and not changes(value)
    return False


def _noted(statement: ast.stmt, scores: str) -> ast.stmt | None:
    """Return a statement with its step noted; None if it may read or change anything else."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=value) if name == scores:
            step = _step(value, scores)
            return None if step is None else _assigned(scores, step, statement)
        case ast.AugAssign(target=ast.Name(id=name), op=op, value=value) if name == scores:
            if type(op) in _STEPS and _is_pure(value, scores):
                step = call(_STEPS[type(op)] + "_", name_node(scores), value)
                return _assigned(scores, step, statement)
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr="masked_fill_")) as value):
            step = _step(value, scores)
            return None if step is None else _assigned(scores, step, statement)
        case ast.Assign(targets=targets, value=value):
            stored = [t for target in targets for t in ast.walk(target) if isinstance(t, ast.expr)]
            is_plain = all(isinstance(t, (ast.Name, ast.Tuple)) for t in stored)
            is_other = all(getattr(t, "id", "") != scores for t in stored)
            return statement if is_plain and is_other and _is_pure(value, scores) else None
        case ast.If(test=test, body=body, orelse=orelse) if _is_pure(test, scores):
            bodies = [_noted(part, scores) for part in body]
            others = [_noted(part, scores) for part in orelse]
            if None not in bodies and None not in others:
                result = copy.copy(statement)
                result.body, result.orelse = bodies, others  # type: ignore[assignment]
                return result
    return None


def _assigned(scores: str, step: ast.expr, old: ast.stmt) -> ast.stmt:
    result: ast.stmt = placed(ast.Assign([ast.Name(scores, ast.Store())], step), old)
    return result


def _step(value: ast.expr, scores: str) -> ast.expr | None:
    """Return the call that notes a step: a factor, a summand or a mask of the scores."""
    match value:
        case ast.BinOp(left=ast.Name(id=name), op=op, right=operand) if name == scores:
            pass
        case ast.BinOp(left=operand, op=ast.Mult() | ast.Add() as op, right=ast.Name(id=name)) if (
            name == scores
        ):
            pass
        case ast.Call(
            func=ast.Attribute(
                value=ast.Name(id=name), attr="masked_fill" | "masked_fill_" as attr
            ),
            args=[mask, number],
            keywords=[],
        ) if name == scores and _is_pure(mask, scores) and _is_pure(number, scores):
            return call("filled" + attr[len("masked_fill") :], name_node(scores), mask, number)
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id="torch"), attr="where"),
            args=[mask, ast.Name(id=name), number],
            keywords=[],
        ) if name == scores and _is_pure(mask, scores) and _is_pure(number, scores):
            return call("kept", name_node(scores), mask, number)
        case _:
            return None
    if type(op) not in _STEPS or not _is_pure(operand, scores):
        return None
    return call(_STEPS[type(op)], name_node(scores), operand)


def _is_pure(node: ast.expr, scores: str) -> bool:
    """Return whether an expression changes nothing, and reads no values of the scores."""
    seen = 0
    for part in ast.walk(node):
        if not isinstance(part, _PARTS):
            return False
        if isinstance(part, ast.Call):
            called = getattr(part.func, "attr", getattr(part.func, "id", None))
            if called not in _PURE:
                return False
        if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name):
            seen += part.value.id == scores and part.attr in _SEEN
    return loads([node])[scores] == seen and not changes(node)
