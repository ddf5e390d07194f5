"""Other subclasses of tensors on the GPU in software: ``x.as_subclass(Logits)``."""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.overrides import get_default_nowrap_functions
from torch.utils._pytree import tree_map_only


class _KeepsSubclass:
    """Does as torch's own ``__torch_function__``, which the GPU's class has disabled.

    Attributes:
        subclass: class of results, for torch.
    """

    subclass: type[Tensor]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
            if func in get_default_nowrap_functions():
                return found
            return tree_map_only(Tensor, lambda x: x.as_subclass(cls.subclass), found)


@functools.cache
def on_gpu(gpu_class: type[Tensor], subclass: type[Tensor]) -> type[Tensor]:
    """Return a class with the methods of one class and the memory of the other.

    Args:
        gpu_class: class of plain tensors on the GPU.
        subclass: ``Tensor``, or a class without a ``__torch_dispatch__`` of its own.
    """
    if issubclass(gpu_class, subclass):
        return gpu_class
    bases = subclass, _KeepsSubclass, gpu_class
    return type(subclass.__name__, bases, {"subclass": subclass})


def seen_as(x: Any, kind: type[Tensor]) -> Any:
    """Return a view of the same memory whose Python object has another class."""
    found = x.view_as(x)
    found.__class__ = kind
    return found
