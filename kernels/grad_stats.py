"""What the step needs to know of the gradients, in one read: largest magnitude and sum of squares. 2 B/param."""

from collections.abc import Sequence

import torch
from torch import Tensor


def grad_stats_torch(grads: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    amax, square_sum = [], []
    for grad in grads:
        g = grad.detach().to(torch.promote_types(grad.dtype, torch.float32)) if grad.numel() else grad.new_zeros(1)
        amax.append(g.abs().max().to(device, torch.float32))
        square_sum.append(torch.linalg.vector_norm(g).square().to(device, torch.float32))
    if not grads:
        return torch.zeros(0, device=device), torch.zeros(0, device=device)
    return torch.stack(amax), torch.stack(square_sum)


def grad_stats(grads: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Per tensor: the largest magnitude (inf and NaN show themselves in it) and the sum of squares.

    Args:
        grads: n dense floating tensors of any shapes, dtypes and devices.
        device: of the results.

    Returns:
        amax of shape (n,) and the sum of squares of shape (n,), float32, of the values as they are (scaled).
    """
    return grad_stats_torch(grads, device)
