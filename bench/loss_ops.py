"""Losses of half logits, forward and backward, and cross entropy of a linear layer's outputs."""

from typing import Any

import torch
import torch.nn.functional as F
from case import Case
from op_cases import BF16, HALF, Forward, Inputs, Op, Shape, both_directions, by, makers, simple_op
from torch import Tensor

from tritonamp import functional

CLASSES = {HALF: (32000, 50257, 128256), BF16: (8192, 50257, 128256)}
ROWS = 4096
TOY = 4, 65
FP32_BYTES = 12, 24  # a copy in FP32, log-probabilities; and their gradients
HEADS = {"GPT-2": (16384, 50257, 768), "Llama 8B": (8192, 128256, 4096)}  # rows, classes, features
TOY_HEAD = 8, 33, 16


def inputs(shape: Shape, dtype: torch.dtype, device: Any) -> Inputs:
    rows, classes = shape
    x = torch.randn(shape, dtype=dtype, device=device)
    return [x, torch.randint(classes, (rows,), device=device)]


def linear_inputs(head: Shape, dtype: torch.dtype, device: Any) -> Inputs:
    rows, classes, features = head
    x = torch.randn(rows, features, dtype=dtype, device=device)
    weight = torch.randn(classes, features, device=device).mul_(0.02).to(dtype)
    return [x, weight, torch.randint(classes, (rows,), device=device)]


def fp32(x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x.float(), target)


def autocast(x: Tensor, target: Tensor) -> Tensor:
    """Compute as torch does on half logits: log-probabilities are rounded to half."""
    with torch.autocast(x.device.type, x.dtype):
        return F.cross_entropy(x, target)


def liger(x: Tensor, target: Tensor) -> Tensor:
    """Compute by Liger-Kernel, whose forward also computes the gradient."""
    from liger_kernel.transformers import LigerCrossEntropyLoss

    return LigerCrossEntropyLoss()(x, target)


def apex(x: Tensor, target: Tensor) -> Tensor:
    from apex.contrib.xentropy import SoftmaxCrossEntropyLoss

    return SoftmaxCrossEntropyLoss.apply(x, target, 0.0, -100, True).mean()


def token_log_probs(x: Tensor, target: Tensor) -> Tensor:
    return functional.token_log_probs(x, target).sum()


def fp32_log_probs(x: Tensor, target: Tensor) -> Tensor:
    """Compute like loops of reinforcement learning; the sum gives one gradient."""
    return x.float().log_softmax(-1).gather(-1, target[:, None]).squeeze(-1).sum()


def all_logits(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight).float(), target)


def liger_linear(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss()(weight, x, target)


CROSS_ENTROPY_FORWARDS: dict[str, Forward] = {
    "tritonamp": functional.cross_entropy,
    "fp32": fp32,
    "autocast": autocast,
    "compile": fp32,
    "Liger-Kernel": liger,
    "apex": apex,
}
LOG_PROBS_FORWARDS: dict[str, Forward] = {
    "tritonamp": token_log_probs,
    "fp32": fp32_log_probs,
    "compile": fp32_log_probs,
}
LINEAR_FORWARDS: dict[str, Forward] = {
    "tritonamp": functional.linear_cross_entropy,
    "fp32": all_logits,
    "compile": all_logits,
    "Liger-Kernel": liger_linear,
}
CROSS_ENTROPY = simple_op("cross_entropy", CROSS_ENTROPY_FORWARDS, inputs, (2, 4), gems="fp32")
LOG_PROBS = CROSS_ENTROPY._replace(name="token_log_probs", forwards=LOG_PROBS_FORWARDS)
# matmuls are the most of it, not bytes
LINEAR = Op("linear cross entropy", LINEAR_FORWARDS, linear_inputs, None, ((), ()), gems=None)


def cases(toy: bool) -> list[Case]:
    found = [
        case
        for op, path_bytes in ((CROSS_ENTROPY, {"fp32": FP32_BYTES}), (LOG_PROBS, {}))
        for dtype, several in CLASSES.items()
        for classes in several
        for case in both_directions(
            op, dtype, (ROWS, classes), TOY if toy else None,
            path_bytes=path_bytes, tier=2 if dtype is HALF and classes == 50257 else 3,
        )
    ]  # fmt: skip
    return found + [_linear_case(name, TOY_HEAD if toy else head) for name, head in HEADS.items()]


def _linear_case(name: str, head: tuple[int, int, int]) -> Case:
    """Return the case of one model's head.

    Forward and backward are one row, because in some peers one does the other's work.
    """
    return Case(
        group=LINEAR.name,
        name=f"{LINEAR.name} bfloat16 {name}",
        dtype="bfloat16",
        shape=by(head),
        elements=head[0] * head[1],
        bytes=None,
        peers=makers(LINEAR, "both", head, BF16),
        operations=("cross_entropy", "cross_entropy_backward"),
    )
