"""A model in whose backward one bit flips, as faulty hardware would flip it."""

from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear

from tritonamp.testing.bits import flip_bit


@dataclass
class Flip:
    """A bit that flips.

    Attributes:
        passes: numbers of the backwards of a graph in which it flips, from 1.
        site: number of the site.
        element: place among the elements of the gradient there, modulo their number.
        bit: the bit, modulo their number.
    """

    passes: tuple[int, ...] = ()
    site: int = 0
    element: int = 0
    bit: int = 0


def flipped(x: Tensor, element: int, bit: int) -> Tensor:
    """Return a copy of ``x`` with one other bit."""
    x = x.clone(memory_format=torch.contiguous_format)
    flip_bit(x, element % x.numel(), bit % (8 * x.element_size()))
    return x


class Site(torch.autograd.Function):
    """The identity, whose backward may flip a bit of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, flip: Flip, site: int) -> Tensor:
        ctx.flip, ctx.site, ctx.passes = flip, site, count(1)
        return x.clone()  # a view would have FSDP2 warn

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        number = next(ctx.passes)  # numbers would be put back after an audit's own passes
        if ctx.site == ctx.flip.site and number in ctx.flip.passes:
            grad = flipped(grad, ctx.flip.element, ctx.flip.bit)
        return grad, None, None


class Flipping(nn.Module):
    """Two layers with a site at each parameter and each activation.

    Attributes:
        flip: the bit that flips, at present in no backward.
    """

    SITES = 8
    ACTIVATIONS = 0, 3, 6, 7

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 3)
        self.flip = Flip()

    def at(self, site: int, x: Tensor) -> Tensor:
        """Return ``x``, in whose gradient a bit may flip."""
        out: Tensor = Site.apply(x, self.flip, site)  # type: ignore[no-untyped-call]
        return out

    def forward(self, x: Tensor) -> Tensor:
        h = linear(x, self.at(1, self.first.weight), self.at(2, self.first.bias))
        h = self.at(3, gelu(self.at(0, h)))
        y = linear(h, self.at(4, self.second.weight), self.at(5, self.second.bias))
        return self.at(7, self.at(6, y).float())
