import subprocess
import sys

import pytest
import torch

from tritonamp.__main__ import main
from tritonamp.demo import LEVELS, data
from tritonamp.demo import train as example
from tritonamp.demo.models import DigitNet
from tritonamp.diagnosis.terminal import table

pytestmark = pytest.mark.demo


@pytest.fixture(scope="module", autouse=True)
def _threads():
    """The demo trains in one thread; the tests after these get theirs back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def short_run(tmp_path_factory):
    """(table rows as lists of words, picture) of a run too short to learn anything."""
    picture = tmp_path_factory.mktemp("demo") / "curves.png"
    with pytest.MonkeyPatch.context() as patch:
        printed: list[str] = []
        patch.setattr("builtins.print", lambda *values: printed.append(" ".join(map(str, values))))
        assert main(["demo", "--steps", "5", "--device", "cpu", "--output", str(picture)]) == 0
    rows = [line.split() for line in "\n".join(printed).splitlines()]
    assert any(row[:2] == ["wrote", str(picture)] for row in rows)
    return [row for row in rows if row[:1] in (["digits"], ["chars"]) and row[1] in LEVELS], picture


def test_table_has_every_model_at_every_level(short_run):
    rows, _ = short_run
    assert [row[:2] for row in rows] == [
        [model, level] for model in ("digits", "chars") for level in LEVELS
    ]


def test_steps_taken_and_skipped_are_the_steps_asked_for(short_run):
    for row in short_run[0]:
        steps, skipped, scale, backend = row[-4:]
        assert int(steps) + int(skipped) == 5
        assert float(scale) >= 1
        assert backend == "eager"


def test_picture_is_a_png(short_run):
    assert short_run[1].read_bytes().startswith(b"\x89PNG")


def test_o1_and_o2_follow_o0(short_run):
    scores = {
        tuple(row[:2]): float(row[3] if row[0] == "digits" else row[4]) for row in short_run[0]
    }
    for level in ("O1", "O2"):
        assert scores["chars", level] == pytest.approx(scores["chars", "O0"], rel=0.01)


def test_one_level_in_bfloat16(tmp_path, capsys):
    picture = tmp_path / "one.png"
    options = [
        "--level",
        "O2",
        "--dtype",
        "bfloat16",
        "--steps",
        "1",
        "--seed",
        "3",
        "--device",
        "cpu",
    ]
    assert main(["demo", *options, "--output", str(picture)]) == 0
    printed = capsys.readouterr().out
    rows = [line.split()[:2] for line in printed.splitlines()]
    assert [row for row in rows if row[1:] == ["O2"]] == [["digits", "O2"], ["chars", "O2"]]
    assert picture.exists()


def test_the_example_goes_on_where_it_was_stopped(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(example, "STEPS", 4)
    whole = example.main(tmp_path / "whole.pt", epochs=3)
    told = capsys.readouterr().out.splitlines()
    example.main(tmp_path / "stopped.pt", epochs=1)
    model = example.main(tmp_path / "stopped.pt", epochs=3)
    assert capsys.readouterr().out.splitlines() == told
    assert [line.split(",")[0].split()[:2] for line in told] == [
        ["epoch", f"{i}:"] for i in (1, 2, 3)
    ]
    assert type(model) is DigitNet
    assert all(map(torch.equal, model.state_dict().values(), whole.state_dict().values()))


def test_the_example_learns(tmp_path, capsys):
    example.main(tmp_path / "digits.pt", epochs=2)
    accuracy = capsys.readouterr().out.splitlines()[-1].split("accuracy ")[1].split("%")[0]
    assert float(accuracy) > 85


def test_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(
        SystemExit, match=r'the demo needs scikit-learn: pip install "tritonamp\[demo\]"'
    ):
        main(["demo"])


def test_missing_corpus_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(SystemExit, match=r"reads the text of pydoc_data\.topics"):
        data.python_documentation()


@pytest.mark.parametrize("device", ["cuda:99", "tpu"])
def test_device_that_is_not_there(device):
    with pytest.raises(
        SystemExit, match=rf"--device: expected on this machine cpu.*, got {device}"
    ):
        main(["demo", "--device", device])


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--steps", "0", "expected 1 or more, got 0"),
        (
            "--output",
            "curves.xyz",
            "expected a .png file in a folder that exists, got curves.xyz",
        ),
        ("--output", "no/such/folder/a.png", "in a folder that exists, got no/such/folder/a.png"),
        ("--level", "O9", "invalid choice: 'O9'"),
    ],
)
def test_bad_option(option, value, message, capsys):
    with pytest.raises(SystemExit):
        main(["demo", option, value])
    assert message in " ".join(capsys.readouterr().err.split())  # lines fit the terminal


def test_import_does_not_load_the_demo():
    code = (
        "import sys, tritonamp; sys.exit(any(name.startswith('tritonamp.demo') for name in "
        "sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_digits_are_split_in_halves_once():
    split = data.digits()
    assert split.x.shape == (899, 1, 8, 8)
    assert split.test_x.shape == (898, 1, 8, 8)
    assert torch.equal(split.x, data.digits().x)


def test_characters_predict_the_next():
    split, vocabulary = data.characters()
    for x, y in ((split.x, split.y), (split.test_x, split.test_y)):
        assert torch.equal(x[0, 1:], y[0, :-1])
        assert x.max() < vocabulary


def test_batches_repeat_with_the_seed():
    split = data.digits()
    first, again, other = (
        [y.tolist() for _, y in data.batches(split, 8, 3, seed, torch.device("cpu"))]
        for seed in (0, 0, 1)
    )
    assert len(first) == 3
    assert first == again != other


def test_table_aligns_columns():
    assert table(("a", "bb"), [("long", "1"), ("x", "")]).splitlines() == [
        "a     bb",
        "--------",
        "long  1",
        "x",
    ]
