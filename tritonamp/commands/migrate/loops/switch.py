"""What turns mixed precision on in a script: an expression, or whether there is a scaler."""

import ast
from dataclasses import dataclass

from tritonamp.commands.migrate.reading.scopes import Variable
from tritonamp.commands.migrate.reading.script import Script


@dataclass
class Switch:
    """Tells of tests what they say about mixed precision.

    Attributes:
        script: the file.
        expression: what turns it on, such as ``args.amp``; None: it is always on.
        scaler: the variable whose being there means the same, if there is one.
    """

    script: Script
    expression: ast.expr | None
    scaler: Variable | None = None

    def sign(self, test: ast.expr) -> bool | None:
        """Return whether ``test`` asks for mixed precision or for its absence; None: neither."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self.is_off(test.operand)
        if self._is_scaler(test):
            return True
        match test:
            case ast.Compare(
                left=left,
                ops=[ast.Is() | ast.IsNot() as op],
                comparators=[ast.Constant(value=None)],
            ) if self._is_scaler(left):
                return isinstance(op, ast.IsNot)
        flow = self.script.flow
        if self.expression is not None and flow.canonical(test) == flow.canonical(self.expression):
            return True
        return None

    def is_off(self, test: ast.expr) -> bool | None:
        """Return the opposite of ``sign``."""
        sign = self.sign(test)
        return None if sign is None else not sign

    def asks_for_scaler(self, test: ast.expr) -> bool:
        """Return whether ``test`` names the scaler, which is always there as a handle."""
        return any(self._is_scaler(node) for node in ast.walk(test))

    def off_at(self, node: ast.AST) -> bool:
        """Return whether ``node`` runs only without mixed precision."""
        return self._runs_when(node, False)

    def on_at(self, node: ast.AST) -> bool:
        """Return whether ``node`` runs only with mixed precision."""
        return self._runs_when(node, True)

    def _runs_when(self, node: ast.AST, on: bool) -> bool:
        inner = node
        for outer in self.script.source.around(node):
            if isinstance(outer, (ast.If, ast.IfExp)) and inner is not outer.test:
                sign = self.sign(outer.test)
                body = outer.body if isinstance(outer.body, list) else [outer.body]
                if sign is not None and (inner in body) == (sign == on):
                    return True
            inner = outer
        return False

    def _is_scaler(self, node: ast.AST) -> bool:
        return self.scaler is not None and self.script.flow.root(node) == self.scaler
