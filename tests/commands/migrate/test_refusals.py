"""What is not understood is named with its line, and nothing is changed."""

import pytest

from tritonamp.commands.migrate.convert import To, convert

MADE = """\
import torch
from torch.cuda.amp import autocast, GradScaler

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler()
"""
STEP = """\
for x in [torch.ones(2)]:
    with autocast():
        loss = model(x).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
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
TRAINER = """\
import torch
class T:
    def __init__(self, model):
        self.model = model
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler()

    def step(self, x):
        with torch.autocast("cuda"):
            loss = self.model(x)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.opt)
        self.scaler.update()

"""
REFUSED: dict[str, tuple[str, int, str]] = {
    "print 1": ("print 1\n", 1, "not Python 3"),
    "a scaler of another file": (
        "def train(model, loss, scaler):\n    scaler.scale(loss).backward()\n",
        2,
        "`scaler` is not made in this function",
    ),
    "what is left of a scaler": (
        "def train(amp, loss, opt):\n    amp.backward(loss)\n    scaler.unscale_(opt)\n",
        3,
        "`scaler` is not made in this function",
    ),
    "two scalers": (MADE + "other = GradScaler()\n" + STEP, 7, "a second GradScaler"),
    "no optimizer": (MADE, 6, "which one model and optimizer"),
    "an attribute": (MADE.replace("scaler =", "model.a.scaler =") + STEP, 6, "plainly assigned"),
    "a list of arguments": (MADE.replace("r()", "r(*[])") + STEP, 6, "plainly assigned"),
    "always off": (MADE.replace("r()", "r(enabled=False)") + STEP, 6, "off here"),
    "an unknown use": (MADE + STEP + "print(scaler._scale)\n", 13, "scaler._scale"),
    "an unknown function": (MADE + STEP + "other(scaler)\n", 13, "not known"),
    "an option of step": (
        MADE + STEP.replace("(optimizer)", "(optimizer, f)"),
        6,
        "which one model and optimizer",
    ),
    "its result": (MADE + STEP.replace("scaler.step", "r = scaler.step"), 11, "not known"),
    "a scale that is kept": (
        MADE + STEP.replace("scaler.scale(loss)", "s = scaler.scale(loss)\n    s"),
        11,
        "beside scaled losses",
    ),
    "a graph of gradients": (
        MADE + STEP.replace("backward()", "backward(create_graph=True)"),
        10,
        "beside scaled losses",
    ),
    "autocast in a variable": (MADE + STEP + "context = autocast()\n", 13, "no `with` block"),
    "another condition": (
        MADE.replace("r()", "r(enabled=a)") + STEP.replace("t()", "t(enabled=b)"),
        8,
        "another condition",
    ),
    "two formats": (
        MADE + STEP + STEP.replace("t()", "t(dtype=torch.bfloat16)"),
        14,
        "dtype cannot be read",
    ),
    "a dtype in options": (
        MADE + STEP.replace("t()", "t(**options)"),
        8,
        "dtype cannot be read",
    ),
    "a dtype that may be FP32": (
        MADE.replace("model =", "dtype = choose()\nmodel =")
        + STEP.replace("t()", "t(dtype=dtype)"),
        9,
        "dtype cannot be read",
    ),
    "a function of torch's by hand": (
        "import torch\nf = torch.cuda.amp.custom_fwd(print, cast_inputs=torch.float16)\n",
        2,
        "is not called plainly",
    ),
    "no cache": (MADE + STEP.replace("t()", "t(cache_enabled=False)"), 8, "keeps what it has cast"),
    "a scaler in a loop": (
        MADE.replace("scaler =", "for i in range(2):\n    scaler =") + STEP,
        7,
        "in each round or call",
    ),
    "used before": (
        MADE.replace("optimizer =", "scaler = GradScaler()\nprint(scaler.get_scale())\noptimizer =")
        .replace("scaler = GradScaler()\nprint", "scaler = Grad\nprint")
        .replace("\nscaler = GradScaler()", "")
        .replace("scaler = Grad\n", "scaler = GradScaler()\n")
        + STEP,
        6,
        "is not there, or not yet",
    ),
    "an unknown model": (
        MADE.replace("model.parameters()", "p").replace("model = torch.nn.Linear(2, 2)", "p = []")
        + STEP.replace("model(x)", "x"),
        6,
        "which one model",
    ),
    "a plain backward": (MADE + STEP + "    (loss + 1).backward()\n", 13, "beside scaled losses"),
    "another optimizer": (
        MADE
        + "second = torch.optim.SGD(model.parameters(), lr=1)\n"
        + STEP
        + "    second.step()\n    second.zero_grad()\n",
        14,
        "past the scaler",
    ),
    "a clip of scaled gradients": (
        MADE
        + STEP.replace(
            "    scaler.step",
            "    torch.nn.utils.clip_grad_value_(model.parameters(), 1)\n    scaler.step",
        ),
        11,
        "carry the loss scale",
    ),
    "two optimizers": (
        MADE
        + "second = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        + STEP
        + "    scaler.step(second)\n",
        6,
        "which one model and optimizer",
    ),
    "a forward in FP32": (
        MADE + STEP.replace("    scaler.scale", "    loss += model(2 * x).sum()\n    scaler.scale"),
        10,
        "a forward in FP32 so far",
    ),
    "a forward in FP32 by its block": (
        MADE + STEP + "    with autocast(enabled=False):\n        model(x).sum()\n",
        14,
        "a forward in FP32 so far",
    ),
    "a scaler in a function that another file calls": (
        "import torch\ndef epoch(model, optimizer, loader):\n"
        "    print(*model.parameters())\n    scaler = torch.amp.GradScaler()\n"
        "    with torch.autocast('cuda'):\n        loss = model(1)\n"
        "    scaler.scale(loss).backward()\n    scaler.step(optimizer)\n    scaler.update()\n",
        4,
        "in each round or call",
    ),
    "no autocast": (MADE + STEP.replace("autocast()", "other()"), 6, "no autocast block"),
    "a scaler that may be None": (
        MADE.replace("GradScaler()", "GradScaler() if on else None") + STEP,
        6,
        "plainly assigned",
    ),
    "a scaler under a condition": (
        MADE.replace("scaler =", "if on:\n    scaler =") + STEP,
        7,
        "no autocast block",
    ),
    "a loop in another function": (
        "def train(model, opt, scaler, loss):\n    scaler.scale(loss).backward()\n"
        "    scaler.step(opt)\n    scaler.update()\n\n\n" + MADE,
        12,
        "which one model and optimizer",
    ),
    "the scale between step and update": (
        MADE + STEP.replace("    scaler.update", "    s = scaler.get_scale()\n    scaler.update"),
        12,
        "which are one now",
    ),
    "a norm of scaled gradients": (
        MADE
        + STEP.replace(
            "    scaler.step",
            "    torch.nn.utils.clip_grad_norm_(model.parameters(), 1)\n    scaler.step",
        ),
        11,
        "carry the loss scale",
    ),
    "a norm inside of apex's block": (
        APEX
        + START
        + SCALED
        + "    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1)\n",
        8,
        "in the block",
    ),
    "work behind several losses": (
        APEX + START + 2 * (SCALED + "torch.nn.utils.clip_grad_value_(model.parameters(), 1)\n"),
        8,
        "behind several losses",
    ),
    "an optimizer made anew in another method": (
        TRAINER + "    def restart(self):\n        self.opt = make(self.model.parameters())\n",
        6,
        "made anew in line 16",
    ),
    "a scaler that is asked for from outside": (
        TRAINER + "print(T(None).scaler.get_scale())\n",
        15,
        "not followed",
    ),
    "a scaler of a class": (
        "import torch\nclass T:\n    net = torch.nn.Linear(2, 2)\n"
        "    opt = torch.optim.SGD(net.parameters())\n"
        "    scaler = torch.amp.GradScaler()\n    def step(self, loss):\n"
        "        self.scaler.scale(loss).backward()\n        self.scaler.step(self.opt)\n",
        5,
        "belongs to a class",
    ),
    "a switch that changes": (
        MADE.replace("r()", "r(enabled=on)").replace("model =", "on = False\nmodel =")
        + "on = True\n"
        + STEP.replace("t()", "t(enabled=on)"),
        7,
        "`on` changes",
    ),
    "a scaler that is replaced": (MADE + "scaler = Other()\n" + STEP, 7, "`scaler = Other()`"),
    "a model under a condition": (
        MADE.replace("model =", "model = torch.nn.Linear(2, 2)\nif big:\n    two =").replace(
            "model.parameters()", "[*model.parameters(), *two.parameters()]"
        )
        + STEP,
        8,
        "under a condition alone",
    ),
    "gradients behind the step": (
        MADE + STEP + "    print(model.weight.grad)\n",
        13,
        "behind the step",
    ),
    "a new scale": (MADE + STEP.replace("update()", "update(2.0)"), 12, "not known"),
    "an FP32 warm-up": (
        "def warm(model, optimizer, loss):\n    loss.backward()\n    optimizer.step()\n\n\n"
        + MADE
        + "warm(model, optimizer, model(1))\n"
        + STEP,
        2,
        "a loop of its own",
    ),
    "nothing in the place of autocast": (
        MADE.replace("r()", "r(enabled=on)")
        + STEP.replace("autocast()", "nullcontext() if on else autocast()"),
        8,
        "no `with` block",
    ),
    "gradients behind apex's block": (
        APEX + START + SCALED + "print(model.weight.grad)\n",
        8,
        "carry the scale until the step",
    ),
    "several handles of apex": (
        "def make():\n    from apex import amp\n    import torch\n"
        "    model = torch.nn.Linear(2, 2)\n"
        "    optimizer = torch.optim.SGD(model.parameters())\n"
        "    model, optimizer = amp.initialize(model, optimizer)\n    return model, optimizer\n\n\n"
        "from apex import amp\n\n\ndef train(model, optimizer):\n"
        "    with amp.scale_loss(model(1), optimizer) as loss:\n        loss.backward()\n\n\n"
        "a = make()\nb = make()\n",
        6,
        "several handles",
    ),
    "an old name in a variable": (
        "import torch\ncast = torch.cuda.amp.autocast\n",
        2,
        "is not called",
    ),
    "apex as a value": (APEX + START + SCALED + "print(amp)\n", 8, "as a value"),
    "two handles": (APEX + START + START + SCALED, 7, "2 calls of amp.initialize"),
    "no handle": (APEX + SCALED, 5, "0 calls of amp.initialize"),
    "a loss in another file": (APEX + START, 5, "scaled in another one"),
    "an expression": (APEX + "print(amp.initialize(model, optimizer))\n" + SCALED, 5, "of its own"),
    "arguments in a dict": (APEX + START.replace("r)", "r, **{})") + SCALED, 5, "name each"),
    "an unknown scale": (
        APEX + START.replace("r)", "r, loss_scale=s)") + SCALED,
        5,
        "`loss_scale=s`",
    ),
    "disabled": (APEX + START.replace("r)", "r, enabled=False)") + SCALED, 5, "off here"),
    "an old function": (APEX + START + SCALED + "amp.init()\n", 8, "no counterpart"),
    "a name that is taken": (
        "from apex import amp as half\nimport torch\namp = 1\n"
        + (START + SCALED).replace("amp", "half"),
        3,
        "is something else",
    ),
    "a backward past the handle": (
        "def f(loss):\n    loss.backward()\n\n\n"
        + APEX
        + START
        + SCALED
        + "torch.ones(1).backward()\n",
        12,
        "beside scaled losses",
    ),
    "what tritonamp.apex has not": ("from apex.mlp import MLP\n", 1, "`apex.mlp.MLP` is not"),
    "an import by its text": (
        "import importlib\nimportlib.import_module('amp_C')\n",
        2,
        "imports by a text",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_is_refused_as_a_whole(name: str) -> None:
    text, line, what = REFUSED[name]
    conversion = convert(text)
    assert conversion.after == text and not conversion.changes
    notes = [note for note in conversion.todos if what in note.text]
    assert notes, conversion.todos
    assert notes[0].line == line
    assert name == "print 1" or "By hand: " in notes[0].text


def test_each_line_of_a_refused_loop_is_listed_with_what_to_write() -> None:
    lines = STEP.replace("scaler.step", "scaler.unscale_(optimizer)\n    scaler.step")
    listed = [f"{n.line}: {n.text}" for n in convert(MADE + "two = GradScaler()\n" + lines).todos]
    assert [line.split(" (")[0] for line in listed if ": write" in line or "take" in line] == [
        "6: `GradScaler()`: write `amp = tritonamp.enable(model, optimizer, level=...)`",
        "7: `GradScaler()`: write `amp = tritonamp.enable(model, optimizer, level=...)`",
        "9: `autocast()`: write `amp.autocast()`",
        "11: `scaler.scale(loss).backward()`: write `amp.backward(loss)`",
        "12: `scaler.unscale_(optimizer)`: write `amp.unscale_()`",
        "13: `scaler.step(optimizer)`: write `optimizer.step()`",
        "14: `scaler.update()`: take it out",
    ]
    apex = [note.text for note in convert(APEX + SCALED + "amp.state_dict()\n").todos]
    assert any(
        "write `amp.backward(model(torch.ones(2)).sum(), optimizer)`" in text for text in apex
    )
    assert any("`amp.state_dict()`: write `amp.state_dict()`" in text for text in apex)


def test_what_the_refused_ones_are_made_of_is_converted() -> None:
    for text in MADE + STEP, TRAINER, APEX + START + SCALED:
        assert convert(text).converted


@pytest.mark.parametrize("to", ["enable", "apex"])
@pytest.mark.parametrize("text", ["", "\n", "x = 1", "import torch\n", "# apex.amp\n"])
def test_there_may_be_nothing_to_do(text: str, to: To) -> None:
    conversion = convert(text, to)
    assert not conversion.converted and not conversion.todos and not conversion.changes
