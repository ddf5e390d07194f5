"""The import statements of a script, once it is known what its new text needs."""

import ast

from tritonamp.commands.migrate.reading.script import Script

_OF_AMP = "torch.amp", "torch.cuda.amp", "torch.cpu.amp"
Import = ast.Import | ast.ImportFrom


def statements(script: Script) -> list[ast.Import | ast.ImportFrom]:
    """Return all import statements, in order."""
    found = [node for node in script.source.nodes if isinstance(node, Import)]
    return sorted(found, key=script.source.start)


def imported(statement: ast.Import | ast.ImportFrom, alias: ast.alias) -> str:
    """Return the dotted name that ``alias`` imports; "" for a relative one."""
    if isinstance(statement, ast.Import):
        return alias.name
    return "" if statement.level else f"{statement.module}.{alias.name}"


def convert(script: Script) -> None:
    """Note the edits of the imports: what goes away, what moves, what is needed."""
    _drop_unused(script)
    for statement in statements(script):
        dropped = [alias for alias in statement.names if alias in script.dropped]
        if dropped:
            _drop(script, statement, dropped)
        elif statement in script.moved:
            _move(script, statement)
    if script.needs_tritonamp and not script.imports("tritonamp"):
        _add(script, "tritonamp", "the handle comes from there")
    if script.needs_torch:
        _add(script, "torch", "the new names begin with it")


def _drop_unused(script: Script) -> None:
    """Drop what was imported from torch's amp modules, where nothing names it any more."""
    if not script.edits:
        return
    left = ast.parse(script.edits.render())
    used = {node.id for node in ast.walk(left) if isinstance(node, ast.Name)}
    for statement in statements(script):
        for alias in statement.names:
            name = imported(statement, alias)
            if isinstance(statement, ast.Import) and alias.asname is None:
                continue  # import torch.cuda.amp binds torch
            of_amp = any(name == module or name.startswith(f"{module}.") for module in _OF_AMP)
            bound = alias.asname or alias.name
            if of_amp and (bound not in used or bound in script.taken):
                script.dropped.add(alias)


def _drop(script: Script, statement: ast.Import | ast.ImportFrom, dropped: list[ast.alias]) -> None:
    kept = [ast.unparse(alias) for alias in statement.names if alias not in dropped]
    names = ", ".join(alias.name for alias in dropped)
    reason = f"not used any more: {names}"
    if kept:
        module = script.moved.get(statement) or getattr(statement, "module", None)
        lead = "import" if isinstance(statement, ast.Import) else f"from {module} import"
        script.replace(statement, f"{lead} {', '.join(kept)}", reason)
        return
    whole = _with_its_try(script, statement)
    inside = script.source.parents[whole]
    at_top = isinstance(inside, ast.Module) or (
        isinstance(inside, ast.Try) and isinstance(script.source.parents[inside], ast.Module)
    )
    if script.needs_tritonamp and at_top and not script.imports("tritonamp"):
        script.replace(whole, "import tritonamp", "the handle comes from there")
        script.needs_tritonamp = False
    elif not script.edits.covers(whole):
        script.delete(whole, reason)


def _with_its_try(script: Script, statement: ast.stmt) -> ast.stmt:
    """Return the ``try`` around an import where it does nothing but say that it failed."""
    outer = script.source.parents[statement]
    if not isinstance(outer, ast.Try) or outer.orelse or outer.finalbody:
        return statement
    if any(not isinstance(s, Import) or not set(s.names) <= script.dropped for s in outer.body):
        return statement
    says = [
        isinstance(s, (ast.Raise, ast.Pass, ast.Expr))
        or (isinstance(s, ast.Assign) and ast.unparse(s.value) == "None")
        for handler in outer.handlers
        for s in handler.body
    ]
    return outer if all(says) else statement


def _move(script: Script, statement: ast.Import | ast.ImportFrom) -> None:
    text, new = script.source.segment(statement), script.moved[statement]
    if isinstance(statement, ast.ImportFrom):
        assert statement.module is not None
        new = text.replace(statement.module, new, 1)
    script.replace(statement, new, "apex's names, from tritonamp")


def _add(script: Script, module: str, reason: str) -> None:
    """Import ``module`` behind the first imports of the file."""
    source = script.source
    body = source.tree.body
    after: ast.stmt | None = None
    for statement in body:
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if not isinstance(statement, Import) and not (is_text and after is None):
            break
        after = statement
    if after is None:
        offset = source.line_start(source.start(body[0]))
    else:
        offset = source.line_end(source.end(after))
    script.edits.insert(offset, f"import {module}{source.newline}")
    script.why(after or body[0], f"import {module}: {reason}")
