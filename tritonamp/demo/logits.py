"""A story of gradients of logits, too small for half before the loss scale and not after it."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tritonamp import functional
from tritonamp.demo.sides import Setting, Story, power_of_two

TOKENS, WORDS = 4096, 8192
SCALE = 2.0**16
AT_A_TIME = 512  # tokens: the gradient of a mean over all of them is made in parts

FP32, EARLY, STOCK = "FP32", "half, made in the forward", "torch.amp, FP32 logits"
OURS = "tritonamp, half logits"
TORCH = "linear_cross_entropy of torch"  # from 2.13 on
Gradient = Callable[[Tensor, Tensor], Tensor]


def logits(setting: Setting) -> Story:
    """Gradients of a cross entropy vanish in kernels that round them before the loss scale."""
    sides: dict[str, Gradient] = {
        FP32: _fp32,
        EARLY: _made_in_the_forward,
        **({TORCH: _of_torchs_layer} if hasattr(F, "linear_cross_entropy") else {}),
        STOCK: _of(lambda x, targets: F.cross_entropy(x.float(), targets, reduction="sum")),
        OURS: _of(lambda x, targets: functional.cross_entropy(x, targets, reduction="sum")),
    }
    rows = {name: _compared(gradient, setting) for name, gradient in sides.items()}
    return Story(rows, _words(rows))


def _compared(gradient: Gradient, setting: Setting) -> dict[str, Any]:
    """Compare what words get that are not the target with the gradient in FP64."""
    zeros = wrong = true_squares = count = 0.0
    for x, targets in _batches(setting):
        found = gradient(x, targets).double()
        others = torch.ones_like(x, dtype=torch.bool).scatter_(1, targets[:, None], False)
        true = x.double().softmax(1) / TOKENS
        zeros += ((found == 0) & others).sum().item()
        count += others.sum().item()
        wrong += ((found - true) * others).square().sum().item()
        true_squares += (true * others).square().sum().item()
    return {
        "zero gradients": 100 * zeros / count,
        "error of gradients": 100 * (wrong / true_squares) ** 0.5,
    }


def _batches(setting: Setting) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield half logits of a model that knows nothing yet, and targets."""
    generator = torch.Generator().manual_seed(setting.seed)
    for _ in range(setting.steps or TOKENS // AT_A_TIME):
        x = torch.randn(AT_A_TIME, WORDS, generator=generator).half()
        targets = torch.randint(WORDS, (AT_A_TIME,), generator=generator)
        yield x.to(setting.device), targets.to(setting.device)


def _fp32(x: Tensor, targets: Tensor) -> Tensor:
    wide = x.float().requires_grad_()
    loss = F.cross_entropy(wide, targets, reduction="sum") / TOKENS
    return torch.autograd.grad(loss, wide)[0]


def _of(loss_of: Callable[[Tensor, Tensor], Tensor]) -> Gradient:
    def gradient(x: Tensor, targets: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        loss = loss_of(x, targets) / TOKENS * SCALE
        return torch.autograd.grad(loss, x)[0].float() / SCALE

    return gradient


def _made_in_the_forward(x: Tensor, targets: Tensor) -> Tensor:
    """Round in the forward, into the logits' memory; the backward multiplies what is there."""
    forward = _fp32(x, targets).half()
    return (forward * SCALE).float() / SCALE


def _of_torchs_layer(x: Tensor, targets: Tensor) -> Tensor:
    """Return the gradient of a last layer whose inputs are unit vectors: that of its logits.

    It hands a half loss on, whose gradient cannot be 65536: the loss scale is half of the others'.
    """
    weight, inputs = x.t().contiguous().requires_grad_(), torch.eye(len(x)).to(x)
    share = torch.full((WORDS,), 1 / TOKENS).to(x)  # of a token in the mean
    layer: Any = F.linear_cross_entropy
    options = nn.LinearCrossEntropyOptions()
    loss = layer(inputs, weight, targets, weight=share, reduction="sum", options=options)
    (gradient,) = torch.autograd.grad(loss.float() * (SCALE / 2), weight)
    return gradient.t().float() / (SCALE / 2)


def _words(rows: dict[str, dict[str, Any]]) -> list[str]:
    smallest = torch.finfo(torch.float16).smallest_normal * torch.finfo(torch.float16).eps
    return [
        f"The loss is the mean over {TOKENS} tokens, of {WORDS} words each. A word that is not the "
        f"target gets the {TOKENS}th part of its probability, about {1 / TOKENS / WORDS:.0e}; the "
        f"smallest number of float16 is {smallest:.0e}. With the loss scale {power_of_two(SCALE)} "
        "that is no trouble, but a kernel that makes the gradient in the forward, to save "
        "memory, does not know the loss scale (Liger-Kernel's, and torch's linear_cross_entropy): "
        f"{rows[EARLY]['zero gradients']:.0f} % of these gradients are zero, and all of them "
        f"together are off by {rows[EARLY]['error of gradients']:.0f} %. Nothing warns: the target "
        "still gets its own gradient, words that are unlikely are not pushed down.",
        "On a GPU tritonamp.functional.cross_entropy keeps the half logits and two FP32 numbers a "
        "token, and applies the loss scale in FP32 before it rounds: "
        f"{rows[OURS]['zero gradients']:.2g} % are zero, and the error, "
        f"{rows[OURS]['error of gradients']:.2f} %, is that of rounding once. torch.amp on FP32 "
        f"logits gives {rows[STOCK]['error of gradients']:.2f} % in more memory.",
    ]
