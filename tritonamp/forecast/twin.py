"""The copy of a model for a dry run: tensors report a half dtype and hold FP32 values."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from tritonamp.casts.saved import named_tensors
from tritonamp.forecast.unrounded import Unrounded
from tritonamp.policy import HALF_DTYPES


def fp32_copy(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """Return a copy with half tensors in FP32 and dense gradients of embeddings.

    ``memo`` gets the copies, as in ``copy.deepcopy``.
    """
    memo = {} if memo is None else memo
    for module in model.modules():
        for value in vars(module).values():
            # deepcopy refuses results kept from a forward
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()
    for _, tensor in named_tensors(model):
        if tensor.layout is not torch.strided:  # it refuses most sparse ones, too
            memo[id(tensor)] = _fp32_copy_of(tensor)
    twin = copy.deepcopy(model, memo)
    for module in twin.modules():
        if getattr(module, "sparse", False) is True:
            module.sparse = False  # type: ignore[assignment]
    for _, tensor in named_tensors(twin):
        if tensor.dtype in HALF_DTYPES:
            tensor.data = tensor.data.float()
            tensor.grad = None
    return twin


def _fp32_copy_of(tensor: Tensor) -> Tensor:
    new = tensor.detach().clone()
    new = new.float() if new.dtype in HALF_DTYPES else new
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(new, requires_grad=tensor.requires_grad)
    return new


def widen(twin: nn.Module, wide: dict[str, Tensor]) -> None:
    """Replace half parameters and buffers by ``Unrounded`` ones with the values of ``wide``."""
    made: dict[int, Tensor] = {}  # one for each, where several names hold it
    for path, module in twin.named_modules(remove_duplicate=False):
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, tensor in own:
            if tensor.dtype not in HALF_DTYPES:
                continue
            if id(tensor) not in made:
                values = wide[f"{path}.{name}" if path else name].clone()
                new: Tensor = Unrounded(values, tensor.dtype)
                if isinstance(tensor, nn.Parameter):
                    new = nn.Parameter(new, requires_grad=tensor.requires_grad)
                made[id(tensor)] = made[id(new)] = new
            setattr(module, name, made[id(tensor)])
