"""``Policy``: which precision is used where; and the levels, which are values of it."""

import dataclasses
import difflib
import functools
import importlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tritonamp.kernels._state_formats import FORMATS

HALF_DTYPES = (torch.float16, torch.bfloat16)
STATES = tuple(FORMATS)  # formats of optimizer state
MASTERS = (None, "packed", "fp32")  # forms of FP32 masters
SELECTIONS = ("fp32_modules", "fp32_results")  # fields that select modules by name or class
ON_NONFINITE = ("skip", "explain", "heal", "raise")
INIT_SCALE = 2.0**16  # torch.amp.GradScaler's


@dataclass(frozen=True)
class Policy:
    """Which precision is used where; frozen.

    Make variants with ``dataclasses.replace`` or by keywords of ``enable``. All fields are checked
    together at construction; a conflict is a ValueError that says what to change.

    Attributes:
        dtype: half format, torch.float16 or torch.bfloat16.
        cast_model: parameters are stored in ``dtype``.
        keep_norms_fp32: normalisation layers, and modules that a model asks to keep in FP32, keep
            FP32 parameters (only with ``cast_model``; without it, such modules compute in FP32).
        op_policy: the forward runs under the op table (autocast plus overrides).
        master_weights: the optimizer steps on FP32 copies of the half parameters (only with
            ``cast_model`` or ``half_parameters``).
        loss_scale: "dynamic", or a fixed number; 1.0 means no scaling.
        init_scale: first value of a dynamic loss scale.
        cast_inputs: True: all FP32 tensors that the model is given are cast to ``dtype``. Names of
            ``forward``'s arguments, or positions from 0: only tensors in these arguments are cast.
            False: no tensor is cast. A dtype is read as True, None as False.
        cast_outputs: dtype of half tensors that the model returns; None: unchanged.
        softmax_dtype: output dtype of softmax on half input under the op policy. None: the input's
            dtype. torch.float32: as in torch.autocast. Softmax accumulates in FP32 either way.
        state_dict_dtype: dtype of ``model.state_dict()``: torch.float32, which a plain model loads,
            or ``dtype``.
        grad_dtype: torch.float32: gradients of half parameters are accumulated, and under DDP
            reduced, in FP32, at two more bytes per parameter. None: gradients have the parameters'
            dtype.
        state: format of optimizer state. "fp32"; "bf16": moments in bfloat16; "8bit": moments of
            one byte. The optimizer needs a fused step that keeps such state.
        masters: form of the FP32 masters (only with ``master_weights``). "packed": the half
            parameter and 16 more bits, with the same values (float16: those from 2^-14 on), for
            optimizers with a fused step. "fp32": FP32 tensors. None: "packed" if ``state`` is
            "8bit", else "fp32".
        offload: "state": FP32 masters and optimizer state stay in pinned host memory, and go
            through the device part by part while the optimizer steps, with the same bits. For CUDA
            devices and optimizers whose fused step works in parts, without FSDP2 and CUDA graphs.
            None: they stay on the device.
        half_parameters: True: parameters that are half before ``enable`` stay half. False: those
            that require gradients get FP32 values.
        fp32_modules: names ("encoder.head") or classes of modules whose parameters and arithmetic
            stay FP32. With several models, "1.head" is the module "head" of the second one, and
            "head" the module of that name in each model that has one.
        fp32_results: names or classes of modules whose matrix products take half operands and have
            FP32 results, at the speed of half products (only with ``op_policy``). Their
            convolutions compute in FP32. Parameters stay half. Norms that read the FP32 sums after
            such a module return half.
        fuse_norms: hand-written RMSNorms with the arithmetic of ``rms_norm`` run as ``rms_norm``
            (only with ``op_policy``).
        fuse_ops: activations that code writes out, such as the tanh form of GELU or ``silu(a) *
            b``, run as one op on half tensors, and half softmaxes and sigmoids whose logarithm code
            takes, or that the model returns, are FP32 (only with ``op_policy``).
        fuse_loss: a loss of half logits never copies them to FP32, neither the model's own
            (``labels=`` of transformers) nor ``torch.nn.functional.cross_entropy`` of its outputs.
            While gradients are recorded, the model returns half outputs as tensors that are widened
            when an operation reads them. Not the default because their class is not
            ``torch.Tensor``, they keep the half values while they live, the loss of half outputs
            (``cast_outputs=None``) is FP32, and logits that ``labels=`` left out cannot be read
            after a step of the optimizer.
        batch_invariant: a row of softmax, of a norm, of a sum or of a loss has the same bits alone
            and in every batch, forward and backward (only with ``op_policy``). The kernels then
            take every size and FP32 tensors, too, and choose tiles by the length of a row alone.
        on_nonfinite: response to a skip for which a lower scale cannot help. "skip": a line in the
            log. "explain": the failing batch runs again, and the operation is named. "heal": in
            addition, modules compute in FP32 from then on if that cures such faults. "raise":
            NonFiniteError.
            All but "skip" read the decision on the host at every step, and keep the gradients of
            the model's outputs until then.
        raise_after: number of faults in a row until "raise" raises.
        track_changes: one bit per element notes which weights have changed, for ``Amp.changes``
            (only with ``cast_model`` or ``half_parameters``).
        track_lost_updates: a second bit per element notes which weights the last step has changed,
            for "lost_updates" of ``Amp.stats``. ``Amp.changes`` works, too.
        skip_outliers: a step is skipped if its loss or gradient norm lies this many standard
            deviations above the last 63 steps; at most 4 of any 64 steps. None: no step is.
    """

    dtype: torch.dtype = torch.float16
    cast_model: bool = False
    keep_norms_fp32: bool = False
    op_policy: bool = False
    master_weights: bool = False
    loss_scale: str | float = 1.0
    init_scale: float = INIT_SCALE
    cast_inputs: bool | tuple[str | int, ...] = False
    cast_outputs: torch.dtype | None = None
    softmax_dtype: torch.dtype | None = None
    state_dict_dtype: torch.dtype = torch.float32
    grad_dtype: torch.dtype | None = None
    state: str = STATES[0]
    masters: str | None = None
    offload: str | None = None
    half_parameters: bool = False
    fp32_modules: tuple[str | type, ...] = ()
    fp32_results: tuple[str | type, ...] = ()
    fuse_norms: bool = True
    fuse_ops: bool = True
    fuse_loss: bool = False
    batch_invariant: bool = False
    on_nonfinite: str = "skip"
    raise_after: int = 1
    track_changes: bool = False
    track_lost_updates: bool = False
    skip_outliers: float | None = None

    def __post_init__(self) -> None:
        for name in SELECTIONS:
            object.__setattr__(self, name, _normalised_selection(name, getattr(self, name)))
        object.__setattr__(
            self, "cast_inputs", _normalised_cast_inputs(self.cast_inputs, self.dtype)
        )
        for name in ("loss_scale", "init_scale"):
            if _is_number(getattr(self, name)):
                object.__setattr__(self, name, float(getattr(self, name)))
        problems = [*_bad_values(self), *_conflicts(self)]
        if problems:
            raise ValueError("Policy: " + "; ".join(problems))

    def to_json(self) -> str:
        """Return the policy as text, for ``from_json``.

        Dtypes are written by name, classes in ``fp32_modules`` and ``fp32_results`` as
        "module:name".
        """
        return json.dumps(vars(self), default=_name, indent=2)

    @classmethod
    def from_json(cls, text: str) -> "Policy":
        """Return the policy that ``to_json`` wrote; missing fields have their defaults.

        The modules of the classes that ``fp32_modules`` and ``fp32_results`` name are imported.

        Raises:
            ValueError: ``text`` is no such text, or its fields contradict one another.
        """
        plain, known = json.loads(text), {field.name for field in dataclasses.fields(cls)}
        if not isinstance(plain, dict):
            raise ValueError(
                f"Policy.from_json: expected an object with keys of {', '.join(sorted(known))}, "
                f"got {type(plain).__name__}"
            )
        check_field_names(plain)
        for name in ("dtype", "cast_outputs", "softmax_dtype", "state_dict_dtype", "grad_dtype"):
            if isinstance(plain.get(name), str):
                plain[name] = getattr(torch, plain[name], plain[name])
        for field in SELECTIONS:
            named = plain.get(field, [])
            named = named if isinstance(named, list) else [named]
            plain[field] = [
                _named_class(field, m) if isinstance(m, str) and ":" in m else m for m in named
            ]
        return cls(**plain)

    @property
    def scales_loss(self) -> bool:
        """Whether gradients carry a loss scale, so that a plain ``loss.backward()`` is wrong."""
        return self.loss_scale != 1.0

    @property
    def trains_fp32_values(self) -> bool:
        """Whether trainable parameters have FP32 values: masters, or FP32 parameters."""
        return self.master_weights or not (self.cast_model or self.half_parameters)

    @property
    def tracks_changes(self) -> bool:
        """Whether steps note which weights have changed."""
        return self.track_changes or self.track_lost_updates

    def bytes_per_parameter(self, state: str | None = None) -> float:
        """Return the bytes that a parameter takes on its device in training with Adam or AdamW.

        The bytes are those of the parameter (half if this policy casts it) and its gradient, and,
        without ``offload``, of the FP32 master and both moments.

        Args:
            state: format of state; None: this policy's.

        Raises:
            ValueError: there is no such format.
        """
        if state not in (None, *STATES):
            raise ValueError(
                f"state: expected one of {', '.join(map(repr, STATES))}, got {state!r}"
            )
        state, is_half = state or self.state, self.cast_model or self.half_parameters
        parameter = 2 if is_half else 4
        grad = 4 if self.grad_dtype is not None else parameter
        if self.offload is not None:
            return float(parameter + grad)
        lower_bits = 2 if packs_masters(self.masters, state) else 4
        masters = lower_bits * (is_half and self.master_weights)
        return parameter + grad + masters + 2 * FORMATS[state].bytes_per_element()


def packs_masters(masters: str | None, state: str) -> bool:
    """Tell whether FP32 masters are packed, given their form and the format of the state."""
    return masters == "packed" or (masters is None and _in_blocks(state))


def _in_blocks(state: str) -> bool:
    # also asked before an unknown name is refused
    return state in STATES and FORMATS[state].in_blocks


def _normalised_selection(field: str, given: Any) -> tuple[str | type, ...]:
    """Return names and classes of modules as a tuple.

    Raises:
        ValueError: ``given`` has something else.
    """
    modules = (given,) if isinstance(given, (str, type)) else given
    modules = tuple(modules) if isinstance(modules, Iterable) else (modules,)
    if not all(isinstance(m, (str, type)) for m in modules):
        raise ValueError(f"{field}: expected module names and module classes, got {given!r}")
    return modules


def _normalised_cast_inputs(given: Any, dtype: torch.dtype) -> Any:
    """Return ``cast_inputs`` as a bool or a tuple.

    ``dtype`` and None become True and False, because ``cast_outputs`` takes a dtype or None.
    """
    if given is None or given is dtype:
        return given is not None
    if isinstance(given, str):
        return (given,)
    return tuple(given) or False if isinstance(given, Iterable) else given


def _name(value: torch.dtype | type) -> str:
    if isinstance(value, type):
        return f"{value.__module__}:{value.__qualname__}"
    return str(value).removeprefix("torch.")


def _named_class(field: str, text: str) -> type:
    module, _, name = text.partition(":")
    try:
        found = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{field}: no class {name!r} can be imported from {module!r}: {error}"
        ) from error
    if not isinstance(found, type):
        raise ValueError(
            f"{field}: expected the class of a module, got {text!r} of type {type(found).__name__}"
        )
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _bad_values(policy: Policy) -> Iterable[str]:
    if policy.dtype not in HALF_DTYPES:
        yield (
            f"dtype: expected torch.float16 or torch.bfloat16, got {policy.dtype!r}"
            + (_meant(policy.dtype, HALF_DTYPES) or " (for FP32 training use level='O0')")
        )
    for field in dataclasses.fields(policy):
        value = getattr(policy, field.name)
        if field.type is bool and not isinstance(value, bool):
            yield f"{field.name}: expected True or False, got {value!r}"
    if not isinstance(policy.cast_inputs, bool):
        yield from _bad_cast_inputs(policy.cast_inputs)
    scale = policy.loss_scale
    if scale != "dynamic" and (not _is_number(scale) or not 0 < float(scale) < math.inf):
        yield f"loss_scale: expected 'dynamic' or a positive finite number, got {scale!r}"
    if not _is_number(policy.init_scale) or not 0 < policy.init_scale < math.inf:
        yield f"init_scale: expected a positive finite number, got {policy.init_scale!r}"
    for name, (allowed, expected) in _choices(policy).items():
        value = getattr(policy, name)
        if value not in allowed:
            yield f"{name}: expected {expected}, got {value!r}{_meant(value, allowed)}"
    if (
        isinstance(policy.raise_after, bool)
        or not isinstance(policy.raise_after, int)
        or policy.raise_after < 1
    ):
        yield f"raise_after: expected a whole number from 1, got {policy.raise_after!r}"
    sigmas = policy.skip_outliers
    if sigmas is not None and not (_is_number(sigmas) and 0 < sigmas < math.inf):
        yield (
            "skip_outliers: expected None or how many standard deviations, a number above 0 such "
            f"as 6.0, got {sigmas!r}"
        )


def _meant(value: Any, allowed: Iterable[Any]) -> str:
    """Return ": did you mean 'heal'?" for a misspelt value, or "".

    Args:
        value: the wrong value. Only strings are compared.
        allowed: right values. A name such as "fp16" may stand for a dtype among these.
    """
    if not isinstance(value, str):
        return ""
    near: list[Any] = [dtype for dtype in allowed if dtype is not None and dtype is _named(value)]
    if near:
        return f": did you mean {near[0]}?"
    names = {name.lower(): name for name in allowed if isinstance(name, str)}
    near = difflib.get_close_matches(value.lower(), names, 1)
    return f": did you mean {names[near[0]]!r}?" if near else ""


def _named(dtype: str) -> torch.dtype | None:
    """Return the dtype that a name such as "fp16", "half" or "bf16-mixed" stands for, or None."""
    name = dtype.lower().removeprefix("torch.")
    if name in ("fp32", "float32", "float"):
        return torch.float32
    if name.startswith(("bf16", "bfloat16")):
        return torch.bfloat16
    return torch.float16 if name.startswith(("fp16", "float16", "16", "half")) else None


def _choices(policy: Policy) -> dict[str, tuple[tuple[Any, ...], str]]:
    """Return the values that a field can have, and their description, by name of the field."""
    fp32, half = torch.float32, policy.dtype
    kept = "None (gradients have their parameter's dtype) or torch.float32"
    return {
        "cast_outputs": ((None, fp32, *HALF_DTYPES), "torch.float32, a half dtype or None"),
        "softmax_dtype": ((None, fp32), "None (keep the input's dtype) or torch.float32"),
        "grad_dtype": ((None, fp32), kept),
        "state_dict_dtype": ((fp32, half), f"torch.float32 or the policy's {half}"),
        "state": (STATES, f"one of {', '.join(map(repr, STATES))}"),
        "masters": (MASTERS, f"one of {', '.join(map(repr, MASTERS))}"),
        "offload": ((None, "state"), "None or 'state'"),
        "on_nonfinite": (ON_NONFINITE, f"one of {', '.join(map(repr, ON_NONFINITE))}"),
    }


def _bad_cast_inputs(given: Any) -> Iterable[str]:
    named = given if isinstance(given, tuple) else (given,)
    wrong = [a for a in named if isinstance(a, bool) or not isinstance(a, (str, int))]
    if not isinstance(given, tuple) or wrong:
        yield (
            f"cast_inputs: expected True or False, got {given!r}; or a list of arguments of the "
            "model's forward that are cast, by name or position"
        )
    elif negative := [a for a in named if isinstance(a, int) and a < 0]:
        yield f"cast_inputs: expected positions from 0, got {negative[0]}"


def _conflicts(policy: Policy) -> Iterable[str]:
    if not policy.cast_model:
        if policy.master_weights and not policy.half_parameters:
            yield (
                "master_weights=True needs cast_model=True: with FP32 parameters the parameters "
                "are the masters (drop master_weights, or use level='O2')"
            )
        if policy.keep_norms_fp32:
            yield (
                "keep_norms_fp32=True needs cast_model=True: without it every parameter is FP32 "
                "already"
            )
    if policy.cast_inputs and not (policy.cast_model or policy.op_policy):
        yield (
            f"cast_inputs={policy.cast_inputs!r} needs cast_model=True or op_policy=True: FP32 "
            "layers refuse half inputs"
        )
    if policy.cast_model and not policy.op_policy and not policy.cast_inputs:
        yield (
            "cast_model=True with op_policy=False needs cast_inputs=True: half layers refuse FP32 "
            "inputs"
        )
    if policy.loss_scale != "dynamic" and policy.init_scale != INIT_SCALE:
        yield (
            f"init_scale={policy.init_scale:g} needs loss_scale='dynamic', got "
            f"{policy.loss_scale!r}: a fixed scale does not begin anywhere"
        )
    if _in_blocks(policy.state) and not policy.trains_fp32_values:
        yield (
            f"state={policy.state!r} needs FP32 values, master_weights=True: it holds their lower "
            "bits (use level='O2', or state='bf16')"
        )
    if policy.tracks_changes and not (policy.cast_model or policy.half_parameters):
        name = "track_changes" if policy.track_changes else "track_lost_updates"
        yield (
            f"{name}=True needs half weights, cast_model=True: it notes which of them a step has "
            "changed (use level='O2' or 'O3')"
        )
    if policy.masters == "fp32" and _in_blocks(policy.state):
        yield (
            "masters='fp32' needs state='fp32' or 'bf16': masters of "
            f"state={policy.state!r} are packed (leave masters out)"
        )
    if policy.masters == "packed" and not policy.master_weights:
        yield (
            "masters='packed' needs FP32 masters of half parameters, master_weights=True (use "
            "level='O2')"
        )
    if policy.softmax_dtype is not None and not policy.op_policy:
        yield "softmax_dtype needs op_policy=True: without the op policy softmax is plain torch"
    if policy.batch_invariant and not policy.op_policy:
        yield (
            "batch_invariant=True needs op_policy=True: without the op policy rows are torch's own "
            "(use level='O1' or 'O2')"
        )
    if policy.fp32_results and not policy.op_policy:
        yield (
            "fp32_results needs op_policy=True: without the op policy the half layers that follow "
            "refuse FP32 activations (use level='O1' or 'O2', or fp32_modules)"
        )
    if policy.fp32_modules and not (policy.cast_model or policy.op_policy):
        yield (
            "fp32_modules needs cast_model=True or op_policy=True: without them everything is FP32 "
            "already"
        )


O0 = Policy()
O1 = Policy(op_policy=True, loss_scale="dynamic", cast_outputs=torch.float32)
O2 = dataclasses.replace(O1, cast_model=True, keep_norms_fp32=True, master_weights=True)
O3 = Policy(cast_model=True, cast_inputs=True, cast_outputs=torch.float32)

LEVELS = {"O0": O0, "O1": O1, "O2": O2, "O3": O3}
BF16_LEVELS = {"O4": O1, "O5": O2}  # the names of the ROCm fork of apex
_NAMES = [*LEVELS, *BF16_LEVELS]


def resolve(level: str | Policy, dtype: torch.dtype | None = None, **fields: Any) -> Policy:
    """Return the policy for ``level`` with single fields overridden.

    Args:
        level: "O0" to "O3", "O4" and "O5" (O1 and O2 in bfloat16), or a Policy.
        dtype: half format; None: the level's own. bfloat16 has FP32's range, so a level's dynamic
            loss scale becomes 1.0 unless ``loss_scale`` is given.
        **fields: fields of Policy.

    Raises:
        ValueError: unknown level or field, or fields that contradict one another.
    """
    check_field_names(fields)
    base, named_dtype = _base_policy(level)
    if named_dtype is not None and dtype not in (None, named_dtype):
        raise ValueError(
            f"level={level!r}: expected {named_dtype}, got dtype={dtype}: drop dtype, or use 'O1' "
            "or 'O2'"
        )
    dtype = dtype or named_dtype
    if dtype is not None and dtype is not base.dtype:
        fields["dtype"] = dtype
        if dtype is torch.bfloat16 and isinstance(level, str):
            fields.setdefault("loss_scale", 1.0)
        if base.state_dict_dtype is base.dtype:
            fields.setdefault("state_dict_dtype", dtype)
    return dataclasses.replace(base, **fields) if fields else base


_SCALER = "scaler=tritonamp.GradScaler(...)"
_ELSEWHERE = {  # by name of an argument of torch.amp, apex, Lightning or Accelerate
    **dict.fromkeys(("backoff_factor", "growth_factor", "growth_interval", "hysteresis"), _SCALER),
    **dict.fromkeys(("max_loss_scale", "max_scale", "min_loss_scale", "min_scale"), _SCALER),
    **dict.fromkeys(("mixed_precision", "precision"), "level and dtype"),
    "enabled": "level='O0'",
    "num_losses": "loss_id of amp.backward",
}
_SLIP = 0.82  # of 1: least similarity of a misspelt name to the right one


def check_field_names(fields: Iterable[str], others: Iterable[str] = ()) -> None:
    """Refuse names that are no fields of Policy, and suggest the nearest right ones.

    Args:
        fields: names to check.
        others: names that are no fields but may be suggested.

    Raises:
        ValueError: lists the unknown names.
    """
    known = sorted(field.name for field in dataclasses.fields(Policy))
    unknown = sorted(set(fields) - {*known})
    if not unknown:
        return
    pairs = ((name, _nearest(name, known, others)) for name in unknown)
    meant = [f"{found[0]} for {name}" for name, found in pairs if found]
    hint = f": did you mean {', '.join(meant)}?" if meant else "."
    raise ValueError(
        f"expected fields of Policy, got the unknown {', '.join(unknown)}{hint} The fields are "
        f"{', '.join(known)}"
    )


def _nearest(name: str, fields: Sequence[str], others: Iterable[str]) -> list[str]:
    """Return the most similar right name, if any.

    Arguments of other libraries that have a place here win. Then come names with a
    slip, and fields whose words are all in ``name``.
    """
    if name in _ELSEWHERE:
        return [_ELSEWHERE[name]]
    slips = difflib.get_close_matches(name, [*fields, *others], 1, cutoff=_SLIP)
    if slips:
        return slips
    words = {*name.split("_")}
    contained = [field for field in fields if words.issuperset(field.split("_"))]
    if contained:
        return difflib.get_close_matches(name, contained, 1, cutoff=0)
    return difflib.get_close_matches(name, [*fields, *others], 1)


def _base_policy(level: str | Policy) -> tuple[Policy, torch.dtype | None]:
    if isinstance(level, Policy):
        return level, None
    if isinstance(level, str) and level in LEVELS:
        return LEVELS[level], None
    if isinstance(level, str) and level in BF16_LEVELS:
        return BF16_LEVELS[level], torch.bfloat16
    raise ValueError(
        f"level: expected {', '.join(map(repr, _NAMES))} or a tritonamp.Policy, got "
        f"{level!r}{_level_hint(level)}"
    )


def _level_hint(level: Any) -> str:
    """Return a hint at the level that a wrong name stands for; "" if none is near."""
    if isinstance(level, str) and level[:1] in ("0", "o") and f"O{level[1:]}" in _NAMES:
        return f" (it begins with the capital letter O, not the digit zero: 'O{level[1:]}')"
    dtype = level if isinstance(level, torch.dtype) else _named(str(level))
    if dtype in HALF_DTYPES:
        return f": did you mean dtype={dtype}?"
    return ": did you mean 'O0'?" if dtype is not None else _meant(str(level), _NAMES)
