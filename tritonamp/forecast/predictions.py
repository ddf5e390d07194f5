"""From what a dry run measured to what would go wrong in half, and which loss scale fits."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from tritonamp.forecast.dry_run import DryRun
from tritonamp.forecast.findings import Finding, bce, keep, short
from tritonamp.forecast.recording import Note, TensorRecord
from tritonamp.forecast.unrounded import pooled, rounds_to_inf
from tritonamp.policy import Policy

MAX_SCALE, MIN_SCALE = 2.0**24, 2.0**-24  # of GradScaler
MARGIN = 4.0  # between the largest scale that fits this batch and the one recommended
# share of a tensor that becomes zero: less is how a peaked softmax, or a closed gate, looks
GONE = 0.99
NOISE = 2.0**-16  # a sum this much smaller than its terms is what FP32 leaves of a zero

GATES = "sigmoid softmax exp softplus silu gelu elu erfc dropout threshold relu".split()
"""Ops that are zero, or nearly, for much of their input: tiny results of theirs are not missed."""

BATCH, LOSS = "the batch", "the loss"  # where a finding is that no module has
NAMES = {
    "addmm": "linear",
    "mm": "matmul",
    "bmm": "matmul",
    "baddbmm": "matmul",
    "to": "the cast to half",
}
REMEDIES = {
    "a sum of products of large values; normalise or scale down its inputs": (
        "linear matmul convolution"
    ),
    "on x.float() it fits; in half, dividing by the inf gives zeros and no NaN": "mul pow square",
    "a sum of many values; sum in FP32": "sum cumsum mean add",
    "exp of more than 11 does not fit; subtract the maximum first": "exp expm1 sinh cosh",
    "the divisor is small": "div reciprocal rsqrt",
}


@dataclass(frozen=True)
class Outlook:
    """What one half format would make of the values of a dry run.

    Attributes:
        dtype: the half format.
        stored: how many results of the forward the policy stores in half.
        overflows: how many of them overflow.
        vanishing: share of their values, other than zero, that become zero.
        subnormal: share of their values that keep fewer bits.
        grad_vanishing: share of the gradients' values, other than zero, that become zero at loss
            scale 1.
        max_scale: the largest power of two at which no gradient overflows, at most 2^24.
        limited_by: the gradient that would overflow next.
        scale: the loss scale recommended: ``max_scale`` with a margin.
        scaled_vanishing: ``grad_vanishing`` at ``scale``.
        lost: parameters whose gradients are zero even at ``max_scale``.
    """

    dtype: torch.dtype
    stored: int
    overflows: int
    vanishing: float
    subnormal: float
    grad_vanishing: float
    max_scale: float
    limited_by: str
    scale: float
    scaled_vanishing: float
    lost: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether any loss scale works."""
        return self.max_scale >= MIN_SCALE and not self.lost


def outlook(records: Sequence[TensorRecord], dtype: torch.dtype) -> Outlook:
    """Read ``records`` as if ``dtype`` were the half format."""
    stored = [r for r in records if r.half and not r.scaled]
    grads = [r for r in records if r.half and r.scaled]
    top = max(grads, key=lambda r: r.sizes.amax, default=None)
    max_scale = largest_scale(0.0 if top is None else top.sizes.amax, dtype)
    scale = 1.0 if dtype is torch.bfloat16 and max_scale >= 1 else max_scale / MARGIN
    values, slopes = pooled(r.sizes for r in stored), pooled(r.sizes for r in grads)
    return Outlook(
        dtype=dtype,
        stored=len(stored),
        overflows=sum(r.sizes.overflows(dtype) and not r.excused for r in stored),
        vanishing=values.vanishing(dtype),
        subnormal=values.subnormal(dtype),
        grad_vanishing=slopes.vanishing(dtype),
        max_scale=max_scale,
        limited_by="" if top is None else top.parameter or top.place.module or LOSS,
        scale=scale,
        scaled_vanishing=slopes.vanishing(dtype, scale),
        lost=_lost(records, dtype, max_scale),
    )


def largest_scale(amax: float, dtype: torch.dtype) -> float:
    """Return the largest power of two, at most 2^24, times which ``amax`` does not overflow."""
    if amax == 0:
        return MAX_SCALE
    scale = 2.0 ** math.floor(math.log2(rounds_to_inf(dtype) / amax))
    return min(scale if amax * scale < rounds_to_inf(dtype) else scale / 2, MAX_SCALE)


def _lost(records: Iterable[TensorRecord], dtype: torch.dtype, scale: float) -> tuple[str, ...]:
    """Return the parameters whose gradients pass through half and are zero there."""
    return tuple(
        r.parameter
        for r in records
        if r.op == "gradient" and (r.half or any(s.half for s in r.sources))
        if r.sizes.vanishing(dtype, scale) > GONE and not _is_noise(r)
    )


def _is_noise(gradient: TensorRecord) -> bool:
    """Return whether rounding alone explains a gradient.

    That of a key's bias in attention, for example, is zero but for rounding.
    """
    terms = [source.sizes.amax for made_by in gradient.sources for source in made_by.sources]
    limit = NOISE * math.prod(min(1.0, amax) for amax in terms)
    return bool(terms) and gradient.sizes.amax <= limit


def predictions(run: DryRun, policy: Policy) -> Iterator[Finding]:
    """Yield what would go wrong in ``policy.dtype``."""
    if not any(note.kind == "infinite" for note in run.notes):  # which FP32 would not have
        yield from _non_finite(run)
    if policy.cast_model or policy.op_policy:
        yield from _overflows(run.records, policy.dtype)
        yield from _vanishing(run.records, policy.dtype)
        yield from (_of_note(note, policy.dtype) for note in run.notes)
        yield from _loss_scale(run.records, policy)


def _non_finite(run: DryRun) -> Iterator[Finding]:
    reaches_gradients = any(r.op == "gradient" and r.sizes.nans for r in run.records)
    if math.isfinite(run.loss) and not reaches_gradients:
        return  # a NaN that is masked out again
    for r in run.records:
        if (
            r.sizes.nans
            and not any(source.sizes.nans for source in r.sources)
            and r.op != "parameter"
        ):
            why = f"{_op(r)} gives NaN in FP32 already"
            yield Finding(
                "non-finite", r.place.module, why, "mend this first", weight=1e29, line=r.place.line
            )
            return
    if not math.isfinite(run.loss):
        yield Finding(
            "non-finite",
            "",
            f"the loss is {run.loss} in FP32 already",
            "mend this first",
            weight=1e28,
        )


def _overflows(records: Iterable[TensorRecord], dtype: torch.dtype) -> Iterator[Finding]:
    worst: dict[tuple[object, ...], TensorRecord] = {}
    origins: set[tuple[object, ...]] = set()  # the first in a loop overflows by itself
    for r in records:
        of_parameter = r.op == "parameter" or (
            r.op == "to" and any(s.op == "parameter" for s in r.sources)
        )
        if (
            r.half
            and not r.scaled
            and not r.excused
            and not of_parameter
            and r.sizes.overflows(dtype)
        ):
            key: tuple[object, ...] = (r.place, r.op, r.backward)
            if not any(s.half and not s.excused and s.sizes.overflows(dtype) for s in r.sources):
                origins.add(key)
            if key not in worst or r.sizes.amax > worst[key].sizes.amax:
                worst[key] = r
    for key, r in worst.items():
        ratio = r.sizes.amax / torch.finfo(dtype).max
        verb = "holds" if r.op == "input" else "gives"
        why = f"{_op(r)} {verb} {r.sizes.amax:.3g}, {ratio:.3g} times the largest {short(dtype)}"
        remedy = next(
            (remedy for remedy, ops in REMEDIES.items() if NAMES.get(r.op, r.op) in ops.split()), ""
        )
        advice = f"{remedy}. Or {keep(r.place.module)}" if remedy else keep(r.place.module)
        cures = () if r.op == "input" else (r.place.module,)
        if r.op == "input":
            advice = (
                "scale the data; cast_inputs=False keeps it in FP32 up to the first matrix product"
            )
        kind = "overflow" if key in origins else "follows"
        yield Finding(kind, _where(r), why, advice, True, ratio, cures, r.place.line)


def _vanishing(records: Iterable[TensorRecord], dtype: torch.dtype) -> Iterator[Finding]:
    for r in records:
        if not r.half or r.backward or r.op == "parameter" or any(gate in r.op for gate in GATES):
            continue
        if r.sizes.vanishing(dtype) > GONE and not any(
            s.sizes.vanishing(dtype) > GONE for s in r.sources
        ):
            why = f"{_op(r)} gives at most {r.sizes.amax:.2g}, which is zero in {short(dtype)}"
            yield Finding(
                "vanishing",
                _where(r),
                why,
                keep(r.place.module),
                True,
                1.0,
                (r.place.module,),
                r.place.line,
            )


def _where(r: TensorRecord) -> str:
    return BATCH if r.op == "input" else r.place.module


def _op(r: TensorRecord) -> str:
    name = NAMES.get(r.op, r.op.strip("_").removeprefix("native_"))
    return name + (" in backward" if r.backward else "")


def _of_note(note: Note, dtype: torch.dtype) -> Finding:
    kind, (module, line), detail = note
    half, info = short(dtype), torch.finfo(dtype)
    if kind == "bce":
        return bce(module, line)
    if kind == "function":
        why = f"the autograd Function {detail} does not say what it does under autocast"
        advice = (
            'decorate forward with torch.amp.custom_fwd(device_type="cuda") and backward with '
            "custom_bwd"
        )
        return Finding(kind, module, why, advice, False, line=line)
    weight, why, advice = {
        "constant": (
            1e3,
            f"{detail}: {half} ends at {info.max:.5g}, so torch refuses it or makes it inf",
            'for masks use float("-inf") or torch.finfo(x.dtype).min',
        ),
        "infinite": (
            1e3,
            f"{detail}: {half} ends at {info.max:.5g}",
            "make it in FP32, or of smaller values",
        ),
        "eps": (
            0.9,
            f"{detail}, which is zero in {half}: its smallest number is "
            f"{info.smallest_normal * info.eps:.1g}",
            "compute this on x.float(), or use a larger eps",
        ),
        "divisor": (
            1.1,
            f"{detail}, which is zero in {half}: inf or NaN",
            "compute this on x.float()",
        ),
        "refused": (
            1e5,
            f"torch refuses the dtypes: {detail}",
            "cast one of them, as in y.to(x.dtype)",
        ),
        "thread": (
            1e4,
            "it runs in a thread of its own, which autocast around the model does not reach",
            "enable the module that the thread runs",
        ),
    }[kind]
    kind = "constant" if kind == "infinite" else kind
    return Finding(kind, module, why, f"{advice}. Or {keep(module)}", True, weight, (module,), line)


def _loss_scale(records: Sequence[TensorRecord], policy: Policy) -> Iterator[Finding]:
    seen, half = outlook(records, policy.dtype), short(policy.dtype)
    if policy.loss_scale == "dynamic":
        if seen.fits:
            return
        why = "the gradient overflows at every loss scale"
        if seen.max_scale >= MIN_SCALE:
            largest = (
                f"2^{math.log2(seen.max_scale):.0f}, the largest loss scale at which it does not "
                "overflow"
            )
            why = f"at {largest}, the gradient of {seen.lost[0]} is zero"
        limit = rounds_to_inf(policy.dtype) / (seen.max_scale * MARGIN)
        cures = tuple(
            sorted(
                {r.place.module for r in records if r.half and r.scaled and r.sizes.amax >= limit}
            )
        )
        advice = f"keep {seen.limited_by!r} in FP32, or use bfloat16"
        yield Finding("loss scale", seen.limited_by, why, advice, True, 1.2, cures)
        return
    fixed = float(policy.loss_scale)
    lost = _lost(records, policy.dtype, fixed)
    if fixed > seen.max_scale:
        why = f"at loss scale {fixed:g} the gradient of {seen.limited_by} overflows {half}"
        yield Finding("loss scale", seen.limited_by, why, 'loss_scale="dynamic"', weight=1e4)
    if lost:
        why = f"at loss scale {fixed:g} the gradient of {len(lost)} parameters is zero in {half}"
        yield Finding("loss scale", lost[0], why, 'loss_scale="dynamic"', weight=1e4)
