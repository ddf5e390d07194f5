"""Losses outside of the model, and losses that models compute."""

import torch
import torch.nn.functional as F
from diagnosis.planted.case import OUTPUTS, Loss, Plain, Planted
from torch import nn

ANY = ("scale overflow", "backward fault")
LOG_SOFTMAX = r"log_softmax"


class Sharp(nn.Module):
    """Logits with a softmax that is sure of its class."""

    def forward(self, x):
        return 200 * x


class LogOfProbabilities(Loss):
    def __call__(self, output, y):
        p = torch.softmax(output, -1)
        return F.nll_loss(torch.log(p), y.argmin(-1))

    def told(self, output, y):
        return F.nll_loss(torch.log_softmax(output, -1), y.argmin(-1))


class ProbabilityModel(nn.Module):
    """Ends with a softmax of half numbers."""

    def __init__(self, block):
        super().__init__()
        self.stem, self.head, self.block = nn.Linear(16, 16), nn.Linear(16, OUTPUTS), block

    def forward(self, x):
        return torch.softmax(400 * self.head(self.block(self.stem(x))), -1)

    def told(self, x):
        return torch.log_softmax(400 * self.head(self.block(self.stem(x))), -1)


class NllOfProbabilities(Loss):
    def __call__(self, output, y):
        return -torch.log(output).mean()

    def told(self, output, y):
        return -output.mean()


class LabelSmoothing(Loss):
    def __call__(self, output, y):
        p = torch.softmax(output, -1)
        q = torch.full_like(p, 1 / OUTPUTS)
        return (q * (q.log() - p.log())).sum(-1).mean()

    def told(self, output, y):
        logp = torch.log_softmax(output, -1)
        q = torch.full_like(output, 1 / OUTPUTS)
        return (q * (q.log() - logp)).sum(-1).mean()


class EntropyLoss(Loss):
    def __call__(self, output, y):
        p = output.softmax(-1)
        return -(p * torch.log(p)).sum(-1).mean()

    def told(self, output, y):
        p, logp = output.softmax(-1), output.log_softmax(-1)
        return -(p * logp).sum(-1).mean()


class Focal(Loss):
    def __call__(self, output, y):
        p = torch.sigmoid(output)
        return -(p**2 * torch.log(1 - p)).mean()


class Gan(Loss):
    def __call__(self, output, y):
        return torch.log(1 - torch.sigmoid(output)).mean()


class Bce(Loss):
    """Its slope is divided by p (1 - p) + 1e-12, and is 1e12 where p is 1 and y is 0."""

    def __call__(self, output, y):
        return F.binary_cross_entropy(output, (y > 0).float())


class Sigmoid(nn.Module):
    def forward(self, x):
        return torch.sigmoid(40 * x)


class SigmoidModel(ProbabilityModel):
    """Its head comes before its block."""

    def forward(self, x):
        return self.block(self.head(torch.tanh(self.stem(x))))

    told = forward


class CrossEntropyIgnored(Loss):
    def __call__(self, output, y):
        labels = torch.full((len(output),), -100)
        return F.cross_entropy(output, labels)


class MaskedMean(Loss):
    def __call__(self, output, y):
        valid = (y > 100).float()
        return ((output - y).square() * valid).sum() / valid.sum()


class EmptySelection(Loss):
    def __call__(self, output, y):
        chosen = y > 100
        return F.l1_loss(output[chosen], y[chosen])

    def told(self, output, y):
        chosen = y > 100
        if not bool(chosen.any()):
            return output.sum() * 0
        return F.l1_loss(output[chosen], y[chosen])


class Ctc(Loss):
    def __call__(self, output, y):
        frames = output.log_softmax(-1)[:, None]
        return F.ctc_loss(frames, torch.ones(1, 9, dtype=torch.long), [len(frames)], [9])


class HugeTargets(Loss):
    def __call__(self, output, y):
        return F.mse_loss(output, 1e25 * y)

    def told(self, output, y):
        return F.mse_loss(output, y)


class HalfTargets(Loss):
    """A loss of half outputs, as ``cast_outputs=None`` gives them."""

    def __call__(self, output, y):
        error = output - 400 * y.to(output.dtype)
        return (error * error).mean()


class SumOfHalf(Loss):
    def __call__(self, output, y):
        errors = (output - 120 * y.to(output.dtype)).abs() * 50
        return errors.sum(dtype=output.dtype) / errors.numel()


class Contrastive(Loss):
    def __call__(self, output, y):
        similar = F.normalize(output, dim=-1) @ F.normalize(output, dim=-1).T
        scores = torch.exp(similar / 0.01)
        return -torch.log(scores.diagonal() / scores.sum(-1)).mean()


class Perplexity(Loss):
    def __call__(self, output, y):
        return torch.exp(F.mse_loss(output, 20 * y))


class Weighted(Loss):
    """The scale has to come down from 2^16."""

    def __call__(self, output, y):
        return 1e3 * F.mse_loss(output, y)


class Poisson(Loss):
    def __call__(self, output, y):
        return (torch.exp(150 * output) - y * 150 * output).mean()

    def told(self, output, y):
        return (torch.exp((150 * output).clamp(max=2)) - y * 150 * output).mean()


class Distance(Loss):
    """A prediction that is its target has a distance of 0, which has no slope."""

    def __call__(self, output, y):
        same = output - output.detach()
        return (same * same).sum(-1).sqrt().mean() + output.mean()


class GaussianNll(Loss):
    def __call__(self, output, y):
        variance = torch.relu(output)
        return (torch.log(variance) + (y - output) ** 2 / (variance + 1e-3)).mean()


class Dice(Loss):
    def __call__(self, output, y):
        p, wanted = torch.relu(output - 100), (y > 100).float()
        return 1 - (2 * (p * wanted).sum() / (p.sum() + wanted.sum()))


HALF = {"cast_outputs": None}
OUT = {"module": None}

LOSSES = [
    Planted(
        "nll of log(softmax)",
        Sharp,
        LOG_SOFTMAX,
        "log",
        "torch.log(p)",
        "softmax_zero",
        loss=LogOfProbabilities,
        by="told",
        **OUT,
    ),
    Planted(
        "log of a softmax model",
        Plain,
        LOG_SOFTMAX,
        "log",
        "torch.log(output)",
        "softmax_zero",
        net=ProbabilityModel,
        loss=NllOfProbabilities,
        by="told",
        **OUT,
    ),
    Planted(
        "label smoothing by hand",
        Sharp,
        LOG_SOFTMAX,
        "log",
        "p.log()",
        "softmax_zero",
        loss=LabelSmoothing,
        by="told",
        **OUT,
    ),
    Planted(
        "entropy as a loss",
        Sharp,
        LOG_SOFTMAX,
        "log",
        "torch.log(p)",
        "softmax_zero",
        loss=EntropyLoss,
        by="told",
        **OUT,
    ),
    Planted(
        "focal loss",
        Sharp,
        r"[Cc]lamp|logsigmoid",
        "log",
        "torch.log(1",
        "domain_error",
        loss=Focal,
        **OUT,
    ),
    Planted(
        "GAN loss",
        Sharp,
        r"[Cc]lamp|logsigmoid",
        "log",
        "torch.log(1",
        "domain_error",
        loss=Gan,
        **OUT,
    ),
    Planted(
        "BCE of a sigmoid model",
        Sigmoid,
        r"with_logits|fp32_modules=\['block'\]",
        ("binary_cross_entropy", "sigmoid"),
        "",
        ("gradient_overflow", "small_divisor"),
        ANY,
        module=(None, "block"),
        phase="backward",
        net=SigmoidModel,
        loss=Bce,
    ),
    Planted(
        "every label ignored",
        Plain,
        r"empty|ignored|targets that count",
        ("cross_entropy_loss", "nll_loss_nd", "nll_loss", "nll_loss_forward", "cross_entropy"),
        "F.cross_entropy",
        "zero_by_zero",
        loss=CrossEntropyIgnored,
        **OUT,
    ),
    Planted(
        "masked mean",
        Plain,
        r"[Cc]lamp|in place of the divisor",
        "div",
        "valid.sum()",
        "zero_by_zero",
        loss=MaskedMean,
        **OUT,
    ),
    Planted(
        "loss of nothing",
        Plain,
        r"empty",
        ("l1_loss", "mean"),
        "F.l1_loss",
        "zero_by_zero",
        loss=EmptySelection,
        by="told",
        **OUT,
    ),
    Planted(
        "CTC with a long target",
        Plain,
        r"zero_infinity=True",
        "ctc_loss",
        "F.ctc_loss",
        "ctc_length",
        loss=Ctc,
        **OUT,
    ),
    Planted(
        "huge targets",
        Plain,
        r"[Nn]ormalise|smaller|[Ss]cale",
        "mse_loss",
        "F.mse_loss",
        "square_overflow",
        loss=HugeTargets,
        by="told",
        **OUT,
    ),
    Planted(
        "square of half errors",
        Plain,
        r"\.float\(\)",
        "mul",
        "error * error",
        "square_overflow",
        loss=HalfTargets,
        fields=HALF,
        **OUT,
    ),
    Planted(
        "sum of half errors",
        Plain,
        r"sum\(.*dtype=torch\.float32\)",
        "sum",
        ".sum(",
        "reduction_overflow",
        loss=SumOfHalf,
        fields=HALF,
        **OUT,
    ),
    Planted(
        "contrastive loss",
        Plain,
        r"[Ss]ubtract the maximum",
        "exp",
        "torch.exp",
        "exp_overflow",
        loss=Contrastive,
        **OUT,
    ),
    Planted(
        "perplexity",
        Plain,
        r"clamp",
        "exp",
        "torch.exp",
        "exp_overflow",
        loss=Perplexity,
        **OUT,
    ),
    Planted(
        "Poisson loss",
        Plain,
        r"clamp",
        "exp",
        "torch.exp",
        "exp_overflow",
        loss=Poisson,
        by="told",
        **OUT,
    ),
    Planted(
        "distance of 0",
        Plain,
        r"harmless value in before|[Cc]lamp",
        "sqrt",
        ".sqrt()",
        "backward_nan",
        ANY,
        phase="backward",
        loss=Distance,
        **OUT,
    ),
    Planted(
        "Gaussian NLL",
        Plain,
        r"[Cc]lamp",
        "log",
        "torch.log(variance)",
        "domain_error",
        loss=GaussianNll,
        **OUT,
    ),
    Planted(
        "Dice of nothing",
        Plain,
        r"[Cc]lamp|in place of the divisor",
        "div",
        "p.sum()",
        "zero_by_zero",
        loss=Dice,
        **OUT,
    ),
    Planted(
        "loss times 1000",
        Plain,
        r"GradScaler\(init_scale=",
        "linear",
        "self.head",
        "scale_too_high",
        "scale overflow",
        loss=Weighted,
        module="head",
        phase="backward",
    ),
]
