"""Stages of ``torch.distributed.pipelining``: the purpose of a running forward or loss."""

import sys
from enum import Enum


class Work(Enum):
    """The purpose for which a schedule runs code."""

    STAGE = "the forward of a stage, on a micro-batch"
    SHAPES = "a forward, or a loss, on memory that nobody has written, to learn shapes and dtypes"
    SCHEDULE = "anything else, such as the loss of a micro-batch"


def pipeline_work() -> Work | None:
    """Return the purpose of the calling code in a schedule; None outside of schedules.

    It is read from the stack, because nothing public returns it: ``forward_one_chunk`` of a stage
    runs micro-batches (torch 2.11 to 2.15). Before the first micro-batch, a stage runs its module
    to learn shapes; torch 2.14 also runs the loss function and a backward.
    """
    package = sys.modules.get("torch.distributed.pipelining")
    if package is None:  # nobody has used it
        return None
    stage, schedules = (vars(getattr(package, name)) for name in ("stage", "schedules"))
    found, frame = None, sys._getframe().f_back
    while frame is not None:
        if frame.f_globals is stage:
            if frame.f_code.co_name == "forward_one_chunk":
                return Work.STAGE
            found = Work.SHAPES
        elif frame.f_globals is schedules:
            return found or Work.SCHEDULE
        frame = frame.f_back
    return found
