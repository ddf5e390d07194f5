"""Run a failing batch again, watched op by op, to find where inf or NaN began, and why."""

import importlib
from typing import TYPE_CHECKING, Any

from tritonamp.diagnosis.replay.faults import FaultReport as FaultReport
from tritonamp.diagnosis.replay.faults import Remedy as Remedy
from tritonamp.diagnosis.replay.snapshots import BatchGoneError as BatchGoneError
from tritonamp.diagnosis.replay.snapshots import Snapshot as Snapshot

if TYPE_CHECKING:
    from tritonamp.diagnosis.replay.bundles import load_bundle as load_bundle
    from tritonamp.diagnosis.replay.bundles import write_bundle as write_bundle
    from tritonamp.diagnosis.replay.search import NOT_REPRODUCED as NOT_REPRODUCED
    from tritonamp.diagnosis.replay.search import find_fault as find_fault
    from tritonamp.diagnosis.replay.search import result_of as result_of

# modules that only a replay needs, and the names that come from them
_LATER = {
    "bundles": ("load_bundle", "write_bundle"),
    "search": ("NOT_REPRODUCED", "find_fault", "result_of"),
}


def __getattr__(name: str) -> Any:
    """Import one of these modules when a name from it is first asked for."""
    for module, names in _LATER.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
