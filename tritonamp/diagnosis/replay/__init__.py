"""Run a failing batch again, watched op by op, to find where inf or NaN began, and why."""

from tritonamp.diagnosis.replay.faults import FaultReport as FaultReport
from tritonamp.diagnosis.replay.faults import Remedy as Remedy
