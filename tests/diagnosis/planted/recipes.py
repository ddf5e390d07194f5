"""Mistakes in known recipes: features, masks, temperatures and losses as papers have them."""

import math

import torch
import torch.nn.functional as F
from diagnosis.planted.case import WIDTH, Loss, Plain, Planted
from diagnosis.planted.following import clean_batch
from torch import Tensor, nn

ANY = ("scale overflow", "backward fault")
FP32 = r"fp32_modules=\['block'\]"
CLAMP = r"[Cc]lamp|torch\.where"


class FourierFeatures(nn.Module):
    def forward(self, x):
        angles = x * 2.0**18
        return torch.sin(angles)


class TwoMasks(nn.Module):
    """Causal and padding mask hide all of the first row, and their sum is -inf."""

    def forward(self, x):
        end = torch.finfo(x.dtype).min
        causal = torch.full((len(x), len(x)), end, dtype=x.dtype).triu(1)
        padding = torch.zeros(len(x), dtype=x.dtype)
        padding[0] = end
        mask = causal + padding + padding[:, None]
        return (x @ x.T + mask).softmax(-1) @ x


class LogitScale(nn.Module):
    """CLIP's learned scale, which nothing limits."""

    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(12.0))

    def forward(self, x):
        similar = F.normalize(x, dim=-1) @ F.normalize(x, dim=-1).T
        logits = similar.to(x.dtype) * self.log_scale.exp()
        return logits.softmax(-1) @ x


class LearnedTemperature(nn.Module):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return torch.tanh(x / self.temperature)


class UnitVector(nn.Module):
    def forward(self, x):
        h = x * (x > 100)
        return x + h / h.norm(dim=-1, keepdim=True)


class StandardScore(nn.Module):
    def forward(self, x):
        rows = x.mean(-1, keepdim=True).expand(-1, WIDTH)
        centred = rows - rows.mean(-1, keepdim=True)
        return x + centred / rows.std(-1, keepdim=True)


class SegmentMean(nn.Module):
    """One of three segments has no row."""

    def forward(self, x):
        segment = torch.arange(len(x)) % 2
        sums = torch.zeros(3, WIDTH, dtype=x.dtype).index_add(0, segment, x)
        counts = torch.bincount(segment, minlength=3)
        return x + (sums / counts[:, None]).mean(0)


class ScatterSum(nn.Module):
    def forward(self, x):
        zeros = torch.zeros(2, WIDTH, dtype=x.dtype)
        degree = zeros.index_add(0, torch.arange(len(x)) % 2, 3e4 + x)
        return x * torch.log(degree).mean(0)


class SineOfCosine(nn.Module):
    def forward(self, x):
        cosine = x / x.abs().amax(-1, keepdim=True)
        return x + torch.sqrt(1 - cosine * cosine)


class GeometricMean(nn.Module):
    def forward(self, x):
        share = x * (x > 0)
        return x + share.log().mean(-1, keepdim=True).exp()


class Polynomial(nn.Module):
    def forward(self, x):
        x = 20 * (x + 2)
        return torch.log(x * x * x * x) / 10


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        return self.rnn((x.float() * 1e6)[None])[0][0]


class Crf(nn.Module):
    """A start state that nothing reaches: logsumexp of -inf alone has no slope."""

    def forward(self, x):
        start = torch.full_like(x, -math.inf)
        return x + torch.logsumexp(start + x, -1, keepdim=True).exp()

    def told(self, x):
        start = torch.full_like(x, -1e4)
        return x + torch.logsumexp(start + x, -1, keepdim=True).exp()


class MaskedNll(Loss):
    """Padding has probability 0, and a mask of 0 does not hide log(0)."""

    def __call__(self, output, y):
        p = torch.relu(output)
        mask = (p > 0).float()
        return -(torch.log(p) * mask).mean()


class WeightsOfZero(Loss):
    """The only class of the batch has no weight."""

    def __call__(self, output, y):
        weight = torch.tensor([0.0, 1.0, 1.0, 1.0])
        return F.cross_entropy(output, torch.zeros(len(y), dtype=torch.long), weight=weight)


class PositiveWeight(Loss):
    """A class without positives has a weight of 1/0."""

    def __call__(self, output, y):
        positive = (y > 100).float()
        weight = (1 - positive).sum(0) / positive.sum(0)
        return F.binary_cross_entropy_with_logits(output, positive, pos_weight=weight)


class PoissonNll(Loss):
    def __call__(self, output, y):
        return F.poisson_nll_loss(300 * output, y.abs())

    def told(self, output, y):
        return F.poisson_nll_loss((300 * output).clamp(max=5), y.abs())


class Triplet(Loss):
    """Anchor and positive are the same, and a norm by hand has no slope there."""

    def __call__(self, output, y):
        near = ((output - output.detach()) ** 2).sum(-1) ** 0.5
        far = ((output - y) ** 2).sum(-1) ** 0.5
        return torch.relu(near - far + 5).mean()


class RelativeError(Loss):
    def __call__(self, output, y):
        wanted = torch.relu(y)
        return ((output - wanted) / wanted).abs().mean()


class LogError(Loss):
    def __call__(self, output, y):
        return (torch.log1p(output * 9) - torch.log1p(y.abs())).square().mean()


class Correlation(Loss):
    """Targets are all equal, so they have no deviation."""

    def __call__(self, output, y):
        a, b = output - output.mean(), torch.ones_like(y) - 1
        return 1 - (a * b).sum() / (a.norm() * b.norm())


def zero_deviation(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Weigh samples by the inverse of a count that is 0 for two of them."""
    counts = torch.tensor([3.0, 0.0, 2.0, 1.0, 0.0, 4.0])
    return x, y * (1 / counts)[:, None]


OUT = {"module": None}

RECIPES = [
    Planted("Fourier features", FourierFeatures, FP32, "mul", "2.0**18", "overflow"),
    Planted(
        "two masks",
        TwoMasks,
        FP32 + "|disable_casts",
        ("add", "softmax"),
        "mask",
        ("overflow", "masked_row"),
    ),
    Planted(
        "logit scale",
        LogitScale,
        FP32 + "|[Cc]lamp",
        ("mul", "exp"),
        "log_scale.exp()",
        ("overflow", "exp_overflow"),
    ),
    Planted(
        "temperature of 0",
        LearnedTemperature,
        CLAMP,
        "div",
        "x / self.temperature",
        "backward_nan",
        ANY,
        phase="backward",
    ),
    Planted("unit vector of zeros", UnitVector, CLAMP, "div", "h / h.norm", "zero_by_zero"),
    Planted(
        "standard score of equal values", StandardScore, CLAMP, "div", "rows.std", "zero_by_zero"
    ),
    Planted(
        "mean of an empty segment", SegmentMean, CLAMP, "div", "counts[:, None]", "zero_by_zero"
    ),
    Planted(
        "sum by index_add",
        ScatterSum,
        FP32,
        "index_add",
        "index_add",
        ("overflow", "reduction_overflow"),
        level="O3",
    ),
    Planted(
        "sine of a cosine of 1",
        SineOfCosine,
        CLAMP,
        "sqrt",
        "torch.sqrt",
        ("backward_nan", "domain_error"),
        (*ANY, "forward fault"),
        phase="backward",
    ),
    Planted(
        "geometric mean",
        GeometricMean,
        CLAMP,
        "log",
        ".log()",
        "backward_nan",
        ANY,
        phase="backward",
    ),
    Planted(
        "polynomial", Polynomial, FP32, "mul", "x * x * x * x", ("overflow", "square_overflow")
    ),
    Planted(
        "LSTM of large inputs",
        Lstm,
        r"range|fp32_modules=\['block.rnn'\]|bfloat16",
        ("lstm", "mul"),
        "",
        "cast_overflow",
        module=("block.rnn", "block"),
    ),
    Planted(
        "logsumexp of -inf",
        Crf,
        r"torch\.finfo|harmless value in before",
        "logsumexp",
        "logsumexp",
        ("infinite_constant", "backward_nan"),
        (*ANY, "forward fault"),
        phase="backward",
        by="told",
    ),
    Planted(
        "masked logarithm",
        Plain,
        CLAMP,
        "log",
        "torch.log(p)",
        "domain_error",
        loss=MaskedNll,
        **OUT,
    ),
    Planted(
        "classes without weight",
        Plain,
        r"count|empty|weight",
        ("nll_loss_forward", "nll_loss", "cross_entropy"),
        "F.cross_entropy",
        "zero_by_zero",
        loss=WeightsOfZero,
        **OUT,
    ),
    Planted(
        "positives without count",
        Plain,
        CLAMP,
        "div",
        "positive.sum(0)",
        "division_by_zero",
        loss=PositiveWeight,
        **OUT,
    ),
    Planted(
        "Poisson loss of torch",
        Plain,
        r"clamp",
        ("poisson_nll_loss", "exp"),
        "F.poisson_nll_loss",
        "exp_overflow",
        loss=PoissonNll,
        by="told",
        **OUT,
    ),
    Planted(
        "triplets of one sample",
        Plain,
        CLAMP,
        "pow",
        "output.detach()",
        "backward_nan",
        ANY,
        phase="backward",
        loss=Triplet,
        **OUT,
    ),
    Planted(
        "relative error of 0",
        Plain,
        CLAMP,
        "div",
        "/ wanted",
        "division_by_zero",
        loss=RelativeError,
        **OUT,
    ),
    Planted(
        "logarithm of an error",
        Plain,
        CLAMP,
        "log1p",
        "torch.log1p(output",
        "domain_error",
        loss=LogError,
        **OUT,
    ),
    Planted(
        "correlation with a constant",
        Plain,
        CLAMP,
        "div",
        "a.norm()",
        "zero_by_zero",
        loss=Correlation,
        **OUT,
    ),
    Planted(
        "targets divided by a count of 0",
        Plain,
        r"[Rr]epair",
        kind="data",
        module=None,
        says="samples 1, 4",
        data=zero_deviation,
        by=clean_batch,
    ),
]
