"""Edits are of exact spans: what is not edited stays as it was, to the byte."""

import pytest

from tritonamp.commands.migrate.convert import convert
from tritonamp.commands.migrate.text import Source

LOOP = """\
import torch

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler()
def train(x, fp16):
    with torch.autocast("cuda"):
        loss = model(x)
BODY
"""


def converted(body: str) -> str:
    """Return what becomes of the body of a loop."""
    conversion = convert(LOOP.replace("BODY", body))
    assert not conversion.todos, conversion.todos
    return conversion.after.split("loss = model(x)")[1].strip("\r\n")


STEP = "    scaler.scale(loss).backward()\n    scaler.step(optimizer)\n    scaler.update()"
SPANS = {
    # text of the loop, what it becomes
    "comments": (
        "    scaler.scale(  # one\n        loss  # two\n    ).backward()  # three\n"
        "    # four\n    scaler.step(optimizer)  # five\n    scaler.update()  # six\n    # seven",
        "\n    # one\n    # two\n    amp.backward(loss)  # three\n    # four\n"
        "    optimizer.step()  # five\n    # seven",
    ),
    "semicolons": (
        "    scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update(); x = 1",
        "\n    amp.backward(loss); optimizer.step(); pass; x = 1",
    ),
    "one line": (
        "    if x: scaler.scale(loss).backward(); scaler.step(optimizer)\n"
        "    if x: scaler.update()",
        "\n    if x: amp.backward(loss); optimizer.step()\n    if x: pass",
    ),
    "a block of its own": (
        STEP.replace(
            "    scaler.update()", "    if x:\n        scaler.update()\n    else:\n        x"
        ),
        "\n    amp.backward(loss)\n    optimizer.step()\n"
        "    if x:\n        pass\n    else:\n        x",
    ),
    "continued": (
        "    scaler \\\n        .scale(loss \\\n        + 1).backward()\n    scaler.step(\n"
        "        optimizer\n    )\n    scaler.update(\n    )",
        "\n    amp.backward(loss \\\n        + 1)\n    optimizer.step()",
    ),
    "letters of many bytes": (
        "    print('äöü€𝄞'); scaler.scale(loss).backward()\n"
        "    'Ж'; scaler.step(optimizer); 'é'\n    scaler.update()",
        "\n    print('äöü€𝄞'); amp.backward(loss)\n    'Ж'; optimizer.step(); 'é'",
    ),
}


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("name", SPANS)
def test_only_what_is_edited_changes(name: str, newline: str) -> None:
    text, expected = SPANS[name]
    after = converted(text.replace("\n", newline))
    assert after == expected.strip("\n").replace("\n", newline)


def test_line_ends_are_those_of_the_file() -> None:
    text = LOOP.replace("BODY", STEP)
    unix, windows = convert(text).after, convert(text.replace("\n", "\r\n")).after
    assert windows == unix.replace("\n", "\r\n")


def test_tabs_stay_tabs() -> None:
    text = LOOP.replace("BODY", STEP).replace("    ", "\t")
    assert convert(text).after == convert(text.replace("\t", "    ")).after.replace("    ", "\t")


def test_a_place_in_the_tree_is_one_in_the_text() -> None:
    source = Source("ä = 'ö'; b = c(\n  d)\n")
    shown = [source.segment(statement) for statement in source.tree.body]
    assert shown == ["ä = 'ö'", "b = c(\n  d)"]


def test_a_import_stands_behind_those_that_there_are() -> None:
    text = '"""Text."""\nfrom __future__ import annotations\nx = 1\n' + LOOP.replace("BODY", STEP)
    assert convert(text).after.startswith(
        '"""Text."""\nfrom __future__ import annotations\nimport tritonamp\nx = 1\n'
    )
