"""``tritonamp.check``: predicts problems of half precision before training."""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tritonamp.casts.inputs import signature_of
from tritonamp.casts.loaded import half_parameters, loaded_dtype
from tritonamp.checks import check_cast_inputs, check_models
from tritonamp.diagnosis.terminal import fitted
from tritonamp.forecast.advice import findings_without_data
from tritonamp.forecast.comparing import compared
from tritonamp.forecast.cure import changes, cost_of, cure
from tritonamp.forecast.differences import Comparison
from tritonamp.forecast.dry_run import DryRun
from tritonamp.forecast.findings import Finding
from tritonamp.forecast.halves import other_halves, with_halves_cast
from tritonamp.forecast.loss_scale import Outlook, fitting_scale, outlook
from tritonamp.forecast.predictions import predictions
from tritonamp.forecast.recording import TensorRecord
from tritonamp.forecast.rehearsal import Rehearsal, rehearse
from tritonamp.forecast.results import Side
from tritonamp.forecast.running import GIVEN, Batch
from tritonamp.forecast.settling import OWN_FORWARD, settled
from tritonamp.forecast.streams import fp32_streams
from tritonamp.names import short
from tritonamp.policy import HALF_DTYPES, LEVELS, Policy, resolve
from tritonamp.runtime import scaler_for
from tritonamp.scaler import GradScaler

SHOWN = 12  # findings in the text


@dataclass(frozen=True)
class Forecast:
    """The result of ``check``. ``str()`` returns the report.

    Attributes:
        model: name of the model's class.
        findings: findings, worst first. Those with ``problem`` would spoil the training; the others
            are advice.
        formats: for "float16" and "bfloat16", the predicted overflow and underflow.
        policy: policy for ``enable``: the requested one with the necessary ``fp32_modules``,
            without harmful casts of inputs, and with a dynamic loss scale that starts at a fitting
            value. If no modules can be named, or FP32 does not help them, the same in bfloat16. If
            bfloat16 does not help either, or the device lacks it, FP32 (O0).
        asked: the requested policy, to which the findings refer.
        records: every result and gradient of the dry run, with amax, smallest magnitude and
            exponents.
        loss: loss of the dry run.
        device: device of the model.
        loss_name: the value that was taken as the loss, such as "output[1]".
        rehearsal: a few steps under ``policy`` on copies of model and optimizers; None for a policy
            in FP32.
        comparison: comparison with the level ``compare`` of ``check``; None without ``compare``.
        cost: bytes and FLOPs, in words, of the modules that ``policy`` widens; "" without any.
        trains: whether there was an optimizer.
    """

    model: str
    findings: tuple[Finding, ...]
    formats: dict[str, Outlook]
    policy: Policy
    asked: Policy
    records: tuple[TensorRecord, ...] = dataclasses.field(repr=False)
    loss: float
    device: torch.device
    loss_name: str
    rehearsal: Rehearsal | None
    comparison: Comparison | None = None
    cost: str = ""
    trains: bool = True

    @property
    def problems(self) -> tuple[Finding, ...]:
        """Findings that would spoil the training."""
        return tuple(finding for finding in self.findings if finding.problem)

    def scaler(self) -> GradScaler:
        """Return a new GradScaler that starts at the loss scale of ``policy``."""
        return scaler_for(self.policy, self.device)

    def __str__(self) -> str:
        compared = [] if self.comparison is None else [str(self.comparison)]
        return "\n".join([*map(fitted, _report(self)), *compared])


def check(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer] | None,
    batch: Any,
    loss_fn: Callable[[Any], Tensor] | None = None,
    *,
    level: str | Policy = "O2",
    dtype: torch.dtype | None = None,
    compare: str | Policy | None = None,
) -> Forecast:
    """Predict what overflows and vanishes in half, from one forward and backward in FP32 values.

    Model, optimizer, gradients, buffers and random states keep every bit, because copies run. If
    something is found, further runs try remedies. Then a few steps run under the resulting policy.

    Args:
        model: the model before ``enable``, on its device.
        optimizer: an optimizer, several, or None.
        batch: tuple of the model's positional inputs, or Mapping of its keywords.
        loss_fn: function from the model's output to a scalar loss. None takes ``output.loss`` or
            ``output["loss"]``, or without these the mean of the output's floating tensors.
        level: level to predict for, by name or as a Policy.
        dtype: torch.float16 or torch.bfloat16; None chooses as ``enable`` does.
        compare: level to compare with, by name or as a Policy. The batch then also runs at both
            levels, and ``Forecast.comparison`` compares their results in ulps. This takes the
            memory of all results of a forward and backward.

    Raises:
        ValueError: a wrong argument.
        RuntimeError: model, loss or backward fail in FP32.
    """
    if isinstance(model, (list, tuple)):
        raise ValueError(
            f"model: expected one torch.nn.Module, got {type(model).__name__}: check models one by "
            "one"
        )
    (model,) = check_models([model])
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if dtype is None and isinstance(level, str) and level in LEVELS:
        dtype = loaded_dtype(half_parameters([model]), device)
    policy = resolve(level, dtype)
    other = None if compare is None else resolve(compare, dtype)
    optimizers = _optimizers(optimizer)
    check_cast_inputs([model], policy)
    inputs = _inputs(model, batch)
    asked, policy = policy, with_halves_cast(model, inputs, policy)
    run = DryRun(model, inputs, loss_fn, policy)
    comparison = None
    if compare is not None and other is not None:
        sides = _side(level, policy, run), _side(compare, other, run)
        comparison = compared(model, inputs, loss_fn, *sides)
    findings = _sorted(
        [
            *findings_without_data(model, optimizers, loss_fn, policy),
            *predictions(run, policy),
            *fp32_streams(model, inputs, loss_fn, policy, run),
            *other_halves(policy, asked),
        ]
    )
    best = cure(model, inputs, loss_fn, policy, run, findings)
    findings = tuple(settled(model, inputs, loss_fn, policy, best, findings))
    rehearsal = _rehearsed(model, optimizers, inputs, loss_fn, best, findings)
    if not any(finding.problem for finding in findings):
        findings = (*_unforeseen(rehearsal), *findings)
    return Forecast(
        model=type(model).__name__,
        findings=findings,
        formats={short(half): outlook(run.records, half) for half in HALF_DTYPES},
        policy=best,
        asked=asked,
        cost=cost_of(model, policy, best, run.products, trains=bool(optimizers)),
        records=tuple(run.records),
        loss=run.loss,
        device=device,
        loss_name=run.loss_name,
        rehearsal=rehearsal,
        comparison=comparison,
        trains=bool(optimizers),
    )


def _optimizers(optimizer: Any) -> list[Optimizer]:
    """Return the argument ``optimizer`` of ``check`` as a list, or raise ValueError."""
    several = isinstance(optimizer, (list, tuple))
    found = list(optimizer) if several else [] if optimizer is None else [optimizer]
    for each in found:
        if not isinstance(each, Optimizer):
            raise ValueError(
                "optimizer: expected a torch.optim.Optimizer, a list of them, or None, got "
                f"{type(each).__name__}"
            )
    return found


def _rehearsed(
    model: nn.Module,
    optimizers: list[Optimizer],
    batch: Batch,
    loss_fn: Callable[[Any], Tensor] | None,
    policy: Policy,
    findings: Iterable[Finding],
) -> Rehearsal | None:
    """Return some steps under the policy, unless it is known that they cannot run."""
    kinds = {finding.kind for finding in findings}
    if _format(policy) == "FP32":
        return None
    if "non-finite" in kinds:
        return Rehearsal(unrun="the batch is not finite in FP32 either")
    if "refused by enable" in kinds:
        return Rehearsal(unrun="enable would refuse it")
    return rehearse(model, optimizers, batch, loss_fn, policy)


def _unforeseen(rehearsal: Rehearsal | None) -> Iterator[Finding]:
    """Yield a problem if steps under the policy fail, and the same steps in FP32 do not."""
    fp32 = rehearsal.in_fp32 if rehearsal is not None else None
    if rehearsal is not None and fp32 is not None and fp32.went_well:
        advice = f'level="O0" (tried: {fp32.seen})'
        yield Finding("failed steps", "forecast.policy", rehearsal.seen, advice)


def _side(level: str | Policy, policy: Policy, run: DryRun) -> Side:
    """Return a level to compare, with the loss scale at which its gradients fit."""
    name = f"{_format(policy)} ({level if isinstance(level, str) else 'the policy given'})"
    return Side(name, policy, fitting_scale(policy, run.records))


def _inputs(model: nn.Module, batch: Any) -> Batch:
    """Return a batch as arguments of forward; ValueError if a Mapping's keys do not fit it."""
    if not isinstance(batch, Mapping):
        return tuple(batch) if isinstance(batch, (tuple, list)) else (batch,), {}
    kwargs = dict(batch)
    try:
        inspect.signature(model.forward).bind(**kwargs)
    except TypeError as error:
        raise ValueError(
            f"batch: expected the keywords of {type(model).__name__}.forward"
            f"{signature_of(model.forward)}, got a Mapping of {', '.join(map(str, kwargs))} "
            f"({error}): a dict that is one input goes into a tuple, (batch,)"
        ) from error
    return (), kwargs


def _sorted(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the findings worst first, each once."""
    once = {(f.kind, f.where, f.why): f for f in findings}
    return tuple(
        sorted(once.values(), key=lambda f: (not f.problem, f.kind == "follows", -f.weight))
    )


def _report(forecast: Forecast) -> Iterator[str]:
    half = _format(forecast.asked)
    if not forecast.findings:
        rest = (
            f"{half}, {forecast.formats[half].which_scale}" if half != "FP32" else "FP32 throughout"
        )
        parts = forecast.comparison is not None and forecast.comparison.first is not None
        found = "nothing foreseen, but the levels part, see below" if parts else "nothing found"
        yield f"{found}: {forecast.model} in {rest}"
        if ran := _ran(forecast):
            yield ran
        return
    origins = [finding for finding in forecast.findings if finding.kind != "follows"]
    problems = sum(finding.problem for finding in origins)
    yield (
        f"{forecast.model} in {half}: {problems} problem{'s' * (problems != 1)}, "
        f"{len(origins) - problems} of advice"
    )
    for number, finding in enumerate(origins[:SHOWN], 1):
        line = f" ({finding.line})" if finding.line else ""
        yield f"{number}. {finding.where or OWN_FORWARD}{line}, {finding.kind}: {finding.why}"
        yield f"   -> {finding.advice}"
    follow, hidden = len(forecast.findings) - len(origins), len(origins) - SHOWN
    if hidden > 0:
        yield f"... and {hidden} more: forecast.findings"
    if follow:
        yield f"{follow} more result{'s' * (follow != 1)} after these would overflow too"
    if all(finding.kind != "non-finite" for finding in forecast.findings):
        for name, seen in forecast.formats.items():
            yield f"{name}: {seen}"
    yield _policy_line(forecast)
    if forecast.cost:
        yield f"cost of {forecast.cost}"
    if ran := _ran(forecast):
        yield ran


def _format(policy: Policy) -> str:
    return short(policy.dtype) if policy.cast_model or policy.op_policy else "FP32"


def _ran(forecast: Forecast) -> str:
    """Return the result of the rehearsal, and the name of a loss that ``loss_fn`` did not give."""
    loss = "" if forecast.loss_name == GIVEN else f"the loss is {forecast.loss_name}"
    ran = "" if forecast.rehearsal is None else str(forecast.rehearsal)
    return "; ".join(filter(None, [ran, loss]))


def _policy_line(forecast: Forecast) -> str:
    policy, asked = forecast.policy, forecast.asked
    arguments = "model, optimizer" if forecast.trains else "model"
    takes_it = f"tritonamp.enable({arguments}, policy=forecast.policy) takes it"
    if _format(policy) == "FP32":
        rest = ", as asked for" if policy == asked else f". {takes_it}"
        return f"policy: FP32: no mixed precision{rest}"
    changed = changes(policy, asked)
    return f"policy: {changed}. {takes_it}" if changed else "policy: as asked for"
