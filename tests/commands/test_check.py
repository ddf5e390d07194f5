"""``python -m tritonamp check``: what it prints, writes and returns."""

import math
import sys
import textwrap
from collections import Counter

import pytest
import torch

import tritonamp
from tritonamp.__main__ import main
from tritonamp.forecast.differences import Comparison
from tritonamp.forecast.ulps import Difference
from tritonamp.watched.places import Place

FACTORIES = textwrap.dedent(
    """
    import torch
    from torch import nn

    class Square(nn.Module):
        def forward(self, x):
            return x * x

    def clean():
        model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))
        return model, torch.optim.AdamW(model.parameters()), (torch.ones(4, 16),)

    def faulty():
        model = nn.Sequential(nn.Linear(16, 16), Square(), nn.LayerNorm(16), nn.Linear(16, 8))
        optimizer = torch.optim.AdamW(model.parameters())
        return model, optimizer, (3e3 * torch.ones(4, 16),), lambda y: y.square().sum()

    def without_optimizer():
        return nn.Linear(16, 8), (torch.ones(4, 16),)

    class Keywords(nn.Linear):
        def forward(self, features, labels=None):
            return {"loss": (super().forward(features) - labels).square().mean()}

    def keywords():
        labels = torch.full((4, 8), 1280.7)
        return Keywords(16, 8), None, {"features": torch.ones(4, 16), "labels": labels}

    def generates():
        from diffusion import Transformer

        inputs = {"hidden_states": (1, 8, 4), "prompt_embeds": (1, 3, 16), "timestep": (1,)}
        batch = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in inputs.items()}
        return Transformer().to(torch.bfloat16).requires_grad_(False), batch

    def fails():
        return nn.Linear(16, 8), (torch.ones(4, 5),)

    def raises():
        raise KeyError("weights.pt")

    def number():
        return 3

    def arguments(config):
        return config.model, config.batch

    def no_batch():
        model = nn.Linear(16, 8)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def wrong_order():
        return nn.Linear(16, 8), (torch.ones(4, 16),), no_batch()[1]

    def wrong_loss():
        return nn.Linear(16, 8), None, (torch.ones(4, 16),), "mse"

    def model():
        return nn.Linear(16, 8)

    def swapped():
        return (torch.ones(4, 16),), nn.Linear(16, 8)

    constant = 3
    """
)


@pytest.fixture(scope="module", autouse=True)
def factories(tmp_path_factory):
    folder = tmp_path_factory.mktemp("factories")
    (folder / "check_factories.py").write_text(FACTORIES)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # where a user runs the command
        yield folder


def run(capsys, *arguments):
    status = main(["check", *map(str, arguments)])
    return status, capsys.readouterr().out


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("name", "status"), [("clean", 0), ("without_optimizer", 0), ("faulty", 1)]
)
def test_text_and_status(capsys, name, status):
    got, text = run(capsys, f"check_factories:{name}")
    assert got == status
    assert text.startswith("nothing found: ") == (status == 0)
    assert ("1 (check_factories.py:7), overflow: mul gives" in text) == (status == 1)


def test_level_and_dtype(capsys):
    assert run(capsys, "check_factories:faulty", "--dtype", "bfloat16")[0] == 0
    status, text = run(capsys, "check_factories:faulty", "--level", "O0")
    assert (status, text) == (0, "nothing found: Sequential in FP32 throughout\n")


def test_a_mapping_is_the_keywords(capsys, tmp_path):
    path = tmp_path / "policy.json"
    status, text = run(capsys, "check_factories:keywords", "--policy", path)
    assert status == 1
    assert text.endswith(f"\nwrote {path} ({path.stat().st_size} bytes)\n")
    policy = tritonamp.Policy.from_json(path.read_text())
    assert f"init_scale=2.0**{policy.init_scale.hex().rpartition('p')[2].lstrip('+')}" in text


def test_the_policy_can_be_read_and_used(capsys, tmp_path):
    run(capsys, "check_factories:faulty", "--policy", tmp_path / "policy.json")
    policy = tritonamp.Policy.from_json((tmp_path / "policy.json").read_text())
    assert policy.fp32_modules == ("1",)
    import check_factories

    model, optimizer, (x,), loss_fn = check_factories.faulty()
    amp = tritonamp.enable(
        model, optimizer, policy=policy, scaler=tritonamp.GradScaler("cpu", init_scale=2.0**6)
    )
    amp.backward(loss_fn(model(x)))
    optimizer.step()
    assert amp.stats()["steps"] == 1
    amp.disable()


def test_the_policy_of_a_model_that_generates(capsys, tmp_path):
    """Inputs and weights are bfloat16, and no optimizer is there."""
    torch.manual_seed(0)
    path = tmp_path / "policy.json"
    status, text = run(capsys, "check_factories:generates", "--policy", path)
    assert status == 1 and "cost of FP32 results: no FP32 weights" in text
    policy = tritonamp.Policy.from_json(path.read_text())
    assert (policy.fp32_results, policy.fp32_modules) == (("blocks.0.down",), ())
    import check_factories

    model, batch = check_factories.generates()
    with tritonamp.enable(model, policy=policy):
        assert model(**batch).isfinite().all()


@pytest.mark.parametrize("name", ["clean", "faulty"])
def test_picture(capsys, tmp_path, name):
    _, text = run(capsys, f"check_factories:{name}", "--picture", tmp_path / "range.png")
    assert f"\nwrote {tmp_path / 'range.png'} (" in text
    assert (tmp_path / "range.png").read_bytes().startswith(b"\x89PNG")


def test_the_bars_of_the_picture():
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from tritonamp.commands import ranges

    shares = ranges._exponents([Counter({-30: 1, 0: 2}), Counter({0: 1, 17: 4})])
    assert shares == {-30: 12.5, 0: 37.5, 17: 50.0}
    axes: Axes = Figure().subplots()
    ranges._draw(axes, "values", shares, ranges.VALUES, [-40, -25, -14, 16, 30])
    assert [bar.get_height() for bar in axes.patches[-3:]] == [12.5, 37.5, 50.0]
    assert axes.get_title(loc="right") == "become zero 12.5 %   lose bits 0 %   overflow 50.0 %"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check_factories"], "expected module:factory, such as train:make, got 'check_factories'"),
        (["no_such_module:make"], "cannot import 'no_such_module': ModuleNotFoundError"),
        (["check_factories:nothing"], "has no function 'nothing'; it has Square, clean, faulty"),
        (["check_factories:constant"], "has no function 'constant'"),
        (["check_factories:raises"], "check_factories:raises raised KeyError: 'weights.pt'"),
        (["check_factories:number"], "number: expected (model, optimizer, batch), (model"),
        (["check_factories:swapped"], "got a tuple of tuple, Linear"),
        (["check_factories:fails"], "failed in the dry run, in FP32"),
        (["check_factories:clean", "--picture", "range.jpg"], "needs a name that ends in .png"),
        (
            ["check_factories:clean", "--policy", "nowhere/policy.json"],
            "there is no folder nowhere",
        ),
        (
            ["check_factories:clean", "--policy", "."],
            ".: expected the name of a file, got a folder",
        ),
        (["check_factories:clean", "--level", "O9"], "invalid choice: 'O9'"),
    ],
)
def test_usage(capsys, arguments, message):
    with pytest.raises(SystemExit) as raised:
        main(["check", *arguments])
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("check_factories.py:constant", "'check_factories' has no function 'constant'; it has Sq"),
        ("check_factories.py:clear", "; did you mean 'clean'?"),
        ("check_factory.py:clean", "check_factory.py: there is no such file; did you mean 'check_"),
        ("check_factory:clean", "No module named 'check_factory'; did you mean 'check_factories'?"),
        ("nowhere/train.py:make", "nowhere/train.py: there is no such file"),
        ("random.py:make", "random.py: 'random' is also the name of another module, "),
        ("check_faulty:make", "ModuleNotFoundError: No module named 'no_such' (check_faulty.py:1)"),
        ("check_exits:make", "cannot import 'check_exits': SystemExit: 3 (check_exits.py:2)"),
        ("check_factories:raises", "raised KeyError: 'weights.pt' (check_factories.py:40)"),
        ("check_factories:arguments", "got arguments(config): missing a required argument: 'con"),
        (
            "check_factories:no_batch",
            "Linear, SGD: the second is an optimizer, and no batch",
        ),
        ("check_factories:wrong_order", "Linear, tuple, SGD: the second is no optimizer"),
        ("check_factories:wrong_loss", "Linear, NoneType, tuple, str: the fourth is no function"),
        (
            "check_factories:model",
            "a mapping of keywords, got Linear",
        ),
    ],
)
def test_a_wrong_factory(capsys, factories, factory, message):
    (factories / "random.py").write_text("")
    (factories / "check_faulty.py").write_text("import no_such")
    (factories / "check_exits.py").write_text("import sys\nsys.exit(3)")
    with pytest.raises(SystemExit) as raised:
        main(["check", factory])
    assert raised.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_file_in_another_folder_and_a_list(capsys, factories):
    (factories / "src").mkdir()
    code = "from check_model import Linear\n\ndef make():\n    import check_batch\n"
    code += "    return [Linear(16, 8), check_batch.batch]\n"
    (factories / "src" / "check_made.py").write_text(code)
    (factories / "src" / "check_model.py").write_text("from torch.nn import Linear\n")
    (factories / "src" / "check_batch.py").write_text("import torch\nbatch = torch.ones(4, 16),\n")
    assert run(capsys, "src/check_made.py:make")[0] == 0


def test_a_script_that_parses_the_command_line(capsys, factories, monkeypatch):
    code = "import argparse\nfrom check_factories import clean\nargparse.ArgumentParser()"
    (factories / "check_script.py").write_text(f"{code}.parse_args()\n")
    command = ["tritonamp", "check", "check_script:clean"]
    monkeypatch.setattr("sys.argv", list(command))
    assert run(capsys, command[-1])[0] == 0
    assert sys.argv == command


def test_nothing_is_left_on_the_path():
    before = list(sys.path)
    main(["check", "check_factories:clean"])
    assert sys.path == before
    assert not torch.is_autocast_enabled("cpu")


def test_diff_is_a_comparison_with_fp32(capsys, tmp_path):
    path = tmp_path / "apart.png"
    status, text = run(capsys, "check_factories:faulty", "--diff", "--picture", path)
    assert status == 1
    assert "float16 (O2) against FP32 (O0), the same batch: loss " in text
    assert "they part first in 1, op mul at check_factories.py:7: inf ulps" in text
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_picture_of_a_diff_has_inf_and_nan_at_its_edge():
    from tritonamp.commands import apart

    place = Place("encoder.0", file="model.py", number=7)
    ulps = {0: 0.5, 1: math.inf, 2: math.nan, 3: 0.0}
    found = [Difference(place, "mul", (2,), n == 3, "", u, u, 0.1) for n, u in ulps.items()]
    compared = Comparison("float16 (O2)", "FP32 (O0)", torch.float16, tuple(found), 0, (1.0, 1.0))
    figure = apart.drawn("Net", compared)
    axes, (names,) = figure.axes[0], figure.legends
    points = {line.get_label(): line for line in axes.lines}
    assert list(points["forward"].get_xdata()) == [0]
    assert list(points["backward"].get_ydata()) == [apart.LEAST]  # the same: at the foot
    for word, step in (("inf: inf or NaN at one level only", 1), ("NaN", 2)):
        assert list(points[word].get_xdata()) == [step]
        assert points[word].get_transform() == axes.get_xaxis_transform()  # 1 is the upper edge
        assert list(points[word].get_ydata()) == [1]
    assert [text.get_text().strip() for text in axes.texts] == ["inf", "NaN"]
    assert [text.get_text() for text in names.get_texts()] == [
        "they part: encoder.0: mul, model.py:7"
    ]


def test_the_picture_of_a_diff_without_results(tmp_path):
    from tritonamp.commands import apart

    compared = Comparison("float16 (O1)", "FP32 (O0)", torch.float16, (), 0, (1.0, 1.0))
    apart.save_picture("Net", compared, tmp_path / "apart.png")


def test_diff_with_another_level(capsys):
    status, text = run(capsys, "check_factories:clean", "--level", "O1", "--diff", "O1")
    assert status == 0
    assert "float16 (O1) against float16 (O1), the same batch: loss " in text
    assert "every result is the same" in text
