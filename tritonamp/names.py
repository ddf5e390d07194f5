"""What the modules and tensors of one model, or of several, are called."""

from collections.abc import Sequence

from torch import nn


def prefixes(models: Sequence[nn.Module]) -> list[str]:
    """Return by model what its names begin with: nothing, or of several models its number."""
    return [f"{i}." if len(models) > 1 else "" for i in range(len(models))]
