"""Counts of faults, on which the response to the next fault depends."""

from collections.abc import Mapping
from typing import Any, NamedTuple

HEAL_AFTER = 2  # faults in one module, and after as many again
FIRST_REPLAYS = 8  # of the faults since the last heal; later ones at 16, 32, 64...


class FaultCounts(NamedTuple):
    """Counts of the faults that a lower scale cannot help."""

    in_a_row: int = 0  # since the last step that was taken
    seen: int = 0  # since the last heal, of those that a replay can find
    by_module: Mapping[str, int] = {}  # those that a replay has found in a module, by its name

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "FaultCounts":
        """Return the counts of a state that ``to_dict`` made. An empty state gives zeros."""
        return cls(**{name: state[name] for name in cls._fields if name in state})

    def to_dict(self) -> dict[str, Any]:
        """Return the counts as plain values."""
        return {**self._asdict(), "by_module": dict(self.by_module)}

    def with_fault(self, replayable: bool) -> "FaultCounts":
        """Return the counts with one more fault, which a replay can find if ``replayable``."""
        return self._replace(in_a_row=self.in_a_row + 1, seen=self.seen + replayable)

    def with_module(self, name: str) -> "FaultCounts":
        """Return the counts with one more fault that a replay found in this module."""
        return self._replace(by_module={**self.by_module, name: self.by_module.get(name, 0) + 1})

    @property
    def wants_replay(self) -> bool:
        """Whether the last fault that a replay can find is worth a replay."""
        return self.seen <= FIRST_REPLAYS or is_power_of_two(self.seen)


def is_power_of_two(n: int) -> bool:
    """Return whether a number from 0 on is 0 or a power of two. Repeated messages use this."""
    return n & (n - 1) == 0
