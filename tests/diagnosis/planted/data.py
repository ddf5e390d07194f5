"""Batches and models that are spoilt before the first step."""

import math

import torch
from diagnosis.planted.case import OUTPUTS, WIDTH, Plain, Planted
from diagnosis.planted.following import checkpoint, clean_batch, without_samples
from torch import Tensor, nn


def nan_sample(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    x[3, 5] = math.nan
    return x, y


def inf_samples(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    x[1, 5] = x[4, 0] = math.inf
    return x, y


def nan_target(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    y[2, 1] = math.nan
    return x, y


def inf_target(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    y[5] = -math.inf
    return x, y


def constant_feature(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Standardise a batch with a constant feature: 0/0 in all samples."""
    x[:, 3] = 2.0
    return (x - x.mean(0)) / x.std(0), y


def outlier(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    x[2, 7] = 1e30
    return x, y


def half_targets(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Targets in dollars, stored in half."""
    return x, (1e5 * (y + 3)).half().float()


def nan_weight(model: nn.Module) -> None:
    with torch.no_grad():
        model.head.weight[0, 0] = math.nan


def inf_bias(model: nn.Module) -> None:
    with torch.no_grad():
        model.head.bias[1] = math.inf


def no_fan(model: nn.Module) -> None:
    """Initialise with a division by a fan of 0."""
    with torch.no_grad():
        model.head.weight.copy_(torch.randn(OUTPUTS, WIDTH) / torch.zeros(()).sqrt())


class Statistics(nn.Module):
    """Statistics of the data, loaded from a file with a 0 as the deviation."""

    def __init__(self):
        super().__init__()
        self.register_buffer("deviation", torch.ones(WIDTH))
        self.register_buffer("shift", torch.zeros(WIDTH))

    def forward(self, x):
        return torch.tanh((x - self.shift) / self.deviation)


def nan_buffer(model: nn.Module) -> None:
    model.block.shift[3] = math.nan


CHECKPOINT = r"[Ll]oad the last (good )?checkpoint"


DROP = r"[Dd]rop"

DATA = [
    Planted(
        "NaN in a sample",
        Plain,
        DROP,
        kind="data",
        cause="data",
        says="input 0.*sample.* 3",
        data=nan_sample,
        by=without_samples,
    ),
    Planted(
        "inf in the data, finite loss",
        Plain,
        DROP,
        kind="data",
        cause="data",
        says="input 0.*samples 1, 4",
        data=inf_samples,
        by=without_samples,
    ),
    Planted(
        "NaN in a target",
        Plain,
        DROP,
        kind="data",
        module=None,
        says="samples 2 of",
        data=nan_target,
        by=without_samples,
    ),
    Planted(
        "inf in a target",
        Plain,
        DROP,
        kind="data",
        module=None,
        says="samples 5 of",
        data=inf_target,
        by=without_samples,
    ),
    Planted(
        "a constant feature is standardised",
        Plain,
        r"[Rr]epair",
        kind="data",
        cause="data",
        data=constant_feature,
        by=clean_batch,
    ),
    Planted(
        "an outlier of 1e30",
        Plain,
        r"range|drop|bfloat16|fp32_modules",
        "linear",
        "self.stem(x)",
        "cast_overflow",
        ("scale overflow", "backward fault"),
        module="stem",
        data=outlier,
    ),
    Planted(
        "targets beyond half",
        Plain,
        r"[Rr]epair",
        kind="data",
        module=None,
        data=half_targets,
        by=clean_batch,
    ),
    Planted(
        "NaN in a weight",
        Plain,
        CHECKPOINT,
        kind="parameters",
        cause="bad parameters",
        says="head.weight",
        spoil=nan_weight,
        by=checkpoint,
    ),
    Planted(
        "inf in a bias",
        Plain,
        CHECKPOINT,
        kind="parameters",
        cause="bad parameters",
        says="head.bias",
        spoil=inf_bias,
        by=checkpoint,
    ),
    Planted(
        "initialised with 1/0",
        Plain,
        CHECKPOINT,
        kind="parameters",
        cause="bad parameters",
        says="head.weight",
        spoil=no_fan,
        by=checkpoint,
    ),
    Planted(
        "NaN in a buffer",
        Statistics,
        CHECKPOINT,
        kind="parameters",
        cause="forward fault",
        says="block.shift",
        spoil=nan_buffer,
        by=checkpoint,
    ),
]
