"""Imports and names: apex's move to ``tritonamp.apex``, torch's old ones become those of today."""

import ast
import importlib
import re
from importlib.util import find_spec
from itertools import takewhile
from types import ModuleType
from typing import Any

import tritonamp
from tritonamp.commands.migrate.script import Script
from tritonamp.commands.migrate.source import Import

_OLD_MODULE = re.compile(r"torch\.(cuda|cpu)\.amp(\.autocast_mode|\.grad_scaler)?")
_OLD = {  # the arguments that a call may give by position
    "autocast": ("enabled", "dtype", "cache_enabled"),
    "GradScaler": ("init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled"),
    "custom_fwd": (),
    "custom_bwd": (),
}
HANDLE = "the handle comes from there"
_BY_TEXT = "import_module", "find_spec", "__import__", "find_loader"
_BY_HAND = "keep apex for it, or write it in torch; tritonamp/apex/README.md lists what there is"


def rename_old(script: Script) -> None:
    """Edit the names in torch.cuda.amp and torch.cpu.amp, because torch deprecates them."""
    for node in script.nodes:
        module, _, short = script.qualified(node).rpartition(".")
        old = _OLD_MODULE.fullmatch(module)
        if old is None or short not in _OLD or isinstance(node.ctx, ast.Store):  # type: ignore[attr-defined]
            continue
        parent, reason = script.parents[node], f"torch deprecates {module}"
        keyword = "device_type=" if short.startswith("custom") else ""
        device, name = f'{keyword}"{old[1]}"', ast.unparse(node)
        if name.endswith(f".{module.removeprefix('torch.')}.{short}"):  # torch.cuda.amp.autocast
            script.replace(node, f"{name.split('.')[0]}.amp.{short}", reason)
        if isinstance(parent, ast.Call) and parent.func is node:
            known = _give_device(script, parent, _OLD[short], device, reason)
        else:
            known = bool(keyword) and node in getattr(parent, "decorator_list", [])
            if known:
                script.insert(script.end(node), f"({device})", reason)
        if not known:
            by_hand = f'`functools.partial(torch.amp.{short}, "{old[1]}")`, which takes the device'
            what = f"`{ast.unparse(node)}`, which torch deprecates, is not called plainly"
            script.note(node, what, by_hand)
    for statement in statements(script):
        _rename_import(script, statement)


def _give_device(
    script: Script, call: ast.Call, places: tuple[str, ...], device: str, reason: str
) -> bool:
    """Edit a call to name its device. Return False if it cannot be edited with certainty."""
    opening = script.text.index("(", script.end(call.func)) + 1
    before = [script.text[opening : script.start(place)].rstrip(" \t\r\n\\") for place in call.args]
    starred = any(isinstance(place, ast.Starred) for place in call.args)
    if starred or len(before) > len(places) or not all(b == "" or b[-1] == "," for b in before):
        return False
    script.insert(opening, device + ", " * bool(call.args or call.keywords), reason)
    for name, place in zip(places, call.args, strict=False):
        script.insert(script.start(place), f"{name}=", reason)
    return True


def _rename_import(script: Script, statement: ast.Import | ast.ImportFrom) -> None:
    """Edit an import of old names that have this one meaning in the whole file."""
    names = {alias.asname or alias.name: imported(statement, alias) for alias in statement.names}
    meant = {name for name, full in names.items() if script.meaning(name) == full}
    if not any(_OLD_MODULE.match(names[name]) for name in meant):
        return
    module = getattr(statement, "module", None) or statement.names[0].name
    new = "torch.amp" if _OLD_MODULE.fullmatch(module) else "torch"
    plain = isinstance(statement, ast.Import) and len(names) == 1
    old = {*_OLD} if new == "torch.amp" else {"amp"}
    known = plain or {alias.name for alias in statement.names} <= old
    if known and meant == {*names}:
        text = script.segment(statement).replace(module, new, 1)
        script.replace(statement, text, "torch deprecates the old module")
    else:
        what = f"`{ast.unparse(statement)}` has other names, too"
        script.note(statement, what, "an import of their own for those that torch deprecates")


def statements(script: Script) -> list[ast.Import | ast.ImportFrom]:
    """Return all import statements."""
    return [node for node in script.nodes if isinstance(node, Import)]


def imported(statement: ast.Import | ast.ImportFrom, alias: ast.alias) -> str:
    """Return the dotted name that ``alias`` imports; "" for a relative import."""
    if isinstance(statement, ast.Import):
        return alias.name
    return "" if statement.level else f"{statement.module}.{alias.name}"


def _is_apex(name: str) -> bool:
    return name.split(".")[0] in ("apex", "amp_C", "apex_C")


def move_apex(script: Script) -> None:
    """Edit each import of apex to name tritonamp.apex; note names that tritonamp.apex lacks."""
    for statement in statements(script):
        of_apex = [name for a in statement.names if _is_apex(name := imported(statement, a))]
        for name in of_apex:
            _check(script, statement, name)
        text, reason = script.segment(statement), "apex's names, from tritonamp"
        if of_apex and isinstance(statement, ast.ImportFrom):
            module = statement.module or ""
            new = text.replace(module, f"tritonamp.{_inside_apex(module)}", 1)
            script.replace(statement, new, reason)
        elif of_apex:
            line = script.newline + script.indentation(statement)
            new = line.join(dict.fromkeys(map(_moved, statement.names)))
            script.replace(statement, new, reason)
    for node in script.nodes:
        outer = script.parents.get(node)
        whole = isinstance(node, ast.Attribute) and not isinstance(outer, ast.Attribute)
        if whole and _is_apex(name := script.qualified(node)):
            _check(script, node, name)
        match node:
            case ast.Call(func=func, args=[ast.Constant(value=str() as text), *_]):
                if _is_apex(text) and ast.unparse(func).split(".")[-1] in _BY_TEXT:
                    by_hand = "`tritonamp.apex.install()` before it, or the name in tritonamp.apex"
                    script.note(node, f"`{ast.unparse(node)}` imports by a text", by_hand)


def _inside_apex(name: str) -> str:
    return name if name.split(".")[0] == "apex" else f"apex.{name}"


def _moved(alias: ast.alias) -> str:
    """Return the import for ``import apex``, ``import apex.amp`` or ``import amp_C as kernels``."""
    if not _is_apex(alias.name):
        return f"import {ast.unparse(alias)}"
    bound = alias.name.split(".")[0]
    module = _inside_apex(bound if alias.asname is None else alias.name)
    return f"import tritonamp.{module} as {alias.asname or bound}"


def _check(script: Script, node: ast.AST, name: str) -> None:
    """Note a name that can neither be imported nor is an attribute of something imported."""
    value: Any = tritonamp
    for part in _inside_apex(name.removesuffix(".*")).split("."):
        if hasattr(value, part):
            value = getattr(value, part)
        elif not isinstance(value, ModuleType):
            return  # an attribute of an object, which ``initialize`` may set
        elif find_spec(f"{value.__name__}.{part}") is None:
            script.note(node, f"`{name}` is not in tritonamp.apex", _BY_HAND)
            return
        else:
            value = importlib.import_module(f"{value.__name__}.{part}")


def add_import(script: Script) -> None:
    """Import tritonamp behind the first imports of the file, unless one of them does."""
    body = script.tree.body
    head = [*takewhile(lambda s: isinstance(s, Import | ast.Expr), body)]
    imports = [s for s in head if isinstance(s, Import)]
    if not any(imported(s, alias) == "tritonamp" for s in imports for alias in s.names):
        first = script.line_start(script.start(body[0]))
        offset = script.line_end(script.end(imports[-1])) if imports else first
        script.insert_line(offset, "import tritonamp", HANDLE)
