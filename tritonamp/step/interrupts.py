"""Ctrl-C waits until a step is whole."""

# private, and the base of ``signal`` in all supported Pythons: ``signal`` itself makes an enum of
# each answer, at 5 us each
import _signal  # type: ignore[import-not-found]
import threading
from types import FrameType
from typing import Any

import torch

_SIGINT: int = _signal.SIGINT


class Uninterrupted:
    """A context manager in which a first SIGINT waits until the block ends; a second one does not.

    It acts in the main thread only, since Python hands signals to no other, and for any installed
    handler.
    """

    def __init__(self) -> None:
        self._handler: Any = None
        self._arrived: FrameType | None = None

    def __enter__(self) -> None:
        if (
            not torch.compiler.is_compiling()
            and threading.current_thread() is threading.main_thread()
        ):
            handler = _signal.getsignal(_SIGINT)
            if callable(handler):
                self._handler = handler
                _signal.signal(_SIGINT, self._hold_back)

    def _hold_back(self, number: int, frame: FrameType | None) -> None:
        self._arrived = frame
        # for a second one: should the block never end, the user must not be locked out
        _signal.signal(_SIGINT, self._handler)

    def __exit__(self, *exception: Any) -> None:
        if self._handler is not None:
            # a handler that somebody installed inside of the block stays
            if _signal.getsignal(_SIGINT) == self._hold_back:
                _signal.signal(_SIGINT, self._handler)
            if self._arrived is not None:
                self._handler(_SIGINT, self._arrived)
