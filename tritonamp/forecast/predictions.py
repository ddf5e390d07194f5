"""Problems in half, predicted from the measurements of a dry run."""

import math
from collections.abc import Iterable, Iterator

import torch

from tritonamp.diagnosis.replay.known_ops import is_product
from tritonamp.forecast.dry_run import DryRun
from tritonamp.forecast.events import event_of
from tritonamp.forecast.findings import BATCH, LOSS, Finding, bce, early_gradients
from tritonamp.forecast.loss_scale import GONE, loss_scale
from tritonamp.forecast.non_finite import non_finite, root_of
from tritonamp.forecast.recording import IN_BACKWARD, Hazard, TensorRecord
from tritonamp.forecast.unrounded import vanishing
from tritonamp.names import short
from tritonamp.policy import Policy

GATES = "sigmoid softmax exp softplus silu gelu elu erfc dropout threshold relu".split()
"""Ops whose results are often zero or nearly so. Their underflow is not reported."""
_FACTORS = "a product of large factors, as in a gate; scale one of them down"

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
    records, hazards = run.records, list(run.hazards)
    in_half = any(hazard.kind == "infinite" for hazard in hazards)  # inf that FP32 would not have
    root = None if in_half else root_of(run)
    if root is None and not in_half and not math.isfinite(run.loss):
        why = f"the loss is {run.loss} in FP32 already"
        yield Finding("non-finite", LOSS, why, "look at it in FP32", weight=1e28)
    if root is not None:
        yield from non_finite(root, policy.dtype)
        records = [record for record in records if not record.sizes.broken]
        hazards = [hazard for hazard in hazards if hazard.place != root.record.place]
    if policy.cast_model or policy.op_policy:
        yield from _overflows(records, policy.dtype)
        yield from _vanishing(records, policy.dtype)
        yield from (_of_hazard(hazard, policy.dtype) for hazard in hazards)
        if root is None:
            yield from loss_scale(records, policy)


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
        why = f"{r.name} {verb} {r.sizes.amax:.3g}, {ratio:.3g} times the largest {short(dtype)}"
        op = r.name.removesuffix(IN_BACKWARD)
        advice = next((remedy for remedy, ops in REMEDIES.items() if op in ops.split()), "")
        cures = () if r.op == "input" else (r.module,)
        if op == "mul" and len({id(source) for source in r.sources}) > 1:
            advice = _FACTORS  # a matrix product that reads it would cast an FP32 result to half
        if r.op == "input":
            advice = (
                "scale the data; cast_inputs=False keeps it in FP32 up to the first matrix product"
            )
        kind = "overflow" if key in origins else "follows"
        event = event_of(r, dtype) if kind == "overflow" and not r.module else None
        line, of_product = r.place.line, is_product(r.op) and not r.backward
        yield Finding(
            kind,
            _where(r),
            why,
            advice,
            True,
            ratio,
            cures,
            line,
            event=event,
            of_product=of_product,
        )


def _overflows_half(r: TensorRecord, dtype: torch.dtype) -> bool:
    return r.half and not r.excused and r.sizes.overflows(dtype)


def _vanishing(records: Iterable[TensorRecord], dtype: torch.dtype) -> Iterator[Finding]:
    for r in records:
        if not r.half or r.backward or r.op == "parameter" or any(gate in r.op for gate in GATES):
            continue
        gone, *before = (vanishing(t.sizes.exponents, dtype) > GONE for t in (r, *r.sources))
        if gone and not any(before):
            why = f"{r.name} gives at most {r.sizes.amax:.2g}, which is zero in {short(dtype)}"
            cures, line = (r.module,), r.place.line
            yield Finding("vanishing", _where(r), why, "", True, 1.0, cures, line)


def _where(r: TensorRecord) -> str:
    return BATCH if r.op == "input" else LOSS if r.place.module is None else r.module


def _of_hazard(hazard: Hazard, dtype: torch.dtype) -> Finding:
    kind, place, detail = hazard.kind, hazard.place, hazard.detail
    module, line = place.module or "", place.line
    where = LOSS if place.module is None else module
    half, info = short(dtype), torch.finfo(dtype)
    beyond = f"{detail}: the largest number of {half} is {info.max:.5g}"
    if kind == "bce":
        return bce(where, line)
    if kind == "early gradients":
        return early_gradients(where, detail, "linear_cross_entropy", line)
    if kind == "function":
        why = f"the autograd Function {detail} does not say what it does under autocast"
        advice = (
            'decorate forward with torch.amp.custom_fwd(device_type="cuda") and backward with '
            "custom_bwd"
        )
        return Finding(kind, where, why, advice, False, line=line)
    weight, why, advice = {
        "constant": (
            1e3,
            f"{beyond}, so torch refuses it or makes it inf",
            'for masks use float("-inf") or torch.finfo(x.dtype).min',
        ),
        "infinite": (
            1e3,
            beyond,
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
        "softmax": (
            1.3,
            f"{detail}, a probability of a softmax that is zero in {half}: inf or NaN",
            "compute the softmax on x.float()",
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
    event = hazard.event if kind == "softmax" or not module else None
    return Finding(kind, where, why, advice, True, weight, (module,), line, event=event)
