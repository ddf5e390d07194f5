"""What cures a fault: tried on the batch that showed it, before anybody is advised to do it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from tritonamp.diagnosis.replay import FaultReport, Remedy

MOST_MODULES = 4  # in FP32 together
CURED_BY_FP32 = frozenset(
    """matmul_overflow square_overflow reduction_overflow exp_overflow overflow constant_overflow
    cast_overflow weight_overflow vanished_eps zero_by_zero division_by_zero
    gradient_overflow""".split()
)


class Trials(Protocol):
    """Blocks in which the model computes otherwise."""

    def in_fp32(self, names: Sequence[str] | None = None) -> AbstractContextManager[None]:
        """Compute modules, None: everything, in FP32."""

    def in_bfloat16(self) -> AbstractContextManager[None]:
        """Compute everything in bfloat16."""


Again = Callable[[AbstractContextManager[None]], FaultReport | None]
"""Runs the batch again inside of a block, and returns what is wrong then."""


def find_remedy(fault: FaultReport, again: Again, trials: Trials) -> Remedy | None:
    """Return what cures a fault; None: nothing is there to try.

    First the module in FP32; where the fault only moves on, the one it moves to as well; then
    bfloat16.
    """
    if fault.module is None or fault.kind not in CURED_BY_FP32 | {"domain_error", "unknown"}:
        return None
    modules = [fault.module]
    while len(modules) <= MOST_MODULES:
        left = again(trials.in_fp32(modules))
        if left is None or left.kind == "scale_too_high":  # the scale comes down by itself
            return Remedy(tuple(modules))
        if left.module is None or left.module in modules:
            break
        modules.append(left.module)
    return Remedy(bfloat16=again(trials.in_bfloat16()) is None)
