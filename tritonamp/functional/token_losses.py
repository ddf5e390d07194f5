"""Log-probabilities of tokens, and entropies, as reinforcement learning takes them from logits.

Losses of it multiply each token's log-probability by a factor of its own (an advantage, a ratio of
two policies), so gradients are made in the backward, from the logits or, by parts, from what the
logits are made of.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonamp.functional import linear_head
from tritonamp.functional.inputs import is_under_transforms
from tritonamp.functional.linear_head import LinearHead, Results, Tensors
from tritonamp.kernels.token_log_probs import token_log_probs as of_rows
from tritonamp.kernels.token_log_probs_backward import token_log_probs_backward


class TokenRows(NamedTuple):
    """Log-probabilities of rows' targets and, with ``entropy``, entropies: a ``RowLoss``."""

    temperature: float
    entropy: bool

    def of(self, logits: Tensor, targets: Tensor) -> tuple[Results, Tensor]:
        log_probs, stats = of_rows(logits, targets, *self, linear_head.backend_of(logits.dtype))
        return ((log_probs, stats[2]) if self.entropy else (log_probs,)), stats

    def gradient(
        self, logits: Tensor, targets: Tensor, grads: Sequence[Tensor], stats: Tensor
    ) -> Tensor:
        return token_log_probs_backward(
            logits,
            targets,
            torch.stack(tuple(grads)),
            stats,
            self.temperature,
            linear_head.backend_of(logits.dtype),
        )

    def by_torch(self, logits: Tensor, targets: Tensor) -> Results:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        log_p = torch.log_softmax(wide / self.temperature, -1)
        found = log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        if not self.entropy:
            return (found,)
        p = log_p.exp()
        return found, -(p * log_p.masked_fill(p == 0, 0.0)).sum(-1)


class TokenLogProbs(torch.autograd.Function):
    """Log-probabilities of classes, and entropies, of logits [..., v], which are kept."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, loss: TokenRows) -> Results:
        (log_probs, *entropy), stats = loss.of(logits, targets)
        ctx.save_for_backward(logits, targets, stats)
        ctx.loss = loss
        return log_probs, *(view.clone() for view in entropy)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensors:
        logits, targets, stats = ctx.saved_tensors
        if torch.is_grad_enabled():  # it is differentiated again
            results = ctx.loss.by_torch(logits, targets)
            return *linear_head.differentiable(results, (logits,), (True,), grads), None, None
        return ctx.loss.gradient(logits, targets, grads, stats), None, None


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
    loss = TokenRows(float(temperature), return_entropy)
    if is_under_transforms() or logits.is_meta or not logits.numel():
        results = loss.by_torch(logits, targets)
    else:
        results = TokenLogProbs.apply(logits, targets, loss)
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
    linear_head.check_layer(input, weight, bias, chunk_rows)
    _check(tuple(input.shape[:-1]), targets, temperature)
    rows, classes = input.reshape(-1, input.shape[-1]), targets.reshape(-1)
    dtype = linear_head.dtype_of_logits(input, weight)
    loss = TokenRows(float(temperature), return_entropy)
    chunk_rows = chunk_rows or LinearHead.chunk_rows(input.shape[-1])
    results = linear_head.results_of_linear(rows, weight, bias, classes, dtype, loss, chunk_rows)
    results = tuple(result.view(targets.shape) for result in results)
    return (results[0], results[1]) if return_entropy else results[0]


def _check(shape: tuple[int, ...], targets: Tensor, temperature: float) -> None:
    """Raise ValueError about what is wrong with the targets or the temperature."""
    if tuple(targets.shape) != shape or targets.dtype is not torch.int64:
        raise ValueError(
            f"targets: expected int64 classes of shape {shape}, one for each row, got "
            f"{targets.dtype} of shape {tuple(targets.shape)}"
        )
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature: expected a number above 0, got {temperature}")
