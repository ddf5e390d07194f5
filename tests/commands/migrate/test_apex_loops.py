"""Loops with apex.amp: to the handle, or only their imports; and that they train as before."""

import pytest
from training_programs import HEAD, run, same

from tritonamp.commands.migrate.convert import convert

PLAIN = """\
from apex import amp

model = make()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
for x, y in data:
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()  # scaled
    optimizer.step()
    losses.append(loss.item())
"""
FUNCTIONS = """\
try:
    from apex import amp
except ImportError:
    amp = None


class Args:
    fp16 = ON
    level = "O1"


def train(args, model, optimizer):
    for x, y in data:
        loss = criterion(model(x), y)
        if args.fp16:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.1)
        else:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        model.zero_grad()
        losses.append(loss.item())


def main(args):
    '''Train.'''
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    if args.fp16:
        # once
        model, optimizer = amp.initialize(model, optimizer, opt_level=args.level, verbosity=0)
    train(args, model, optimizer)


main(Args)
"""
TRAINER = """\
import apex


class Trainer:
    def __init__(self):
        self.net = make()
        sgd = torch.optim.SGD(self.net.parameters(), lr=0.2)
        self.net, self.optimizer = apex.amp.initialize(
            self.net, sgd, opt_level="O2", loss_scale=128.0, keep_batchnorm_fp32="True"
        )

    def step(self, x, y):
        loss = criterion(self.net(x), y)
        with apex.amp.scale_loss(loss, self.optimizer) as scaled:
            scaled.backward()
        for p in apex.amp.master_params(self.optimizer):
            if p.grad is not None:
                p.grad.clamp_(-100, 100)
        self.optimizer.step()
        self.optimizer.zero_grad()
        losses.append(loss.item())


trainer = Trainer()
for x, y in data:
    trainer.step(x, y)
"""
SEVERAL = """\
from apex import amp
from apex.optimizers import FusedSGD

one, two = make(), make()
opt_one, opt_two = FusedSGD(one.parameters(), lr=0.2), FusedSGD(two.parameters(), lr=0.1)
[one, two], [opt_one, opt_two] = amp.initialize(
    [one, two], [opt_one, opt_two], opt_level="O1", num_losses=3, loss_scale=128.0
)
for x, y in data:
    first, second = criterion(one(x), y), one(x).square().mean()
    with amp.scale_loss(first, opt_one, loss_id=0) as scaled:
        scaled.backward(retain_graph=True)
    with amp.scale_loss(second, opt_one, loss_id=1) as scaled:
        scaled.backward()
    opt_one.step()
    opt_one.zero_grad()
    third = criterion(two(x), y)
    with amp.scale_loss(third, [opt_two], loss_id=2) as scaled:
        scaled.backward()
    opt_two.step()
    opt_two.zero_grad()
    losses += [first.item(), third.item()]
"""
ACCUMULATED = """\
from apex import amp

net = make()
optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
model, optimizer = amp.initialize(net, optimizer, enabled=True, opt_level="O1", verbosity=0)
for i, (x, y) in enumerate(data):
    loss = criterion(model(x), y) / 2
    with amp.scale_loss(loss, optimizer, delay_unscale=i % 2 == 0) as scaled_loss:
        scaled_loss.backward()
    if i % 2:
        norm = nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm=0.1)
    losses.append(loss.item())
    if i % 2:
        optimizer.step()
        optimizer.zero_grad()
"""
CLIPS = """\
from apex import amp

model = make()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
on, big = True, False
model, optimizer = amp.initialize(
    model, optimizer, enabled=on, opt_level="O2" if big else "O1", verbosity=0
)
for x, y in data:
    loss = criterion(model(x), y)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    torch.nn.utils.CLIP
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
"""
BY_NORM = CLIPS.replace("CLIP", "clip_grad_norm_(model.parameters(), 0.1)")
BY_VALUE = CLIPS.replace("CLIP", "clip_grad_value_(model.parameters(), 0.01)")
TRAINED = {
    "clips by norm": BY_NORM,
    "clips by value": BY_VALUE,
    "plain": PLAIN,
    "functions": FUNCTIONS.replace("ON", "True"),
    "functions, off": FUNCTIONS.replace("ON", "False"),
    "trainer": TRAINER,
    "several": SEVERAL,
    "accumulated": ACCUMULATED,
}


@pytest.mark.parametrize("name", TRAINED)
def test_what_is_converted_trains_as_before(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The original runs with the imports of tritonamp.apex, which tests/apex holds against apex."""
    text = HEAD + TRAINED[name]
    original, converted = convert(text, "apex"), convert(text)
    assert not original.todos and not converted.todos
    assert "scale_loss" not in converted.after and "initialize" not in converted.after
    same(run(original.after, monkeypatch), run(converted.after, monkeypatch))
    for conversion in original, converted:
        assert not convert(conversion.after).converted


def test_the_loop_of_apexs_readme() -> None:
    after = convert(HEAD + PLAIN).after
    assert (
        after[after.index("model") :]
        == """\
model = make()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
amp = tritonamp.enable(model, optimizer, level="O2")
for x, y in data:
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    amp.backward(loss)  # scaled
    optimizer.step()
    losses.append(loss.item())
"""
    )


def test_a_handle_that_other_functions_use_is_global_and_branches_stay() -> None:
    after = convert(HEAD + FUNCTIONS).after
    assert (
        """
        loss = criterion(model(x), y)
        if args.fp16:
            amp.backward(loss)
            amp.clip_grad_norm_(0.1)
        else:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
"""
        in after
    )
    assert (
        """
    '''Train.'''
    global amp
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    if args.fp16:
        # once
        amp = tritonamp.enable(model, optimizer, level=args.level)
    train(args, model, optimizer)
"""
        in after
    )
    assert "ImportError" not in after


def test_a_class_keeps_its_handle_and_results_keep_their_names() -> None:
    after = convert(TRAINER).after
    assert (
        """
        self.net, self.optimizer = self.net, sgd
        self.amp = tritonamp.enable(self.net, self.optimizer, level="O2", \
loss_scale=128.0, keep_norms_fp32=True)
"""
        in after
    )
    assert (
        """
        self.amp.backward(loss)
        self.amp.unscale_()  # true gradients
        for p in self.amp.master_params():
            if p.grad is not None:
"""
        in after
    )


def test_several_losses_keep_their_scales() -> None:
    after = convert(SEVERAL).after
    assert 'tritonamp.enable([one, two], [opt_one, opt_two], level="O1", loss_scale=128.0)' in after
    assert "    amp.backward(first, opt_one, loss_id=0, retain_graph=True)\n" in after
    assert "    amp.backward(second, opt_one, loss_id=1)\n" in after
    assert "from tritonamp.apex.optimizers import FusedSGD" in after


def test_gradients_are_true_where_apex_had_unscaled_them() -> None:
    after = convert(HEAD + BY_NORM).after
    assert 'level=("O2" if big else "O1") if on else "O0")' in after
    assert "    amp.backward(loss)\n    amp.clip_grad_norm_(0.1)\n" in after
    by_value = "    torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)\n"
    assert f"    amp.unscale_()  # true gradients\n{by_value}" in convert(HEAD + BY_VALUE).after


def test_results_of_other_names_get_them() -> None:
    after = convert(HEAD + ACCUMULATED).after
    assert "model, optimizer = net, optimizer\namp = tritonamp.enable(model, optimizer" in after
    assert (
        "    amp.backward(loss)\n    if i % 2:\n        norm = amp.clip_grad_norm_(0.1)\n" in after
    )


def test_results_without_optimizers_are_still_two() -> None:
    text = "from apex import amp\nnet, _ = amp.initialize(net, [], opt_level='O3')\n"
    made = "net, _ = net, []\namp = tritonamp.enable(net, level='O3')\n"
    assert convert(text).after == "import tritonamp\n" + made


def test_a_scaled_loss_that_is_used_keeps_its_block() -> None:
    text = PLAIN.replace("scaled_loss.backward()", "scaled_loss.backward(); print(scaled_loss)")
    assert "    with amp.scale_loss(loss) as scaled_loss:\n" in convert(HEAD + text).after


def test_a_block_in_one_line_stays_whole() -> None:
    text = PLAIN.replace("\n        scaled_loss.backward()", " scaled_loss.backward(); print(1)")
    line = "    with amp.scale_loss(loss) as scaled_loss: scaled_loss.backward(); print(1)"
    assert line in convert(HEAD + text).after


def test_a_scaled_loss_that_is_read_behind_its_block_keeps_it() -> None:
    text = PLAIN.replace("    losses.append", "    print(scaled_loss)\n    losses.append")
    assert "    with amp.scale_loss(loss) as scaled_loss:\n" in convert(HEAD + text).after


def test_gradients_that_are_worked_on_are_unscaled_once() -> None:
    text = PLAIN.replace(
        "    optimizer.step()",
        "    nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.1)\n"
        "    print(sum(p.grad.sum() for p in amp.master_params(optimizer)))\n    optimizer.step()",
    )
    after = convert(HEAD + text).after
    assert (
        """
    amp.backward(loss)  # scaled
    amp.unscale_()  # true gradients
    nn.utils.clip_grad_norm_(amp.master_params(), 0.1)
    print(sum(p.grad.sum() for p in amp.master_params()))
"""
        in after
    )


IMPORTS = {
    "import apex": "import tritonamp.apex as apex",
    "import apex.amp": "import tritonamp.apex as apex",
    "import os, apex": "import os\nimport tritonamp.apex as apex",
    "import amp_C": "import tritonamp.apex.amp_C as amp_C",
    "import apex.parallel as p": "import tritonamp.apex.parallel as p",
    "from apex import amp, optimizers": "from tritonamp.apex import amp, optimizers",
    "from apex.amp import initialize as i": "from tritonamp.apex.amp import initialize as i",
    "from apex.optimizers import (\n    FusedAdam,  # Adam\n)": (
        "from tritonamp.apex.optimizers import (\n    FusedAdam,  # Adam\n)"
    ),
    "from apex.fp16_utils import *": "from tritonamp.apex.fp16_utils import *",
    "from apex.normalization.fused_layer_norm import FusedLayerNorm": (
        "from tritonamp.apex.normalization.fused_layer_norm import FusedLayerNorm"
    ),
    "if True:\n    import apex; x = 1": "if True:\n    import tritonamp.apex as apex; x = 1",
    "from .apex import amp": None,
    "import apexes": None,
}


@pytest.mark.parametrize("text", IMPORTS)
def test_imports_of_apex_are_all_that_to_apex_changes(text: str) -> None:
    conversion = convert(f"{text}\n", "apex")
    assert not conversion.todos
    assert conversion.after == f"{IMPORTS[text] or text}\n"
    assert conversion.converted == bool(conversion.changes)
    exec(conversion.after) if IMPORTS[text] else None


def test_what_comes_with_initialize_is_not_looked_for() -> None:
    text = "from apex import amp\namp._amp_state.of_later[0]._loss_scale = 2**20\n"
    assert convert(text, "apex").after == text.replace("from apex", "from tritonamp.apex")
    assert "`apex.amp.nothing.of_later` is not" in (
        convert(text.replace("_amp_state", "nothing"), "apex").todos[0].text
    )


def test_to_apex_leaves_torchs_amp_alone() -> None:
    assert not convert("import torch\nscaler = torch.cuda.amp.GradScaler()\n", "apex").converted
