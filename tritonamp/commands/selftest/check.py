"""A check of the selftest, and its result."""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

OK, FAILED, NOT_HERE, CUT_OFF = "ok", "FAILED", "not here", "cut off"
SPOILED = "the GPU's context is gone, and every later call of this process would fail"


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


def outcome_of(check: Check, device: torch.device) -> dict[str, Any]:
    """Run a check, wait for the device, and return the check's entry in ``--json``.

    The next call that asks the device reports an illegal address, and so does every later one. The
    wait after each check assigns it to the right check; "spoiled" is then True.
    """
    start = time.perf_counter()
    try:
        found, status = check.run(), OK
    except NotHereError as error:
        found, status = Found(str(error)), NOT_HERE
    except WrongError as error:
        found, status = Found(str(error)), FAILED
    except Exception as error:  # whatever goes wrong is the answer that was asked for
        found, status = Found(_on_one_line(error)), FAILED
    numbers: dict[str, Any] = dict(found.numbers)
    fault = _fault_of(device)
    if fault is not None:
        said = found.detail if status == FAILED else fault
        found, status, numbers = Found(f"{said}; {SPOILED}"), FAILED, {"spoiled": True}
    return {
        "status": status,
        "detail": found.detail,
        "seconds": round(time.perf_counter() - start, 3),
        **numbers,
    }


def _fault_of(device: torch.device) -> str | None:
    """Return the error that the device's context is left with, or None."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception as error:
        return _on_one_line(error)
    return None


def _on_one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
