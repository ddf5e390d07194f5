"""The op behind a record, as edits of the code take it."""

import math

import torch

from tritonamp.diagnosis.replay.verdicts import Event, OpInput
from tritonamp.forecast.recording import SOFTMAX, TensorRecord, softmax_behind


def event_of(record: TensorRecord, dtype: torch.dtype) -> Event:
    """Return the event of an op whose result is inf or NaN in FP32, or too large for half.

    Args:
        record: the result.
        dtype: the half dtype of the policy.
    """

    def stored(r: TensorRecord) -> torch.dtype:
        return dtype if r.half else torch.float32

    sizes = record.sizes
    return Event(
        record.place,
        "backward" if record.backward else "forward",
        stored(record),
        inputs=tuple(OpInput(stored(r), r.shape, r.sizes.amax) for r in record.sources),
        nan=bool(sizes.nans),
        exact=math.inf if sizes.broken else sizes.amax,
        masked=record.op.strip("_") in SOFTMAX and not record.made_broken,
        softmax=softmax_behind(record),
    )
