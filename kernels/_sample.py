"""Small calls of an operation, for the checks that hold for every operation.

``tests/kernels`` runs them, and ``python -m tritonamp doctor --selftest`` on a user's device.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

LARGE = 1 << 26
"""Number of elements of a large call, more than the L2 cache of any GPU holds."""

# shapes and a dimension: short lines, columns, a single element, lines just above a power of two,
# odd lengths, and more lines than programs of a small grid
LINES = [((3, 9), 1), ((4, 130, 3), 1), ((1,), 0), ((5, 8193), 1), ((2, 50257), 1), ((4097, 33), 0)]
LISTS: dict[str, list[tuple[int, ...]]] = {
    # sizes on both sides of a block, and tensors without elements
    "tensors of 0 to 12289 elements": [(0,), (), (1,), (5, 7), (1023,), (1024,), (4099,), (12289,)],
    "40 tensors of 33 elements": [(3, 11)] * 40,
}
_SPECIAL = float("inf"), -float("inf"), float("nan"), 65504.0


class Call(NamedTuple):
    """A call of an operation, on which kernel and eager twin must agree.

    Attributes:
        what: description of the arguments, for the user.
        args: function that returns the arguments, the same values in new memory each time.
        results: function that returns the tensors to compare, from the arguments and the returned
            value.
        moves: number of bytes that must be read and written, or 0 if the number is not of interest.
    """

    what: str
    args: Callable[[], tuple[Any, ...]]
    results: Callable[[tuple[Any, ...], Any], Sequence[Tensor]]
    moves: int = 0

    def run(self, function: Callable[..., Any]) -> Sequence[Tensor]:
        """Return the results of ``function``, which is the operation's kernel or its eager twin."""
        args = self.args()
        return self.results(args, function(*args))


class Sample(NamedTuple):
    """Calls of an operation on a half tensor of any shape and strides, along a dimension.

    Attributes:
        args: function that returns the operation's arguments for a tensor and a dimension.
        reads, writes: bytes read and written for each element of whole lines, or None if the
            operation's own tests count them.
        of_line: additional bytes read and written for each line.
        parts: number of FP32 results of a segment of a shared line, or 0 if lines are not shared.
        any_order: torch adds up in an order of its own, which depends on strides.
        rows_only: elements of a line are made neighbours first, so that a kernel sees only such
            lines.
        variant: name of the sample among those of the operation.
    """

    args: Callable[[Tensor, int], tuple[Any, ...]]
    reads: int | None = None
    writes: int | None = None
    of_line: tuple[int, int] = (0, 0)
    parts: int = 0
    any_order: bool = False
    rows_only: bool = False
    variant: str = ""

    def calls(self, device: torch.device, dtypes: Sequence[torch.dtype]) -> Iterator[Call]:
        """Yield calls with awkward shapes, strides and values, with the half dtypes in turn."""
        makers: list[tuple[str, Callable[[], Tensor], int]] = [
            (f"{list(shape)} along {dim}", functools.partial(_values, shape, device), dim)
            for shape, dim in LINES
        ]
        makers.append(("[3, 9] transposed", lambda: _values((9, 3), device).t(), 1))
        makers.append(("inf, NaN and 65504 in [5, 140]", lambda: _special(device), 1))
        # dtypes take turns, because every case with every dtype would double the time
        for (what, make, dim), dtype in zip(makers, itertools.cycle(dtypes), strict=False):
            yield self._call(what, make, dim, dtype)

    def large(self, device: torch.device, dtype: torch.dtype) -> Call:
        """Return a call on ``LARGE`` elements."""
        shape = LARGE >> 12, 1 << 12
        call = self._call(str(list(shape)), lambda: torch.randn(shape, device=device), 1, dtype)
        return call._replace(moves=LARGE * ((self.reads or dtype.itemsize) + (self.writes or 0)))

    def _call(self, what: str, make: Callable[[], Tensor], dim: int, dtype: torch.dtype) -> Call:
        args = lambda: self.args(make().to(dtype), dim)  # noqa: E731
        return Call(f"{_name(dtype)} {what}", args, lambda _, result: as_list(result))


class ListSample(NamedTuple):
    """Calls of an operation on lists of tensors of any shapes.

    Attributes:
        args: function that returns the operation's arguments for FP32 tensors, which it may change,
            and a half dtype.
        results: function that returns the results of a call, from the arguments and the returned
            value.
        bytes: bytes that must be moved for each element, or 0 if the operation works on a few
            numbers.
        variant: name of the sample among those of the operation.
    """

    args: Callable[[list[Tensor], torch.dtype], tuple[Any, ...]]
    results: Callable[[tuple[Any, ...], Any], Sequence[Tensor]]
    bytes: int = 0
    variant: str = ""

    def calls(self, device: torch.device, dtypes: Sequence[torch.dtype]) -> Iterator[Call]:
        """Yield calls with awkward lists, with the half dtypes in turn."""
        makers = [
            (what, functools.partial(_lists, shapes, device)) for what, shapes in LISTS.items()
        ]
        for (what, make), dtype in zip(makers, itertools.cycle(dtypes), strict=False):
            yield self._call(what, make, dtype)

    def large(self, device: torch.device, dtype: torch.dtype) -> Call:
        """Return a call on half of ``LARGE`` elements, because there are up to six such lists."""
        shape = 8, LARGE >> 12, 1 << 8
        call = self._call(
            f"8 of {list(shape[1:])}", lambda: [*torch.rand(shape, device=device).unbind()], dtype
        )
        return call._replace(moves=math.prod(shape) * self.bytes)

    def _call(self, what: str, make: Callable[[], list[Tensor]], dtype: torch.dtype) -> Call:
        return Call(f"{_name(dtype)} {what}", lambda: self.args(make(), dtype), self.results)


def as_list(result: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    """Return an operation's result as a list of tensors."""
    return [result] if isinstance(result, Tensor) else result


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _values(shape: tuple[int, ...], device: torch.device, seed: int = 0) -> Tensor:
    """Return FP32 numbers of both signs around 1/8, for which no long sum cancels.

    The numbers are the same on every device.
    """
    # drawn on the CPU, because generators of devices give other numbers
    generator = torch.Generator().manual_seed(seed)
    return ((torch.randn(shape, generator=generator) + 0.5) / 4).to(device)


def _special(device: torch.device) -> Tensor:
    """Return five lines, of which four hold a special value."""
    x = _values((5, 140), device)
    for line, value in enumerate(_SPECIAL):
        x[line, 0] = value
    # inf and -inf in one line, whose sum is NaN
    x[0, -1] = _SPECIAL[0]
    return x


def _lists(shapes: Sequence[tuple[int, ...]], device: torch.device) -> list[Tensor]:
    """Return tensors of these shapes, a transposed tensor, and one at an unaligned address."""
    tensors = [_values(shape, device, seed) for seed, shape in enumerate(shapes)]
    return [*tensors, _values((7, 5), device).t(), _values((4098,), device)[1:]]
