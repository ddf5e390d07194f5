"""Whether a method is straight-line code: then a few runs tell what it computes for every input."""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

_NODES = (
    *(ast.FunctionDef, ast.arguments, ast.arg, ast.Assign, ast.AnnAssign, ast.Return, ast.Expr),
    *(ast.Name, ast.Attribute, ast.Constant, ast.Tuple, ast.Call, ast.keyword, ast.BinOp),
    *(ast.UnaryOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.USub, ast.Load, ast.Store),
)
_OPS = {"add", "div", "float", "mean", "mul", "norm", "pow", "rms_norm", "rsqrt", "sqrt"} | {
    *("square", "sum", "to", "type_as", "reciprocal")
}
_MODULES = torch, torch.nn.functional
_PLAIN = int, float, bool, str, tuple, torch.dtype, type(None)


def attributes_read(module: nn.Module) -> dict[str, Any] | None:
    """Return the plain attributes that ``forward`` reads, with their values of now.

    None where ``forward`` is anything but straight-line code: a branch, a loop, a write to an
    attribute, a global, a call outside a short list of torch's operations (methods of the module
    that are straight-line code themselves may be called), or an attribute that is neither plain
    nor a parameter.
    """
    if "forward" in vars(module):
        return None
    try:
        names = set(_read_by(module, "forward", ()))
    except (AttributeError, LookupError, OSError, SyntaxError, TypeError):
        return None
    return {name: vars(module)[name] for name in names if name not in module._parameters}


def _read_by(module: nn.Module, method: str, callers: tuple[str, ...]) -> Iterator[str]:
    """Yield names of attributes; raise LookupError where the method is no straight-line code."""
    function: Any = inspect.unwrap(inspect.getattr_static(type(module), method))
    if not inspect.isfunction(function) or function.__closure__ or method in callers:
        raise LookupError(method)
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    if not isinstance(tree, ast.FunctionDef) or not tree.args.args:
        raise LookupError(method)
    own = tree.args.args[0].arg
    code = [node for statement in tree.body for node in _without_annotations(statement)]
    written = {n.id for n in code if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    local = {arg.arg for arg in tree.args.args} | written
    called = [node.func for node in code if isinstance(node, ast.Call)]
    for node in code:
        if not isinstance(node, _NODES) or own in written:
            raise LookupError(type(node).__name__)
        is_global = isinstance(node, ast.Name) and node.id not in local
        if is_global and not any(function.__globals__.get(node.id) is m for m in _MODULES):
            raise LookupError(node.id)
        if isinstance(node, ast.Attribute):
            if isinstance(node.ctx, ast.Store):
                raise LookupError(node.attr)
            is_own = isinstance(node.value, ast.Name) and node.value.id == own
            if is_own and node in called:
                yield from _read_by(module, node.attr, (*callers, method))
            elif is_own:
                _check_plain(module, node.attr)
                yield node.attr
    for target in called:
        is_helper = (
            isinstance(target, ast.Attribute)
            and isinstance(target.value, ast.Name)
            and target.value.id == own
        )
        if not isinstance(target, ast.Attribute) or not (is_helper or target.attr in _OPS):
            raise LookupError(ast.dump(target))


def _without_annotations(statement: ast.stmt) -> Iterator[ast.AST]:
    if isinstance(statement, ast.AnnAssign) and statement.value is not None:
        yield from ast.walk(statement.target)
        yield from ast.walk(statement.value)
    else:
        yield from ast.walk(statement)


def _check_plain(module: nn.Module, name: str) -> None:
    if name in module._parameters:
        return
    if name == "training" or hasattr(type(module), name):
        raise LookupError(name)
    value = vars(module)[name]
    if not isinstance(value, _PLAIN) or isinstance(value, Tensor):
        raise LookupError(name)
