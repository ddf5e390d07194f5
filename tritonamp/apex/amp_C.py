"""The list functions of apex's extension module ``amp_C``, made of torch's operations on lists.

All take ``(chunk_size, noop_flag, tensor_lists, *arguments)``, as ``multi_tensor_applier`` passes
them. Tensors may be FP32, FP16, BF16 or FP64; the arithmetic is FP32 (FP64 for FP64 tensors), each
result is rounded once to its tensor's dtype. ``chunk_size`` makes no difference. ``noop_flag``,
int32 of one element, becomes 1 where values that are not finite are found, without a host read; the
updates neither read nor write it and always step, as apex's kernels do.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "multi_tensor_adagrad",
    "multi_tensor_axpby",
    "multi_tensor_l2norm",
    "multi_tensor_lamb",
    "multi_tensor_novograd",
    "multi_tensor_scale",
    "multi_tensor_unscale_l2norm",
    "update_scale_hysteresis",
]

Lists = Sequence[Sequence[Tensor]]


@torch.no_grad()
def multi_tensor_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, scale: float | Tensor
) -> None:
    """``out = scale * x`` for ``tensor_lists`` x, out; look for values in x that are not finite."""
    xs, outs = tensor_lists
    if len(xs):
        _flag(noop_flag, xs)
        _store([outs], [torch._foreach_mul(_wide(xs), scale)])


@torch.no_grad()
def multi_tensor_axpby(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, a: float, b: float, arg_to_check: int
) -> None:
    """Compute ``out = a * x + b * y``.

    Args:
        chunk_size: accepted and not needed.
        noop_flag: set to 1 where a value is not finite.
        tensor_lists: x, y, out.
        a: the factor of x.
        b: the factor of y.
        arg_to_check: where to look for values that are not finite: 0 in x, 1 in y, -1 in both.
    """
    xs, ys, outs = tensor_lists
    if len(xs):
        _flag(noop_flag, {0: xs, 1: ys, -1: [*xs, *ys]}[arg_to_check])
        sums = _list(torch._foreach_mul(_wide(xs), a))
        torch._foreach_add_(sums, _wide(ys), alpha=b)
        _store([outs], [sums])


@torch.no_grad()
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, per_tensor: bool | None = False
) -> tuple[Tensor, Tensor]:
    """Return the 2-norm of one list of tensors.

    Returns:
        the norm of all elements, shape (1,), and the norm of each tensor, shape (n,) with
        ``per_tensor``, else (0,); float32 (float64 where a tensor is).
    """
    return _norms(noop_flag, tensor_lists[0], None, per_tensor)


@torch.no_grad()
def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    inv_scale: Tensor,
    per_tensor: bool | None = False,
) -> tuple[Tensor, Tensor]:
    """``multi_tensor_l2norm`` of ``inv_scale`` times the tensors, which keep their values."""
    return _norms(noop_flag, tensor_lists[0], inv_scale, per_tensor)


@torch.no_grad()
def update_scale_hysteresis(
    current_scale: Tensor,
    growth_tracker: Tensor,
    hysteresis_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
) -> Tensor:
    """Update a loss scale that backs off at the ``hysteresis``-th overflow in a row.

    It also backs off at each overflow that follows.

    Args:
        current_scale: float32 of one element, updated in place.
        growth_tracker: int32 of one element, updated in place: clean steps since the last change.
        hysteresis_tracker: int32 of one element, updated in place: overflows until it backs off.
        found_inf: float32 of one element; not 0: an overflow.
        growth_factor: the scale grows by it.
        backoff_factor: the scale falls by it.
        growth_interval: so many clean steps in a row raise the scale.
        hysteresis: so many overflows in a row lower it.

    Returns:
        ``current_scale``.
    """
    overflow = found_inf != 0
    hysteresis_tracker.sub_(overflow.to(hysteresis_tracker.dtype))
    backs_off = overflow & (hysteresis_tracker <= 0)
    grows = ~overflow & (growth_tracker + 1 == growth_interval)
    larger, smaller = current_scale * growth_factor, current_scale * backoff_factor
    # a subnormal has no finite reciprocal
    smaller = torch.where(smaller < torch.finfo(smaller.dtype).tiny, 0, smaller)
    larger = torch.where(torch.isfinite(larger), larger, current_scale)
    current_scale.copy_(torch.where(backs_off, smaller, torch.where(grows, larger, current_scale)))
    growth_tracker.copy_(torch.where(overflow | grows, 0, growth_tracker + 1))
    hysteresis_tracker.masked_fill_(~overflow, hysteresis)
    return current_scale


# updates of parameters, in place; gradients keep their values


@torch.no_grad()
def multi_tensor_adagrad(
    chunk_size: int,
    noop_flag: Tensor | None,
    tensor_lists: Lists,
    lr: float,
    eps: float,
    mode: int,
    weight_decay: float,
) -> None:
    """Do a step of Adagrad.

    Args:
        chunk_size: accepted and not needed.
        noop_flag: accepted and not needed: a step is not skipped here.
        tensor_lists: gradients, parameters, sums of squares.
        lr: the learning rate.
        eps: is added to the root of the sums.
        mode: 0 adds weight decay to the gradients, 1 decouples it.
        weight_decay: the factor of the parameters in that.
    """
    grads, params, sums = map(_wide, tensor_lists)
    if mode == 0:
        grads = _decayed(grads, params, weight_decay)
    torch._foreach_addcmul_(sums, grads, grads)
    updates = _list(torch._foreach_div(grads, _root(sums, 1.0, eps)))
    if mode == 1:
        updates = _decayed(updates, params, weight_decay)
    torch._foreach_add_(params, updates, alpha=-lr)
    _store(tensor_lists[1:], [params, sums])


@torch.no_grad()
def multi_tensor_novograd(
    chunk_size: int,
    noop_flag: Tensor | None,
    tensor_lists: Lists,
    grad_norms: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    norm_type: int,
) -> None:
    """Do a step of NovoGrad.

    Args:
        chunk_size: accepted and not needed.
        noop_flag: accepted and not needed: a step is not skipped here.
        tensor_lists: gradients, parameters, first moments.
        grad_norms: float32, shape (n,): the running norm of each gradient, updated in place.
        lr: the learning rate.
        beta1: the decay of the first moments.
        beta2: the decay of ``grad_norms``.
        eps: is added to the norms.
        step: counted from 1.
        bias_correction: not 0: corrects moments and norms for their start.
        weight_decay: the factor of the parameters that is added.
        grad_averaging: not 0: gradients enter the first moments times ``1 - beta1``.
        mode: 0 normalises and decays inside the first moment, 1 outside.
        norm_type: 2, or 0 for the largest absolute value.
    """
    grads, params, moments = map(_wide, tensor_lists)
    norms = torch.stack(torch._foreach_norm(grads, 2 if norm_type == 2 else float("inf")))
    if norm_type == 2:
        grad_norms.copy_((beta2 * grad_norms**2 + (1 - beta2) * norms**2).sqrt())
    else:
        grad_norms.copy_(beta2 * grad_norms + (1 - beta2) * norms)
    correction1, correction2 = _corrections(beta1, beta2, step, bias_correction)
    denoms = (grad_norms / correction2**0.5 + eps).unbind()
    if mode == 0:
        grads = _decayed(torch._foreach_div(grads, denoms), params, weight_decay)
    torch._foreach_mul_(moments, beta1)
    torch._foreach_add_(moments, grads, alpha=1 - beta1 if grad_averaging else 1)
    updates = _list(torch._foreach_div(moments, correction1))
    if mode == 1:
        updates = _decayed(torch._foreach_div(updates, denoms), params, weight_decay)
    torch._foreach_add_(params, updates, alpha=-lr)
    _store(tensor_lists[1:], [params, moments])


@torch.no_grad()
def multi_tensor_lamb(
    chunk_size: int,
    noop_flag: Tensor | None,
    tensor_lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    global_grad_norm: Tensor,
    max_grad_norm: float,
    use_nvlamb: bool | None = False,
) -> None:
    """Do a step of LAMB.

    Args:
        chunk_size: accepted and not needed.
        noop_flag: accepted and not needed: a step is not skipped here.
        tensor_lists: gradients, parameters, first moments, second moments.
        lr: the learning rate.
        beta1: the decay of the first moments.
        beta2: the decay of the second moments.
        eps: is added to the root of the second moments.
        step: counted from 1.
        bias_correction: not 0: corrects the moments for their start at 0.
        weight_decay: the factor of the parameters that is added.
        grad_averaging: not 0: gradients enter the first moments times ``1 - beta1``.
        mode: 0 adds weight decay to the gradients, 1 decouples it.
        global_grad_norm: one element; where it exceeds ``max_grad_norm``, gradients are scaled down
            by as much.
        max_grad_norm: the largest norm that gradients keep.
        use_nvlamb: the trust ratio also where ``weight_decay`` is 0.
    """
    grads, params, moments, squares = map(_wide, tensor_lists)
    grads = _list(
        torch._foreach_div(grads, (global_grad_norm / max_grad_norm).clamp(min=1).reshape(()))
    )
    if mode == 0:
        grads = _decayed(grads, params, weight_decay)
    torch._foreach_mul_(moments, beta1)
    torch._foreach_add_(moments, grads, alpha=1 - beta1 if grad_averaging else 1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
    correction1, correction2 = _corrections(beta1, beta2, step, bias_correction)
    updates = _list(torch._foreach_div(moments, correction1))
    torch._foreach_div_(updates, _root(squares, correction2, eps))
    if mode == 1:
        updates = _decayed(updates, params, weight_decay)
    if use_nvlamb or weight_decay != 0:
        norm, update_norm = (
            torch.stack(torch._foreach_norm(tensors)) for tensors in (params, updates)
        )
        trust = torch.where((norm != 0) & (update_norm != 0), norm / update_norm, 1.0)
        torch._foreach_mul_(updates, trust.unbind())
    torch._foreach_add_(params, updates, alpha=-lr)
    _store(tensor_lists[1:], [params, moments, squares])


def _corrections(
    beta1: float, beta2: float, step: int, bias_correction: int
) -> tuple[float, float]:
    return (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)


def _root(squares: list[Tensor], correction: float, eps: float) -> list[Tensor]:
    roots = _list(torch._foreach_div(squares, correction))
    torch._foreach_sqrt_(roots)
    torch._foreach_add_(roots, eps)
    return roots


def _decayed(
    updates: list[Tensor] | tuple[Tensor, ...], params: list[Tensor], weight_decay: float
) -> list[Tensor]:
    return _list(
        updates if weight_decay == 0 else torch._foreach_add(updates, params, alpha=weight_decay)
    )


# lists


def _list(tensors: Sequence[Tensor]) -> list[Tensor]:
    return list(tensors)


def _wide(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors themselves where they are FP32 or FP64, else FP32 copies."""
    return [t.to(torch.promote_types(t.dtype, torch.float32)) for t in tensors]


def _store(lists: Lists, values: Lists) -> None:
    """Round wide values into the tensors they belong to, where these are not the same."""
    pairs = [
        (t, v)
        for pair in zip(lists, values, strict=True)
        for t, v in zip(*pair, strict=True)
        if t is not v
    ]
    if pairs:
        torch._foreach_copy_([t for t, _ in pairs], [v for _, v in pairs])


def _flag(noop_flag: Tensor, tensors: Sequence[Tensor]) -> None:
    """Set the flag where a tensor holds a value that is not finite: then so is its largest."""
    filled = [t for t in tensors if t.numel()]
    if filled:
        largest = [norm.float() for norm in torch._foreach_norm(filled, float("inf"))]
        noop_flag.masked_fill_(~torch.isfinite(torch.stack(largest)).all(), 1)


def _norms(
    noop_flag: Tensor, tensors: Sequence[Tensor], factor: Tensor | None, per_tensor: bool | None
) -> tuple[Tensor, Tensor]:
    if not len(tensors):
        return noop_flag.new_zeros(1, dtype=torch.float32), noop_flag.new_empty(
            0, dtype=torch.float32
        )
    dtype = functools.reduce(torch.promote_types, (t.dtype for t in tensors), torch.float32)
    norms = torch.stack(torch._foreach_norm(_list(tensors), 2, dtype=dtype))
    if factor is not None:
        norms = norms * factor.abs()
    total = torch.linalg.vector_norm(norms).reshape(1)
    noop_flag.masked_fill_(~torch.isfinite(total), 1)
    return total, norms if per_tensor else norms.new_empty(0)
