"""Detects ranks that have diverged although they take their decisions together."""

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tritonamp.kernels.device import widened
from tritonamp.readback import Readback

logger = logging.getLogger("tritonamp")

CHECK_EVERY = 100  # decisions
_NORM_TOLERANCE = 1e-3  # relative; far above what another order of summation does


class Row(NamedTuple):
    """One rank's numbers for a decision, a row of the gathered table."""

    loss_nonfinite: float  # 1 where a loss was inf or NaN
    found_earlier: float  # 1 where gradients that were unscaled early were not finite
    amax: float  # the largest scaled gradient
    square_sum: float  # of the scaled gradients
    scale: float
    taken: float  # how many steps were taken so far
    loss: float  # of this rank's batch; NaN: not known


class PartedCheck:
    """Compares the ranks' rows every ``CHECK_EVERY`` decisions, later and without a wait."""

    def __init__(self) -> None:
        self._readback: Readback | None = None
        self._decisions = 0
        self._warned = False

    def check_table(self, table: Tensor, group: Any, one_norm: bool) -> None:
        """Check the tables whose copies have arrived, and maybe start to copy this one.

        Args:
            table: a ``Row`` of each rank, on the device.
            group: process group of the ranks.
            one_norm: whether all ranks should step with the same gradients.

        Raises:
            RuntimeError: ranks differ in loss scale or count of steps; names them.
        """
        if table.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        if self._readback is None:
            self._readback = Readback(widened(table))
        width = len(Row._fields)
        for values, _ in self._readback.ready():
            rows = [Row(*values[i : i + width]) for i in range(0, len(values), width)]
            _check_states(rows, group)
            if one_norm:
                self._check_norms(rows)
        if self._decisions % CHECK_EVERY == 0:
            self._readback.start(widened(table), None)
        self._decisions += 1

    def _check_norms(self, rows: Sequence[Row]) -> None:
        norms = [row.square_sum**0.5 for row in rows]
        good = all(
            row.loss_nonfinite == row.found_earlier == 0 and row.amax < float("inf") for row in rows
        )
        apart = good and max(norms) - min(norms) > _NORM_TOLERANCE * max(norms)
        if apart and not self._warned:
            self._warned = True
            logger.warning(
                "the ranks step with different gradients, of norms "
                f"{', '.join(f'{n:.6g}' for n in norms)}, and will part: call the DDP model, not "
                "the module inside it, and change gradients on all ranks alike"
            )


def _check_states(rows: Sequence[Row], group: Any) -> None:
    states = [(row.scale, row.taken) for row in rows]
    usual, _ = Counter(states).most_common(1)[0]
    others = [rank for rank, state in enumerate(states) if state != usual]
    if others:
        raise RuntimeError(
            f"{_named(others, group)} parted from the others ({_listed(states, group)}), so their "
            "parameters differ: load a checkpoint, amp.load_state_dict included, on all ranks "
            "alike, and set the scale and call step() on all or none"
        )


def _listed(states: Sequence[tuple[float, float]], group: Any) -> str:
    """Return each pair of loss scale and count of steps as text, with its ranks."""
    ranks = {state: [r for r, s in enumerate(states) if s == state] for state in states}
    return "; ".join(
        f"{_named(own, group)}: loss scale {scale:g}, {taken:.0f} steps taken"
        for (scale, taken), own in ranks.items()
    )


def _named(ranks: Sequence[int], group: Any) -> str:
    numbers = [str(dist.get_global_rank(group, rank)) for rank in ranks]
    return f"{'ranks' if len(numbers) > 1 else 'rank'} {', '.join(numbers)}"
