"""Random bits of a step, and rounding with them, in Triton and with the same bits in torch.

Whether an element is rounded up depends on a hash of element and tensor, to which every step adds
the golden ratio (Weyl's sequence). Successive roundings then spread evenly, which leaves less noise
in a moment than independent ones, and a run that is repeated or resumed has the same bits.
"""

import torch
from torch import Tensor

from tritonamp.kernels.device import tl, triton

# Kernels below repeat these constants as literals, because a jitted function can read no global
# that is not a tl.constexpr.
_GOLDEN = 0x9E3779B1  # of 2^32
_NUMBER, _ELEMENT = 0x85EBCA77, 0x27D4EB2F  # odd factors with evenly spread bits
_MIX1, _MIX2 = 0x85EBCA6B, 0xC2B2AE35  # the finaliser of MurmurHash3 (Appleby)


@triton.jit
def random_bits(offs, step, number):
    """Return 32 random bits for each element's first moment, and 32 for its others; both uint32.

    Args:
        offs: indices of the elements in their tensor, integers.
        step: step count, float of at most 2^24. Each step turns both results by the golden ratio.
        number: index of the tensor.
    """
    # 0x85EBCA77 exceeds int32, so the product is made in int64 and cut to 32 bits
    seed = (number.to(tl.int64) * 0x85EBCA77 & 0xFFFFFFFF).to(tl.uint32)
    h = (offs.to(tl.uint32) * 0x27D4EB2F) ^ seed
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    h ^= h >> 16
    turn = (step.to(tl.int64) * 0x9E3779B1 & 0xFFFFFFFF).to(tl.uint32)
    # a second hash, because equal bits would round both moments of an element alike
    return h + turn, ((h * 0x9E3779B1) ^ (h >> 16)) + turn


def random_bits_twin(like: Tensor, step: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Return the bits of ``random_bits`` as int64, for elements of ``like`` in memory order."""
    elements = torch.arange(like.numel(), device=like.device)
    h = (elements * _ELEMENT ^ number * _NUMBER) & 0xFFFFFFFF
    h = _times(h ^ (h >> 16), _MIX1)
    h = _times(h ^ (h >> 13), _MIX2)
    h = h ^ (h >> 16)
    turn = step.to(like.device, torch.int64) * _GOLDEN
    return (h + turn) & 0xFFFFFFFF, ((_times(h, _GOLDEN) ^ (h >> 16)) + turn) & 0xFFFFFFFF


def _times(h: Tensor, factor: int) -> Tensor:
    """Return the low 32 bits of a product of 32-bit numbers, without overflow of int64."""
    # 16 bits at a time, because a product of two 32-bit numbers may not fit int64
    low, high = h & 0xFFFF, h >> 16
    return (low * factor + ((high * factor & 0xFFFF) << 16)) & 0xFFFFFFFF


@triton.jit
def rounded(x, random, DROPPED: tl.constexpr):
    """Round FP32 stochastically to a mantissa without its last DROPPED bits; NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    up = (random >> (32 - DROPPED)).to(tl.int32)
    # A carry out of the mantissa raises the exponent, which gives the next number, or inf at the
    # end. A NaN could carry into the sign, so it is kept.
    bits = ((bits + up) >> DROPPED) << DROPPED
    return tl.where(x != x, x, bits.to(tl.float32, bitcast=True))


def rounded_twin(x: Tensor, random: Tensor, dropped: int) -> Tensor:
    """Return what ``rounded`` returns; ``random`` is int64."""
    up = (random >> (32 - dropped)).to(torch.int32)
    bits = ((x.view(torch.int32) + up) >> dropped) << dropped
    return torch.where(x.isnan(), x, bits.view(torch.float32))
