"""Stages of ``torch.distributed.pipelining``: what a schedule runs a forward or a loss for."""

import sys
from enum import Enum


class Work(Enum):
    """What the code of a schedule that runs now is there for."""

    STAGE = "the forward of a stage, on a micro-batch"
    SHAPES = "a forward, or a loss, on memory that nobody has written, to learn shapes and dtypes"
    SCHEDULE = "anything else, such as the loss of a micro-batch"


def pipeline_work() -> Work | None:
    """Return what a schedule runs the calling code for; None: no schedule does.

    Nothing public knows: it is read from the stack, by the public method of a stage that runs
    micro-batches (torch 2.11 to 2.15). Before the first one they run their modules for shapes;
    torch 2.14 runs the loss function and a backward, too.
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
