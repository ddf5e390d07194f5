"""The first result that is inf or NaN in FP32, from which the others follow."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from tritonamp.forecast.dry_run import DryRun
from tritonamp.forecast.events import event_of
from tritonamp.forecast.findings import BATCH, LOSS, Finding
from tritonamp.forecast.recording import FILLS, SOFTMAX, TensorRecord

ON_PURPOSE = (*FILLS, "where", "input")  # how masks come to hold -inf

ADVICE = {
    "nll_loss_forward": "keep a target other than ignore_index in each batch, or divide "
    'reduction="sum" by at least 1',
}


class Root(NamedTuple):
    """The origin of inf or NaN.

    Attributes:
        record: result that was made from finite numbers.
        nan: first result behind it that has NaN; None: there is none.
    """

    record: TensorRecord
    nan: TensorRecord | None


def root_of(run: DryRun) -> Root | None:
    """Return the origin of inf or NaN in the loss or in gradients of parameters, else None.

    If these are finite, inf in other results, such as the -inf of masks, has done no harm.
    """
    if not math.isfinite(run.loss):
        at = run.end
    else:
        at = next((r for r in run.records if r.op == "gradient" and r.sizes.broken), None)
    nan = None
    while at is not None:
        broken = [source for source in at.sources if source.sizes.broken]
        # scores that a mask has made -inf are no fault, unless they are all that a softmax reads
        masks = not any(source.sizes.nans or source.sizes.infs for source in broken)
        if masks and (at.made_broken or not broken or at.op.strip("_") in SOFTMAX):
            return Root(at, nan)
        nan = at if at.sizes.nans else nan
        at = min(broken, key=lambda r: (not r.sizes.nans, r.op.strip("_") in ON_PURPOSE))
    return None


def non_finite(root: Root, dtype: torch.dtype) -> Iterator[Finding]:
    """Yield the finding about the origin of inf or NaN; ``parameters`` has those of parameters.

    ``dtype`` is the half dtype of the policy.
    """
    r = root.record
    if r.op == "parameter":
        return
    if r.op == "input":
        advice = "drop or repair the samples that hold it, and check another batch"
        why, reason = f"the batch holds {_values(r)}", "no other batch is at hand"
        yield Finding("non-finite", BATCH, why, advice, weight=1e29, untried=reason)
        return
    where = LOSS if r.place.module is None else r.module
    why, line, event = _why(root), r.place.line, event_of(r, dtype)
    yield Finding("non-finite", where, why, _advice(r), weight=1e29, line=line, event=event)


def _values(r: TensorRecord) -> str:
    counts = {"inf": r.sizes.infs, "-inf": r.sizes.minus_infs, "NaN": r.sizes.nans}
    return " and ".join(name for name, count in counts.items() if count)


def _why(root: Root) -> str:
    r, nan = root
    if not r.made_broken and r.op.strip("_") in SOFTMAX:
        return f"{r.name} gives NaN in FP32 already, because every score of a row is -inf"
    verb = "gives" if r.made_broken else "is given"
    name = f"{r.name} of {r.place.op}" if r.backward else r.name
    why = f"{name} {verb} {_values(r)} in FP32 already"
    if nan is None or r.sizes.nans or not r.made_broken:
        return why
    line = f" at {nan.place.line}" if nan.place.line else ""
    return f"{why}, and {nan.name}{line} makes NaN of it"


def _advice(r: TensorRecord) -> str:
    """Return the advice for where no change of the line helps."""
    if r.op in ADVICE:
        return ADVICE[r.op]
    if not r.made_broken:
        return "write finite numbers into what it reads"
    if r.op.strip("_") in ON_PURPOSE:
        return "leave inf to a softmax or a maximum, which take -inf, or write a finite number"
    if r.sizes.nans:
        return "keep its input in the range where it is defined"
    return "keep its input smaller, by a norm or a smaller scale"
