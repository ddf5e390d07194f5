"""The sections of ``diagnosis/errors.md``, and the search for the section of a pasted text."""

import re
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import NamedTuple

# a "#" inside a program is a comment, not a heading
_SECTION = re.compile(r"^## (.+)\n((?:```[^`]*^```\n|(?!##? ).*\n)*)", re.MULTILINE)
_ALSO = re.compile(r"\AAlso: (.*?)\n\n", re.DOTALL)
_CODE = re.compile(r"`([^`]+)`")

_COLORS = re.compile(r"\x1b\[[0-9;]*m")
_NODE = re.compile(r"\b\w*backward\d*")  # a node of the autograd graph, such as MulBackward0
_DTYPE = re.compile(
    r"\b(?:c10::|at::|torch\.(?:cuda\.)?)?"
    r"(?:half|float|bfloat16|float16|float32|fp16|bf16|fp32)(?:tensor)?\b"
)
_SHORT = len("skipped of")  # the start of each line about a skip, which counts if nothing else does
_PART = len("nan")  # the shortest part of an error text that is looked for: not the "t" of T4
_WORD = re.compile(r"[^\W\d_]+")


class Section(NamedTuple):
    """The section of ``errors.md`` about one error.

    Attributes:
        title: the error text.
        texts: all error texts of this section, the title first.
        body: Markdown, without the title.
    """

    title: str
    texts: Sequence[str]
    body: str


def sections() -> list[Section]:
    """Read all sections, in the order of the page."""
    page = resources.files("tritonamp").joinpath("diagnosis", "errors.md").read_text("utf-8")
    return [_section(title, body) for title, body in _SECTION.findall(page)]


def _section(title: str, body: str) -> Section:
    body = body.strip()
    also = _ALSO.match(body)
    texts = [title, *(_CODE.findall(also[1]) if also else ())]
    return Section(title, [" ".join(text.split()) for text in texts], body)


def words(text: str) -> str:
    """Return the words of a text, separated by blanks.

    Case, punctuation, numbers and terminal colours are removed. One word stands for all dtypes of
    a training, and one for all nodes of the autograd graph.
    """
    text = _COLORS.sub("", text).casefold()
    text = _DTYPE.sub(" dtype ", _NODE.sub(" backward ", text))
    return " ".join(_WORD.findall(text))


def find(text: str, pages: Sequence[Section]) -> list[Section]:
    """Return the sections whose error texts are in ``text``, the last error first.

    The last one counts most, because a traceback ends with its error. If ``text`` is a part of the
    error texts of one section only, this section is returned.
    """
    given = words(text)
    found = sorted(_places(given, pages), reverse=True)
    found = [place for place in found if place[1] > _SHORT] or found
    if found:
        return [pages[index] for index in dict.fromkeys(index for _, _, index in found)]
    if len(given) < _PART:
        return []
    holders = [page for page in pages if any(_holds(known, given) for known in _known(page))]
    return holders if len(holders) == 1 else []


def _known(page: Section) -> list[str]:
    return [words(text) for text in page.texts]


def _places(given: str, pages: Sequence[Section]) -> Iterator[tuple[int, int, int]]:
    """Yield the last end of each known error text, its length, and its section."""
    for index, page in enumerate(pages):
        for known in _known(page):
            if _holds(given, known):
                yield f" {given} ".rfind(f" {known} ") + len(known), len(known), index


def _holds(text: str, part: str) -> bool:
    return f" {part} " in f" {text} "
