"""What a loop does with its gradients: they carry the loss scale until the step unscales them."""

import ast
from collections.abc import Iterable

from tritonamp.commands.migrate.loops.owners import models_of
from tritonamp.commands.migrate.loops.switch import Switch
from tritonamp.commands.migrate.reading.scopes import Variable
from tritonamp.commands.migrate.reading.script import Script

_NORM = ("torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad.clip_grad_norm_")
_VALUE = ("torch.nn.utils.clip_grad_value_", "torch.nn.utils.clip_grad.clip_grad_value_")
IN_THE_STEP = "clips the true gradients in the step's own pass"


def limit_of(script: Script, call: ast.Call) -> ast.expr | None:
    """Return the largest norm that a ``clip_grad_norm_(x, limit)`` of 2-norms allows."""
    if script.qualified(call.func) not in _NORM:
        return None
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    norm_type = named.pop("norm_type", None)
    if norm_type is not None and ast.unparse(norm_type) not in ("2", "2.0"):
        return None
    if len(call.args) == 2 and not named:
        return call.args[1]
    return named["max_norm"] if len(call.args) == 1 and [*named] == ["max_norm"] else None


def limit_of_all(
    script: Script, call: ast.AST | None, models: tuple[Variable | None, ...]
) -> ast.expr | None:
    """Return the limit of a call that clips all gradients of the one model."""
    match call:
        case ast.Call(
            args=[ast.Call(func=ast.Attribute(value=model, attr="parameters"), args=[]), *_]
        ):
            if None not in models and (script.flow.root(model),) == models:
                return limit_of(script, call)
    return None


def clips(script: Script) -> list[ast.Call]:
    """Return all calls of torch that clip gradients."""
    return script.calls(*_NORM, *_VALUE)


def clip(script: Script, call: ast.AST, limit: ast.expr, handle: str, reason: str) -> None:
    """Note the edit that clips by the handle."""
    script.replace(call, f"{handle}.clip_grad_norm_({script.edits.text(limit)})", reason)


def unscale_before(script: Script, node: ast.AST, handle: str, reason: str) -> None:
    """Note a line before the statement of ``node`` that makes its gradients true."""
    statement = script.source.statement(node)
    start = script.source.start(statement)
    line = script.source.line_start(start)
    lead = script.source.text[line:start]
    if lead.strip():
        script.refuse(node, "a statement that shares its line", "give it a line of its own")
        return
    script.edits.insert(line, f"{lead}{handle}.unscale_()  # true gradients{script.newline}")
    script.why(statement, reason)


def reads(script: Script, scope: ast.AST) -> list[ast.Attribute]:
    """Return where the function ``scope`` itself reads ``.grad``."""
    return [
        node
        for node in script.source.nodes
        if isinstance(node, ast.Attribute)
        and node.attr == "grad"
        and isinstance(node.ctx, ast.Load)
        and getattr(script.source.parents[node], "attr", "") not in ("zero_", "detach_")
        and script.source.scope(node) is scope
    ]


def plain_backwards(script: Script, scopes: set[ast.AST], switch: Switch) -> list[ast.Call]:
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
        and not switch.off_at(node)
    ]


def _is_scaled(loss: ast.expr) -> bool:
    """Return whether ``loss`` is ``scaler.scale(...)``."""
    return (
        isinstance(loss, ast.Call)
        and isinstance(loss.func, ast.Attribute)
        and loss.func.attr == "scale"
    )


def refuse_plain_backward(script: Script, call: ast.Call, handle: str) -> None:
    """Refuse a ``loss.backward()`` beside scaled ones: its gradients would not carry the scale."""
    script.refuse(
        call,
        f"`{ast.unparse(call)}` beside scaled losses: whose parameters it trains is not clear",
        f"`{handle}.backward(loss, optimizer)` if it feeds an enabled optimizer",
    )


def refuse_plain_steps(
    script: Script, optimizers: Iterable[Variable], models: Iterable[Variable], switch: Switch
) -> None:
    """Refuse steps past the scaler: of its optimizers, and of others over the same models."""
    known, trained = {*optimizers}, {*models}
    cleared = {
        script.flow.root(node.value)
        for node in script.source.nodes
        if isinstance(node, ast.Attribute) and node.attr == "zero_grad"
    }
    for node in script.source.nodes:
        func = node.func if isinstance(node, ast.Call) else None
        if not isinstance(func, ast.Attribute) or func.attr != "step":
            continue
        root = script.flow.root(func.value)
        if root is None or switch.off_at(node):
            continue
        others = root in cleared - known and {*models_of(script, root, guess=False)} & trained
        if root in known or others:
            script.refuse(
                node,
                f"`{ast.unparse(node)}` steps past the scaler, on what it is for",
                "hand this optimizer to `enable`, and its losses to `amp.backward`",
            )
