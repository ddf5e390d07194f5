"""Tables of pointers on a device: the arguments of one launch on lists of tensors."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonamp.kernels._launch import Launch
from tritonamp.kernels.device import INTERPRETED, WARP_SIZE, tl, triton

DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}
"""Dtypes that kernels take."""
NUM_WARPS = 8


class Table(NamedTuple):
    """The rows of one launch; they share the device, each list's dtype, and alignment.

    Attributes:
        device: the device of the table and its tensors.
        pointers: by list, int64 of shape (rows,).
        numel: int64 of shape (rows,): elements.
        first: int64 of shape (rows,): the first chunk.
        number: int64 of shape (rows,): the tensor's number.
        rows: int32 of shape (chunks,): the row that each chunk belongs to.
        chunk: elements of a chunk.
        chunks: the number of chunks.
        before: the number of chunks in earlier tables.
        dtypes: by list; None where the list only repeats an earlier one.
        aligned: all pointers are multiples of 16 bytes.
    """

    device: torch.device
    pointers: dict[str, Tensor]
    numel: Tensor
    first: Tensor
    number: Tensor
    rows: Tensor
    chunk: int
    chunks: int
    before: int
    dtypes: dict[str, torch.dtype | None]
    aligned: bool

    def type(self, name: str) -> Any:
        """Return a kernel's type for the list's elements; None where it repeats an earlier list."""
        dtype = self.dtypes[name]
        return None if dtype is None else getattr(tl, DTYPES[stored(dtype)])

    def launch_of(
        self,
        kernel: Any,
        names: Sequence[str],
        operands: Sequence[Any],
        constants: tuple[Any, ...],
        vec: int,
        sizes: tuple[float, ...] = (),
        maxnreg: int | None = None,
        tile: int | None = None,
        num_warps: int = NUM_WARPS,
    ) -> Launch:
        """Return the launch of ``kernel`` on every chunk.

        Args:
            kernel: takes pointers, columns, operands, sizes and constants, in this order.
            names: lists whose pointers come first; the table's columns follow.
            operands: other tensors, or their ``Operand``, after the columns.
            constants: the constants in front of VEC and BLOCK.
            vec: elements that a thread holds where the tensors are aligned.
            sizes: the sizes after the size of a chunk.
            maxnreg: the most registers that a thread may take.
            tile: elements of a program's tile; None: ``vec`` for each thread.
            num_warps: warps of 32 threads.
        """
        vec = vec if self.aligned else 1  # a load of several elements needs an aligned pointer
        pointers = [self.pointers[name] for name in names]
        tensors = (*pointers, self.numel, self.first, self.number, self.rows, *operands)
        return Launch(
            kernel,
            (self.chunks, 1, 1),
            (self.chunk, *sizes),
            (*constants, vec, tile or WARP_SIZE * num_warps * vec),
            num_warps,
            maxnreg,
            tensors,
        )


@triton.jit
def chunk_bounds(numel_ptr, first_ptr, row, chunk, VEC: tl.constexpr):
    """Return where this program's chunk starts, ends in whole vectors, and ends; int64."""
    numel = tl.load(numel_ptr + row)
    begin = (tl.program_id(0) - tl.load(first_ptr + row)) * (
        chunk // VEC * VEC
    )  # tells the compiler what divides it
    end = tl.minimum(begin + chunk, numel)
    return begin, end // VEC * VEC, end


@triton.jit
def element_pointer(pointers, row, TYPE: tl.constexpr, VEC: tl.constexpr):
    """Return the address in a table as a pointer to TYPE, a multiple of 16 bytes if VEC > 1."""
    pointer = tl.load(pointers + row).to(tl.pointer_type(TYPE))
    if VEC > 1:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def tail_offsets(whole, VEC: tl.constexpr):
    """Return the offsets behind a chunk's whole vectors.

    All warps compute a tail, the first one stores it: formally a race. What a late warp makes of
    values that were stored already goes nowhere.
    """
    return whole + tl.arange(0, VEC)


@triton.jit
def store_copy(copies, flag_ptr, offs, mask, x, VEC: tl.constexpr):
    """Store FP32 ``x``, rounded; set the flag where a finite one became infinite.

    A thread holds VEC elements, and stores the flag once for all of them.
    """
    rounded = x.to(copies.dtype.element_ty)
    tl.store(copies + offs, rounded, mask=mask)
    beyond = (tl.abs(rounded.to(tl.float32)) == float("inf")) & (tl.abs(x) < float("inf")) & mask
    of_thread = tl.max(tl.reshape(beyond.to(tl.int32), (x.shape[0] // VEC, VEC)), 1)
    tl.store(flag_ptr + 0 * of_thread, 1, mask=of_thread != 0)


def stored(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that kernels work on for ``dtype``.

    Triton's interpreter truncates to bfloat16 and loses its subnormals: FP32 stands in.
    """
    return torch.float32 if INTERPRETED and dtype is torch.bfloat16 else dtype
