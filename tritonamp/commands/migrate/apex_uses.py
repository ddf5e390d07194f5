"""``amp.scale_loss`` and ``amp.master_params``, to the methods of the handle."""

import ast
from dataclasses import dataclass

from tritonamp.commands.migrate.handle import CLIPS, limit_of
from tritonamp.commands.migrate.script import Script
from tritonamp.commands.migrate.source import dedented

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
        if backward is None:
            script.replace(call, f"{self.name}.scale_loss({', '.join(args)})", "the handle's scale")
            return
        args += [script.edits.text(keyword) for keyword in backward.keywords]
        script.replace(block, self._unwrapped(block, call, ", ".join(args)), _BACKWARD)

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
        limit = limit_of(script, outer) if isinstance(outer, ast.Call) else None
        if self.several:
            script.refuse(
                call,
                f"`{ast.unparse(call)}` of one of several optimizers",
                f"after `{self.name}.unscale_()` the gradients of its param_groups are true",
            )
        elif limit is not None and isinstance(outer, ast.Call) and outer.args[0] is call:
            script.replace(
                outer,
                f"{self.name}.clip_grad_norm_({script.edits.text(limit)})",
                "clips the true gradients in the step's own pass",
            )
        else:
            self._with_true_gradients(call)

    def _with_true_gradients(self, call: ast.Call) -> None:
        script = self.script
        statement = script.source.statement(call)
        start = script.source.start(statement)
        line = script.source.line_start(start)
        lead = script.source.text[line:start]
        if lead.strip():
            script.refuse(call, "a statement that shares its line", "give it a line of its own")
            return
        outer = script.source.parents[call]
        is_clip = isinstance(outer, ast.Call) and script.qualified(outer.func) in CLIPS
        script.replace(call, f"{self.name}.master_params()", "the FP32 parameters")
        script.edits.insert(line, f"{lead}{self.name}.unscale_()  # true gradients{script.newline}")
        script.why(statement, "norms other than 2" if is_clip else "your own gradient work")


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
