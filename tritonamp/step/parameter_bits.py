"""The bits of one parameter: which of its elements have changed."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonamp.kernels._change_bits import changes_shape, packed_bits, unpacked_bits
from tritonamp.kernels._memory_order import memory_strides
from tritonamp.kernels._shards import to_local
from tritonamp.step.shard_offsets import whole_positions

LARGEST = 2**31 - 1
"""Largest number of elements whose positions fit int32."""

Changed = tuple[Tensor | None, Tensor]
"""Positions and values of the changed elements; or None and the whole tensor."""


class ParameterBits(NamedTuple):
    """The bits of one parameter.

    Attributes:
        rows: uint8 of ``changes_shape``. Row 0 has the elements that have changed since the reader
            cleared it; row 1, if there is one, those that the last step has changed.
        order: strides that give the order of the elements.
        kind: dtype, device and shape of the parameter, complex ones as real ones.
    """

    rows: Tensor
    order: tuple[int, ...]
    kind: tuple[Any, ...]

    @classmethod
    def of(cls, param: Tensor, rows: int) -> "ParameterBits":
        """Return bits that are all set: a group that has not stepped has left nothing as it was.

        Args:
            param: parameter of the model.
            rows: number of rows, 1 or 2.
        """
        kind, shape = kind_of(param), changes_shape(stored(param).numel(), rows)
        bits = torch.full(shape, 255, dtype=torch.uint8, device=param.device)
        return cls(bits, memory_strides(stored(param)), kind)

    def packed(self, changed: Tensor) -> Tensor:
        """Return bools of the parameter's shape as bits."""
        flat = torch.empty_strided(
            changed.shape, self.order, dtype=torch.bool, device=changed.device
        )
        return packed_bits(flat.copy_(changed).as_strided((changed.numel(),), (1,)))

    def unpacked(self, row: int) -> Tensor:
        """Return the bits of one row as bools of the parameter's shape."""
        shape = self.kind[-1]
        return unpacked_bits(self.rows[row], shape.numel()).as_strided(shape, self.order)

    def in_order(self, order: tuple[int, ...]) -> "ParameterBits":
        """Return the bits in another order; ``rows`` is the same tensor, written to."""
        if order == self.order:
            return self
        other = self._replace(order=order)
        for k, row in enumerate(self.rows):
            row.copy_(other.packed(self.unpacked(k)))
        return other

    def changed(
        self, param: Tensor, name: str, dense_above: float | None, global_positions: bool
    ) -> Changed:
        """Return positions and values of the changed elements, or the whole parameter.

        Args:
            param: the parameter.
            name: name of the parameter, for the error.
            dense_above: as for ``Amp.changes``.
            global_positions: as for ``Amp.changes``.

        Raises:
            ValueError: the parameter has more elements than int32 counts, with neither
                ``dense_above`` nor ``global_positions``.
            RuntimeError: ``global_positions``, and the placements do not tell where a part lies.
        """
        value, mask = to_local(param.detach()), self.unpacked(0)
        mask, n = (mask.any(-1) if value.is_complex() else mask).flatten(), value.numel()
        is_part = global_positions and value.shape != param.shape
        if is_part:
            # None would stand for the whole tensor
            dense_above = None
        if n > LARGEST and dense_above is None and not global_positions:
            raise ValueError(
                f"amp.changes(): expected parameters of up to {LARGEST} elements, whose positions "
                f"fit int32, got {n} in {name}: with dense_above=0.5 such a parameter comes as a "
                "whole if any element has changed"
            )
        if dense_above is not None:
            count = int(mask.sum())
            if count > dense_above * n or (count and n > LARGEST and not global_positions):
                return None, value.clone()
        positions = mask.nonzero().squeeze(1)
        values = value.flatten()[positions]
        if is_part:
            positions = whole_positions(param, positions, name)
        fits = (param.numel() if is_part else n) <= LARGEST
        return positions.to(torch.int32 if fits else torch.int64), values


def stored(param: Tensor) -> Tensor:
    """Return this rank's values of a parameter, complex ones as real ones."""
    value = to_local(param.detach())
    return torch.view_as_real(value) if value.is_complex() else value


def kind_of(param: Tensor) -> tuple[Any, ...]:
    """Return dtype, device and shape of this rank's values."""
    value = stored(param)
    return value.dtype, value.device, value.shape
