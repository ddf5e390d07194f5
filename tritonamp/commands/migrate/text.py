"""A Python text with its tree: where each node stands, and what is around it."""

import ast
import io
import tokenize
from collections.abc import Iterator

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Source:
    """The text of a file, and its tree.

    Attributes:
        text: as in the file, line ends included.
        newline: the line end of the file.
        tree, nodes: the tree of the text, and all its nodes.
        parents: the node around each node.
    """

    def __init__(self, text: str) -> None:
        """Parse ``text``; raises SyntaxError or ValueError where it is not Python 3."""
        if "\r" in text.replace("\r\n", ""):
            raise ValueError("it has carriage returns without line feeds")
        self.text = text
        self.newline = "\r\n" if "\r\n" in text else "\n"
        self.tree = ast.parse(text)
        self.nodes = list(ast.walk(self.tree))
        self.parents = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}
        self._lines = text.split("\n")
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line) + 1)

    def start(self, node: ast.AST) -> int:
        """Return where ``node`` begins, in characters; a decorated function at its ``def``."""
        return self._offset(node.lineno, node.col_offset)  # type: ignore[attr-defined]

    def end(self, node: ast.AST) -> int:
        """Return where ``node`` ends."""
        return self._offset(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def segment(self, node: ast.AST) -> str:
        """Return the text of ``node``."""
        return self.text[self.start(node) : self.end(node)]

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes around ``node``, the nearest first."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def statement(self, node: ast.AST) -> ast.stmt:
        """Return the statement that ``node`` is, or is in."""
        return next(n for n in (node, *self.around(node)) if isinstance(n, ast.stmt))

    def block(self, statement: ast.AST) -> list[ast.stmt]:
        """Return the list of statements that ``statement`` is one of."""
        fields = [value for _, value in ast.iter_fields(self.parents[statement])]
        return next(value for value in fields if isinstance(value, list) and statement in value)

    def scope(self, node: ast.AST) -> ast.AST:
        """Return the function, lambda, class or module whose names ``node`` sees first."""
        inner = node
        for outer in self.around(node):
            if isinstance(outer, ast.arguments) and isinstance(inner, ast.arg):
                continue  # parameters are inside of their function, defaults are not
            if isinstance(outer, Function | ast.ClassDef | ast.Lambda):
                body = outer.body if isinstance(outer.body, list) else [outer.body]
                if inner in body or isinstance(inner, ast.arg):
                    return outer
            inner = outer
        return self.tree

    def line_start(self, offset: int) -> int:
        """Return where the line of ``offset`` begins."""
        return self.text.rfind("\n", 0, offset) + 1

    def line_end(self, offset: int) -> int:
        """Return where the line of ``offset`` ends, behind its line end."""
        found = self.text.find("\n", offset)
        return len(self.text) if found < 0 else found + 1

    def indentation(self, statement: ast.stmt) -> str:
        """Return the white space before the line of ``statement``."""
        start = self.start(statement)
        line = self.text[self.line_start(start) : start]
        return line[: len(line) - len(line.lstrip())]

    def comments(self, start: int, end: int) -> list[str]:
        """Return the comments that begin between two offsets."""
        if "#" not in self.text[start:end]:
            return []
        return [
            token.string
            for token in tokenize.generate_tokens(io.StringIO(self.text, newline="").readline)
            if token.type == tokenize.COMMENT
            and start <= self._starts[token.start[0] - 1] + token.start[1] < end
        ]

    def _offset(self, line: int, column: int) -> int:
        """Return a place of the tree, whose columns are bytes, in characters."""
        text = self._lines[line - 1]
        if not text.isascii():
            column = len(text.encode()[:column].decode())
        return self._starts[line - 1] + column
