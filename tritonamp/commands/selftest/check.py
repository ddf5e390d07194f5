"""A check of the selftest, and its result."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

OK, FAILED, NOT_HERE = "ok", "FAILED", "not here"


class WrongError(Exception):
    """Raised by a check that does not hold: its message says what was found instead."""


class NotHereError(Exception):
    """Raised by a check that cannot be tried on this device: its message says why."""


def require(holds: bool, otherwise: str) -> None:
    """Check one thing.

    Raises:
        WrongError: it does not hold; ``otherwise`` says what was found.
    """
    if not holds:
        raise WrongError(otherwise)


class Found(NamedTuple):
    """What a check that holds has found.

    Attributes:
        detail: one line for people.
        numbers: for ``--json``, by name.
    """

    detail: str
    numbers: Mapping[str, float] = {}


class Check(NamedTuple):
    """Something that has to hold.

    Attributes:
        name: unique in its group.
        run: raises ``WrongError``, or anything else, where it does not hold, and ``NotHereError``
            where it cannot be tried.
    """

    name: str
    run: Callable[[], Found]
