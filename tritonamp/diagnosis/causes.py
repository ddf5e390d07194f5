"""Find the cause of a skip, from the device's numbers, the batch and the parameters."""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from tritonamp.diagnosis.kept_buffers import RUNNING
from tritonamp.diagnosis.odd_values import is_bounded, odd_moments, odd_weights, told
from tritonamp.diagnosis.overflows import cause_of_overflow, why_overflow
from tritonamp.diagnosis.replay.faults import BFLOAT16, WHOLE, listed, number
from tritonamp.diagnosis.skips import NO_STEPS, Cause, Explanation, Skip, Steps, Writer
from tritonamp.kernels._decision import FAULT, HUGE, OUTLIER, OVERFLOW, VETO
from tritonamp.watched.ops import nonfinite_samples

_SHOWN = 8  # names or samples in a text
_NOT_TRIED = "(Not tried: it would need the earlier steps again.)"
_BACKED_OFF = (
    " The loss scale was lowered all the same, because the device does not read the batch."
)

Batch = Sequence[tuple[str, Tensor]]
"""Tensors, each after its place among the arguments of a forward."""


def find_cause(
    skip: Skip, batches: Sequence[Batch], parameters: Mapping[Tensor, str], steps: Steps = NO_STEPS
) -> Explanation:
    """Find the cause of a skip.

    Waits for the device, unless a loss scale merely finds its level before the first step.

    Args:
        skip: skip as the device recorded it.
        batches: data of the forwards that led to the skip, where known.
        parameters: names of the parameters and buffers.
        steps: known facts of the steps before the skip.
    """
    if skip.outcome in (OUTLIER, HUGE):
        found = _in_values(skip, parameters, steps)
        if found is not None:
            return found
    if skip.outcome == OUTLIER:
        why = f"{_why_outlier(skip.outlier)}. {Cause.OUTLIER.advice}"
        return Explanation(skip, Cause.OUTLIER, why)
    if skip.outcome == VETO:
        where = f" on {skip.ranks}" if skip.ranks else ""
        why = f"amp.veto was called with True{where}. {Cause.VETO.advice}"
        return Explanation(skip, Cause.VETO, why)
    if skip.outcome == HUGE:
        return _of_squares(skip)
    if skip.outcome == FAULT:
        fault = (
            _in_data(skip, batches)
            or _in_values(skip, parameters, steps)
            or _in_steps(skip, parameters, steps)
            or _in_forward(skip, bool(batches))
        )
        return fault._replace(reason=fault.reason + _buffers(parameters))
    return _in_gradients(skip, batches, parameters, steps)


def _in_gradients(
    skip: Skip, batches: Sequence[Batch], parameters: Mapping[Tensor, str], steps: Steps
) -> Explanation:
    """Explain a skip because gradients were not finite, although the loss was."""
    names = tuple(name for name, amax in skip.amax.items() if not skip.is_good(amax))
    has_nan = any(math.isnan(amax) for amax in (*skip.amax.values(), *skip.by_rank.values()))
    found = _in_data(skip, batches, names) if has_nan else None
    if found is not None:
        return found
    cause = cause_of_overflow(skip, names)
    if cause is not Cause.SCALE:
        found = _in_values(skip, parameters, steps) or _in_steps(skip, parameters, steps)
    elif skip.before:  # a step was taken, which may have spoilt the weights
        found = _in_growth(skip, steps)
        found = found and (_in_values(skip, parameters, steps) or found)
    reason = why_overflow(skip, names, cause)
    search = cause.advice if cause is Cause.BACKWARD else ""
    return found or Explanation(skip, cause, reason, names, search=search)


def _why_outlier(numbers: Sequence[float]) -> str:
    """Return which numbers are beyond their limits, given ``Skip.outlier``."""
    loss, norm, sigmas = numbers[:3], numbers[3:6], numbers[6]
    beyond = [
        f"the {name} is {value:.4g}: the median of the last 63 steps is {usual:.4g}, and the limit "
        f"{limit:.4g} is {sigmas:.3g} standard deviations of {(limit - usual) / sigmas:.3g} above"
        for name, (value, usual, limit) in (("loss", loss), ("gradient norm", norm))
        if value > limit
    ]
    return "; ".join(beyond)


def _of_squares(skip: Skip) -> Explanation:
    """Explain a skip because squares of gradients would leave FP32."""
    names = tuple(name for name, amax in skip.amax.items() if skip.is_huge(amax))
    if not (names or skip.ranks):  # only sums are huge: over steps, or over a parameter
        names = tuple(sorted(skip.amax, key=skip.amax.__getitem__)[-1:])
    shown = listed([f"{name} ({skip.amax[name] / skip.scale:.2g})" for name in names])
    reason = (
        "the gradients were finite, but so large"
        + (f" on {skip.ranks}" if skip.ranks else "")
        + " that FP32 does not hold their squares, which the optimizer keeps"
        + (f": {shown}. " if shown else ". ")
        + Cause.HUGE.advice
    )
    return Explanation(skip, Cause.HUGE, reason, names)


def _in_values(skip: Skip, parameters: Mapping[Tensor, str], steps: Steps) -> Explanation | None:
    """Search the weights for single values that no training makes."""
    found = odd_weights(steps.writers, parameters)
    # other code wrote an inf or NaN if the parameters were not as a step left them
    odd = [value for value in found if skip.wrote or math.isfinite(value.value)]
    if skip.outcome == HUGE:  # gradients as large as this one may have made the value
        odd = [one for one in odd if is_bounded(one, steps.writers[one.name])]
    if not odd:
        return None
    names = dict.fromkeys(value.name for value in odd)
    writer = _writer(skip, [*names], steps.writers)
    lr = None if writer is None else writer.lr
    if writer is not None and (writer.zero_eps is not None or not math.isfinite(lr or 0.0)):
        return None  # the step divides by 0
    moments = [value for value in odd_moments(steps.writers) if value.name in names]
    reason = told(odd, steps.writers, _since(skip), moments)
    return Explanation(skip, Cause.PARAMETERS, reason, tuple(names))


def _since(skip: Skip) -> str:
    return f"since step {skip.since}" if skip.since < skip.step else f"at step {skip.step}"


def _in_steps(skip: Skip, parameters: Mapping[Tensor, str], steps: Steps) -> Explanation | None:
    """Search the parameters, as earlier steps left them, for the cause."""
    names = _nonfinite((p, name) for p, name in parameters.items() if isinstance(p, nn.Parameter))
    writer = _writer(skip, names, steps.writers)
    rounds_eps = writer is not None and writer.zero_eps is not None
    divergence = None if rounds_eps else _in_growth(skip, steps)
    if divergence is not None or not names:
        return divergence
    advice = _too_large(skip, names, steps.writers) or Cause.PARAMETERS.advice_of(skip)
    if writer is not None:
        advice = (
            f"Step {skip.wrote} wrote them ({writer}): {writer.fault}. {_NOT_TRIED} Load the "
            "last good checkpoint."
        )
    reason = (
        f"{len(names)} parameter(s) of the model were inf or NaN already, seen {_since(skip)}: "
        f"{listed(names)}. {advice}"
    )
    return Explanation(skip, Cause.PARAMETERS, reason, tuple(names))


def _in_growth(skip: Skip, steps: Steps) -> Explanation | None:
    """Search loss, gradients and weights for the growth of a training that has diverged."""
    growth = steps.growth()
    writers = [*{str(w): w for w in steps.writers.values() if w.lr is not None}.values()]
    away = [w for w in writers if w.decays_away]
    if skip.outcome == OVERFLOW and skip.before:
        # the overflow proves that gradients have grown at least so much since the last good step
        proved = skip.limit / (skip.scale * skip.before)
        is_finite = skip.scale > 1.0  # else no scale explains it
        growth = growth._replace(norm=max(growth.norm, proved), is_finite=is_finite)
    has_decayed = bool(away) and growth.largest[1] > growth.largest[0] > 0.0
    if not (growth.is_suspect or has_decayed):
        return None
    in_fp32 = None if steps.in_fp32 is None else steps.in_fp32()
    if not (has_decayed or growth.is_divergence(in_fp32)):
        return None
    reason = growth.words(in_fp32) + _against_growth(away, writers, steps.clips)
    return Explanation(skip, Cause.DIVERGENCE, reason)


def _against_growth(away: Sequence[Writer], writers: Sequence[Writer], clips: bool) -> str:
    """Return advice for a training that has diverged.

    Args:
        away: optimizers whose weight decay makes weights grow.
        writers: optimizers that have a learning rate.
        clips: whether the loop clips gradients already.
    """
    if away:
        w = away[0]
        assert w.lr is not None and w.decay is not None
        lower = "weight_decay" if w.decay > w.lr else "the learning rate"
        return (
            f"Lower {lower} ({w}, weight_decay={w.decay:g}): lr * weight_decay is "
            f"{w.lr * w.decay:g}, so each step multiplies the weights by {1 - w.lr * w.decay:g}. "
            f"A product below 1 makes them smaller. {_NOT_TRIED} {Cause.DIVERGENCE.advice}"
        )
    rates = sorted(map(str, writers))
    lower = f"Lower the learning rate{f' (now {listed(rates)})' if rates else ''}"
    may_clip = bool(writers) and not clips and all(w.can_be_clipped for w in writers)
    clip = " Clip gradients: amp.clip_grad_norm_(1.0)." if may_clip else ""
    return (
        f"{lower}, first to a tenth, warm it up over the first steps, and look for outliers in "
        f"data and targets.{clip} {_NOT_TRIED} {Cause.DIVERGENCE.advice}"
    )


def _too_large(skip: Skip, names: Sequence[str], writers: Mapping[str, Writer]) -> str:
    """Return advice if the half format alone cannot hold these parameters; else ""."""
    masters = [writers[name].master for name in names if name in writers]
    held = [m.detach() for m in masters if m is not None and m.numel()]  # a shard may be empty
    amax = [m.abs().max() for m in held]  # queued before one is read
    if len(amax) < len(names) or not all(skip.limit < float(m) < math.inf for m in amax):
        return ""
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    keep = f"Keep their modules in FP32: fp32_modules={modules}"
    if "" in modules:
        keep = f"Compute the whole model in FP32: {WHOLE}"
    wider = f", or train in bfloat16: {BFLOAT16}" if skip.in_float16 else ""
    return (
        f"Their FP32 masters are finite, but above {number(skip.limit)}, the largest number of the "
        f"half format. {keep}{wider}. (Not tried: print(amp.explain(replay=True)) tries it.)"
    )


def _writer(skip: Skip, names: Sequence[str], writers: Mapping[str, Writer]) -> Writer | None:
    """Return the optimizer that wrote these parameters, one at fault first, or None."""
    found = [writers[name] for name in names if name in writers] if skip.wrote else []
    at_fault = [writer for writer in found if writer.zero_eps is not None]
    return next(iter(at_fault or found), None)


def _in_forward(skip: Skip, knows_batch: bool) -> Explanation:
    batch = ", and the input batch was not" if knows_batch else ""
    if skip.ranks:
        batch = f" on {skip.ranks}{batch}"
    suspects = "the model and the loss" if knows_batch else "the batch, the model and the loss"
    advice = Cause.FORWARD.advice_of(skip).format(where=suspects)
    reason = f"the loss itself was inf or NaN (loss scale {skip.scale:g}){batch}. {advice}"
    return Explanation(skip, Cause.FORWARD, reason, search=advice[advice.index("Look in") :])


def _in_data(
    skip: Skip, batches: Sequence[Batch], parameters: tuple[str, ...] = ()
) -> Explanation | None:
    """Search the batches for inf and NaN.

    Args:
        skip: the skip.
        batches: data of the forwards.
        parameters: names of the parameters whose gradients were not finite.
    """
    found = []
    only_gradients = skip.outcome == OVERFLOW
    for batch in batches:
        for path, tensor in batch:
            bad = nonfinite_samples(tensor)
            if bad and not (only_gradients and _may_be_mask(tensor)):
                kind = "sample(s)" if tensor.dim() > 1 else "element(s)"
                shape = tuple(tensor.shape)
                which = (
                    f"all {len(bad)} {kind}"
                    if len(bad) == shape[0] > 1
                    else f"{kind} {listed(bad)}"
                )
                found.append(f"input {path}: inf or NaN in {which} of shape {shape}")
    if not found:
        return None
    where = f" of {skip.ranks}" if skip.ranks else ""
    became = "and gradients became NaN" if only_gradients else "and the loss became so, too"
    has_backed_off = only_gradients and not skip.fixed and skip.hysteresis == 1
    backed_off = _BACKED_OFF if has_backed_off else ""
    reason = (
        f"the input batch itself{where} held inf or NaN, {became}: "
        f"{'; '.join(found[:_SHOWN])}. {Cause.DATA.advice}{backed_off}"
    )
    return Explanation(skip, Cause.DATA, reason, parameters)


def _may_be_mask(tensor: Tensor) -> bool:
    """Return whether a tensor may be a mask to add to scores: nothing in it is above 0."""
    return bool((tensor <= 0.0).all())


def _buffers(parameters: Mapping[Tensor, str]) -> str:
    """Return a sentence about running statistics that are not finite: a skip does not undo them."""
    # other buffers may hold -inf on purpose: masks
    running = ((t, name) for t, name in parameters.items() if name.rpartition(".")[2] in RUNNING)
    names = _nonfinite(running)
    if not names:
        return ""
    return (
        " Running statistics are inf or NaN, too, and stay so until reset_running_stats(): "
        f"{listed(names)}. Evaluation uses them. on_nonfinite='explain' or 'heal' restores those "
        "that a step spoils."
    )


def _nonfinite(named: Iterable[tuple[Tensor, str]]) -> list[str]:
    dense = [(t, n) for t, n in named if t.is_floating_point() and t.layout is torch.strided]
    flags = [torch.isfinite(t.detach()).all() for t, _ in dense]  # queued before one is read
    return [name for flag, (_, name) in zip(flags, dense, strict=True) if not flag]
