"""The distance of values from the end of their format, by module, while a run goes on."""

import itertools
import logging
import math
import struct
from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from tritonamp.diagnosis.range_hooks import RangeHook
from tritonamp.diagnosis.records import DIRECTIONS, RangeRecord
from tritonamp.diagnosis.replay.model_names import ModelNames
from tritonamp.diagnosis.trends import POINTS, steps_left
from tritonamp.kernels.device import is_capturing
from tritonamp.kernels.ranges import AMAX, ELEMENTS, FORMAT, FORMATS, ROW, SUBNORMALS, ZEROS
from tritonamp.names import short
from tritonamp.readback import Readback

logger = logging.getLogger("tritonamp")


class LiveRanges:
    """Reads the outputs of modules, and their gradients, every so many steps.

    ::

        hook of a module      adds to its row of the table, if the flag on the device is 1
        after each decision   the table of a watched step is kept, and cleared; the flag is renewed

    All of this happens on the device without a wait, so a CUDA graph can capture it.

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
        self._kept = torch.zeros(1 + self._table.numel(), dtype=torch.float64, device=device)
        self._readback = Readback(self._kept)
        self._seen = 0  # decisions that the host has counted
        self._last: list[RangeRecord] = []  # of the last step that was read
        # by module, steps and magnitudes of the last outputs that were read
        self._points: dict[str, deque[tuple[int, float]]] = {}
        self._warned: set[str] = set()
        self._handles = [
            module.register_forward_hook(RangeHook(forward, backward, self._on, backend))
            for module, forward, backward in zip(modules, *self._table, strict=True)
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

    def after_decision(self, counts: Tensor) -> None:
        """Keep the table of a watched step, and warn of modules that grow. Never waits."""
        if not self._handles:
            return
        now = torch.cat([counts.sum().double().view(1), self._table.flatten()])
        self._kept.copy_(torch.where(self._on > 0, now, self._kept))
        self._table.mul_(1 - self._on)
        self._since.add_(1)
        self._on.copy_(self._since % self.every == 0)
        if is_capturing(self._kept.device):
            return
        self._collect()
        if self._seen % self.every == 0:
            self._readback.start(self._kept, None)
        self._seen += 1

    def _collect(self) -> None:
        for values, _ in self._readback.ready():
            self._add(list(values))

    def _add(self, values: list[float]) -> None:
        """Keep a reading, if it is a new one, and warn of modules that will leave their format."""
        records = list(self._records(values))
        if not records or (self._last and records[0].step <= self._last[0].step):
            return
        self._last = [self._foreseen(record) for record in records]
        for record in self._last:
            if record.steps_left and record.module not in self._warned:
                self._warned.add(record.module)
                limit, ends = torch.finfo(record.dtype).max, short(record.dtype)
                name = record.module or "the model"
                logger.warning(
                    _GROWS.format(**record._asdict(), name=name, limit=limit, format=ends)
                )

    def last(self) -> list[RangeRecord]:
        """Return the records of the last step that was read. Waits for the device."""
        self._collect()
        self._add(self._kept.tolist())
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
        points = self._points.setdefault(record.module, deque(maxlen=POINTS))
        points.append((record.step, record.absmax))
        return record._replace(steps_left=steps_left(points, torch.finfo(record.dtype).max))


_GROWS = (
    "step {step}: the output of {name} has grown to {absmax:.4g} and will pass {limit:.6g}, where "
    "{format} ends, in about {steps_left} steps by its trend. Before that: amp.heal({module!r}), "
    "fp32_modules=[{module!r}], bfloat16, or find out why it grows (a lower learning rate, a norm)"
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
