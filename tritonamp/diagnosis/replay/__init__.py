"""Run a failing batch again, watched op by op, to find where inf or NaN began, and why."""

from tritonamp.diagnosis.replay.bundles import load_bundle as load_bundle
from tritonamp.diagnosis.replay.bundles import write_bundle as write_bundle
from tritonamp.diagnosis.replay.faults import FaultReport as FaultReport
from tritonamp.diagnosis.replay.faults import Remedy as Remedy
from tritonamp.diagnosis.replay.search import NOT_REPRODUCED as NOT_REPRODUCED
from tritonamp.diagnosis.replay.search import find_fault as find_fault
from tritonamp.diagnosis.replay.search import result_of as result_of
from tritonamp.diagnosis.replay.snapshots import BatchGoneError as BatchGoneError
from tritonamp.diagnosis.replay.snapshots import Snapshot as Snapshot
