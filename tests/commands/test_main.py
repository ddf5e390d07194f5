"""``python -m tritonamp``: what all commands share."""

import io
import os
from pathlib import Path

import pytest

from tritonamp.__main__ import until_reader_leaves


def test_a_reader_that_has_gone_ends_a_command_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr("sys.argv", ["tritonamp", "explain"])
    with os.fdopen(writer, "w") as gone:
        monkeypatch.setattr("sys.stdout", gone)
        assert until_reader_leaves() == 1


def test_names_that_the_output_cannot_encode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import torch\nclass N\u00e9t(torch.nn.Linear): pass\n"
    code += "def make(): return N\u00e9t(4, 4), (torch.ones(2, 4),)\n"
    (tmp_path / "named.py").write_text(code, "utf-8")
    monkeypatch.setattr("sys.argv", ["tritonamp", "check", f"{tmp_path / 'named.py'}:make"])
    written = io.BytesIO()
    with io.TextIOWrapper(written, "ascii") as ascii_only:
        monkeypatch.setattr("sys.stdout", ascii_only)
        assert until_reader_leaves() == 0
        assert b"N\\xe9t in float16" in written.getvalue()
