"""Forwards whose numbers leave float16."""

import torch
import torch.nn.functional as F
from diagnosis.planted.case import WIDTH, Planted
from torch import Tensor, nn

FP32 = r"fp32_modules=\['block'\]"
RESULTS = r"fp32_results=\['block'\]"


class Scores(nn.Module):
    def forward(self, x):
        q = k = 200 * x
        scores = q @ k.transpose(-1, -2)
        return scores.softmax(-1) @ x


class Bmm(nn.Module):
    def forward(self, x):
        heads = 300 * x.view(len(x), 4, 4)
        gram = torch.bmm(heads, heads.mT)
        return (gram / gram.diagonal(dim1=1, dim2=2).sum(-1)[:, None, None]).flatten(1)


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 1, 3, padding=1)
        nn.init.constant_(self.conv.weight, 3e4)

    def forward(self, x):
        return F.layer_norm(self.conv(40 * x[:, None])[:, 0], [WIDTH])


class Einsum(nn.Module):
    def forward(self, x):
        heads = 300 * x.view(len(x), 2, 8)
        scores = torch.einsum("bhd,bgd->bhg", heads, heads)
        return (scores.softmax(-1) @ heads).flatten(1) / 300


class Bilinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.pair = nn.Bilinear(WIDTH, WIDTH, WIDTH)

    def forward(self, x):
        return F.normalize(self.pair(500 * x, 500 * x).float(), dim=-1)


class Square(nn.Module):
    def forward(self, x):
        x = 1000 * x
        energy = (x * x).mean(-1, keepdim=True)
        return x / energy.sqrt()


class RmsNorm(nn.Module):
    """At O3, where no table keeps pow in FP32."""

    def forward(self, x):
        x = 1000 * x
        norm = torch.rsqrt((x**2).mean(-1, keepdim=True) + 1e-3)
        return x * norm if len(x) else x


class Variance(nn.Module):
    def forward(self, x):
        x = 1000 * x
        centred = x - x.mean(-1, keepdim=True)
        variance = (centred * centred).mean(-1, keepdim=True)
        return centred / torch.sqrt(variance + 1e-3)


class TwoNorm(nn.Module):
    def forward(self, x):
        x = 1000 * x
        length = torch.sqrt(torch.sum(x * x, dim=-1, keepdim=True))
        return x / length


class Softsign(nn.Module):
    """inf becomes 0 without a trace."""

    def forward(self, x):
        x = 500 * x
        return x * torch.rsqrt(1 + x * x)


class SumOfMany(nn.Module):
    """At O3, where a sum has the dtype of its input."""

    def forward(self, x):
        total = (8e3 * x.abs() + 1e3).sum(-1, keepdim=True)
        return 1e3 * x / total


class MeanBySum(nn.Module):
    def forward(self, x):
        mean = (1.5e4 + x).sum(-1, keepdim=True) / x.shape[-1]
        return x - mean / 1e4


class Cumsum(nn.Module):
    def forward(self, x):
        positions = torch.cumsum(8e3 * torch.ones_like(x), -1)
        return x * torch.sin(positions / 1e4)


class Prod(nn.Module):
    def forward(self, x):
        volume = (5 + x.abs()[:, :8]).prod(-1, keepdim=True)
        return x * torch.log(volume)


class Softmax(nn.Module):
    def forward(self, x):
        weights = torch.exp(300 * x)
        return weights / weights.sum(-1, keepdim=True)


class LogSumExp(nn.Module):
    def forward(self, x):
        return x - torch.log(torch.sum(torch.exp(200 * x), -1, keepdim=True)) / 200


class Softplus(nn.Module):
    def forward(self, x):
        return torch.log(1 + torch.exp(300 * x)) / 300


class Sinh(nn.Module):
    def forward(self, x):
        return torch.asinh(torch.sinh(200 * x))


class LogScale(nn.Module):
    """At O3: the exponential of a log-variance."""

    def forward(self, x):
        scale = torch.exp(12 + x)
        return x * scale.log()


class MaskOf1e9(nn.Module):
    """FP32 adds -1e9 to all entries of a row that is padding, and softmax takes it away."""

    def forward(self, x):
        keep = torch.ones(len(x), len(x), dtype=x.dtype)
        keep[2] = 0
        scores = x @ x.T + (1 - keep) * -1e9
        return scores.softmax(-1) @ x


class Multiplier(nn.Module):
    def forward(self, x):
        return torch.log1p((x * 3e5).abs()) / 10


class Residuals(nn.Module):
    def forward(self, x):
        stream = 4e4 + x
        for _ in range(2):
            stream = stream + 2e4
        return x * torch.log10(stream)


class Temperature(nn.Module):
    def forward(self, x):
        return torch.softmax(x / 1e-6, -1)


class TanhOfInf(nn.Module):
    """Harmless: FP32's result is the same."""

    def forward(self, x):
        return torch.tanh(x.sign() * 300 * (x.abs() + 1) * 300)


class Casts(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Linear(1, WIDTH)

    def forward(self, x):
        seconds = torch.arange(len(x))[:, None] * 86400 + 1_700_000
        return x + torch.sin(self.time(seconds.to(x.dtype)))


def scaled_inputs(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x * 1e5, y


class NormedStem(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        return self.norm(x)


def large_weight(model: nn.Module) -> None:
    with torch.no_grad():
        model.stem.weight[0, 0] = 1e5


OVERFLOWS = [
    Planted(
        "attention scores",
        Scores,
        r"[Ss]cale (q|the first factor)",
        op="matmul",
        line="scores = q @",
        kind="matmul_overflow",
    ),
    Planted("bmm", Bmm, RESULTS, op="bmm", line="torch.bmm", kind="matmul_overflow"),
    Planted(
        "convolution",
        Conv,
        r"fp32_results=\['block\.conv'\]",
        op="conv1d",
        line="self.conv(",
        kind=("matmul_overflow", "overflow"),
        module="block.conv",
    ),
    Planted("einsum", Einsum, RESULTS, op="einsum", line="einsum", kind="matmul_overflow"),
    Planted(
        "bilinear",
        Bilinear,
        r"fp32_modules=\['block",
        op="bilinear",
        line="self.pair",
        kind="matmul_overflow",
        module="block.pair",
    ),
    Planted(
        "square",
        Square,
        r"x\.float\(\)",
        op="mul",
        line="x * x",
        kind="square_overflow",
        cause="",
    ),
    Planted(
        "RMSNorm by hand",
        RmsNorm,
        r"x\.float\(\)|fp32_modules",
        op="pow",
        line="x**2",
        kind="square_overflow",
        cause="",
        level="O3",
    ),
    Planted(
        "variance by hand",
        Variance,
        r"x\.float\(\)",
        op="mul",
        line="centred * centred",
        kind="square_overflow",
        cause="",
    ),
    Planted(
        "norm by hand", TwoNorm, FP32, op="mul", line="x * x", kind="square_overflow", cause=""
    ),
    Planted(
        "inf becomes 0",
        Softsign,
        FP32,
        op="mul",
        line="x * x",
        kind="square_overflow",
        cause="",
    ),
    Planted(
        "sum of many",
        SumOfMany,
        r"dtype=torch\.float32|fp32_modules",
        op="sum",
        line=".sum(",
        kind="reduction_overflow",
        cause="",
        level="O3",
    ),
    Planted(
        "mean by a sum",
        MeanBySum,
        r"dtype=torch\.float32|fp32_modules",
        op="sum",
        line=".sum(",
        kind="reduction_overflow",
        level="O3",
    ),
    Planted(
        "cumsum",
        Cumsum,
        FP32,
        op="cumsum",
        line="cumsum",
        kind="reduction_overflow",
        level="O3",
    ),
    Planted("prod", Prod, FP32, op="prod", line="prod", kind="reduction_overflow", level="O3"),
    Planted(
        "exp without a maximum",
        Softmax,
        r"[Ss]ubtract the maximum",
        op="exp",
        line="torch.exp",
        kind="exp_overflow",
    ),
    Planted(
        "logsumexp by hand",
        LogSumExp,
        r"[Ss]ubtract the maximum",
        op="exp",
        line="torch.exp",
        kind="exp_overflow",
    ),
    Planted(
        "softplus by hand",
        Softplus,
        r"clamp",
        op="exp",
        line="torch.exp",
        kind="exp_overflow",
    ),
    Planted("sinh", Sinh, r"clamp", op="sinh", line="sinh", kind="exp_overflow"),
    Planted(
        "exp of a log-scale",
        LogScale,
        r"clamp",
        op="exp",
        line="torch.exp",
        kind="exp_overflow",
        level="O3",
    ),
    Planted(
        "mask of -1e9",
        MaskOf1e9,
        r"torch\.finfo\(x\.dtype\)\.min",
        op="mul",
        line="-1e9",
        kind="constant_overflow",
    ),
    Planted(
        "factor of 3e5",
        Multiplier,
        FP32,
        op="mul",
        line="3e5",
        kind=("overflow", "constant_overflow"),
    ),
    Planted("residual stream", Residuals, FP32, op="add", line="stream + 2e4", kind="overflow"),
    Planted("tiny temperature", Temperature, FP32, op="div", line="1e-6", kind="overflow"),
    Planted(
        "tanh of inf", TanhOfInf, r"harmless", op="mul", kind="overflow", cause="", by="nothing"
    ),
    Planted(
        "time in seconds",
        Casts,
        FP32,
        op=("to", "to_copy"),
        line="seconds.to(",
        kind="cast_overflow",
    ),
    Planted(
        "input not normalised",
        NormedStem,
        r"fp32_modules=\['stem'",
        op="linear",
        line="self.stem(x)",
        kind="cast_overflow",
        module="stem",
        data=scaled_inputs,
    ),
    Planted(
        "weight beyond 65504",
        NormedStem,
        r"fp32_modules=\['stem'",
        op="linear",
        line="self.stem(x)",
        kind="weight_overflow",
        cause=("bad parameters", "forward fault"),
        module="stem",
        spoil=large_weight,
    ),
]
