"""Ctrl-C waits for the end of a step."""

# Private, and the base of ``signal`` in all supported Pythons. ``signal`` itself converts each
# answer to an enum, which takes 5 us per call, twice a step.
import _signal  # type: ignore[import-not-found]
import threading
from types import FrameType
from typing import Any

import torch

_SIGINT: int = _signal.SIGINT


class Uninterrupted:
    """A context manager that holds a first SIGINT back until the block ends.

    A second SIGINT reaches the installed handler at once. The class acts in the main thread only,
    because Python delivers signals to no other thread.
    """

    def __init__(self) -> None:
        self._handler: Any = None
        self._arrived: FrameType | None = None

    def __enter__(self) -> None:
        if (
            not torch.compiler.is_compiling()
            and threading.current_thread() is threading.main_thread()
        ):
            # A handler is not callable where SIGINT is ignored, ends the process, or is handled in
            # C. Nothing could be called late then.
            handler = _signal.getsignal(_SIGINT)
            if callable(handler):
                self._handler = handler
                _signal.signal(_SIGINT, self._hold_back)

    def _hold_back(self, number: int, frame: FrameType | None) -> None:
        self._arrived = frame
        # The old handler answers a second signal. Otherwise a block that never ends, as one that
        # waits for another rank, could not be interrupted.
        _signal.signal(_SIGINT, self._handler)

    def __exit__(self, *exception: Any) -> None:
        if self._handler is not None:
            # A step hook may have installed a handler of its own in the block: that one stays.
            if _signal.getsignal(_SIGINT) == self._hold_back:
                _signal.signal(_SIGINT, self._handler)
            # Also after an exception in the block: the user has asked to stop, and a loop that
            # catches errors of a step would otherwise go on.
            if self._arrived is not None:
                self._handler(_SIGINT, self._arrived)
