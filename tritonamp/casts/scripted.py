"""TorchScript's own autocast, which is off while enabled forwards run on a CPU.

Its pass puts casts into the graphs of scripted functions, by lists on which a CPU has everything
that is not a matmul in FP32. Without it their operations follow the op table.
"""

from threading import get_ident

import torch


class ScriptedAutocast:
    """Switches the pass, which is one for the whole process, off and on again.

    A graph is made at a function's first call under autocast, and kept.
    """

    def __init__(self) -> None:
        self._threads: set[int] = set()  # those in which it is to be off
        self._was_on = False

    def off(self) -> None:
        """Have it off for what this thread runs, until ``on``."""
        self._threads.add(get_ident())
        # private, but what torch's documentation of autocast in TorchScript names
        if torch._C._jit_set_autocast_mode(False):
            self._was_on = True

    def on(self) -> None:
        """Put it back as it was, unless other threads need it off; does nothing without ``off``."""
        self._threads.discard(get_ident())
        if self._was_on and not self._threads:
            self._was_on = False
            torch._C._jit_set_autocast_mode(True)
            # for one that came meanwhile: a lock would take longer than all of this
            if self._threads and torch._C._jit_set_autocast_mode(False):
                self._was_on = True


scripted = ScriptedAutocast()
