"""torch's ``autocast`` blocks in a file whose scaler becomes a handle."""

import ast
from typing import NamedTuple

from tritonamp.commands.migrate.reading.script import Script
from tritonamp.commands.migrate.torch_amp.making import Making
from tritonamp.commands.migrate.torch_amp.old_names import AUTOCASTS, options

_HALF = {"torch.float16": None, "torch.half": None, "torch.bfloat16": "torch.bfloat16"}


class _Block(NamedTuple):
    """``with autocast(...)``: the call, and the item's whole expression."""

    call: ast.Call
    expression: ast.expr


class Autocasts:
    """All autocast blocks of a file.

    Attributes:
        dtype: what ``enable`` is told, None for float16.
    """

    def __init__(self, script: Script, making: Making) -> None:
        self.script, self.making = script, making
        self.dtype: str | None = None
        self._blocks: list[_Block] = []

    def agree(self) -> bool:
        """Find the blocks; refuse those that ask for other things than the scaler does."""
        dtypes = set()
        for call in self.script.calls(*AUTOCASTS):
            given = options(self.script, call)
            enabled = given.get("enabled")
            if isinstance(enabled, ast.Constant) and enabled.value is False:
                continue
            expression = self._item(call)
            if expression is None:
                if self._decorates(call):
                    continue
                self._refuse(call, "an autocast that is no `with` block of its own")
                return False
            visible = self.making.visible_at(call) is not None
            if visible and not self._agrees(call, expression, enabled):
                self._refuse(call, "the autocast is on under another condition than the scaler")
                return False
            cached = given.get("cache_enabled")
            if visible and not (cached is None or ast.unparse(cached) == "True"):
                self._refuse(call, "the handle's autocast always keeps what it has cast")
                return False
            self._blocks.append(_Block(call, expression))
            dtypes.add(self._dtype_of(given))
        if len(dtypes) > 1 or "" in dtypes:
            self._refuse(
                self._blocks[0].call, "the autocasts' dtype cannot be read, or they differ"
            )
            return False
        self.dtype = dtypes.pop() if dtypes else None
        return True

    def holds(self, node: ast.AST) -> bool:
        """Whether ``node`` is in a block's own expression, which is replaced as a whole."""
        expressions = [block.expression for block in self._blocks]
        return any(outer in expressions for outer in self.script.source.around(node))

    def convert(self) -> None:
        """Note the edits: the handle's autocast wherever the handle can be reached."""
        for block in self._blocks:
            name = self.making.visible_at(block.call)
            if name is not None:
                self.script.replace(
                    block.expression, f"{name}.autocast()", "the dtype and the level of the handle"
                )

    def _item(self, call: ast.Call) -> ast.expr | None:
        """Return the expression of the with-item that ``call`` is, or is one side of."""
        parents = self.script.source.parents
        parent = parents[call]
        if isinstance(parent, ast.withitem) and parent.optional_vars is None:
            return call
        if isinstance(parent, ast.IfExp) and isinstance(parents[parent], ast.withitem):
            other = parent.orelse if parent.body is call else parent.body
            names = "nullcontext", "suppress"
            if isinstance(other, ast.Call) and ast.unparse(other.func).split(".")[-1] in names:
                return parent
        return None

    def _decorates(self, call: ast.Call) -> bool:
        parent = self.script.source.parents[call]
        return call in getattr(parent, "decorator_list", [])

    def _agrees(self, call: ast.Call, expression: ast.expr, enabled: ast.expr | None) -> bool:
        """Whether the block is on when the scaler is; gives it its condition where it has none."""
        switch = self.making.switch
        test, wanted = enabled, True
        if isinstance(expression, ast.IfExp):
            test, wanted = expression.test, expression.body is call
        if test is None or (isinstance(test, ast.Constant) and test.value is True):
            return switch.expression is None or switch.on_at(call)
        sign = switch.sign(test)
        if sign is not None:
            return sign == wanted
        if switch.expression is None and wanted and self.making.placing.knows(test):
            switch.expression = test
            return self.making.placing.is_steady(test)
        return False

    def _dtype_of(self, given: dict[str, ast.expr]) -> str | None:
        """Return what ``enable`` is to be told; None for float16, "" for what cannot be known."""
        dtype = given.get("dtype")
        if dtype is None:
            device = given.get("device_type")
            return (
                "torch.bfloat16" if device is not None and ast.unparse(device) == "'cpu'" else None
            )
        name = self.script.qualified(dtype)
        if name in _HALF:
            return _HALF[name]
        known = isinstance(dtype, ast.Name) and self.making.placing.knows(dtype)
        # FP32 is no dtype of a level: what may be that needs a switch beside it
        return ast.unparse(dtype) if known and self.making.switch.expression is not None else ""

    def _refuse(self, call: ast.Call, what: str) -> None:
        self.script.refuse(
            call,
            f"{what}: `{ast.unparse(call)}`",
            f"`with {self.making.name}.autocast():`, and the level and dtype of `enable` that are "
            "meant",
        )
