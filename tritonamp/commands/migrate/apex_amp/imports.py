"""Imports from apex, to those from ``tritonamp.apex``."""

import ast
import importlib
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import tritonamp
from tritonamp.commands.migrate.loops.imports import imported, statements
from tritonamp.commands.migrate.reading.script import Script

_BUILT = "amp_C", "apex_C"
BY_HAND = "keep apex for it, or write it in torch; tritonamp/apex/README.md lists what there is"


def is_apex(name: str | None) -> bool:
    """Return whether a dotted name is of apex or one of its compiled modules."""
    return name is not None and name.split(".")[0] in ("apex", *_BUILT)


def convert(script: Script) -> None:
    """Note the edits: each import of apex names tritonamp.apex; refuse what is not there."""
    for statement in statements(script):
        names = [alias for alias in statement.names if alias not in script.dropped]
        if not any(is_apex(imported(statement, alias)) for alias in names):
            continue
        if isinstance(statement, ast.ImportFrom):
            for alias in names:
                _check(script, statement, imported(statement, alias))
            script.moved[statement] = f"tritonamp.{_inside_apex(statement.module or '')}"
        else:
            _convert_plain(script, statement)
    _check_uses(script)
    _refuse_texts(script)


def _inside_apex(name: str) -> str:
    return name if name.split(".")[0] == "apex" else f"apex.{name}"


def _convert_plain(script: Script, statement: ast.Import) -> None:
    """``import apex``, ``import apex.amp``, ``import amp_C as kernels``."""
    new = []
    for alias in statement.names:
        if not is_apex(alias.name):
            new.append(f"import {ast.unparse(alias)}")
            continue
        _check(script, statement, alias.name)
        name = _inside_apex(alias.name)
        if alias.asname is not None:
            new.append(f"import tritonamp.{name} as {alias.asname}")
        else:
            bound = alias.name.split(".")[0]
            new.append(f"import tritonamp.{_inside_apex(bound)} as {bound}")
    indentation = script.source.newline + script.source.indentation(statement)
    script.moved[statement] = indentation.join(dict.fromkeys(new))


def _check_uses(script: Script) -> None:
    """Refuse ``apex.x.y`` that tritonamp.apex does not have."""
    for node in script.source.nodes:
        outer = script.source.parents.get(node)
        if isinstance(node, ast.Attribute) and not isinstance(outer, ast.Attribute):
            name = script.qualified(node)
            if is_apex(name) and not script.edits.covers(node):
                _check(script, node, name or "")


def _check(script: Script, node: ast.AST, name: str) -> None:
    if not _exists(f"tritonamp.{_inside_apex(name.removesuffix('.*'))}"):
        script.refuse(node, f"`{name}` is not in tritonamp.apex", BY_HAND)


def _exists(name: str) -> bool:
    """Return whether a dotted name can be imported, or is an attribute of what can be."""
    value: Any = tritonamp
    for part in name.split(".")[1:]:
        if hasattr(value, part):
            value = getattr(value, part)
        elif not isinstance(value, ModuleType):
            return True  # of an object: it may come with initialize
        elif find_spec(f"{value.__name__}.{part}") is None:
            return False
        else:
            value = importlib.import_module(f"{value.__name__}.{part}")
    return True


def _refuse_texts(script: Script) -> None:
    """Refuse modules that are imported by a text: ``importlib.import_module("amp_C")``."""
    for node in script.source.nodes:
        if (
            isinstance(node, ast.Call)
            and node.args
            and isinstance(node.args[0], ast.Constant)
            and is_apex(str(node.args[0].value))
            and ast.unparse(node.func).split(".")[-1]
            in ("import_module", "find_spec", "__import__", "find_loader")
        ):
            script.refuse(
                node,
                f"`{ast.unparse(node)}` imports by a text",
                "call `tritonamp.apex.install()` before it, or name the module in tritonamp.apex",
            )
