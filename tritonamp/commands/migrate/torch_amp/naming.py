"""What a scaler's handle is called, and how it gets from where it is made to where it is used."""

import ast
from collections.abc import Iterator

from tritonamp.commands.migrate.reading.flow import arguments
from tritonamp.commands.migrate.reading.scopes import Variable
from tritonamp.commands.migrate.reading.script import Script
from tritonamp.commands.migrate.reading.source import Function

_GONE = {"torch.amp.GradScaler", "torch.cuda.amp.GradScaler", "torch.cuda.amp.autocast"}
HANDLE = "amp"


class Naming:
    """The names of a scaler's handle: ``amp``, or the scaler's own where that is not free.

    Args:
        script: the file.
        root: the variable of the scaler.
    """

    def __init__(self, script: Script, root: Variable) -> None:
        self.script, self.root = script, root
        names = {variable.name for variable in script.flow.group(root)}
        shared = any(
            isinstance(node, ast.Global | ast.Nonlocal) and names & {*node.names}
            for node in script.source.nodes
        )
        self.renamed = not shared and not self._is_asked_for_by_text(names) and _is_free(script)
        if self.renamed:
            script.taken.add(HANDLE)

    def _is_asked_for_by_text(self, names: set[str]) -> bool:
        """Whether a name may be one that ``getattr`` and the like are called with."""
        nodes = self.script.source.nodes
        asks = {"getattr", "setattr", "hasattr", "vars"}
        by_text = any(isinstance(node, ast.Name) and node.id in asks for node in nodes)
        texts = {node.value for node in nodes if isinstance(node, ast.Constant)}
        return by_text and self.root.scope not in (self.script.source.tree,) and bool(names & texts)

    def text(self, node: ast.AST) -> str:
        """Return the name of the handle at ``node``, an occurrence of the scaler."""
        if not self.renamed:
            return node.arg if isinstance(node, ast.arg) else ast.unparse(node)
        return f"{ast.unparse(node.value)}.{HANDLE}" if isinstance(node, ast.Attribute) else HANDLE

    def at(self, node: ast.AST) -> str | None:
        """Return what the handle is called at ``node``; None where no variable of it is known."""
        scopes = self.script.scopes
        scope = self.script.source.scope(node)
        for variable in self.script.flow.group(self.root):
            name = HANDLE if self.renamed else variable.name
            if isinstance(variable.scope, ast.ClassDef):
                if isinstance(scope, Function) and scopes.method_of(scope) is variable.scope:
                    return f"{scope.args.args[0].arg}.{name}"
            elif scopes.lookup(variable.name, scope) == variable:
                return name
        return None

    def hand_on(self, node: ast.AST) -> bool:
        """Note the edit of a ``node`` that only gives the scaler on; False where it does not."""
        parent = self.script.source.parents[node]
        if not self._is_given(node):
            return False
        if self.renamed and isinstance(parent, ast.keyword):
            self.script.replace(parent, f"{HANDLE}={HANDLE}", "the handle is given")
        elif self.renamed:
            self.script.replace(node, self.text(node), "the handle takes the scaler's place")
        return True

    def take(self, node: ast.arg) -> ast.Call | None:
        """Note the edit of a parameter; or return a call that does not give the scaler."""
        function = self.script.source.scope(node)
        assert isinstance(function, Function)
        for call in self.script.flow.calls.get(function, []):
            given = dict(arguments(call, function))
            if self.script.flow.root(given.get(node.arg)) != self.root:
                return call
        name = HANDLE if self.renamed else node.arg
        if node.annotation is not None:
            self.script.replace(node, f"{name}: tritonamp.Amp", "the handle is taken")
            self.script.needs_tritonamp = True
        elif self.renamed:
            self.script.replace(node, name, "the handle is taken")
        return None

    def strangers(self) -> Iterator[ast.Attribute]:
        """Yield attributes of the scaler's name, of objects that are not known to hold it."""
        flow = self.script.flow
        names = {v.name for v in flow.group(self.root) if isinstance(v.scope, ast.ClassDef)}
        for node in self.script.source.nodes:
            if not isinstance(node, ast.Attribute) or node.attr not in names:
                continue
            if flow.root(self.script.scopes.variable(node)) != self.root:
                yield node

    def _is_given(self, node: ast.AST) -> bool:
        parents = self.script.source.parents
        parent = parents[node]
        call = parents[parent] if isinstance(parent, ast.keyword) else parent
        if isinstance(call, ast.Call) and node is not call.func:
            function = self.script.scopes.function(call)
            given = arguments(call, function) if function is not None else ()
            return any(
                value is node and self.script.flow.root(Variable(function, name)) == self.root
                for name, value in given
                if function is not None
            )
        while isinstance(parent, ast.Tuple):
            parent = parents[parent]
        if isinstance(parent, ast.Return):
            return self._is_taken(parent)
        return isinstance(parent, ast.Assign) and self._passes(parent)

    def _passes(self, statement: ast.Assign) -> bool:
        """Whether an assignment gives the scaler, and nothing else, to its variables."""
        if len(statement.targets) != 1:
            return False
        target, value = statement.targets[0], statement.value
        if isinstance(value, ast.Call):
            return self.script.scopes.function(value) is not None
        targets = target.elts if isinstance(target, ast.Tuple) else [target]
        values = value.elts if isinstance(value, ast.Tuple) else [value]
        flow = self.script.flow
        holds = [flow.root(one) == self.root for one in targets]
        gives = [flow.root(one) == self.root for one in values]
        return holds == gives

    def _is_taken(self, result: ast.Return) -> bool:
        """Whether every call of the function that returns the scaler gives it to a variable."""
        script = self.script
        calls = script.flow.calls.get(script.source.scope(result), [])
        statements = [script.source.parents[call] for call in calls]
        return bool(calls) and all(
            isinstance(statement, ast.Assign)
            and any(script.flow.root(n) == self.root for n in ast.walk(statement.targets[0]))
            for statement in statements
        )


def _is_free(script: Script) -> bool:
    """Whether nothing of the file is called ``amp`` but a module of torch that goes away."""
    bindings = [
        binding
        for variable, nodes in script.scopes.bindings.items()
        if variable.name == HANDLE
        for binding in nodes
    ]
    read = [
        node
        for node in script.source.nodes
        if isinstance(node, ast.Attribute)
        and node.attr == HANDLE
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    ]
    used = {
        script.qualified(script.source.parents[node])
        for node in script.source.nodes
        if isinstance(node, ast.Name) and node.id == HANDLE
    }
    modules = [isinstance(binding, ast.Import | ast.ImportFrom) for binding in bindings]
    return not read and all(modules) and used <= _GONE
