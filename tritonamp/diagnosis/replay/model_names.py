"""The names of modules, parameters and buffers."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from tritonamp.names import prefixes, tensor_names
from tritonamp.watched.ops import storage_id


class ModelNames:
    """The names of modules, parameters and buffers. With several models, a number comes first."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.roots = models
        self.modules: dict[nn.Module, str] = {}
        self._weights: dict[int, dict[str, Tensor]] = {}  # by storage, which several may share
        for front, model in zip(prefixes(models), models, strict=True):
            for name, module in model.named_modules():
                self.modules.setdefault(module, (front + name).rstrip("."))
        for tensor, name in tensor_names(models).items():
            if tensor.layout is torch.strided:  # a sparse tensor has no storage of its own
                self._weights.setdefault(storage_id(tensor), {})[name] = tensor

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and tensor of all strided parameters and buffers."""
        for own in self._weights.values():
            yield from own.items()

    def weight(self, tensor: Tensor) -> tuple[str, Tensor] | None:
        """Return name and tensor of the parameter or buffer that ``tensor`` is, or is a view of."""
        for name, weight in self._weights.get(storage_id(tensor), {}).items():
            if 0 <= tensor.data_ptr() - weight.data_ptr() < weight.nbytes:
                return name, weight
        return None
