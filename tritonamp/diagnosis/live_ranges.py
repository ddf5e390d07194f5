"""The distance of values from the end of their format, by module, while a run goes on."""

import itertools
import logging
import math
import struct
import weakref
from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from tritonamp.diagnosis.live_attention import LiveAttention, Row
from tritonamp.diagnosis.range_hooks import EnterHook, RangeHook
from tritonamp.diagnosis.records import ATTENTION, DIRECTIONS, RangeRecord
from tritonamp.diagnosis.replay.model_names import ModelNames
from tritonamp.diagnosis.trends import POINTS, steps_left
from tritonamp.kernels.device import is_capturing, wide_dtype, widened
from tritonamp.kernels.ranges import AMAX, ELEMENTS, FORMAT, FORMATS, ROW, SUBNORMALS, ZEROS
from tritonamp.names import short
from tritonamp.readback import Readback

logger = logging.getLogger("tritonamp")


class LiveRanges:
    """Reads the outputs of modules, and their gradients, every so many steps.

    ::

        hook of a module      adds to its row of the table, if the flag on the device is 1
        after each decision   the table of a watched step is kept, and cleared; the flag is renewed

    All of this happens on the device without a wait, so a CUDA graph can capture it. Attention
    logits are read by ``LiveAttention``.

    The first step is read, and each ``every`` steps after it. ``nn.Sequential`` is not read,
    because it returns what its last module does. Values on another device than that of the first
    parameter are not read either.
    """

    def __init__(self, models: Sequence[nn.Module], every: int, backend: str) -> None:
        self.every = every
        device = next(p.device for model in models for p in model.parameters())
        named = ModelNames(models).modules
        modules = {m: name for m, name in named.items() if not isinstance(m, nn.Sequential)}
        self._names = list(modules.values())
        self._table = torch.zeros(
            len(DIRECTIONS), len(modules), ROW, dtype=torch.int64, device=device
        )
        self._on = torch.ones((), dtype=torch.int32, device=device)
        self._since = torch.zeros((), dtype=torch.int64, device=device)  # decisions since the start
        self._kept = torch.zeros(1 + self._table.numel(), dtype=wide_dtype(device), device=device)
        self._attention = LiveAttention(self._names, self._on)
        # for programs that never call ``remove``
        weakref.finalize(models[0], self._attention.remove).atexit = False
        self._readback = Readback(self._kept)
        self._numbers_read = self._kept.numel()
        self._has_captured = False
        self._seen = 0  # decisions that the host has counted
        self._last: list[RangeRecord] = []  # of the last step that was read
        # by direction and module, steps and magnitudes of the last outputs that were read
        self._points: dict[tuple[str, str], deque[tuple[int, float]]] = {}
        self._warned: set[tuple[str, str]] = set()
        self._handles = []
        rows = zip(modules, *self._table, self._attention.table, strict=True)
        for module, forward, backward, logits in rows:
            hook = RangeHook(forward, backward, self._on, backend, logits, self._attention.running)
            self._attention.hooks.append(hook)
            self._handles += [
                # before other hooks of the module, which may call attention
                module.register_forward_pre_hook(EnterHook(hook), prepend=True),
                module.register_forward_hook(hook),
            ]

    @property
    def is_watching(self) -> bool:
        """Whether ``remove`` was not called yet."""
        return bool(self._handles)

    def remove(self) -> None:
        """Stop watching. Earlier readings are kept."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._attention.remove()

    def after_decision(self, counts: Tensor) -> None:
        """Keep the table of a watched step, and warn of modules that grow. Never waits."""
        if not self._handles:
            return
        now = torch.cat([widened(counts.sum().view(1)), widened(self._table.flatten())])
        self._kept.copy_(torch.where(self._on > 0, now, self._kept))
        self._table.mul_(1 - self._on)
        self._attention.after_decision()
        self._since.add_(1)
        self._on.copy_(self._since % self.every == 0)
        if is_capturing(self._kept.device):
            self._has_captured = True  # the host does not count the steps of replays
            self._attention.is_due = True
            return
        self._collect()
        if self._seen % self.every == 0:
            self._start_readback()
        self._seen += 1
        self._attention.is_due = self._has_captured or self._seen % self.every == 0

    def _start_readback(self) -> None:
        rows = self._attention.rows()
        numbers = self._numbers(rows)
        if numbers.numel() != self._numbers_read:  # attention that was not seen before
            self._readback, self._numbers_read = Readback(numbers), numbers.numel()
        self._readback.start(numbers, rows)

    def _numbers(self, rows: Sequence[Row]) -> Tensor:
        if not rows:
            return self._kept
        return torch.cat([self._kept, self._attention.numbers(rows)])

    def _collect(self) -> None:
        for values, rows in self._readback.ready():
            self._add(list(values), rows)

    def _add(self, values: list[float], rows: Sequence[Row]) -> None:
        """Keep a reading, if it is a new one, and warn of modules that will leave their format."""
        split = self._kept.numel()
        records = list(self._records(values[:split]))
        if not records or (self._last and records[0].step <= self._last[0].step):
            return
        step = int(values[0])
        logits = list(self._attention.records(step, rows, values[split:]))
        self._last = [self._foreseen(record) for record in records] + self._logits_foreseen(logits)
        for record in self._last:
            place = record.direction, record.module
            if record.steps_left and place not in self._warned:
                self._warned.add(place)
                limit, ends = torch.finfo(record.dtype).max, short(record.dtype)
                name = record.module or "the model"
                text = _LOGITS_GROW if record.direction == ATTENTION else _GROWS
                kind = "a bound of the largest" if record.is_bound else "the largest"
                which = "" if record.head is None else f", head {record.head},"
                logger.warning(
                    text.format(
                        **record._asdict(),
                        name=name + which,
                        limit=limit,
                        format=ends,
                        kind=kind,
                    )
                )

    def logits(self) -> dict[str, Tensor]:
        """Return the largest attention logit of each head in the last step. Never waits.

        Returns:
            name of a module to float32 of shape (heads,) on the device. The values are the
            magnitudes of ``Amp.ranges``, upper bounds for ``scaled_dot_product_attention`` and
            ``flex_attention``; they are 0 if the last step was not read. Modules without attention
            are left out. Ranks have the values of their own batches.
        """
        return self._attention.logits()

    def last(self) -> list[RangeRecord]:
        """Return the records of the last step that was read. Waits for the device."""
        self._collect()
        rows = self._attention.rows()
        self._add(self._numbers(rows).tolist(), rows)
        return self.arrived()

    def arrived(self) -> list[RangeRecord]:
        """Return the records of the last step whose numbers have arrived. Never waits."""
        self._collect()
        return list(self._last)

    def _records(self, values: Sequence[float]) -> Iterator[RangeRecord]:
        """Yield a record for each module and direction that had elements."""
        places = itertools.product(DIRECTIONS, self._names)
        for (direction, name), at in zip(places, range(1, len(values), ROW), strict=True):
            row = values[at : at + ROW]
            if row[ELEMENTS]:
                yield _record(name, direction, int(values[0]), row)

    def _foreseen(self, record: RangeRecord) -> RangeRecord:
        """Return the record with ``steps_left``."""
        if record.direction != "forward":  # gradients move with the loss scale
            return record
        return self._with_trend(record)

    def _with_trend(self, record: RangeRecord) -> RangeRecord:
        place = record.direction, record.module
        points = self._points.setdefault(place, deque(maxlen=POINTS))
        points.append((record.step, record.absmax))
        return record._replace(steps_left=steps_left(points, torch.finfo(record.dtype).max))

    def _logits_foreseen(self, records: Sequence[RangeRecord]) -> list[RangeRecord]:
        """Return the records, that of each module's largest head with ``steps_left``."""
        largest: dict[tuple[str, bool], RangeRecord] = {}
        for record in records:
            known = largest.setdefault((record.module, record.is_bound), record)
            if record.absmax > known.absmax:
                largest[record.module, record.is_bound] = record
        worst = set(map(id, largest.values()))
        return [self._with_trend(r) if id(r) in worst else r for r in records]


_GROWS = (
    "step {step}: the output of {name} has grown to {absmax:.4g} and will pass {limit:.6g}, where "
    "{format} ends, in about {steps_left} steps by its trend. Before that: amp.heal({module!r}), "
    "fp32_modules=[{module!r}], bfloat16, or find out why it grows (a lower learning rate, a norm)"
)

_LOGITS_GROW = (
    "step {step}: {kind} attention logit of {name} has grown to {absmax:.4g} and will pass "
    "{limit:.6g}, where {format} ends, in about {steps_left} steps by its trend. Before that: "
    "normalise queries and keys, clip their weights after a step (amp.after_step), or lower the "
    "learning rate"
)


def _record(name: str, direction: str, step: int, row: Sequence[float]) -> RangeRecord:
    (absmax,) = struct.unpack("f", struct.pack("I", int(row[AMAX])))
    dtype = FORMATS[int(row[FORMAT])]
    assert dtype is not None
    headroom = -absmax  # of inf and NaN
    if math.isfinite(absmax):
        headroom = math.log2(torch.finfo(dtype).max / absmax) if absmax else math.inf
    elements = int(row[ELEMENTS])
    zeros, subnormals = row[ZEROS] / elements, row[SUBNORMALS] / elements
    return RangeRecord(name, direction, step, absmax, headroom, zeros, subnormals, elements, dtype)
