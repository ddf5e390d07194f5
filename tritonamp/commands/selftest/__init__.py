"""``python -m tritonamp doctor --selftest``: what runs here is right, and how fast it is."""

import json
import textwrap
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch

from tritonamp.commands.selftest import kernels, speed, training
from tritonamp.commands.selftest.check import (
    FAILED,
    NOT_HERE,
    OK,
    Check,
    Found,
    NotHereError,
    WrongError,
)
from tritonamp.commands.table import table
from tritonamp.kernels import device as hardware

GROUPS: dict[str, Callable[[torch.device, str], Iterable[Check]]] = {
    "kernel": kernels.checks,
    "training": training.checks,
    "speed": speed.checks,
}
LINE = 200  # characters of a table's last column; all of it is in the JSON
REPORT = (
    "Please report this table, as --selftest --json prints it. In a program whose kernels fail, "
    'enable(..., backend="eager") computes the same in eager torch.'
)


def run(
    device: torch.device,
    groups: Collection[str] = (),
    tell: Callable[[str], object] = lambda line: None,
) -> dict[str, Any]:
    """Run the checks on ``device``; one that fails leaves the others alone.

    Args:
        device: a GPU, or the CPU.
        groups: of ``GROUPS``; none: all.
        tell: called with a line after each check.

    Returns:
        what ``--json`` prints: device, backend and reason; "failed", how many checks did; "checks",
        for each its group, name, status, detail, seconds, and the numbers that it found.
    """
    backend = _backend(device)
    outcomes = []
    for group in groups or GROUPS:
        for check in GROUPS[group](device, backend.name):
            outcomes.append({"group": group, "name": check.name, **_outcome(check)})
            tell(f"{group} {check.name}: {outcomes[-1]['status']}")
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "torch": torch.__version__,
        "triton": hardware.triton_version(),
        "backend": backend.name,
        "reason": backend.reason,
        "failed": sum(outcome["status"] == FAILED for outcome in outcomes),
        "checks": outcomes,
    }


def text(found: dict[str, Any]) -> str:
    """Return the same for people: what runs, one table, and what to do."""
    rows = [
        (c["group"], c["name"], c["status"], textwrap.shorten(c["detail"], LINE, placeholder="..."))
        for c in found["checks"]
    ]
    what = "kernels" if found["backend"] == "triton" else "eager twins, no kernels"
    seconds = sum(check["seconds"] for check in found["checks"])
    failed, tried = found["failed"], sum(c["status"] != NOT_HERE for c in found["checks"])
    verdict = f"{failed} of {tried} failed. {REPORT}" if failed else f"All {tried} hold."
    return "\n\n".join(
        [
            f"selftest on {found['device']}: {what} ({found['reason']})",
            table(("check", "of", "result", "found"), rows),
            f"{verdict} {seconds:.0f} s",
        ]
    )


def as_json(found: dict[str, Any]) -> str:
    return json.dumps(found, indent=1)


def _backend(device: torch.device) -> hardware.Backend:
    """Return the kernels where they can run, Triton's interpreter included, else eager torch."""
    requested = "triton" if hardware.INTERPRETED else "auto"
    return hardware.choose_backend(requested, device)


def _outcome(check: Check) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        found, status = check.run(), OK
    except NotHereError as error:
        found, status = Found(str(error)), NOT_HERE
    except WrongError as error:
        found, status = Found(str(error)), FAILED
    except Exception as error:  # whatever goes wrong is the answer that was asked for
        found, status = Found(" ".join(f"{type(error).__name__}: {error}".split())), FAILED
    return {
        "status": status,
        "detail": found.detail,
        "seconds": round(time.perf_counter() - start, 3),
        **found.numbers,
    }
