"""Markdown of a page, as a terminal shows it."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from tritonamp.diagnosis.terminal import fitted, paragraph

_CODE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
# a blank line, or the start of the next item of a list
_BREAK = re.compile(r"(\n\s*\n|\A\n+|\n+\Z|\n(?=- |\d+\. ))")
_LINK = re.compile(r"\[([^\]]+)\]\(([^)]+)\)")


def shown(text: str, page: Path, titles: Iterable[str] = ()) -> str:
    """Return a text of a page with lines that fit the terminal, and the targets of its links below.

    Code stays as it is.

    Args:
        text: Markdown.
        page: path of the page.
        titles: headings of the page, which are arguments of ``explain``.
    """
    links = {_words(link[1]): link[2] for link in _LINK.finditer(_CODE.sub("", text))}
    parts = [part if _CODE.match(part) else _prose(part) for part in _CODE.split(text)]
    if not links:
        return "".join(parts)
    known = {_anchor(title): title for title in titles}
    more = [f"- {name}: {_place(target, page, known)}" for name, target in links.items()]
    return "\n".join(["".join(parts), "", "More:", *map(fitted, more)])


def _prose(text: str) -> str:
    parts = _BREAK.split(_LINK.sub(r"\1", text))
    is_kept = [not part.strip() or part.startswith("|") for part in parts]  # blanks, or a table
    return "".join(
        part if kept else paragraph(part) for part, kept in zip(parts, is_kept, strict=True)
    )


def _place(target: str, page: Path, known: Mapping[str, str]) -> str:
    """Return the file of a link, or the command that shows a section of its own page."""
    file, _, anchor = target.partition("#")
    if "://" in target:
        return target
    if not file and anchor in known:
        title = re.sub(r'["`$\\]', "", known[anchor])
        return f'python -m tritonamp explain "{title}"'
    path = (page.parent / (file or page.name)).resolve()
    place = str(path)
    if page.exists() and not path.exists():  # an installed package has no pages outside of it
        place = f"{re.sub(r'^(?:[.][.]/)+', '', file)} of a checkout"
    return f"{place}{f' #{anchor}' if anchor else ''}"


def _anchor(title: str) -> str:
    """Return the part behind "#" in a link to a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _words(text: str) -> str:
    return " ".join(text.split())
