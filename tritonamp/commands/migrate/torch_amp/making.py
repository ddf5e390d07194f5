"""What ``enable`` is called with in the place of a scaler."""

import ast
from dataclasses import dataclass, field

from tritonamp.commands.migrate.loops.handle import AFTER_BOTH, as_condition
from tritonamp.commands.migrate.loops.owners import (
    is_certain,
    models_of,
    name_in,
    unlike_an_optimizer,
)
from tritonamp.commands.migrate.loops.switch import Switch
from tritonamp.commands.migrate.reading.scopes import Variable
from tritonamp.commands.migrate.reading.script import Script
from tritonamp.commands.migrate.torch_amp.naming import Naming
from tritonamp.commands.migrate.torch_amp.placing import Placing

SETTINGS = {"init_scale", "growth_factor", "backoff_factor", "growth_interval"}


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
        placing: where it is made.
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
    placing: Placing = field(init=False)

    def __post_init__(self) -> None:
        self.models = tuple(
            dict.fromkeys(m for o in self.optimizers for m in models_of(self.script, o))
        )
        self.naming = Naming(self.script, self.root)
        roots = (*self.models, *self.optimizers)
        self.placing = Placing(self.script, self.root, self.statement, roots)

    @property
    def name(self) -> str:
        """What the handle is called where it is made."""
        return self.naming.text(self.target)

    def makes(self, node: ast.AST) -> bool:
        """Whether ``node`` is where the scaler is assigned, or None in its place."""
        parent = self.script.source.parents[node]
        if node is self.target:
            return True
        return (
            isinstance(parent, (ast.Assign, ast.AnnAssign))
            and ast.unparse(parent.value or parent) == "None"
        )

    def visible_at(self, node: ast.AST) -> str | None:
        """Return what the handle is called at ``node``; None where it is not there, or not yet."""
        source = self.script.source
        if source.scope(node) is self.placing.scope:
            place = self.placing.place()
            if place is None or source.start(node) < source.end(place):
                return None
        return self.naming.at(node)

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
        scope = self.placing.scope
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
        place = self.placing.place()
        if place is None or not self._are_given(place):
            return
        test = self.switch.expression
        condition = "" if test is None else f" if {as_condition(test)} else "
        level = '"O1"' + (condition and f'{condition}"O0"')
        options = [_listed(models), _listed(optimizers), f"level={level}"]
        if dtype is not None:
            options.append(f"dtype={dtype}{condition and condition + 'None'}")
        given = [k.value for k in self.call.keywords if k.arg in SETTINGS]
        placing = self.placing
        if not all(placing.knows(value) and placing.is_steady(value) for value in given):
            by_hand = f"make the handle where they are known: {AFTER_BOTH}"
            what = "the scaler's settings change before the handle is made"
            script.refuse(self.call, what, by_hand)
            return
        settings = [script.edits.text(k) for k in self.call.keywords if k.arg in SETTINGS]
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


def _listed(names: list[str | None]) -> str:
    return str(names[0]) if len(names) == 1 else f"[{', '.join(map(str, names))}]"
