"""Where in a script ``enable`` can be called, in the place of a scaler or behind it."""

import ast
import builtins
from dataclasses import dataclass

from tritonamp.commands.migrate.loops.handle import AFTER_BOTH
from tritonamp.commands.migrate.loops.owners import last_made
from tritonamp.commands.migrate.reading.scopes import Variable
from tritonamp.commands.migrate.reading.script import Script

_LOOPS = (ast.For, ast.While, ast.AsyncFor)


@dataclass(frozen=True)
class Placing:
    """The place of a handle.

    Attributes:
        script: the file.
        scaler: the variable that holds the scaler.
        statement: what makes the scaler.
        roots: the models and optimizers that ``enable`` gets.
    """

    script: Script
    scaler: Variable
    statement: ast.stmt
    roots: tuple[Variable, ...]

    @property
    def scope(self) -> ast.AST:
        """The function, class or module that makes the scaler."""
        return self.script.source.scope(self.statement)

    def place(self) -> ast.stmt | None:
        """Return the statement in whose place, or behind which, ``enable`` can be called.

        None, and a refusal, where there is no such place.
        """
        script, source, scope = self.script, self.script.source, self.scope
        block = source.block(self.statement)
        made = last_made(script, self.roots, block)
        first = block.index(self.statement)
        last = first if made is None else max(first, block.index(made))
        later = [node for root in self.roots for node in self._made_later(root, block[last])]
        between = [
            node
            for statement in block[first + 1 : last + 1]
            for node in ast.walk(statement)
            if script.flow.root(node) == self.scaler and isinstance(node, (ast.Name, ast.Attribute))
        ]
        what = None
        if isinstance(scope, ast.ClassDef):
            what = "the scaler belongs to a class, not to an object"
        elif later:
            what = f"a model or an optimizer is made anew in line {later[0].lineno}"  # type: ignore[attr-defined]
        elif between:
            what = "the scaler is used before model and optimizer are both made"
        elif self._again():
            what = (
                "the scaler is made in each round or call, its model or optimizer once; its place "
                "is where these are made"
            )
        if what is not None:
            by_hand = f"make the handle once for each pair, after both: {AFTER_BOTH}"
            script.refuse(self.statement, what, by_hand)
            return None
        return block[last]

    def knows(self, test: ast.expr) -> bool:
        """Whether all names of ``test`` have their values, the same ones, where ``enable`` is."""
        script = self.script
        scope, place = self.scope, self.place()
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
        return isinstance(binding, ast.arg) or source.start(binding) < source.end(place)

    def is_steady(self, test: ast.expr | None) -> bool:
        """Whether ``test`` keeps its value once the scaler is made."""
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
        if source.scope(binding) is not self.scope:
            # a local of another function of the same name is a parameter, and holds the same
            return isinstance(binding, ast.Attribute) and not _is_init(source.scope(binding))
        if source.start(binding) > source.end(self.statement):
            return True
        loops = [outer for outer in source.around(binding) if isinstance(outer, _LOOPS)]
        return bool(loops) and loops[0] not in source.around(self.statement)

    def _made_later(self, root: Variable, place: ast.stmt) -> list[ast.AST]:
        """Return where a model or optimizer is made behind the handle, or in another method."""
        script, source = self.script, self.script.source
        made = []
        for variable in script.flow.group(root):
            for node in script.scopes.makings(variable):
                statement = source.parents.get(node)
                value = getattr(statement, "value", None)
                if (
                    isinstance(node, ast.arg)
                    or not isinstance(value, ast.Call)
                    or (any(script.flow.root(argument) == root for argument in value.args))
                ):
                    continue  # handed on, or wrapped
                if source.scope(node) is self.scope:
                    if source.start(node) > source.end(place):
                        made.append(node)
                elif variable.scope is not source.scope(node) and not _is_init(source.scope(node)):
                    made.append(node)  # of self, or global
        return made

    def _again(self) -> bool:
        """Whether the scaler is made more often than a model or an optimizer."""
        script, source, scope = self.script, self.script.source, self.scope
        around = [outer for outer in source.around(self.statement) if isinstance(outer, _LOOPS)]
        loop = next((outer for outer in around if source.scope(outer) is scope), None)
        calls = script.flow.calls.get(scope, [])
        repeated = len(calls) > 1 or any(
            isinstance(outer, _LOOPS) for call in calls for outer in source.around(call)
        )
        if loop is None and not repeated:
            return False
        return not all(self._made_in(loop or scope, root) for root in self.roots)

    def _made_in(self, region: ast.AST, root: Variable) -> bool:
        """Whether ``root`` is made anew each time that ``region`` runs."""
        script = self.script
        return any(
            not isinstance(binding, ast.arg) and region in script.source.around(binding)
            for variable in script.flow.group(root)
            for binding in script.scopes.makings(variable)
        )


def _is_init(scope: ast.AST) -> bool:
    return isinstance(scope, ast.FunctionDef) and scope.name == "__init__"
