"""``if amp: ... else: ...`` whose branches are one and the same now."""

import ast

from tritonamp.commands.migrate.loops.switch import Switch
from tritonamp.commands.migrate.reading.script import Note, Script
from tritonamp.commands.migrate.reading.source import dedented

FOLDED = "both branches are the same now: at O0 the handle does nothing to an FP32 loop"
ALWAYS = "the handle is always there"


class Folding:
    """Branches on whether mixed precision is on.

    Args:
        script: the file; its other edits have been noted.
        handle: the name of the handle.
        models: names of the one model whose gradients the handle clips.
        switch: what turns mixed precision on. A branch that asks whether there is a scaler has to
            go: there is always a handle.
    """

    def __init__(
        self,
        script: Script,
        handle: str,
        models: set[str],
        switch: Switch,
    ) -> None:
        self.script, self.handle, self.models = script, handle, models
        self.switch = switch

    def fold(self) -> None:
        """Fold what can be folded; refuse a branch that has to go and cannot."""
        source = self.script.source
        nodes = [n for n in source.nodes if isinstance(n, (ast.If, ast.IfExp))]
        for node in sorted(nodes, key=lambda n: -len(list(source.around(n)))):
            sign = self.switch.sign(node.test)
            if sign is None or self.script.edits.covers(node):
                continue
            if isinstance(node, ast.IfExp):
                if self.switch.asks_for_scaler(node.test):
                    kept = node.body if sign else node.orelse
                    self.script.replace(node, self.script.edits.text(kept), ALWAYS)
            else:
                self._fold(node, sign)

    def _fold(self, node: ast.If, sign: bool) -> None:
        on, off = (node.body, node.orelse) if sign else (node.orelse, node.body)
        must = self.switch.asks_for_scaler(node.test)
        is_elif = self.script.source.text.startswith("elif", self.script.source.start(node))
        if on and not is_elif and (off or must) and (not off or self._same(on, off)):
            self._unwrap(node, on, off)
        elif must:
            self.script.refuse(
                node,
                f"`if {ast.unparse(node.test)}` does different things in its branches",
                f"keep what is right with `{self.handle}`, which is always there from now on",
            )

    def _same(self, on: list[ast.stmt], off: list[ast.stmt]) -> bool:
        return ast.dump(self._plain(on)) == ast.dump(self._plain(off))

    def _plain(self, block: list[ast.stmt]) -> ast.AST:
        return _Plain(self.handle, self.models).visit(ast.parse(self._text(block, "")))

    def _text(self, block: list[ast.stmt], indentation: str) -> str:
        """Return the text of a block of lines, edited, and indented anew."""
        source = self.script.source
        start, end = source.start(block[0]), source.end(block[-1])
        line = source.line_start(start)
        if source.text[line:start].strip():  # behind the colon
            return indentation + self.script.edits.between(start, end)
        text = self.script.edits.between(line, end).rstrip()
        text = text or f"{source.indentation(block[0])}pass"
        if source.text.startswith("elif", start):
            text = text.replace("elif", "if", 1)
        return dedented(text, source.indentation(block[0]), indentation)

    def _unwrap(self, node: ast.If, on: list[ast.stmt], off: list[ast.stmt]) -> None:
        """Put the statements of ``on``, with the comments before them, in the place of ``node``."""
        source, edits = self.script.source, self.script.edits
        start, end = source.start(on[0]), source.end(on[-1])
        outer = source.indentation(node)
        header = source.start(node) if on is node.body else source.end(node.body[-1])
        comments = source.comments(source.line_end(header), start) if header < start else []
        text = self._text(on, outer).removeprefix(outer)
        if on is node.body and off:
            comments += source.comments(end, source.line_end(end))
        text = (source.newline + outer).join([*comments, text])
        if off:
            lines = range(off[0].lineno, (off[-1].end_lineno or 0) + 1)
            self.script.changes -= {c for c in self.script.changes if c.line in lines}
        edits.replace(source.start(node), source.end(node), text)
        self.script.changes.add(Note(node.lineno, FOLDED if off else ALWAYS))


class _Plain(ast.NodeTransformer):
    """Writes a loop without mixed precision as the handle's, and enters its autocast nowhere."""

    def __init__(self, handle: str, models: set[str]) -> None:
        self.handle = handle
        self.clipped = {f"{model}.parameters()" for model in models}

    def visit_With(self, node: ast.With) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        inside = [i for i in node.items if ast.unparse(i) != f"{self.handle}.autocast()"]
        if inside:
            node.items = inside
            return node
        return node.body

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        self.generic_visit(node)
        return None if ast.unparse(node) == f"{self.handle}.unscale_()" else node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.func, (ast.Attribute, ast.Name)):
            return node
        name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
        handle = ast.parse(self.handle, mode="eval").body
        if name == "backward" and isinstance(node.func, ast.Attribute):
            is_ours = ast.dump(node.func.value) == ast.dump(handle)
            args = node.args[:1] if is_ours else [node.func.value, *node.args]
            keywords = [k for k in node.keywords if k.arg == "retain_graph"]
            return ast.Call(ast.Attribute(handle, name, ast.Load()), args, keywords)
        if name == "clip_grad_norm_" and ast.unparse(node.func) != f"{self.handle}.{name}":
            limit = [*node.args[1:], *(keyword.value for keyword in node.keywords)]
            if len(limit) == 1 and ast.unparse(node.args[0]) in self.clipped:
                return ast.Call(ast.Attribute(handle, name, ast.Load()), limit, [])
        return node
