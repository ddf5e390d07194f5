"""Loops with torch's autocast and GradScaler: what becomes of them; they train as before."""

import pytest
from training_programs import HEAD, run, same

from tritonamp.commands.migrate.convert import convert

PLAIN = """\
from torch.amp import GradScaler, autocast

model = make()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
scaler = GradScaler("cpu")
for x, y in data:
    optimizer.zero_grad()
    with autocast("cpu", dtype=torch.float16):
        loss = criterion(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
"""
CLIPPED = """\
scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
model = make()
params = [{"params": [p for n, p in model.named_parameters() if "bias" not in n]}]
params.append({"params": [p for n, p in model.named_parameters() if "bias" in n]})
optimizer = torch.optim.SGD(params, lr=0.2, momentum=0.9)
for i, (x, y) in enumerate(data):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = criterion(model(x), y) / 2
    scaler.scale(loss).backward()
    losses.append(loss.item())
    if i % 2:
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""
OWN_GRADIENTS = """\
model = make()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
scaler = torch.amp.GradScaler("cpu")
for x, y in data:
    with torch.autocast("cpu", dtype=torch.float16):
        loss = criterion(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    for p in model.parameters():
        p.grad.clamp_(-0.05, 0.05)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=1)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    losses.append(loss.item())
"""
FUNCTIONS = """\
def epoch(net, opt, grad_scaler, use_amp):
    net.train()
    for x, y in data:
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16, enabled=use_amp):
            loss = criterion(net(x), y)
        if grad_scaler is not None:
            # scaled
            grad_scaler.scale(loss).backward()
            grad_scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            grad_scaler.step(opt)
            grad_scaler.update()
        else:
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            opt.step()
        losses.append(loss.item())


def main(use_amp=ON):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu") if use_amp else None
    epoch(model, optimizer, scaler, use_amp=use_amp)
    state = {"model": model.state_dict()}
    if scaler is not None:
        state["scaler"] = scaler.state_dict()


main()
"""
TRAINER = """\
class Trainer:
    def __init__(self, model, lr, use_amp):
        self.model = model
        self.use_amp = use_amp
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9)
        if use_amp:
            self.scaler = torch.amp.GradScaler("cpu")
        else:
            self.scaler = None

    def forward(self, x, y):
        with torch.autocast("cpu", dtype=torch.float16, enabled=self.use_amp):
            return criterion(self.model(x), y)

    def fit(self):
        for x, y in data:
            loss = self.forward(x, y)
            if self.use_amp:
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
            else:
                loss.backward()
                self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())


Trainer(make(), 0.2, ON).fit()
"""
TWO_OPTIMIZERS = """\
one, two = make(), make()
opt_one = torch.optim.SGD(one.parameters(), lr=0.2)
opt_two = torch.optim.SGD(two.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu")
for x, y in data:
    with torch.autocast("cpu", dtype=torch.float16):
        loss = criterion(one(x), y)
    opt_one.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt_one)
    with torch.autocast("cpu", dtype=torch.float16):
        other = criterion(two(one(x).detach() @ torch.ones(3, 6)), y)
    opt_two.zero_grad()
    scaler.scale(other).backward()
    scaler.step(opt_two)
    scaler.update()
    losses += [loss.item(), other.item()]
"""
SCHEDULED = """\
model = make()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
scaler = torch.amp.GradScaler(device="cpu", growth_interval=2)
for x, y in data:
    optimizer.zero_grad()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        model(x)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = criterion(model(x), y)
    scaler.scale(loss).backward(retain_graph=True)
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    if scale <= scaler.get_scale():
        schedule.step()
    losses.append(loss.item())
"""
KEYWORDS = """\
def fit(model, optimizer, *, scaler, clip):
    for x, y in data:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        old = scaler.get_scale()
        scaler.step(optimizer)
        scale = scaler.get_scale()
        scaler.update()
        losses.append(loss.item())
        if scale <= scaler.get_scale():
            optimizer.param_groups[0]["lr"] *= 0.9
        optimizer.zero_grad()


def main():
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    fit(model, optimizer, clip=0.1, scaler=scaler)


main()
"""
ONE_LOSS = """\
one, two = make(), nn.Linear(3, 3)
opt_one = torch.optim.SGD(one.parameters(), lr=0.2)
opt_two = torch.optim.SGD(two.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu")
for x, y in data:
    with torch.autocast("cpu", dtype=torch.float16):
        loss = criterion(two(one(x)), y)
    opt_one.zero_grad()
    opt_two.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt_one)
    scaler.step(opt_two)
    scaler.update()
    losses.append(loss.item())
"""
GLOBAL = """\
def setup(fp16):
    global model, optimizer, scaler
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    scaler = torch.amp.GradScaler("cpu", enabled=fp16 if fp16 else False)


def step(x, y, fp16):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16, enabled=fp16 if fp16 else False):
        loss = criterion(model(x), y)
    scaler.scale(loss).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())


fp16 = True
setup(fp16)
for x, y in data:
    step(x, y, fp16)
"""
NEGATED = """\
def clip(parameters):
    for p in parameters:
        p.grad.clamp_(-0.05, 0.05)


def train(fp16):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    scaler = torch.amp.GradScaler("cpu") if fp16 else None
    for x, y in data:
        with torch.autocast("cpu", dtype=torch.float16, enabled=fp16):
            loss = criterion(model(x), y)
        optimizer.zero_grad()
        if not fp16:
            loss.backward()
            clip(model.parameters())
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            clip(model.parameters())
            scaler.step(optimizer)
            scaler.update()
        losses.append(loss.item())


train(ON)
"""
FOLDS = """\
for fold in range(2):
    torch.manual_seed(fold)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    scaler = torch.amp.GradScaler("cpu")
    for x, y in data:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = criterion(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
"""
TRAINED = {
    "plain": PLAIN,
    "clipped": CLIPPED,
    "own gradients": OWN_GRADIENTS,
    "functions": FUNCTIONS.replace("ON", "True"),
    "functions, off": FUNCTIONS.replace("ON", "False"),
    "trainer": TRAINER.replace("ON", "True"),
    "trainer, off": TRAINER.replace("ON", "False"),
    "two optimizers": TWO_OPTIMIZERS,
    "scheduled": SCHEDULED,
    "keywords": KEYWORDS,
    "one loss": ONE_LOSS,
    "global": GLOBAL,
    "folds": FOLDS,
    "negated": NEGATED.replace("ON", "True"),
    "negated, off": NEGATED.replace("ON", "False"),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", TRAINED)
def test_what_is_converted_trains_as_before(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = HEAD + TRAINED[name]
    conversion = convert(text)
    assert not conversion.todos
    left = "GradScaler(", ".scale(", ".update()", "import autocast", ".step(opt"
    made = conversion.after.replace("tritonamp.GradScaler(", "")
    assert not [word for word in left if word in made]
    same(run(text, monkeypatch), run(conversion.after, monkeypatch))
    assert not convert(conversion.after).converted


def body(text: str) -> str:
    """Return a conversion of statements behind HEAD."""
    conversion = convert(HEAD + text)
    assert not conversion.todos, conversion.todos
    return conversion.after[conversion.after.index("model") :]


def test_the_loop_of_the_first_page() -> None:
    assert (
        body(PLAIN)
        == """\
model = make()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
amp = tritonamp.enable(model, optimizer, level="O1")
for x, y in data:
    optimizer.zero_grad()
    with amp.autocast():
        loss = criterion(model(x), y)
    amp.backward(loss)
    optimizer.step()
    losses.append(loss.item())
"""
    )


def test_a_handle_is_made_behind_model_and_optimizer_and_clips_in_the_step() -> None:
    after = body(CLIPPED)
    assert (
        """
optimizer = torch.optim.SGD(params, lr=0.2, momentum=0.9)
amp = tritonamp.enable(model, optimizer, level="O1", \
scaler=tritonamp.GradScaler(init_scale=128.0))
for"""
        in after
    )
    assert (
        """
    if i % 2:
        norm = amp.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
"""
        in after
    )


def test_other_clips_and_own_work_see_true_gradients() -> None:
    assert """
    amp.backward(loss)
    amp.unscale_()
    for p in model.parameters():
        p.grad.clamp_(-0.05, 0.05)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=1)
    optimizer.step()
""" in body(OWN_GRADIENTS)


def test_branches_that_are_the_same_become_one() -> None:
    after = convert(HEAD + FUNCTIONS).after
    assert (
        """
def epoch(net, opt, amp, use_amp):
    net.train()
    for x, y in data:
        opt.zero_grad()
        with amp.autocast():
            loss = criterion(net(x), y)
        # scaled
        amp.backward(loss)
        amp.clip_grad_norm_(0.1)
        opt.step()
        losses.append(loss.item())
"""
        in after
    )
    assert (
        """
    amp = tritonamp.enable(model, optimizer, level="O1" if use_amp else "O0")
    epoch(model, optimizer, amp, use_amp=use_amp)
    state = {"model": model.state_dict()}
    state["scaler"] = amp.state_dict()
"""
        in after
    )


def test_keywords_are_renamed_and_the_scale_is_read_before_it_moves() -> None:
    after = convert(HEAD + KEYWORDS).after
    assert "def fit(model, optimizer, *, amp, clip):" in after
    assert "fit(model, optimizer, clip=0.1, amp=amp)" in after
    assert (
        """
        amp.backward(loss)
        scale = amp.scaler.get_scale()
        old = amp.scaler.get_scale()
        amp.unscale_()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
"""
        in after
    )


def test_a_loss_that_feeds_all_names_none() -> None:
    assert "    amp.backward(loss)\n    opt_one.step()\n" in convert(HEAD + ONE_LOSS).after


def test_a_name_that_is_shared_stays_and_a_condition_gets_its_parentheses() -> None:
    after = convert(HEAD + GLOBAL).after
    level = 'level="O1" if (fp16 if fp16 else False) else "O0"'
    assert f"    scaler = tritonamp.enable(model, optimizer, {level})" in after
    assert "    scaler.clip_grad_norm_(1e9)\n" in after


def test_a_branch_for_fp32_is_one_with_that_for_half() -> None:
    after = convert(HEAD + NEGATED).after
    assert (
        """
        optimizer.zero_grad()
        amp.backward(loss)
        amp.unscale_()
        clip(model.parameters())
        optimizer.step()
        losses.append(loss.item())
"""
        in after
    )


def test_branches_that_clip_other_parameters_stay() -> None:
    text = HEAD + FUNCTIONS.replace("if grad_scaler is not None:", "if use_amp:").replace(
        "            loss.backward()\n            nn.utils.clip_grad_norm_(net.parameters()",
        "            loss.backward()\n            nn.utils.clip_grad_norm_(net[0].parameters()",
    )
    after = convert(text).after
    assert "        if use_amp:\n            # scaled\n            amp.backward(loss)\n" in after
    assert "            nn.utils.clip_grad_norm_(net[0].parameters(), 0.1)\n" in after


def test_a_scaler_of_self_becomes_a_handle_of_self() -> None:
    after = convert(HEAD + TRAINER).after
    assert (
        """
        self.amp = tritonamp.enable(model, self.optimizer, level="O1" if use_amp else "O0")

    def forward(self, x, y):
        with self.amp.autocast():
            return criterion(self.model(x), y)

    def fit(self):
        for x, y in data:
            loss = self.forward(x, y)
            self.amp.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
"""
        in after
    )


def test_each_loss_of_two_optimizers_gets_its_own_and_a_scale() -> None:
    after = convert(HEAD + TWO_OPTIMIZERS).after
    assert 'amp = tritonamp.enable([one, two], [opt_one, opt_two], level="O1")' in after
    assert "amp.backward(loss, opt_one)" in after
    assert "amp.backward(other, opt_two, loss_id=1)" in after


def test_the_scale_can_still_be_asked_for() -> None:
    after = convert(HEAD + SCHEDULED).after
    assert (
        "    amp.backward(loss, retain_graph=True)\n    scale = amp.scaler.get_scale()\n" in after
    )
    assert "    if scale <= amp.scaler.get_scale():\n" in after


LOOP = """\
import torch
{imports}

def train(model, optimizer, scaler, loader, args):
    for x, y in loader:
        with {autocast}:
            loss = model(x, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def main(net, args, loader):
    optimizer = torch.optim.AdamW(net.parameters())
    {made}
    train(net, optimizer, scaler, loader, args)
"""
MADE = [
    # imports, how the scaler is made, how autocast is entered, what enable is told
    ("", "scaler = torch.cuda.amp.GradScaler()", "torch.cuda.amp.autocast()", '"O1"'),
    ("from torch.cuda import amp", "scaler = amp.GradScaler()", "amp.autocast()", '"O1"'),
    ("import torch.cuda.amp as amp", "scaler = amp.GradScaler()", "amp.autocast(True)", '"O1"'),
    ("from torch import amp", "scaler = amp.GradScaler()", "torch.autocast('cuda')", '"O1"'),
    ("", 'scaler = torch.GradScaler("cuda", enabled=True)', "torch.autocast('cuda')", '"O1"'),
    (
        "from torch.cuda.amp import GradScaler as Scaler, autocast",
        "scaler = Scaler()",
        "autocast(dtype=torch.bfloat16)",
        '"O1", dtype=torch.bfloat16',
    ),
    (
        "",
        "scaler = torch.amp.GradScaler('cuda', enabled=args.amp)",
        "torch.autocast('cuda', torch.float16, args.amp)",
        '"O1" if args.amp else "O0"',
    ),
    (
        "use_amp = object()",
        "scaler = torch.amp.GradScaler('cuda', enabled=args.amp)",
        "torch.autocast('cuda', enabled=use_amp)",
        None,  # another condition
    ),
]


@pytest.mark.parametrize(("imports", "made", "autocast", "level"), MADE)
def test_every_way_to_make_a_scaler(
    imports: str, made: str, autocast: str, level: str | None
) -> None:
    conversion = convert(LOOP.format(imports=imports, made=made, autocast=autocast))
    if level is None:
        assert "another condition" in conversion.todos[0].text
        return
    assert f"    amp = tritonamp.enable(net, optimizer, level={level})\n" in conversion.after
    assert "        with amp.autocast():\n" in conversion.after
    assert "torch.amp" not in conversion.after and "torch.cuda" not in conversion.after
    assert "import tritonamp\n" in conversion.after
    compile(conversion.after, "after.py", "exec")


def test_a_name_that_is_taken_is_left_alone() -> None:
    text = LOOP.format(
        imports="amp = 3", made="scaler = torch.amp.GradScaler()", autocast="torch.autocast('cuda')"
    )
    after = convert(text).after
    assert 'scaler = tritonamp.enable(net, optimizer, level="O1")' in after
    assert "scaler.backward(loss)" in after


def test_evaluation_keeps_torchs_autocast_under_its_new_name() -> None:
    text = """\
import torch as th
from torch.cuda.amp import autocast, custom_fwd


def evaluate(model, x):
    with autocast(), th.no_grad():
        model(x)
    with autocast(False, cache_enabled=False):
        return model(x)


class Product(th.autograd.Function):
    @staticmethod
    @custom_fwd
    def forward(ctx, x):
        return x

    @staticmethod
    @th.cuda.amp.custom_bwd
    def backward(ctx, x):
        return x
"""
    assert (
        convert(text).after
        == """\
import torch as th


def evaluate(model, x):
    with th.autocast("cuda"), th.no_grad():
        model(x)
    with th.autocast("cuda", enabled=False, cache_enabled=False):
        return model(x)


class Product(th.autograd.Function):
    @staticmethod
    @th.amp.custom_fwd(device_type="cuda")
    def forward(ctx, x):
        return x

    @staticmethod
    @th.amp.custom_bwd(device_type="cuda")
    def backward(ctx, x):
        return x
"""
    )


def test_each_edit_has_a_reason_at_its_line() -> None:
    lines = PLAIN.splitlines()
    head = HEAD.count("\n")
    reasons = {note.line - head: note.text for note in convert(HEAD + PLAIN).changes}
    changed = {
        number + 1
        for number, line in enumerate(lines)
        if any(word in line for word in ("scaler", "autocast", "GradScaler"))
    }
    assert {*reasons} == changed
    assert "checked steps" in reasons[5]
    assert reasons[12] == "the step moves the loss scale by itself"
