"""The numbers of a run for its logger, as far as they have arrived."""

from collections.abc import Sequence

from tritonamp.diagnosis.live_ranges import DIRECTIONS, RangeRecord
from tritonamp.diagnosis.log import StepLog


def metrics(log: StepLog, ranges: Sequence[RangeRecord] = ()) -> dict[str, float]:
    """Return plain numbers by name, for TensorBoard, CSV files and the like. Never waits.

    Args:
        log: log of the run.
        ranges: records of the last step that was watched.
    """
    log.collect()
    history = log.history
    if not history.records:
        return {}
    found = {"amp/scale": history.records[-1].scale, "amp/skipped": float(history.skipped)}
    norms = [record.grad_norm for record in history.records if record.grad_norm is not None]
    if norms:
        found["amp/grad_norm"] = norms[-1]
    for cause, n in history.causes.items():
        found[f"amp/skipped_{cause.replace(' ', '_')}"] = float(n)
    for direction in DIRECTIONS:
        bits = [r.headroom_bits for r in ranges if r.direction == direction]
        if bits:
            found[f"amp/headroom_{direction}"] = min(bits)
    return found
