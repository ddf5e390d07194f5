"""One file on its way: what is known of it, what changes and why, what is not understood."""

import ast
from dataclasses import dataclass

from tritonamp.commands.migrate.reading.edits import Edits
from tritonamp.commands.migrate.reading.flow import Flow
from tritonamp.commands.migrate.reading.scopes import Scopes
from tritonamp.commands.migrate.reading.source import Source


@dataclass(frozen=True, order=True)
class Note:
    """A line of the file as it was, and what there is to say about it."""

    line: int
    text: str


@dataclass(frozen=True)
class Conversion:
    """What became of a text.

    Attributes:
        before: the text as it was.
        after: the text rewritten; as it was where there are todos, or nothing to do.
        changes: a reason for each edit.
        todos: what is not understood, and what to do by hand.
    """

    before: str
    after: str
    changes: tuple[Note, ...] = ()
    todos: tuple[Note, ...] = ()

    @property
    def converted(self) -> bool:
        """Whether the text changed."""
        return self.after != self.before


class Script:
    """A text, what is known about it, and the edits and notes so far.

    Attributes:
        source, scopes, flow: the text, its variables, and which of them are the same.
        edits, changes, todos: what changes, why, and what is not understood.
        needs_tritonamp, needs_torch: whether the new text names these modules.
        dropped: imported names that go away.
        taken: names that the handle takes from modules.
        moved: the module that an import statement names from now on.
    """

    def __init__(self, text: str) -> None:
        """Parse ``text``; raises SyntaxError or ValueError where it is not Python 3."""
        self.source = Source(text)
        self.scopes = Scopes(self.source)
        self.flow = Flow(self.source, self.scopes)
        self.edits = Edits(self.source)
        self.changes: set[Note] = set()
        self.todos: set[Note] = set()
        self.needs_tritonamp = False
        self.needs_torch = False
        self.dropped: set[ast.alias] = set()
        self.taken: set[str] = set()
        self.moved: dict[ast.stmt, str] = {}

    def why(self, node: ast.AST, reason: str) -> None:
        """Note the reason of an edit at ``node``."""
        self.changes.add(Note(node.lineno, reason))  # type: ignore[attr-defined]

    def refuse(self, node: ast.AST, what: str, by_hand: str) -> None:
        """Note what is not understood at ``node``, and what to do about it by hand."""
        self.todos.add(Note(node.lineno, f"{what}. By hand: {by_hand}"))  # type: ignore[attr-defined]

    def qualified(self, node: ast.AST | None) -> str | None:
        """Return the dotted name that ``node`` stands for by the file's imports."""
        return self.scopes.qualified(node)

    def replace(self, node: ast.AST, text: str, reason: str) -> None:
        """Put ``text`` in the place of ``node``; comments inside it move above the statement."""
        start, end = self.source.start(node), self.source.end(node)
        line = self.source.line_start(self.source.start(self.source.statement(node)))
        lead = self.source.indentation(self.source.statement(node))
        for comment in self.source.comments(start, end):
            if comment not in text:
                self.edits.insert(line, f"{lead}{comment}{self.newline}")
        self.edits.replace(start, end, text)
        self.why(node, reason)

    def delete(self, statement: ast.stmt, reason: str) -> None:
        """Take ``statement`` out."""
        self.edits.delete(statement)
        self.why(statement, reason)

    @property
    def newline(self) -> str:
        """The line end of the file."""
        return self.source.newline

    def imports(self, module: str) -> str | None:
        """Return what the whole file calls ``module``; None where it is not imported at the top."""
        for node in self.source.tree.body:
            for alias in node.names if isinstance(node, ast.Import) else ():
                if alias.name == module:
                    return alias.asname or module
        return None

    def torch(self) -> str:
        """Return what the file calls torch; it is imported where it is not."""
        name = self.imports("torch")
        self.needs_torch |= name is None
        return name or "torch"

    def calls(self, *names: str) -> list[ast.Call]:
        """Return the calls of functions by their dotted names, in order."""
        found = [
            node
            for node in self.source.nodes
            if isinstance(node, ast.Call) and self.qualified(node.func) in names
        ]
        return sorted(found, key=self.source.start)

    def given(self, call: ast.Call) -> str:
        """Return the arguments of ``call`` as they stand, edited."""
        return ", ".join(
            self.edits.text(argument)
            for argument in sorted((*call.args, *call.keywords), key=self.source.start)
        )
