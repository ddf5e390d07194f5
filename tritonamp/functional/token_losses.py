"""Log-probabilities of tokens, and entropies, as reinforcement learning takes them from logits.

Losses of it multiply each token's log-probability by a factor of its own (an advantage, a ratio of
two policies), so gradients are made in the backward, from the logits or, by parts, from what the
logits are made of.
"""

from typing import Any

import torch
from torch import Tensor

from tritonamp.functional.linear_head import (
    GradientSums,
    LinearHead,
    Tensors,
    backend_of,
    check_layer,
    chunks,
    differentiable,
    dtype_of_logits,
)
from tritonamp.kernels.token_log_probs import token_log_probs as of_rows
from tritonamp.kernels.token_log_probs_backward import token_log_probs_backward

Results = tuple[Tensor, ...]


class TokenLogProbs(torch.autograd.Function):
    """Log-probabilities of classes, and entropies, of logits [..., v], which are kept."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, entropy: bool
    ) -> Results:
        log_probs, stats = of_rows(logits, targets, temperature, entropy, backend_of(logits.dtype))
        ctx.save_for_backward(logits, targets, stats)
        ctx.temperature = temperature
        return (log_probs, stats[2].clone()) if entropy else (log_probs,)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensors:
        logits, targets, stats = ctx.saved_tensors
        if torch.is_grad_enabled():  # it is differentiated again
            results = _by_torch(logits, targets, ctx.temperature, len(grads) == 2)
            return *differentiable(results, (logits,), (True,), grads), None, None, None
        dx = token_log_probs_backward(
            logits, targets, torch.stack(grads), stats, ctx.temperature, backend_of(logits.dtype)
        )
        return dx, None, None, None


class LinearTokenLogProbs(torch.autograd.Function):
    """The same of a linear layer's outputs [r, v], of which a part exists at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        dtype: torch.dtype,
        temperature: float,
        entropy: bool,
        chunk_rows: int,
    ) -> Results:
        found, stats = [], []
        with torch.autocast(input.device.type, enabled=False):
            head = LinearHead.of(dtype, weight, bias)
            for at in chunks(len(targets), chunk_rows):
                # no name for the logits: it would keep them while the next ones are made
                log_probs, stat = of_rows(
                    head.logits(head.rows(input[at])),
                    targets[at],
                    temperature,
                    entropy,
                    backend_of(dtype),
                )
                found.append(log_probs)
                stats.append(stat)
        ctx.save_for_backward(input, weight, bias, targets, *stats)
        ctx.args = dtype, temperature, entropy
        ctx.chunk_rows = chunk_rows
        log_probs = torch.cat(found)
        return (log_probs, torch.cat([s[2] for s in stats])) if entropy else (log_probs,)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensors:
        input, weight, bias, targets, *stats = ctx.saved_tensors
        needed = ctx.needs_input_grad[:3]
        dtype, temperature, _ = ctx.args
        with torch.autocast(input.device.type, enabled=False):
            if torch.is_grad_enabled():  # it is differentiated again
                results = _all_at_once(input, weight, bias, targets, *ctx.args)
                found = differentiable(results, (input, weight, bias), needed, grads)
                return *found, *(None,) * 5
            head = LinearHead.of(dtype, weight, bias)
            sums = GradientSums(head, input, input.dtype, needed)
            for at, stat in zip(chunks(len(targets), ctx.chunk_rows), stats, strict=True):
                rows = head.rows(input[at])
                dlogits = token_log_probs_backward(
                    head.logits(rows),
                    targets[at],
                    torch.stack([grad[at] for grad in grads]),
                    stat,
                    temperature,
                    backend_of(dtype),
                )
                sums.add(at, rows, dlogits)
        return *sums.rounded(weight, bias), *(None,) * 5


def token_log_probs(
    logits: Tensor, targets: Tensor, *, temperature: float = 1.0, return_entropy: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the log-probability of each target under ``softmax(logits / temperature)``.

    Results are FP32 (of FP64 FP64), computed in it from half logits, which are read once. Gradients
    take the incoming ones, and with them a loss scale, in FP32, and are rounded once.

    Args:
        logits: [..., v], float16, bfloat16 or float32.
        targets: int64 classes, [...].
        temperature: more than 0; that of the sampling.
        return_entropy: return the entropy of each row, too, [...]; its gradient counts.

    Raises:
        ValueError: shapes, the targets' dtype or the temperature are no such.
        IndexError: a target is no class; on CUDA it is a failed assertion on the device.
    """
    if not logits.dim() or not logits.is_floating_point():
        raise ValueError(
            f"logits: expected floating numbers [..., v], got {logits.dtype} of shape "
            f"{tuple(logits.shape)}"
        )
    _check(tuple(logits.shape[:-1]), targets, temperature)
    args = logits, targets, float(temperature), return_entropy
    # private (torch 2.11 to 2.15), see inputs.is_half
    if torch._C._are_functorch_transforms_active() or logits.is_meta or not logits.numel():
        results = _by_torch(*args)
    else:
        results = TokenLogProbs.apply(*args)
    return (results[0], results[1]) if return_entropy else results[0]


def linear_token_log_probs(
    input: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    temperature: float = 1.0,
    return_entropy: bool = False,
    chunk_rows: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return ``token_log_probs`` of ``linear(input, weight, bias)``, which exists in parts only.

    Under autocast and in an enabled forward logits are half, and so they are where the input or the
    weight is half, the other FP32. The backward computes them again: 8 rvd FLOPs for r rows, v
    classes and d features. Gradients of weight and bias are added up in FP32 and rounded once.

    Args:
        input: [..., d], hidden states.
        weight: [v, d], of the model's last layer.
        targets: int64 classes, [...].
        bias: [v], or None.
        temperature: more than 0; that of the sampling.
        return_entropy: return the entropy of each row, too, [...]; its gradient counts.
        chunk_rows: rows of logits that exist at a time, in the backward with their gradients. None:
            2048, or 2 d where that is more.

    Raises:
        ValueError: shapes, the targets' dtype, the temperature or ``chunk_rows`` are no such.
        IndexError: a target is no class; on CUDA it is a failed assertion on the device.
    """
    check_layer(input, weight, bias, chunk_rows)
    _check(tuple(input.shape[:-1]), targets, temperature)
    rows, classes = input.reshape(-1, input.shape[-1]), targets.reshape(-1)
    dtype = dtype_of_logits(input, weight)
    args = rows, weight, bias, classes, dtype, float(temperature), return_entropy
    # private (torch 2.11 to 2.15), see inputs.is_half
    if torch._C._are_functorch_transforms_active() or input.is_meta or not len(classes):
        results = _all_at_once(*args)
    else:
        results = LinearTokenLogProbs.apply(
            *args, chunk_rows or LinearHead.chunk_rows(input.shape[-1])
        )
    results = tuple(result.view(targets.shape) for result in results)
    return (results[0], results[1]) if return_entropy else results[0]


def _by_torch(logits: Tensor, targets: Tensor, temperature: float, entropy: bool) -> Results:
    """Return the results by torch's operations, which may be differentiated at will."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_p = torch.log_softmax(wide / temperature, -1)
    found = log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    if not entropy:
        return (found,)
    p = log_p.exp()
    return found, -(p * log_p.masked_fill(p == 0, 0.0)).sum(-1)


def _all_at_once(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    dtype: torch.dtype,
    temperature: float,
    entropy: bool,
) -> Results:
    """Return the results of rows by torch's operations on all logits."""
    head = LinearHead.of(dtype, weight, bias)
    return _by_torch(head.logits(head.rows(input)), targets, temperature, entropy)


def _check(shape: tuple[int, ...], targets: Tensor, temperature: float) -> None:
    """Say what is wrong with the targets or the temperature.

    Raises:
        ValueError: what was got, and what is expected.
    """
    if tuple(targets.shape) != shape or targets.dtype is not torch.int64:
        raise ValueError(
            f"targets: expected int64 classes of shape {shape}, one for each row, got "
            f"{targets.dtype} of shape {tuple(targets.shape)}"
        )
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature: expected a number above 0, got {temperature}")
