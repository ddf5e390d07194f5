"""The policy that a forecast recommends: what has to be FP32, tried out; where the scale begins."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from tritonamp.forecast.dry_run import DryRun, dry_run
from tritonamp.forecast.findings import Finding
from tritonamp.forecast.loss_scale import fitting_scale
from tritonamp.forecast.predictions import BATCH, predictions
from tritonamp.forecast.running import Batch
from tritonamp.forecast.weights import parameters
from tritonamp.kernels.device import UnsupportedDeviceError, check_dtype
from tritonamp.policy import INIT_SCALE, O0, Policy, resolve

ROUNDS = 6  # of trying which modules have to stay FP32


def cure(
    model: nn.Module,
    batch: Batch,
    loss_fn: Any,
    policy: Policy,
    run: DryRun,
    findings: Sequence[Finding],
) -> Policy:
    """Return the policy with as many modules in FP32 as it takes, else in bfloat16, else FP32.

    Each is tried out.
    """
    tried = policy
    for number in range(ROUNDS):
        # what follows from an overflow is often mended with it
        late = number >= ROUNDS // 2
        causes = [f for f in findings if f.problem and (f.kind != "follows" or late)]
        wanted = {path for finding in causes for path in finding.modules}
        in_batch = any(finding.where == BATCH for finding in findings)
        if tried.cast_inputs and tried.op_policy and in_batch:
            tried = dataclasses.replace(tried, cast_inputs=False)
        elif run.rounded:
            tried = dataclasses.replace(tried, cast_inputs=run.cast_inputs)
        elif not wanted:
            return _with_scale(tried, run)
        elif "" in wanted or (wanted <= {*tried.fp32_modules} and late):
            break  # the model's own forward cannot stay FP32 alone
        else:
            tried = dataclasses.replace(tried, fp32_modules=_with(tried.fp32_modules, wanted))
        run = dry_run(model, batch, loss_fn, tried)
        findings = [*predictions(run, tried), *parameters(model, tried)]
    return _wider(model, batch, loss_fn, policy)


def _with_scale(policy: Policy, run: DryRun) -> Policy:
    """Return ``policy`` with a dynamic loss scale that begins where it fits."""
    if policy.loss_scale != "dynamic":
        return policy
    return dataclasses.replace(policy, init_scale=fitting_scale(policy, run.records))


def _with(fp32_modules: Iterable[str | type], more: set[str]) -> tuple[str | type, ...]:
    """Return ``fp32_modules`` and ``more``, without modules inside others that are named."""
    classes = [kind for kind in fp32_modules if isinstance(kind, type)]
    names = more | {name for name in fp32_modules if isinstance(name, str)}
    return *classes, *(
        n for n in sorted(names) if not any(n.startswith(f"{other}.") for other in names)
    )


def _wider(model: nn.Module, batch: Batch, loss_fn: Any, policy: Policy) -> Policy:
    """Return ``policy`` in bfloat16, where the device has it and that is enough, or O0."""
    wider = resolve(policy, torch.bfloat16, loss_scale=1.0, init_scale=INIT_SCALE)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    try:
        check_dtype(torch.bfloat16, device)
    except UnsupportedDeviceError:
        return O0
    run = dry_run(model, batch, loss_fn, wider)
    findings = [*predictions(run, wider), *parameters(model, wider)]
    if any(finding.modules and finding.problem for finding in findings):
        return O0
    return dataclasses.replace(wider, cast_inputs=run.cast_inputs)
