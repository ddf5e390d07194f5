"""apex.multi_tensor_apply: calls a function of ``amp_C`` on lists of tensors."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

__all__ = ["MultiTensorApply", "multi_tensor_applier"]


class MultiTensorApply:
    """Calls functions of ``amp_C``.

    ``applier(op, noop_flag_buffer, tensor_lists, *args)`` calls
    ``op(chunk_size, noop_flag_buffer, tensor_lists, *args)``.
    """

    available = True
    warned = False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def check_avail(self) -> None:
        """Do nothing, because no extension can be missing."""

    def __call__(
        self,
        op: Callable[..., Any],
        noop_flag_buffer: Tensor | None,
        tensor_lists: Sequence[Sequence[Tensor]],
        *args: Any,
    ) -> Any:
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)
