"""Which variables hold one and the same object: through assignments, arguments and results."""

import ast
from collections.abc import Iterator

from tritonamp.commands.migrate.reading.scopes import Scopes, Variable
from tritonamp.commands.migrate.reading.source import Function, Source


class Flow:
    """Variables that hold one object are in one group, each known by one of them, its ``root``.

    A parameter is in the group of its arguments where all calls in the file give it the same.
    """

    def __init__(self, source: Source, scopes: Scopes) -> None:
        self.source, self.scopes = source, scopes
        self._parent: dict[Variable, Variable] = {}
        self.calls: dict[ast.AST, list[ast.Call]] = {}
        self._given: dict[Variable, list[ast.expr]] = {}
        for node in source.nodes:
            if isinstance(node, ast.Call):
                function = scopes.function(node)
                if function is not None:
                    self.calls.setdefault(function, []).append(node)
                    for name, value in arguments(node, function):
                        self._given.setdefault(Variable(function, name), []).append(value)
            elif isinstance(node, ast.Assign) and len(node.targets) == 1:
                self._assign(node.targets[0], node.value)
        self._join_arguments()

    def root(self, node: ast.AST | Variable | None) -> Variable | None:
        """Return what stands for the object that ``node`` names; None for what is no variable."""
        variable = node if isinstance(node, Variable) else self._variable(node)
        if variable is None:
            return None
        while variable in self._parent:
            variable = self._parent[variable]
        return variable

    def occurrences(self, root: Variable) -> list[ast.AST]:
        """Return the names, attributes of self and parameters that mean ``root``, in order."""
        found = [
            node
            for node in self.source.nodes
            if isinstance(node, (ast.Name, ast.Attribute, ast.arg))
            and self.scopes.variable(node) is not None
            and self.root(self.scopes.variable(node)) == root
        ]
        return sorted(found, key=self.source.start)

    def group(self, root: Variable) -> list[Variable]:
        """Return all variables that hold ``root``."""
        return [variable for variable in self.scopes.bindings if self.root(variable) == root]

    def canonical(self, expression: ast.expr, depth: int = 4) -> str:
        """Return ``expression`` as a text that is the same wherever the same objects are named."""
        root = self.root(expression) if isinstance(expression, (ast.Name, ast.Attribute)) else None
        if root is not None:
            value = self._only_value(root)
            if value is not None and depth:
                return self.canonical(value, depth - 1)
            return f"<{root.name}@{getattr(root.scope, 'lineno', 0)}>"
        if isinstance(expression, ast.Attribute):
            return f"{self.canonical(expression.value, depth)}.{expression.attr}"
        if isinstance(expression, ast.UnaryOp) and isinstance(expression.op, ast.Not):
            return f"not {self.canonical(expression.operand, depth)}"
        if isinstance(expression, ast.Subscript):
            of = self.canonical(expression.value, depth)
            return f"{of}[{ast.unparse(expression.slice)}]"
        return ast.unparse(expression)

    def _only_value(self, root: Variable) -> ast.expr | None:
        """Return the attribute, such as ``args.amp``, that is all that ``root`` ever holds."""
        values: list[ast.expr] = []
        for variable in self.group(root):
            for binding in self.scopes.bindings[variable]:
                statement = self.source.parents.get(binding)
                if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
                    values.append(statement.value)
                elif isinstance(binding, ast.arg):
                    given = self._given.get(variable, [])
                    if not given or len(given) != len(self.calls.get(variable.scope, [])):
                        return None
                    values += given
                else:
                    return None
        values = [value for value in values if self.root(value) != root]
        is_one = len({ast.unparse(value) for value in values}) == 1
        return values[0] if is_one and isinstance(values[0], ast.Attribute) else None

    def _variable(self, node: ast.AST | None) -> Variable | None:
        if isinstance(node, ast.Attribute) and node.attr == "module":  # inside DDP
            return self._variable(node.value)
        return None if node is None else self.scopes.variable(node)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(value, ast.Call):
            function = self.scopes.function(value)
            returned = _returned(function) if function is not None else None
            if returned is None or (function is not None and function.name == "__init__"):
                return
            value = returned
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            if len(target.elts) == len(value.elts):
                for one, other in zip(target.elts, value.elts, strict=True):
                    self._assign(one, other)
            return
        self._join(self._variable(target), self._variable(value))

    def _join_arguments(self) -> None:
        """Join parameters with their arguments where all are one object, until nothing moves."""
        moved = True
        while moved:
            moved = False
            for parameter, values in self._given.items():
                roots = {self.root(value) for value in values if not _is_none(value)}
                if len(roots) == 1 and None not in roots:
                    moved |= self._join(parameter, roots.pop())

    def _join(self, one: Variable | None, other: Variable | None) -> bool:
        first, second = self.root(one), self.root(other)
        if first is None or second is None or first == second:
            return False
        self._parent[first] = second
        return True


def arguments(call: ast.Call, function: Function) -> Iterator[tuple[str, ast.expr]]:
    """Yield the parameters of ``function`` that ``call`` gives, and what it gives."""
    names = [arg.arg for arg in (*function.args.posonlyargs, *function.args.args)]
    is_method = names[:1] in (["self"], ["cls"])
    for name, value in zip(names[is_method:], call.args, strict=False):
        if isinstance(value, ast.Starred):
            return
        yield name, value
    known = {*names, *(arg.arg for arg in function.args.kwonlyargs)}
    for keyword in call.keywords:
        if keyword.arg in known and keyword.arg is not None:
            yield keyword.arg, keyword.value


def _returned(function: Function) -> ast.expr | None:
    """Return what ``function`` returns, where it does so in one place."""
    found = [node for node in ast.walk(function) if isinstance(node, ast.Return)]
    return found[0].value if len(found) == 1 else None


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
