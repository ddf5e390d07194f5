"""``python -m tritonamp``: what all commands share."""

import os

import pytest

from tritonamp.__main__ import until_reader_leaves


def test_a_reader_that_has_gone_ends_a_command_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr("sys.argv", ["tritonamp", "explain"])
    with os.fdopen(writer, "w") as gone:
        monkeypatch.setattr("sys.stdout", gone)
        assert until_reader_leaves() == 1
