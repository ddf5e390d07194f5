"""Forwards that are finite, with gradients that are not."""

import torch
import torch.nn.functional as F
from diagnosis.planted.case import WIDTH, Planted
from torch import nn

ANY = ("scale overflow", "backward fault")


class RootOfZero(nn.Module):
    def forward(self, x):
        return x + torch.sqrt(x * (x > 0))


class RootBehindWhere(nn.Module):
    def forward(self, x):
        return torch.where(x > 0, x.sqrt(), 0.1 * x)


class RootBehindClamp(nn.Module):
    """The clamp comes after the root, whose slope is infinite at 0."""

    def forward(self, x):
        h = x - x
        r = (h * h).mean(-1, keepdim=True).sqrt()
        return x + h / r.clamp(min=1e-3)


class NormOfZero(nn.Module):
    def forward(self, x):
        d = x[:, :8] - x[:, :8].detach()
        return x + (d * d).sum(-1, keepdim=True).sqrt()


class ConstantRows(nn.Module):
    def forward(self, x):
        rows = x.mean(-1, keepdim=True).expand(-1, WIDTH)
        return x / (rows.var(-1, keepdim=True).sqrt() + 1)


class EpsInSqrt(nn.Module):
    """The forward is right: the root of 0 is 0. Its slope is not."""

    def forward(self, x):
        h = x * (x > 100)
        return x + torch.sqrt((h * h).mean(-1, keepdim=True) + 1e-8)


class Zeros(nn.Module):
    """A projection that begins at zero."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)


class NormalizeZeros(Zeros):
    def forward(self, x):
        return x + F.normalize(self.out(x), dim=-1)

    def told(self, x):
        return x + F.normalize(self.out(x), dim=-1, eps=1e-3)


class CosineOfZeros(Zeros):
    def forward(self, x):
        return x + F.cosine_similarity(self.out(x), x, dim=-1)[:, None]


class Hypotenuse(nn.Module):
    def forward(self, x):
        a, b = (x * (x > 100)).chunk(2, -1)
        return x + torch.hypot(a, b).repeat(1, 2)


class ArcCosine(nn.Module):
    def forward(self, x):
        cosine = x / x.abs().amax(-1, keepdim=True)
        return x + torch.acos(cosine)


class PowerOfZero(nn.Module):
    def forward(self, x):
        return x + (x * (x > 0)) ** 0.5


class LogBehindWhere(nn.Module):
    def forward(self, x):
        share = x * (x > 0)
        return torch.where(x > 0, share.log(), x)


class DivisionBehindMask(nn.Module):
    def forward(self, x):
        h = x * (x > 0)
        return torch.where(h > 0, x / h, 0)


class Divided(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad / (grad - grad)


class Divides(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad / (grad - grad).clamp(min=1)


class OwnFunction(nn.Module):
    def forward(self, x):
        return Divided.apply(x)

    def told(self, x):
        return Divides.apply(x)


class TensorHook(nn.Module):
    def forward(self, x):
        h = 2 * x
        if h.requires_grad:
            h.register_hook(lambda grad: grad / (grad - grad))
        return h

    def told(self, x):
        h = 2 * x
        if h.requires_grad:
            h.register_hook(lambda grad: grad / (grad - grad).clamp(min=1))
        return h


class Loop(nn.Module):
    """Gradients grow by 3 in each of 40 turns; activations do not."""

    def __init__(self):
        super().__init__()
        self.turn = nn.Linear(WIDTH, WIDTH, bias=False)
        nn.init.orthogonal_(self.turn.weight, gain=3.0)

    def forward(self, x):
        for _ in range(40):
            x = self.turn(x - x.detach() + torch.tanh(x.detach()))
        return x


class Steep(nn.Module):
    def forward(self, x):
        return x + torch.sin(1e7 * x.float()).to(x.dtype)


class SteepLayer(nn.Module):
    def forward(self, x):
        return x + 1e4 * (x - x.detach())


class RootOfSums(nn.Module):
    def forward(self, x):
        d = (x - x.detach()).unflatten(-1, (4, 4))
        return x + d.abs().pow(0.5).sum(-1).repeat(1, 4)


HARMLESS = r"harmless value in before|[Cc]lamp"

BACKWARDS = [
    Planted(
        "root of 0",
        RootOfZero,
        HARMLESS,
        "sqrt",
        "torch.sqrt",
        "backward_nan",
        ANY,
        phase="backward",
    ),
    Planted(
        "root behind where",
        RootBehindWhere,
        r"harmless value in before|clamp",
        "sqrt",
        "x.sqrt()",
        "backward_nan",
        ANY,
        phase="backward",
    ),
    Planted(
        "root behind a clamp",
        RootBehindClamp,
        HARMLESS,
        "sqrt",
        ".sqrt()",
        "backward_nan",
        ANY,
        phase="backward",
    ),
    Planted(
        "norm of 0 by hand",
        NormOfZero,
        HARMLESS,
        "sqrt",
        ".sqrt()",
        "backward_nan",
        ANY,
        phase="backward",
    ),
    Planted(
        "root of a variance of 0",
        ConstantRows,
        HARMLESS,
        "sqrt",
        ".sqrt()",
        "backward_nan",
        ANY,
        phase="backward",
    ),
    Planted(
        "eps in sqrt",
        EpsInSqrt,
        r"eps",
        "sqrt",
        "1e-8",
        ("vanished_eps", "backward_nan"),
        ANY,
        phase="backward",
    ),
    Planted(
        "normalize of zeros",
        NormalizeZeros,
        r"eps",
        ("normalize", "div", "expand", "clamp_min"),
        "F.normalize",
        ("small_divisor", "gradient_overflow"),
        ANY,
        phase="backward",
        by="told",
    ),
    Planted(
        "cosine similarity of zeros",
        CosineOfZeros,
        r"eps",
        ("cosine_similarity", "div", "clamp_min"),
        "F.cosine_similarity",
        ("small_divisor", "gradient_overflow"),
        ANY,
        phase="backward",
    ),
    Planted(
        "hypot of (0, 0)",
        Hypotenuse,
        r"harmless value in before|clamp|torch\.where",
        "hypot",
        "hypot",
        "backward_nan",
        ANY,
        phase="backward",
    ),
    Planted(
        "acos at 1",
        ArcCosine,
        r"[Cc]lamp",
        "acos",
        "acos",
        "backward_nan",
        ANY,
        phase="backward",
    ),
    Planted(
        "power of 0",
        PowerOfZero,
        r"[Cc]lamp",
        "pow",
        "** 0.5",
        "backward_nan",
        ANY,
        phase="backward",
    ),
    Planted(
        "logarithm behind where",
        LogBehindWhere,
        r"harmless value in before|clamp|torch\.where",
        "log",
        ".log()",
        "backward_nan",
        ANY,
        phase="backward",
    ),
    Planted(
        "division behind where",
        DivisionBehindMask,
        r"harmless value in before|clamp|torch\.where",
        "div",
        "x / h",
        "backward_nan",
        ANY,
        phase="backward",
    ),
    Planted(
        "root of a distance of 0",
        RootOfSums,
        HARMLESS,
        "pow",
        "pow(0.5)",
        "backward_nan",
        ANY,
        phase="backward",
    ),
    Planted(
        "0/0 in an own backward",
        OwnFunction,
        r"[Mm]end that line",
        ("div", "Divided", "DividedBackward"),
        "grad / (grad - grad)",
        "own_backward",
        ANY,
        phase="backward",
        by="told",
    ),
    Planted(
        "0/0 in a hook",
        TensorHook,
        r"[Mm]end that line",
        "div",
        "grad / (grad - grad)",
        "own_backward",
        ANY,
        phase="backward",
        by="told",
    ),
    Planted(
        "gradient explodes in a loop",
        Loop,
        r"fp32_modules=\['block|bfloat16",
        ("linear", "mm"),
        "self.turn",
        "gradient_overflow",
        ANY,
        module="block.turn",
        phase="backward",
    ),
    Planted(
        "steep slope",
        Steep,
        r"fp32_modules=\['block|bfloat16",
        ("to", "to_copy"),
        "1e7",
        "gradient_overflow",
        ANY,
        phase="backward",
    ),
    Planted(
        "scale too high for a layer",
        SteepLayer,
        r"GradScaler\(init_scale=",
        "mul",
        "1e4",
        "scale_too_high",
        "scale overflow",
        phase="backward",
    ),
]
