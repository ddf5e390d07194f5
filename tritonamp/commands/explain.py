"""``python -m tritonamp explain``: the meaning of an error text, from ``diagnosis/errors.md``."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tritonamp.commands.error_pages import Section, find, sections, words

_ALL = "`python -m tritonamp explain` without a text lists all sections."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "What an error or a warning of mixed precision means, the smallest program that raises "
        "it, and the cure, in plain torch and with tritonamp."
    )
    parser.epilog = "Exit status: 0 found, 1 not found."
    parser.add_argument(
        "text",
        metavar="TEXT",
        nargs="*",
        help="the error, or all of a traceback; - reads it from stdin (default: list all texts)",
    )


def run(args: argparse.Namespace, fail: Callable[[str], Any]) -> int:
    """Print the section of a text, or the list of all sections; return the exit status.

    ``fail`` ends the command with a message.
    """
    pages = sections()
    if not args.text:
        print(_listed(pages))
        return 0
    from_stdin = args.text == ["-"]
    text = sys.stdin.buffer.read().decode(errors="replace") if from_stdin else " ".join(args.text)
    if not words(text):
        fail(f"expected the text of an error, got {text.strip()!r}")
    found = find(text, pages)
    if not found:
        print(f"No section is about this text. {_ALL}")
        return 1
    first, *others = found
    print(first.title, "=" * len(first.title), "", first.body, sep="\n")
    if others:
        print(f"\nThe text holds others, too:\n\n{_listed(others)}")
    return 0


def _listed(pages: Sequence[Section]) -> str:
    return "\n".join(f"  {page.title}" for page in pages)
