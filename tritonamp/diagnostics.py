"""Why a step was skipped: kept on the device, read only when somebody asks."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

_FP32_MAX = torch.finfo(torch.float32).max
_CLEAN, _OVERFLOW, _FAULT = 0, 1, 2
REASONS = {_OVERFLOW: "scale overflow", _FAULT: "forward fault"}


class NonFiniteError(RuntimeError):
    """A step was skipped, and the policy says ``on_nonfinite="raise"``."""


class SkipLog:
    """Counts of decisions, and what the last skipped one looked like.

    Args:
        names: gives parameter of the model to its full name; asked again when parameters are added.
    """

    def __init__(self, names: Callable[[], Mapping[Tensor, str]]) -> None:
        self._ask_names = names
        self._names = dict(names())
        self._counts: Tensor | None = None  # decisions by outcome: clean, scale overflow, forward fault
        self._loaded = (0, 0, 0)
        self._outcome: Tensor | None = None  # of the last skipped decision, as the rest
        self._scale: Tensor | None = None
        self._amax: Tensor | None = None

    def record(
        self,
        amax: Mapping[Tensor, Tensor],
        found_inf: Tensor,
        loss_nonfinite: Tensor,
        scale: Tensor,
        grad_scale: Tensor,
    ) -> None:
        """Notes one decision, on the device.

        Args:
            amax: parameter to the largest magnitude in its scaled gradient, 0-d.
            found_inf, loss_nonfinite, scale, grad_scale: 0-d, of the decision.
        """
        if not amax.keys() <= self._names.keys():
            later = self._ask_names()
            self._names |= {
                p: later.get(p, f"a parameter of shape {tuple(p.shape)}") for p in amax.keys() - self._names
            }
        none = torch.zeros_like(scale)
        values = torch.stack([amax.get(param, none) for param in self._names] or [none])
        fault = loss_nonfinite != 0
        outcome = _FAULT * fault + _OVERFLOW * ((found_inf != 0) & ~fault)
        if self._counts is None or self._amax is None or self._scale is None or self._outcome is None:
            self._counts = torch.stack([torch.full_like(outcome, n) for n in self._loaded])  # no copy from the host
            self._outcome, self._scale = torch.zeros_like(outcome), torch.zeros_like(scale)
            self._amax = torch.zeros_like(values)
        if self._amax.shape != values.shape:  # parameters were added
            self._amax = torch.nn.functional.pad(self._amax, (0, len(values) - len(self._amax)))
        # in place, so that a CUDA graph that captured this goes on counting
        self._counts += torch.arange(3, device=scale.device) == outcome
        skipped = outcome != _CLEAN
        self._outcome.copy_(torch.where(skipped, outcome, self._outcome))
        self._scale.copy_(torch.where(skipped, scale, self._scale))
        self._amax.copy_(torch.where(skipped, values, self._amax))

    def counts(self) -> tuple[int, int, int]:
        """Decisions that were clean, scale overflows, forward faults. Reads the device."""
        if self._counts is None:
            return self._loaded
        clean, overflow, fault = self._counts.tolist()
        return clean, overflow, fault

    def stats(self) -> dict[str, Any]:
        """The numbers as plain values. Reads the device."""
        clean, overflow, fault = self.counts()
        return {
            "steps": clean,
            "skipped": overflow + fault,
            "scale_overflows": overflow,
            "forward_faults": fault,
            "last_skip_reason": None if self._outcome is None else REASONS.get(int(self._outcome)),
        }

    def load_counts(self, counts: tuple[int, int, int]) -> None:
        """Continues counting from a checkpoint."""
        self._loaded = counts
        self._counts = None if self._counts is None else torch.tensor(counts, device=self._counts.device)

    def explain(self, min_scale: float) -> str:
        """Why the last skipped step was skipped, and what to do. Reads the device.

        Args:
            min_scale: below which the scale does not go.
        """
        reason = self.stats()["last_skip_reason"]
        if reason is None or self._scale is None or self._amax is None:
            return "No step was skipped."
        scale = float(self._scale)
        if reason == REASONS[_FAULT]:
            return (
                f"The last skipped step was a forward fault: the loss itself was inf or NaN (loss scale {scale:g}). "
                "A lower scale cannot help, so it was left alone. Look at the input batch for inf and NaN, and in the "
                "model for values above 65504, constants such as -1e9 or eps=1e-8 that float16 cannot hold, 0/0 and "
                "rows that are masked completely."
            )
        named = zip(self._names.values(), self._amax.tolist(), strict=True)
        bad = [(name, amax) for name, amax in named if not math.isfinite(amax) or amax / scale > _FP32_MAX]
        listed = ", ".join(f"{name} ({'NaN' if a != a else 'inf'})" for name, a in bad[:8])
        more = f" and {len(bad) - 8} more" if len(bad) > 8 else ""
        text = f"The last skipped step was a scale overflow: the loss was finite, but at loss scale {scale:g} "
        text += f"the gradients of {len(bad)} parameter(s) were not: {listed}{more}. "
        if self._scale_was_lowest(min_scale):
            return text + (
                "The scale is at its minimum, so the gradients overflow by themselves: look for inf and NaN in the "
                "backward of the last module named, or train it in FP32 with fp32_modules"
            )
        return text + "The scale was lowered; single skips of this kind are how it finds its level."

    def calls_for_help(self, min_scale: float) -> bool:
        """Whether the last skip was more than the scale finding its level. Reads the device."""
        return self._outcome is not None and (int(self._outcome) == _FAULT or self._scale_was_lowest(min_scale))

    def _scale_was_lowest(self, min_scale: float) -> bool:
        return self._scale is not None and float(self._scale) <= min_scale
