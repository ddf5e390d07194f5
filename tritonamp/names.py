"""Names of tensors of one or several models, and of dtypes."""

import difflib
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn


def short(dtype: torch.dtype) -> str:
    """Return the name of a dtype without "torch."."""
    return str(dtype).removeprefix("torch.")


def meant_module(name: str, known: Collection[str]) -> str:
    """Return ": did you mean 'layers.0.down'?" for a wrong name of a module, or "".

    Args:
        name: the wrong name. It may have a slip, or be the last part of a name.
        known: names of the modules.
    """
    ends = [each for each in known if name and each.endswith(f".{name}")][:3]
    near = ends or difflib.get_close_matches(name, known, 1, cutoff=0.8)
    return f": did you mean {' or '.join(map(repr, near))}?" if near else ""


def listed_modules(known: Collection[str], shown: int = 20) -> str:
    """Return the first names of modules in words, and the number of the others."""
    rest = len(known) - shown
    return ", ".join([*list(known)[:shown], *([f"and {rest} more"] if rest > 0 else [])])


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
