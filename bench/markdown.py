"""Markdown of the pages: tables, and paragraphs."""

import textwrap
from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def paragraph(text: str) -> str:
    return textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False)


def multiple(value: float | None) -> str:
    """Return a peer's time relative to ours as text, in bold below 1."""
    if value is None:
        return ""
    return f"{value:.2f}x" if value >= 1 else f"**{value:.2f}x**"
