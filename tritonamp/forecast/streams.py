"""Finds FP32 inputs that become FP32 residual streams, and tries their cast to half.

A sum of a half and an FP32 tensor is FP32. So an FP32 input to which a model adds half results,
such as ``inputs_embeds``, stays FP32 through all layers at O2.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tritonamp.casts.inputs import cast_arguments, signature_of
from tritonamp.casts.tree import to_half
from tritonamp.forecast.dry_run import DryRun
from tritonamp.forecast.findings import Finding
from tritonamp.forecast.predictions import predictions
from tritonamp.forecast.recording import MARKED, TensorRecord
from tritonamp.forecast.running import Batch, LossFn
from tritonamp.forecast.unrounded import values_of
from tritonamp.kernels.device import widened
from tritonamp.policy import Policy

ADDS = ("add", "add_")
ROUNDINGS = 16
"""Largest tolerated change of gradients by a rounded input, in eps of the half format."""

Argument = str | int
"""An argument of a forward: its name, or its position if ``*args`` takes it."""


def fp32_streams(
    model: nn.Module, batch: Batch, loss_fn: LossFn | None, policy: Policy, run: DryRun
) -> Iterator[Finding]:
    """Yield advice about FP32 inputs to which half results are added more than once.

    The ``cast_inputs`` in the advice is tried: a run under it must have no new problem, and its
    gradients must be the same up to rounding.

    Args:
        model: the model before ``enable``.
        batch: input of the dry run.
        loss_fn: loss of the dry run.
        policy: policy of the dry run.
        run: the dry run.
    """
    additions = _additions(run) if policy.cast_model and policy.op_policy else {}
    if not additions:
        return
    already = () if isinstance(policy.cast_inputs, bool) else policy.cast_inputs
    wanted = (*already, *additions)
    tried = dataclasses.replace(policy, cast_inputs=wanted)
    rounded = cast_arguments(*batch, wanted, signature_of(model.forward), to_half(policy.dtype))
    as_asked = _GradientsKept(model, batch, loss_fn, policy)
    try:
        with_cast = _GradientsKept(model, rounded, loss_fn, tried)
    except RuntimeError:  # an operation refuses the half input
        return
    before, after = _bytes(as_asked), _bytes(with_cast)
    if after >= before:
        return
    moved = _moved(as_asked.values, with_cast.values)
    is_fine = moved <= ROUNDINGS * torch.finfo(policy.dtype).eps
    is_fine &= _problems(with_cast, tried) <= _problems(as_asked, policy)
    what = f"cast_inputs={list(wanted)}"
    saved = f"results of the forward take {after / 2**20:.3g} MiB instead of {before / 2**20:.3g}"
    advice = f"{what} makes them half, tried on this batch: {saved}"
    if not is_fine:
        advice = f"leave it: with {what} {saved}, but gradients of this batch move by {moved:.1%}"
    yield _finding(run, additions, advice)


def _finding(run: DryRun, additions: dict[Argument, list[TensorRecord]], advice: str) -> Finding:
    every = {id(record) for records in additions.values() for record in records}
    first = next(record for record in run.made if id(record) in every)
    names = [name if isinstance(name, str) else f"input {name}" for name in additions]
    because = f"{' and '.join(names)} {'are' if len(names) > 1 else 'is'} FP32"
    why = f"{len(every)} sums with half results are FP32, because {because}"
    return Finding("FP32 stream", first.module, why, advice, False, line=first.place.line)


def _additions(run: DryRun) -> dict[Argument, list[TensorRecord]]:
    """Return, by argument, the FP32 sums of half results and tensors that stem from an FP32 input.

    Arguments with a single sum are left out, because it may add a prediction and a target.
    """
    given = {id(record): argument for record, argument in run.inputs}
    sums: dict[int, dict[Argument, int]] = {}  # how many each record holds
    found: dict[Argument, list[TensorRecord]] = {}
    for record in _forward(run):
        held: dict[Argument, int] = {}
        for source in record.sources:
            for argument, count in sums.get(id(source), {}).items():
                held[argument] = max(held.get(argument, 0), count)
        if id(record) in given:
            held = {given[id(record)]: 0}
        elif record.op in ADDS and any(source.half for source in record.sources):
            held = {argument: count + 1 for argument, count in held.items()}
            for argument in held:
                found.setdefault(argument, []).append(record)
        sums[id(record)] = {} if record.half else held
    longest = {a: max(held.get(a, 0) for held in sums.values()) for a in found}
    return {argument: found[argument] for argument in found if longest[argument] > 1}


def _forward(run: DryRun) -> list[TensorRecord]:
    return [record for record in run.made if not record.backward]


class _GradientsKept(DryRun):
    """A dry run that keeps the values of its gradients and its loss."""

    def __init__(self, *args: Any) -> None:
        self.values: list[Tensor] = []
        super().__init__(*args)
        self.values.append(torch.tensor(self.loss))

    def marked(self, op: str, tensor: Tensor, parameter: str = "") -> None:
        super().marked(op, tensor, parameter)
        if op == "gradient":
            self.values.append(values_of(tensor.detach()))


def _moved(before: list[Tensor], after: list[Tensor]) -> float:
    """Return the norm of all differences relative to the norm of ``before``."""
    pairs = zip(before, after, strict=True)
    difference = sum(float(widened(a - b).square().sum()) for a, b in pairs)
    total = sum(float(widened(value).square().sum()) for value in before)
    return (difference / total) ** 0.5 if total else 0.0


def _problems(run: DryRun, policy: Policy) -> set[tuple[str, str]]:
    return {(found.kind, found.where) for found in predictions(run, policy) if found.problem}


def _bytes(run: DryRun) -> int:
    """Return the bytes of all results of the forward."""
    results = [record for record in _forward(run) if record.op not in MARKED]
    return sum(torch.Size(r.shape).numel() * (2 if r.half else 4) for r in results)
