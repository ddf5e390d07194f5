"""The advice of each finding, with the result of trying it."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from torch import nn

from tritonamp.diagnosis.replay.edits import edits_of
from tritonamp.diagnosis.replay.user_calls import Patch
from tritonamp.forecast.cure import changes
from tritonamp.forecast.dry_run import DryRun
from tritonamp.forecast.findings import Finding
from tritonamp.forecast.predictions import predictions
from tritonamp.forecast.running import Batch, LossFn
from tritonamp.policy import O0, Policy

MOST = 3  # findings whose line is changed
EDITS = 7  # changes of a line, each in a dry run
FP32_MAY_HELP = ("overflow", "eps", "divisor")
OWN_FORWARD = "the model's own forward"
OWN = (
    "compute this on x.float() in disable_casts(), or make it a module of its own and keep that in "
    "FP32"
)


def settled(
    model: nn.Module,
    batch: Batch,
    loss_fn: LossFn | None,
    asked: Policy,
    policy: Policy,
    findings: Sequence[Finding],
) -> Iterator[Finding]:
    """Yield the findings, with advice that was tried on the batch or that says why it was not.

    Args:
        model: the model before ``enable``.
        batch: input of the dry run.
        loss_fn: loss of the dry run.
        asked: policy of the dry run.
        policy: the policy that ``cure`` found.
        findings: findings of the dry run, the worst first.
    """
    trials, changed = 0, _changed(policy, asked)
    for finding in findings:
        scale = finding.kind == "loss scale"
        cured = bool(finding.modules and finding.problem) or scale
        tried = [changed] if changed and cured else []
        edited = ""
        if finding.event is not None and trials < MOST:
            trials += 1
            patches = edits_of(finding.event, finding.kind in FP32_MAY_HELP)
            left = _trial(model, batch, loss_fn, asked, finding)
            edited = _patched(itertools.islice(patches, EDITS), left)
            tried.append(edited)
        advice = finding.advice or (OWN if finding.modules == ("",) else "")
        if scale and changed:  # it starts at another scale
            advice = ""
        if advice and not edited:
            tried.append(f"{advice} (not tried: {finding.untried})" if finding.untried else advice)
        yield dataclasses.replace(finding, advice=". Or ".join(filter(None, tried)))


def _changed(policy: Policy, asked: Policy) -> str:
    """Return the change of the policy that dry runs have tried, as advice; "" for none."""
    if policy == O0 != asked:
        return "FP32 throughout (modules in FP32 and bfloat16 were tried in vain)"
    fields = changes(dataclasses.replace(policy, init_scale=asked.init_scale), asked)
    return f"forecast.policy, {fields} (tried: the batch fits)" if fields else ""


def _trial(
    model: nn.Module, batch: Batch, loss_fn: LossFn | None, asked: Policy, finding: Finding
) -> Callable[[Patch], list[Finding] | None]:
    """Return the function for ``_patched`` that runs the batch with a changed line."""

    def left(patch: Patch) -> list[Finding] | None:
        try:
            run = DryRun(model, batch, loss_fn, asked, patch)
        except RuntimeError:
            return None
        found = [f for f in predictions(run, asked) if f.modules or f.kind == "non-finite"]
        key = (finding.kind, finding.where, finding.line)
        return None if any((f.kind, f.where, f.line) == key for f in found) else found

    return left


def _patched(patches: Iterable[Patch], left: Callable[[Patch], list[Finding] | None]) -> str:
    """Return the patch that leaves the fewest problems, as advice; "" if none helps.

    ``left`` tries a patch and returns the problems that are left, None if the patch does not help.
    """
    best, fewest = "", None
    for patch in patches:
        problems = left(patch)
        if problems == []:
            return f"{patch.words} (tried: no problem is left)"
        if problems and (fewest is None or len(problems) < fewest):
            first, fewest = problems[0], len(problems)
            where = first.where or OWN_FORWARD
            best = f"{patch.words} (tried: it helps; {first.kind} in {where} is left)"
    return best
