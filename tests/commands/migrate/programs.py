"""Training loops for torch.amp and apex as texts, each of which collects its losses."""

import pytest
import torch

import tritonamp
from tritonamp.apex.amp import _amp_state

HEAD = """\
import torch
from torch import nn

torch.manual_seed(0)
data = [(torch.randn(4, 6), torch.randn(4, 3)) for _ in range(6)]
criterion = nn.MSELoss()
losses = []


def make():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


"""
PLAIN = """\
from torch.amp import GradScaler
model = make()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
scaler = GradScaler("cpu")
for x, y in data:
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = criterion(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
"""
EARLY = """\
def main():
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


main()"""
EPOCH = """\
def train_one_epoch(model, loader, optimizer, scaler, clip):
    for x, y in loader:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())


"""
HANDED = (
    EPOCH
    + """\
def main():
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu")
    for epoch in range(2):
        train_one_epoch(model, data, optimizer, scaler, 0.1)


main()
"""
)
BY_KEYWORD = (
    EPOCH
    + """\
model = make()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
train_one_epoch(model, data, optimizer, scaler=torch.amp.GradScaler("cpu"), clip=None)
"""
)
DEFAULT = """\
model = make()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)


""" + (
    EPOCH.replace("scaler, clip", 'scaler=torch.amp.GradScaler("cpu"), clip=None')
    + "train_one_epoch(model, data, optimizer)\n"
)
IN_A_DICT = (
    EPOCH
    + """\
model = make()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
state = {"epoch": 0, "scaler": torch.amp.GradScaler("cpu")}
train_one_epoch(model, data, optimizer, state["scaler"], 0.1)
"""
)
RETURNED = (
    EPOCH
    + """\
def build(fp16):
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, torch.amp.GradScaler("cpu", enabled=fp16)


model, optimizer, scaler = build(True)
train_one_epoch(model, data, optimizer, scaler, 0.1)
"""
)
INSIDE = """\
def train(model, optimizer, loader):
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    for x, y in loader:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = criterion(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    model.eval()


net = make()
sgd = torch.optim.SGD(net.parameters(), lr=0.1)
train(net, sgd, data)
train(net, sgd, data)
"""
TRAINER = """\
class Trainer:
    def __init__(self, model, lr, use_amp):
        self.model = model
        self.use_amp = use_amp
        self.scaler = torch.amp.GradScaler("cpu", enabled=use_amp)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9)

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
        return {"scaler": self.scaler.state_dict()}


Trainer(make(), 0.2, ON).fit()
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
ANNOTATED = PLAIN.replace("scaler =", "scaler: GradScaler =")
ANNOTATED_EARLY = EARLY.replace("scaler =", "scaler: torch.amp.GradScaler =")
OR_NONE = """\
model = make()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
scaler = torch.amp.GradScaler("cpu") if ON else None
for x, y in data:
    with torch.autocast("cpu", dtype=torch.float16, enabled=scaler is not None):
        loss = criterion(model(x), y)
    optimizer.zero_grad()
    if scaler is None:
        loss.backward()
        optimizer.step()
    else:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    losses.append(loss.item())
"""
GAN = """\
class Config:
    fp16 = True


config = Config()
netG, netD = nn.Linear(6, 3), nn.Linear(3, 1)
optG = torch.optim.Adam(netG.parameters(), lr=0.01)
optD = torch.optim.Adam(netD.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", enabled=config.fp16, init_scale=128.0)
for x, y in data:
    with torch.autocast("cpu", dtype=torch.float16):
        fake = netG(x)
        errD = netD(y).sub(1).square().mean() + netD(fake.detach()).square().mean()
    optD.zero_grad()
    scaler.scale(errD).backward()
    scaler.step(optD)
    with torch.autocast("cpu", dtype=torch.float16):
        errG = netD(fake).sub(1).square().mean()
    optG.zero_grad()
    scaler.scale(errG).backward()
    scaler.step(optG)
    scaler.update()
    losses += [errD.item(), errG.item()]
"""
TWO_SCALERS = (
    GAN.replace("scaler = ", "scalerD = ")
    .replace("for x", 'scalerG = torch.amp.GradScaler("cpu", init_scale=128.0)\nfor x')
    .replace("scaler.scale(errD)", "scalerD.scale(errD)")
    .replace("scaler.step(optD)", "scalerD.step(optD)\n    scalerD.update()")
    .replace("    scaler.", "    scalerG.")
)
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
EPOCHS = """\
model = make()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
for epoch in range(2):
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    for x, y in data:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = criterion(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
"""
BFLOAT16 = """\
if __name__ == "program":
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for x, y in data:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        losses.append(loss.item())
"""
WRAPPED = """\
model = make()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
scaler = torch.amp.GradScaler("cpu")
model = torch.nn.Sequential(model)
for x, y in data:
    with torch.autocast("cpu", dtype=torch.float16):
        loss = criterion(model(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
model = model[0]
"""
TORCH_LOOPS = {
    "plain": PLAIN,
    "early, clipped, accumulated": EARLY,
    "handed": HANDED,
    "by keyword": BY_KEYWORD,
    "default argument": DEFAULT,
    "in a dict": IN_A_DICT,
    "returned": RETURNED,
    "made where it is used": INSIDE,
    "trainer": TRAINER.replace("ON", "True"),
    "trainer, off": TRAINER.replace("ON", "False"),
    "annotated": ANNOTATED,
    "annotated, early": ANNOTATED_EARLY,
    "branches": BRANCHES.replace("ON", "True"),
    "branches, off": BRANCHES.replace("ON", "False"),
    "or None": OR_NONE.replace("ON", "True"),
    "or None, off": OR_NONE.replace("ON", "False"),
    "two optimizers": GAN,
    "two scalers": TWO_SCALERS,
    "scheduled": SCHEDULED,
    "global": GLOBAL,
    "folds": FOLDS,
    "epochs": EPOCHS,
    "bfloat16": BFLOAT16,
    "wrapped behind the scaler": WRAPPED,
}
APEX = """\
from apex import amp

model = make()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
for x, y in data:
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()  # scaled
    nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.1)
    optimizer.step()
    losses.append(loss.item())
state = {"amp": amp.state_dict()}
amp.load_state_dict(state["amp"])
"""
APEX_FUNCTIONS = """\
from apex import amp


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
APEX_TRAINER = """\
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
        self.optimizer.step()
        self.optimizer.zero_grad()
        losses.append(loss.item())


trainer = Trainer()
for x, y in data:
    trainer.step(x, y)
"""
APEX_SEVERAL = """\
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
APEX_ACCUMULATED = """\
from apex import amp

net = make()
optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
on, big = True, False
model, optimizer = amp.initialize(
    net, optimizer, enabled=on, opt_level="O2" if big else "O1", verbosity=0
)
for i, (x, y) in enumerate(data):
    loss = criterion(model(x), y) / 2
    with amp.scale_loss(loss, optimizer, delay_unscale=i % 2 == 0) as scaled_loss:
        scaled_loss.backward()
        shown = scaled_loss.item()
    if i % 2:
        norm = nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.1)
    losses.append(loss.item())
    if i % 2:
        optimizer.step()
        optimizer.zero_grad()
"""
APEX_LOOPS = {
    "plain": APEX,
    "functions": APEX_FUNCTIONS.replace("ON", "True"),
    "functions, off": APEX_FUNCTIONS.replace("ON", "False"),
    "trainer": APEX_TRAINER,
    "several": APEX_SEVERAL,
    "accumulated": APEX_ACCUMULATED,
}


def run(text: str, monkeypatch: pytest.MonkeyPatch, **names: object) -> list[float]:
    """Return ``losses`` of a program; what it enables is disabled at its end."""
    handles: list[tritonamp.Amp] = []
    enable = tritonamp.enable

    def enabled(*args: object, **kwargs: object) -> tritonamp.Amp:
        handles.append(enable(*args, **kwargs))  # type: ignore[arg-type]
        return handles[-1]

    with monkeypatch.context() as patch:
        patch.setattr(tritonamp, "enable", enabled)
        namespace: dict[str, object] = {"__name__": "program", **names}
        exec(compile(text, "program.py", "exec"), namespace)
    for handle in handles:
        handle.disable()
    handle = getattr(_amp_state, "handle", None)
    if handle is not None and handle.is_active():
        handle._deactivate()
    losses = namespace["losses"]
    assert isinstance(losses, list) and len(losses) >= 4
    return losses


def same(before: list[float], after: list[float]) -> None:
    """Assert that losses are equal but for the rounding of half."""
    torch.testing.assert_close(torch.tensor(after), torch.tensor(before), rtol=4e-3, atol=1e-4)
