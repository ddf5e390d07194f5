"""Findings about a model and its optimizers that need no data."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tritonamp.casts.batch_invariance import notes
from tritonamp.casts.loaded import check_half_dtypes, half_parameters
from tritonamp.checks import check_optimizers
from tritonamp.forecast.findings import Finding, bce, early_gradients
from tritonamp.forecast.weights import averages, buffers, fp32_parameters, loaded_half, parameters
from tritonamp.names import short
from tritonamp.policy import HALF_DTYPES, Policy
from tritonamp.step.rules import keeps_fp32_state, zero_eps

_EARLY = {  # Liger-Kernel's losses, and our functions
    "LigerCrossEntropyLoss": "cross_entropy",
    "LigerFusedLinearCrossEntropyLoss": "linear_cross_entropy",
}


def findings_without_data(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    loss_fn: Callable[..., Any] | None,
    policy: Policy,
) -> list[Finding]:
    """Return all findings that need no data."""
    modules = dict(model.named_modules())
    losses = [*modules.items(), ("loss_fn", loss_fn)]
    return [
        *parameters(model, policy),
        *loaded_half(model, policy),
        *averages(modules, policy),
        *buffers(modules, policy),
        *_refused(model, optimizers, policy),
        *_optimizers(model, optimizers, policy),
        *(bce(path) for path, module in losses if isinstance(module, nn.BCELoss)),
        *_early_gradients(losses, policy),
        *_parallel(modules),
        *_bits_of_rows(policy),
    ]


def _refused(
    model: nn.Module, optimizers: Sequence[Optimizer], policy: Policy
) -> Iterator[Finding]:
    """Yield the error that ``enable`` would raise for the optimizers or for mixed half dtypes."""
    try:
        check_optimizers(optimizers, [model])
        check_half_dtypes(half_parameters([model]), policy)
    except ValueError as error:
        argument, _, text = str(error).partition(": ")
        why, _, advice = text.rpartition(": ")
        reason = "it changes the arguments of enable"
        yield Finding("refused by enable", argument, why, advice, weight=1e12, untried=reason)


def _optimizers(
    model: nn.Module, optimizers: Sequence[Optimizer], policy: Policy
) -> Iterator[Finding]:
    if policy.trains_fp32_values:
        return
    names = {p: name for name, p in model.named_parameters()}
    kept = {id(p) for p in fp32_parameters(model, policy)}
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        params = [(p, group) for group in optimizer.param_groups for p in group["params"]]
        half = [
            (p, g)
            for p, g in params
            if p.dtype in HALF_DTYPES or (policy.cast_model and id(p) not in kept and p in names)
        ]
        if not half or keeps_fp32_state(optimizer):
            continue
        first = half[0][0]
        name = names.get(first, f"a parameter of shape {tuple(first.shape)}")
        why = (
            f"{kind} steps on {len(half)} half parameters without FP32 master weights ({name}, "
            "...): small updates round away"
        )
        advice = 'use level "O2", or tritonamp.optim.AdamW'
        reason = "what rounds away is seen after many steps"
        yield Finding("no masters", name, why, advice, weight=1e10, untried=reason)
        dtype = first.dtype if first.dtype in HALF_DTYPES else policy.dtype
        found = (zero_eps(optimizer, group, dtype) for _, group in half)
        eps = next((eps for eps in found if eps is not None), None)
        if eps is not None:
            why = (
                f"{kind} has eps={eps:g} on half parameters: it is zero in {short(dtype)}, so the "
                "step divides by zero"
            )
            advice = 'use level "O2" (FP32 masters), or eps=1e-4'
            reason = "it changes the optimizer"
            yield Finding("adam eps", name, why, advice, weight=1e11, untried=reason)


def _early_gradients(losses: list[tuple[str, Any]], policy: Policy) -> Iterator[Finding]:
    """Yield losses that compute float16 gradients of the logits in the forward, before scaling."""
    if policy.dtype is not torch.float16 or not (policy.op_policy or policy.cast_model):
        return
    for path, module in losses:
        name = type(module).__name__
        if name in _EARLY:
            yield early_gradients(path, name, _EARLY[name])


def _parallel(modules: dict[str, nn.Module]) -> Iterator[Finding]:
    for path, module in modules.items():
        if isinstance(module, nn.DataParallel):
            why = (
                "DataParallel runs replicas in threads of their own, which autocast around it "
                "does not reach"
            )
            advice = "enable the module inside it, or use DistributedDataParallel"
            yield Finding("data parallel", path, why, advice)


def _bits_of_rows(policy: Policy) -> Iterator[Finding]:
    """Yield a finding for each request for rows with the same bits in every batch."""
    for note in notes(policy):
        reason = "one batch does not show it"
        weight = 0.5 if note.is_warning else 0.1
        yield Finding("batch invariance", "", note.why, note.advice, False, weight, untried=reason)
