"""Where the operations of a run come from: module and line, in the forward and in the backward."""

import bisect
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tritonamp.frames import Role, outwards

MOVES = ("_unsafe_view", "clone", "_reshape_alias", "expand_copy", "lift_fresh", "_to_copy")
"""The values stay what they are."""


class Location(NamedTuple):
    """Where an op runs.

    Attributes:
        module: the path of its module.
        line: of the user's code, as "file:number".
    """

    module: str
    line: str


class PlacedOps(TorchDispatchMode):
    """A mode whose ops know where they come from.

    Attributes:
        modules: paths of the modules that the forward is in, innermost last.
        failed: the innermost module that raised, or "".
        threads: modules that ran in another thread, which the mode does not see.
    """

    def __init__(self) -> None:
        super().__init__()
        self.modules: list[str] = []
        self.failed = ""
        self.threads: dict[str, None] = {}
        # sequence numbers of autograd nodes, ascending, and where they were made
        self._nodes: list[int] = []
        self._places: list[Location] = []

    def follow(self, model: nn.Module) -> None:
        """Know from now on which module of ``model`` the forward is in."""
        thread = threading.get_ident()

        def enter(path: str) -> Callable[..., None]:
            def hook(*_: Any) -> None:
                if threading.get_ident() == thread:
                    self.modules.append(path)
                else:
                    self.threads[path] = None

            return hook

        def leave(*_: Any) -> None:
            if threading.get_ident() == thread:
                failing = sys.exc_info()[0] is not None
                self.failed = self.failed or (self.modules[-1] if failing else "")
                self.modules.pop()

        for path, module in model.named_modules():
            module.register_forward_pre_hook(enter(path), prepend=True)
            module.register_forward_hook(leave, always_call=True)

    def place_of(self, node: Any) -> Location:
        """Return where the forward op of an autograd node ran."""
        at = bisect.bisect_right(self._nodes, node._sequence_nr()) - 1
        return self._places[at] if at >= 0 else Location("", "")

    def place(self) -> Location:
        """Return where the op that is running comes from; in backward, its forward op."""
        if self.in_backward():
            return self.place_of(torch._C._current_autograd_node())
        return Location(self.modules[-1] if self.modules else "", _line())

    def in_backward(self) -> bool:
        """Return whether this is a backward; a checkpointed segment that runs again is forward."""
        return torch._C._current_autograd_node() is not None and not self.modules

    def remember(self, place: Location) -> None:
        """Know, in the backward, that the op about to run was run at ``place``."""
        # of the op's node, which autograd has just made; private (torch 2.11 to 2.15), nothing
        # public ties the node of a backward to the op of the forward
        sequence = torch._C._autograd._get_sequence_nr() - 1
        if not self.in_backward() and sequence > (self._nodes[-1] if self._nodes else -1):
            self._nodes.append(sequence)
            self._places.append(place)


def is_view(func: Any) -> bool:
    """Return whether the results of an op share memory with its inputs."""
    returns = func._schema.returns
    return bool(returns) and all(
        r.alias_info is not None and not r.alias_info.is_write for r in returns
    )


def _line() -> str:
    """Return the innermost line of the user's code, as "file:number"; "" without any.

    The file is named as linecache finds it: from the current folder, or where packages are.
    """
    for frame, role in outwards(sys._getframe(2)):
        if role is Role.USER:
            file = frame.f_code.co_filename.removeprefix(os.getcwd() + os.sep)
            file = file.rpartition(f"{os.sep}site-packages{os.sep}")[2]
            return f"{file}:{frame.f_lineno}"
    return ""
