"""The numbers of a run for its logger, as far as they have arrived."""

from collections.abc import Sequence

from tritonamp.diagnosis.log import StepLog
from tritonamp.diagnosis.records import ATTENTION, DIRECTIONS, MismatchRecord, RangeRecord


def metrics(
    log: StepLog,
    ranges: Sequence[RangeRecord] = (),
    mismatches: Sequence[MismatchRecord] = (),
) -> dict[str, float]:
    """Return plain numbers by name, for TensorBoard, CSV files and the like. Never waits.

    Args:
        log: log of the run.
        ranges: records of the last step that was watched.
        mismatches: mismatches that have arrived, oldest first.
    """
    return _of_steps(log, ranges) | _of_sampler(mismatches)


def _of_steps(log: StepLog, ranges: Sequence[RangeRecord]) -> dict[str, float]:
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
    logits = [r.absmax for r in ranges if r.direction == ATTENTION]
    if logits:
        found["amp/attention_logit"] = max(logits)
    return found


def _of_sampler(mismatches: Sequence[MismatchRecord]) -> dict[str, float]:
    if not mismatches:
        return {}
    _, k1, k3, outside, worst_ratio = mismatches[-1]
    return {
        "amp/mismatch_k1": k1,
        "amp/mismatch_k3": k3,
        "amp/mismatch_outside": outside,
        "amp/mismatch_worst_ratio": worst_ratio,
    }
