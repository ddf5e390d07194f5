"""The watch of a replay, in a form that stays active across the user's code."""

import contextlib
import sys
import threading
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from tritonamp.diagnosis.replay.model_names import ModelNames
from tritonamp.diagnosis.replay.watching import Watch
from tritonamp.watched.ops import OpCall, floats

_COLLECTIVES = ("c10d", "_c10d_functional")


class LiveWatch(Watch):
    """A watch that begins in a forward of the user's program and ends at the loss.

    No failure of it reaches the program: it becomes passive, and passes ops through.

    Args:
        names: names of modules, parameters and buffers.
        loop: frame that is on the stack until the loss is known, unless an exception leaves it.

    Attributes:
        passive: whether it has given up.
    """

    outside = "from before the forward"

    def __init__(self, names: ModelNames, loop: FrameType) -> None:
        super().__init__(names)
        self.passive = False
        self._loop: FrameType | None = loop
        self._undo = contextlib.ExitStack()
        self._eager = contextlib.ExitStack()  # until the mode is left

    def begin(self) -> None:
        """Become active until ``end``. No dispatch mode may be active."""
        self._thread = threading.get_ident()
        hooks = nn.modules.module
        for hook in (
            hooks.register_module_forward_pre_hook(self.note_entered),
            hooks.register_module_forward_hook(self._note_left, always_call=True),
        ):
            self._undo.callback(hook.remove)
        # torch.compile with fullgraph=True raises inside of a dispatch mode
        self._eager.enter_context(torch.compiler.set_stance("force_eager"))
        TorchDispatchMode.__enter__(self)

    def is_here(self) -> bool:
        """Return whether this is the innermost mode, in the thread in which it began."""
        return self._is_seen() and _get_current_dispatch_mode() is self

    def end(self) -> bool:
        """Leave the mode. Return False if another mode was entered since: try again later."""
        if not self.is_here():
            self._give_up()
            return False
        TorchDispatchMode.__exit__(self, None, None, None)
        self._eager.close()
        self._give_up()
        self.passive = False  # a ``with`` block may watch a backward now
        return True

    def _give_up(self) -> None:
        self.passive, self._loop = True, None
        self._undo.close()

    def _has_lost_loop(self) -> bool:
        """Return whether an exception has left the training loop."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self._loop:
            frame = frame.f_back
        return frame is None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call, ran = OpCall(func, args, kwargs or {}), None
        if self._loop is not None and self._has_lost_loop():
            self._give_up()
        if not self.passive and func.namespace not in _COLLECTIVES:
            with contextlib.suppress(Exception):
                ran = self._ran(call)
            if ran is None:
                self._give_up()
        result = call.run()
        if ran is not None:
            try:
                results = floats([result, call.written_arguments()])
                # private (torch 2.11 to 2.15), as in ``Watch``
                with torch.no_grad(), torch._C._DisableAutocast():
                    self._note_results(ran, results)
            except Exception:  # of the watch itself, for example too little memory
                self._give_up()
        return result
