"""Tables of pointers on a device, the arguments of a launch on lists of tensors."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonamp.kernels._launch import Launch
from tritonamp.kernels._state_formats import FORMATS
from tritonamp.kernels.device import INTERPRETED, WARP_SIZE, tl, triton

DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}
"""Names in ``triton.language`` of the dtypes that kernels accept."""
CODES = {torch.uint8: "uint8", torch.int16: "int16"}  # bits of changes, remainders
CODES |= {f.dtype: "uint8" for f in FORMATS.values() if f.in_blocks}
"""The same for codes, bits and remainders, which lie in the order of memory of "params"."""
NUM_WARPS = 8


class Table(NamedTuple):
    """The rows of one launch, a tensor each. They share device, dtype of each list, and alignment.

    Attributes:
        device: device of the table and its tensors.
        pointers: addresses by list, int64 of shape (rows,).
        numel: number of elements of each tensor, int64 of shape (rows,).
        first: number of each tensor's first chunk, int64 of shape (rows,).
        number: index of each tensor in the results of kernels, int64 of shape (rows,).
        rows: row that each chunk belongs to, int32 of shape (chunks,).
        chunk: elements of a chunk.
        chunks: number of chunks.
        before: number of chunks in earlier tables.
        dtypes: dtype by list, or None where the list repeats "params".
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
        """Return the list's element type in ``triton.language``, or None if it repeats "params"."""
        dtype = self.dtypes[name]
        names = DTYPES | CODES
        return None if dtype is None else getattr(tl, names[stored(dtype)])

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
            kernel: a ``triton.jit`` function of pointers, columns, operands, sizes and constants,
                in this order.
            names: lists whose pointers come first; the columns of the table follow.
            operands: other tensors, or an ``Operand`` for each, after the columns.
            constants: constants before VEC and BLOCK.
            vec: elements that a thread holds if the tensors are aligned.
            sizes: sizes after the size of a chunk.
            maxnreg: largest number of registers of a thread, or None.
            tile: elements of a program's tile, or None for ``vec`` elements for each thread.
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
def chunk_bounds(numel_ptr, first_ptr, row, number, chunk, VEC: tl.constexpr):
    """Return where chunk ``number`` begins, where its whole vectors end, and its end; int64."""
    # The table is int64, and so are offsets: a tensor may have more than 2**31 elements.
    numel = tl.load(numel_ptr + row)
    # the quotient times VEC tells the compiler that VEC divides begin
    begin = (number - tl.load(first_ptr + row)) * (chunk // VEC * VEC)
    # A mask that could end inside a vector would make the compiler load element by element. So a
    # loop stops at the last multiple of VEC, and the caller handles the tail.
    end = tl.minimum(begin + chunk, numel)
    return begin, end // VEC * VEC, end


@triton.jit
def element_pointer(pointers, row, TYPE: tl.constexpr, VEC: tl.constexpr):
    """Return an address of a table as a pointer to TYPE, a multiple of 16 bytes if VEC > 1."""
    pointer = tl.load(pointers + row).to(tl.pointer_type(TYPE))
    # without this promise no load is 16 bytes wide, because a loaded address has no alignment
    if VEC > 1:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def tail_offsets(whole, VEC: tl.constexpr):
    """Return the offsets after a chunk's whole vectors.

    All warps compute a tail and the first one stores it, which is formally a race. It is harmless,
    because the results of a warp that loads values already stored are not stored.
    """
    return whole + tl.arange(0, VEC)


@triton.jit
def store_copy(copies, flag_ptr, offs, mask, x, VEC: tl.constexpr):
    """Store FP32 ``x``, rounded to the copies' type; set the flag if a finite element became inf.

    A thread holds VEC elements and stores the flag once for all of them.
    """
    # checked here, where both values are in registers: a check later would read the copies again
    rounded = x.to(copies.dtype.element_ty)
    tl.store(copies + offs, rounded, mask=mask)
    beyond = (tl.abs(rounded.to(tl.float32)) == float("inf")) & (tl.abs(x) < float("inf")) & mask
    # reduced inside a thread, which needs no shared memory
    of_thread = tl.max(tl.reshape(beyond.to(tl.int32), (x.shape[0] // VEC, VEC)), 1)
    # every thread that found one stores the same 1, so no atomic is needed
    tl.store(flag_ptr + 0 * of_thread, 1, mask=of_thread != 0)


def stored(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which kernels access elements of ``dtype``.

    In Triton's interpreter bfloat16 becomes FP32, because the interpreter truncates to bfloat16 and
    loses its subnormals.
    """
    return torch.float32 if INTERPRETED and dtype is torch.bfloat16 else dtype
