"""The policy that a forecast recommends: its FP32 modules, and its initial loss scale."""

import contextlib
import dataclasses
import math
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import nn

from tritonamp.casts.model_dtypes import wanted_dtypes
from tritonamp.diagnosis.remedies import Faulty, find_remedy
from tritonamp.diagnosis.replay import Remedy
from tritonamp.diagnosis.replay.costs import cost_in_words
from tritonamp.forecast.dry_run import DryRun
from tritonamp.forecast.findings import BATCH, Finding
from tritonamp.forecast.loss_scale import fitting_scale
from tritonamp.forecast.predictions import predictions
from tritonamp.forecast.running import Batch, LossFn
from tritonamp.forecast.weights import parameters
from tritonamp.kernels.device import UnsupportedDeviceError, check_dtype
from tritonamp.policy import HALF_DTYPES, INIT_SCALE, O0, Policy, resolve
from tritonamp.watched.products import Products

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
    softmax, FP32 results of products in modules, these modules in FP32, bfloat16. If none helps,
    the policy is O0. A batch that is not finite in FP32 either leaves the policy unchanged.
    """
    if any(finding.kind == "non-finite" for finding in findings):
        return policy  # no precision helps
    asked, wrong = policy, _wrong(findings, policy)

    def tried(new: Policy) -> Faulty:
        nonlocal policy, run, findings
        policy, run = new, DryRun(model, batch, loss_fn, new)
        findings = [*predictions(run, new), *parameters(model, new)]
        return _wrong(findings, new)

    def again(remedy: Remedy) -> Faulty:
        if remedy.in_tiers:
            return tried(with_fp32(policy, remedy.modules, remedy.results))
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        try:
            check_dtype(torch.bfloat16, device)
        except UnsupportedDeviceError:
            return {None: False}
        return tried(resolve(asked, torch.bfloat16, loss_scale=1.0, init_scale=INIT_SCALE))

    if policy.cast_inputs and policy.op_policy and any(f.where == BATCH for f in findings):
        with contextlib.suppress(RuntimeError):  # inputs in the other half format need their cast
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


def _wrong(findings: Iterable[Finding], policy: Policy) -> Faulty:
    """Return the paths of the modules that have to stay FP32; None for the model's own forward.

    FP32 results may cure a module if only its products overflow. Findings that only follow from
    another overflow count once the causes are in FP32, because a cure of the cause often cures them
    too.
    """
    problems = [finding for finding in findings if finding.problem]
    causes = {path for f in problems if f.kind != "follows" for path in f.modules}
    if causes <= {*policy.fp32_modules}:
        causes = {path for f in problems for path in f.modules}
    products = {path for f in problems for path in f.modules if f.of_product}
    products -= {path for f in problems for path in f.modules if not f.of_product}
    return {path or None: path in products and policy.op_policy for path in causes}


def with_fp32(policy: Policy, more: Iterable[str], results: Iterable[str] = ()) -> Policy:
    """Return ``policy`` with more modules, outermost ones only.

    Args:
        policy: policy to extend.
        more: paths for ``fp32_modules``.
        results: paths for ``fp32_results``; those inside of ``fp32_modules`` are left out.
    """
    modules = _outermost((*policy.fp32_modules, *more))
    kept = _outermost((*policy.fp32_results, *results))
    kept = [m for m in kept if m not in modules and not _is_inside(m, modules)]
    return dataclasses.replace(policy, fp32_modules=tuple(modules), fp32_results=tuple(kept))


def _outermost(selection: Collection[str | type]) -> list[str | type]:
    """Return the classes of a selection, and its paths without those inside of others."""
    classes = [kind for kind in selection if isinstance(kind, type)]
    names = sorted({name for name in selection if isinstance(name, str)})
    return [*dict.fromkeys(classes), *(n for n in names if not _is_inside(n, names))]


def _is_inside(module: str | type, others: Iterable[str | type]) -> bool:
    """Return whether a module's path lies inside of another one's; False for a class."""
    paths = [other for other in others if isinstance(other, str)]
    return isinstance(module, str) and any(module.startswith(f"{path}.") for path in paths)


def cost_of(
    model: nn.Module, asked: Policy, policy: Policy, products: Products, trains: bool
) -> str:
    """Return the cost of the modules that ``policy`` widens in words; "" without any.

    Args:
        model: the model before ``enable``.
        asked: the requested policy.
        policy: policy with more ``fp32_modules`` and ``fp32_results``.
        products: products of a forward.
        trains: whether there are optimizers.
    """
    if policy.dtype is not asked.dtype or not (policy.cast_model or policy.op_policy):
        return ""
    results, modules = (
        [m for m in of if isinstance(m, str) and m not in before]
        for of, before in (
            (policy.fp32_results, asked.fp32_results),
            (policy.fp32_modules, asked.fp32_modules),
        )
    )
    before, after = wanted_dtypes(model, asked), wanted_dtypes(model, policy)
    half = [p for p in model.parameters() if before.get(p, p.dtype) in HALF_DTYPES]
    wider = [p for p in half if after.get(p, p.dtype) is torch.float32]
    in_fp32 = dataclasses.replace(O0, state=asked.state, offload=asked.offload)
    # weight, gradient and master: a parameter in FP32 has no master
    trained = max(in_fp32.bytes_per_parameter() - asked.bytes_per_parameter(), 0)
    sizes = [(trained if trains and p.requires_grad else 2) * p.numel() for p in wider]
    return cost_in_words(products, results, modules, sum(sizes))


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
