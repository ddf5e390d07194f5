"""The same batch at two levels."""

import dataclasses

from torch import nn

from tritonamp.casts.fused_norms import recipe_of
from tritonamp.casts.written.conditions import activations_apart
from tritonamp.forecast.cure import with_fp32
from tritonamp.forecast.differences import Comparison
from tritonamp.forecast.results import Compared, Reference, Side
from tritonamp.forecast.running import Batch, LossFn, run_copy


def compared(
    model: nn.Module, batch: Batch, loss_fn: LossFn | None, asked: Side, reference: Side
) -> Comparison:
    """Run copies of a model at two levels, and compare every result.

    Model and random states keep every bit. The reference runs first, and each of its results is
    kept until its counterpart is compared. If the two part, both run again with that module in
    FP32.

    Raises:
        RuntimeError: the reference fails; the module is named.
    """
    found = _compared(model, batch, loss_fn, asked, reference)
    module = found.first.place.module if found.first else ""
    if not module or not asked.is_half:
        return found
    tried = asked._replace(policy=with_fp32(asked.policy, [module]))
    cured = _compared(model, batch, loss_fn, tried, reference)
    return dataclasses.replace(found, tried=cured)


def _compared(
    model: nn.Module, batch: Batch, loss_fn: LossFn | None, asked: Side, reference: Side
) -> Comparison:
    dtype = (asked if asked.is_half else reference).policy.dtype
    # an RMSNorm that the user wrote is one operation of ours at some levels
    wholes = {path for path, module in model.named_modules() if recipe_of(module) is not None}
    kept = Reference(reference, wholes)
    watch = Compared(asked, kept, dtype)
    got, failed = float("nan"), ""
    # as one op, an activation consists of other operations than in FP32
    with activations_apart():
        expected = float(run_copy(model, batch, loss_fn, reference.policy, kept).detach())
        try:
            got = float(run_copy(model, batch, loss_fn, asked.policy, watch).detach())
        except RuntimeError as error:
            failed = str(error).removeprefix("tritonamp.check: ")
    return Comparison(
        level=asked.name,
        reference=reference.name,
        dtype=dtype,
        differences=tuple(watch.differences),
        unmatched=watch.unmatched + (0 if failed else kept.left()),
        losses=(got, expected),
        failed=failed,
    )
