"""Refuses collectives in runs on one rank, because the other ranks would never answer them."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

# ops of functional collectives that begin none
_WAITS_FOR_NOBODY = frozenset(("wait_tensor", "_wrap_tensor_autograd"))


class CollectiveError(RuntimeError):
    """A forward or backward that runs on one rank alone was about to wait for the others."""


class NoCollectives(TorchDispatchMode):
    """Raises CollectiveError before a collective of ``torch.distributed`` that runs inside."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace and func._opname not in _WAITS_FOR_NOBODY:
            raise CollectiveError(
                f"its forward or backward communicates with other ranks ({func}), which have "
                "batches of their own to run again"
            )
        return func(*args, **(kwargs or {}))
