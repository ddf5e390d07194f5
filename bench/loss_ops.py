"""Losses of half logits, forward and backward, and cross entropy of a linear layer's outputs."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config
import torch.nn.functional as F
from case import Case
from row_ops import compiled, under_flag_gems
from timing import Work
from torch import Tensor

from tritonamp import functional

BF16, HALF = torch.bfloat16, torch.float16
CLASSES = {HALF: (32000, 50257, 128256), BF16: (8192, 50257, 128256)}
ROWS = 4096
TOY = 4, 65
BYTES = 2, 4  # of a logit, forward and backward
EAGER_BYTES = 12, 24  # a copy in FP32, log-probabilities; and their gradients
HEADS = {"GPT-2": (16384, 50257, 768), "Llama 8B": (8192, 128256, 4096)}  # rows, classes, features
TOY_HEAD = 8, 33, 16

Loss = Callable[..., Tensor]


def fp32(x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x.float(), target)


def autocast(x: Tensor, target: Tensor) -> Tensor:
    """As it stands in torch: log-probabilities are rounded to half."""
    with torch.autocast(x.device.type, x.dtype):
        return F.cross_entropy(x, target)


def liger(x: Tensor, target: Tensor) -> Tensor:
    """Its gradient is there after the forward: its backward multiplies by one number."""
    from liger_kernel.transformers import LigerCrossEntropyLoss

    return LigerCrossEntropyLoss()(x, target)


def apex(x: Tensor, target: Tensor) -> Tensor:
    from apex.contrib.xentropy import SoftmaxCrossEntropyLoss

    return SoftmaxCrossEntropyLoss.apply(x, target, 0.0, -100, True).mean()


def peers() -> dict[str, Callable[[torch.device], Loss]]:
    """By peer, what makes its forward on a device."""
    return {
        "tritonamp": lambda _: functional.cross_entropy,
        "fp32": lambda _: fp32,
        "autocast": lambda _: autocast,
        "compile": lambda device: compiled(fp32, device),
        "Liger-Kernel": lambda _: liger,
        "apex": lambda _: apex,
    }


def fp32_log_probs(x: Tensor, target: Tensor) -> Tensor:
    """As loops of reinforcement learning have it."""
    return x.float().log_softmax(-1).gather(-1, target[:, None]).squeeze(-1)


def log_prob_peers() -> dict[str, Callable[[torch.device], Loss]]:
    """By peer, what makes its forward on a device; a sum of it is differentiated."""
    return {
        "tritonamp": lambda _: lambda x, target: functional.token_log_probs(x, target).sum(),
        "fp32": lambda _: lambda x, target: fp32_log_probs(x, target).sum(),
        "compile": lambda device: compiled(
            lambda x, target: fp32_log_probs(x, target).sum(), device
        ),
    }


def all_logits(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight).float(), target)


def liger_linear(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss()(weight, x, target)


def linear_peers() -> dict[str, Callable[[torch.device], Loss]]:
    """By peer, what makes its forward on a device."""
    return {
        "tritonamp": lambda _: functional.linear_cross_entropy,
        "fp32": lambda _: all_logits,
        "compile": lambda device: compiled(all_logits, device),
        "Liger-Kernel": lambda _: liger_linear,
    }


def work(
    make: Callable[[torch.device], Loss],
    shape: tuple[int, int],
    dtype: torch.dtype,
    backward: bool,
    device: torch.device,
) -> Work:
    """Make a forward without autograd, or the gradient of the logits under a loss scale."""
    loss = make(device)
    x = torch.randn(shape, dtype=dtype, device=device, requires_grad=True)
    target = torch.randint(shape[1], (shape[0],), device=device)
    if not backward:
        return Work([torch.no_grad()(functools.partial(loss, x, target))])
    with torch._functorch.config.patch(
        donated_buffer=False
    ):  # or a compiled backward runs only once
        scaled = loss(x, target).float() * 2.0**16

        def call() -> Any:
            return torch.autograd.grad(scaled, x, retain_graph=True)[0]

        call()
    return Work([call])


def linear_work(
    make: Callable[[torch.device], Loss],
    head: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> Work:
    """Make forward and backward together: one of them does the other's work in some peers."""
    loss, (rows, classes, features) = make(device), head
    x = torch.randn(rows, features, dtype=dtype, device=device, requires_grad=True)
    weight = torch.randn(classes, features, device=device).mul_(0.02).to(dtype).requires_grad_()
    target = torch.randint(classes, (rows,), device=device)

    def call() -> Any:
        return torch.autograd.grad(loss(x, weight, target) * 2.0**16, (x, weight))

    return Work([call])


def cases(toy: bool) -> list[Case]:
    found = [
        _case(op, (ROWS, classes), dtype, backward, toy)
        for op in ("cross_entropy", "token_log_probs")
        for dtype, several in CLASSES.items()
        for classes in several
        for backward in (False, True)
    ]
    return found + [_linear_case(name, head, toy) for name, head in HEADS.items()]


def _case(op: str, shape: tuple[int, int], dtype: torch.dtype, backward: bool, toy: bool) -> Case:
    name, used = f"{op} {'backward' if backward else 'forward'}", TOY if toy else shape
    forwards = peers() if op == "cross_entropy" else log_prob_peers()
    makers = {
        peer: functools.partial(work, make, used, dtype, backward)
        for peer, make in forwards.items()
    }
    makers["FlagGems"] = functools.partial(under_flag_gems, makers["fp32"])
    kind = str(dtype).removeprefix("torch.")
    return Case(
        group=name,
        name=f"{name} {kind} {'x'.join(map(str, shape))}",
        dtype=kind,
        shape="x".join(map(str, used)),
        elements=used[0] * used[1],
        bytes=BYTES[backward],
        peers=makers,
        path_bytes={"tritonamp": BYTES[backward]}
        | ({"fp32": EAGER_BYTES[backward]} if op == "cross_entropy" else {}),
        quick=dtype is HALF and shape[1] == 50257,
        operations=(f"{op}_backward" if backward else op,),
    )


def _linear_case(name: str, head: tuple[int, int, int], toy: bool) -> Case:
    """Return the case of one model's head; its matmuls are the most of it, not bytes."""
    used = TOY_HEAD if toy else head
    return Case(
        group="linear cross entropy",
        name=f"linear cross entropy bfloat16 {name}",
        dtype="bfloat16",
        shape="x".join(map(str, used)),
        elements=used[0] * used[1],
        bytes=None,
        peers={
            peer: functools.partial(linear_work, make, used, BF16)
            for peer, make in linear_peers().items()
        },
        operations=("cross_entropy", "cross_entropy_backward"),
    )
