"""The sections of ``questions.md``, and the search for the answer to a question."""

import re
from collections.abc import Sequence
from importlib import resources
from typing import NamedTuple

from tritonamp.commands.error_pages import words

_SECTION = re.compile(r"^### (.+)\n<!-- (.+) -->\n((?:```[^`]*^```\n|(?!##* ).*\n)*)", re.MULTILINE)
_WORD = re.compile(r"[a-z0-9]+")
_ENOUGH = 0.5  # of the question's words, the rarer ones counting more
_NEAR = 0.7  # of the best section's score: others that may be meant
_QUOTED = 4  # words of a phrase that answers all texts that hold it
_LONGEST = 16  # words of a question; a traceback has more
_UNKNOWN = 0.7  # the weight of a word that the page does not have; 1 if one section has it
_SAME = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32"} | {
    "fsdp2": "fsdp",
    "grad": "gradient",
    "lr": "learn",
    "net": "network",
}
_EMPTY = frozenset(
    "a about after all am an and any are as at be been before best but by can cannot could did do "
    "does doing for from get give go got happen has have help how i if in into is it its make me "
    "mean much my need not of on one or our please pytorch set should so some that the their them "
    "then there these this to torch tritonamp up use used using want was way we what when where "
    "which while who why will with work would you your".split()
)


class Question(NamedTuple):
    """A section of ``questions.md``.

    Attributes:
        title: the question.
        phrases: other words for it, from the comment under the title.
        body: Markdown, without title and comment.
    """

    title: str
    phrases: Sequence[str]
    body: str


def questions() -> list[Question]:
    """Read all sections, in the order of the page."""
    page = resources.files("tritonamp").joinpath("questions.md").read_text("utf-8")
    return [
        Question(title, phrases.split(", "), body.strip())
        for title, phrases, body in _SECTION.findall(page)
    ]


def answers(text: str, pages: Sequence[Question]) -> list[Question]:
    """Return the sections that answer a question, the best first; none if it is about other things.

    A section answers a text with most of its words, rarer ones counting more, and any text that
    quotes one of the section's phrases of four words, such as "CUDA out of memory".
    """
    quoted = [page for page in pages if any(_quotes(text, phrase) for phrase in page.phrases)]
    asked = _content(text)
    if quoted or not asked or len(asked) > _LONGEST:
        return quoted
    known = [set(_content(" ".join((page.title, *page.phrases)))) for page in pages]
    counts = {word: sum(word in own for own in known) for word in asked}
    weight = {word: count**-0.5 if count else _UNKNOWN for word, count in counts.items()}
    found = []
    for page, own in zip(pages, known, strict=True):
        share = sum(weight[word] for word in weight if word in own) / sum(weight.values())
        phrases = (len(part) for part in map(_content, page.phrases) if _holds(asked, part))
        if share >= _ENOUGH:
            found.append((share + max(phrases, default=0) / len(asked), page))
    found.sort(key=lambda scored: -scored[0])
    return [page for score, page in found if score > _NEAR * found[0][0]]


def _quotes(text: str, phrase: str) -> bool:
    part = phrase.split()
    return len(part) >= _QUOTED and _holds(words(text).split(), words(phrase).split())


def _content(text: str) -> list[str]:
    """Return the words that say what a text is about, without endings."""
    return [_stem(word) for word in _WORD.findall(text.casefold()) if word not in _EMPTY]


def _stem(word: str) -> str:
    word = _SAME.get(word, word)
    for ending in ("ing", "ed", "es", "s", "e"):
        if word.endswith(ending) and len(word) - len(ending) > 2:
            return word.removesuffix(ending)
    return word


def _holds(words: list[str], part: list[str]) -> bool:
    return bool(part) and any(
        words[i : i + len(part)] == part for i in range(len(words) - len(part) + 1)
    )
