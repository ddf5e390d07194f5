"""A log of mismatches, which arrive on the host without a wait."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tritonamp.diagnosis.history import MOST
from tritonamp.diagnosis.records import MismatchRecord
from tritonamp.functional import Mismatch
from tritonamp.kernels._shards import is_sharded
from tritonamp.kernels.device import is_capturing, widened
from tritonamp.readback import Readback

MOST_UNDER_WAY = 16
_CALL = "call amp.log_mismatch(tritonamp.functional.mismatch(log_probs, sampler_log_probs, mask))"


class MismatchLog:
    """The last mismatches of a run. The host does not wait for them.

    Args:
        counts: function that returns the numbers of decisions by outcome, on their device, or None
            before the first decision.
    """

    def __init__(self, counts: Callable[[], Tensor | None]) -> None:
        self._counts = counts
        self._readbacks: dict[torch.device, Readback] = {}  # decisions may begin on another device
        self._records: deque[MismatchRecord] = deque(maxlen=MOST)

    def add(self, mismatch: Any) -> None:
        """Start copying a mismatch to the host, unless ``MOST_UNDER_WAY`` copies are under way.

        Raises:
            ValueError: the argument is no ``Mismatch`` of 0-d tensors on the device of the
                decisions.
            RuntimeError: a CUDA graph is captured.
        """
        counts = self._counts()
        device = _checked_device(mismatch, None if counts is None else counts.device)
        if is_capturing(device):
            raise RuntimeError(
                "amp.log_mismatch: expected a call after each replay of a CUDA graph, got one "
                "inside of the capture: replays run no Python. functional.mismatch can be captured"
            )
        earlier = mismatch.k1.new_zeros(()) if counts is None else counts.sum()
        numbers = torch.stack([widened(v.detach()) for v in (earlier + 1, *mismatch)])
        if device not in self._readbacks:
            self._readbacks[device] = Readback(numbers, MOST_UNDER_WAY)
        self._collect()
        self._readbacks[device].start(numbers, None)

    def arrived(self, wait: bool = False) -> Sequence[MismatchRecord]:
        """Return the last mismatches that have arrived, oldest first. May wait for all."""
        self._collect(wait)
        return list(self._records)

    def _collect(self, wait: bool = False) -> None:
        for device, readback in self._readbacks.items():
            if wait or not is_capturing(device):
                for (step, *values), _ in readback.ready(wait):
                    self._records.append(MismatchRecord(int(step), *values))


def _checked_device(mismatch: Any, expected: torch.device | None) -> torch.device:
    """Return the device of a mismatch.

    Raises:
        ValueError: ``mismatch`` is no ``Mismatch`` of 0-d tensors on one device, the expected one.
    """
    if not isinstance(mismatch, Mismatch):
        raise ValueError(
            "mismatch: expected the result of tritonamp.functional.mismatch, got "
            f"{type(mismatch).__name__}: {_CALL}"
        )
    for name, value in mismatch._asdict().items():
        if not isinstance(value, Tensor) or value.dim():
            got = type(value).__name__
            got += f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
            raise ValueError(f"mismatch.{name}: expected a 0-d Tensor, got {got}: {_CALL}")
        if is_sharded(value):
            raise ValueError(
                f"mismatch.{name}: expected a plain Tensor, got {type(value).__name__}: call "
                "amp.log_mismatch(Mismatch(*(value.full_tensor() for value in mismatch))) on all "
                "ranks"
            )
        expected = value.device if expected is None else expected
        if value.device != expected:
            raise ValueError(
                f"mismatch.{name}: expected a tensor on {expected}, where the steps are decided, "
                f"got one on {value.device}: move the log-probabilities there first"
            )
    return mismatch.k1.device
