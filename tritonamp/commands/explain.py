"""``python -m tritonamp explain``: an error text, from ``diagnosis/errors.md``, or a question.

Texts that are no known error are looked for in ``questions.md``.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from tritonamp.commands.error_pages import Section, find, sections, words
from tritonamp.commands.markdown import shown
from tritonamp.commands.question_pages import Question, answers, questions
from tritonamp.diagnosis.terminal import fitted, paragraph

_ALL = "`python -m tritonamp explain` without a text lists all sections."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "What an error or a warning of mixed precision means, the smallest program that raises "
        "it, and the cure, in plain torch and with tritonamp. Or the answer to a question, such as "
        '"EMA" or "gradient penalty".'
    )
    parser.epilog = "Exit status: 0 found, 1 not found."
    parser.add_argument(
        "text",
        metavar="TEXT",
        nargs="*",
        help="the error or question, or all of a traceback; - reads stdin (default: list all)",
    )


def run(args: argparse.Namespace, fail: Callable[[str], Any]) -> int:
    """Print the section of a text, or the list of all sections; return the exit status.

    ``fail`` ends the command with a message.
    """
    pages, asked = sections(), questions()
    if not args.text:
        print(_listed(pages), _listed(asked), sep="\n\n")
        return 0
    from_stdin = args.text == ["-"]
    text = sys.stdin.buffer.read().decode(errors="replace") if from_stdin else " ".join(args.text)
    if not words(text):
        fail(f"expected the text of an error, or a question, got {text.strip()!r}")
    found: Sequence[Section | Question] = find(text, pages)
    more = "The text holds others, too:"
    if not found:
        found, more = answers(text, asked), "Other questions that it may mean:"
    if not found:
        print(paragraph(f"No section is about this text. {_ALL}"))
        return 1
    first, *others = found
    title = paragraph(first.title)
    print(title, "=" * max(map(len, title.splitlines())), "", sep="\n")
    is_question = isinstance(first, Question)
    file = "questions.md" if is_question else "diagnosis/errors.md"
    titles = [page.title for page in (asked if is_question else pages)]
    print(shown(first.body, Path(str(resources.files("tritonamp") / file)), titles))
    if others:
        print(f"\n{more}\n\n{_listed(others)}")
    return 0


def _listed(pages: Sequence[Section | Question]) -> str:
    return fitted("\n".join(f"  {page.title}" for page in pages))
