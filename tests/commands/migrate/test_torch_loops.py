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
BRANCHES = """\
def main(args):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", enabled=args.fp16)
    for x, y in data:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16, enabled=args.fp16):
            loss = criterion(model(x), y)
        if args.fp16:
            # scaled
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        losses.append(loss.item())
    return {"model": model.state_dict(), "scaler": scaler.state_dict()}


class Args:
    fp16 = ON


main(Args)
"""
TRAINER = """\
class Trainer:
    def __init__(self, model, lr, use_amp):
        self.model = model
        self.use_amp = use_amp
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", enabled=use_amp)

    def forward(self, x, y):
        with torch.autocast("cpu", dtype=torch.float16, enabled=self.use_amp):
            return criterion(self.model(x), y)

    def fit(self):
        for x, y in data:
            loss = self.forward(x, y)
            if not self.use_amp:
                loss.backward()
                self.optimizer.step()
            else:
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
            self.optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())


Trainer(make(), 0.2, ON).fit()
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
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())


fp16 = True
setup(fp16)
for x, y in data:
    step(x, y, fp16)
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
    "branches": BRANCHES.replace("ON", "True"),
    "branches, off": BRANCHES.replace("ON", "False"),
    "trainer": TRAINER.replace("ON", "True"),
    "trainer, off": TRAINER.replace("ON", "False"),
    "scheduled": SCHEDULED,
    "global": GLOBAL,
    "folds": FOLDS,
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", TRAINED)
def test_what_is_converted_trains_as_before(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = HEAD + TRAINED[name]
    conversion = convert(text)
    assert not conversion.todos
    left = "GradScaler(", "scaler.scale(", ".update()", "import autocast", ".step(opt"
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


def test_branches_stay_and_the_level_is_the_condition() -> None:
    after = convert(HEAD + BRANCHES).after
    assert (
        """
    amp = tritonamp.enable(model, optimizer, level="O1" if args.fp16 else "O0")
    for x, y in data:
        optimizer.zero_grad()
        with amp.autocast():
            loss = criterion(model(x), y)
        if args.fp16:
            # scaled
            amp.backward(loss)
            amp.clip_grad_norm_(0.1)
            optimizer.step()
        else:
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        losses.append(loss.item())
    return {"model": model.state_dict(), "scaler": amp.state_dict()}
"""
        in after
    )


def test_a_name_that_is_shared_stays_and_a_condition_gets_its_parentheses() -> None:
    after = convert(HEAD + GLOBAL).after
    level = 'level="O1" if (fp16 if fp16 else False) else "O0"'
    assert f"    scaler = tritonamp.enable(model, optimizer, {level})" in after
    assert "    scaler.backward(loss)\n" in after


def test_a_scaler_of_self_becomes_a_handle_of_self() -> None:
    after = convert(HEAD + TRAINER).after
    assert (
        """
        self.amp = tritonamp.enable(model, self.optimizer, level="O1" if use_amp else "O0")

    def forward(self, x, y):
        with self.amp.autocast():
            return criterion(self.model(x), y)
"""
        in after
    )
    assert (
        "                self.amp.backward(loss)\n                self.optimizer.step()\n" in after
    )


def test_the_scale_can_still_be_asked_for() -> None:
    after = convert(HEAD + SCHEDULED).after
    assert (
        "    amp.backward(loss, retain_graph=True)\n    scale = amp.scaler.get_scale()\n" in after
    )
    assert "    if scale <= amp.scaler.get_scale():\n" in after


LOOP = """\
import torch
{imports}

def train(net, args, loader):
    optimizer = torch.optim.AdamW(net.parameters())
    {made}
    for x, y in loader:
        with {autocast}:
            loss = net(x, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


train(torch.nn.Linear(2, 2), None, [])
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
        assert any("another condition" in note.text for note in conversion.todos)
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
    with autocast(False, cache_enabled=(False)):
        model(x)
    with autocast(**options):
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
    with th.autocast("cuda", enabled=False, cache_enabled=(False)):
        model(x)
    with th.autocast("cuda", **options):
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
    assert {line for line in reasons if line > 0} == changed
    assert "checks steps" in reasons[5]
    assert reasons[12] == "the step moves the loss scale by itself"
