"""Tiers of healing after faults of a module: FP32 results, FP32, the whole model in FP32."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tritonamp.casts.healing import Healing
from tritonamp.diagnosis.fault_counts import HEAL_AFTER
from tritonamp.diagnosis.remedies import is_inside, needs_low_scale
from tritonamp.diagnosis.replay import FaultReport
from tritonamp.diagnosis.replay.verdicts import GOOD_SCALE


class _Tier(NamedTuple):
    """Modules that are healed together.

    Attributes:
        results: names of modules with FP32 results.
        modules: names of modules that compute in FP32.
    """

    results: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()

    def not_in(self, healing: Healing) -> "_Tier":
        """Return the part of this tier that has not been healed."""
        done = healing.in_full
        results = [n for n in self.results if n not in healing.with_results]
        return _Tier(
            tuple(name for name in results if not is_inside(name, done)),
            tuple(name for name in self.modules if not is_inside(name, done)),
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all modules."""
        return (*self.results, *self.modules)

    def __str__(self) -> str:
        have, compute = self.results, self.modules
        parts = [f"{', '.join(have)} {'has' if len(have) == 1 else 'have'} FP32 results"]
        names = ", ".join(name or "the model" for name in compute)
        parts += [f"{names} compute{'s' if len(compute) == 1 else ''} in FP32"]
        return " and ".join(part for part, of in zip(parts, self, strict=True) if of)


def heal(healing: Healing, fault: FaultReport, module: str, whole: str) -> str:
    """Make the remedy of a module's faults permanent. Return a report in words.

    If a healed module has faults again, the next tier follows.

    Args:
        healing: healing of the models.
        fault: the last fault of the module.
        module: full name of the module.
        whole: name of the model that contains the module.
    """
    tiers = (tier.not_in(healing) for tier in _tiers(healing, fault, module, whole))
    more = next(filter(lambda tier: tier.names, tiers), None)
    named = module or "the model"
    if more is not None:
        for name in more.results:
            healing.heal(name, results=True)
        for name in more.modules:
            healing.heal(name)
        where = "there" if more.names == (module,) else f"in {named}"
        undo = "; ".join(f"amp.unheal({name!r})" for name in more.names)
        return f"\nHealed: {more} from now on, after {HEAL_AFTER} faults {where}; {undo} undoes it."
    if fault.remedy is not None and fault.remedy.bfloat16:
        return (
            f"\nNot healed: {named} in FP32 does not help, but bfloat16 does: "
            "dtype=torch.bfloat16 (tried: the batch passes)."
        )
    already = " already" if is_inside(module, healing.in_full) else ""
    return f"\nNot healed: {named} in FP32{already} does not help, nor does all in FP32."


def next_tier(healing: Healing, faults: Iterable[FaultReport]) -> str:
    """Heal modules with FP32 results in FP32 if gradients overflow at every good loss scale.

    Return a report in words; "" if gradients fit.

    Args:
        healing: healing of the models.
        faults: faults of the batch whose gradients overflowed.
    """
    if not any(needs_low_scale(fault) for fault in faults):
        return ""
    names = healing.with_results
    for name in names:
        healing.heal(name)
    undo = "; ".join(f"amp.unheal({name!r})" for name in names)
    return (
        f"\nHealed: {_Tier(modules=tuple(names))} from now on, because gradients of half products "
        f"fit only at a loss scale below {GOOD_SCALE:g}; {undo} undoes it."
    )


def _tiers(healing: Healing, fault: FaultReport, module: str, whole: str) -> Iterator[_Tier]:
    """Yield the tiers that may cure a fault, the first one to try first."""
    remedy = fault.remedy
    if remedy is None or not remedy.knows_precision:  # nothing was tried
        if fault.event.is_product and module != whole and healing.policy.op_policy:
            yield _Tier(results=(module,))
        yield _Tier(modules=(module,))
        yield _Tier(modules=(whole,))
    elif remedy.in_tiers:
        yield _Tier(remedy.results, remedy.modules)
        yield _Tier(modules=remedy.in_tiers)
        yield _Tier(modules=(whole,))
    elif remedy.fp32:
        yield _Tier(modules=(whole,))
