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
        compute: the dtype of the matrix products; torch's Muon has bfloat16.
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
        """Return what the kernels read."""
        return *self[:3], float(self.nesterov)

    def lr_ratio(self, rows: int, columns: int) -> float:
        """Return the factor on the learning rate of a matrix."""
        if self.adjust_lr_fn is None or self.adjust_lr_fn == "original":
            return math.sqrt(max(1, rows / columns))
        if self.adjust_lr_fn == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(rows / columns)  # "spectral_unclamped"


class MuonLists(UpdateLists):
    """The lists of one step with a place for the update of each matrix, "updates".

    Matrices of one group and shape lie behind one another, for batched products, in memory of this
    step alone: which of them have gradients may differ from step to step.

    Args:
        lists: of the step, without updates.

    Attributes:
        stacks: updates (k, m, n) of one group and shape, and the group's rule.
    """

    def __init__(self, lists: UpdateLists) -> None:
        places: dict[tuple[Any, ...], list[int]] = {}
        rows = zip(lists.tensors["params"], lists.tensors.numbers, strict=True)
        for place, (param, number) in enumerate(rows):
            dtype = torch.promote_types(param.dtype, torch.float32)
            key = lists.groups[number], param.device, dtype, tuple(param.shape)
            places.setdefault(key, []).append(place)
        self.stacks: list[tuple[Tensor, Any]] = []
        updates: list[Any] = [None] * len(lists.tensors)
        for (group, device, dtype, shape), found in places.items():
            stack = torch.empty(len(found), *shape, dtype=dtype, device=device)
            self.stacks.append((stack, lists.rules[group]))
            for place, matrix in zip(found, stack.unbind(), strict=True):
                updates[place] = matrix
        tensors = lists.tensors.with_lists(("copies",), (), {"updates": updates})
        super().__init__(tensors, lists.rules, lists.groups, lists.track_lost)


def orthogonalize_(matrices: Tensor, rule: MuonRule) -> None:
    """Replace matrices (k, m, n) by nearly orthogonal ones, times the factor on their lr."""
    a, b, c = rule.ns_coefficients
    # normalised before it is rounded: the values of a half matrix are at most 1
    norms = torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True).clamp_(min=rule.eps)
    compute = _compute_dtype(rule, matrices)
    x = (matrices / norms).to(compute)
    is_tall = x.shape[1] > x.shape[2]
    x = x.mT if is_tall else x  # then ``gram`` has the shorter side, and so have its products
    for _ in range(rule.ns_steps):
        gram = torch.bmm(x, x.mT)
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
