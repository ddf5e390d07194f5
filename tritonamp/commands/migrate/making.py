"""Where a scaler is made, and what ``enable`` is called with in its place."""

import ast
import builtins
from dataclasses import dataclass, field

from tritonamp.commands.migrate.handle import AFTER_BOTH, as_condition
from tritonamp.commands.migrate.imports import Import
from tritonamp.commands.migrate.naming import Naming
from tritonamp.commands.migrate.owners import (
    is_certain,
    last_made,
    models_of,
    name_in,
    unlike_an_optimizer,
)
from tritonamp.commands.migrate.scopes import Variable
from tritonamp.commands.migrate.script import Script
from tritonamp.commands.migrate.switch import Switch

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
        switch: what turns mixed precision on.
        models, optimizers: roots of what is to be enabled.
        naming: what the handle is called.
    """

    script: Script
    root: Variable
    call: ast.Call
    statement: ast.stmt
    target: ast.Name | ast.Attribute
    switch: Switch
    optimizers: tuple[Variable, ...]
    models: tuple[Variable, ...] = ()
    naming: Naming = field(init=False)

    def __post_init__(self) -> None:
        self.models = tuple(
            dict.fromkeys(m for o in self.optimizers for m in models_of(self.script, o))
        )
        self.naming = Naming(self.script, self.root)

    @property
    def name(self) -> str:
        """What the handle is called where it is made."""
        return self.naming.text(self.target)

    def makes(self, node: ast.AST) -> bool:
        """Whether ``node`` is where the scaler is assigned, or None in its place."""
        parent = self.script.source.parents[node]
        if node is self.target:
            return True
        return isinstance(parent, (ast.Assign, ast.AnnAssign)) and _is_none(parent.value)

    def visible_at(self, node: ast.AST) -> str | None:
        """Return what the handle is called at ``node``; None where it is not there, or not yet."""
        source = self.script.source
        scope = source.scope(self.statement)
        if source.scope(node) is scope:
            place = self._place(scope)
            if place is None or source.start(node) < source.end(place):
                return None
        return self.naming.at(node)

    def known_where_made(self, test: ast.expr) -> bool:
        """Whether all names of ``test`` have their values, the same ones, where ``enable`` is."""
        script = self.script
        scope = script.source.scope(self.statement)
        place = self._place(scope)
        for node in ast.walk(test):
            if not isinstance(node, ast.Name) or node.id in dir(builtins):
                continue
            there = script.scopes.lookup(node.id, scope)
            if there is None or script.flow.root(there) != script.flow.root(node):
                return False
            if node.id == "self" and script.source.scope(node) is not scope:
                return False
            bindings = script.scopes.bindings[there]
            if place is None or (
                there.scope is scope and any(not self._is_before(b, place) for b in bindings)
            ):
                return False
        return True

    def _is_before(self, binding: ast.AST, place: ast.stmt) -> bool:
        source = self.script.source
        in_loop = any(isinstance(outer, _LOOPS) for outer in source.around(binding))
        earlier = isinstance(binding, ast.arg) or source.start(binding) < source.end(place)
        return earlier and not in_loop

    def fed_by(self, backward: ast.stmt) -> list[str] | None:
        """Return the arguments that name what a loss feeds: what is stepped behind it.

        None where several losses and several steps stand behind one another.
        """
        losses: list[ast.stmt] = []
        steps: list[ast.expr] = []
        for statement in self.script.source.block(backward):
            event = self._event(statement)
            if isinstance(event, ast.expr):
                steps.append(event)
            elif event is not None:
                if steps and backward in losses:
                    break
                losses, steps = ([] if steps else losses), []
                losses.append(statement)
        if backward not in losses or not steps or (len(losses) > 1 and len(steps) > 1):
            return None
        numbers = [
            [*self.optimizers].index(root) for root in map(self.script.flow.root, steps) if root
        ]
        if sorted(numbers) == [*range(len(self.optimizers))]:
            return []
        names = [ast.unparse(step) for step in steps]
        fed = names[0] if len(names) == 1 else f"[{', '.join(names)}]"
        return [fed, f"loss_id={numbers[0]}"][: 1 + bool(numbers[0])]

    def _event(self, statement: ast.stmt) -> ast.expr | ast.stmt | None:
        """Return the optimizer of a step, a statement that scales a loss, or None."""
        match statement:
            case ast.Expr(
                value=ast.Call(func=ast.Attribute(value=scaler, attr="step"), args=[optimizer])
            ) if self.script.flow.root(scaler) == self.root:
                return optimizer
        scales = any(
            isinstance(node, ast.Attribute)
            and node.attr == "scale"
            and self.script.flow.root(node.value) == self.root
            for node in ast.walk(statement)
        )
        return statement if scales else None

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
        if place is None or not self._are_given(place):
            return
        test = self.switch.expression
        condition = "" if test is None else f" if {as_condition(test)} else "
        level = '"O1"' + (condition and f'{condition}"O0"')
        options = [_listed(models), _listed(optimizers), f"level={level}"]
        if dtype is not None:
            options.append(f"dtype={dtype}{condition and condition + 'None'}")
        given = [k.value for k in self.call.keywords if k.arg in _SETTINGS]
        if not all(self.known_where_made(value) for value in given):
            by_hand = f"make the handle where they are known: {AFTER_BOTH}"
            script.refuse(
                self.call, "the scaler's settings change before the handle is made", by_hand
            )
            return
        settings = [script.edits.text(k) for k in self.call.keywords if k.arg in _SETTINGS]
        if settings:
            made = f"tritonamp.GradScaler({', '.join(settings)})"
            options.append(f"scaler={made}{condition and condition + 'None'}")
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

    def _are_given(self, place: ast.stmt) -> bool:
        """Whether models and optimizers are there, and such that ``enable`` takes them."""
        script = self.script
        for root in (*self.models, *self.optimizers):
            what = None if root in self.models else unlike_an_optimizer(script, root)
            if not is_certain(script, root, place):
                what = f"`{root.name}` is made under a condition alone"
            if what is not None:
                by_hand = f"make the handle of what is there: {AFTER_BOTH}"
                script.refuse(self.call, what, by_hand)
                return False
        return True

    def is_steady(self) -> bool:
        """Whether the switch keeps its value from here on."""
        test = self.switch.expression
        nodes = [] if test is None else [*ast.walk(test)]
        texts = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
        roots = {self.script.flow.root(node) for node in nodes} - {None}
        return not any(
            self._changes_later(node)
            for node in self.script.source.nodes
            if isinstance(node, ast.Name | ast.Attribute) and not isinstance(node.ctx, ast.Load)
            if self.script.flow.root(node) in roots or ast.unparse(node) in texts
        )

    def _changes_later(self, binding: ast.Name | ast.Attribute) -> bool:
        """Whether what is bound there may be bound again once the scaler is made."""
        source = self.script.source
        if source.scope(binding) is not source.scope(self.statement):
            # a local of another function of the same name is a parameter, and holds the same
            return isinstance(binding, ast.Attribute) and not _is_init(source.scope(binding))
        if source.start(binding) > source.end(self.statement):
            return True
        loops = [outer for outer in source.around(binding) if isinstance(outer, _LOOPS)]
        return bool(loops) and loops[0] not in source.around(self.statement)

    def _place(self, scope: ast.AST) -> ast.stmt | None:
        """Return the statement in whose place, or behind which, ``enable`` can be called."""
        script, source = self.script, self.script.source
        block = source.block(self.statement)
        roots = (*self.models, *self.optimizers)
        made = last_made(script, roots, block)
        first = block.index(self.statement)
        last = first if made is None else max(first, block.index(made))
        later = [node for root in roots for node in self._made_later(root, scope, block, last)]
        between = [
            node
            for statement in block[first + 1 : last + 1]
            for node in ast.walk(statement)
            if script.flow.root(node) == self.root and isinstance(node, (ast.Name, ast.Attribute))
        ]
        what = None
        if isinstance(scope, ast.ClassDef):
            what = "the scaler belongs to a class, not to an object"
        elif later:
            what = f"a model or an optimizer is made anew in line {later[0].lineno}"  # type: ignore[attr-defined]
        elif between:
            what = "the scaler is used before model and optimizer are both made"
        elif self._again(scope):
            what = "the scaler is made again, for a model or an optimizer that is not"
        if what is not None:
            by_hand = f"make the handle once for each pair, after both: {AFTER_BOTH}"
            script.refuse(self.call, what, by_hand)
            return None
        return block[last]

    def _made_later(
        self, root: Variable, scope: ast.AST, block: list[ast.stmt], last: int
    ) -> list[ast.AST]:
        """Return where a model or optimizer is made behind the handle, or in another method."""
        script, source = self.script, self.script.source
        made = []
        for variable in script.flow.group(root):
            for node in script.scopes.bindings[variable]:
                statement = source.parents.get(node)
                value = getattr(statement, "value", None)
                if (
                    isinstance(node, ast.arg)
                    or not isinstance(value, ast.Call)
                    or (any(script.flow.root(argument) == root for argument in value.args))
                ):
                    continue  # handed on, or wrapped
                if source.scope(node) is scope:
                    if source.start(node) > source.end(block[last]):
                        made.append(node)
                elif variable.scope is not source.scope(node) and not _is_init(source.scope(node)):
                    made.append(node)  # of self, or global
        return made

    def _again(self, scope: ast.AST) -> bool:
        """Whether the scaler is made more often than a model or an optimizer."""
        script, source = self.script, self.script.source
        around = _within(script, self.statement, scope)
        loop = next((outer for outer in around if isinstance(outer, _LOOPS)), None)
        calls = script.flow.calls.get(scope, [])
        repeated = len(calls) > 1 or any(
            isinstance(outer, _LOOPS) for call in calls for outer in source.around(call)
        )
        if loop is None and not repeated:
            return False
        return not all(
            self._made_in(loop or scope, root) for root in (*self.models, *self.optimizers)
        )

    def _made_in(self, region: ast.AST, root: Variable) -> bool:
        """Whether ``root`` is made anew each time that ``region`` runs."""
        script = self.script
        return any(
            not isinstance(binding, ast.arg) and region in script.source.around(binding)
            for variable in script.flow.group(root)
            for binding in script.scopes.bindings[variable]
        )


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
        switch = Switch(script, tests[0] if tests else None, root)
        making = Making(script, root, call, statement, target, switch, optimizers)
        if making.is_steady():
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


def _within(script: Script, node: ast.AST, scope: ast.AST) -> list[ast.AST]:
    found = []
    for outer in script.source.around(node):
        if outer is scope:
            break
        found.append(outer)
    return found


def _is_init(scope: ast.AST) -> bool:
    return isinstance(scope, ast.FunctionDef) and scope.name == "__init__"


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
