"""``python -m tritonamp migrate``: what it reads, prints, writes and returns."""

import os
from pathlib import Path

import pytest

from tritonamp.__main__ import main
from tritonamp.commands.migrate import command
from tritonamp.commands.migrate.script import Script

NAMES = """\
import torch
from torch.cuda.amp import autocast
model = torch.nn.Linear(2, 2)
with autocast():
    model(1)
"""
AFTER = """\
import torch
from torch.amp import autocast
model = torch.nn.Linear(2, 2)
with autocast("cuda"):
    model(1)
"""
LOOP = """\
import torch
scaler = torch.amp.GradScaler()
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in range(3):
    scaler.scale(model(x)).backward()
    scaler.step(optimizer)
    scaler.update()
"""


def test_a_file_is_shown_and_written_where_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(NAMES)
    assert main(["migrate", "train.py"]) == 0
    shown = capsys.readouterr().out
    assert Path("train.py").read_text() == NAMES
    assert (
        shown
        == """
train.py: its changes; lines have the numbers before them
  train.py:2: write (torch deprecates the old module)
    - from torch.cuda.amp import autocast
    + from torch.amp import autocast
  train.py:4: write (torch deprecates torch.cuda.amp)
    - with autocast():
    + with autocast("cuda"):

1 file: 1 can be converted (--write does it), 0 left as they are
"""
    )
    assert main(["migrate", "train.py", "--write"]) == 0
    assert Path("train.py").read_text() == AFTER
    assert capsys.readouterr().out.endswith("1 file: 1 converted, 0 left as they are\n")
    assert main(["migrate", "train.py", "--write"]) == 3
    assert capsys.readouterr().out.startswith(
        "1 file: nothing to do, no loop with apex or a GradScaler, no old name\n"
    )


def test_a_loop_in_fp32_gets_its_two_lines(tmp_path: Path, capsys) -> None:
    plain = tmp_path / "plain.py"
    plain.write_text("loss = model(x).sum()\nloss.backward()\noptimizer.step()\n")
    assert main(["migrate", str(plain)]) == 3
    printed = capsys.readouterr().out
    assert 'amp = tritonamp.enable(model, optimizer, level="O2")' in printed
    assert "amp.backward(loss) instead of loss.backward()" in " ".join(printed.split())


def test_a_loop_is_listed_and_not_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(LOOP)
    assert main(["migrate", "train.py", "--write"]) == 1
    assert Path("train.py").read_text() == LOOP
    assert (
        capsys.readouterr().out
        == """
train.py: to change by hand, and left as it is; its lines have these numbers, so begin with the last
  train.py:1: insert after this line (the handle comes from there)
    + import tritonamp
  train.py:2: take out (moves below line 4, where its model and optimizer exist)
    - scaler = torch.amp.GradScaler()
  train.py:4: insert after this line (casts every forward of the model, and checks every step of \
the optimizer)
    + amp = tritonamp.enable(model, optimizer, level="O1")
    + scaler = amp.scaler

1 file: 0 converted, 1 left as it is, to change by hand
"""
    )


def test_the_readmes_list_is_what_it_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS")
    readme = (Path(command.__file__).parents[1] / "README.md").read_text()
    script, listed = (
        readme.split("## Migrating scripts")[1].split("```python\n")[1].split("```\n")[:3:2]
    )
    Path("train.py").write_text(script)
    assert main(["migrate", "train.py"]) == 1
    assert listed in capsys.readouterr().out


def test_a_folder_is_read_without_what_is_installed_in_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a.py", "b/c.py", "venv/d.py", ".git/e.py", "f.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(NAMES)
    (tmp_path / "g.py").write_text(LOOP)
    (tmp_path / "h.py").write_text("x = 1\n")
    assert main(["migrate", str(tmp_path), "--write"]) == 1
    shown = capsys.readouterr().out
    assert f"{tmp_path}/g.py: to change by hand, and left as it is; " in shown
    assert shown.endswith("4 files: 2 converted, 1 left as it is, to change by hand\n")
    changed = sorted(p.name for p in tmp_path.rglob("*") if p.is_file() and p.read_text() == AFTER)
    assert changed == ["a.py", "c.py"]
    assert (tmp_path / "g.py").read_text() == LOOP


def test_to_apex_asks_for_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("from apex import amp\n")
    assert main(["migrate", "--to", "apex", "--write", str(file)]) == 0
    assert file.read_text() == "from tritonamp.apex import amp\n"
    assert main(["migrate", "--to", "apex", str(file)]) == 3


@pytest.mark.parametrize(
    ("name", "said"), [("no.py", "no such file"), ("a.ipynb", "expected a .py")]
)
def test_what_cannot_be_read_ends_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, said: str
) -> None:
    (tmp_path / "a.ipynb").write_text("{}")
    with pytest.raises(SystemExit) as ended:
        main(["migrate", str(tmp_path / name)])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "head", [b"\xef\xbb\xbf", b"# -*- coding: latin-1 -*-\n# \xe4\n", b"# \xc3\xa4\r\n"]
)
def test_encodings_and_rights_are_kept(tmp_path: Path, head: bytes) -> None:
    file = tmp_path / "train.py"
    file.write_bytes(head + NAMES.encode())
    file.chmod(0o750)
    link = tmp_path / "link.py"
    link.symlink_to(file)
    assert main(["migrate", str(link), "--write"]) == 0
    assert link.is_symlink() and file.stat().st_mode & 0o777 == 0o750
    assert file.read_bytes().replace(b"\r", b"") == head.replace(b"\r", b"") + AFTER.encode()


def test_a_file_that_is_no_text_needs_a_hand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.py").write_bytes(b"# coding: utf-8\nx = '\xff'\n")
    (tmp_path / "b.py").write_text("print 'two'\n")
    assert main(["migrate", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "a.py:1: cannot be read" in shown
    assert "b.py:1: not Python 3" in shown


def test_a_read_only_file_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "train.py"
    file.write_text(NAMES)
    opened = Path.open

    def read_only(path: Path, mode: str = "r") -> object:
        if "+" in mode or "w" in mode:
            raise PermissionError("read-only")
        return opened(path, mode)

    monkeypatch.setattr(Path, "open", read_only)  # root may write what others may not
    assert main(["migrate", str(file), "--write"]) == 1
    assert "cannot be written: read-only" in capsys.readouterr().out
    assert file.read_bytes() == NAMES.encode()


def test_nothing_is_left_of_a_write_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "train.py"
    file.write_text(NAMES)

    def fail(*args: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    assert main(["migrate", str(file), "--write"]) == 1
    assert "cannot be written: disk full" in capsys.readouterr().out
    assert file.read_text() == NAMES and [*tmp_path.iterdir()] == [file]


def test_a_fault_in_one_file_does_not_end_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.py").write_text(NAMES)
    (tmp_path / "b.py").write_text(NAMES)
    convert = command.convert

    def failing(text: str, to: str) -> Script:
        monkeypatch.setattr(command, "convert", convert)
        raise LookupError("nothing")

    monkeypatch.setattr(command, "convert", failing)
    assert main(["migrate", str(tmp_path), "--write"]) == 1
    assert "a.py:1: a fault of this command, please report it: LookupError: nothing" in (
        capsys.readouterr().out
    )
    assert (tmp_path / "a.py").read_text() == NAMES and (tmp_path / "b.py").read_text() == AFTER


def test_a_gradient_penalty_of_scaled_scores_is_noted(tmp_path: Path, capsys) -> None:
    """It trains at a lower scale: see tests/test_scaled_penalty.py."""
    script = tmp_path / "gan.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.Adam(model.parameters())\n"
        "scaler = torch.amp.GradScaler()\n"
        "for x in range(3):\n"
        "    scores = scaler.scale(model(x).sum())\n"
        "    (grad,) = torch.autograd.grad(scaler.scale(model(x).sum()), x, create_graph=True)\n"
        "    (same,) = torch.autograd.grad(model.scale(x).sum(), x)  # no loss scale\n"
        "    ones = torch.ones(3)\n"
        "    torch.autograd.grad(model(x), x, scaler.scale(ones), create_graph=True)\n"
        "    torch.autograd.grad(model(x), x, grad_outputs=scaler.scale(ones), create_graph=True)\n"
    )
    assert main(["migrate", str(script)]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert f"{script}:7: `torch.autograd.grad` of a scaled tensor keeps the scale low" in printed
    assert f"{script}:8:" not in printed
    for line in (10, 11):
        assert f"{script}:{line}: `grad_outputs` of `torch.autograd.grad` have the scale" in printed
    assert "leave out `scaler.scale`, and the division by the scale" in printed
