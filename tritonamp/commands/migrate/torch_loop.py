"""Loops with torch's ``autocast`` and ``GradScaler``, to ``enable`` and its handle."""

import ast
import re

from tritonamp.commands.migrate.autocasts import Autocasts
from tritonamp.commands.migrate.conditions import Folding
from tritonamp.commands.migrate.handle import (
    AFTER_BOTH,
    CLIPS,
    clipped,
    known_as,
    plain_backwards,
    refuse_plain_backward,
    runs_when,
)
from tritonamp.commands.migrate.making import Making, find_making
from tritonamp.commands.migrate.owners import models_of
from tritonamp.commands.migrate.scopes import Variable
from tritonamp.commands.migrate.script import Script

SCALERS = tuple(
    f"torch.{module}GradScaler"
    for module in ("", "amp.", "cuda.amp.", "cpu.amp.", "cuda.amp.grad_scaler.")
)
_OF_SCALER = {"get_scale", "is_enabled", "get_growth_factor", "get_backoff_factor",
              "get_growth_interval", "set_growth_factor", "set_backoff_factor",
              "set_growth_interval"}  # fmt: skip
_SAVES = re.compile("save|load|checkpoint|restore|resume", re.IGNORECASE)
_BOTH = {"state_dict", "load_state_dict"}


def convert(script: Script) -> None:
    """Note what turns the loop of ``script`` into one with a handle, or why that cannot be."""
    scalers = script.calls(*SCALERS)
    if not scalers:
        _refuse_foreign_scalers(script, None)
        return
    if len(scalers) > 1:
        for call in scalers[1:]:
            script.refuse(
                call,
                f"a second GradScaler (the first is made in line {scalers[0].lineno})",
                "make one handle for all models and optimizers, and give each loss a loss_id",
            )
        return
    making = find_making(script, scalers[0])
    if making is None:
        return
    _Loop(script, making).convert()
    _refuse_foreign_scalers(script, making.root)


def _refuse_foreign_scalers(script: Script, root: Variable | None) -> None:
    """Refuse ``x.scale(loss).backward()`` where ``x`` is not made in this file."""
    for node in script.source.nodes:
        scaled = _scaled_backward(node)
        if scaled is not None and (root is None or script.flow.root(scaled) != root):
            script.refuse(
                node,
                f"`{ast.unparse(scaled)}` is not made in this file, or not by one call",
                f"make the handle where model and optimizer are made ({AFTER_BOTH}), hand it over "
                "in the place of the scaler, and write `amp.backward(loss)`",
            )


def _scaled_backward(node: ast.AST) -> ast.expr | None:
    """Return ``x`` of ``x.scale(loss).backward()``."""
    match node:
        case ast.Call(
            func=ast.Attribute(
                value=ast.Call(func=ast.Attribute(value=scaler, attr="scale")), attr="backward"
            )
        ):
            return scaler
    return None


class _Loop:
    """The rewriting of everything that a scaler is used for."""

    def __init__(self, script: Script, making: Making) -> None:
        self.script, self.making = script, making

    def convert(self) -> None:
        script, making = self.script, self.making
        autocasts = Autocasts(script, making)
        if not autocasts.agree():
            return
        for node in reversed(script.flow.occurrences(making.root)):
            if not making.makes(node) and not autocasts.holds(node):
                self._use(node)
        scopes = {
            script.source.scope(node)
            for node in script.flow.occurrences(making.root)
            if not isinstance(node, ast.arg)
        }
        for stranger in making.naming.strangers():
            self._refuse(stranger, f"`{ast.unparse(stranger)}`, of an object that is not followed")
        for call in plain_backwards(script, scopes, self._is_off):
            refuse_plain_backward(script, call, "amp")
        for statement in script.source.nodes:
            if isinstance(statement, ast.stmt) and self._is_call(statement, "step"):
                self._refuse_reads_behind(statement)
        unscaled = {script.source.scope(c) for c in script.source.nodes if self._unscales(c)}
        self._clip_scaled(unscaled)
        self._refuse_others()
        autocasts.convert()
        making.write(autocasts.dtype)
        models = known_as(script, making.models)
        Folding(script, making.name, models, self._sign, self._asks_for_handle).fold()

    def _unscales(self, node: ast.AST) -> bool:
        match node:
            case ast.Call(func=ast.Attribute(value=scaler, attr="unscale_")):
                return self.script.flow.root(scaler) == self.making.root
        return False

    def _is_off(self, test: ast.expr) -> bool | None:
        sign = self._sign(test)
        return None if sign is None else not sign

    def _sign(self, test: ast.expr) -> bool | None:
        """Return what ``test`` says about mixed precision: it is on, it is off, nothing."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            sign = self._sign(test.operand)
            return None if sign is None else not sign
        if self.script.flow.root(test) == self.making.root:
            return True
        match test:
            case ast.Compare(left=left, ops=[ast.Is() | ast.IsNot() as op], comparators=[none]):
                is_none = isinstance(none, ast.Constant) and none.value is None
                if is_none and self.script.flow.root(left) == self.making.root:
                    return isinstance(op, ast.IsNot)
        canonical = self.script.flow.canonical(test)
        switch = self.making.switch
        if switch is not None and canonical == self.script.flow.canonical(switch):
            return True
        return None

    def _asks_for_handle(self, test: ast.expr) -> bool:
        return any(
            self.script.flow.root(node) == self.making.root
            for node in ast.walk(test)
            if isinstance(node, (ast.Name, ast.Attribute))
        )

    def _use(self, node: ast.AST) -> None:
        """Rewrite one occurrence of the scaler."""
        script, making = self.script, self.making
        parent = script.source.parents[node]
        grand = script.source.parents.get(parent)
        if isinstance(node, ast.arg):
            self._parameter(node)
        elif (
            isinstance(parent, ast.Attribute)
            and isinstance(grand, ast.Call)
            and (grand.func is parent)
        ):
            self._method(node, parent.attr, grand)
        elif self._is_test(node) or self._is_saved(node):
            script.replace(node, making.naming.text(node), "the handle takes the scaler's place")
        elif not making.naming.hand_on(node):
            self._refuse(node, f"`{ast.unparse(script.source.statement(node)).splitlines()[0]}`")

    def _parameter(self, node: ast.arg) -> None:
        without = self.making.naming.take(node)
        if without is not None:
            self.script.refuse(
                without,
                f"`{ast.unparse(without)}` does not give the scaler that other calls give",
                "hand the handle over in each call",
            )

    def _is_test(self, node: ast.AST) -> bool:
        """Whether the scaler is asked for, as in ``if scaler is not None``."""
        tests = [
            outer.test
            for outer in self.script.source.around(node)
            if isinstance(outer, (ast.If, ast.IfExp))
        ]
        within = {
            id(inner) for test in tests if self._sign(test) is not None for inner in ast.walk(test)
        }
        return id(node) in within

    def _is_saved(self, node: ast.AST) -> bool:
        """Whether another file's function that saves or loads gets the scaler."""
        parent = self.script.source.parents[node]
        call = self.script.source.parents[parent] if isinstance(parent, ast.keyword) else parent
        if not isinstance(call, ast.Call) or self.script.scopes.function(call) is not None:
            return False
        return _SAVES.search(ast.unparse(call.func).split(".")[-1]) is not None

    def _method(self, node: ast.AST, method: str, call: ast.Call) -> None:
        script, making = self.script, self.making
        statement = script.source.parents[call]
        name = making.naming.text(node)
        if method == "scale" and _scaled_backward(script.source.parents[statement]) is node:
            self._backward(name, call)
        elif method == "step" and isinstance(statement, ast.Expr) and len(call.args) == 1:
            optimizer = script.edits.text(call.args[0])
            script.replace(call, f"{optimizer}.step()", "unscales, checks, and steps or skips")
        elif method == "update" and isinstance(statement, ast.Expr) and not call.args:
            script.delete(statement, "the step moves the loss scale by itself")
        elif method == "unscale_" and isinstance(statement, ast.Expr):
            self._unscale(name, statement, call)
        elif method == "get_scale" and self._between_step_and_update(call):
            self._ask_before_step(name, call)
        elif method in _OF_SCALER:
            script.replace(node, f"{name}.scaler", "the handle's loss scaler")
        elif method in _BOTH:
            script.replace(node, name, "the handle's state; it loads a GradScaler's, too")
        else:
            self._refuse(call, f"`{ast.unparse(call)}`")

    def _between_step_and_update(self, asked: ast.Call) -> ast.stmt | None:
        """Return the step before which the scale has to be read, if ``asked`` reads it behind."""
        source = self.script.source
        block = source.block(source.statement(asked))
        before = block[: block.index(source.statement(asked))]
        behind = block[len(before) + 1 :]
        step = next((s for s in reversed(before) if self._is_call(s, "step")), None)
        return step if any(self._is_call(s, "update") for s in behind) else None

    def _is_call(self, statement: ast.stmt, method: str) -> bool:
        match statement:
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=scaler, attr=name))):
                return name == method and self.script.flow.root(scaler) == self.making.root
        return False

    def _ask_before_step(self, name: str, asked: ast.Call) -> None:
        """Move ``scale = scaler.get_scale()`` before the step, which moves the scale now."""
        script = self.script
        statement, step = script.source.statement(asked), self._between_step_and_update(asked)
        if not isinstance(statement, ast.Assign) or statement.value is not asked or step is None:
            self._refuse(asked, "the scale between step and update, which are one now")
            return
        line = script.source.line_start(script.source.start(step))
        target = ast.unparse(statement.targets[0])
        text = f"{script.source.indentation(step)}{target} = {name}.scaler.get_scale()"
        script.edits.insert(line, text + script.newline)
        script.delete(statement, "read before the step, which moves the scale now")

    def _reads_gradients(self, scope: ast.AST) -> bool:
        """Whether the function reads ``.grad`` itself, and so has to find true ones there."""
        source = self.script.source
        return any(
            isinstance(node, ast.Attribute) and node.attr == "grad" and source.scope(node) is scope
            for node in source.nodes
        )

    def _refuse_reads_behind(self, step: ast.stmt) -> None:
        """Refuse ``.grad`` behind a step without ``unscale_``: torch leaves true ones there."""
        source = self.script.source
        scope = source.scope(step)
        if any(self._unscales(node) and source.scope(node) is scope for node in source.nodes):
            return
        for node in source.nodes:
            is_grad = isinstance(node, ast.Attribute) and node.attr == "grad"
            if is_grad and source.scope(node) is scope and source.start(node) > source.end(step):
                self._refuse(node, f"`{ast.unparse(node)}` behind the step, where it is unscaled")

    def _backward(self, name: str, scale: ast.Call) -> None:
        script, making = self.script, self.making
        attribute = script.source.parents[scale]
        backward = script.source.parents[attribute]
        assert isinstance(backward, ast.Call)
        options = [k.arg for k in backward.keywords]
        if len(scale.args) != 1 or backward.args or not {*options} <= {"retain_graph"}:
            self._refuse(scale, f"`{ast.unparse(backward)}`")
            return
        given = [script.edits.text(scale.args[0])]
        if len(making.optimizers) > 1:
            fed = making.fed_by(script.source.statement(scale))
            if fed is None:
                self._refuse(
                    scale,
                    "several optimizers, and which of them this loss feeds cannot be told",
                )
                return
            given += fed
        given += [script.edits.text(keyword) for keyword in backward.keywords]
        script.replace(
            backward, f"{name}.backward({', '.join(given)})", "scales the loss, and runs backward"
        )

    def _unscale(self, name: str, statement: ast.stmt, call: ast.Call) -> None:
        script, making = self.script, self.making
        block = script.source.block(statement)
        behind = block[block.index(statement) + 1 :][:1]
        if [script.flow.root(argument) for argument in call.args] != [*making.optimizers]:
            self._refuse(call, "`unscale_` of one of several optimizers, or another one")
        elif self._reads_gradients(script.source.scope(call)) or not behind:
            script.replace(call, f"{name}.unscale_()", "true FP32 gradients from here on")
        elif clipped(script, behind[0], making.models) is not None:
            clip, limit = clipped(script, behind[0], making.models) or (call, call)
            script.delete(statement, "clip_grad_norm_ of the handle takes the scale into account")
            self._clip(name, clip, limit, "clips the true gradients in the step's own pass")
        else:
            script.replace(call, f"{name}.unscale_()", "true FP32 gradients from here on")

    def _clip(self, name: str, clip: ast.Call, limit: ast.expr, reason: str) -> None:
        text = f"{name}.clip_grad_norm_({self.script.edits.text(limit)})"
        self.script.replace(clip, text, reason)

    def _clip_scaled(self, unscaled: set[ast.AST]) -> None:
        """Rewrite what clips gradients that still carry the scale: in scopes without unscale_."""
        script, making = self.script, self.making
        for call in script.calls(*CLIPS, "torch.nn.utils.clip_grad_value_"):
            name = making.visible_at(call)
            scope = script.source.scope(call)
            if name is None or scope in unscaled or script.edits.covers(call):
                continue
            if runs_when(script, call, self._is_off):
                continue
            found = clipped(script, script.source.statement(call), making.models)
            if found is None:
                self._refuse(call, f"`{ast.unparse(call)}` of gradients that carry the loss scale")
            else:
                self._clip(name, *found, "clips the true gradients: before, they carried the scale")

    def _refuse_others(self) -> None:
        """Refuse other optimizers' steps over the same models: their gradients are scaled."""
        script, making = self.script, self.making
        known = (*making.optimizers, making.root)
        optimizers = {
            script.flow.root(node.value)
            for node in script.source.nodes
            if isinstance(node, ast.Attribute) and node.attr == "zero_grad"
        }
        for node in script.source.nodes:
            match node:
                case ast.Call(func=ast.Attribute(value=stepped, attr="step")):
                    root = script.flow.root(stepped)
                    if root in making.optimizers and not runs_when(script, node, self._is_off):
                        self._refuse(node, f"`{ast.unparse(node)}`, past the scaler")
                    if root is None or root in known or root not in optimizers:
                        continue
                    made = models_of(script, root, guess=False)
                    if {*made} & {*making.models}:
                        script.refuse(
                            node,
                            f"`{ast.unparse(node)}` steps on parameters of the same model, past "
                            "the scaler",
                            "hand this optimizer to `enable`, too",
                        )

    def _refuse(self, node: ast.AST, what: str) -> None:
        self.script.refuse(
            node,
            f"{what}: a use of the scaler that is not known",
            f"`{self.making.name}.scaler` is a torch GradScaler that can be used as before, "
            f"`{self.making.name}.backward(loss)` scales and runs backward",
        )
