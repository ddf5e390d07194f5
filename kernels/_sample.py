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
"""Elements of a large call: more than any GPU's L2 cache holds."""

LINES = [((3, 9), 1), ((4, 130, 3), 1), ((1,), 0), ((5, 8193), 1), ((2, 50257), 1), ((4097, 33), 0)]
LISTS: dict[str, list[tuple[int, ...]]] = {
    "tensors of 0 to 12289 elements": [(0,), (), (1,), (5, 7), (1023,), (1024,), (4099,), (12289,)],
    "40 tensors of 33 elements": [(3, 11)] * 40,
}
_SPECIAL = float("inf"), -float("inf"), float("nan"), 65504.0


class Call(NamedTuple):
    """A call of an operation, on which kernel and eager twin must agree.

    Attributes:
        what: a description of the arguments, for people.
        args: maker of the arguments: each time the same values, in new memory.
        results: the tensors to compare, from the arguments and the returned value.
        moves: bytes that have to be read and written; 0: too few to be of interest.
    """

    what: str
    args: Callable[[], tuple[Any, ...]]
    results: Callable[[tuple[Any, ...], Any], Sequence[Tensor]]
    moves: int = 0

    def run(self, function: Callable[..., Any]) -> Sequence[Tensor]:
        """Return the results of ``function``: the operation's kernel or its eager twin."""
        args = self.args()
        return self.results(args, function(*args))


class Sample(NamedTuple):
    """How to call an operation on a tensor of halves of any shape and strides, along a dimension.

    Attributes:
        args: maker of the operation's arguments from the tensor and the dimension.
        reads, writes: bytes for each element of the tensor, of whole lines; None: see its tests.
        of_line: bytes read and written for each line in addition.
        parts: FP32 numbers that a segment of a shared line leaves; 0: lines are not shared.
        any_order: torch adds up in an order of its own, which strides change.
        rows_only: lines are brought together first, so that a kernel sees those alone.
        variant: what tells it from the operation's other samples.
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
        """Yield calls of awkward shapes, strides and values, of the half dtypes in turn."""
        makers: list[tuple[str, Callable[[], Tensor], int]] = [
            (f"{list(shape)} along {dim}", functools.partial(_values, shape, device), dim)
            for shape, dim in LINES
        ]
        makers.append(("[3, 9] transposed", lambda: _values((9, 3), device).t(), 1))
        makers.append(("inf, NaN and 65504 in [5, 140]", lambda: _special(device), 1))
        for (what, make, dim), dtype in zip(makers, itertools.cycle(dtypes), strict=False):
            yield self._call(what, make, dim, dtype)

    @property
    def moves_much(self) -> bool:
        """Whether its time is that of moving bytes."""
        return True

    def large(self, device: torch.device, dtype: torch.dtype) -> Call:
        """Return a call of ``LARGE`` elements."""
        shape = LARGE >> 12, 1 << 12
        call = self._call(str(list(shape)), lambda: torch.randn(shape, device=device), 1, dtype)
        return call._replace(moves=LARGE * ((self.reads or dtype.itemsize) + (self.writes or 0)))

    def _call(self, what: str, make: Callable[[], Tensor], dim: int, dtype: torch.dtype) -> Call:
        args = lambda: self.args(make().to(dtype), dim)  # noqa: E731
        return Call(f"{_name(dtype)} {what}", args, lambda _, result: as_list(result))


class ListSample(NamedTuple):
    """How to call an operation on lists of tensors of any shapes.

    Attributes:
        args: maker of the operation's arguments from FP32 tensors, which are theirs, and half.
        results: what the call left, from the arguments and what was returned.
        bytes: that have to move for each element; 0: the operation works on a few numbers.
        variant: what tells it from the operation's other samples.
    """

    args: Callable[[list[Tensor], torch.dtype], tuple[Any, ...]]
    results: Callable[[tuple[Any, ...], Any], Sequence[Tensor]]
    bytes: int = 0
    variant: str = ""

    def calls(self, device: torch.device, dtypes: Sequence[torch.dtype]) -> Iterator[Call]:
        """Yield calls of awkward lists, of the half dtypes in turn."""
        makers = [
            (what, functools.partial(_lists, shapes, device)) for what, shapes in LISTS.items()
        ]
        for (what, make), dtype in zip(makers, itertools.cycle(dtypes), strict=False):
            yield self._call(what, make, dtype)

    @property
    def moves_much(self) -> bool:
        """Whether its time is that of moving bytes."""
        return self.bytes > 0

    def large(self, device: torch.device, dtype: torch.dtype) -> Call:
        """Return a call of half of ``LARGE`` elements: there are up to six lists of them."""
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
    """Return FP32 numbers of both signs around 1/8, so that no long sum cancels.

    They are the same on every device.
    """
    generator = torch.Generator().manual_seed(seed)
    return ((torch.randn(shape, generator=generator) + 0.5) / 4).to(device)


def _special(device: torch.device) -> Tensor:
    """Return five lines, four of which hold a special value."""
    x = _values((5, 140), device)
    for line, value in enumerate(_SPECIAL):
        x[line, 0] = value
    x[0, -1] = _SPECIAL[0]
    return x


def _lists(shapes: Sequence[tuple[int, ...]], device: torch.device) -> list[Tensor]:
    """Return tensors of these shapes, a transposed one, and one at an odd address."""
    tensors = [_values(shape, device, seed) for seed, shape in enumerate(shapes)]
    return [*tensors, _values((7, 5), device).t(), _values((4098,), device)[1:]]
