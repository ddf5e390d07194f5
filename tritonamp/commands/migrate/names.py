"""Names of a file: variables, imported names, and variables that hold one object."""

import ast
from collections import defaultdict
from typing import NamedTuple

from tritonamp.commands.migrate.text import Function, Source

Import = ast.Import | ast.ImportFrom


class Variable(NamedTuple):
    """A name of a function or module, or an attribute of ``self`` (then ``scope`` is the class)."""

    scope: ast.AST
    name: str


class Names(Source):
    """A text, and the variables in it.

    Variables that hold one object have one ``root``: that of ``self.model = model`` is ``model``'s.

    Attributes:
        bindings: the nodes that give each variable a value.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.bindings: dict[Variable, list[ast.AST]] = defaultdict(list)
        self._global: dict[ast.AST, set[str]] = defaultdict(set)
        self._joined: dict[Variable, Variable] = {}
        for node in self.nodes:
            if isinstance(node, ast.Global):
                self._global[self.scope(node)].update(node.names)
        for node in self.nodes:
            scope = self.scope(node)
            for name in _bound(node):
                owner = self.tree if name in self._global[scope] else scope
                self.bindings[Variable(owner, name)].append(node)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                variable = self.variable(node)
                if variable is not None:
                    self.bindings[variable].append(node)
        for variable, bindings in [*self.bindings.items()]:
            statement = self.parents[bindings[0]] if len(bindings) == 1 else None
            if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
                other = self.root(self.variable(statement.value))
                if other is not None and other != variable:
                    self._joined[variable] = other

    def variable(self, node: ast.AST | None) -> Variable | None:
        """Return what a name, parameter or ``self.name`` means; None for anything else."""
        if isinstance(node, ast.Name):
            return self.lookup(node.id, self.scope(node))
        if isinstance(node, ast.arg):
            return Variable(self.scope(node), node.arg)
        if isinstance(node, ast.Attribute) and node.attr == "module":  # inside DDP
            return self.variable(node.value)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = self._class_of_self(node.value)
            return None if owner is None else Variable(owner, node.attr)
        return None

    def lookup(self, name: str, scope: ast.AST) -> Variable | None:
        """Return the variable that ``name`` means in ``scope``; None where nothing binds it."""
        if name in self._global[scope]:
            scope = self.tree
        while True:
            variable = Variable(scope, name)
            if variable in self.bindings:
                return variable
            if scope is self.tree:
                return None
            scope = self.scope(scope)
            while isinstance(scope, ast.ClassDef):
                scope = self.scope(scope)

    def root(self, node: ast.AST | Variable | None) -> Variable | None:
        """Return what stands for the object that ``node`` names; None for any other expression."""
        variable = node if isinstance(node, Variable) else self.variable(node)
        while variable in self._joined:
            variable = self._joined[variable]
        return variable

    def group(self, root: Variable) -> list[Variable]:
        """Return all variables that hold the object of ``root``."""
        return [variable for variable in self.bindings if self.root(variable) == root]

    def occurrences(self, root: Variable) -> list[ast.AST]:
        """Return the names and attributes of self that mean ``root``, in order."""
        found = [
            node
            for node in self.nodes
            if isinstance(node, ast.Name | ast.Attribute) and self.root(node) == root
            if getattr(node, "attr", "") != "module"
        ]
        return sorted(found, key=self.start)

    def makings(self, root: Variable) -> list[tuple[Variable, ast.stmt]]:
        """Return what makes the object of ``root``, but for what hands it on or wraps it."""
        found = []
        for variable in self.group(root):
            for binding in self.bindings[variable]:
                statement = self.statement(binding)
                value = getattr(statement, "value", None)
                args = value.args if isinstance(value, ast.Call) else [value]
                is_value = not isinstance(binding, ast.arg | Import | Function)
                if is_value and not is_none(value) and root not in map(self.root, args):
                    found.append((variable, statement))
        return found

    def name_in(self, root: Variable, scope: ast.AST) -> str | None:
        """Return how ``scope`` names the object of ``root``; None where it cannot."""
        for variable in self.group(root):
            if isinstance(variable.scope, ast.ClassDef):
                if self.class_of(scope) is variable.scope:
                    return f"{scope.args.args[0].arg}.{variable.name}"  # type: ignore[attr-defined]
            elif self.lookup(variable.name, scope) == variable:
                return variable.name
        return None

    def same(self, one: ast.expr, other: ast.expr) -> bool:
        """Return whether two expressions are one variable, or one text."""
        roots = self.root(one), self.root(other)
        return ast.unparse(one) == ast.unparse(other) or (roots[0] == roots[1] is not None)

    def class_of(self, scope: ast.AST) -> ast.ClassDef | None:
        """Return the class that ``scope`` is a method of."""
        outer = self.parents.get(scope)
        has_self = isinstance(scope, Function) and scope.args.args
        return outer if has_self and isinstance(outer, ast.ClassDef) else None

    def _class_of_self(self, name: ast.Name) -> ast.ClassDef | None:
        scope = self.scope(name)
        while not isinstance(scope, ast.Module):
            owner = self.class_of(scope)
            if owner is not None and scope.args.args[0].arg == name.id:  # type: ignore[attr-defined]
                return owner
            scope = self.scope(scope)
        return None

    def qualified(self, node: ast.AST | None) -> str | None:
        """Return the dotted name that an imported name stands for, such as torch.optim.SGD."""
        if isinstance(node, ast.Attribute):
            base = self.qualified(node.value)
            return None if base is None else f"{base}.{node.attr}"
        variable = self.variable(node) if isinstance(node, ast.Name) else None
        if variable is None:
            return None
        meant = {
            self._imported(variable.name, binding)
            for binding in self.bindings[variable]
            if not self.stands_in(binding)
        }
        return meant.pop() if len(meant) == 1 else None

    def stands_in(self, binding: ast.AST) -> bool:
        """Return whether ``amp = None`` stands in for an import that failed."""
        in_handler = any(isinstance(n, ast.ExceptHandler) for n in self.around(binding))
        return in_handler and is_none(getattr(self.parents[binding], "value", None))

    def _imported(self, name: str, binding: ast.AST) -> str | None:
        for alias in binding.names if isinstance(binding, ast.Import | ast.ImportFrom) else ():
            if name == (alias.asname or alias.name.split(".")[0]):
                if isinstance(binding, ast.ImportFrom):
                    return None if binding.level else f"{binding.module}.{alias.name}"
                return name if alias.asname is None else alias.name
        return None

    def module(self, name: str) -> str | None:
        """Return what the whole file calls a module; None where the top does not import it."""
        imports = [node for node in self.tree.body if isinstance(node, ast.Import)]
        found = [a.asname or name for node in imports for a in node.names if a.name == name]
        return found[0] if found else None


def is_none(node: ast.AST | None) -> bool:
    """Return whether ``node`` is the constant None."""
    return isinstance(node, ast.Constant) and node.value is None


def _bound(node: ast.AST) -> list[str]:
    """Return the names that ``node`` itself binds."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
        return [node.id]
    if isinstance(node, ast.arg):
        return [node.arg]
    if isinstance(node, Function | ast.ClassDef):
        return [node.name]
    if isinstance(node, Import):
        return [alias.asname or alias.name.split(".")[0] for alias in node.names]
    return [node.name] if isinstance(node, ast.ExceptHandler) and node.name else []
