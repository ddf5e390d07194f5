"""The number formats of optimizer state: one table, which steps, files and messages read.

A format is an entry of ``FORMATS`` and its functions. Where steps are counted, moments in fewer
bits than FP32 are rounded stochastically. Rounded to the nearest, a second moment would never
decay, because a step usually changes it by a thousandth, less than half the distance of two
bfloat16 numbers.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonamp.kernels._codes import (
    SIGNED,
    UNSIGNED,
    decode,
    encode,
    load_signed,
    load_unsigned,
    store_signed,
    store_unsigned,
)
from tritonamp.kernels._memory_order import BLOCK, in_memory_of, in_order_of_memory, padded
from tritonamp.kernels._random_bits import rounded, rounded_twin
from tritonamp.kernels.device import tl, triton


class BlockCodes(NamedTuple):
    """Torch functions of a format in which each block of 128 elements shares a number.

    Attributes:
        encode: function of FP32 values (n,), where n is a multiple of 128; of random bits, int64
            (n,), or None to keep decoded values exact; and of the kind, SIGNED or UNSIGNED. It
            returns codes (n,), and the shared numbers of all blocks as bytes, both uint8.
        decode: inverse of ``encode``, a function of codes, shared numbers and the kind.
        shared_bytes: size of a block's shared number.
    """

    encode: Callable[[Tensor, Tensor | None, int], tuple[Tensor, Tensor]]
    decode: Callable[[Tensor, Tensor, int], Tensor]
    shared_bytes: int


class StateFormat(NamedTuple):
    """How state is stored: by kernels, by their eager twins, in files.

    Attributes:
        dtype: dtype of a state's tensor, by which a step finds the format.
        load: a jitted function for each kind of values, SIGNED and UNSIGNED. Its arguments are the
            state's pointer, the offsets of a tile, their mask, the indices of the tile's blocks,
            and the end of whole blocks, first of this chunk, then of the tensor. It returns FP32.
        store: the same with two more arguments, FP32 values and random bits.
        dropped_bits: bits of an FP32 mantissa that ``store`` rounds off with random bits, or 0.
            Without a step count there are no random bits, and the entry of FP32 takes the state
            instead, which rounds to the nearest.
        codes: torch form of a format in blocks, whose steps are always counted and whose masters
            are packed; None: each element is stored alone.
    """

    dtype: torch.dtype
    load: Mapping[int, Any]
    store: Mapping[int, Any]
    dropped_bits: int = 0
    codes: BlockCodes | None = None

    @property
    def is_random(self) -> bool:
        """Whether ``store`` rounds with random bits."""
        return self.dropped_bits > 0

    @property
    def in_blocks(self) -> bool:
        """Whether a state is codes in whole blocks, each with a shared number."""
        return self.codes is not None

    def size(self, numel: int) -> int:
        """Return the length of the tensor that holds ``numel`` elements in whole blocks."""
        shared_bytes = 0 if self.codes is None else self.codes.shared_bytes
        return padded(numel) + padded(numel) // BLOCK * shared_bytes

    def bytes_per_element(self) -> float:
        """Return the bytes of an element, with its share of the number of its block."""
        return self.dtype.itemsize * self.size(BLOCK) / BLOCK

    def read(self, state: Tensor, like: Tensor, kind: int, dtype: torch.dtype) -> Tensor:
        """Return the values of a state, in the shape of ``like``.

        Args:
            state: tensor of the state.
            like: parameter of the state, or any tensor of its shape and strides.
            kind: kind of the values, SIGNED or UNSIGNED.
            dtype: dtype of the result; values of codes are FP32.
        """
        if self.codes is None:
            return state.to(dtype)
        memory, n = state.view(torch.uint8), padded(like.numel())
        values = self.codes.decode(memory[:n], memory[n:], kind)
        return in_memory_of(like, values[: like.numel()])

    def write(self, values: Tensor, like: Tensor, kind: int, random: Tensor | None) -> Tensor:
        """Return the tensor to copy into a state, which has the state's dtype or a wider one.

        Args:
            values: values in the shape of ``like``.
            like: parameter of the state.
            kind: kind of the values, SIGNED or UNSIGNED.
            random: 32 bits for each element, int64 in the order of memory of ``like``. None: the
                values are rounded to the nearest, or, in blocks, down in magnitude.
        """
        if self.codes is None:
            if random is None or not self.is_random:
                return values
            return rounded_twin(values, in_memory_of(like, random), self.dropped_bits)
        # the last block is filled with zeros, which do not raise its exponent
        missing = 0, padded(values.numel()) - values.numel()
        whole = torch.nn.functional.pad(in_order_of_memory(values, like=like), missing)
        bits = None if random is None else torch.nn.functional.pad(random, missing)
        return torch.cat(self.codes.encode(whole, bits, kind)).view(self.dtype)


@triton.jit
def _load(state, offs, mask, blocks, whole, stride):
    # not read again before the next step, so it makes room in the L2 cache for gradients
    x = tl.load(state + offs, mask=mask, other=0.0, eviction_policy="evict_first")
    return x.to(tl.float32)


@triton.jit
def _store(state, offs, mask, blocks, whole, stride, x, random):
    tl.store(state + offs, x.to(state.dtype.element_ty), mask=mask)


@triton.jit
def _store_bfloat16(state, offs, mask, blocks, whole, stride, x, random):
    _store(state, offs, mask, blocks, whole, stride, rounded(x, random, 16), random)


def _both(function: Any) -> dict[int, Any]:
    return {SIGNED: function, UNSIGNED: function}


FORMATS = {
    "fp32": StateFormat(torch.float32, _both(_load), _both(_store)),
    "bf16": StateFormat(torch.bfloat16, _both(_load), _both(_store_bfloat16), 16),
    "8bit": StateFormat(
        torch.uint8,
        {SIGNED: load_signed, UNSIGNED: load_unsigned},
        {SIGNED: store_signed, UNSIGNED: store_unsigned},
        dropped_bits=20,
        codes=BlockCodes(encode, decode, 1),
    ),
}
"""Formats by the name that users give."""


STATE_DTYPES = {form.dtype: form for form in FORMATS.values()}
"""Formats by the dtype of their tensors."""


def format_of(dtype: torch.dtype, counts_steps: bool) -> StateFormat:
    """Return the format of a state's tensor, given its dtype and whether steps are counted."""
    found = STATE_DTYPES.get(dtype, FORMATS["fp32"])
    return found if counts_steps or not found.is_random else FORMATS["fp32"]


def is_in_blocks(dtype: torch.dtype) -> bool:
    """Tell whether a state of this dtype is codes in blocks."""
    return format_of(dtype, True).in_blocks
