"""Edits are of exact spans: what is not edited stays as it was, to the byte."""

import pytest

from tritonamp.commands.migrate.command import convert
from tritonamp.commands.migrate.source import Source

SPANS = {
    # text, what it becomes
    "comments": (
        "with autocast(  # one\n    # two\n    False  # three\n):  # four\n    pass  # five\n",
        None,
    ),
    "a comment behind an argument": (
        "with autocast(dtype=half  # one\n):  # two\n    pass\n",
        'with autocast("cuda", dtype=half  # one\n):  # two\n    pass\n',
    ),
    "semicolons": ("x = 1; y = autocast(); z = 2\n", 'x = 1; y = autocast("cuda"); z = 2\n'),
    "one line": ("if x: autocast(); y\n", 'if x: autocast("cuda"); y\n'),
    "continued": (
        "x = autocast \\\n    (True, \\\n     half)\n",
        'x = autocast \\\n    ("cuda", enabled=True, \\\n     dtype=half)\n',
    ),
    "letters of many bytes": (
        "print('äöü€𝄞'); autocast(); 'é'\n",
        "print('äöü€𝄞'); autocast(\"cuda\"); 'é'\n",
    ),
    "no end of the last line": ("autocast()", 'autocast("cuda")'),
}


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("name", SPANS)
def test_only_what_is_edited_changes(name: str, newline: str) -> None:
    head = "from torch.cuda.amp import autocast\n"
    before, after = SPANS[name]
    script = convert((head + before).replace("\n", newline))
    if after is None:  # a comment is between the argument and its call
        assert script.notes
        return
    assert not script.notes
    expected = head.replace("torch.cuda.amp", "torch.amp") + after
    assert script.after == expected.replace("\n", newline)


LOOP = """\
scaler = torch.amp.GradScaler()
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train():
    scaler.step(optimizer)
"""
HEAD = "import torch\n\n"


def test_line_ends_are_those_of_the_file() -> None:
    unix, windows = convert(HEAD + LOOP).after, convert((HEAD + LOOP).replace("\n", "\r\n")).after
    assert windows == unix.replace("\n", "\r\n") != HEAD + LOOP


def test_a_statement_that_moves_leaves_its_line_to_others() -> None:
    after = convert(HEAD + LOOP.replace("GradScaler()", "GradScaler(); x = 1")).after
    assert after.splitlines()[3] == "pass; x = 1"
    assert "\nscaler = amp.scaler\n" in after


def test_tabs_stay_tabs() -> None:
    text = "import torch\ndef main():\n    " + LOOP.replace("\n", "\n    ")
    assert convert(text.replace("    ", "\t")).after == convert(text).after.replace("    ", "\t")


def test_the_end_of_a_file_may_have_no_line_end() -> None:
    text = HEAD + LOOP.split("def")[0].strip()
    after = convert(text).after
    assert after.endswith('level="O1")\nscaler = amp.scaler\n')
    last = [*convert(text).changes()][-1]
    assert last.line == 5 and last.old == [] and len(last.new) == 2


def test_a_place_in_the_tree_is_one_in_the_text() -> None:
    source = Source("ä = 'ö'; b = c(\n  d)\n")
    shown = [source.segment(statement) for statement in source.tree.body]
    assert shown == ["ä = 'ö'", "b = c(\n  d)"]


def test_an_import_stands_behind_those_that_there_are() -> None:
    text = '"""Text."""\nfrom __future__ import annotations\nx = 1\n' + HEAD + LOOP
    assert convert(text).after.startswith(
        '"""Text."""\nfrom __future__ import annotations\nimport tritonamp\nx = 1\n'
    )


def test_a_file_without_imports_at_its_top_gets_one_before_its_first_statement() -> None:
    text = "#!/usr/bin/env python\nif True:\n    " + (HEAD + LOOP).replace("\n", "\n    ")
    assert convert(text).after.startswith(
        "#!/usr/bin/env python\nimport tritonamp\nif True:\n    import torch\n"
    )
