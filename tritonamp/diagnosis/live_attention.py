"""The largest attention logit of each head, by module, during a run."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tritonamp.diagnosis.attention_calls import calls
from tritonamp.diagnosis.range_hooks import RangeHook, Running, readable
from tritonamp.diagnosis.records import ATTENTION, RangeRecord
from tritonamp.kernels._dynamo import never_alone
from tritonamp.kernels.device import is_capturing, widened

HEADS = 128  # of one module; the heads of a module with more count as one


class Row(NamedTuple):
    """Numbers of one module.

    Attributes:
        kind: 0: scores, 1: bounds.
        module: number of the module.
        heads: number of heads.
        dtype: format of the scores.
    """

    kind: int
    module: int
    heads: int
    dtype: torch.dtype


class LiveAttention:
    """Reads the attention logits of modules, in the steps in which ``LiveRanges`` reads.

    ::

        scores exist            their largest magnitude, exactly
        scaled_dot_product_attention,
        flex_attention          a bound: the largest norm of a query, times that of a key,
                                times the scale, with FP32 norms

    A call belongs to the innermost module whose forward runs.

    Args:
        names: names of the modules.
        on: 0-d int32 on the device, 1 in steps that are read.

    Attributes:
        table: float32 of shape (modules, 2, HEADS), with rows for scores and for bounds.
        hooks: hook of each module.
        running: the modules whose forwards run.
        is_due: whether eager calls are read now.
    """

    def __init__(self, names: Sequence[str], on: Tensor) -> None:
        self.hooks: list[RangeHook] = []
        self.running = Running()
        self.is_due = True
        self._names = names
        self._on = on
        self.table = torch.zeros(len(names), 2, HEADS, device=on.device)
        self._kept = torch.zeros_like(self.table)
        self._was_on = torch.zeros_like(on)
        calls.add(self)

    def remove(self) -> None:
        """Read nothing from now on."""
        calls.remove(self)

    # reading

    @never_alone
    def is_called(self) -> bool:
        """Return whether a call that is made now belongs to one of the modules."""
        return self.running.innermost() is not None

    @never_alone
    def read_bound(self, query: Tensor, key: Tensor, scale: float) -> None:
        """Read a bound of the scaled products of queries and keys.

        Args:
            query: [..., heads, queries, width], or without heads.
            key: [..., heads, keys, width]; a divisor of the queries' heads is enough.
            scale: factor of the products.
        """
        found, other = readable(query, self._on.device), readable(key, self._on.device)
        if found is not None and other is not None:
            self._read(1, found, other, scale)

    def read_scores(self, scores: Tensor) -> None:
        """Read scores.

        Args:
            scores: [..., heads, queries, keys]; 0 where a score is masked.
        """
        found = readable(scores, self._on.device)
        if found is not None:
            self._read(0, found, None, 1.0)

    def _read(self, kind: int, x: Tensor, key: Tensor | None, scale: float) -> None:
        is_traced = torch.compiler.is_compiling()
        # a capture records calls for all its replays
        if not is_traced and not self.is_due and not is_capturing(x.device):
            return
        hook, heads = self.running.innermost(), x.shape[-3] if x.dim() > 3 else 1
        assert hook is not None
        heads = heads if heads <= HEADS else 1
        device, dtype = x.device.type, x.dtype
        if key is None:
            hook.scores = heads, dtype
        else:
            if torch.is_autocast_enabled(device):
                dtype = torch.get_autocast_dtype(device)  # attention casts its arguments
            hook.bounds, key = (heads, dtype), key.detach()
        row = hook.logits[kind, :heads]
        (add_logits_traced if is_traced else add_logits)(row, self._on, x.detach(), key, scale)

    # steps

    def after_decision(self) -> None:
        """Keep the table of a watched step, and clear it. ``on`` is still that of the step."""
        self._was_on.copy_(self._on)
        self._kept.copy_(torch.where(self._on > 0, self.table, self._kept))
        self.table.zero_()  # not times a flag, because inf times 0 is NaN
        self.running.clear()

    def rows(self) -> list[Row]:
        """Return the rows that have been read so far, those of scores first."""
        kinds = [(0, [h.scores for h in self.hooks]), (1, [h.bounds for h in self.hooks])]
        return [
            Row(kind, module, *found)
            for kind, all_ in kinds
            for module, found in enumerate(all_)
            if found is not None
        ]

    def numbers(self, rows: Sequence[Row]) -> Tensor:
        """Return the kept numbers of some rows, one after another, on the device."""
        return widened(torch.cat([self._kept[r.module, r.kind, : r.heads] for r in rows]))

    def logits(self) -> dict[str, Tensor]:
        """Return module to largest logits of its heads, as ``LiveRanges.logits`` does."""
        on, found = self._was_on > 0, dict[str, Tensor]()
        for row in self.rows():
            kept = self._kept[row.module, row.kind, : row.heads]
            # exact numbers come first, and are no bound
            found.setdefault(self._names[row.module], torch.where(on, kept, 0.0))
        return found

    def records(
        self, step: int, rows: Sequence[Row], values: Sequence[float]
    ) -> Iterator[RangeRecord]:
        """Yield a record for each head.

        Args:
            step: number of the step.
            rows: rows of the values.
            values: numbers of ``numbers``.
        """
        remaining = iter(values)
        for row in rows:
            for head in range(row.heads):
                which = None if row.heads == 1 else head
                yield _record(self._names[row.module], step, next(remaining), row, which)


def _record(module: str, step: int, absmax: float, row: Row, head: int | None) -> RangeRecord:
    headroom = -absmax  # of inf and NaN
    if math.isfinite(absmax):
        headroom = math.log2(torch.finfo(row.dtype).max / absmax) if absmax else math.inf
    unknown = math.nan, math.nan, 0
    places = module, ATTENTION, step, absmax, headroom
    return RangeRecord(*places, *unknown, row.dtype, None, head, row.kind == 1)


def add_logits(row: Tensor, on: Tensor, x: Tensor, key: Tensor | None, scale: float) -> None:
    """Make a row the largest logits of each head so far.

    Args:
        row: float32 of shape (heads,), updated in place; (1,): the heads count as one.
        on: 0-d int32, 0 leaves the row unchanged.
        x: scores, or queries if there are keys, [..., heads, queries, keys or width].
        key: keys, [..., heads, keys, width]; None: ``x`` has scores.
        scale: factor of the products of queries and keys.
    """
    if not x.numel() or (key is not None and not key.numel()):
        return
    with torch.no_grad():
        if key is None:
            found = _by_head(x.abs().amax((-2, -1)))
        else:
            queries, keys = _by_head(_largest_norms(x)), _by_head(_largest_norms(key))
            serves, rest = divmod(queries.shape[1], keys.shape[1])
            if serves and not rest:  # a head of keys serves several of queries
                keys = keys.repeat_interleave(serves, 1)
            else:
                keys = keys.amax(1, keepdim=True)
            if queries.shape[0] != keys.shape[0]:
                keys = keys.amax(0)
            found = queries * keys * scale
        found = found.amax(0).float() if row.numel() > 1 else found.max().float().view(1)
        # maximum propagates NaN
        row.copy_(torch.maximum(row, torch.where(on > 0, found, 0.0)))


def _largest_norms(x: Tensor) -> Tensor:
    """Return the largest norm of the rows [..., length, width], in FP32, of shape [...]."""
    # one read of half numbers, without an FP32 copy
    return torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).amax(-1)


def _by_head(numbers: Tensor) -> Tensor:
    """Return numbers [..., heads] as [rest, heads], and numbers without heads as one head."""
    return numbers.flatten(0, -2) if numbers.dim() > 1 else numbers.reshape(-1, 1)


@torch.library.custom_op("tritonamp::add_logits", mutates_args=("row",))
def add_logits_traced(row: Tensor, on: Tensor, x: Tensor, key: Tensor | None, scale: float) -> None:
    """Run ``add_logits`` as one operation of a compiled graph."""
    add_logits(row, on, x, key, scale)
