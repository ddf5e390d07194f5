"""Problems in half, predicted from the measurements of a dry run."""

import math
from collections.abc import Iterable, Iterator

import torch

from tritonamp.forecast.dry_run import DryRun
from tritonamp.forecast.findings import Finding, bce, early_gradients, keep
from tritonamp.forecast.loss_scale import GONE, loss_scale
from tritonamp.forecast.recording import Hazard, TensorRecord
from tritonamp.forecast.unrounded import vanishing
from tritonamp.names import short
from tritonamp.policy import Policy

GATES = "sigmoid softmax exp softplus silu gelu elu erfc dropout threshold relu".split()
"""Ops whose results are often zero or nearly so. Their underflow is not reported."""

BATCH = "the batch"  # where a finding is that no module has
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


def predictions(run: DryRun, policy: Policy) -> Iterator[Finding]:
    """Yield the predicted problems of ``run`` in ``policy.dtype``."""
    if not any(hazard.kind == "infinite" for hazard in run.hazards):  # which FP32 would not have
        yield from _non_finite(run)
    if policy.cast_model or policy.op_policy:
        yield from _overflows(run.records, policy.dtype)
        yield from _vanishing(run.records, policy.dtype)
        yield from (_of_hazard(hazard, policy.dtype) for hazard in run.hazards)
        yield from loss_scale(run.records, policy)


def _non_finite(run: DryRun) -> Iterator[Finding]:
    reaches_gradients = any(r.op == "gradient" and r.sizes.nans for r in run.records)
    if math.isfinite(run.loss) and not reaches_gradients:
        return  # a NaN that is masked out again
    for r in run.records:
        made_here = r.sizes.nans and not any(source.sizes.nans for source in r.sources)
        if made_here and r.op != "parameter":
            why, cure = f"{_op(r)} gives NaN in FP32 already", "mend this first"
            if r.op == "input":
                why, cure = "the batch holds NaN", "drop or repair it, and check another batch"
            yield Finding("non-finite", r.module, why, cure, weight=1e29, line=r.place.line)
            return
    if not math.isfinite(run.loss):
        why = f"the loss is {run.loss} in FP32 already"
        yield Finding("non-finite", "", why, "mend this first", weight=1e28)


def _overflows(records: Iterable[TensorRecord], dtype: torch.dtype) -> Iterator[Finding]:
    worst: dict[tuple[object, ...], TensorRecord] = {}
    origins: set[tuple[object, ...]] = set()  # the first in a loop overflows by itself
    for r in records:
        made_by = {s.op for s in r.sources} if r.op == "to" else {r.op}
        if r.scaled or "parameter" in made_by or not _overflows_half(r, dtype):
            continue
        key: tuple[object, ...] = (r.place, r.op, r.backward)
        if not any(_overflows_half(source, dtype) for source in r.sources):
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
        advice = f"{remedy}. Or {keep(r.module)}" if remedy else keep(r.module)
        cures = () if r.op == "input" else (r.module,)
        if r.op == "input":
            advice = (
                "scale the data; cast_inputs=False keeps it in FP32 up to the first matrix product"
            )
        kind = "overflow" if key in origins else "follows"
        yield Finding(kind, _where(r), why, advice, True, ratio, cures, r.place.line)


def _overflows_half(r: TensorRecord, dtype: torch.dtype) -> bool:
    return r.half and not r.excused and r.sizes.overflows(dtype)


def _vanishing(records: Iterable[TensorRecord], dtype: torch.dtype) -> Iterator[Finding]:
    for r in records:
        if not r.half or r.backward or r.op == "parameter" or any(gate in r.op for gate in GATES):
            continue
        gone, *before = (vanishing(t.sizes.exponents, dtype) > GONE for t in (r, *r.sources))
        if gone and not any(before):
            why = f"{_op(r)} gives at most {r.sizes.amax:.2g}, which is zero in {short(dtype)}"
            cures, line = (r.module,), r.place.line
            yield Finding("vanishing", _where(r), why, keep(r.module), True, 1.0, cures, line)


def _where(r: TensorRecord) -> str:
    return BATCH if r.op == "input" else r.module


def _op(r: TensorRecord) -> str:
    name = NAMES.get(r.op, r.op.strip("_").removeprefix("native_"))
    return name + (" in backward" if r.backward else "")


def _of_hazard(hazard: Hazard, dtype: torch.dtype) -> Finding:
    kind, place, detail = hazard
    module, line = place.module or "", place.line
    half, info = short(dtype), torch.finfo(dtype)
    if kind == "bce":
        return bce(module, line)
    if kind == "early gradients":
        return early_gradients(module, detail, "linear_cross_entropy", line)
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
