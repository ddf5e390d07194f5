"""TorchScript's own autocast, which is off while enabled forwards run on a CPU.

Its pass puts casts into the graphs of scripted functions, by lists on which a CPU has everything
that is not a matmul in FP32. Without it their operations follow the op table.
"""

import threading

import torch


class ScriptedAutocast:
    """Switches the pass, which is one for the whole process, off and on again.

    A graph is made at a function's first call under autocast, and kept.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: set[int] = set()  # those in which it is to be off
        self._before = True

    def off(self) -> None:
        """Have it off for what this thread runs, until ``on``."""
        with self._lock:
            if not self._threads:
                # private, but what torch's documentation of autocast in TorchScript names
                self._before = torch._C._jit_set_autocast_mode(False)
            self._threads.add(threading.get_ident())

    def on(self) -> None:
        """Put it back as it was, unless other threads need it off; does nothing without ``off``."""
        if not self._threads:  # on a GPU
            return
        with self._lock:
            self._threads.discard(threading.get_ident())
            if not self._threads:
                torch._C._jit_set_autocast_mode(self._before)


scripted = ScriptedAutocast()
