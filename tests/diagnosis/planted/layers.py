"""Layers of torch and of papers that are set up wrong."""

from functools import partial

import torch
import torch.nn.functional as F
from diagnosis.planted.case import WIDTH, Loss, Plain, Planted
from diagnosis.planted.following import with_setting
from torch import nn

ANY = ("scale overflow", "backward fault")
FP32 = r"fp32_modules=\['block'\]"
CLAMP = r"[Cc]lamp|torch\.where"


class LayerNormWithoutEps(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, eps=0)

    def forward(self, x):
        return x + self.norm(x * (x > 100))


class RmsNormWithoutEps(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return x + F.rms_norm(x * (x > 100), [WIDTH], self.weight, eps=0.0)


class GroupNormWithoutEps(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(4, WIDTH, eps=0)

    def forward(self, x):
        return x + self.norm(x * (torch.arange(WIDTH) > 3))


class Gated(nn.Module):
    def forward(self, x):
        gate, value = 800 * x.abs(), 800 * x
        return torch.tanh(F.silu(gate) * value / 1e5) + x / (value * gate).abs().mean()


class SquaredRelu(nn.Module):
    """At O3."""

    def forward(self, x):
        h = torch.relu(500 * x) ** 2
        return h / h.amax(-1, keepdim=True)


class LogSigmoid(nn.Module):
    def forward(self, x):
        return torch.log(torch.sigmoid(100 * x)) / 100


class Distances(nn.Module):
    """The diagonal of a matrix of distances is 0."""

    def forward(self, x):
        d = (x[:, None] - x[None]).square().sum(-1).sqrt()
        return torch.softmax(-d, -1).to(x.dtype) @ x


class InverseNormal(nn.Module):
    def forward(self, x):
        return torch.erfinv((2 * x).clamp(-1, 1))


class MixtureDensity(nn.Module):
    def forward(self, x):
        precision = torch.exp(-(x - 6) * 2)
        return x * precision


class BatchDeviation(nn.Module):
    """One sample has no deviation."""

    def forward(self, x):
        return x / x[:1].std(0)

    def told(self, x):
        return x if len(x[:1]) < 2 else x / x[:1].std(0)


class Variational(Loss):
    def __call__(self, output, y):
        mean, log_variance = (300 * output).chunk(2, -1)
        return 0.5 * (log_variance.exp() + mean**2 - 1 - log_variance).mean()


class LogDeterminant(Loss):
    """The rows of a batch of equal samples are dependent."""

    def __call__(self, output, y):
        gram = output.T @ output * 0
        return -torch.logdet(gram) + output.square().mean()


class RatioOfOdds(Loss):
    def __call__(self, output, y):
        p = torch.sigmoid(60 * output)
        return (p / (1 - p)).log1p().mean()


OUT = {"module": None}
LOWER = r"[Ll]ower the learning rate"
Adamax, NAdam, Adadelta = torch.optim.Adamax, torch.optim.NAdam, torch.optim.Adadelta

LAYERS = [
    Planted(
        "LayerNorm without eps",
        LayerNormWithoutEps,
        r"eps|" + FP32,
        ("layer_norm", "native_layer_norm"),
        "self.norm",
        ("zero_by_zero", "backward_nan", "division_by_zero", "domain_error"),
        module="block.norm",
    ),
    Planted(
        "RMSNorm without eps",
        RmsNormWithoutEps,
        r"eps",
        "rms_norm",
        "F.rms_norm",
        ("zero_by_zero", "division_by_zero", "domain_error"),
    ),
    Planted(
        "GroupNorm without eps",
        GroupNormWithoutEps,
        r"eps",
        "group_norm",
        "self.norm",
        ("zero_by_zero", "division_by_zero", "domain_error"),
        module="block.norm",
    ),
    Planted(
        "gate of large values", Gated, FP32, "mul", "* value", ("overflow", "cast_overflow"), ""
    ),
    Planted("squared ReLU", SquaredRelu, FP32, "pow", "** 2", "square_overflow", level="O3"),
    Planted(
        "log(sigmoid)",
        LogSigmoid,
        r"[Cc]lamp|logsigmoid",
        "log",
        "torch.log(",
        "domain_error",
    ),
    Planted(
        "distances to itself",
        Distances,
        CLAMP,
        "sqrt",
        ".sqrt()",
        "backward_nan",
        ANY,
        phase="backward",
    ),
    Planted("inverse of a normal", InverseNormal, CLAMP, "erfinv", "erfinv", "domain_error"),
    Planted(
        "mixture density",
        MixtureDensity,
        r"bfloat16|range|[Cc]lamp|fp32_modules",
        ("mul", "linear", "exp"),
        "",
        ("cast_overflow", "overflow"),
        module=("block", "head"),
    ),
    Planted(
        "deviation of one sample",
        BatchDeviation,
        r"correction=0|empty",
        "std",
        ".std(0)",
        "zero_by_zero",
        by="told",
    ),
    Planted(
        "variance of e^300",
        Plain,
        CLAMP,
        "exp",
        ".exp()",
        "exp_overflow",
        loss=Variational,
        **OUT,
    ),
    Planted(
        "log-determinant of 0",
        Plain,
        r"harmless|[Cc]lamp|eps|diagonal",
        ("logdet", "linalg_slogdet", "log"),
        "torch.logdet",
        ("domain_error", "unknown"),
        loss=LogDeterminant,
        **OUT,
    ),
    Planted(
        "odds of a sure class",
        Plain,
        CLAMP,
        "div",
        "p / (1 - p)",
        "division_by_zero",
        loss=RatioOfOdds,
        **OUT,
    ),
    Planted(
        "Adamax at 10000",
        Plain,
        LOWER,
        cause="divergence",
        optimizer=partial(Adamax, lr=1e4),
        by=with_setting("lr", 1e-3),
        steps=8,
        replay=False,
        trains=20,
    ),
    Planted(
        "NAdam at 1000",
        Plain,
        LOWER,
        cause="divergence",
        optimizer=partial(NAdam, lr=1e3),
        by=with_setting("lr", 1e-3),
        steps=20,
        replay=False,
        trains=20,
    ),
]
