"""Imports and names: apex's move to ``tritonamp.apex``, torch's old ones become those of today."""

import ast
import importlib
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import tritonamp
from tritonamp.commands.migrate.names import Import, Names, is_none
from tritonamp.commands.migrate.script import Script

_OF_AMP = "torch.amp.", "torch.cuda.amp.", "torch.cpu.amp."
_OLD = {
    f"torch.{device}.amp.{path}{short}": (device, short)
    for device in ("cuda", "cpu")
    for path in ("", "autocast_mode.")
    for short in ("autocast", "custom_fwd", "custom_bwd")
}
_OF_OLD_AUTOCAST = "enabled", "dtype", "cache_enabled"
_OF_AUTOCAST = "device_type", "dtype", "enabled", "cache_enabled"
_BY_TEXT = "import_module", "find_spec", "__import__", "find_loader"
BY_HAND = "keep apex for it, or write it in torch; tritonamp/apex/README.md lists what there is"


def autocast_options(names: Names, call: ast.Call) -> dict[str, ast.expr]:
    """Return the arguments of an autocast by their names; of the old ones, with the device."""
    old = _OLD.get(names.qualified(call.func) or "")
    places = _OF_AUTOCAST if old is None else _OF_OLD_AUTOCAST
    given = dict(zip(places, call.args, strict=False))
    given |= {keyword.arg or "dtype": keyword.value for keyword in call.keywords}  # ** may hold one
    return given if old is None else given | {"device_type": ast.Constant(old[0])}


def rename_old(script: Script) -> None:
    """Note the edits of the names in torch.cuda.amp and torch.cpu.amp, which torch deprecates."""
    for node in script.nodes:
        name = script.qualified(node) if isinstance(node, ast.Name | ast.Attribute) else None
        if name not in _OLD or script.covers(node) or isinstance(node.ctx, ast.Store):  # type: ignore[attr-defined]
            continue
        device, short = _OLD[name]
        parent, reason = script.parents[node], f"torch deprecates torch.{device}.amp"
        called = isinstance(parent, ast.Call) and parent.func is node
        places = parent.args if isinstance(parent, ast.Call) else []
        starred = any(isinstance(place, ast.Starred) for place in places)
        if called and not starred and (short == "autocast" or not places):
            named = zip(_OF_OLD_AUTOCAST, places, strict=False)
            texts = [f"{key}={script.edited(place)}" for key, place in named]
            texts += [script.edited(keyword) for keyword in parent.keywords]  # type: ignore[attr-defined]
            lead = (
                f'autocast("{device}"'
                if short == "autocast"
                else f'amp.{short}(device_type="{device}"'
            )
            text = f"{script.torch()}.{', '.join([lead, *texts])})"
            script.replace(parent, text, reason)
        elif short != "autocast" and node in getattr(parent, "decorator_list", []):
            script.replace(node, f'{script.torch()}.amp.{short}(device_type="{device}")', reason)
        else:
            by_hand = f'`functools.partial(torch.amp.{short}, "{device}")`, which takes the device'
            what = f"`{ast.unparse(node)}`, which torch deprecates, is not called plainly"
            script.refuse(node, what, by_hand)


def is_apex(name: str | None) -> bool:
    """Return whether a dotted name is of apex or one of its compiled modules."""
    return name is not None and name.split(".")[0] in ("apex", "amp_C", "apex_C")


def statements(script: Script) -> list[ast.Import | ast.ImportFrom]:
    """Return all import statements, in order."""
    found = [node for node in script.nodes if isinstance(node, Import)]
    return sorted(found, key=script.start)


def imported(statement: ast.Import | ast.ImportFrom, alias: ast.alias) -> str:
    """Return the dotted name that ``alias`` imports; "" for a relative one."""
    if isinstance(statement, ast.Import):
        return alias.name
    return "" if statement.level else f"{statement.module}.{alias.name}"


def move_apex(script: Script) -> None:
    """Note that each import of apex names tritonamp.apex; refuse what is not there."""
    for statement in statements(script):
        names = [alias for alias in statement.names if alias not in script.dropped]
        of_apex = [alias for alias in names if is_apex(imported(statement, alias))]
        for alias in of_apex:
            _check(script, statement, imported(statement, alias))
        if of_apex and isinstance(statement, ast.ImportFrom):
            script.moved[statement] = f"tritonamp.{_inside_apex(statement.module or '')}"
        elif of_apex:
            line = script.newline + script.indentation(statement)
            script.moved[statement] = line.join(dict.fromkeys(map(_moved, statement.names)))
    for node in script.nodes:
        outer = script.parents.get(node)
        if isinstance(node, ast.Attribute) and not isinstance(outer, ast.Attribute):
            name = script.qualified(node)
            if is_apex(name) and not script.covers(node):
                _check(script, node, name or "")
        match node:
            case ast.Call(func=func, args=[ast.Constant(value=str() as text), *_]):
                if is_apex(text) and ast.unparse(func).split(".")[-1] in _BY_TEXT:
                    by_hand = "`tritonamp.apex.install()` before it, or the name in tritonamp.apex"
                    script.refuse(node, f"`{ast.unparse(node)}` imports by a text", by_hand)


def _inside_apex(name: str) -> str:
    return name if name.split(".")[0] == "apex" else f"apex.{name}"


def _moved(alias: ast.alias) -> str:
    """``import apex``, ``import apex.amp``, ``import amp_C as kernels``."""
    if not is_apex(alias.name):
        return f"import {ast.unparse(alias)}"
    bound = alias.name.split(".")[0]
    module = _inside_apex(bound if alias.asname is None else alias.name)
    return f"import tritonamp.{module} as {alias.asname or bound}"


def _check(script: Script, node: ast.AST, name: str) -> None:
    """Refuse what can neither be imported nor is an attribute of what can be."""
    value: Any = tritonamp
    for part in _inside_apex(name.removesuffix(".*")).split("."):
        if hasattr(value, part):
            value = getattr(value, part)
        elif not isinstance(value, ModuleType):
            return  # of an object: it may come with initialize
        elif find_spec(f"{value.__name__}.{part}") is None:
            script.refuse(node, f"`{name}` is not in tritonamp.apex", BY_HAND)
            return
        else:
            value = importlib.import_module(f"{value.__name__}.{part}")


def finish(script: Script) -> None:
    """Note the edits of the import statements: what goes away, what moves, what is needed."""
    _drop_unused(script)
    for statement in statements(script):
        _finish(script, statement)
    for module, reason in script.needs.items():
        if script.module(module) is None:
            _add(script, module, reason)


def _drop_unused(script: Script) -> None:
    """Drop what was imported from torch's amp modules, where nothing names it any more."""
    if not script.changes:
        return
    left = ast.parse(script.render())
    used = {node.id for node in ast.walk(left) if isinstance(node, ast.Name)} - script.shadowed
    for statement in statements(script):
        binds_torch = isinstance(statement, ast.Import)
        for alias in statement.names:
            of_amp = f"{imported(statement, alias)}.".startswith(_OF_AMP)
            gone = of_amp and (alias.asname or alias.name) not in used
            if gone and not (binds_torch and alias.asname is None):
                script.dropped.add(alias)


def _finish(script: Script, statement: ast.Import | ast.ImportFrom) -> None:
    kept = [ast.unparse(alias) for alias in statement.names if alias not in script.dropped]
    gone = ", ".join(alias.name for alias in statement.names if alias in script.dropped)
    text, old = script.moved.get(statement), getattr(statement, "module", None) or ""
    if gone and not kept:
        whole = _with_its_try(script, statement)
        if not script.covers(whole):
            script.delete(whole, f"not used any more: {gone}")
    elif gone:
        lead = f"from {text or old} import" if old else "import"
        script.replace(statement, f"{lead} {', '.join(kept)}", f"not used any more: {gone}")
    elif text is not None:
        new = script.segment(statement).replace(old, text, 1) if old else text
        script.replace(statement, new, "apex's names, from tritonamp")


def _with_its_try(script: Script, statement: ast.stmt) -> ast.stmt:
    """Return the ``try`` around an import where it does nothing but say that it failed."""
    outer = script.parents[statement]
    if not isinstance(outer, ast.Try) or outer.orelse or outer.finalbody:
        return statement
    if any(not isinstance(s, Import) or not {*s.names} <= script.dropped for s in outer.body):
        return statement
    says = [
        isinstance(s, (ast.Raise, ast.Pass, ast.Expr)) or is_none(getattr(s, "value", s))
        for handler in outer.handlers
        for s in handler.body
    ]
    return outer if all(says) else statement


def _add(script: Script, module: str, reason: str) -> None:
    """Import ``module`` behind the first imports of the file."""
    after = None
    for statement in script.tree.body:
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if not isinstance(statement, Import) and not (is_text and after is None):
            break
        after = statement
    if after is None:
        offset = script.line_start(script.start(script.tree.body[0]))
    else:
        offset = script.line_end(script.end(after))
    script.insert(offset, f"import {module}{script.newline}")
    script.why(after or script.tree.body[0], f"import {module}: {reason}")
