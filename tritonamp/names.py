"""Names of tensors of one or several models, and of dtypes."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def short(dtype: torch.dtype) -> str:
    """Return the name of a dtype without "torch."."""
    return str(dtype).removeprefix("torch.")


def prefixes(models: Sequence[nn.Module]) -> list[str]:
    """Return the beginning of each model's names: "" for one model, else the model's number."""
    return [f"{i}." if len(models) > 1 else "" for i in range(len(models))]


def parameter_names(models: Sequence[nn.Module]) -> dict[Tensor, str]:
    """Return parameter to full name, in the order of the models.

    A tied parameter has its first name.
    """
    names: dict[Tensor, str] = {}
    for prefix, model in zip(prefixes(models), models, strict=True):
        for name, param in model.named_parameters():
            names.setdefault(param, prefix + name)
    return names


def tensor_names(models: Sequence[nn.Module]) -> dict[Tensor, str]:
    """Return parameter or buffer to full name, parameters first."""
    buffers = {
        buffer: prefix + name
        for prefix, model in zip(prefixes(models), models, strict=True)
        for name, buffer in model.named_buffers()
    }
    return {**parameter_names(models), **buffers}
