"""What a scaler is used for, to what its handle does in its place."""

import ast
import re

from tritonamp.commands.migrate.loops import gradients
from tritonamp.commands.migrate.reading.script import Script
from tritonamp.commands.migrate.torch_amp.making import Making

_OF_SCALER = {"get_scale", "is_enabled", "get_growth_factor", "get_backoff_factor",
              "get_growth_interval", "set_growth_factor", "set_backoff_factor",
              "set_growth_interval"}  # fmt: skip
_STATE = {"state_dict", "load_state_dict"}
_SAVES = re.compile("save|load|checkpoint|restore|resume", re.IGNORECASE)


def scaled_backward(node: ast.AST) -> ast.expr | None:
    """Return ``x`` of ``x.scale(loss).backward()``."""
    match node:
        case ast.Call(
            func=ast.Attribute(
                value=ast.Call(func=ast.Attribute(value=scaler, attr="scale")), attr="backward"
            )
        ):
            return scaler
    return None


class Uses:
    """The rewriting of the occurrences of one scaler.

    Attributes:
        unscaled: the functions that call ``unscale_``.
    """

    def __init__(self, script: Script, making: Making) -> None:
        self.script, self.making = script, making
        self.unscaled = {
            script.source.scope(node)
            for node in script.source.nodes
            if isinstance(node, ast.stmt) and self._is_call(node, "unscale_")
        }

    def rewrite(self, node: ast.AST) -> None:
        """Note the edit of one occurrence, or that it is not understood."""
        script, naming = self.script, self.making.naming
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
        elif self._is_tested(node) or self._is_saved(node):
            script.replace(node, naming.text(node), "the handle takes the scaler's place")
        elif not naming.hand_on(node):
            self.refuse(node, f"`{ast.unparse(script.source.statement(node)).splitlines()[0]}`")

    def is_behind_a_step(self, node: ast.AST) -> bool:
        """Whether ``node`` stands behind a ``scaler.step`` of its function."""
        source = self.script.source
        scope = source.scope(node)
        return any(
            source.end(step) < source.start(node)
            for step in source.nodes
            if isinstance(step, ast.stmt) and self._is_call(step, "step")
            if source.scope(step) is scope
        )

    def refuse(self, node: ast.AST, what: str) -> None:
        """Note a use that is not understood."""
        name = self.making.name
        self.script.refuse(
            node,
            f"{what}: a use of the scaler that is not known",
            f"`{name}.scaler` is a torch GradScaler that can be used as before, "
            f"`{name}.backward(loss)` scales and runs backward",
        )

    def _is_call(self, statement: ast.stmt, method: str) -> bool:
        match statement:
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=scaler, attr=name))):
                return name == method and self.script.flow.root(scaler) == self.making.root
        return False

    def _parameter(self, node: ast.arg) -> None:
        without = self.making.naming.take(node)
        if without is not None:
            self.script.refuse(
                without,
                f"`{ast.unparse(without)}` does not give the scaler that other calls give",
                "hand the handle over in each call",
            )

    def _is_tested(self, node: ast.AST) -> bool:
        """Whether the scaler is asked for, as in ``if scaler is not None``."""
        source, switch = self.script.source, self.making.switch
        inner = node
        for outer in source.around(node):
            if isinstance(outer, (ast.If, ast.IfExp)) and inner is outer.test:
                return switch.sign(outer.test) is not None
            inner = outer
        return False

    def _is_saved(self, node: ast.AST) -> bool:
        """Whether another file's function that saves or loads gets the scaler."""
        parent = self.script.source.parents[node]
        call = self.script.source.parents[parent] if isinstance(parent, ast.keyword) else parent
        if not isinstance(call, ast.Call) or self.script.scopes.function(call) is not None:
            return False
        return _SAVES.search(ast.unparse(call.func).split(".")[-1]) is not None

    def _method(self, node: ast.AST, method: str, call: ast.Call) -> None:
        script = self.script
        statement = script.source.parents[call]
        name = self.making.naming.text(node)
        if method == "scale" and scaled_backward(script.source.parents[statement]) is node:
            self._backward(name, call)
        elif method == "step" and isinstance(statement, ast.Expr) and _is_bare(call, 1):
            optimizer = script.edits.text(call.args[0])
            script.replace(call, f"{optimizer}.step()", "unscales, checks, and steps or skips")
        elif method == "update" and isinstance(statement, ast.Expr) and _is_bare(call):
            script.delete(statement, "the step moves the loss scale by itself")
        elif method == "unscale_" and isinstance(statement, ast.Expr) and not call.keywords:
            self._unscale(name, statement, call)
        elif method == "get_scale" and self._step_before(call) is not None:
            self._ask_before_step(name, call)
        elif method in _OF_SCALER:
            script.replace(node, f"{name}.scaler", "the handle's loss scaler")
        elif method in _STATE and isinstance(statement, ast.Subscript):
            script.replace(node, f"{name}.scaler", "the state of the loss scaler alone")
        elif method in _STATE:
            script.replace(
                node, name, "the handle's state; it loads that of a GradScaler that was on"
            )
        else:
            self.refuse(call, f"`{ast.unparse(call)}`")

    def _backward(self, name: str, scale: ast.Call) -> None:
        script, making = self.script, self.making
        backward = script.source.parents[script.source.parents[scale]]
        assert isinstance(backward, ast.Call)
        options = {keyword.arg for keyword in backward.keywords}
        if len(scale.args) != 1 or backward.args or not options <= {"retain_graph"}:
            self.refuse(scale, f"`{ast.unparse(backward)}`")
            return
        given = [script.edits.text(scale.args[0])]
        if len(making.optimizers) > 1:
            fed = making.fed_by(script.source.statement(scale))
            if fed is None:
                what = "several optimizers, and which of them this loss feeds cannot be told"
                self.refuse(scale, what)
                return
            given += fed
        given += [script.edits.text(keyword) for keyword in backward.keywords]
        text = f"{name}.backward({', '.join(given)})"
        several = "; each optimizer has a loss scale of its own" * (len(given) > 2)
        script.replace(backward, text, f"scales the loss, and runs backward{several}")

    def _unscale(self, name: str, statement: ast.stmt, call: ast.Call) -> None:
        script, making = self.script, self.making
        block = script.source.block(statement)
        behind = block[block.index(statement) + 1 :][:1]
        if [script.flow.root(argument) for argument in call.args] != [*making.optimizers]:
            self.refuse(call, "`unscale_` of one of several optimizers, or another one")
            return
        found = getattr(behind[0], "value", None) if behind else None
        limit = gradients.limit_of_all(script, found, making.models)
        scope = script.source.scope(call)
        others = [c for c in gradients.clips(script) if script.source.scope(c) is scope]
        plain = len([c for c in others if not making.switch.off_at(c)]) == 1
        reads = gradients.reads(script, scope) or (
            found is not None and self._is_looked_at(statement, found)
        )
        if found is None or limit is None or not plain or reads:
            script.replace(call, f"{name}.unscale_()", "true FP32 gradients from here on")
        else:
            script.delete(statement, "clip_grad_norm_ of the handle takes the scale into account")
            gradients.clip(script, found, limit, name, gradients.IN_THE_STEP)

    def _step_before(self, asked: ast.Call) -> ast.stmt | None:
        """Return where the step begins between which and its update ``asked`` reads the scale.

        With a handle the scale moves where the gradients are first looked at: by a clip, by
        ``unscale_`` or by the step.
        """
        source = self.script.source
        block = source.block(source.statement(asked))
        before = block[: block.index(source.statement(asked))]
        behind = block[len(before) + 1 :]
        scaled = [n for n, s in enumerate(before) if self._holds(s, "scale")]
        steps = before[scaled[-1] + 1 if scaled else 0 :]
        begins = next((s for s in steps if self._holds(s, "unscale_", "step")), None)
        return begins if any(self._is_call(s, "update") for s in behind) else None

    def _holds(self, statement: ast.stmt, *methods: str) -> bool:
        return any(
            isinstance(node, ast.Attribute)
            and node.attr in methods
            and self.script.flow.root(node.value) == self.making.root
            for node in ast.walk(statement)
        )

    def _is_looked_at(self, statement: ast.stmt, found: ast.expr) -> bool:
        """Whether a function gets the model between an ``unscale_`` and its step."""
        flow, block = self.script.flow, self.script.source.block(statement)
        for behind in block[block.index(statement) + 1 :]:
            if self._holds(behind, "step"):
                return False
            for call in ast.walk(behind):
                given = call.args if isinstance(call, ast.Call) and call is not found else []
                if any(flow.root(value) in self.making.models for value in given):
                    return True
        return False

    def _ask_before_step(self, name: str, asked: ast.Call) -> None:
        """Move ``scale = scaler.get_scale()`` before the step, which moves the scale now."""
        script = self.script
        statement, step = script.source.statement(asked), self._step_before(asked)
        if not isinstance(statement, ast.Assign) or statement.value is not asked or step is None:
            self.refuse(asked, "the scale between step and update, which are one now")
            return
        line = script.source.line_start(script.source.start(step))
        target = ast.unparse(statement.targets[0])
        text = f"{script.source.indentation(step)}{target} = {name}.scaler.get_scale()"
        script.edits.insert(line, text + script.newline)
        script.delete(statement, "read before the step, which moves the scale now")


def _is_bare(call: ast.Call, arguments: int = 0) -> bool:
    return len(call.args) == arguments and not call.keywords
