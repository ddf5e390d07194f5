"""Forwards with 0/0, a logarithm of 0 or an argument out of range."""

import math

import torch
import torch.nn.functional as F
from diagnosis.planted.case import SAMPLES, WIDTH, Planted
from torch import nn

FP32 = r"fp32_modules=\['block'\]"


class EpsInDiv(nn.Module):
    def forward(self, x):
        x = torch.relu(x - 100)
        return x / (x.abs().amax(-1, keepdim=True) + 1e-8)


class EpsInRsqrt(nn.Module):
    def forward(self, x):
        x = x * 0
        scale = torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-8)
        return x * scale


class EpsInLog(nn.Module):
    def forward(self, x):
        share = torch.relu(x)
        return torch.log(share + 1e-8)


class EmptyMean(nn.Module):
    def forward(self, x):
        return x - x[x > 100].mean()


class CountOfZero(nn.Module):
    def forward(self, x):
        valid = (x > 100).to(x.dtype)
        return x - (x * valid).sum(-1, keepdim=True) / valid.sum(-1, keepdim=True)


class Reciprocal(nn.Module):
    def forward(self, x):
        distance = torch.relu(x)
        return x * (0.01 / distance)


class LogOfZero(nn.Module):
    def forward(self, x):
        return torch.log(torch.relu(x))


class LogSoftmax(nn.Module):
    def forward(self, x):
        p = torch.softmax(100 * x, -1)
        return torch.log(p) / 100

    def told(self, x):
        return torch.log_softmax(100 * x, -1) / 100


class LogSoftmaxEps(nn.Module):
    """At O3, where the softmax is half although a logarithm reads it."""

    def forward(self, x):
        p = torch.softmax(20 * x, -1)
        return torch.log(p + 1e-8) / 40

    def told(self, x):
        return torch.log_softmax(20 * x, -1) / 40


class LogNarrowSoftmax(nn.Module):
    def forward(self, x):
        p = torch.softmax(100 * x, -1)
        return torch.log2(p) / 200

    def told(self, x):
        return torch.log_softmax(100 * x, -1) / math.log(2) / 200


class Renormalised(nn.Module):
    def forward(self, x):
        p = torch.softmax(torch.cat([30 + 0 * x[:, :1], x], -1), -1)[:, 1:]
        return p / p.sum(-1, keepdim=True)


class Entropy(nn.Module):
    def forward(self, x):
        p = torch.softmax(15 * x, -1)
        entropy = -(p * p.log()).sum(-1, keepdim=True)
        return x * entropy

    def told(self, x):
        logp = torch.log_softmax(15 * x, -1)
        entropy = -(logp.exp() * logp).sum(-1, keepdim=True)
        return x * entropy


class KlByHand(nn.Module):
    def forward(self, x):
        p, q = torch.softmax(x, -1), torch.softmax(-15 * x, -1)
        return x * (p * torch.log(p / q)).sum(-1, keepdim=True)


class RoundedVariance(nn.Module):
    def forward(self, x):
        x = 20 + x / 10
        mean = x.mean(-1, keepdim=True)
        variance = (x * x).mean(-1, keepdim=True) - mean * mean
        return (x - mean) / variance.sqrt()


class Angle(nn.Module):
    def forward(self, x):
        a = x / x.norm(dim=-1, keepdim=True).to(x.dtype)
        cosine = (a * a).sum(-1, keepdim=True).to(x.dtype) + 1e-3
        return x * torch.acos(cosine)


class Power(nn.Module):
    def forward(self, x):
        return x**0.7


class Logit(nn.Module):
    def forward(self, x):
        return torch.log(1 - torch.sigmoid(12 * (x + 1)))


class MaskTimesInf(nn.Module):
    def forward(self, x):
        mask = torch.eye(len(x), dtype=x.dtype)
        scores = x @ x.T + (1 - mask) * float("-inf")
        return scores.softmax(-1) @ x


class MaskedRow(nn.Module):
    def forward(self, x):
        mask = torch.zeros(len(x), len(x), dtype=torch.bool)
        mask[2] = True
        scores = (x @ x.T).masked_fill(mask, float("-inf"))
        return scores.softmax(-1) @ x


class PaddedAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.padding = torch.ones(1, SAMPLES, dtype=torch.bool)

    def forward(self, x):
        return self.attn(x[None], x[None], x[None], key_padding_mask=self.padding)[0][0]

    def told(self, x):
        padding = self.padding.clone()
        padding[:, 0] = False
        return self.attn(x[None], x[None], x[None], key_padding_mask=padding)[0][0]


class StdOfOne(nn.Module):
    def forward(self, x):
        groups = x.unflatten(-1, (WIDTH, 1))
        return x / (groups.std(-1) + 1)


class GumbelSoftmax(nn.Module):
    def forward(self, x):
        noise = torch.rand(len(x), 4096).to(x.dtype)
        gumbel = -torch.log(-torch.log(noise))
        return x + F.softmax(gumbel, -1)[:, :1]


class FisherZ(nn.Module):
    def forward(self, x):
        correlation = x / x.abs().amax(-1, keepdim=True)
        return torch.atanh(correlation)


SOFTMAX = r"log_softmax|softmax_dtype=torch\.float32"

DOMAINS = [
    Planted(
        "eps in a division",
        EpsInDiv,
        r"larger eps",
        op="div",
        line="1e-8",
        kind="vanished_eps",
    ),
    Planted(
        "eps in rsqrt",
        EpsInRsqrt,
        r"larger eps",
        op="rsqrt",
        line="1e-8",
        kind="vanished_eps",
    ),
    Planted(
        "eps in a logarithm",
        EpsInLog,
        r"larger eps",
        op="log",
        line="1e-8",
        kind="vanished_eps",
    ),
    Planted(
        "mean of nothing",
        EmptyMean,
        r"empty",
        op="mean",
        line=".mean()",
        kind="zero_by_zero",
    ),
    Planted(
        "count of zero",
        CountOfZero,
        r"[Cc]lamp|in place of the divisor",
        op="div",
        line="valid.sum",
        kind="zero_by_zero",
    ),
    Planted(
        "1/0",
        Reciprocal,
        r"[Cc]lamp|in place of the divisor",
        op=("reciprocal", "div", "mul"),
        line="0.01 / distance",
        kind="division_by_zero",
    ),
    Planted(
        "logarithm of 0",
        LogOfZero,
        r"[Cc]lamp",
        op="log",
        line="torch.log",
        kind="domain_error",
    ),
    Planted(
        "log(softmax)",
        LogSoftmax,
        r"log_softmax",
        op="log",
        line="torch.log(p)",
        kind="softmax_zero",
        by="told",
    ),
    Planted(
        "log(softmax + eps)",
        LogSoftmaxEps,
        SOFTMAX,
        op="log",
        line="torch.log(p",
        kind="softmax_zero",
        level="O3",
        by="told",
    ),
    Planted(
        "log2(softmax)",
        LogNarrowSoftmax,
        r"log_softmax",
        op="log2",
        line="torch.log2",
        kind="softmax_zero",
        by="told",
    ),
    Planted(
        "p / p.sum()",
        Renormalised,
        SOFTMAX + "|" + FP32,
        op="div",
        line="p / p.sum",
        kind="softmax_zero",
        level="O3",
    ),
    Planted(
        "entropy by hand",
        Entropy,
        SOFTMAX,
        op="log",
        line="p.log()",
        kind="softmax_zero",
        level="O3",
        by="told",
    ),
    Planted(
        "KL by hand",
        KlByHand,
        SOFTMAX + "|" + FP32,
        op="div",
        line="p / q",
        kind="softmax_zero",
        level="O3",
    ),
    Planted(
        "variance rounded below 0",
        RoundedVariance,
        rf"[Cc]lamp|{FP32}",
        op="sqrt",
        line="variance.sqrt",
        kind="domain_error",
    ),
    Planted(
        "cosine beyond 1",
        Angle,
        r"[Cc]lamp",
        op="acos",
        line="acos",
        kind="domain_error",
    ),
    Planted(
        "atanh of 1",
        FisherZ,
        r"[Cc]lamp",
        op="atanh",
        line="atanh",
        kind="domain_error",
    ),
    Planted(
        "power of a negative",
        Power,
        r"[Cc]lamp",
        op="pow",
        line="x**0.7",
        kind="domain_error",
    ),
    Planted(
        "log(1 - sigmoid)",
        Logit,
        r"[Cc]lamp|logsigmoid",
        op="log",
        line="torch.log(1",
        kind="domain_error",
    ),
    Planted(
        "mask times -inf",
        MaskTimesInf,
        r"masked_fill|torch\.where",
        op="mul",
        line="float(",
        kind="infinite_constant",
    ),
    Planted(
        "masked row",
        MaskedRow,
        r"torch\.where",
        op="softmax",
        line="softmax",
        kind="masked_row",
    ),
    Planted(
        "everything is padding",
        PaddedAttention,
        r"[Ll]eave one entry",
        op="softmax",
        line="self.attn",
        kind="masked_row",
        module="block.attn",
        by="told",
    ),
    Planted(
        "std of one element",
        StdOfOne,
        r"correction=0|empty",
        op="std",
        line=".std(",
        kind="zero_by_zero",
    ),
    Planted(
        "Gumbel noise by hand",
        GumbelSoftmax,
        r"[Cc]lamp",
        op="log",
        line="torch.log(noise)",
        kind="domain_error",
    ),
]
