"""torch's own linear cross entropy (torch 2.13 and later), replaced in enabled forwards.

With ``options`` torch computes gradients in the forward, and rounds them to half before the loss
scale reaches them: at a scale of 2**16 they are inf, and values below 2**-24 are 0. While a model
is enabled, two things are replaced. One is the function in torch.nn.functional, which
``nn.LinearCrossEntropyLoss`` calls, too. The other is the operators behind ``options``, for code
that imported the function before.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tritonamp import functional
from tritonamp.casts.active import ActivePolicy, half_dtype
from tritonamp.casts.op_rules import Rule, Stock
from tritonamp.functional.losses import REDUCTIONS

NAME = "linear_cross_entropy"
OPERATORS = (
    "_linear_cross_entropy_batch_chunked",
    "_linear_cross_entropy_batch_chunked_no_reduction",
)
"""Operators behind ``options``, in the namespace torch_nn; private, in torch 2.13 to 2.15."""


def in_an_enabled_forward(
    stock: Callable[..., Tensor],
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: Any = None,
) -> Tensor:
    """Return the FP32 loss of half logits by ``functional.linear_cross_entropy``.

    Where that function does not compute a case, or refuses it, the result is torch's without
    ``options``: a linear layer and a cross entropy, each by its rule, with torch's errors. These
    cases are probabilities as targets, losses of more dimensions, and class weights together with
    label smoothing.

    ``stock`` is torch's function, and ``weight`` has the weight of each class. ``options`` says how
    torch would cut the loss into chunks, and is ignored. The other arguments are torch's.
    """
    rows = input, linear_weight, target, linear_bias
    plain = reduction in REDUCTIONS and 0 <= label_smoothing <= 1 and _is_plain(*rows)
    if not plain or not _is_a_share(weight, linear_weight, label_smoothing):
        return stock(
            *rows[:3],
            linear_bias=linear_bias,
            weight=weight,
            reduction=reduction,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
        )
    ignored = -100 if ignore_index is None else ignore_index
    loss = functools.partial(functional.linear_cross_entropy, *rows, ignore_index=ignored)
    if weight is None:
        return loss(reduction=reduction, label_smoothing=label_smoothing)
    counts = target != ignored
    shares = weight.float()[target.where(counts, 0)].where(counts, 0.0)
    losses = loss(reduction="none") * shares
    if reduction == "none":
        return losses
    return losses.sum() / shares.sum() if reduction == "mean" else losses.sum()


def _is_plain(input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> bool:
    """Return whether the tensors are rows for a linear layer, with one class index per row."""
    given = [t for t in (input, weight, target, bias) if t is not None]
    if not all(isinstance(t, Tensor) and not is_traceable_wrapper_subclass(t) for t in given):
        return False
    return (
        not torch.jit.is_tracing()  # type: ignore[attr-defined]
        and input.dim() in (1, 2)
        and weight.dim() == 2
        and input.shape[-1] == weight.shape[1]
        and target.dtype is torch.int64
        and target.shape == input.shape[:-1]
        and (bias is None or bias.shape == weight.shape[:1])
    )


def _is_a_share(weight: Tensor | None, linear_weight: Tensor, label_smoothing: float) -> bool:
    """Return whether class weights, if any, only multiply each row's loss."""
    if weight is None:
        return True
    fits = weight.is_floating_point() and weight.shape == linear_weight.shape[:1]
    return fits and label_smoothing == 0


def ours_inside(stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a wrapper of torch's function that is ours inside an enabled forward."""

    @functools.wraps(stock)
    def linear_cross_entropy(*args: Any, **kwargs: Any) -> Tensor:
        if half_dtype() is None:
            return stock(*args, **kwargs)
        return in_an_enabled_forward(stock, *args, **kwargs)

    return linear_cross_entropy


def _rule(stock: Stock, active: ActivePolicy, *args: Any) -> Any:
    """Return the results of an operator in ``OPERATORS``: a loss, and gradients that stay empty."""
    schema = stock.target._schema
    given = dict(zip((argument.name for argument in schema.arguments), args, strict=False))
    kept = {name: given[name] for name in ("input", "linear_weight", "target")}
    ignored = None if given["target"].is_floating_point() else given["ignore_index"]
    loss = getattr(torch.nn.functional, NAME)(
        **kept,
        linear_bias=given.get("linear_bias"),
        weight=given.get("weight"),
        reduction=given.get("reduction", "none"),
        ignore_index=ignored,
    )
    unread = [loss.new_empty(0) for _ in schema.returns[1:]]
    return (loss, *unread) if unread else loss


LINEAR_LOSSES: dict[str, Rule] = dict.fromkeys(OPERATORS, _rule)
