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

    _handler: Any = None  # the handler before the block; None: no signal is held back
    _arrived: FrameType | None = None  # the frame in which a signal was held back

    def __enter__(self) -> None:
        if torch.compiler.is_compiling():
            return
        # A handler is not callable where SIGINT is ignored, ends the process, or is handled in C.
        # Nothing could be called late then.
        self._handler = _signal.getsignal(_SIGINT)
        if not callable(self._handler):
            self._handler = None
            return
        try:
            _signal.signal(_SIGINT, self._hold_back)
        except ValueError:
            self._handler = None
            # In the main thread it is an error of the user's handler of another signal that has
            # just arrived, because ``signal`` runs such handlers first.
            if threading.current_thread() is threading.main_thread():
                raise

    def _hold_back(self, number: int, frame: FrameType | None) -> None:
        self._arrived = frame
        # The old handler answers a second signal. Otherwise a block that never ends, as one that
        # waits for another rank, could not be interrupted.
        _signal.signal(_SIGINT, self._handler)

    def __exit__(self, *exception: Any) -> None:
        if self._handler is not None:
            installed = _signal.signal(_SIGINT, self._handler)
            if installed not in (self._hold_back, self._handler):
                # a step hook has installed a handler of its own in the block: that one stays
                _signal.signal(_SIGINT, installed)
            # Also after an exception in the block: the user has asked to stop, and a loop that
            # catches errors of a step would otherwise go on.
            if self._arrived is not None:
                self._handler(_SIGINT, self._arrived)
