"""Counts collectives, on a rank."""

from collections import Counter
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

_MOVE_NOTHING = "wait_tensor", "_wrap_tensor_autograd"


class Collectives(TorchDispatchMode):
    """Counts the collectives that run inside, by operation, dtype and bytes that this rank gives.

    Attributes:
        found: how many there were of each.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # first what it does with its parts
        if "c10d" in func.namespace and func._opname not in _MOVE_NOTHING:
            flat = [t for a in args for t in (a if isinstance(a, list) else [a])]
            given = [t for t in flat if isinstance(t, Tensor)][-1]
            self.found[f"{func._opname} {given.dtype} {given.numel() * given.itemsize}"] += 1
        return func(*args, **(kwargs or {}))
