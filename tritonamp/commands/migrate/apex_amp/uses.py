"""``amp.scale_loss`` and ``amp.master_params``, to the methods of the handle."""

import ast
from dataclasses import dataclass

from tritonamp.commands.migrate.loops import gradients
from tritonamp.commands.migrate.reading.script import Script
from tritonamp.commands.migrate.reading.source import dedented

_BACKWARD = "scales the loss, and runs backward"


@dataclass(frozen=True)
class Handle:
    """What ``amp`` is from now on.

    Attributes:
        script: the file.
        name: of the handle, wherever it is used.
        several: whether it has several optimizers.
    """

    script: Script
    name: str
    several: bool

    def scale_loss(self, call: ast.Call) -> None:
        """Rewrite ``with amp.scale_loss(loss, optimizer) as scaled_loss: ...``."""
        script = self.script
        item = script.source.parents[call]
        given = dict(zip(("loss", "optimizers", "loss_id"), call.args, strict=False))
        given |= {k.arg: k.value for k in call.keywords if k.arg is not None}
        if not isinstance(item, ast.withitem) or "loss" not in given:
            script.refuse(call, f"`{ast.unparse(call)}` outside a `with`", "`amp.backward(loss)`")
            return
        args = [script.edits.text(given["loss"])]
        if self.several and "optimizers" in given:
            args.append(script.edits.text(given["optimizers"]))
        if "loss_id" in given:
            args.append(f"loss_id={script.edits.text(given['loss_id'])}")
        block = script.source.parents[item]
        assert isinstance(block, (ast.With, ast.AsyncWith))
        backward = _backward_first(block, item)
        one_line = len({statement.lineno for statement in block.body}) < len(block.body)
        if backward is None or one_line or self._is_read_behind(block, item):
            script.replace(call, f"{self.name}.scale_loss({', '.join(args)})", "the handle's scale")
            return
        args += [script.edits.text(keyword) for keyword in backward.keywords]
        script.replace(block, self._unwrapped(block, call, ", ".join(args)), _BACKWARD)

    def _is_read_behind(self, block: ast.AST, item: ast.withitem) -> bool:
        """Whether the name of the scaled loss is read outside of the blocks that give it."""
        script = self.script
        name = ast.unparse(item.optional_vars) if item.optional_vars is not None else ""
        for node in script.source.nodes:
            if not isinstance(node, ast.Name) or node.id != name or isinstance(node.ctx, ast.Store):
                continue
            blocks = [outer for outer in script.source.around(node) if isinstance(outer, ast.With)]
            given = any(
                i.optional_vars is not None and ast.unparse(i.optional_vars) == name
                for outer in blocks
                for i in outer.items
            )
            if script.source.scope(node) is script.source.scope(block) and not given:
                return True
        return False

    def _unwrapped(self, block: ast.With | ast.AsyncWith, call: ast.Call, args: str) -> str:
        """Return the backward, and what else is in the block, without the ``with`` around it."""
        source, edits = self.script.source, self.script.edits
        outer = source.indentation(block)
        first, *rest = block.body
        lines = [
            *source.comments(source.end(call), source.end(first)),
            f"{self.name}.backward({args})",
        ]
        if rest:
            start = source.line_end(source.end(first))
            text = edits.between(start, source.end(block))
            text = dedented(text, source.indentation(first), outer)
            lines.append(text.removeprefix(outer))
        return (source.newline + outer).join(lines)

    def master_params(self, call: ast.Call) -> None:
        """Rewrite ``clip_grad_norm_(amp.master_params(optimizer), limit)``, and other uses."""
        script = self.script
        outer = script.source.parents[call]
        limit = gradients.limit_of(script, outer) if isinstance(outer, ast.Call) else None
        if self.several:
            script.refuse(
                call,
                f"`{ast.unparse(call)}` of one of several optimizers",
                f"after `{self.name}.unscale_()` the gradients of its param_groups are true",
            )
        elif (
            limit is not None
            and isinstance(outer, ast.Call)
            and outer.args[0] is call
            and not self._works_with_gradients(call)
        ):
            inside = any(
                isinstance(o, ast.With) and self._scales(o) for o in script.source.around(call)
            )
            reason = ": inside the block they carried the scale" * inside
            gradients.clip(script, outer, limit, self.name, gradients.IN_THE_STEP + reason)
        else:
            script.replace(call, f"{self.name}.master_params()", "the FP32 parameters")
            self._unscale_once(call)

    def _unscale_once(self, call: ast.Call) -> None:
        """Make gradients true before the first of several uses in a function."""
        script = self.script
        scope = script.source.scope(call)
        uses = script.calls("apex.amp.master_params")
        first = next(use for use in uses if script.source.scope(use) is scope)
        if first is call:
            gradients.unscale_before(script, call, self.name, "for gradient work of your own")
        elif not any(
            statement in script.source.block(script.source.statement(first))
            for statement in (script.source.statement(call), *script.source.around(call))
        ):
            script.refuse(
                call,
                f"`{ast.unparse(call)}` in another block than the first",
                f"one `{self.name}.unscale_()` before both",
            )

    def _works_with_gradients(self, call: ast.Call) -> bool:
        """Whether the function does more with the gradients than to clip them."""
        script = self.script
        scope = script.source.scope(call)
        for use in script.calls("apex.amp.master_params"):
            outer = script.source.parents[use]
            clips = isinstance(outer, ast.Call) and gradients.limit_of(script, outer) is not None
            if script.source.scope(use) is scope and not clips:
                return True
        return bool(gradients.reads(script, scope))

    def _scales(self, block: ast.With) -> bool:
        calls = [
            item.context_expr for item in block.items if isinstance(item.context_expr, ast.Call)
        ]
        return any(self.script.qualified(call.func) == "apex.amp.scale_loss" for call in calls)


def _backward_first(block: ast.With | ast.AsyncWith, item: ast.withitem) -> ast.Call | None:
    """Return ``scaled_loss.backward()`` where it begins the block, and the name ends with it."""
    first, *rest = block.body
    match first, item.optional_vars:
        case (
            ast.Expr(
                value=ast.Call(
                    func=ast.Attribute(value=ast.Name(id=scaled), attr="backward"),
                    args=[],
                    keywords=keywords,
                ) as call
            ),
            ast.Name(id=name),
        ):
            names = {n.id for s in rest for n in ast.walk(s) if isinstance(n, ast.Name)}
            plain = all(keyword.arg == "retain_graph" for keyword in keywords)
            if name == scaled and len(block.items) == 1 and plain and name not in names:
                return call
    return None
