"""One file on its way: what is known of it, what changes and why, what is not understood."""

import ast
from dataclasses import dataclass

from tritonamp.commands.migrate.names import Names


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
        todos: what is not understood, and what to write in each line of the loop by hand.
    """

    before: str
    after: str
    changes: tuple[Note, ...] = ()
    todos: tuple[Note, ...] = ()

    @property
    def converted(self) -> bool:
        """Whether the text changed."""
        return self.after != self.before


class Script(Names):
    """A text, the variables in it, and the edits and notes so far.

    Edits replace exact spans; they do not overlap, and one around others takes their place.

    Attributes:
        changes, todos: the reason of each edit, and what is not understood.
        needs: modules that the new text names, each with a reason.
        dropped: imported names that go away.
        moved: the module that an import statement names from now on.
        shadowed: names of imports that the handle takes.
    """

    def __init__(self, text: str) -> None:
        """Parse ``text``; raises SyntaxError or ValueError where it is not Python 3."""
        super().__init__(text)
        self.changes: set[Note] = set()
        self.todos: set[Note] = set()
        self.needs: dict[str, str] = {}
        self.dropped: set[ast.alias] = set()
        self.moved: dict[ast.stmt, str] = {}
        self.shadowed: set[str] = set()
        self._replaced: dict[tuple[int, int], str] = {}

    def why(self, node: ast.AST, reason: str) -> None:
        """Note the reason of an edit at ``node``."""
        self.changes.add(Note(node.lineno, reason))  # type: ignore[attr-defined]

    def refuse(self, node: ast.AST, what: str, by_hand: str) -> None:
        """Note a to-do at ``node``: what is not understood, and what to write by hand."""
        self.todos.add(Note(node.lineno, f"{what}. By hand: {by_hand}"))  # type: ignore[attr-defined]

    def replace(self, node: ast.AST, text: str, reason: str) -> None:
        """Put ``text`` in the place of ``node``; comments inside it move above the statement."""
        start, end = self.start(node), self.end(node)
        statement = self.statement(node)
        line, lead = self.line_start(self.start(statement)), self.indentation(statement)
        for comment in self.comments(start, end):
            if comment not in text:
                self.insert(line, f"{lead}{comment}{self.newline}")
        self._replace(start, end, text)
        self.why(node, reason)

    def delete(self, statement: ast.stmt, reason: str) -> None:
        """Take ``statement`` out, with its line where it has one to itself."""
        start, end = self.start(statement), self.end(statement)
        line, after = self.line_start(start), self.line_end(end)
        rest = self.text[end:after].strip()
        alone = not self.text[line:start].strip() and (not rest or rest.startswith("#"))
        others = [other for other in self.block(statement) if other is not statement]
        if alone and not all(self.covers(s) and not self.edited(s).strip() for s in others):
            self._replace(line, after, "")
        else:
            self._replace(start, end, "pass")
        self.why(statement, reason)

    def insert(self, offset: int, text: str) -> None:
        """Put ``text`` before what stands at ``offset``, and behind what was inserted there."""
        self._replaced[offset, offset] = self._replaced.get((offset, offset), "") + text

    def insert_line(self, before: ast.stmt, line: str, reason: str) -> None:
        """Put a line before a statement; refuse where the statement shares its line."""
        start = self.start(before)
        first = self.line_start(start)
        lead = self.text[first:start]
        if lead.strip():
            self.refuse(before, "a statement that shares its line", "give it a line of its own")
        self.insert(first, f"{lead}{line}{self.newline}")
        self.why(before, reason)

    def covers(self, node: ast.AST) -> bool:
        """Return whether ``node`` is within a replaced span."""
        start, end = self.start(node), self.end(node)
        return any(first <= start and end <= last for first, last in self._replaced)

    def edited(self, node: ast.AST) -> str:
        """Return the text of ``node``, edited; "" where it is taken out with its line."""
        start, end = self.start(node), self.end(node)
        taken_out = any(first < start and end <= last for first, last in self._replaced)
        return "" if taken_out else self._between(start, end)

    def render(self) -> str:
        """Return the whole text, edited."""
        return self._between(0, len(self.text))

    def _replace(self, start: int, end: int, text: str) -> None:
        for first, last in [*self._replaced]:
            if start <= first and last <= end and (first < last or start < first):
                del self._replaced[first, last]
        self._replaced[start, end] = text

    def _between(self, start: int, end: int) -> str:
        pieces, position = [], start
        for first, last in sorted(self._replaced):
            if position <= first and last <= end:
                pieces += [self.text[position:first], self._replaced[first, last]]
                position = last
        return "".join(pieces) + self.text[position:end]

    def torch(self) -> str:
        """Return what the file calls torch; it is imported where it is not."""
        self.needs["torch"] = "the new names begin with it"
        return self.module("torch") or "torch"
