"""Rewrite a function so that the activations in it are calls of ``ops``."""

import ast
import copy
from collections.abc import Callable, Iterable, Mapping
from types import CodeType, FunctionType, MappingProxyType
from typing import Any, NamedTuple

from tritonamp.casts.source import source_of
from tritonamp.casts.written import terms
from tritonamp.casts.written.probabilities import widened
from tritonamp.casts.written.reader import ONE_OP, Reader, may_have_formulas
from tritonamp.casts.written.scores import masked_softmaxes
from tritonamp.casts.written.trees import (
    call,
    changed_names,
    changes,
    loads,
    name_node,
    placed,
    private_names,
    target_and_value,
)

_SCOPES = (
    ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda,
    ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp,
)  # fmt: skip

IsActivation = Callable[[str], bool]
"""Tells whether an attribute of ``self`` is a module that computes an activation."""


class Site(NamedTuple):
    """A formula in a function.

    Attributes:
        line: its line in the file.
        module: attribute of ``self`` that computes its activation; "": none.
        is_result: whether it is FP32 only where the function's result is that of a model.
    """

    line: int
    module: str = ""
    is_result: bool = False


class Rewritten(NamedTuple):
    """A function's code with calls of ``ops``.

    Attributes:
        code: the code.
        sites: the formulas in it.
        read: attributes of ``self`` whose modules compute probabilities that code reads.
        returned: attributes of ``self`` whose modules compute probabilities that it returns.
    """

    code: CodeType
    sites: tuple[Site, ...]
    read: frozenset[str] = frozenset()
    returned: frozenset[str] = frozenset()


def rewritten(
    function: FunctionType,
    is_activation: IsActivation,
    probabilities: Mapping[str, str] = MappingProxyType({}),
    is_result: bool = False,
) -> Rewritten | None:
    """Return the code of a function in which formulas are one op; None if it has none.

    Args:
        function: the function.
        is_activation: tells which attributes of ``self`` are modules with an activation.
        probabilities: attributes of ``self`` that are modules with probabilities, and their kind.
        is_result: whether the function's result is that of a model.
    """
    names = function.__code__.co_names
    calls_modules = any(n in probabilities or is_activation(n) for n in names)
    try:
        if not calls_modules and not may_have_formulas(function):
            return None
        source = source_of(function)
        wide = widened(function, source.tree, probabilities, is_result)
        tree, lines = masked_softmaxes(function, wide.tree)
        sites = [Site(line) for line in (*wide.read, *lines)]
        sites += [Site(line, is_result=True) for line in wide.returned]
        rewriter = _Rewriter(function, tree, is_activation)
        tree = copy.copy(tree)
        tree.body = rewriter.block(tree.body)
        sites += rewriter.sites
        modules = wide.modules_read, wide.modules_returned
        if not sites:
            return Rewritten(function.__code__, (), *modules) if any(modules) else None
        return Rewritten(source.compiled(tree, function.__code__), tuple(sites), *modules)
    except Exception:  # Unproved, or source that is missing or has changed
        return None


class _Known(NamedTuple):
    """The value of a local name, computed by statements in a row."""

    value: Any  # a number or a ``Polynomial``
    first: int  # index of the first of the statements


class _Rewriter:
    """Replaces activations by calls of ``ops``. No other code changes."""

    def __init__(
        self, function: FunctionType, tree: ast.FunctionDef, is_activation: IsActivation
    ) -> None:
        self.function, self.is_activation = function, is_activation
        self.owner = next(iter(function.__code__.co_varnames), "")  # "self" in most methods
        self.loads, self.private = loads([tree]), private_names(function, tree)
        self.changed = changed_names(tree)
        self.sites: list[Site] = []

    def block(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        """Return a block in which activations are one op.

        An activation may read names that the statements before it assign. If nothing else reads
        them, the statements are skipped together with the last one.
        """
        before: list[ast.stmt] = []  # statements of ``result`` before their parts were replaced
        result: list[ast.stmt] = []
        known: dict[str, _Known] = {}
        for statement in statements:
            count = len(self.sites)
            visited = self.visit(copy.deepcopy(statement))
            target, value = target_and_value(statement)
            used = [known[n] for n in loads([value] if value else []) if n in known]
            first = min((k.first for k in used), default=len(result))
            before.append(statement)
            result.append(visited)
            if value is None or len(self.sites) > count:  # it may do anything
                known.clear()
                continue
            if used and self._is_apart(before[first:]):
                row = self._row(statement, value, known, result[first:])
                if row is not None:
                    before[first:], result[first:] = [row], [row]
                    known.clear()
                    continue
            reader = self._reader(known)
            read = _or_none(lambda: reader.read(value))  # noqa: B023
            if target is None or read is None or reader.opaque:
                known.clear()
            else:
                known[target] = _Known(read, first)
        return result

    def _is_apart(self, row: list[ast.stmt]) -> bool:
        """Return whether nothing else reads the names that a row assigns before its end."""
        inside = loads(row)
        names = [target_and_value(statement)[0] for statement in row[:-1]]
        return all(name in self.private and self.loads[name] == inside[name] for name in names)

    def _row(
        self,
        statement: ast.stmt,
        value: ast.expr,
        known: Mapping[str, _Known],
        plain: list[ast.stmt],
    ) -> ast.stmt | None:
        """Return one statement for a row whose last one computes an activation."""
        reader = self._reader(known)
        found = _or_none(lambda: terms.activation(reader.read(value)))
        if found is None or reader.opaque or found.x in self.changed:
            return None
        operands = [name_node(found.x), *([] if found.gate is None else [name_node(found.gate)])]
        one_op: Any = copy.copy(statement)
        one_op.value = call("activation", _spec(found), *operands)
        self.sites.append(Site(statement.lineno))
        return placed(ast.If(call("takes", _spec(found), *operands), [one_op], plain), plain[0])

    def _reader(self, known: Mapping[str, _Known]) -> Reader:
        return Reader(self.function, {name: k.value for name, k in known.items()})

    def visit(self, node: Any) -> Any:
        """Return a part of the tree in which activations are one op; it may be changed in place."""
        if isinstance(node, list):
            is_block = bool(node) and isinstance(node[0], ast.stmt)
            return self.block(node) if is_block else [self.visit(part) for part in node]
        if not isinstance(node, ast.AST) or isinstance(node, _SCOPES):
            return node
        if isinstance(node, (ast.BinOp, ast.Call)):
            replaced = self._one_op(node) or self._by_module(node)
            if replaced is not None:
                return placed(replaced, node)
        for name, value in ast.iter_fields(node):
            setattr(node, name, self.visit(value))
        return node

    def _one_op(self, node: ast.expr) -> ast.expr | None:
        """Return a call of ``ops.run`` for an expression that is an activation."""
        reader = self._reader({})
        if isinstance(node, ast.Call) and reader.object(node.func) in ONE_OP:
            return None
        found = _or_none(lambda: terms.activation(reader.read(node)))
        # the backward of the one op needs x, that of separate ops may not
        if found is None or found.x in self.changed:
            return None
        self.sites.append(Site(node.lineno))
        names = [name for name in (found.x, found.gate) if name is not None]
        # expressions in their order in the code; names may follow, because they have no effects
        order = sorted(names, key=[*reader.opaque, *names].index)
        places = {id(expression): name for name, expression in reader.opaque.items()}
        plain = ast.Lambda(_arguments(order), _with_names(node, places))
        operands = [
            self.visit(reader.opaque[name]) if name in reader.opaque else name_node(name)
            for name in order
        ]
        return call("run", plain, _spec(found), ast.Constant(order.index(found.x)), *operands)

    def _by_module(self, node: ast.expr) -> ast.expr | None:
        """Return an expression for ``self.act(x) * gate``, in either order."""
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
            return None
        for place, (product, gate) in enumerate(((node.left, node.right), (node.right, node.left))):
            match product:
                case ast.Call(
                    func=ast.Attribute(value=ast.Name(id=owner), attr=name) as module,
                    args=[x],
                    keywords=[],
                ) if (
                    owner == self.owner
                    and self.is_activation(name)
                    and not isinstance(x, ast.Starred)
                ):
                    if changes(gate):  # it may change x, which the activation has read before
                        continue
                    self.sites.append(Site(node.lineno, name))
                    x, gate = self.visit(copy.deepcopy(x)), self.visit(copy.deepcopy(gate))
                    operands = (x, gate) if place == 0 else (gate, x)
                    one_op = call("gated", module, ast.Constant(place), *operands)
                    return ast.IfExp(call("of_module", module), one_op, node)
        return None


def _or_none(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception:  # Unproved, or an error of code that could not run either
        return None


def _with_names(node: Any, names: Mapping[int, str]) -> Any:
    """Return a copy of a tree in which names replace the expressions with the given ids."""
    if id(node) in names:
        return name_node(names[id(node)])
    if isinstance(node, list):
        return [_with_names(part, names) for part in node]
    if not isinstance(node, ast.AST):
        return node
    result = copy.copy(node)
    for name, value in ast.iter_fields(node):
        setattr(result, name, _with_names(value, names))
    return result


def _spec(found: terms.Activation) -> ast.expr:
    return ast.Tuple([ast.Constant(v) for v in (found.kind, found.a, found.b)], ast.Load())


def _arguments(names: Iterable[str]) -> ast.arguments:
    return ast.arguments([], [ast.arg(name) for name in names], None, [], [], None, [])
