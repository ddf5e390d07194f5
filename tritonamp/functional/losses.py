"""Differentiable cross entropy and entropy of half logits: FP32 arithmetic and results."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonamp.functional.inputs import backend_in_force, is_batch_invariant, takes
from tritonamp.kernels._by_length import asked_backend
from tritonamp.kernels.cross_entropy import CROSS_ENTROPY, NO_CLASS
from tritonamp.kernels.cross_entropy import cross_entropy as _cross_entropy
from tritonamp.kernels.cross_entropy_backward import cross_entropy_backward
from tritonamp.policy import HALF_DTYPES

REDUCTIONS = "none", "mean", "sum"  # by their numbers in aten::cross_entropy_loss
Results = tuple[Tensor, ...]
Tensors = tuple[Tensor | None, ...]


class LineLosses(NamedTuple):
    """Cross entropies of lines of logits and, with ``entropy``, the entropies of the lines.

    Attributes:
        dim: dimension of the classes.
        ignore_index: target of lines with loss 0; ``NO_CLASS``: none.
        smoothing: share of the target's probability that is spread over all classes.
        temperature: divisor of the logits.
        entropy: whether entropies are computed.
        backend: "auto" or "triton". FP64 is eager because the kernels compute in FP32.
    """

    dim: int = -1
    ignore_index: int = NO_CLASS
    smoothing: float = 0.0
    temperature: float = 1.0
    entropy: bool = False
    backend: str = "auto"

    def of(self, logits: Tensor, targets: Tensor) -> tuple[Results, Tensor]:
        """Return the results in the shape of ``targets``, and the statistics for the gradient."""
        how = self.dim, self.ignore_index, self.smoothing, self.temperature, self.entropy
        losses, stats = _cross_entropy(logits, targets, *how, self._backend_for(logits))
        return ((losses, stats[2]) if self.entropy else (losses,)), stats

    def gradient(
        self, logits: Tensor, targets: Tensor, grads: Sequence[Tensor], stats: Tensor
    ) -> Tensor:
        """Return the gradient of the logits for the gradients of the results."""
        grad = torch.stack(tuple(grads)) if self.entropy else grads[0].unsqueeze(0)
        how = self.dim, self.ignore_index, self.smoothing, self.temperature
        return cross_entropy_backward(logits, targets, grad, stats, *how, self._backend_for(logits))

    def by_torch(self, logits: Tensor, targets: Tensor) -> Results:
        """Return the results by operations that may be differentiated any number of times."""
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32)) / self.temperature
        lines = wide.movedim(self.dim, -1)
        losses = torch.nn.functional.cross_entropy(
            lines.reshape(-1, lines.shape[-1]),
            targets.reshape(-1),
            ignore_index=self.ignore_index,
            reduction="none",
            label_smoothing=self.smoothing,
        ).view(targets.shape)
        if not self.entropy:
            return (losses,)
        log_p = lines.log_softmax(-1)
        p = log_p.exp()
        entropies = -(p * log_p.masked_fill(p == 0, 0.0)).sum(-1)
        return losses, entropies.masked_fill(targets == self.ignore_index, 0.0)

    def _backend_for(self, logits: Tensor) -> str:
        return "eager" if logits.dtype is torch.float64 else self.backend


class CrossEntropy(torch.autograd.Function):
    """Results of ``LineLosses``; saves the logits and two or three FP32 numbers per line."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, losses: LineLosses) -> Results:
        (loss, *entropy), stats = losses.of(logits, targets)
        ctx.save_for_backward(logits, targets, stats)
        ctx.losses = losses
        # An entropy is a view of the saved statistics, which a caller must not write to.
        return loss, *(view.clone() for view in entropy)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensors:
        logits, targets, stats = ctx.saved_tensors
        if torch.is_grad_enabled():  # for a gradient of the gradient
            results = ctx.losses.by_torch(logits, targets)
            return *differentiable(results, (logits,), (True,), grads), None, None
        return ctx.losses.gradient(logits, targets, grads, stats), None, None


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return ``torch.nn.functional.cross_entropy`` of half logits, computed in FP32, as FP32.

    The incoming gradient, and with it the loss scale, is applied in FP32, and the result is rounded
    once. The number of targets that count is summed up on the device. Lines with an ignored target
    have gradient 0 whatever they contain. With class weights, or with probabilities as targets,
    torch computes in FP32.

    Args:
        input: logits [classes], [N, classes] or [N, classes, d1, ...].
        target: int64 classes [], [N] or [N, d1, ...], or whatever else torch takes.
        weight: weights of the classes.
        size_average: deprecated in torch, with the same meaning.
        ignore_index: target that does not count.
        reduce: deprecated in torch, with the same meaning.
        reduction: "none", "mean" over the targets that count, or "sum".
        label_smoothing: share of the target's probability that is spread over all classes.

    Raises:
        IndexError: a target is no class; on CUDA it is a failed assertion on the device.
    """
    if size_average is not None or reduce is not None:
        # private (torch 2.11 to 2.15): torch.nn.functional.cross_entropy calls it for these two
        reduction = torch.nn._reduction.legacy_get_string(size_average, reduce)
    backend = backend_in_force()
    if is_ours(backend, input, target, weight, label_smoothing) and reduction in REDUCTIONS:
        return fused(input, target, ignore_index, reduction, label_smoothing, backend)
    if isinstance(input, Tensor) and input.dtype in HALF_DTYPES:
        weight = weight.float() if weight is not None and weight.dtype in HALF_DTYPES else weight
        target = target.float() if target.dtype in HALF_DTYPES else target
        input = input.float()
    return torch.nn.functional.cross_entropy(
        input,
        target,
        weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )


def is_ours(
    backend: str, input: Tensor, target: Tensor, weight: Tensor | None, smoothing: float
) -> bool:
    """Return whether this package computes the loss; if not, torch computes or refuses it."""
    if not takes(input) or weight is not None:
        return False
    if not isinstance(target, Tensor) or target.dtype is not torch.int64:
        return False
    if not input.dim() or target.device != input.device or not 0 <= smoothing <= 1:
        return False
    dim = _class_dim(input)
    if target.shape != input.shape[:dim] + input.shape[dim + 1 :] or not input.numel():
        return False
    return is_batch_invariant() or CROSS_ENTROPY.uses_triton(backend, input)


def fused(
    input: Tensor, target: Tensor, ignore_index: int, reduction: str, smoothing: float, backend: str
) -> Tensor:
    """Return the loss of logits for which ``is_ours`` is true."""
    dim = _class_dim(input)
    if asked_backend(backend) is not None and dim != input.dim() - 1:
        input, dim = input.movedim(dim, -1), -1  # the reason is that of ``lies_in_pieces``
    losses = LineLosses(dim, ignore_index, float(smoothing), backend=backend)
    if input.requires_grad and torch.is_grad_enabled():
        (found,) = CrossEntropy.apply(input, target, losses)
    else:
        (found,), _ = losses.of(input, target)
    return reduced(found, target, ignore_index, reduction)


def reduced(losses: Tensor, target: Tensor, ignore_index: int, reduction: str) -> Tensor:
    """Return ``losses``, their sum, or their sum over the number of targets that count."""
    if reduction == "none":
        return losses
    total = losses.sum()
    return total / (target != ignore_index).sum() if reduction == "mean" else total


def differentiable(
    results: Sequence[Tensor],
    inputs: Sequence[Tensor | None],
    needed: tuple[bool, ...],
    grads: Sequence[Tensor],
) -> Tensors:
    """Return the needed gradients of ``inputs``, which may be differentiated again."""
    tensors = [t for t, wanted in zip(inputs, needed, strict=True) if t is not None and wanted]
    found = iter(torch.autograd.grad(results, tensors, grads, create_graph=True))
    return tuple(next(found) if wanted else None for wanted in needed)


def check_targets(name: str, targets: Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError if ``targets`` are no int64 classes of a shape.

    Args:
        name: name of the argument, for the message.
        targets: the argument.
        shape: the expected shape.
    """
    if tuple(targets.shape) != shape or targets.dtype is not torch.int64:
        raise ValueError(
            f"{name}: expected int64 classes of shape {shape}, one for each row, got "
            f"{targets.dtype} of shape {tuple(targets.shape)}"
        )


def _class_dim(input: Tensor) -> int:
    return min(1, input.dim() - 1)
