"""``tritonamp.check``: what half precision would do to a model, said before it is trained."""

import dataclasses
import json
import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tritonamp.casts.loaded import loaded_dtype
from tritonamp.checks import check_models
from tritonamp.forecast.advice import look
from tritonamp.forecast.dry_run import dry_run
from tritonamp.forecast.findings import Finding, short
from tritonamp.forecast.predictions import BATCH, MIN_SCALE, Outlook, outlook, predictions
from tritonamp.forecast.recording import TensorRecord
from tritonamp.forecast.weights import parameters
from tritonamp.kernels.device import UnsupportedDeviceError, check_dtype
from tritonamp.policy import HALF_DTYPES, LEVELS, O0, Policy, resolve

ROUNDS = 6  # of trying which modules have to stay FP32
SHOWN = 12  # findings in the text
OWN_FORWARD = "the model's own forward"


@dataclass(frozen=True)
class Forecast:
    """What ``check`` found. ``str()`` of it is the report.

    Attributes:
        model: the name of its class.
        findings: worst first; those with ``problem`` would spoil the training, the others are
            advice.
        formats: "float16" and "bfloat16" to what each would make of the values.
        policy: for ``enable``: the one asked for, with the modules in ``fp32_modules`` that have to
            stay FP32. Where that does not help, bfloat16 or, on devices without it, FP32.
        asked: the policy that the findings are about.
        records: every result and gradient of the dry run, with amax, smallest magnitude and
            exponents.
        loss: of the dry run.
    """

    model: str
    findings: tuple[Finding, ...]
    formats: dict[str, Outlook]
    policy: Policy
    asked: Policy
    records: tuple[TensorRecord, ...] = dataclasses.field(repr=False)
    loss: float

    @property
    def problems(self) -> tuple[Finding, ...]:
        """Findings that would spoil the training."""
        return tuple(finding for finding in self.findings if finding.problem)

    def __str__(self) -> str:
        return "\n".join(_report(self))

    def as_dict(self) -> dict[str, Any]:
        """Return the forecast as plain values, for JSON."""
        return {
            "model": self.model,
            "loss": self.loss if math.isfinite(self.loss) else str(self.loss),
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "formats": {
                name: {**dataclasses.asdict(o), "dtype": name, "fits": o.fits}
                for name, o in self.formats.items()
            },
            "policy": json.loads(self.policy.to_json()),
            "asked": json.loads(self.asked.to_json()),
            "records": [_plain(record) for record in self.records],
        }


def check(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer] | None,
    batch: Any,
    loss_fn: Callable[[Any], Tensor] | None = None,
    *,
    level: str | Policy = "O2",
    dtype: torch.dtype | None = None,
) -> Forecast:
    """Predict what overflows and vanishes in half, from one forward and backward in FP32 values.

    Model, optimizer, gradients, buffers and random states stay as they are, bit for bit: a copy is
    run. Where something is found, further runs try which modules have to stay FP32.

    Args:
        model: before ``enable``, on its device.
        optimizer: the one, several, or None.
        batch: the tuple of the model's positional inputs.
        loss_fn: gives a scalar for the model's output; None: the mean of its floating tensors.
        level: what to predict for, a level's name or a Policy.
        dtype: torch.float16 or torch.bfloat16; None: as ``enable`` chooses.

    Raises:
        ValueError: arguments that are not what they should be.
        RuntimeError: model, loss or backward fail in FP32 already.
    """
    if isinstance(model, (list, tuple)):
        raise ValueError(
            f"model: expected one torch.nn.Module, got {type(model).__name__}: check models one by "
            "one"
        )
    (model,) = check_models([model])
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if dtype is None and isinstance(level, str) and level in LEVELS:
        dtype = loaded_dtype([model], device)
    policy = resolve(level, dtype)
    optimizers: list[Any] = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    optimizers = [] if optimizer is None else optimizers
    for each in optimizers:
        if not isinstance(each, Optimizer):
            raise ValueError(
                "optimizer: expected a torch.optim.Optimizer, a list of them, or None, got "
                f"{type(each).__name__}"
            )
    inputs = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
    findings = [*look(model, optimizers, loss_fn, policy)]
    run = dry_run(model, inputs, loss_fn, policy)
    findings += predictions(run, policy)
    return Forecast(
        model=type(model).__name__,
        findings=_sorted(findings),
        formats={short(half): outlook(run.records, half) for half in HALF_DTYPES},
        policy=_cure(model, inputs, loss_fn, policy, findings),
        asked=policy,
        records=tuple(run.records),
        loss=run.loss,
    )


def _cure(
    model: nn.Module, batch: Any, loss_fn: Any, policy: Policy, findings: Sequence[Finding]
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
        elif not wanted:
            return tried
        elif "" in wanted or (wanted <= {*tried.fp32_modules} and late):
            break  # the model's own forward cannot stay FP32 alone
        else:
            tried = dataclasses.replace(tried, fp32_modules=_with(tried.fp32_modules, wanted))
        findings = [
            *predictions(dry_run(model, batch, loss_fn, tried), tried),
            *parameters(model, tried),
        ]
    return _wider(model, batch, loss_fn, policy)


def _with(fp32_modules: Iterable[str | type], more: set[str]) -> tuple[str | type, ...]:
    """Return ``fp32_modules`` and ``more``, without modules inside others that are named."""
    classes = [kind for kind in fp32_modules if isinstance(kind, type)]
    names = more | {name for name in fp32_modules if isinstance(name, str)}
    return *classes, *(
        n for n in sorted(names) if not any(n.startswith(f"{other}.") for other in names)
    )


def _wider(model: nn.Module, batch: Any, loss_fn: Any, policy: Policy) -> Policy:
    """Return ``policy`` in bfloat16, where the device has it and that is enough, or O0."""
    wider = resolve(policy, torch.bfloat16, loss_scale=1.0)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    try:
        check_dtype(torch.bfloat16, device)
    except UnsupportedDeviceError:
        return O0
    findings = [
        *predictions(dry_run(model, batch, loss_fn, wider), wider),
        *parameters(model, wider),
    ]
    return O0 if any(finding.modules and finding.problem for finding in findings) else wider


def _sorted(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the findings worst first, each once."""
    once = {(f.kind, f.where, f.why): f for f in findings}
    return tuple(
        sorted(once.values(), key=lambda f: (not f.problem, f.kind == "follows", -f.weight))
    )


def _plain(record: TensorRecord) -> dict[str, Any]:
    kept = ("op", "shape", "half", "parameter", "backward", "scaled")
    sizes = {name: getattr(record.sizes, name) for name in ("amax", "amin", "nans", "exponents")}
    return {
        "module": record.place.module,
        "line": record.place.line,
        **{n: getattr(record, n) for n in kept},
        **sizes,
    }


def _report(forecast: Forecast) -> Iterator[str]:
    half = short(forecast.asked.dtype)
    if not forecast.findings:
        mixed = forecast.asked.cast_model or forecast.asked.op_policy
        rest = f"{half}, {_scale(forecast.formats[half])}" if mixed else "FP32 throughout"
        yield f"nothing found: {forecast.model} in {rest}"
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
        yield from _wrapped(f"{name}: {_forward(seen)}; {_backward(seen)}", "    ")
    yield from _wrapped(_policy_line(forecast), "    ")


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, 118, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _forward(seen: Outlook) -> str:
    return (
        f"{seen.overflows} of {seen.stored} results overflow, {seen.vanishing:.2%} of their values "
        f"become zero, {seen.subnormal:.2%} lose bits"
    )


def _backward(seen: Outlook) -> str:
    text = (
        f"{_scale(seen)}, {seen.grad_vanishing:.2%} of gradient values become zero at loss scale 1"
    )
    if seen.scale == 1 or not seen.fits:
        return text
    return f"{text}, {seen.scaled_vanishing:.2%} at {_power(seen.scale)}"


def _scale(seen: Outlook) -> str:
    if seen.max_scale < MIN_SCALE:
        return f"no loss scale fits, the gradient in {seen.limited_by} overflows at every one"
    if seen.lost:
        return (
            f"no loss scale fits, at {_power(seen.max_scale)} the gradient of {seen.lost[0]} is "
            "zero"
        )
    limit = ""
    if seen.limited_by:
        limit = f" ({_power(seen.max_scale)} is the largest, for {seen.limited_by})"
    return f"loss scale {_power(seen.scale)} fits{limit}"


def _power(scale: float) -> str:
    return f"2^{math.log2(scale):.0f}" if scale != 1 else "1"


def _policy_line(forecast: Forecast) -> str:
    policy, asked = forecast.policy, forecast.asked
    fields = [field.name for field in dataclasses.fields(policy)]
    changed = [
        f"{name}={getattr(policy, name)!r}"
        for name in fields
        if getattr(policy, name) != getattr(asked, name)
    ]
    if not changed:
        return "policy: as asked for"
    return (
        f"policy: {', '.join(changed)}. tritonamp.enable(model, optimizer, "
        "policy=forecast.policy) takes it"
    )
