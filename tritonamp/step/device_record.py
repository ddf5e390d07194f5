"""The numbers of decisions: written on the device, copied to the host."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tritonamp.kernels._decision import AMAX, COUNTS, LOSS, RECORD, Record
from tritonamp.kernels._transfer import upload
from tritonamp.kernels.device import is_capturing, refuse_capture, wide_dtype
from tritonamp.readback import Readback, Reading
from tritonamp.step.outcome import Outcome

_KEPT = AMAX + 1  # numbers in front that a checkpoint holds: counts, norm, largest magnitude


class DeviceRecord:
    """The record of the last decision. The next decision overwrites it.

    ::

        RECORD numbers, see kernels._decision | a magnitude by rank | one by parameter

    The record is rebuilt, with its values, when parameters are added or ranks change.

    Args:
        names: function that returns the full name of each parameter. It is called again when
            parameters are added.
        before_change: function called before the record is rebuilt, because copies under way
            belong to the old names.
    """

    def __init__(
        self, names: Callable[[], Mapping[Tensor, str]], before_change: Callable[[], None]
    ) -> None:
        self._ask_names = names
        self._before_change = before_change
        self._names = dict(names())
        self._ranks: Sequence[int] = ()
        self._kept = [0.0] * _KEPT  # until there is a record
        self._numbers: Tensor | None = None
        # number of decisions by outcome, on the device; None: there was no decision
        self.counts: Tensor | None = None
        # by the ids of a decision's lists of parameters, which are kept so that the ids stay theirs
        self._places: dict[tuple[int, ...], tuple[Record, Sequence[list[Tensor]]]] = {}
        self._outgrown: list[Any] = []  # CUDA graphs that are replayed may still write here
        self._readback: Readback | None = None

    def place(
        self, params: Sequence[list[Tensor]], device: torch.device, ranks: Sequence[int]
    ) -> Record:
        """Return the record for a decision about the gradients of ``params``.

        Args:
            params: one list of parameters for each optimizer. The lists themselves must not change.
                Other parameters come in other lists.
            device: device of the decision.
            ranks: ranks whose magnitudes the record holds.
        """
        known = self._places.get(tuple(map(id, params)))
        if known and ranks == self._ranks and known[0].numbers.device == device:
            return known[0]
        self._before_change()
        flat = [param for part in params for param in part]
        positions = {param: i for i, param in enumerate(flat)}
        if not positions.keys() <= self._names.keys():
            later, new = self._ask_names(), positions.keys() - self._names.keys()
            self._names |= {p: later.get(p, f"a parameter of shape {tuple(p.shape)}") for p in new}
        size = RECORD + len(ranks) + len(self._names)
        numbers = self._numbers
        made_for = size, device, ranks
        if numbers is None or made_for != (len(numbers), numbers.device, self._ranks):
            numbers = self._make_room(size, device, ranks)
        of_ranks = range(len(flat), len(flat) + len(ranks))
        found = [*of_ranks, *(positions.get(p, -1) for p in self._names)]
        record = Record(numbers, _uploaded(torch.tensor(found, dtype=torch.int64), device), [])
        self._places[tuple(map(id, params))] = record, params
        return record

    def _make_room(self, size: int, device: torch.device, ranks: Sequence[int]) -> Tensor:
        """Make a new record that begins with the values of the present one."""
        refuse_capture(device, "the record of steps")
        before, first = self.values(), RECORD + len(self._ranks)
        by_rank = before[RECORD:first] if ranks == self._ranks else [0.0] * len(ranks)
        kept = before[:RECORD] + by_rank + before[first:]
        values = kept + [0.0] * (size - len(kept))
        values[LOSS] = math.nan
        numbers = _uploaded(torch.tensor(values, dtype=wide_dtype(device)), device)
        readback = Readback(numbers)  # may run out of memory, so before any attribute changes
        self._outgrown += [record for record, _ in self._places.values()]
        self._readback = readback
        self._numbers, self.counts = numbers, numbers[: len(COUNTS)]
        self._ranks = ranks
        self._places = {}
        return numbers

    # on the way to the host

    def start_reading(self, outcome: Outcome, again: bool = False) -> None:
        """Start copying the record to the host. With ``again``, replace the last copy."""
        assert self._readback is not None and self._numbers is not None
        start = self._readback.restart if again else self._readback.start
        start(self._numbers, outcome)

    def cancel_last_reading(self) -> None:
        """Drop the copy that was started last."""
        if self._readback is not None:
            self._readback.cancel_last()

    def arrived(self, wait: bool = False) -> Iterable[Reading]:
        """Return the copies that have arrived; with ``wait`` all started ones."""
        return () if self._readback is None else self._readback.ready(wait)

    @property
    def is_captured(self) -> bool:
        """Whether a read of the device would become part of a CUDA graph."""
        return self._numbers is not None and is_capturing(self._numbers.device)

    # the numbers

    def values(self) -> list[float]:
        """Return the numbers of the last decision, or those that were loaded. Reads the device."""
        if self._numbers is None:
            return [*self._kept, *[0.0] * (RECORD - _KEPT)]
        return self._numbers.tolist()

    def load(self, kept: Sequence[float]) -> None:
        """Begin with these numbers: counts, norm and largest magnitude of the last good step."""
        self._kept = [float(number) for number in kept]
        if self._numbers is not None:
            self._numbers[:_KEPT] = torch.tensor(self._kept, dtype=self._numbers.dtype)

    def by_name(self, values: Sequence[float]) -> dict[str, float]:
        """Return the magnitudes in a record's values by name of the parameter."""
        return dict(zip(self._names.values(), values[RECORD + len(self._ranks) :], strict=True))

    def by_rank(self, values: Sequence[float]) -> dict[int, float]:
        """Return the magnitudes in a record's values by rank."""
        end = RECORD + len(self._ranks)
        return dict(zip(self._ranks, values[RECORD:end], strict=True))


def _uploaded(values: Tensor, device: torch.device) -> Tensor:
    target = torch.empty_like(values, device=device)
    upload(values, target)
    return target
