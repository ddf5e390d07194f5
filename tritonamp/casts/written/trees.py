"""Parts of syntax trees that rewriting reads and makes."""

import ast
from collections import Counter
from collections.abc import Iterable
from types import FunctionType
from typing import Any

NAME = "_tritonamp_written"
"""Global under which rewritten functions find ``ops``."""
_READERS = frozenset({"dir", "eval", "exec", "locals", "vars"})


def target_and_value(statement: ast.stmt) -> tuple[str | None, ast.expr | None]:
    """Return the name that a statement assigns, and its value; None for other statements."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            return name, value
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
            return name, value
        case ast.Return(value=ast.expr() as value):
            return None, value
    return None, None


def loads(nodes: Iterable[ast.AST]) -> Counter[str]:
    """Return how often each name is read."""
    found: Counter[str] = Counter()
    for inner in (inner for node in nodes for inner in ast.walk(node)):
        if isinstance(inner, ast.AugAssign):  # a target that is stored, but read first
            inner = inner.target
        elif not isinstance(getattr(inner, "ctx", None), (ast.Load, ast.Del)):
            continue
        if isinstance(inner, ast.Name):
            found[inner.id] += 1
    return found


def private_names(function: FunctionType, tree: ast.AST) -> frozenset[str]:
    """Return the names of a function that nothing but its own statements reads."""
    if not _READERS.isdisjoint(loads([tree])):
        return frozenset()
    return frozenset(function.__code__.co_varnames) - {*function.__code__.co_cellvars}


def changes(node: ast.AST) -> bool:
    """Return whether a tree has the name or the argument of a call that changes a tensor."""
    return any(isinstance(inner, ast.Call) and _changes(inner) for inner in ast.walk(node))


def _changes(node: ast.Call) -> bool:
    if isinstance(node.func, ast.Attribute) and node.func.attr.endswith("_"):
        return True
    return any(keyword.arg in ("inplace", "out") for keyword in node.keywords)


def changed_names(tree: ast.AST) -> frozenset[str]:
    """Return the names whose tensors a function changes in place, as far as its code says so."""
    nodes = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.AugAssign) or (isinstance(node, ast.Call) and _changes(node))
    ]
    named = [part for node in nodes for part in ast.walk(getattr(node, "target", node))]
    return frozenset(part.id for part in named if isinstance(part, ast.Name))


def name_node(name: str) -> ast.expr:
    return ast.Name(name, ast.Load())


def of_ops(name: str) -> ast.expr:
    """Return the expression for an attribute of ``ops``."""
    return ast.Attribute(name_node(NAME), name, ast.Load())


def call(name: str, *arguments: ast.expr) -> ast.expr:
    """Return the call of a function of ``ops``."""
    return ast.Call(of_ops(name), [*arguments], [])


def placed(new: Any, old: Any) -> Any:
    """Return a node with the line of the one that it replaces, so that tracebacks name it."""
    for node in ast.walk(new):
        if "lineno" in node._attributes and not hasattr(node, "lineno"):
            ast.copy_location(node, old)
    return new


def replace(tree: ast.AST, old: ast.AST, new: ast.AST) -> None:
    """Replace one node of a tree in place."""
    for node in ast.walk(tree):
        for name, value in ast.iter_fields(node):
            if value is old:
                setattr(node, name, new)
            elif isinstance(value, list):
                value[:] = [new if part is old else part for part in value]
