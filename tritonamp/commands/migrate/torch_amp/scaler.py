"""The GradScaler of a script: how it is made, and for which optimizers."""

import ast

from tritonamp.commands.migrate.loops.handle import AFTER_BOTH
from tritonamp.commands.migrate.loops.imports import Import
from tritonamp.commands.migrate.loops.switch import Switch
from tritonamp.commands.migrate.reading.scopes import Variable
from tritonamp.commands.migrate.reading.script import Script
from tritonamp.commands.migrate.torch_amp.making import SETTINGS, Making


def find_making(script: Script, call: ast.Call) -> Making | None:
    """Return how the scaler of ``call`` is made; None, and a refusal, where that is not known."""
    enabled, unknown = None, [a for a in call.args if not _is_device(a)]
    for keyword in call.keywords:
        if keyword.arg == "enabled":
            enabled = keyword.value
        elif keyword.arg not in SETTINGS | {"device"}:
            unknown.append(keyword.value)
    parent = script.source.parents[call]
    tests = [] if enabled is None or _is_true(enabled) else [enabled]
    if isinstance(parent, ast.IfExp) and parent.body is call and _is_none(parent.orelse):
        tests.append(parent.test)
        parent = script.source.parents[parent]
    elif isinstance(parent, ast.IfExp) and isinstance(parent.orelse, ast.Call):
        other = parent.orelse  # the same by the names of another torch
        if parent.body is call and (script.qualified(other.func) or "").endswith(".GradScaler"):
            tests += [k.value for k in other.keywords if k.arg == "enabled"]
            parent = script.source.parents[parent]
    statement: ast.stmt | None = None
    target: ast.expr | None = None
    if isinstance(parent, ast.AnnAssign):
        statement, target = parent, parent.target
    elif isinstance(parent, ast.Assign) and len(parent.targets) == 1:
        statement, target = parent, parent.targets[0]
    outer = script.source.parents[statement] if statement is not None else None
    if isinstance(outer, ast.If) and statement is not None:
        rest = [s for s in outer.body if s is not statement and not isinstance(s, Import)]
        if rest or not all(_sets_none(s) for s in outer.orelse):
            statement = None
        else:
            tests.append(outer.test)
            statement = outer
    root = script.flow.root(target)
    optimizers = _stepped(script, root) if root is not None else None
    different = {script.flow.canonical(test) for test in tests}
    if statement is None or root is None or unknown or len(different) > 1:
        script.refuse(
            call,
            f"`{ast.unparse(call)}` is not made by a plain assignment to one variable",
            f"make the handle in its place: {AFTER_BOTH}",
        )
    elif not optimizers:
        script.refuse(
            call,
            "the optimizers that this scaler steps are not known in this file",
            f"make the handle in its place: {AFTER_BOTH}",
        )
    elif any(isinstance(test, ast.Constant) for test in tests):
        script.refuse(call, "mixed precision is off here", "decide on a level for `enable`")
    else:
        assert isinstance(target, (ast.Name, ast.Attribute))
        switch = Switch(script, tests[0] if tests else None, root)
        making = Making(script, root, call, statement, target, switch, optimizers)
        if making.placing.is_steady(switch.expression):
            return making
        script.refuse(
            call,
            f"`{ast.unparse(tests[0])}` changes after the scaler is made",
            "a handle is on or off for good: decide before `enable`",
        )
    return None


def _stepped(script: Script, root: Variable) -> tuple[Variable, ...] | None:
    """Return the optimizers of every ``scaler.step(optimizer)``; None where one is not known."""
    found: list[Variable | None] = []
    for node in script.source.nodes:
        match node:
            case ast.Call(func=ast.Attribute(value=scaler, attr="step"), args=[optimizer]):
                if script.flow.root(scaler) == root:
                    found.append(script.flow.root(optimizer))
    known = [optimizer for optimizer in found if optimizer is not None]
    return tuple(dict.fromkeys(known)) if len(known) == len(found) else None


def _sets_none(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Assign) and _is_none(statement.value)


def _is_device(node: ast.expr) -> bool:
    text = ast.unparse(node)
    return text in ("'cuda'", "'cpu'") or "device" in text


def _is_none(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_true(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is True
