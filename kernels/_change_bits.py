"""One bit for each element: which stored values have changed."""

import torch
from torch import Tensor

from tritonamp.kernels._bit_sums import INTEGERS
from tritonamp.kernels._memory_order import padded
from tritonamp.kernels.device import tl, triton


@triton.jit
def note_changes(
    changes, at, whole, stride, before, after, mask, LAST: tl.constexpr, BLOCKS: tl.constexpr
):
    """Store which elements of BLOCKS blocks have other bits, one bit each.

    The first row of ``changes`` collects bits until its reader clears it. With LAST there is a
    second row, stride bits later, which has those of the last step.
    """
    differs = before.to(tl.int32, bitcast=True) != after.to(tl.int32, bitcast=True)
    # one NaN for another is no change, because payloads depend on the device
    differs = differs & ((before == before) | (after == after)) & mask
    # eight elements, which two threads hold
    bits = tl.reshape(differs.to(tl.int32), (BLOCKS, 16, 8)) << tl.arange(0, 8)
    bits = tl.sum(bits, 2)
    row, byte = tl.arange(0, BLOCKS), tl.arange(0, 16)
    offs = at // 8 + (tl.expand_dims(row, 1) * 16 + tl.expand_dims(byte, 0))
    mask = offs < whole // 8
    since = tl.load(changes + offs, mask=mask, other=0).to(tl.int32)
    tl.store(changes + offs, (since | bits).to(tl.uint8), mask=mask)
    if LAST:
        tl.store(changes + stride // 8 + offs, bits.to(tl.uint8), mask=mask)


def changes_shape(numel: int, rows: int) -> tuple[int, int]:
    """Return the shape of the uint8 tensor of changes.

    Args:
        numel: number of elements.
        rows: 1 for the collected bits, 2 to have those of the last step as well.
    """
    return rows, padded(numel) // 8


def other_bits(before: Tensor, after: Tensor) -> Tensor:
    """Return which elements have other bits, bool; one NaN for another is no change."""
    integer = INTEGERS[before.element_size()]
    differs = before.view(integer) != after.view(integer)
    return differs & ~(before.isnan() & after.isnan())


def packed_bits(flags: Tensor) -> Tensor:
    """Return n flags, bool of shape (n,), as bytes, uint8 of shape (padded(n) // 8,)."""
    n = flags.numel()
    whole = torch.nn.functional.pad(flags.to(torch.uint8), (0, padded(n) - n)).view(-1, 8)
    return (whole << _bit_numbers(flags.device)).sum(1, dtype=torch.uint8)


def unpacked_bits(memory: Tensor, numel: int) -> Tensor:
    """Return the flags, bool of shape (numel,), of bytes that ``packed_bits`` returned."""
    bits = memory.unsqueeze(1) >> _bit_numbers(memory.device) & 1
    return bits.bool().view(-1)[:numel]


def _bit_numbers(device: torch.device) -> Tensor:
    # made on the device, because a copy from the host would wait, and cannot be captured in a graph
    return torch.arange(8, dtype=torch.uint8, device=device)
