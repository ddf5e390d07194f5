"""The sections of ``diagnosis/errors.md``, and which of them a pasted text belongs to."""

import re
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from importlib import resources
from typing import NamedTuple

# a "#" inside a program is a comment, and no heading
_SECTION = re.compile(r"^## (.+)\n((?:```[^`]*^```\n|(?!##? ).*\n)*)", re.MULTILINE)
_ALSO = re.compile(r"\AAlso: (.*?)\n\n", re.DOTALL)
_CODE = re.compile(r"`([^`]+)`")

_COLORS = re.compile(r"\x1b\[[0-9;]*m")
_NODE = re.compile(r"\b\w*backward\d*")  # of the autograd graph: MulBackward0
_DTYPE = re.compile(
    r"\b(?:c10::|at::|torch\.(?:cuda\.)?)?"
    r"(?:half|float|bfloat16|float16|float32|fp16|bf16|fp32)(?:tensor)?\b"
)
_WORD = re.compile(r"[^\W\d_]+")
_LINES = 50  # at the end of a text: what is compared where nothing is contained
_UNLIKE = 0.45  # of 1: fewer than half of their words in common


class Section(NamedTuple):
    """What ``errors.md`` says about one error.

    Attributes:
        title: the text as people paste it.
        texts: all texts that lead here, the title first.
        body: Markdown, without the title.
    """

    title: str
    texts: Sequence[str]
    body: str


def sections() -> list[Section]:
    """Read all sections, in their order."""
    page = resources.files("tritonamp").joinpath("diagnosis", "errors.md").read_text("utf-8")
    return [_section(title, body) for title, body in _SECTION.findall(page)]


def _section(title: str, body: str) -> Section:
    body = body.strip()
    also = _ALSO.match(body)
    texts = [title, *(_CODE.findall(also[1]) if also else ())]
    return Section(title, [" ".join(text.split()) for text in texts], body)


def words(text: str) -> str:
    """Return the words of a text, a blank between them.

    Case, punctuation, numbers and terminal colours are gone; one word stands for all dtypes that
    training is in, and one for all nodes of the autograd graph.
    """
    text = _COLORS.sub("", text).casefold()
    text = _DTYPE.sub(" dtype ", _NODE.sub(" backward ", text))
    return " ".join(_WORD.findall(text))


def find(text: str, pages: Sequence[Section]) -> list[Section]:
    """Return the sections of the texts that ``text`` contains, the last of them first.

    A traceback ends with its error. Part of one text, of one section only, counts as that text.
    """
    given = words(text)
    found = sorted(_places(given, pages), reverse=True)
    if found:
        return [pages[index] for index in dict.fromkeys(index for _, _, index in found)]
    holders = [page for page in pages if any(_holds(known, given) for known in _known(page))]
    return holders if given and len(holders) == 1 else []


def nearest(text: str, pages: Sequence[Section], count: int = 3) -> list[Section]:
    """Return the sections whose texts are most like a line of ``text``, the best first.

    Those that share fewer than half of their words with it are left out.
    """
    lines = [words(line).split() for line in text.splitlines()[-_LINES:]]

    def likeness(page: Section) -> float:
        return max(
            SequenceMatcher(None, known.split(), line, autojunk=False).ratio()
            for known in _known(page)
            for line in lines
        )

    near = sorted(((likeness(page), index) for index, page in enumerate(pages)), reverse=True)
    return [pages[index] for like, index in near[:count] if like > _UNLIKE]


def _known(page: Section) -> list[str]:
    return [words(text) for text in page.texts]


def _places(given: str, pages: Sequence[Section]) -> Iterator[tuple[int, int, int]]:
    """Yield where a known text ends last, its length, and its section."""
    for index, page in enumerate(pages):
        for known in _known(page):
            if _holds(given, known):
                yield f" {given} ".rfind(f" {known} ") + len(known), len(known), index


def _holds(text: str, part: str) -> bool:
    return f" {part} " in f" {text} "
