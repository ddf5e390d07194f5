"""The objects of a loop: what turns it on, its optimizers' models, and where all are made."""

import ast
from dataclasses import dataclass

from tritonamp.commands.migrate.names import Import, Variable
from tritonamp.commands.migrate.script import Script
from tritonamp.commands.migrate.text import Function

HANDLE = "`amp = tritonamp.enable(model, optimizer, level=...)` after model and optimizer"
_PARAMETERS = {"parameters", "named_parameters", "modules", "named_modules"}
LOOPS = ast.For | ast.While | ast.AsyncFor


class Refused(Exception):
    """A loop that is not understood: the node, what is the matter, what to do by hand."""

    def __init__(self, node: ast.AST, what: str, by_hand: str = HANDLE) -> None:
        super().__init__(node, what, by_hand)


@dataclass
class Switch:
    """What turns mixed precision on.

    Attributes:
        script: the file.
        expression: such as ``args.amp``; None: it is always on.
    """

    script: Script
    expression: ast.expr | None

    def sign(self, test: ast.expr) -> bool | None:
        """Return whether ``test`` asks for mixed precision or for its absence; None: neither."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            sign = self.sign(test.operand)
            return None if sign is None else not sign
        same = self.expression is not None and self.script.same(test, self.expression)
        return True if same else None

    def runs(self, node: ast.AST, *, on: bool) -> bool:
        """Return whether ``node`` runs only with mixed precision ``on``, or only without."""
        inner = node
        for outer in self.script.around(node):
            if isinstance(outer, ast.If | ast.IfExp) and inner is not outer.test:
                sign = self.sign(outer.test)
                body = outer.body if isinstance(outer.body, list) else [outer.body]
                if sign is not None and (inner in body) == (sign == on):
                    return True
            inner = outer
        return False


def in_place(condition: ast.expr) -> str:
    """Return an expression as it can stand in any place of ``a if test else b``."""
    text = ast.unparse(condition)
    return f"({text})" if isinstance(condition, ast.IfExp | ast.Lambda | ast.NamedExpr) else text


def models_of(script: Script, optimizer: Variable) -> list[Variable]:
    """Return the models that ``optimizer`` is made from by name; else the only one of the file."""
    models = _models(script)
    made = [n for _, s in script.makings(optimizer) for n in ast.walk(s)]
    found = map(script.root, made)
    named = [root for root in dict.fromkeys(found) if root in models]
    return named or (models if len(models) == 1 else [])


def _models(script: Script) -> list[Variable]:
    """Return all objects of the file, or parts of them, that are asked for their parameters."""
    found = []
    for node in script.nodes:
        if isinstance(node, ast.Attribute) and node.attr in _PARAMETERS:
            base = node.value
            while isinstance(base, ast.Attribute) and script.root(base) is None:
                base = base.value  # a part of a model: model.encoder
            found.append(script.root(base))
    is_object = [r for r in dict.fromkeys(found) if r is not None and r.name != "self"]
    kinds = Function | ast.ClassDef | Import
    return [r for r in is_object if not any(isinstance(b, kinds) for b in script.bindings[r])]


def place_behind(script: Script, statement: ast.stmt, roots: list[Variable]) -> ast.stmt:
    """Return the last of ``statement`` and what makes ``roots`` in its block.

    Refused where a handle could not be made there once for each of them.
    """
    scope, around = script.scope(statement), [*script.around(statement)]
    loops = {outer for outer in around if isinstance(outer, LOOPS)}
    place, what = statement, None
    for root in roots:
        makings = [(v.scope, script.scope(making), making) for v, making in script.makings(root)]
        here = [making for _, owner, making in makings if owner is scope]
        others = [(o, m) for of, o, m in makings if o is not scope and o is not of]
        anew = [making for owner, making in others if getattr(owner, "name", "") != "__init__"]
        outwards = [(making, *script.around(making)) for making in here]
        tops = [next(n for n in nodes if script.parents[n] in around) for nodes in outwards]
        place = max([place, *tops], key=script.start)  # type: ignore[assignment]
        if script.name_in(root, scope) is None or isinstance(scope, ast.ClassDef):
            what = f"`{root.name}` belongs to a class or another function"
        elif loops.difference(*outwards) or (not here and times_called(script, scope) != 1):
            what = f"the scaler is made in each round or call, `{root.name}` once"
        elif tops and all(isinstance(top, ast.If) and not top.orelse for top in tops):
            what = f"`{root.name}` is made under a condition alone"
        if anew or place not in script.block(statement):
            what = f"`{root.name}` is made anew in line {[*anew, place][0].lineno}"
    if what is not None:
        raise Refused(statement, what, f"one handle for each pair: {HANDLE}")
    return place


def times_called(script: Script, scope: ast.AST) -> int:
    """Return how often the file calls a function, or makes its class; more for calls in loops."""
    is_init = getattr(scope, "name", "") == "__init__"
    name = getattr(script.class_of(scope) if is_init else scope, "name", None)
    named = [n for n in script.nodes if name in (getattr(n, "id", ""), getattr(n, "attr", ""))]
    calls = [n for n in named if getattr(script.parents[n], "func", None) is n]
    loops = [o for call in calls for o in script.around(call) if isinstance(o, LOOPS)]
    return max(len(calls) + len(loops), is_init or name is None)


def changes(script: Script, value: ast.expr, statement: ast.stmt) -> bool:
    """Return whether ``value`` may change once ``statement`` has run."""
    texts = {ast.unparse(n) for n in ast.walk(value) if isinstance(n, ast.Name | ast.Attribute)}
    for node in script.nodes:
        if isinstance(getattr(node, "ctx", None), ast.Store) and ast.unparse(node) in texts:
            scope = script.scope(node)
            here = scope is script.scope(statement)
            is_init = getattr(scope, "name", "") == "__init__"
            later = here and script.start(node) > script.end(statement)
            if later or not (here or is_init or isinstance(node, ast.Name)):
                return True
    return False
