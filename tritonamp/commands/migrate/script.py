"""One file: the edits of its text with their reasons, and the notes."""

import ast
from typing import NamedTuple

from tritonamp.commands.migrate.source import Source


class Change(NamedTuple):
    """Whole lines of the file, and the lines to write instead.

    Attributes:
        line: number of the first old line; without old lines, of the line to insert after.
        old: the lines of the file; empty for an insertion.
        new: the lines to write; empty where the old ones are taken out.
        reason: reason for the change.
    """

    line: int
    old: list[str]
    new: list[str]
    reason: str


class Script(Source):
    """A text, the edits of exact spans so far, and the notes.

    Attributes:
        notes: numbers of lines that are not understood, each with a text about the line.
        is_list: whether the edits touch a training loop, so that a person has to make them.
    """

    def __init__(self, text: str) -> None:
        """Parse ``text``. Raise SyntaxError if it is not Python 3."""
        super().__init__(text)
        self.notes: set[tuple[int, str]] = set()
        self.is_list = False
        self._edits: dict[tuple[int, int], tuple[str, str]] = {}  # span to text and reason
        self._added: dict[int, tuple[str, str]] = {}  # the same for whole lines

    def note(self, node: ast.AST, what: str, by_hand: str) -> None:
        """Note that the line of ``node`` is not understood, with advice for a person."""
        self.notes.add((node.lineno, f"{what}. By hand: {by_hand}"))  # type: ignore[attr-defined]

    def replace(self, node: ast.AST, text: str, reason: str) -> None:
        """Write ``text`` instead of ``node``."""
        if text != self.segment(node):
            self._replace(self.start(node), self.end(node), text, reason)

    def delete(self, statement: ast.stmt, reason: str) -> None:
        """Take out the lines of ``statement``; write ``pass`` if it shares a line."""
        start, end = self.start(statement), self.end(statement)
        first, last = self.line_start(start), self.line_end(end)
        if self.text[first:start].strip() or self.text[end:last].split("#")[0].strip():
            self._replace(start, end, "pass", reason)
        else:
            self._replace(first, last, "", reason)

    def insert(self, offset: int, text: str, reason: str) -> None:
        """Write ``text`` before the text at ``offset``, and behind earlier insertions there."""
        before, _ = self._edits.get((offset, offset), ("", ""))
        self._edits[offset, offset] = before + text, reason

    def insert_line(self, offset: int, lines: str, reason: str) -> None:
        """Write ``lines`` once at ``offset``, where a line begins or the file ends."""
        before, _ = self._added.get(offset, ("", ""))
        if lines not in before:
            self._added[offset] = before + lines + self.newline, reason

    @property
    def after(self) -> str:
        """The whole text after all edits."""
        added = dict[tuple[int, int], tuple[str, str]]()
        for at, (text, reason) in self._added.items():
            added[at, at] = self.newline * self._unended(at) + text, reason
        return self._between(0, len(self.text) + 1, self._edits | added)

    def changes(self) -> list[Change]:
        """Return the lines that change, in the order of the file."""
        found, spans = [], list[tuple[int, int]]()
        for at, (text, reason) in self._added.items():
            line = self.text.count("\n", 0, at) + self._unended(at)
            found.append(Change(line, [], _lines(text), reason))
        for start, end in sorted(self._edits):
            start, end = self.line_start(start), self.line_end(max(start, end - 1))
            if spans and start < spans[-1][1]:
                start, end = spans[-1][0], max(end, spans.pop()[1])
            spans.append((start, end))
        for start, end in spans:
            reasons = [self._edits[at][1] for at in sorted(self._edits) if start <= at[0] < end]
            old, new = self.text[start:end], self._between(start, end, self._edits)
            line = self.text.count("\n", 0, start) + 1
            found.append(Change(line, _lines(old), _lines(new), "; ".join(dict.fromkeys(reasons))))
        return sorted(found, key=lambda change: (change.line, not change.old))

    def _unended(self, offset: int) -> bool:
        """Return whether the line before ``offset`` has no line end."""
        return self.text[offset - 1 : offset] not in ("", "\n")

    def _replace(self, start: int, end: int, text: str, reason: str) -> None:
        for first, last in [*self._edits]:
            if (start < first and last < end) or (first < last and start <= first and last <= end):
                del self._edits[first, last]
        self._edits[start, end] = text, reason

    def _between(self, start: int, end: int, edits: dict[tuple[int, int], tuple[str, str]]) -> str:
        pieces, position = [], start
        for (first, last), (text, _) in sorted(edits.items()):
            if position <= first < end:
                pieces += [self.text[position:first], text]
                position = last
        return "".join(pieces) + self.text[position:end]


def _lines(text: str) -> list[str]:
    """Return the lines of ``text`` without their ends."""
    lines = text.replace("\r\n", "\n").split("\n")
    return lines if lines[-1] else lines[:-1]
