"""What is not certain is named with its line, or keeps apex's functions; nothing is written."""

import pytest

from tritonamp.commands.migrate.command import convert

MADE = """\
import torch

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler()
"""
STEP = """\
for x in [torch.ones(2)]:
    with torch.autocast("cuda"):
        loss = model(x).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
NOTED: dict[str, tuple[str, int, str]] = {
    # text, the line that is noted, what is said of it
    "no model": ("import torch\nscaler = torch.amp.GradScaler()\n", 2, "not known here"),
    "no optimizer": (MADE.replace("optimizer", "x").replace("SGD", "X"), 5, "not known here"),
    "in another function": (
        "import torch\nscaler = torch.cuda.amp.GradScaler()\ndef main():\n    "
        + MADE.split("scaler")[0].replace("\n", "\n    "),
        2,
        "`amp.scaler` here; other lines stay",
    ),
    "used before its optimizer is made": (
        MADE.replace("optimizer =", "scaler = torch.amp.GradScaler()\nuse(scaler)\noptimizer ="),
        4,
        "not known here",
    ),
    "a wrapper's own": (
        "import torch\nclass Scaler:\n    def __init__(self):\n"
        "        self.scaler = torch.amp.GradScaler()\n"
        "    def __call__(self, loss, optimizer):\n        self.scaler.step(optimizer)\n",
        4,
        "not known here",
    ),
    "an optimizer of a later method": (
        "import torch\nclass T:\n    def __init__(self, model):\n        self.model = model\n"
        "        self.scaler = torch.amp.GradScaler()\n    def setup(self):\n"
        "        self.optimizer = torch.optim.SGD(self.model.parameters())\n",
        5,
        "not known here",
    ),
    "under a condition, its optimizer is not made yet": (
        MADE.split("optimizer")[0]
        + "if True:\n    scaler = torch.amp.GradScaler()\n"
        + "optimizer = torch.optim.SGD(model.parameters())\n",
        5,
        "not known here",
    ),
    "made with its model in one statement": (
        "import torch\nmodel, scaler = torch.nn.Linear(2, 2), torch.amp.GradScaler()\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n",
        2,
        "not known here",
    ),
    "made with its model in one line": (
        "import torch\nmodel = torch.nn.Linear(2, 2); optimizer = "
        "torch.optim.SGD(model.parameters()); scaler = torch.amp.GradScaler()\n",
        2,
        "not known here",
    ),
    "behind a condition in its line": (
        MADE.replace("scaler =", "if True: scaler ="),
        5,
        "not known",
    ),
    "for models of a loop": (
        MADE.replace(
            "optimizer =", "params = []\nfor m in [model]: params += m.parameters()\nopt ="
        ).replace("SGD(model.parameters()", "SGD(ps"),
        7,
        "not known here",
    ),
    "for models of a comprehension": (
        MADE.replace("SGD(model.parameters()", "SGD([p for m in [model] for p in m.parameters()]"),
        5,
        "not known here",
    ),
    "in several lines": (
        "import torch\nscaler = torch.amp.GradScaler(\n    init_scale=2.0,\n)\n",
        2,
        "GradScaler(init_scale=2.0)`: its model",
    ),
    "a function of torch's by hand": (
        "import torch\nf = torch.cuda.amp.custom_fwd(print, cast_inputs=torch.float16)\n",
        2,
        "is not called plainly",
    ),
    "an old name in a variable": (
        "import torch\ncast = torch.cuda.amp.autocast\n",
        2,
        "is not called plainly",
    ),
    "arguments in a list": (
        "import torch\nx = torch.cuda.amp.autocast(*[True])\n",
        2,
        "is not called plainly",
    ),
    "an argument in parentheses": (
        "import torch\nx = torch.cuda.amp.autocast((True))\n",
        2,
        "is not called plainly",
    ),
    "other names of an old module": (
        "from torch.cuda.amp import autocast, common\nx = autocast()\n",
        1,
        "has other names, too",
    ),
    "other names beside an old module": (
        "from torch.cuda import amp, nccl\nx = amp.autocast()\n",
        1,
        "has other names, too",
    ),
    "what tritonamp.apex has not": ("from apex.mlp import MLP\n", 1, "`apex.mlp.MLP` is not"),
    "an import by its text": (
        "import importlib\nimportlib.import_module('amp_C')\n",
        2,
        "imports by a text",
    ),
}


@pytest.mark.parametrize("name", NOTED)
def test_what_is_not_known_is_noted_with_its_line(name: str) -> None:
    text, line, what = NOTED[name]
    script = convert(text)
    notes = [note for note in sorted(script.notes) if what in note[1]]
    assert notes, script.notes
    assert notes[0][0] == line
    assert ". By hand: " in notes[0][1]
    assert "tritonamp.enable" not in script.after


def test_two_is_not_python_3() -> None:
    with pytest.raises(SyntaxError):
        convert("print 1\n")
    with pytest.raises(SyntaxError, match="carriage returns"):
        convert("x = 1\ry = 2\n")


def test_what_the_noted_ones_are_made_of_is_listed() -> None:
    script = convert(MADE + STEP)
    assert script.is_list and not script.notes
    assert [change.line for change in script.changes()] == [1, 4, 5]


def test_a_name_that_is_taken_is_left_alone() -> None:
    after = convert("amp = 3\n" + MADE + STEP).after
    assert 'handle = tritonamp.enable(model, optimizer, level="O1")' in after
    assert "scaler = handle.scaler" in after


def test_functions_that_get_a_scaler_have_nothing_to_change() -> None:
    text = "def train(model, loss, scaler):\n    scaler.scale(loss).backward()\n"
    assert not convert(text).changes() and not convert(text).notes


def test_autocast_alone_is_listed_for_bfloat16_that_trains() -> None:
    text = MADE.split("scaler")[0] + 'with torch.autocast("cuda", torch.bfloat16):\n    model(1)\n'
    assert (
        'amp = tritonamp.enable(model, optimizer, level="O1", dtype=torch.bfloat16)'
        in convert(text).after
    )
    assert not convert(text.replace("bfloat16", "float16")).changes()
    enabled = "amp = tritonamp.enable(model, optimizer)\nwith torch.autocast"
    assert not convert(
        "import tritonamp\n" + text.replace("with torch.autocast", enabled)
    ).changes()
    assert not convert(text.replace("optimizer = ", "print(").replace("0.1)", "0.1))")).changes()


APEX = """\
import torch
from apex import amp
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
START = "model, optimizer = amp.initialize(model, optimizer)\n"
SCALED = """\
with amp.scale_loss(model(torch.ones(2)).sum(), optimizer) as loss:
    loss.backward()
"""
KEPT = {
    "a norm inside of the block": APEX
    + START
    + SCALED
    + "    torch.nn.utils.clip_grad_norm_(model.parameters(), 1)\n",
    "a clip by value": APEX
    + START
    + SCALED
    + "torch.nn.utils.clip_grad_value_(model.parameters(), 1)\n",
    "a norm of another kind": APEX
    + START
    + SCALED
    + "torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1, 1)\n",
    "masters in a loop": APEX + START + SCALED + "for p in amp.master_params(optimizer): p.grad\n",
    "gradients behind the block": APEX + START + SCALED + "print(model.weight.grad)\n",
    "two handles": APEX + START + START + SCALED,
    "no handle": APEX + SCALED,
    "a loss in another file": APEX + START,
    "an expression": APEX + "print(amp.initialize(model, optimizer))\n" + SCALED,
    "arguments in a dict": APEX + START.replace("r)", "r, **{})") + SCALED,
    "five places": APEX + START.replace("r)", "r, True, 'O1', None)") + SCALED,
    "an unknown scale": APEX + START.replace("r)", "r, loss_scale=s)") + SCALED,
    "an old function": APEX + START + SCALED + "amp.init()\n",
    "a list of apex": APEX + START + SCALED + "amp.register_half_function(torch, 'sin')\n",
    "a name that is taken": APEX.replace("import amp", "import amp as half")
    + "amp = 1\n"
    + (START + SCALED).replace("amp", "half"),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_loop_that_the_list_does_not_know_keeps_apexs_functions(name: str) -> None:
    script = convert(KEPT[name])
    assert not script.notes and not script.is_list
    assert script.after == KEPT[name].replace("from apex", "from tritonamp.apex")


def test_the_loop_of_apex_is_listed() -> None:
    script = convert(APEX + START + SCALED)
    assert script.is_list and not script.notes
    assert (
        script.after
        == """\
import torch
import tritonamp
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
amp = tritonamp.enable(model, optimizer, level="O1")
amp.backward(model(torch.ones(2)).sum(), optimizer)
"""
    )


@pytest.mark.parametrize("to", ["enable", "apex"])
@pytest.mark.parametrize("text", ["", "\n", "x = 1", "import torch\n", "# apex.amp\n"])
def test_there_may_be_nothing_to_do(text: str, to: str) -> None:
    script = convert(text, to)
    assert script.after == text and not script.notes and not script.changes()
