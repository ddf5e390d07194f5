"""Remedies for a fault. Each is tried on the batch that showed the fault before it is advised."""

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager

from tritonamp.casts.healing import Healing
from tritonamp.diagnosis.replay import FaultReport, Remedy

MOST_MODULES = 4  # in FP32 together
CURED_BY_FP32 = frozenset(
    """matmul_overflow square_overflow reduction_overflow exp_overflow overflow constant_overflow
    cast_overflow weight_overflow vanished_eps zero_by_zero division_by_zero
    gradient_overflow""".split()
)


def find_remedy(
    wrong: Collection[str | None], again: Callable[[Remedy], Collection[str | None]], most: int
) -> Remedy:
    """Find a remedy under which the batch is finite: FP32 for the faulty modules, else bfloat16.

    Where neither helps, the result's ``helps`` is False.

    Args:
        wrong: full names of the faulty modules; None for a fault outside of modules.
        again: function that runs the batch under a remedy and returns the names of modules that are
            still faulty.
        most: number of runs with modules in FP32. A fault may move on from module to module.
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
    healing: Healing,
) -> Remedy | None:
    """Find a remedy for the fault of a batch; None: nothing can be tried.

    Where FP32 for a few modules is not enough, FP32 for the whole model is tried, too.

    Args:
        fault: fault of the batch.
        search: function that runs the batch again inside a block, and returns the fault of that
            run.
        healing: blocks that compute in another precision.
    """
    if fault.module is None or fault.kind not in CURED_BY_FP32 | {"domain_error", "unknown"}:
        return None

    def again(tried: Remedy) -> list[str | None]:
        left = search(healing.in_bfloat16() if tried.bfloat16 else healing.in_fp32(tried.modules))
        # a loss scale comes down by itself
        return [] if left is None or left.kind == "scale_too_high" else [left.module]

    found = find_remedy([fault.module], again, MOST_MODULES)
    if found.modules:
        return found
    try:
        left = search(healing.in_fp32())
    except Exception:  # there may be no memory for it
        return found
    return found._replace(fp32=left is None or left.kind == "scale_too_high")
