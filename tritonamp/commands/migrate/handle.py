"""What a loop does with gradients, whichever library it was written for."""

import ast
from collections.abc import Callable

from tritonamp.commands.migrate.scopes import Variable
from tritonamp.commands.migrate.script import Script

AFTER_BOTH = "`amp = tritonamp.enable(model, optimizer, level=...)`"
CLIPS = ("torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad.clip_grad_norm_")


def as_condition(test: ast.expr) -> str:
    """Return ``test`` as it can stand in ``a if test else b``."""
    text = ast.unparse(test)
    return f"({text})" if isinstance(test, ast.IfExp | ast.Lambda | ast.NamedExpr) else text


def limit_of(script: Script, call: ast.Call) -> ast.expr | None:
    """Return the largest norm that a ``clip_grad_norm_(x, limit)`` of 2-norms allows."""
    if script.qualified(call.func) not in CLIPS:
        return None
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    norm_type = named.pop("norm_type", None)
    if norm_type is not None and ast.unparse(norm_type) not in ("2", "2.0"):
        return None
    if len(call.args) == 2 and not named:
        return call.args[1]
    return named["max_norm"] if len(call.args) == 1 and [*named] == ["max_norm"] else None


def clipped(
    script: Script, statement: ast.stmt, models: tuple[Variable, ...]
) -> tuple[ast.Call, ast.expr] | None:
    """Return the call and the limit of a statement that clips all gradients of the one model."""
    call = getattr(statement, "value", None)
    if not isinstance(statement, (ast.Expr, ast.Assign)) or not isinstance(call, ast.Call):
        return None
    limit = limit_of(script, call)
    match call.args[:1]:
        case [ast.Call(func=ast.Attribute(value=model, attr="parameters"), args=[])]:
            if limit is not None and (script.flow.root(model),) == models:
                return call, limit
    return None


def known_as(script: Script, models: tuple[Variable | None, ...]) -> set[str]:
    """Return how the one model is called, anywhere in the file; nothing for several models."""
    if len(models) != 1 or models[0] is None:
        return set()
    names = set()
    for variable in script.flow.group(models[0]):
        is_self = isinstance(variable.scope, ast.ClassDef)
        names.add(f"self.{variable.name}" if is_self else variable.name)
    return names | {f"{name}.module" for name in names}


def plain_backwards(
    script: Script, scopes: set[ast.AST], is_off: Callable[[ast.expr], bool | None]
) -> list[ast.Call]:
    """Return the ``loss.backward()`` in ``scopes`` that also run with mixed precision on."""
    return [
        node
        for node in script.source.nodes
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "backward"
        and isinstance(script.source.parents[node], ast.Expr)
        and script.source.scope(node) in scopes
        and not _is_scaled(node.func.value)
        and not runs_when(script, node, is_off)
    ]


def _is_scaled(loss: ast.expr) -> bool:
    """Return whether ``loss`` is ``scaler.scale(...)``."""
    return (
        isinstance(loss, ast.Call)
        and isinstance(loss.func, ast.Attribute)
        and loss.func.attr == "scale"
    )


def runs_when(script: Script, node: ast.AST, asks: Callable[[ast.expr], bool | None]) -> bool:
    """Return whether ``node`` runs only where a test that ``asks`` knows has its answer True."""
    inner = node
    for outer in script.source.around(node):
        if isinstance(outer, (ast.If, ast.IfExp)):
            sign = asks(outer.test)
            body = outer.body if isinstance(outer.body, list) else [outer.body]
            if sign is not None and inner is not outer.test and (inner in body) == sign:
                return True
        inner = outer
    return False


def refuse_plain_backward(script: Script, call: ast.Call, handle: str) -> None:
    """Refuse a ``loss.backward()`` beside scaled ones: its gradients would not carry the scale."""
    script.refuse(
        call,
        f"`{ast.unparse(call)}` beside scaled losses: whose parameters it trains is not clear",
        f"`{handle}.backward(loss, optimizer)` if it feeds an enabled optimizer",
    )
