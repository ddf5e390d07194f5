"""The sections of ``questions.md``, and the search for the answer to a question."""

import re
from collections.abc import Sequence
from importlib import resources
from typing import NamedTuple

_SECTION = re.compile(r"^### (.+)\n<!-- (.+) -->\n((?:```[^`]*^```\n|(?!##* ).*\n)*)", re.MULTILINE)
_WORD = re.compile(r"[a-z0-9]+(?:[.][a-z_]+)*")
_ENOUGH = 0.5  # of the question's words, the rarer ones counting more
_LONGEST = 16  # words of a question; a traceback has more
_SAME = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32"}
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

    A phrase of a section that is in the text counts as much as all its words.
    """
    asked = _content(text)
    if not asked or len(asked) > _LONGEST:
        return []
    known = [set(_content(" ".join((page.title, *page.phrases)))) for page in pages]
    weight = {word: 1 / max(1, sum(word in own for own in known)) for word in asked}
    scores = []
    for page, own in zip(pages, known, strict=True):
        share = sum(weight[word] for word in weight if word in own) / sum(weight.values())
        phrase = max((len(p) for p in map(_content, page.phrases) if _holds(asked, p)), default=0)
        scores.append((share + phrase / len(asked), share))
    best = max(scores)[0]
    order = sorted(range(len(pages)), key=lambda i: -scores[i][0])
    return [pages[i] for i in order if scores[i][1] >= _ENOUGH and scores[i][0] > 0.7 * best]


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
