"""Every command that a page prints is one that its parser takes, or a file that exists."""

import re
import shlex
from collections.abc import Iterator

import pytest
import test_readme

from tritonamp.__main__ import _parser

# in fenced blocks without a language, and between backquotes
FENCED = re.compile(r"^```\n(.*?)^```$", re.MULTILINE | re.DOTALL)
QUOTED = re.compile(r"`([^`]+)`")
PAGES = [*test_readme.PAGES, test_readme.ERRORS]


def commands(start: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the page and the words, after ``start``, of each command that begins so."""
    for path in PAGES:
        text = path.read_text()
        lines = [line for block in FENCED.findall(text) for line in block.splitlines()]
        prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
        quoted = [" ".join(found.split()) for found in QUOTED.findall(prose)]
        for line in (*lines, *quoted):
            for part in re.split(r" && | \| | > | < ", line):
                if part.startswith(start):
                    yield test_readme.shown(path), shlex.split(part[len(start) :], comments=True)


def test_subcommands_and_options_exist(capsys) -> None:
    given = [(page, words) for page, words in commands("python -m tritonamp ") if words]
    assert len(given) > 20
    refused = []
    for page, words in given:
        try:
            _parser().parse_args(words)
        except SystemExit:
            refused.append((page, words))
    capsys.readouterr()
    assert [each for each in refused if len(each[1]) > 1] == []
    # a bare name stands for the command
    names = {words[0] for _, words in refused}
    assert names <= {"check", "explain", "migrate"}


@pytest.mark.parametrize("start", ["python bench/", "bench/"])
def test_scripts_exist(start: str) -> None:
    found = [(page, words[0]) for page, words in commands(start) if words and "." in words[0]]
    scripts = [(page, f"bench/{word}") for page, word in found if word.endswith((".py", ".sh"))]
    assert len(scripts) > 5
    assert [each for each in scripts if not (test_readme.ROOT / each[1]).is_file()] == []


def test_paths_of_pytest_exist() -> None:
    given = [(page, word) for page, words in commands("pytest ") for word in words]
    paths = [(page, word.partition("::")[0]) for page, word in given if word.startswith("tests/")]
    assert len(paths) >= 3
    assert [each for each in paths if not (test_readme.ROOT / each[1]).exists()] == []
