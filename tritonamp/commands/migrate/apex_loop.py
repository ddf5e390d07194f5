"""The list for a loop with ``apex.amp``: the line of ``enable``, and the methods of its handle.

A loop that the list does not know keeps apex's functions, which ``tritonamp.apex`` has.
"""

import ast

from tritonamp.commands.migrate.imports import HANDLE, add_import, imported, statements
from tritonamp.commands.migrate.script import Script
from tritonamp.commands.migrate.source import Function

Row = tuple[ast.AST, str, str]  # a node, its replacement, and the reason
_AMP = "apex.amp."
_CLIPS = "torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad.clip_grad_norm_"
_PLACES = "models", "optimizers", "enabled", "opt_level"
_FIELDS = {
    "loss_scale": "loss_scale",
    "keep_batchnorm_fp32": "keep_norms_fp32",
    "master_weights": "master_weights",
}
_ONLY_APEXS = {"model", "delay_unscale", "num_losses", "verbosity"}


def edit(script: Script) -> None:
    """Edit a loop whose ``amp.initialize`` and losses are in this file."""
    loads = [node for node in script.nodes if isinstance(getattr(node, "ctx", None), ast.Load)]
    uses = {node: name for node in loads if (name := _name(script, node)).isidentifier()}
    starts = [node for node, name in uses.items() if name == "initialize"]
    if len(starts) != 1 or "scale_loss" not in uses.values() or "" in script.meanings["amp"]:
        return
    found = [_start(script, starts[0]), *(_outer(script, n) for n in uses if n not in starts)]
    rows = [row for row in found if row is not None]
    if len(rows) < len(found) or _works_on_gradients(script, [node for node, _, _ in rows]):
        return
    for node, text, reason in rows:
        script.replace(node, text, reason)
    script.is_list = True
    _share(script, [node for node, _, _ in rows])
    imports = {s: [imported(s, alias) for alias in s.names] for s in statements(script)}
    plain = [statement for statement, names in imports.items() if names == ["apex.amp"]]
    for statement in plain:
        script.replace(statement, "import tritonamp", HANDLE)
    if not any(statement in script.tree.body for statement in plain):
        add_import(script)


def _name(script: Script, node: ast.AST) -> str:
    """Return the name in ``apex.amp`` that ``node`` stands for; "" for any other node."""
    name = script.qualified(node)
    return name.removeprefix(_AMP) if name.startswith(_AMP) else ""


def _outer(script: Script, name: ast.AST) -> Row | None:
    """Return the row for the outermost node around ``name`` that has one."""
    rows = [_row(script, node) for node in [*script.around(name)][:4]]
    return next((row for row in reversed(rows) if row is not None), None)


def _row(script: Script, node: ast.AST) -> Row | None:
    """Return the row for ``node``; None if it is no use of apex that the handle has, too."""
    match node:
        case ast.With(
            [ast.withitem(ast.Call(function, losses, given), ast.Name(scaled))],
            [ast.Expr(ast.Call(ast.Attribute(ast.Name(), "backward"), [], options))],
        ):
            if _name(script, function) == "scale_loss" and _only_backward(script, scaled):
                text = f"amp.backward({_arguments(script, [*losses, *given, *options])})"
                return node, text, "scales the loss, and runs backward"
        case ast.Call(clip, [ast.Call(masters, [_], []), norm], []) if (
            script.qualified(clip) in _CLIPS and _name(script, masters) == "master_params"
        ):
            text = f"amp.clip_grad_norm_({script.segment(norm)})"
            return node, text, "the step clips the true gradients"
        case ast.Call(function, arguments, options):
            name, text = _name(script, function), _arguments(script, [*arguments, *options])
            if name in ("scale_loss", "state_dict", "load_state_dict"):
                return node, f"amp.{name}({text})", "the handle has it, too"
    return None


def _only_backward(script: Script, name: str) -> bool:
    """Return whether a variable is read for nothing but its ``backward``."""
    nodes = [node for node in script.nodes if isinstance(node, ast.Name) and node.id == name]
    reads = [script.parents[node] for node in nodes if isinstance(node.ctx, ast.Load)]
    return all(getattr(parent, "attr", "") == "backward" for parent in reads)


def _arguments(script: Script, nodes: list[ast.expr | ast.keyword]) -> str:
    """Return the text of the arguments that the handle has, too."""
    kept = [node for node in nodes if getattr(node, "arg", None) not in _ONLY_APEXS]
    return ", ".join(script.segment(node) for node in kept)


def _works_on_gradients(script: Script, rows: list[ast.AST]) -> bool:
    """Return whether code reads gradients: apex unscales them behind a loss, a handle does not."""
    # work in an ``if`` whose other branch uses apex is for runs without apex
    used = {outer for node in rows for outer in script.around(node) if isinstance(outer, ast.If)}
    scopes = {script.scope(node) for node in rows}
    for node in script.nodes:
        clips = script.qualified(node).startswith("torch.nn.utils.clip_")
        works = clips or getattr(node, "attr", "") == "grad"
        if works and script.scope(node) in scopes and not {*script.around(node)} & {*rows, *used}:
            return True
    return False


def _start(script: Script, name: ast.AST) -> Row | None:
    """Return the row for the statement of ``amp.initialize``; None if it is not plain."""
    call, statement = [*script.around(name)][1:3]
    if not isinstance(call, ast.Call) or not isinstance(statement, ast.Assign | ast.Expr):
        return None
    given: dict[str, ast.expr] = dict(zip((*_PLACES, "**"), call.args, strict=False))
    given |= {keyword.arg or "**": keyword.value for keyword in call.keywords}
    objects = ", ".join(script.segment(given[place]) for place in _PLACES[:2] if place in given)
    level = script.segment(given["opt_level"]) if "opt_level" in given else '"O1"'
    if "enabled" in given:
        level = f'({level}) if ({script.segment(given["enabled"])}) else "O0"'
    arguments = [objects, f"level={level}"]
    for key, value in given.items():
        if key in _FIELDS and isinstance(value, ast.Constant):
            text = script.segment(value)
            text = text[1:-1] if value.value in ("True", "False") else text
            arguments += [f"{_FIELDS[key]}={text}"] if value.value is not None else []
        elif key not in _PLACES and key not in _ONLY_APEXS:
            return None
    lines = [f"amp = tritonamp.enable({', '.join(arguments)})"]
    results = [script.segment(target) for target in getattr(statement, "targets", [])]
    if results not in ([], [objects]):
        lines.append(f"{' = '.join(results)} = {objects}")
    text = (script.newline + script.indentation(statement)).join(lines)
    return statement, text, "enables in place, and gives the handle"


def _share(script: Script, rows: list[ast.AST]) -> None:
    """Make the handle a global name if another function than the first row's uses it."""
    scope = script.scope(rows[0])
    if isinstance(scope, Function) and not all(scope in script.around(node) for node in rows):
        first = scope.body[ast.get_docstring(scope) is not None and len(scope.body) > 1]
        line = f"{script.indentation(first)}global amp"
        offset = script.line_start(script.start(first))
        script.insert_line(offset, line, "other functions use the handle, too")
