"""Replacements of spans of a text."""

import ast

from tritonamp.commands.migrate.reading.source import Source


class Edits:
    """Replacements that do not overlap; one around others takes their place."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._replaced: dict[tuple[int, int], str] = {}

    def __bool__(self) -> bool:
        return bool(self._replaced)

    def replace(self, start: int, end: int, text: str) -> None:
        """Put ``text`` in the place of a span; what was to be replaced in it is dropped."""
        for inner in [span for span in self._replaced if start <= span[0] < end < span[1]]:
            end, text = inner[1], text + self.source.newline  # its last line, with the line end
        for inner in [span for span in self._replaced if start <= span[0] and span[1] <= end]:
            if inner[0] < inner[1] or start < inner[0]:
                del self._replaced[inner]
        self._replaced[start, end] = text

    def insert(self, offset: int, text: str) -> None:
        """Put ``text`` before what stands at ``offset``, and behind what was inserted there."""
        self._replaced[offset, offset] = self._replaced.get((offset, offset), "") + text

    def delete(self, statement: ast.stmt) -> None:
        """Take ``statement`` out, with its line where it has one to itself."""
        source = self.source
        start, end = source.start(statement), source.end(statement)
        block = source.block(statement)
        line, after = source.line_start(start), source.line_end(end)
        alone = not source.text[line:start].strip()
        rest = source.text[end:after].strip()
        if not alone or (rest and not rest.startswith("#")) or self._is_last_of(block, statement):
            self.replace(start, end, "pass")
        else:
            self.replace(line, after, "")

    def _is_last_of(self, block: list[ast.stmt], statement: ast.stmt) -> bool:
        """Return whether without ``statement`` nothing would be left of its block."""
        others = [other for other in block if other is not statement]
        return all(not self.text(other).strip() for other in others)

    def covers(self, node: ast.AST) -> bool:
        """Return whether ``node`` is within what is replaced."""
        start, end = self.source.start(node), self.source.end(node)
        return any(first <= start and end <= last for first, last in self._replaced)

    def text(self, node: ast.AST) -> str:
        """Return the text of ``node``, edited."""
        return self.between(self.source.start(node), self.source.end(node))

    def between(self, start: int, end: int) -> str:
        """Return the text of a span, edited."""
        spans = sorted(self._replaced)
        if any(first < start and end <= last for first, last in spans):
            return ""  # within what is taken out
        pieces, position = [], start
        for first, last in spans:
            if position <= first and last <= end:
                pieces += [self.source.text[position:first], self._replaced[first, last]]
                position = last
            elif first <= position < last <= end:  # a deleted line begins before its statement
                pieces.append(self._replaced[first, last])
                position = last
            elif start <= first < end < last and position <= first:
                pieces += [self.source.text[position:first], self._replaced[first, last]]
                position = end
        return "".join(pieces) + self.source.text[position:end]

    def render(self) -> str:
        """Return the whole text, edited."""
        return self.between(0, len(self.source.text))
