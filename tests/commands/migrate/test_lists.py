"""A loop that is changed by the letter of its list runs, and trains as before."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from commands.migrate.programs import APEX_LOOPS, HEAD, TORCH_LOOPS, run, same

from tritonamp.__main__ import main
from tritonamp.commands.migrate import command


@pytest.fixture
def follow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """text -> the text after every line that the command lists was changed by hand."""

    def followed(text: str, *options: str) -> str:
        file = tmp_path / "train.py"
        file.write_text(text)
        assert main(["migrate", str(file), *options]) == 1
        assert file.read_text() == text
        return changed(text, capsys.readouterr().out)

    return followed


def changed(text: str, listed: str) -> str:
    """Return ``text`` after the changes of a list; the last one first, as the list says."""
    lines = text.splitlines()
    for change in reversed(re.split(r"^  \S+\.py:(?=\d)", listed, flags=re.MULTILINE)[1:]):
        head, *rest = change.splitlines()
        number, what = re.fullmatch(r"(\d+): ([\w ]+) \(.*", head).groups()
        old = [line.removeprefix("    - ") for line in rest if line.startswith("    - ")]
        new = [line.removeprefix("    + ") for line in rest if line.startswith("    + ")]
        at = int(number) - (what != "insert after this line")
        assert lines[at : at + len(old)] == old, change
        assert bool(old) == (what != "insert after this line")
        assert bool(new) == (what != "take out")
        lines[at : at + len(old)] = new
    return "\n".join([*lines, ""])


@pytest.mark.smoke
@pytest.mark.parametrize("name", TORCH_LOOPS)
def test_a_list_for_torchs_amp_trains_as_before(
    name: str, follow: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = HEAD + TORCH_LOOPS[name]
    after = follow(text)
    print(after)
    assert "tritonamp.enable(" in after and "GradScaler(" not in after.replace("tritonamp.Grad", "")
    same(run(text, monkeypatch), run(after, monkeypatch))


@pytest.mark.parametrize("name", APEX_LOOPS)
def test_a_list_for_apex_trains_as_before(
    name: str, follow: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The original runs with the imports of tritonamp.apex, which tests/apex holds against apex."""
    text = HEAD + APEX_LOOPS[name]
    after = follow(text)
    print(after)
    assert "initialize" not in after
    same(run(command.convert(text, "apex").after, monkeypatch), run(after, monkeypatch))


BUILT = """\
def build():
    model = make()
    return model, torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


net, opt = build()
scaler = torch.amp.GradScaler("cpu") if on else None
for x, y in data:
    opt.zero_grad()
    with torch.autocast("cpu", torch.float16, enabled=on):
        loss = criterion(net(x), y)
    if scaler is None:
        loss.backward()
        opt.step()
    else:
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
    losses.append(loss.item())
"""


@pytest.mark.parametrize("everywhere", [False, True], ids=["in its place", "always"])
@pytest.mark.parametrize("on", [False, True])
def test_the_advice_for_a_model_from_elsewhere(
    on: bool, everywhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``amp.scaler`` may take the place of the call, or of the whole condition."""
    text = HEAD + BUILT
    ((line, note),) = command.convert(text).notes
    imported, enabled, scaler, *_ = re.findall("`(.*?)`", note.split("By hand: ")[1])
    lines = text.splitlines()
    assert '"O0" for runs without torch.amp' in note
    enabled = enabled.replace("model, optimizer", "net, opt")
    enabled = enabled.replace('"O1"', '"O1" if on else "O0"')
    call = re.search(r"= (torch.*\)) if on else None", lines[line - 1])
    old = call[1] + " if on else None" * everywhere  # type: ignore[index]
    lines[line - 1] = lines[line - 1].replace(old, scaler)
    after = "\n".join([imported, *lines[: line - 1], enabled, *lines[line - 1 :]])
    same(run(text, monkeypatch, on=on), run(after, monkeypatch, on=on))
