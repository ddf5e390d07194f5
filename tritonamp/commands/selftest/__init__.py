"""``python -m tritonamp doctor --selftest``: tests of results and speed on this machine."""

import platform
import textwrap
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch

import tritonamp
from tritonamp.commands.selftest import kernels, processes, speed, training
from tritonamp.commands.selftest.check import CUT_OFF, FAILED, OK, Check, outcome_of
from tritonamp.diagnosis.terminal import fitted, table
from tritonamp.kernels import device as hardware

GROUPS: dict[str, Callable[[torch.device, str], Iterable[Check]]] = {
    "kernel": kernels.checks,
    "training": training.checks,
    "speed": speed.checks,
}
ALONE = frozenset(("speed",))
"""Groups that need the GPU for themselves."""
LINE = 200  # longest last column of a table, in characters; the JSON has all of it
REPORT = (
    "Please report this table, as --selftest --json prints it. In a program whose kernels fail, "
    'enable(..., backend="eager") computes the same in eager torch.'
)


def first_device() -> torch.device:
    """Return the first GPU, or the CPU if there is no GPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def backend_on(device: torch.device) -> hardware.Backend:
    """Return the backend to check. With TRITON_INTERPRET=1 it is Triton's interpreter."""
    return hardware.choose_backend("triton" if hardware.INTERPRETED else "auto", device)


def all_checks(
    groups: Collection[str], device: torch.device, backend: str
) -> list[tuple[str, Check]]:
    """Return the checks of the groups, each with the name of its group."""
    return [(group, check) for group in groups for check in GROUPS[group](device, backend)]


def run(
    device: torch.device,
    groups: Collection[str] = (),
    tell: Callable[[dict[str, Any]], object] = lambda outcome: None,
    jobs: int = 0,
    expect: Callable[[int], object] = lambda count: None,
) -> dict[str, Any]:
    """Run the checks of ``groups``, or all. A failed check does not stop the others.

    Args:
        device: tested device. With ``jobs`` it must be ``first_device()``.
        groups: names in ``GROUPS``.
        tell: function that gets the outcome of each check when the check ends.
        jobs: number of parallel processes, in which a fatal check does not stop the others. Groups
            in ``ALONE`` run in one process. 0 runs all checks in this process, up to the first one
            that spoils the context.
        expect: function that gets the number of checks before they run.

    Returns:
        the content of ``--json``: device, backend and reason; "failed", the number of failed
        checks; "checks", with group, name, status, detail, seconds and numbers of each check.
        After Ctrl-C it has the checks so far, and the running ones are "cut off".
    """
    backend, groups = backend_on(device), list(groups or GROUPS)
    checks = all_checks(groups, device, backend.name)
    outcomes: list[dict[str, Any]] = []
    expect(len(checks))

    def note(outcome: dict[str, Any]) -> None:
        outcomes.append(outcome)
        tell(outcome)

    try:
        if jobs:
            together = sum(group not in ALONE for group, _ in checks)
            _run_in_processes(groups, min(jobs, together or 1), note)
        else:
            for group, check in checks:
                note({"group": group, "name": check.name, **outcome_of(check, device)})
                if "spoiled" in outcomes[-1]:
                    break
    except KeyboardInterrupt:
        where = {"group": "selftest", "name": "all", "status": CUT_OFF}
        note(where | {"detail": "stopped by Ctrl-C", "seconds": 0.0})
    places = {(group, check.name): place for place, (group, check) in enumerate(checks)}
    outcomes.sort(key=lambda outcome: places.get((outcome["group"], outcome["name"]), len(checks)))
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "tritonamp": tritonamp.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": hardware.triton_version(),
        "backend": backend.name,
        "reason": backend.reason,
        "failed": sum(outcome["status"] == FAILED for outcome in outcomes),
        "checks": outcomes,
    }


def _run_in_processes(groups: list[str], jobs: int, tell: Callable[[Any], object]) -> None:
    workers = processes.Workers(tell)
    together = [group for group in groups if group not in ALONE]
    if together:
        workers.run(together, jobs)
    for group in ALONE.intersection(groups):
        workers.run([group], 1)


def text(found: dict[str, Any]) -> str:
    """Return the content of ``--json`` as text, with one table and the next steps."""
    rows = [
        (c["group"], c["name"], c["status"], textwrap.shorten(c["detail"], LINE, placeholder="..."))
        for c in found["checks"]
    ]
    drawn = [table(("check", "of", "result", "found"), rows)] if rows else []
    return "\n\n".join([fitted(title(found)), *drawn, fitted(verdict(found))])


def title(found: dict[str, Any]) -> str:
    what = "kernels" if found["backend"] == "triton" else "eager twins, no kernels"
    return f"selftest on {found['device']}: {what} ({found['reason']})"


def verdict(found: dict[str, Any]) -> str:
    seconds = sum(check["seconds"] for check in found["checks"])
    failed, tried = found["failed"], sum(c["status"] in (OK, FAILED) for c in found["checks"])
    said = f"{failed} of {tried} failed. {REPORT}" if failed else f"All {tried} hold."
    if not tried:
        said = f"No check can be tried here, because no kernels run: {found['reason']}."
    if any(check["status"] == CUT_OFF for check in found["checks"]):
        said = f"It was stopped before all checks ran. {said}"
    return f"{said} {seconds:.0f} s"


def is_wrong(found: dict[str, Any]) -> bool:
    """Return whether a check failed or was cut off."""
    return any(check["status"] in (FAILED, CUT_OFF) for check in found["checks"])
