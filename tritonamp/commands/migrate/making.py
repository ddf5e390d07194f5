"""Where a scaler is made, and what ``enable`` is called with in its place."""

import ast
from dataclasses import dataclass, field

from tritonamp.commands.migrate.handle import AFTER_BOTH
from tritonamp.commands.migrate.imports import Import
from tritonamp.commands.migrate.owners import last_made, models_of, name_in
from tritonamp.commands.migrate.scopes import Variable
from tritonamp.commands.migrate.script import Script

_SETTINGS = {"init_scale", "growth_factor", "backoff_factor", "growth_interval"}
_LOOPS = (ast.For, ast.While, ast.AsyncFor)


@dataclass
class Making:
    """A scaler that becomes a handle.

    Attributes:
        script: the file.
        root: the variable that holds it.
        call: ``GradScaler(...)``.
        statement: what makes it: an assignment, or an ``if`` around it.
        target: what it is assigned to.
        switch: the expression that turns mixed precision on; None: it always is.
        models, optimizers: roots of what is to be enabled.
        name: what the handle is called where it is made.
    """

    script: Script
    root: Variable
    call: ast.Call
    statement: ast.stmt
    target: ast.Name | ast.Attribute
    switch: ast.expr | None
    optimizers: tuple[Variable, ...]
    models: tuple[Variable, ...] = ()
    name: str = ""
    _renamed: bool = field(default=False)

    def __post_init__(self) -> None:
        self.models = tuple(
            dict.fromkeys(m for o in self.optimizers for m in models_of(self.script, o))
        )
        self._renamed = _is_free(self.script, "amp")
        if self._renamed:
            self.script.taken.add("amp")
        self.name = self.text(self.target)

    def makes(self, node: ast.AST) -> bool:
        """Whether ``node`` is where the scaler is assigned, or None in its place."""
        parent = self.script.source.parents[node]
        if node is self.target:
            return True
        return isinstance(parent, (ast.Assign, ast.AnnAssign)) and _is_none(parent.value)

    def hands_on(self, node: ast.AST) -> bool:
        """Whether ``node`` only gives the scaler to another variable that is followed."""
        flow, scopes, parents = self.script.flow, self.script.scopes, self.script.source.parents
        parent = parents[node]
        if isinstance(parent, ast.keyword):
            name, parent = parent.arg, parents[parent]
        else:
            name = None
        if isinstance(parent, ast.Call) and node is not parent.func:
            function = scopes.function(parent)
            taken = (
                [a for a in _parameters(function) if flow.root(Variable(function, a)) == self.root]
                if function
                else []
            )
            return bool(taken) and name in (None, *taken)
        while isinstance(parent, ast.Tuple):
            parent = parents[parent]
        if isinstance(parent, ast.Return):
            return self._is_taken(parent)
        if isinstance(parent, ast.Assign) and len(parent.targets) == 1:
            target = parent.targets[0]
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            return any(flow.root(name) == self.root for name in names)
        return False

    def _is_taken(self, result: ast.Return) -> bool:
        """Whether every call of the function that returns the scaler gives it to a variable."""
        script = self.script
        calls = script.flow.calls.get(script.source.scope(result), [])
        statements = [script.source.parents[call] for call in calls]
        return bool(calls) and all(
            isinstance(statement, ast.Assign)
            and any(script.flow.root(n) == self.root for n in ast.walk(statement.targets[0]))
            for statement in statements
        )

    def renames(self, node: ast.AST) -> bool:
        """Whether the handle has another name than the scaler had."""
        return self._renamed

    def text(self, node: ast.AST) -> str:
        """Return the name of the handle at ``node``, an occurrence of the scaler."""
        if not self._renamed:
            return node.arg if isinstance(node, ast.arg) else ast.unparse(node)
        if isinstance(node, ast.Attribute):
            return f"{ast.unparse(node.value)}.amp"
        return "amp"

    def argument(self, node: ast.arg) -> str:
        """Return the name of the handle as a parameter."""
        return "amp" if self._renamed else node.arg

    def visible_at(self, node: ast.AST) -> str | None:
        """Return what the handle is called at ``node``; None where it cannot be reached, or yet."""
        script = self.script
        scope = script.source.scope(node)
        if scope is script.source.scope(self.statement):
            place = self._place(scope)
            if place is None or script.source.start(node) < script.source.end(place):
                return None
        for variable in script.flow.group(self.root):
            is_self = isinstance(variable.scope, ast.ClassDef)
            if is_self and script.scopes.method_of(scope) is variable.scope:
                first = scope.args.args[0].arg  # type: ignore[attr-defined]
                return f"{first}.{'amp' if self._renamed else variable.name}"
            if not is_self and script.scopes.lookup(variable.name, scope) == variable:
                return "amp" if self._renamed else variable.name
        return None

    def fed_by(self, backward: ast.stmt) -> list[str] | None:
        """Return optimizer and loss_id of a loss: what is stepped next in its block."""
        script = self.script
        block = script.source.block(backward)
        for statement in block[block.index(backward) + 1 :]:
            match statement:
                case ast.Expr(
                    value=ast.Call(func=ast.Attribute(value=scaler, attr="step"), args=[optimizer])
                ) if script.flow.root(scaler) == self.root:
                    roots: list[Variable | None] = [*self.optimizers]
                    number = roots.index(script.flow.root(optimizer))
                    return [ast.unparse(optimizer), f"loss_id={number}"][: 1 + bool(number)]
        return None

    def write(self, dtype: str | None) -> None:
        """Note the edits that put ``enable`` in the place of the scaler."""
        script, source = self.script, self.script.source
        scope = source.scope(self.statement)
        models = [name_in(script, root, scope) for root in self.models]
        optimizers = [name_in(script, root, scope) for root in self.optimizers]
        if not models or None in models or None in optimizers:
            what = "model" if not models or None in models else "optimizer"
            script.refuse(
                self.call,
                f"which {what} this scaler is for cannot be told here",
                f"make the handle where model and optimizer are known: {AFTER_BOTH}",
            )
            return
        place = self._place(scope)
        if place is None:
            return
        asked = "" if self.switch is None else f' if {ast.unparse(self.switch)} else "O0"'
        level = f'"O1"{asked}'
        options = [_listed(models), _listed(optimizers), f"level={level}"]
        options += [f"dtype={dtype}"] * (dtype is not None)
        settings = [script.edits.text(k) for k in self.call.keywords if k.arg in _SETTINGS]
        if settings:
            made = f"tritonamp.GradScaler({', '.join(settings)})"
            asked = "" if self.switch is None else f" if {ast.unparse(self.switch)} else None"
            options.append(f"scaler={made}{asked}")
        line = f"{self.name} = tritonamp.enable({', '.join(options)})"
        reason = (
            "casts in every forward of the model (evaluation, too), loss scale and checked steps"
        )
        script.needs_tritonamp = True
        if place is self.statement:
            script.replace(self.statement, line, reason)
        else:
            script.delete(self.statement, "made below, where model and optimizer are both there")
            indentation = source.indentation(place)
            after = source.line_end(source.end(place))
            lead = "" if source.text[:after].endswith("\n") else source.newline
            script.edits.insert(after, f"{lead}{indentation}{line}{source.newline}")
            script.why(place, reason)
        for node in script.flow.occurrences(self.root):
            inside = any(outer is self.statement for outer in source.around(node))
            if node is not self.target and self.makes(node) and not inside:
                script.delete(source.statement(node), "the handle is always made")

    def _place(self, scope: ast.AST) -> ast.stmt | None:
        """Return the statement in whose place, or behind which, ``enable`` can be called."""
        script, source = self.script, self.script.source
        block = source.block(self.statement)
        roots = (*self.models, *self.optimizers)
        made = last_made(script, roots, block)
        first = block.index(self.statement)
        last = first if made is None else max(first, block.index(made))
        later = [
            node
            for root in roots
            for variable in script.flow.group(root)
            for node in script.scopes.bindings[variable]
            if source.scope(node) is scope
            and node.lineno > self.statement.lineno  # type: ignore[attr-defined]
            and not any(outer in block for outer in source.around(node))
        ]
        between = [
            node
            for statement in block[first + 1 : last + 1]
            for node in ast.walk(statement)
            if script.flow.root(node) == self.root and isinstance(node, (ast.Name, ast.Attribute))
        ]
        if later or between or self._again(scope):
            script.refuse(
                self.call,
                "the scaler is made again, or used before model and optimizer are both made",
                f"make the handle once, after both: {AFTER_BOTH}",
            )
            return None
        return block[last]

    def _again(self, scope: ast.AST) -> bool:
        """Whether the scaler is made more often than the first optimizer."""
        script, source = self.script, self.script.source
        made = [
            binding
            for root in self.optimizers
            for variable in script.flow.group(root)
            for binding in script.scopes.bindings[variable]
            if source.scope(binding) is scope and not isinstance(binding, ast.arg)
        ]
        loops = [
            outer for outer in _within(script, self.statement, scope) if isinstance(outer, _LOOPS)
        ]
        if loops:
            inside = [b for b in made if any(outer is loops[0] for outer in source.around(b))]
            return not inside
        calls = script.flow.calls.get(scope, [])
        repeated = len(calls) > 1 or any(
            isinstance(outer, _LOOPS) for call in calls for outer in source.around(call)
        )
        return repeated and not made


def find_making(script: Script, call: ast.Call) -> Making | None:
    """Return how the scaler of ``call`` is made; None, and a refusal, where that is not known."""
    enabled, unknown = None, [a for a in call.args if not _is_device(a)]
    for keyword in call.keywords:
        if keyword.arg == "enabled":
            enabled = keyword.value
        elif keyword.arg not in _SETTINGS | {"device"}:
            unknown.append(keyword.value)
    parent = script.source.parents[call]
    tests = [] if enabled is None or _is_true(enabled) else [enabled]
    if isinstance(parent, ast.IfExp) and parent.body is call and _is_none(parent.orelse):
        tests.append(parent.test)
        parent = script.source.parents[parent]
    target = (
        parent.targets[0] if isinstance(parent, ast.Assign) else getattr(parent, "target", None)
    )
    statement: ast.stmt | None = parent if isinstance(parent, (ast.Assign, ast.AnnAssign)) else None
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
            "no `scaler.step(optimizer)` with a variable is in this file, so the optimizer is not "
            "known",
            f"make the handle in its place: {AFTER_BOTH}",
        )
    elif any(isinstance(test, ast.Constant) for test in tests):
        script.refuse(call, "mixed precision is off here", "decide on a level for `enable`")
    else:
        assert isinstance(target, (ast.Name, ast.Attribute))
        switch = tests[0] if tests else None
        return Making(script, root, call, statement, target, switch, optimizers)
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


def _is_free(script: Script, name: str) -> bool:
    """Whether nothing of the file is called ``name`` but a module of torch that goes away."""
    bindings = [
        binding
        for variable, nodes in script.scopes.bindings.items()
        if variable.name == name
        for binding in nodes
    ]
    read = [
        node
        for node in script.source.nodes
        if isinstance(node, ast.Attribute)
        and node.attr == name
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    ]
    used = {
        script.qualified(script.source.parents[node])
        for node in script.source.nodes
        if isinstance(node, ast.Name) and node.id == name
    }
    goes = {"torch.amp.GradScaler", "torch.cuda.amp.GradScaler", "torch.cuda.amp.autocast"}
    modules = [isinstance(b, ast.Import | ast.ImportFrom) for b in bindings]
    return not read and all(modules) and used <= goes


def _within(script: Script, node: ast.AST, scope: ast.AST) -> list[ast.AST]:
    found = []
    for outer in script.source.around(node):
        if outer is scope:
            break
        found.append(outer)
    return found


def _parameters(function: ast.AST) -> list[str]:
    return [node.arg for node in ast.walk(function) if isinstance(node, ast.arg)]


def _listed(names: list[str | None]) -> str:
    return str(names[0]) if len(names) == 1 else f"[{', '.join(map(str, names))}]"


def _sets_none(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Assign) and _is_none(statement.value)


def _is_device(node: ast.expr) -> bool:
    text = ast.unparse(node)
    return text in ("'cuda'", "'cpu'") or "device" in text


def _is_none(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_true(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is True
