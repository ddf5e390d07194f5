"""Matrices of one step of Muon, stacked by shape, and the products that make them orthogonal."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonamp.kernels._update_lists import UpdateLists
from tritonamp.kernels.device import takes_bfloat16


class MuonRule(NamedTuple):
    """Hyperparameters of one group, named as in ``torch.optim.Muon``.

    Attributes:
        compute: dtype of the matrix products; torch's Muon uses bfloat16.
    """

    lr: float | Tensor
    weight_decay: float
    momentum: float
    nesterov: bool
    ns_coefficients: tuple[float, float, float]
    eps: float
    ns_steps: int
    adjust_lr_fn: str | None
    compute: torch.dtype = torch.bfloat16

    def numbers(self) -> Sequence[float | Tensor]:
        """Return the row of numbers that the kernels read."""
        return *self[:3], float(self.nesterov)

    def lr_ratio(self, rows: int, columns: int) -> float:
        """Return the factor on the learning rate for a matrix of this shape."""
        if self.adjust_lr_fn is None or self.adjust_lr_fn == "original":
            return math.sqrt(max(1, rows / columns))
        if self.adjust_lr_fn == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(rows / columns)  # "spectral_unclamped"


class MuonLists(UpdateLists):
    """The lists of one step, extended by memory for the update of each matrix, "updates".

    Matrices of one group and shape are adjacent in memory, for batched products. The memory belongs
    to this step alone, because the matrices that have gradients may differ between steps.

    Args:
        lists: lists of the step without updates.

    Attributes:
        stacks: updates (k, m, n) of one group and shape, and the group's rule.
    """

    def __init__(self, lists: UpdateLists) -> None:
        places: dict[tuple[Any, ...], list[int]] = {}
        rows = zip(lists.tensors["params"], lists.tensors.numbers, strict=True)
        for place, (param, number) in enumerate(rows):
            dtype = torch.promote_types(param.dtype, torch.float32)
            # by group too, because coefficients and the number of iterations belong to a group
            key = lists.groups[number], param.device, dtype, tuple(param.shape)
            places.setdefault(key, []).append(place)
        self.stacks: list[tuple[Tensor, Any]] = []
        updates: list[Any] = [None] * len(lists.tensors)
        for (group, device, dtype, shape), found in places.items():
            stack = torch.empty(len(found), *shape, dtype=dtype, device=device)
            self.stacks.append((stack, lists.rules[group]))
            # views of the stack, so that kernels write where the products read
            for place, matrix in zip(found, stack.unbind(), strict=True):
                updates[place] = matrix
        may_repeat = "copies", "remainders"
        tensors = lists.tensors.with_lists(may_repeat, (), {"updates": updates})
        super().__init__(tensors, lists.rules, lists.groups)


def orthogonalize_(matrices: Tensor, rule: MuonRule) -> None:
    """Replace matrices (k, m, n) by nearly orthogonal ones, times ``rule.lr_ratio``."""
    a, b, c = rule.ns_coefficients
    # normalised before it is rounded, because the values of a half matrix are then at most 1
    norms = torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True).clamp_(min=rule.eps)
    compute = _compute_dtype(rule, matrices)
    x = (matrices / norms).to(compute)
    is_tall = x.shape[1] > x.shape[2]
    # transposed, so that ``gram`` and its products have the shorter side
    x = x.mT if is_tall else x
    for _ in range(rule.ns_steps):
        gram = torch.bmm(x, x.mT)
        # beta and alpha save a pass over the matrices, as in torch.optim.Muon
        gram_update = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, gram_update, x, beta=a)
    matrices.copy_(x.mT if is_tall else x)
    ratio = rule.lr_ratio(*matrices.shape[1:]) if matrices.numel() else 1.0
    if ratio != 1.0:
        matrices.mul_(ratio)


def _compute_dtype(rule: MuonRule, matrices: Tensor) -> torch.dtype:
    """Return the dtype of the products: float16 holds these values where bfloat16 is slow."""
    if matrices.dtype is torch.float64:
        return matrices.dtype
    lacks = rule.compute is torch.bfloat16 and not takes_bfloat16(matrices.device)
    return torch.float16 if lacks else rule.compute
