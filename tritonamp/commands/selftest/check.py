"""A check of the selftest, and its result."""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

OK, FAILED, NOT_HERE, CUT_OFF = "ok", "FAILED", "not here", "cut off"
SPOILED = "the GPU's context is gone, and every later call of this process would fail"


class WrongError(Exception):
    """A check does not hold. The message has the wrong result."""


class NotHereError(Exception):
    """A check cannot run on this device. The message has the reason."""


def require(holds: bool, otherwise: str) -> None:
    """Check one condition.

    Raises:
        WrongError: the condition is False. The message is ``otherwise``.
    """
    if not holds:
        raise WrongError(otherwise)


class Found(NamedTuple):
    """The result of a check that holds.

    Attributes:
        detail: one line of text.
        numbers: numbers for ``--json`` by name.
    """

    detail: str
    numbers: Mapping[str, float] = {}


class Check(NamedTuple):
    """A test of one property.

    Attributes:
        name: name that is unique in the group.
        run: function that returns the result. It raises ``NotHereError`` if it cannot run here,
            and ``WrongError`` or another error if the property does not hold.
    """

    name: str
    run: Callable[[], Found]


def outcome_of(check: Check, device: torch.device) -> dict[str, Any]:
    """Run a check, wait for the device, and return the check's entry in ``--json``.

    After an illegal address the next wait for the device raises, and so does every later one.
    Because each check ends with a wait, the error is reported for the right check, with "spoiled".
    """
    start = time.perf_counter()
    try:
        found, status = check.run(), OK
    except NotHereError as error:
        found, status = Found(str(error)), NOT_HERE
    except WrongError as error:
        found, status = Found(str(error)), FAILED
    except Exception as error:  # any error is the outcome of the check
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
    """Return the error in which the device's context remains; None without an error."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception as error:
        return _on_one_line(error)
    return None


def _on_one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
