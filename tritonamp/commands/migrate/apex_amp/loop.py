"""Loops with ``apex.amp``, to ``enable`` and its handle."""

import ast
from dataclasses import dataclass

from tritonamp.commands.migrate.apex_amp.initialize import Call, read
from tritonamp.commands.migrate.apex_amp.uses import Handle
from tritonamp.commands.migrate.loops import gradients
from tritonamp.commands.migrate.loops.conditions import Folding
from tritonamp.commands.migrate.loops.handle import AFTER_BOTH, known_as
from tritonamp.commands.migrate.loops.imports import Import, imported, statements
from tritonamp.commands.migrate.loops.switch import Switch
from tritonamp.commands.migrate.reading.script import Script
from tritonamp.commands.migrate.reading.source import Function

AMP = "apex.amp."
_REGISTERS = {
    f"{start}{kind}_function"
    for start in ("", "register_")
    for kind in ("half", "float", "promote")
} | {"disable_casts"}
_OF_HANDLE = {"scale_loss", "master_params", "state_dict", "load_state_dict"}


def convert(script: Script) -> None:
    """Note what turns the loop of ``script`` into one with a handle, or why that cannot be."""
    uses = _uses(script)
    if not uses:
        return
    _drop_imports(script)
    starts = [use for use in uses if use.name == "initialize"]
    if len(starts) > 1 or (not starts and any(use.name in _OF_HANDLE for use in uses)):
        for use in uses:
            if use.name in _OF_HANDLE | {"initialize"}:
                script.refuse(
                    use.node,
                    f"`{ast.unparse(use.node)}` with {len(starts)} calls of amp.initialize in this "
                    "file",
                    f"one handle for all models and optimizers: {AFTER_BOTH}; hand it to where the "
                    "loss is scaled; or `--to apex`, which needs no handle",
                )
        return
    call = read(script, starts[0].node) if starts else None
    if starts and call is None:
        return
    if call is not None and call.trains and not any(use.name == "scale_loss" for use in uses):
        script.refuse(
            call.statement,
            "no `amp.scale_loss` is in this file, so the losses are scaled in another one",
            f"{AFTER_BOTH}, hand the handle to where the loss is, and `amp.backward(loss)` there; "
            "or `--to apex`, which needs no handle",
        )
        return
    _Loop(script, uses, call).convert()


@dataclass(frozen=True)
class _Use:
    """``amp.name`` somewhere."""

    node: ast.Attribute | ast.Name
    name: str


def _uses(script: Script) -> list[_Use]:
    """Return every use of apex.amp, in order; refuse what is not a function of it."""
    found = []
    aliases = {
        alias.asname or alias.name
        for statement in statements(script)
        for alias in statement.names
        if isinstance(statement, ast.ImportFrom) and imported(statement, alias) == AMP[:-1]
    }
    for node in script.source.nodes:
        if not isinstance(node, (ast.Name, ast.Attribute)) or not isinstance(node.ctx, ast.Load):
            continue
        name = script.qualified(node) or ""
        outer = script.source.parents[node]
        if isinstance(node, ast.Name) and node.id in aliases and not script.scopes.variable(node):
            script.refuse(
                node,
                f"`{node.id}` is not imported where it is used",
                "import it for the whole file",
            )
        if name.startswith(AMP) and name.count(".") == 2:
            found.append(_Use(node, name.removeprefix(AMP)))
        elif name == AMP[:-1] and not isinstance(outer, ast.Attribute):
            script.refuse(
                node, f"`{ast.unparse(node)}` as a value", "hand the handle of `enable` over"
            )
            found.append(_Use(node, ""))
    return sorted(found, key=lambda use: script.source.start(use.node))


def _drop_imports(script: Script) -> None:
    """Drop the imports of apex.amp; of apex itself where nothing else of it is used."""
    others = [
        node
        for node in script.source.nodes
        if isinstance(node, ast.Name)
        and script.qualified(node) == "apex"
        and script.qualified(script.source.parents[node]) != AMP[:-1]
    ]
    for statement in statements(script):
        for alias in statement.names:
            name = imported(statement, alias)
            binds_apex = isinstance(statement, ast.Import) and alias.asname is None
            if binds_apex and name in ("apex", AMP[:-1]):
                script.dropped |= set() if others else {alias}
            elif not binds_apex and f"{name}.".startswith(AMP):
                script.dropped.add(alias)


def _stands_in(script: Script, binding: ast.AST) -> bool:
    """Whether ``amp = None`` stands in for a failed import."""
    statement = script.source.parents.get(binding)
    return isinstance(statement, ast.Assign) and ast.unparse(statement.value) == "None"


class _Loop:
    """The rewriting of everything that ``amp`` is used for."""

    def __init__(self, script: Script, uses: list[_Use], call: Call | None) -> None:
        self.script, self.uses, self.call = script, uses, call
        self.name = "amp"
        self.switch = Switch(script, call.switch if call is not None else None)
        if call is not None:
            self._choose_name(call)

    def convert(self) -> None:
        for use in sorted(self.uses, key=lambda use: -self.script.source.start(use.node)):
            if use.name in _REGISTERS:
                self.script.replace(
                    use.node, f"tritonamp.{use.name}", "apex's lists, by their name"
                )
                self.script.needs_tritonamp = True
            elif use.name == "initialize":
                continue
            elif use.name in _OF_HANDLE:
                self._of_handle(use)
            elif use.name:
                self.script.refuse(
                    use.node,
                    f"`{ast.unparse(use.node)}` has no counterpart",
                    "`--to apex` keeps it",
                )
        if self.call is None:
            return
        scopes = {self.script.source.scope(u.node) for u in self.uses if u.name in _OF_HANDLE}
        for backward in gradients.plain_backwards(self.script, scopes, self.switch):
            if not self._is_scaled(backward):
                gradients.refuse_plain_backward(self.script, backward, self.name)
        self._look_at_gradients(self.call)
        self._initialize(self.call)
        if self.call.only_if is None:  # else there is no handle in the other branches
            models = known_as(self.script, (self.script.flow.root(self.call.model),))
            Folding(self.script, self.name, models, self.switch).fold()

    def _look_at_gradients(self, call: Call) -> None:
        """Mend or refuse what meets gradients behind a scaled loss: apex unscales them there."""
        script = self.script
        calls = [u for u in self.uses if u.name == "scale_loss"]
        scopes = {script.source.scope(use.node) for use in calls}
        models = (script.flow.root(call.model),)
        for clip in gradients.clips(script):
            masters = clip.args and script.edits.covers(clip.args[0])
            of_apex = masters or script.edits.covers(clip) or self.switch.off_at(clip)
            if script.source.scope(clip) not in scopes or of_apex:
                continue
            limit = gradients.limit_of_all(script, clip, models)
            if limit is None or call.several:
                gradients.unscale_before(script, clip, self.name, "for a clip of another kind")
            else:
                gradients.clip(script, clip, limit, self.name, gradients.IN_THE_STEP)
        mastered = {script.source.scope(u.node) for u in self.uses if u.name == "master_params"}
        for scope in scopes - mastered:
            for gradient in gradients.reads(script, scope):
                if not self.switch.off_at(gradient):
                    script.refuse(
                        gradient,
                        f"`{ast.unparse(gradient)}`: gradients carry the scale until the step",
                        f"`{self.name}.unscale_()` before them, after the backward",
                    )

    def _choose_name(self, call: Call) -> None:
        """Find a name that all uses can reach: a variable, one of self, or a global one."""
        script = self.script
        scope = script.source.scope(call.statement)
        used = [script.source.scope(u.node) for u in self.uses if u.name in _OF_HANDLE]
        taken = [
            binding
            for variable, bindings in script.scopes.bindings.items()
            if variable.name == "amp"
            for binding in bindings
            if not isinstance(binding, Import) and not _stands_in(script, binding)
        ]
        owner = script.scopes.method_of(scope)
        if (
            owner is not None
            and any(s is not scope for s in used)
            and all(script.scopes.method_of(s) is owner for s in used)
        ):
            assert isinstance(scope, Function)
            self.name = f"{scope.args.args[0].arg}.amp"
        elif taken:
            script.refuse(
                taken[0], "`amp` is the name of something else, too", "give that another name"
            )
        elif isinstance(scope, Function) and any(not self._sees(s, scope) for s in used):
            if self._returns_what_it_enables(scope, call) and self._runs_often(scope):
                script.refuse(
                    call.statement,
                    "several handles, of which other functions would see the last",
                    "return the handle beside model and optimizer",
                )
            first = scope.body[0]
            is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            place = scope.body[1] if is_text and len(scope.body) > 1 else first
            indentation = script.source.indentation(place)
            script.edits.insert(
                script.source.line_start(script.source.start(place)),
                f"{indentation}global amp{script.source.newline}",
            )
            script.why(place, "other functions use the handle, too")

    def _runs_often(self, scope: Function) -> bool:
        calls = self.script.flow.calls.get(scope, [])
        around = [outer for call in calls for outer in self.script.source.around(call)]
        return len(calls) > 1 or any(isinstance(outer, ast.For | ast.While) for outer in around)

    def _returns_what_it_enables(self, scope: Function, call: Call) -> bool:
        """Whether the model outlives the function, so that there may be several at a time."""
        flow = self.script.flow
        returned = [node.value for node in ast.walk(scope) if isinstance(node, ast.Return)]
        names = [n for value in returned if value is not None for n in ast.walk(value)]
        return flow.root(call.model) in [flow.root(name) for name in names]

    def _sees(self, scope: ast.AST, made_in: ast.AST) -> bool:
        return scope is made_in or any(
            outer is made_in for outer in self.script.source.around(scope)
        )

    def _initialize(self, call: Call) -> None:
        script = self.script
        script.needs_tritonamp = True
        lines = [*call.before, f"{self.name} = tritonamp.enable({call.arguments})"]
        indentation = script.source.indentation(call.lifted or call.statement)
        line = (script.newline + indentation).join(lines)
        reason = "enables in place, and gives the handle"
        if call.lifted is not None:
            reason += f"; at O0 where not {ast.unparse(call.lifted.test)}"
        script.replace(call.lifted or call.statement, line, reason)

    def _is_scaled(self, backward: ast.Call) -> bool:
        """Whether ``backward`` is of a loss that a block around it scales."""
        assert isinstance(backward.func, ast.Attribute)
        name = ast.unparse(backward.func.value)
        return any(
            isinstance(outer, ast.With)
            and any(i.optional_vars and ast.unparse(i.optional_vars) == name for i in outer.items)
            for outer in self.script.source.around(backward)
        )

    def _of_handle(self, use: _Use) -> None:
        script = self.script
        outer = script.source.parents[use.node]
        if not isinstance(outer, ast.Call) or outer.func is not use.node or self.call is None:
            script.refuse(use.node, f"`{ast.unparse(use.node)}` is not called", "call the handle's")
        elif self.call.only_if is not None and not self.switch.on_at(use.node):
            script.refuse(
                use.node,
                f"`{ast.unparse(outer)}` runs without amp.initialize, too",
                "make the handle always, with level=... "
                f'if {ast.unparse(self.call.only_if)} else "O0"',
            )
        elif use.name == "scale_loss":
            Handle(script, self.name, self.call.several).scale_loss(outer)
        elif use.name == "master_params":
            Handle(script, self.name, self.call.several).master_params(outer)
        else:
            script.replace(use.node, f"{self.name}.{use.name}", "the handle's state")
