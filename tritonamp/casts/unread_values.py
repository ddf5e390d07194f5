"""The values behind unread tensors: half ones, or the call of a layer that computes them."""

from dataclasses import dataclass
from typing import Union

import torch
from torch import Tensor

from tritonamp import functional


@dataclass(eq=False)
class LayerCall:
    """The call of a linear layer whose result is half logits."""

    rows: Tensor  # [..., d], the input of the model's last layer
    weight: Tensor  # [v, d], of that layer
    bias: Tensor | None  # [v]
    dtype: torch.dtype  # half, to which the logits are rounded
    is_watched: bool = False  # whether a gradient of the logits is asked for

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the logits."""
        return (*self.rows.shape[:-1], len(self.weight))

    def logits(self) -> Tensor:
        """Return [..., v] in ``dtype``."""
        with torch.autocast(self.rows.device.type, enabled=False):
            head = functional.LinearHead(self.dtype, self.weight, self.bias)
            return head.logits(head.rows(self.rows))


Source = Union[Tensor, LayerCall]  # noqa: UP007 (evaluated)


class Memory:
    """The values of all unread tensors that share memory.

    Args:
        source: half values, or the call that computes them. Nothing here writes to it.
        dtype: dtype of the tensors.

    Attributes:
        source: the argument; once a call was computed, its half values.
        dtype: the argument.
        were_written: whether the values may differ from the source's.
    """

    def __init__(self, source: Source, dtype: torch.dtype) -> None:
        self.source, self.dtype = source, dtype
        self.were_written = False
        self._own: Tensor | None = None  # in ``dtype``
        self._versions = _versions(source)

    def half(self) -> Tensor:
        """Return the values of the source.

        Raises:
            RuntimeError: the source was written to since.
        """
        if self._versions != _versions(self.source):
            raise RuntimeError(
                "unread logits (fuse_loss=True): expected the tensors that they are computed from "
                "as the forward left them, but they were changed in place, as an optimizer's step "
                "does: compute with the logits before (logits + 0 has all values), or use "
                "fuse_loss=False"
            )
        if not isinstance(self.source, Tensor):
            self.source = self.source.logits()
            self._versions = _versions(self.source)
        return self.source

    def read(self, writes: bool) -> Tensor:
        """Return the values in ``dtype``.

        Args:
            writes: whether the caller may write to them.
        """
        if self._own is None:
            half = self.half()
            if not writes and half.dtype is self.dtype:
                return half
            self._own = torch.ops.aten._to_copy(half, dtype=self.dtype)
        self.were_written |= writes
        return self._own


def _versions(source: Source) -> list[int]:
    if isinstance(source, Tensor):
        return [source._version]
    return [t._version for t in (source.rows, source.weight, source.bias) if t is not None]
