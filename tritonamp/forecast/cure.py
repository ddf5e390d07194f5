"""The policy that a forecast recommends: its FP32 modules, and its initial loss scale."""

import dataclasses
import math
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from tritonamp.diagnosis.remedies import find_remedy
from tritonamp.diagnosis.replay import Remedy
from tritonamp.forecast.dry_run import DryRun
from tritonamp.forecast.findings import BATCH, Finding
from tritonamp.forecast.loss_scale import fitting_scale
from tritonamp.forecast.predictions import predictions
from tritonamp.forecast.running import Batch, LossFn
from tritonamp.forecast.weights import parameters
from tritonamp.kernels.device import UnsupportedDeviceError, check_dtype
from tritonamp.policy import INIT_SCALE, O0, Policy, resolve

ROUNDS = 6  # of trying which modules have to stay FP32


def cure(
    model: nn.Module,
    batch: Batch,
    loss_fn: LossFn | None,
    policy: Policy,
    run: DryRun,
    findings: Sequence[Finding],
) -> Policy:
    """Return ``policy``, with a remedy if it has problems, and a fitting initial loss scale.

    Remedies are tried by dry runs, in this order: inputs that are not cast, FP32 results of
    softmax, more modules in FP32, bfloat16. If none helps, the policy is O0. A batch that is not
    finite in FP32 either leaves the policy unchanged.
    """
    if any(finding.kind == "non-finite" for finding in findings):
        return policy  # no precision helps
    asked, wrong = policy, _wrong(findings, policy)

    def tried(new: Policy) -> set[str | None]:
        nonlocal policy, run, findings
        policy, run = new, DryRun(model, batch, loss_fn, new)
        findings = [*predictions(run, new), *parameters(model, new)]
        return _wrong(findings, new)

    def again(remedy: Remedy) -> set[str | None]:
        if remedy.modules:
            return tried(with_fp32(policy, remedy.modules))
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        try:
            check_dtype(torch.bfloat16, device)
        except UnsupportedDeviceError:
            return {None}
        return tried(resolve(asked, torch.bfloat16, loss_scale=1.0, init_scale=INIT_SCALE))

    if policy.cast_inputs and policy.op_policy and any(f.where == BATCH for f in findings):
        wrong = tried(dataclasses.replace(policy, cast_inputs=False))
    if policy.op_policy and policy.softmax_dtype is None and _zeros_of_softmax(findings):
        before, zeros = (policy, run, findings, wrong), _zeros_of_softmax(findings)
        wrong = tried(dataclasses.replace(policy, softmax_dtype=torch.float32))
        if _zeros_of_softmax(findings) >= zeros:
            policy, run, findings, wrong = before
    if wrong and not find_remedy(wrong, again, ROUNDS).helps:
        return O0
    if policy.loss_scale != "dynamic":
        return policy
    return dataclasses.replace(policy, init_scale=fitting_scale(policy, run.records))


def _zeros_of_softmax(findings: Iterable[Finding]) -> int:
    """Return the number of places that read zeros of a half softmax."""
    return sum(finding.kind == "softmax" for finding in findings)


def _wrong(findings: Iterable[Finding], policy: Policy) -> set[str | None]:
    """Return the paths of the modules that have to stay FP32; None for the model's own forward.

    Findings that only follow from another overflow count once the causes are in FP32, because a
    cure of the cause often cures them too.
    """
    problems = [finding for finding in findings if finding.problem]
    causes = {path for f in problems if f.kind != "follows" for path in f.modules}
    if causes <= {*policy.fp32_modules}:
        causes = {path for f in problems for path in f.modules}
    return {path or None for path in causes}


def with_fp32(policy: Policy, more: Iterable[str]) -> Policy:
    """Return ``policy`` with the paths ``more`` in ``fp32_modules``, outermost modules only."""
    classes = [kind for kind in policy.fp32_modules if isinstance(kind, type)]
    names = {*more, *(name for name in policy.fp32_modules if isinstance(name, str))}
    outermost = [n for n in sorted(names) if not any(n.startswith(f"{m}.") for m in names)]
    return dataclasses.replace(policy, fp32_modules=(*classes, *outermost))


def changes(policy: Policy, asked: Policy) -> str:
    """Return the fields in which ``policy`` differs from the one asked for."""
    changed = [
        f"{field.name}={_value(policy, field.name)}"
        for field in dataclasses.fields(policy)
        if getattr(policy, field.name) != getattr(asked, field.name)
    ]
    return ", ".join(changed)


def _value(policy: Policy, name: str) -> str:
    value = getattr(policy, name)
    return f"2.0**{math.log2(value):.0f}" if name == "init_scale" else repr(value)
