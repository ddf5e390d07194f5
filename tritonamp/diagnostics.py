"""Why a step was skipped: kept on the device, read only when somebody asks."""

import ctypes
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tritonamp.kernels.decide import CLEAN, FAULT, OVERFLOW, RECORD, Record

logger = logging.getLogger("tritonamp")

_FP32_MAX = torch.finfo(torch.float32).max
REASONS = {OVERFLOW: "scale overflow", FAULT: "forward fault"}


class NonFiniteError(RuntimeError):
    """A step was skipped, and the policy says ``on_nonfinite="raise"``."""


class SkipLog:
    """Counts of decisions, and what the last skipped one looked like.

    Args:
        names: gives parameter of the model to its full name; asked again when parameters are added.
        speaks: a line is logged for each skip, when its numbers have arrived: the device is not waited for.
    """

    def __init__(self, names: Callable[[], Mapping[Tensor, str]], speaks: bool = False) -> None:
        self._ask_names = names
        self._names = dict(names())
        self._loaded = [0.0, 0.0, 0.0]
        self._numbers: Tensor | None = None  # see kernels.decide.Record
        self._places: dict[tuple[int, ...], Tensor] = {}  # by the ids of a decision's lists of parameters
        self._params: dict[tuple[int, ...], Sequence[list[Tensor]]] = {}
        self._speaks = speaks
        self._seen = 0.0  # skips that were spoken of
        self._mailbox: _Mailbox | None = None

    def record(self, params: Sequence[list[Tensor]], device: torch.device) -> Record:
        """Where the decision about the gradients of ``params``, one list for each optimizer, is to be noted.

        The lists do not change: other parameters come in other lists.
        """
        key = tuple(map(id, params))
        if key not in self._places or self._numbers is None or self._numbers.device != device:
            self._learn(key, [param for part in params for param in part], device)
            self._params[key] = params  # as long as these live, nothing else has their ids
        assert self._numbers is not None
        return Record(self._numbers, self._places[key])

    def _learn(self, key: tuple[int, ...], params: list[Tensor], device: torch.device) -> None:
        places = {param: i for i, param in enumerate(params)}
        if not places.keys() <= self._names.keys():
            later, new = self._ask_names(), places.keys() - self._names.keys()
            self._names |= {p: later.get(p, f"a parameter of shape {tuple(p.shape)}") for p in new}
        size = RECORD + len(self._names)
        if self._numbers is None or len(self._numbers) != size or self._numbers.device != device:
            before = self._values()
            numbers = torch.tensor(before + [0.0] * (size - len(before)), dtype=torch.float64)
            self._numbers, self._mailbox = numbers.to(device), _Mailbox(numbers)
            self._places, self._params = {}, {}
        found = torch.tensor([places.get(p, -1) for p in self._names], dtype=torch.int64)
        self._places[key] = found.to(device)

    def read_back(self, min_scale: float) -> None:
        """Logs a skip whose numbers have arrived, and sends for those of the last decision."""
        if not self._speaks or self._mailbox is None or self._numbers is None:
            return
        if self._numbers.is_cuda and torch.cuda.is_current_stream_capturing():
            return  # neither question nor answer may become part of a CUDA graph
        values = self._mailbox.take()
        if values is not None and values[OVERFLOW] + values[FAULT] > self._seen:
            self._seen = values[OVERFLOW] + values[FAULT]
            news = math.frexp(self._seen)[0] == 0.5  # 1, 2, 4, 8...: a run that skips all the time says so now and then
            log = logger.warning if news and self._alarms(values, min_scale) else logger.info
            log(f"{self._seen:.0f} of {sum(values[:3]):.0f} steps skipped. {self._explain(list(values), min_scale)}")
        self._mailbox.send_for(self._numbers)

    def _values(self) -> list[float]:
        return [*self._loaded, 0.0, 0.0, 0.0] if self._numbers is None else self._numbers.tolist()

    def counts(self) -> tuple[int, int, int]:
        """Decisions that were clean, scale overflows, forward faults. Reads the device."""
        clean, overflow, fault = self._values()[:3]
        return int(clean), int(overflow), int(fault)

    def stats(self) -> dict[str, Any]:
        """The numbers as plain values. Reads the device."""
        values = self._values()
        return {
            "steps": int(values[CLEAN]),
            "skipped": int(values[OVERFLOW] + values[FAULT]),
            "scale_overflows": int(values[OVERFLOW]),
            "forward_faults": int(values[FAULT]),
            "last_skip_reason": REASONS.get(int(values[4])),
            "grad_norm": values[3],
        }

    def load_counts(self, counts: tuple[int, int, int]) -> None:
        """Continues counting from a checkpoint."""
        self._loaded = [float(n) for n in counts]
        self._seen = self._loaded[OVERFLOW] + self._loaded[FAULT]
        if self._numbers is not None:
            self._numbers[:3] = torch.tensor(self._loaded, dtype=torch.float64)

    def explain(self, min_scale: float) -> str:
        """Why the last skipped step was skipped, and what to do. Reads the device.

        Args:
            min_scale: below which the scale does not go.
        """
        return self._explain(self._values(), min_scale)

    def _explain(self, values: list[float], min_scale: float) -> str:
        reason, scale = REASONS.get(int(values[4])), values[5]
        if reason is None:
            return "No step was skipped."
        if reason == REASONS[FAULT]:
            return (
                f"The last skipped step was a forward fault: the loss itself was inf or NaN (loss scale {scale:g}). "
                "A lower scale cannot help, so it was left alone. Look at the input batch for inf and NaN, and in the "
                "model for values above 65504, constants such as -1e9 or eps=1e-8 that float16 cannot hold, 0/0 and "
                "rows that are masked completely."
            )
        named = zip(self._names.values(), values[RECORD:], strict=True)
        bad = [(name, amax) for name, amax in named if not math.isfinite(amax) or amax / scale > _FP32_MAX]
        listed = ", ".join(f"{name} ({'NaN' if a != a else 'inf'})" for name, a in bad[:8])
        more = f" and {len(bad) - 8} more" if len(bad) > 8 else ""
        text = f"The last skipped step was a scale overflow: the loss was finite, but at loss scale {scale:g} "
        text += f"the gradients of {len(bad)} parameter(s) were not: {listed}{more}. "
        if scale <= min_scale:
            return text + (
                "The scale is at its minimum, so the gradients overflow by themselves: look for inf and NaN in the "
                "backward of the last module named, or train it in FP32 with fp32_modules"
            )
        return text + "The scale was lowered; single skips of this kind are how it finds its level."

    def calls_for_help(self, min_scale: float) -> bool:
        """Whether the last skip was more than the scale finding its level. Reads the device."""
        return self._alarms(self._values(), min_scale)

    def _alarms(self, values: Sequence[float], min_scale: float) -> bool:
        return values[4] == FAULT or (values[4] == OVERFLOW and values[5] <= min_scale)


class _Mailbox:
    """Numbers on their way from the device, without waiting: read when they have arrived."""

    def __init__(self, numbers: Tensor) -> None:
        pinned = torch.cuda.is_available()
        self._numbers = torch.zeros(numbers.shape, dtype=torch.float64, pin_memory=pinned)
        self._values = (ctypes.c_double * len(numbers)).from_address(self._numbers.data_ptr())  # the same memory
        self._arrived = torch.cuda.Event() if pinned else None
        self._sent = False

    def send_for(self, numbers: Tensor) -> None:
        """Asks for the numbers, unless earlier ones are still under way."""
        if self._sent:
            return
        self._numbers.copy_(numbers, non_blocking=True)
        if self._arrived is not None and numbers.is_cuda:
            self._arrived.record(torch.cuda.current_stream(numbers.device))
        self._sent = True

    def take(self) -> Sequence[float] | None:
        """The numbers last asked for; None: they have not arrived."""
        if not self._sent or (self._arrived is not None and not self._arrived.query()):
            return None
        self._sent = False
        return self._values  # type: ignore[return-value]
