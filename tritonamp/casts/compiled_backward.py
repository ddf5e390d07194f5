"""Compile backwards without autocast, because those of eager forwards run without it.

By default torch compiles a backward under the autocast state of the call that compiles. Inside an
enabled forward, or inside ``with amp.autocast():``, operations that are FP32 on purpose would then
get a half backward.
"""

import sys
from collections.abc import Callable
from typing import Any

from tritonamp.casts.active import thread
from tritonamp.kernels._dynamo import constant_to_dynamo

_STOCK = "same_as_forward"


class _Compilations:
    """Observes the compilations of this process, which torch runs one at a time.

    Attributes:
        observers: torch's list of functions to call when a compilation begins.
            ``torch.compiler.reset`` empties this very list.
    """

    def __init__(self) -> None:
        self.observers: list[Callable[[Any], None]] = []
        self._changed: Any = None  # torch's settings, while a compilation runs with another one

    def observe(self) -> None:
        """Make torch call ``begins`` and ``restore``, once torch._dynamo is imported."""
        handler: Any = getattr(sys.modules["torch._dynamo"], "callback_handler", None)
        if handler is not None:  # else another thread is importing it
            handler.register_start_callback(begins)
            handler.register_end_callback(self.restore)
            self.observers = handler.start_callbacks

    def release(self) -> None:
        """Stop torch from calling ``begins`` and ``restore``."""
        if begins in self.observers:
            handler: Any = sys.modules["torch._dynamo"].callback_handler
            handler.remove_start_callback(begins)
            handler.remove_end_callback(self.restore)

    def leave_autocast(self) -> None:
        """Make the present compilation build its backward without autocast."""
        # private, and the same from torch 2.11 to 2.15: nothing public says it
        config: Any = sys.modules["torch._functorch.config"]
        if config.backward_pass_autocast == _STOCK:  # else it is a setting of the user's
            config.backward_pass_autocast = "off"
            self._changed = config

    def restore(self, _: Any) -> None:
        """Restore torch's setting, when a compilation has ended."""
        if self._changed is not None:
            self._changed.backward_pass_autocast = _STOCK
            self._changed = None


compilations = _Compilations()


def begins(_: Any) -> None:
    """Note that a compilation begins, in the thread that called the compiled function."""
    if thread.live():
        compilations.leave_autocast()


@constant_to_dynamo
def leave_autocast() -> None:
    """Make torch.compile build the backward of the forward that it traces without autocast."""
    if begins not in compilations.observers:
        compilations.observe()
    compilations.leave_autocast()
