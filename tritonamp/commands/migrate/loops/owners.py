"""Whose parameters an optimizer steps: the models to enable, and where that can be done."""

import ast
from dataclasses import dataclass

from tritonamp.commands.migrate.reading.scopes import Variable
from tritonamp.commands.migrate.reading.script import Script
from tritonamp.commands.migrate.reading.source import Function

_PARAMETERS = {"parameters", "named_parameters", "modules", "named_modules"}
_OF_MODULES = {"train", "eval", "parameters", "named_parameters"}
_MOVES = {"to", "cuda", "cpu", "half", "float", "bfloat16", "apply"}


@dataclass(frozen=True)
class Owned:
    """What ``enable`` is given: variables that hold models and optimizers."""

    models: tuple[Variable, ...]
    optimizers: tuple[Variable, ...]


def models_of(script: Script, optimizer: Variable, guess: bool = True) -> list[Variable]:
    """Return the models whose parameters were given to ``optimizer``, as roots; none if unclear.

    Where that is not to be seen, and ``guess``, it is the one model of the file.
    """
    found: list[Variable] = []
    for call in _made(script, optimizer):
        for root in _with_parameters_in(script, call) or _called(script, call):
            if root not in found:
                found.append(root)
    trained = _trained(script) if guess else []
    return found or (trained if len(trained) == 1 else [])


def _made(script: Script, optimizer: Variable) -> list[ast.Call]:
    """Return the calls that ``optimizer`` is assigned from."""
    return [
        statement.value
        for variable in script.flow.group(optimizer)
        for binding in script.scopes.bindings[variable]
        for statement in [script.source.parents.get(binding)]
        if isinstance(statement, (ast.Assign, ast.AnnAssign))
        and isinstance(statement.value, ast.Call)
    ]


def _trained(script: Script) -> list[Variable]:
    """Return what is used as a model: called, and asked for its parameters or its mode."""
    called = _roots_called(script)
    found = [
        script.flow.root(node.value)
        for node in script.source.nodes
        if isinstance(node, ast.Attribute) and node.attr in _OF_MODULES
    ]
    return [root for root in dict.fromkeys(found) if root is not None and root in called]


def _roots_called(script: Script) -> set[Variable | None]:
    calls = [node for node in script.source.nodes if isinstance(node, ast.Call)]
    return {script.flow.root(call.func) for call in calls}


def _with_parameters_in(script: Script, made: ast.Call) -> list[Variable]:
    """Return the roots of ``x`` in every ``x.parameters()`` that ``made`` was computed from."""
    found: list[Variable] = []
    for inner in _sources(script, made):
        if isinstance(inner, ast.Attribute) and inner.attr in _PARAMETERS:
            base = inner.value
            while isinstance(base, ast.Attribute) and script.flow.root(base) is None:
                base = base.value  # of a part of a model: model.encoder
            root = script.flow.root(base)
            found += [] if root is None else [root]
    return list(dict.fromkeys(found))


def _sources(script: Script, node: ast.AST) -> list[ast.AST]:
    """Return all nodes that ``node`` was computed from, through plain variables, and its own."""
    found: list[ast.AST] = []
    seen: set[Variable] = set()
    waiting = [node]
    while waiting:
        for inner in ast.walk(waiting.pop()):
            found.append(inner)
            variable = script.scopes.variable(inner) if isinstance(inner, ast.Name) else None
            if variable is not None and isinstance(inner, ast.Name) and variable not in seen:
                seen.add(variable)
                waiting += _values(script, inner)
    return found


def _values(script: Script, name: ast.Name) -> list[ast.expr]:
    """Return what a plain variable was assigned, appended or extended by."""
    variable = script.scopes.variable(name)
    if variable is None or script.qualified(name) is not None:
        return []
    values = []
    for binding in script.scopes.bindings[variable]:
        statement = script.source.parents.get(binding)
        if isinstance(statement, (ast.Assign, ast.AugAssign, ast.AnnAssign)) and statement.value:
            is_object = isinstance(statement.value, ast.Call) and script.qualified(
                statement.value.func
            )
            if not is_object or "optim" not in str(is_object):
                values.append(statement.value)
        elif isinstance(statement, (ast.For, ast.comprehension)):
            values.append(statement.iter)
    for call in ast.walk(variable.scope):
        match call:
            case ast.Call(func=ast.Attribute(value=ast.Name() as taker, attr=method), args=[value]):
                if taker.id == variable.name and method in ("append", "extend"):
                    values.append(value)
    return values


def _called(script: Script, made: ast.Call) -> list[Variable]:
    """Return the arguments of ``made`` that are called somewhere as models are: ``model(x)``."""
    called = _roots_called(script)
    roots = [script.flow.root(node) for node in _sources(script, made)]
    is_function = {
        root
        for root in roots
        if root is not None
        and any(
            isinstance(b, Function | ast.ClassDef | ast.Import | ast.ImportFrom)
            for b in script.scopes.bindings[root]
        )
    }
    return [root for root in roots if root is not None and root in called - is_function]


def unlike_an_optimizer(script: Script, optimizer: Variable) -> str | None:
    """Return why ``enable`` would not take what is made there; None where it may."""
    for call in _made(script, optimizer):
        variable = script.scopes.variable(call.func)
        for binding in script.scopes.bindings.get(variable, []) if variable is not None else []:
            bases = binding.bases if isinstance(binding, ast.ClassDef) else None
            if bases is not None and not any("optim" in ast.unparse(b).lower() for b in bases):
                return f"`{ast.unparse(call.func)}` is no torch.optim.Optimizer"
        for node in ast.walk(call):
            items = node.elts if isinstance(node, ast.List | ast.Tuple) else []
            starred = [isinstance(item, ast.Starred) for item in items]
            if any(starred) and not all(starred):
                return "the optimizer has parameters that are no model's"
    return None


def is_certain(script: Script, root: Variable, place: ast.stmt) -> bool:
    """Return whether ``root`` is made whenever ``place`` runs, and not under a condition alone."""
    source = script.source
    around = [*source.around(place)]
    branches: dict[ast.If, set[bool]] = {}
    for variable in script.flow.group(root):
        for binding in script.scopes.makings(variable):
            if isinstance(binding, ast.arg) or source.scope(binding) is not source.scope(place):
                return True
            outer = [node for node in source.around(binding) if isinstance(node, ast.If)]
            own = [node for node in outer if node not in around]
            if not own:
                return True
            inner: ast.AST = source.statement(binding)
            for node in own:
                while source.parents[inner] is not node:
                    inner = source.parents[inner]
                branches.setdefault(node, set()).add(inner in node.body)
                inner = node
    return any(len(sides) == 2 for sides in branches.values())


def name_in(script: Script, root: Variable, scope: ast.AST) -> str | None:
    """Return how ``scope`` names ``root`` once it has been made; None where it cannot."""
    owner = script.scopes.method_of(scope)
    for variable in script.flow.group(root):
        if variable.scope is scope and script.scopes.makings(variable):
            return variable.name
    for variable in script.flow.group(root):
        if owner is not None and variable.scope is owner and isinstance(scope, Function):
            methods = {
                function.name
                for binding in script.scopes.makings(variable)
                for function in [script.source.scope(binding)]
                if isinstance(function, Function)
            }
            if scope.name in methods or "__init__" in methods:
                return f"{scope.args.args[0].arg}.{variable.name}"
    for variable in script.flow.group(root):
        if variable.scope is script.source.tree and not isinstance(scope, ast.Module):
            return variable.name
    return None


def last_made(
    script: Script, roots: tuple[Variable, ...], block: list[ast.stmt]
) -> ast.stmt | None:
    """Return the last statement of ``block`` that makes, wraps or moves one of ``roots``."""
    found = None
    for statement in block:
        if any(_makes(script, node, roots) for node in ast.walk(statement)):
            found = statement
    return found


def _makes(script: Script, node: ast.AST, roots: tuple[Variable, ...]) -> bool:
    if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
        root = script.flow.root(script.scopes.variable(node))
        statement = script.source.parents[node]
        value = statement.value if isinstance(statement, ast.Assign) else None
        wraps = isinstance(value, ast.Call) and any(script.flow.root(a) == root for a in value.args)
        return root in roots and not wraps  # DDP(model) may come later
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in _MOVES
        and isinstance(script.source.parents[node], ast.Expr)
        and script.flow.root(node.func.value) in roots
    )
