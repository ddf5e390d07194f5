"""Which variable a name means, and what an imported name stands for."""

import ast
from collections import defaultdict
from typing import NamedTuple

from tritonamp.commands.migrate.reading.source import Function, Source


class Variable(NamedTuple):
    """A name of a function or module, or an attribute of ``self`` (then ``scope`` is the class)."""

    scope: ast.AST
    name: str


class Scopes:
    """The variables of a file.

    Attributes:
        bindings: the nodes that give each variable a value.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.bindings: dict[Variable, list[ast.AST]] = defaultdict(list)
        self._global: dict[ast.AST, set[str]] = defaultdict(set)
        for node in source.nodes:
            if isinstance(node, ast.Global):
                self._global[source.scope(node)].update(node.names)
        for node in source.nodes:
            for name in _bound(node):
                scope = source.scope(node)
                if name in self._global[scope]:
                    scope = source.tree
                self.bindings[Variable(scope, name)].append(node)
        for node in source.nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                variable = self.variable(node)
                if variable is not None:
                    self.bindings[variable].append(node)

    def variable(self, node: ast.AST) -> Variable | None:
        """Return what a name or ``self.name`` means; None for anything else."""
        if isinstance(node, ast.Name):
            return self.lookup(node.id, self.source.scope(node))
        if isinstance(node, ast.arg):
            return Variable(self.source.scope(node), node.arg)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = self._class_of_self(node.value)
            return None if owner is None else Variable(owner, node.attr)
        return None

    def makings(self, variable: Variable) -> list[ast.AST]:
        """Return the bindings of ``variable`` that give it something else than None."""
        return [
            binding
            for binding in self.bindings[variable]
            if not _is_none(getattr(self.source.parents.get(binding), "value", None))
        ]

    def lookup(self, name: str, scope: ast.AST) -> Variable | None:
        """Return the variable that ``name`` means in ``scope``; None where nothing binds it."""
        if name in self._global[scope]:
            scope = self.source.tree
        while True:
            variable = Variable(scope, name)
            if variable in self.bindings:
                return variable
            if scope is self.source.tree:
                return None
            scope = self.source.scope(scope)
            while isinstance(scope, ast.ClassDef):
                scope = self.source.scope(scope)

    def _class_of_self(self, name: ast.Name) -> ast.ClassDef | None:
        scope = self.source.scope(name)
        while not isinstance(scope, ast.Module):
            owner = self.method_of(scope)
            if owner is not None and self_of(scope) == name.id:
                return owner
            scope = self.source.scope(scope)
        return None

    def method_of(self, scope: ast.AST) -> ast.ClassDef | None:
        """Return the class that ``scope`` is a method of."""
        outer = self.source.parents.get(scope)
        is_method = isinstance(scope, Function) and isinstance(outer, ast.ClassDef)
        return outer if is_method and isinstance(outer, ast.ClassDef) else None

    def qualified(self, node: ast.AST | None) -> str | None:
        """Return the dotted name that an imported name stands for, such as torch.optim.SGD."""
        if isinstance(node, ast.Attribute):
            base = self.qualified(node.value)
            return None if base is None else f"{base}.{node.attr}"
        variable = self.variable(node) if isinstance(node, ast.Name) else None
        if variable is None:
            return None
        meant = {self._imported(variable.name, binding) for binding in self.bindings[variable]}
        meant.discard("")
        return meant.pop() if len(meant) == 1 else None

    def _imported(self, name: str, binding: ast.AST) -> str | None:
        """Return what an import binds ``name`` to; "" for what stands in for a failed import."""
        if isinstance(binding, ast.Import):
            for alias in binding.names:
                if alias.asname == name:
                    return alias.name
                if alias.asname is None and alias.name.split(".")[0] == name:
                    return name
        if isinstance(binding, ast.ImportFrom) and not binding.level:
            return next(
                f"{binding.module}.{a.name}" for a in binding.names if (a.asname or a.name) == name
            )
        statement = self.source.parents.get(binding)
        is_none = isinstance(statement, ast.Assign) and _is_none(statement.value)
        in_handler = any(isinstance(n, ast.ExceptHandler) for n in self.source.around(binding))
        return "" if is_none and in_handler else None

    def function(self, call: ast.Call) -> Function | None:
        """Return the function of this file that ``call`` calls; of a class, its ``__init__``."""
        func = call.func
        if isinstance(func, ast.Attribute):
            owner = self._class_of_self(func.value) if isinstance(func.value, ast.Name) else None
            if owner is None:
                owner = self._class_of_object(func.value)
            return None if owner is None else _method(owner, func.attr)
        variable = self.variable(func)
        nodes = self.bindings.get(variable, []) if variable is not None else []
        if len(nodes) != 1:
            return None
        if isinstance(nodes[0], ast.ClassDef):
            return _method(nodes[0], "__init__")
        return nodes[0] if isinstance(nodes[0], Function) else None

    def _class_of_object(self, node: ast.AST) -> ast.ClassDef | None:
        """Return the class of this file whose instance ``node`` always is."""
        variable = self.variable(node)
        nodes = self.bindings.get(variable, []) if variable is not None else []
        if len(nodes) != 1:
            return None
        statement = self.source.parents.get(nodes[0])
        if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
            return None
        made = self.variable(statement.value.func)
        found = self.bindings.get(made, []) if made is not None else []
        return found[0] if len(found) == 1 and isinstance(found[0], ast.ClassDef) else None


def self_of(method: ast.AST) -> str | None:
    """Return the name of the first parameter of ``method``."""
    if not isinstance(method, Function) or not method.args.args:
        return None
    return method.args.args[0].arg


def _method(owner: ast.ClassDef, name: str) -> Function | None:
    found = [node for node in owner.body if isinstance(node, Function) and node.name == name]
    return found[0] if len(found) == 1 else None


def _is_none(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _bound(node: ast.AST) -> list[str]:
    """Return the names that ``node`` itself binds."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
        return [node.id]
    if isinstance(node, ast.arg):
        return [node.arg]
    if isinstance(node, Function | ast.ClassDef):
        return [node.name]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [alias.asname or alias.name.split(".")[0] for alias in node.names]
    if isinstance(node, ast.ExceptHandler) and node.name:
        return [node.name]
    return []
