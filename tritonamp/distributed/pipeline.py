"""Stages of ``torch.distributed.pipelining``: the purpose of a running forward or loss."""

import sys
from enum import Enum


class Work(Enum):
    """The purpose for which a stage runs code."""

    STAGE = "the forward of a stage, on a micro-batch"
    SHAPES = "a forward, or a loss, on memory without values, to learn shapes and dtypes"


def pipeline_work() -> Work | None:
    """Return the purpose for which a stage runs the calling code; None for all other code.

    It is read from the stack, because nothing public returns it: ``forward_one_chunk`` of a stage
    runs micro-batches (torch 2.11 to 2.15). Before the first micro-batch, a stage runs its module
    to learn shapes; torch 2.14 also runs the loss function and a backward.
    """
    package = sys.modules.get("torch.distributed.pipelining")
    if package is None:  # no pipeline has used it
        return None
    stage = vars(package.stage)
    found, frame = None, sys._getframe().f_back
    while frame is not None:
        if frame.f_globals is stage:
            if frame.f_code.co_name == "forward_one_chunk":
                return Work.STAGE
            found = Work.SHAPES
        frame = frame.f_back
    return found
