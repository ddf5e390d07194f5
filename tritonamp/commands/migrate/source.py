"""A Python text with its tree: the place and surroundings of each node, the meanings of names."""

import ast
from collections import defaultdict
from collections.abc import Iterator

Function = ast.FunctionDef | ast.AsyncFunctionDef
Import = ast.Import | ast.ImportFrom


class Source:
    """The text of a file, and its tree.

    Attributes:
        text: the text of the file, with its line ends.
        newline: the line end of the file.
        tree, nodes: the tree of the text, and all its nodes.
        parents: the node around each node.
        meanings: the dotted names of the imports that bind each name, in any scope; "" if anything
            else binds it.
    """

    def __init__(self, text: str) -> None:
        """Parse ``text``. Raise SyntaxError if it is not Python 3."""
        if "\r" in text.replace("\r\n", ""):
            raise SyntaxError("it has carriage returns without line feeds")
        self.text = text
        self.newline = "\r\n" if "\r\n" in text else "\n"
        self.tree = ast.parse(text)
        self.nodes = list(ast.walk(self.tree))
        self.parents = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}
        self._lines = text.split("\n")
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line) + 1)
        self.meanings: dict[str, set[str]] = defaultdict(set)
        for node in self.nodes:
            for name, meaning in _bound(node):
                self.meanings[name].add(meaning)

    def start(self, node: ast.AST) -> int:
        """Return the offset of ``node`` in characters; of a decorated function, that of ``def``."""
        return self._offset(node.lineno, node.col_offset)  # type: ignore[attr-defined]

    def end(self, node: ast.AST) -> int:
        """Return the offset behind ``node``."""
        return self._offset(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def segment(self, node: ast.AST) -> str:
        """Return the text of ``node``."""
        return self.text[self.start(node) : self.end(node)]

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield ``node`` and the nodes around it, the nearest first."""
        yield node
        while node in self.parents:
            node = self.parents[node]
            yield node

    def statement(self, node: ast.AST) -> ast.stmt:
        """Return the innermost statement that contains ``node``, which may be ``node`` itself."""
        return next(outer for outer in self.around(node) if isinstance(outer, ast.stmt))

    def block(self, statement: ast.AST) -> list[ast.stmt]:
        """Return the list of statements that contains ``statement``."""
        fields = [value for _, value in ast.iter_fields(self.parents[statement])]
        return next(value for value in fields if isinstance(value, list) and statement in value)

    def scope(self, node: ast.AST) -> ast.AST:
        """Return the innermost function, lambda, class or module in which ``node`` is evaluated."""
        inner = node
        for outer in self.around(node):
            if isinstance(outer, ast.arguments) and isinstance(inner, ast.arg):
                continue  # parameters belong to their function, their defaults do not
            if isinstance(outer, Function | ast.ClassDef | ast.Lambda) and outer is not node:
                body = outer.body if isinstance(outer.body, list) else [outer.body]
                if inner in body or isinstance(inner, ast.arg):
                    return outer
            inner = outer
        return self.tree

    def line_start(self, offset: int) -> int:
        """Return the offset of the first character in the line of ``offset``."""
        return self.text.rfind("\n", 0, offset) + 1

    def line_end(self, offset: int) -> int:
        """Return the offset behind the line end of the line of ``offset``."""
        found = self.text.find("\n", offset)
        return len(self.text) if found < 0 else found + 1

    def indentation(self, statement: ast.stmt) -> str:
        """Return the white space before the line of ``statement``."""
        line = self.text[self.line_start(self.start(statement)) : self.start(statement)]
        return line[: len(line) - len(line.lstrip())]

    def _offset(self, line: int, column: int) -> int:
        """Return a position of the tree, whose columns count bytes, as an offset in characters."""
        text = self._lines[line - 1]
        if not text.isascii():
            column = len(text.encode()[:column].decode())
        return self._starts[line - 1] + column

    def qualified(self, node: ast.AST | None) -> str:
        """Return the dotted name of the object behind an imported name, such as torch.optim.SGD."""
        if isinstance(node, ast.Attribute):
            base = self.qualified(node.value)
            return base and f"{base}.{node.attr}"
        return self.meaning(node.id) if isinstance(node, ast.Name) else ""

    def meaning(self, name: str) -> str:
        """Return the dotted name of the only meaning of ``name`` in the file; "" without one."""
        meanings = self.meanings.get(name, set())
        return next(iter(meanings)) if len(meanings) == 1 else ""


def _bound(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield each name that ``node`` itself binds, and the dotted name that it imports or ""."""
    match node:
        case ast.Import():
            for alias in node.names:
                first = alias.name.split(".")[0]
                yield (alias.asname, alias.name) if alias.asname else (first, first)
        case ast.ImportFrom():
            for alias in node.names:
                full = "" if node.level else f"{node.module}.{alias.name}"
                yield alias.asname or alias.name, full
        case ast.Name(ctx=ast.Store() | ast.Del()):
            yield node.id, ""
        case ast.arg():
            yield node.arg, ""
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.ExceptHandler():
            yield node.name or "", ""
