"""Small texts around the handle that both kinds of loops need."""

import ast

from tritonamp.commands.migrate.reading.scopes import Variable
from tritonamp.commands.migrate.reading.script import Script

AFTER_BOTH = "`amp = tritonamp.enable(model, optimizer, level=...)`"


def as_condition(test: ast.expr) -> str:
    """Return ``test`` as it can stand in any place of ``a if test else b``."""
    text = ast.unparse(test)
    return f"({text})" if isinstance(test, ast.IfExp | ast.Lambda | ast.NamedExpr) else text


def known_as(script: Script, models: tuple[Variable | None, ...]) -> set[str]:
    """Return how the one model is called, anywhere in the file; nothing for several models."""
    if len(models) != 1 or models[0] is None:
        return set()
    names = set()
    for variable in script.flow.group(models[0]):
        is_self = isinstance(variable.scope, ast.ClassDef)
        names.add(f"self.{variable.name}" if is_self else variable.name)
    return names | {f"{name}.module" for name in names}
