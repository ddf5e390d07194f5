"""What cures a fault: tried on the batch that showed it, before anybody is advised to do it."""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from tritonamp.diagnosis.replay import FaultReport, Remedy

MOST_MODULES = 4  # in FP32 together
CURED_BY_FP32 = frozenset(
    """matmul_overflow square_overflow reduction_overflow exp_overflow overflow constant_overflow
    cast_overflow weight_overflow vanished_eps zero_by_zero division_by_zero
    gradient_overflow""".split()
)


class TrialBlocks(Protocol):
    """Blocks in which the model computes otherwise."""

    def in_fp32(self, names: Sequence[str] | None = None) -> AbstractContextManager[None]:
        """Compute modules, None: everything, in FP32."""

    def in_bfloat16(self) -> AbstractContextManager[None]:
        """Compute everything in bfloat16."""


def find_remedy(
    wrong: Collection[str | None], again: Callable[[Remedy], Collection[str | None]], most: int
) -> Remedy:
    """Return what cures a batch: modules in FP32, with those that a fault moves on to, or bfloat16.

    Where neither helps, a remedy that does not. ``wrong`` are full names of the modules in which
    something is wrong, None for one without a name; ``again`` runs the batch with a remedy, at most
    ``most`` times with modules in FP32, and returns what is wrong then.
    """
    modules: tuple[str, ...] = ()
    for _ in range(most):
        more = [name for name in wrong if name is not None and name not in modules]
        if not more or None in wrong:
            break
        modules = (*modules, *more)
        wrong = again(Remedy(modules))
        if not wrong:
            return Remedy(modules)
    return Remedy(bfloat16=not again(Remedy(bfloat16=True)))


def remedy_of(
    fault: FaultReport,
    search: Callable[[AbstractContextManager[None]], FaultReport | None],
    trials: TrialBlocks,
) -> Remedy | None:
    """Return what cures the fault of a batch; None: nothing is there to try.

    Where no few modules in FP32 are enough, it says whether the whole model in FP32 is.
    ``search`` runs the batch again inside of a block, and returns the fault of that.
    """
    if fault.module is None or fault.kind not in CURED_BY_FP32 | {"domain_error", "unknown"}:
        return None

    def again(tried: Remedy) -> list[str | None]:
        left = search(trials.in_bfloat16() if tried.bfloat16 else trials.in_fp32(tried.modules))
        # a loss scale comes down by itself
        return [] if left is None or left.kind == "scale_too_high" else [left.module]

    found = find_remedy([fault.module], again, MOST_MODULES)
    if found.modules:
        return found
    try:
        left = search(trials.in_fp32())
    except Exception:  # there may be no memory for it
        return found
    return found._replace(fp32=left is None or left.kind == "scale_too_high")
