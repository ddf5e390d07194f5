"""Lists times factors, and the update of a loss scale."""

import torch
from torch import Tensor

from tritonamp.apex.amp_C._lists import Lists, as_list, checked, raise_flag, store, wide


@torch.no_grad()
def multi_tensor_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, scale: float | Tensor
) -> None:
    """Compute ``out = scale * x`` for ``tensor_lists`` x and out, and check x for inf and NaN."""
    xs, outs = checked("multi_tensor_scale", tensor_lists, "x", "out")
    if len(xs):
        raise_flag(noop_flag, xs)
        store([outs], [as_list(torch._foreach_mul(wide(xs), scale))])


@torch.no_grad()
def multi_tensor_axpby(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, a: float, b: float, arg_to_check: int
) -> None:
    """Compute ``out = a * x + b * y`` for ``tensor_lists`` x, y and out.

    Checks for inf and NaN in x (``arg_to_check`` 0), in y (1), or in both (-1).
    """
    xs, ys, outs = checked("multi_tensor_axpby", tensor_lists, "x", "y", "out")
    if len(xs):
        raise_flag(noop_flag, {0: xs, 1: ys, -1: [*xs, *ys]}[arg_to_check])
        sums = as_list(torch._foreach_mul(wide(xs), a))
        torch._foreach_add_(sums, wide(ys), alpha=b)
        store([outs], [sums])


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
        current_scale: the scale, float32 of one element, updated in place.
        growth_tracker: clean steps since the last change, int32 of one element, updated in place.
        hysteresis_tracker: overflows until the scale falls, int32 of one element, updated in place.
        found_inf: float32 of one element, not 0 for an overflow.
        growth_factor: factor by which the scale grows.
        backoff_factor: factor by which the scale falls.
        growth_interval: number of clean steps in a row after which the scale grows.
        hysteresis: number of overflows in a row after which the scale falls.

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
