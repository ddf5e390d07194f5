"""Why a step was skipped: from what the device noted about it, and from the batch and the
parameters where needed.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten_with_path

from tritonamp.kernels.decide import FAULT, OVERFLOW

_FP32_MAX = torch.finfo(torch.float32).max
# times the gradients of the step before: more than a scale that is looking for its level runs into
_SUDDEN = 256
_RUNNING = ("running_mean", "running_var")  # other buffers may hold -inf on purpose: masks
_SHOWN = 8  # names or samples in a text

DATA, FORWARD, SCALE, BACKWARD, PARAMETERS, EXHAUSTED = CAUSES = (
    "data",
    "forward fault",
    "scale overflow",
    "backward fault",
    "bad parameters",
    "scale exhausted",
)
REASONS = {OVERFLOW: SCALE, FAULT: FORWARD}  # as far as the device alone can tell


Batch = Sequence[
    tuple[str, Tensor]
]  # tensors, and where they were among the arguments of a forward


class Skip(NamedTuple):
    """A skipped step as the device saw it.

    Attributes:
        outcome: FAULT or OVERFLOW.
        step: its number, from 1. ``since``: where bad parameters skipped the steps before, the
            first of those.
        scale: that the backward used; ``lowest``: below which it does not go; ``fixed``: it never
            moves.
        amax: by name, the largest scaled gradient.
        before: the largest unscaled gradient of the last good step, 0 if there was none.
        limit: the largest number of the policy's half format.
        by_rank: where several ranks decided, for each the largest scaled gradient; under FAULT,
            whether its own loss was inf or NaN.
    """

    outcome: int
    step: int
    since: int
    scale: float
    lowest: float
    fixed: bool
    amax: Mapping[str, float]
    before: float
    limit: float
    by_rank: Mapping[int, float] = {}

    @property
    def ranks(self) -> str:
        """Those at fault, as "rank 3"; "" where there is only one."""
        found = [str(rank) for rank, largest in self.by_rank.items() if not self.is_good(largest)]
        if self.outcome == FAULT:
            found = [str(rank) for rank, nonfinite in self.by_rank.items() if nonfinite]
        return f"rank{'s' * (len(found) > 1)} {_listed(found)}" if found else ""

    def is_good(self, magnitude: float) -> bool:
        """Whether a scaled gradient of that magnitude is finite, and stays so unscaled."""
        return math.isfinite(magnitude) and magnitude / self.scale <= _FP32_MAX


class Explanation(NamedTuple):
    """The cause (one of ``CAUSES``), why and what to do, the names of what was not finite, and what
    would tell more.
    """

    cause: str
    text: str
    parameters: tuple[str, ...] = ()
    hint: str = ""

    @property
    def needs_help(self) -> bool:
        """Whether it is more than the loss scale finding its level."""
        return self.cause != SCALE


def find_cause(
    skip: Skip, batches: Sequence[Batch], parameters: Mapping[Tensor, str]
) -> Explanation:
    """The cause of a skip. Waits for the device, but not where a scale merely finds its level.

    Args:
        batches: the data of the forwards that led to it, as far as it is known.
        parameters: of the model, and buffers, with their names.
    """
    if skip.outcome == FAULT:
        fault = (
            _in_data(batches)
            or _in_parameters(skip, parameters)
            or _in_forward(skip, bool(batches))
        )
        return fault._replace(text=fault.text + _buffers(parameters))
    names = tuple(name for name, a in skip.amax.items() if not skip.is_good(a))
    text = f"the loss was finite, but at loss scale {skip.scale:g} the gradients of "
    shown = [f"{name} ({'NaN' if math.isnan(skip.amax[name]) else 'inf'})" for name in names]
    others = f"{skip.ranks or 'some parameters'} were not. "
    text += f"{len(names)} parameter(s) were not: {_listed(shown)}. " if names else others
    cause = _of_overflow(skip, names)
    found = _in_parameters(skip, parameters) if cause != SCALE else None
    hint = _REPLAY if cause != SCALE else ""
    advice = _FIXED if cause == EXHAUSTED and skip.fixed else _ADVICE[cause]
    return found or Explanation(cause, _introduced(cause, text + advice), names, hint)


_REPLAY = " on_nonfinite='explain', or amp.explain(replay=True) with the batch at hand, names the operation."
_ADVICE = {
    SCALE: "The scale was lowered; single skips of this kind are how it finds its level.",
    BACKWARD: (
        "A lower scale does not help: look in the backward of the last module named for sqrt and norms at 0, "
        "division by 0 behind a mask, and logarithms."
    ),
    EXHAUSTED: (
        "The scale is at its minimum, so the gradients overflow by themselves: look for inf and NaN in the "
        "backward of the last module named, or train it in FP32 with fp32_modules."
    ),
}
_FIXED = "The scale is fixed, so it cannot back off: give a lower loss_scale, or 'dynamic', which finds its level by itself."


def _of_overflow(skip: Skip, names: Sequence[str]) -> str:
    if skip.scale <= skip.lowest and not (skip.fixed and skip.scale <= 1.0):
        return EXHAUSTED
    if skip.scale <= 1.0:
        return BACKWARD  # nothing was scaled up
    sudden = 0.0 < skip.before * skip.scale * _SUDDEN < skip.limit
    return BACKWARD if sudden and any(math.isnan(skip.amax[name]) for name in names) else SCALE


def _in_forward(skip: Skip, knows_batch: bool) -> Explanation:
    batch = ", and the input batch was not" if knows_batch else ""
    if skip.ranks:
        batch = f" on {skip.ranks}{batch}"
    text = (
        f"the loss itself was inf or NaN (loss scale {skip.scale:g}){batch}. A lower scale cannot help. "
        f"Look in {'' if knows_batch else 'the batch, '}the model and the loss for values above 65504, "
        "constants such as -1e9 or eps=1e-8 that float16 cannot hold, 0/0 and rows that are masked completely."
    )
    return Explanation(FORWARD, _introduced(FORWARD, text), hint=_REPLAY)


def _in_data(batches: Sequence[Batch]) -> Explanation | None:
    found = []
    for batch in batches:
        for path, tensor in batch:
            bad = _bad_samples(tensor)
            if bad:
                where = (
                    f"sample(s) {_listed(bad)}" if tensor.dim() > 1 else f"place(s) {_listed(bad)}"
                )
                found.append(f"input {path}: inf or NaN in {where} of shape {tuple(tensor.shape)}")
    if not found:
        return None
    text = "the input batch itself held inf or NaN, and the loss became so, too: " + "; ".join(
        found[:_SHOWN]
    )
    return Explanation(DATA, _introduced(DATA, text + ". Clean the data, or drop these samples."))


def tensors_in(arguments: Any, without: frozenset[int]) -> Iterable[tuple[str, Tensor]]:
    """The floating tensors among a forward's arguments (a tuple and a dictionary), each with where
    it is.

    Args:
        without: numbers of leaves to leave out.
    """
    for i, (path, leaf) in enumerate(tree_flatten_with_path(arguments)[0]):
        if i in without:
            continue
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.layout is torch.strided:
            keys = [getattr(key, "key", getattr(key, "idx", key)) for key in path[1:]]
            yield "".join(f"[{key!r}]" if k else str(key) for k, key in enumerate(keys)), leaf


def _bad_samples(tensor: Tensor) -> list[int]:
    bad = ~torch.isfinite(tensor.detach())
    if tensor.dim() > 1:
        bad = bad.flatten(1).any(1)
    found: list[int] = bad.reshape(-1).nonzero().flatten().tolist()
    return found


def _in_parameters(skip: Skip, parameters: Mapping[Tensor, str]) -> Explanation | None:
    names = _nonfinite((p, name) for p, name in parameters.items() if isinstance(p, nn.Parameter))
    if not names:
        return None
    when = f"since step {skip.since}" if skip.since < skip.step else f"at step {skip.step}"
    text = (
        f"{len(names)} parameter(s) of the model were inf or NaN already, seen {when}: {_listed(names)}. Skipped steps "
        "leave parameters alone, so something else wrote them: a loaded checkpoint, an initialisation, an averaged "
        "copy, or a weight above 65504 that float16 cannot hold. Load the last good checkpoint."
    )
    return Explanation(PARAMETERS, _introduced(PARAMETERS, text), tuple(names))


def _buffers(parameters: Mapping[Tensor, str]) -> str:
    """A skip leaves parameters alone, but a forward has written to running statistics."""
    running = ((t, name) for t, name in parameters.items() if name.rpartition(".")[2] in _RUNNING)
    names = _nonfinite(running)
    if not names:
        return ""
    return (
        f" Running statistics are inf or NaN, too, and stay so until reset_running_stats(): {_listed(names)}. "
        "Evaluation uses them."
    )


def _nonfinite(named: Iterable[tuple[Tensor, str]]) -> list[str]:
    dense = [
        (t.detach(), name)
        for t, name in named
        if t.is_floating_point() and t.layout is torch.strided
    ]
    flags = [torch.isfinite(t).all() for t, _ in dense]
    return [name for flag, (_, name) in zip(flags, dense, strict=True) if not flag]


def _introduced(cause: str, text: str) -> str:
    article = "" if cause in (DATA, PARAMETERS) else "an " if cause[0] in "aeiou" else "a "
    return f"The last skipped step was {'due to ' if not article else ''}{article}{cause}: {text}"


def _listed(items: Sequence[Any]) -> str:
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(map(str, items[:_SHOWN])) + more
