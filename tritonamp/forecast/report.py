"""``tritonamp.check``: predicts problems of half precision before training."""

import dataclasses
import inspect
import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tritonamp.casts.inputs import signature_of
from tritonamp.casts.loaded import half_parameters, loaded_dtype
from tritonamp.checks import check_cast_inputs, check_models
from tritonamp.forecast.advice import findings_without_data
from tritonamp.forecast.comparing import compared
from tritonamp.forecast.cure import cure
from tritonamp.forecast.differences import Comparison
from tritonamp.forecast.dry_run import DryRun
from tritonamp.forecast.findings import Finding
from tritonamp.forecast.loss_scale import Outlook, fitting_scale, outlook
from tritonamp.forecast.predictions import predictions
from tritonamp.forecast.recording import TensorRecord
from tritonamp.forecast.results import Side
from tritonamp.forecast.running import Batch
from tritonamp.forecast.streams import fp32_streams
from tritonamp.names import short
from tritonamp.policy import HALF_DTYPES, LEVELS, Policy, resolve
from tritonamp.runtime import scaler_for
from tritonamp.scaler import GradScaler

SHOWN = 12  # findings in the text
OWN_FORWARD = "the model's own forward"


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
        comparison: comparison with the level ``compare`` of ``check``; None without ``compare``.
    """

    model: str
    findings: tuple[Finding, ...]
    formats: dict[str, Outlook]
    policy: Policy
    asked: Policy
    records: tuple[TensorRecord, ...] = dataclasses.field(repr=False)
    loss: float
    device: torch.device
    comparison: Comparison | None = None

    @property
    def problems(self) -> tuple[Finding, ...]:
        """Findings that would spoil the training."""
        return tuple(finding for finding in self.findings if finding.problem)

    def scaler(self) -> GradScaler:
        """Return a new GradScaler that starts at the loss scale of ``policy``."""
        return scaler_for(self.policy, self.device)

    def __str__(self) -> str:
        compared = [] if self.comparison is None else [str(self.comparison)]
        return "\n".join([*_report(self), *compared])


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

    Model, optimizer, gradients, buffers and random states keep every bit, because a copy runs. If
    something is found, further runs try which modules have to stay FP32.

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
    optimizers: list[Any] = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    optimizers = [] if optimizer is None else optimizers
    for each in optimizers:
        if not isinstance(each, Optimizer):
            raise ValueError(
                "optimizer: expected a torch.optim.Optimizer, a list of them, or None, got "
                f"{type(each).__name__}"
            )
    check_cast_inputs([model], policy)
    inputs = _inputs(model, batch)
    run = DryRun(model, inputs, loss_fn, policy)
    comparison = None
    if compare is not None and other is not None:
        asked, reference = _side(level, policy, run), _side(compare, other, run)
        comparison = compared(model, inputs, loss_fn, asked, reference)
    findings = [
        *findings_without_data(model, optimizers, loss_fn, policy),
        *predictions(run, policy),
        *fp32_streams(model, inputs, loss_fn, policy, run),
    ]
    return Forecast(
        model=type(model).__name__,
        findings=_sorted(findings),
        formats={short(half): outlook(run.records, half) for half in HALF_DTYPES},
        policy=cure(model, inputs, loss_fn, policy, run, findings),
        asked=policy,
        records=tuple(run.records),
        loss=run.loss,
        device=device,
        comparison=comparison,
    )


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
        return
    origins = [finding for finding in forecast.findings if finding.kind != "follows"]
    problems = sum(finding.problem for finding in origins)
    yield (
        f"{forecast.model} in {half}: {problems} problem{'s' * (problems != 1)}, "
        f"{len(origins) - problems} of advice"
    )
    for number, finding in enumerate(origins[:SHOWN], 1):
        line = f" ({finding.line})" if finding.line else ""
        yield from _wrapped(
            f"{number}. {finding.where or OWN_FORWARD}{line}, {finding.kind}: {finding.why}", "   "
        )
        yield from _wrapped(f"   -> {finding.advice}", "      ")
    follow, hidden = len(forecast.findings) - len(origins), len(origins) - SHOWN
    if hidden > 0:
        yield f"... and {hidden} more: forecast.findings"
    if follow:
        yield f"{follow} more result{'s' * (follow != 1)} after these would overflow too"
    for name, seen in forecast.formats.items():
        yield from _wrapped(f"{name}: {seen}", "    ")
    yield from _wrapped(_policy_line(forecast), "    ")


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, 118, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _format(policy: Policy) -> str:
    return short(policy.dtype) if policy.cast_model or policy.op_policy else "FP32"


def _policy_line(forecast: Forecast) -> str:
    policy, asked = forecast.policy, forecast.asked
    takes_it = "tritonamp.enable(model, optimizer, policy=forecast.policy) takes it"
    if _format(policy) == "FP32":
        rest = ", as asked for" if policy == asked else f". {takes_it}"
        return f"policy: FP32: no mixed precision{rest}"
    changed = [
        f"{field.name}={_value(policy, field.name)}"
        for field in dataclasses.fields(policy)
        if getattr(policy, field.name) != getattr(asked, field.name)
    ]
    return f"policy: {', '.join(changed)}. {takes_it}" if changed else "policy: as asked for"


def _value(policy: Policy, name: str) -> str:
    value = getattr(policy, name)
    return f"2.0**{math.log2(value):.0f}" if name == "init_scale" else repr(value)
