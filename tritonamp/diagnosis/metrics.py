"""The numbers of a run for its logger, as far as they have arrived."""

from collections.abc import Sequence

from tritonamp.diagnosis.live_ranges import DIRECTIONS, RangeRecord
from tritonamp.diagnosis.log import StepLog


def metrics(log: StepLog, ranges: Sequence[RangeRecord] = ()) -> dict[str, float]:
    """Return plain numbers by name, for TensorBoard, CSV files and their like. Never waits.

    Args:
        log: of the run.
        ranges: of the last step that was watched.
    """
    log.collect()
    history = log.history
    if not history.records:
        return {}
    norms = (record.grad_norm for record in reversed(history.records))
    norm = next((norm for norm in norms if norm is not None), None)
    return {
        "amp/scale": history.records[-1].scale,
        "amp/skipped": float(history.skipped),
        **({} if norm is None else {"amp/grad_norm": norm}),
        **{
            f"amp/skipped_{cause.replace(' ', '_')}": float(n)
            for cause, n in history.causes.items()
        },
        **{
            f"amp/headroom_{direction}": min(
                r.headroom_bits for r in ranges if r.direction == direction
            )
            for direction in DIRECTIONS
            if any(r.direction == direction for r in ranges)
        },
    }
