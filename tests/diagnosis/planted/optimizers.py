"""Steps that spoil the weights."""

import math
from functools import partial

import torch
from diagnosis.planted.case import WIDTH, Plain, Planted
from diagnosis.planted.following import with_eps, with_setting
from torch import nn


class Dead(nn.Module):
    """A gate of zero: the layer behind it gets gradients of 0."""

    def __init__(self):
        super().__init__()
        self.gate, self.layer = nn.Parameter(torch.zeros(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(x) + self.gate * self.layer(x)


BAD = "bad parameters"
DIVERGED = "divergence"
LOWER = r"[Ll]ower the learning rate"
EPS = r"eps of ([\d.e-]+)"
SGD, Adam, AdamW, RMSprop = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.RMSprop,
)

OPTIMIZERS = [
    Planted(
        "Adam without eps",
        Dead,
        EPS,
        cause=BAD,
        optimizer=partial(Adam, lr=1e-3, eps=0.0),
        by=with_eps,
        steps=3,
        replay=False,
        trains=20,
    ),
    Planted(
        "RMSprop without eps",
        Dead,
        EPS,
        cause=BAD,
        optimizer=partial(RMSprop, lr=1e-3, eps=0.0),
        by=with_eps,
        steps=3,
        replay=False,
        trains=20,
    ),
    Planted(
        "Adagrad without eps",
        Dead,
        EPS,
        cause=BAD,
        optimizer=partial(torch.optim.Adagrad, lr=1e-3, eps=0.0),
        by=with_eps,
        steps=3,
        replay=False,
        trains=20,
    ),
    Planted(
        "SGD with a rate of 1000",
        Plain,
        LOWER,
        cause=DIVERGED,
        optimizer=partial(SGD, lr=1e3),
        by=with_setting("lr", 1e-2),
        steps=8,
        replay=False,
        trains=20,
    ),
    Planted(
        "AdamW with a rate of 10000",
        Plain,
        LOWER,
        cause=DIVERGED,
        optimizer=partial(AdamW, lr=1e4),
        by=with_setting("lr", 1e-3),
        steps=8,
        replay=False,
        trains=20,
    ),
    Planted(
        "momentum above 1",
        Plain,
        LOWER + r"|momentum",
        cause=DIVERGED,
        optimizer=partial(SGD, lr=0.1, momentum=3.0),
        by=with_setting("momentum", 0.9),
        steps=20,
        replay=False,
        trains=20,
    ),
    Planted(
        "weight decay above 2 / lr",
        Plain,
        r"weight_decay",
        cause=DIVERGED,
        optimizer=partial(AdamW, lr=1e-2, weight_decay=1000.0),
        by=with_setting("weight_decay", 1e-2),
        steps=20,
        replay=False,
        trains=20,
    ),
    Planted(
        "learning rate of inf",
        Plain,
        r"[Ll]earning rate",
        cause=(BAD, DIVERGED),
        optimizer=partial(SGD, lr=math.inf),
        by=with_setting("lr", 1e-2),
        steps=3,
        replay=False,
        trains=20,
    ),
    Planted(
        "learning rate of NaN",
        Plain,
        r"learning rate",
        cause=(BAD, DIVERGED),
        optimizer=partial(SGD, lr=math.nan),
        by=with_setting("lr", 1e-2),
        steps=3,
        replay=False,
        trains=20,
    ),
]
