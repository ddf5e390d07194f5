"""Module and source line of each op; an op of a backward has those of its forward op."""

import contextlib
import dataclasses
import os
import re
import sys
import threading
import warnings
from collections.abc import Mapping
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tritonamp.watched.frames import Role, outwards

Mode = TypeVar("Mode", bound="PlacedOps")


@dataclasses.dataclass(frozen=True)
class Place:
    """Module and source line of an op. Places are equal if module, file and number are.

    Attributes:
        module: full name of the innermost module, "" for the model itself, None outside the model.
        kind: class name of that module.
        op: name of the op, like "linear"; in a backward, name of the forward op of the gradient.
        file: the user's source file; None if only torch's code ran between the model and the op.
        number: line number in that file; 0 without a file.
        function: function of torch that the user called there, if the run notes it.
        inside: line of torch's own Python code that called the op for the user's line, like
            "torch/distributions/normal.py:83", if the run notes it.
    """

    module: str | None = None
    kind: str = dataclasses.field(default="", compare=False)
    op: str = dataclasses.field(default="", compare=False)
    file: str | None = None
    number: int = 0
    function: Any = dataclasses.field(default=None, compare=False, repr=False)
    inside: str = dataclasses.field(default="", compare=False, repr=False)

    @property
    def name(self) -> str:
        """The module in words."""
        if self.module is None:
            return "outside the model"
        return self.module or f"the model itself ({self.kind})"

    @property
    def line(self) -> str:
        """The line as "file:number", or "".

        The file is relative to the current folder or to site-packages, so linecache finds it.
        """
        if self.file is None:
            return ""
        file = self.file.removeprefix(os.getcwd() + os.sep)
        return f"{file.rpartition(f'{os.sep}site-packages{os.sep}')[2]}:{self.number}"

    def __str__(self) -> str:
        line = f" at {self.file}:{self.number}" if self.file else ""
        return f"{self.name}, op {self.op}{line}"


class Way(NamedTuple):
    """Facts about the frames between an op and the user's innermost code that called it."""

    rule: FrameType | None  # the frame of a rule of the op table, if the op is in one
    at_edge: bool  # an enabled model casts its inputs or outputs there
    file: str | None  # the user's source, None where the run began first
    number: int  # of the line in that file

    @classmethod
    def out_of(cls, innermost: FrameType) -> "Way":
        """Walk the stack from a frame outwards."""
        rule, at_edge = None, False
        for frame, role in outwards(innermost):
            if role is Role.USER:
                return cls(rule, at_edge, frame.f_code.co_filename, frame.f_lineno)
            if role is Role.RUN:
                break
            if role is Role.RULE:
                rule = frame
            at_edge = at_edge or role is Role.EDGE
        return cls(rule, at_edge, None, 0)


class PlacedOps(TorchDispatchMode):
    """A mode that knows the module and source line of each op, because it follows forwards.

    A module that ``names`` lacks counts as part of its caller. Backwards inside the mode run in
    the thread that calls them.
    """

    def __init__(self, names: Mapping[nn.Module, str]) -> None:
        super().__init__()
        self.names = names
        self.modules: list[nn.Module] = []  # their forwards are running, innermost last
        self.failed: nn.Module | None = None  # the innermost one that raised
        self.function: Any = None  # function of torch that the user's code has called, if known
        self.inside = ""  # the line of torch that has called one instead
        # names of modules that ran in another thread, which the mode does not see
        self.threads: dict[str, None] = {}
        self._nodes: dict[int, Place] = {}  # where autograd nodes were made, by sequence number

    def __enter__(self: Mode) -> Mode:
        self._thread = threading.get_ident()
        hooks = nn.modules.module
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            # torch warns of compiled models that these hooks fire once more for their wrapper
            warnings.filterwarnings("ignore", message="Using `torch.compile")
            for hook in (
                hooks.register_module_forward_pre_hook(self.note_entered),
                hooks.register_module_forward_hook(self._note_left, always_call=True),
            ):
                stack.callback(hook.remove)
            # on a GPU backwards run in a thread of the device, whose autograd nodes have sequence
            # numbers of their own
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            super().__enter__()
            self._hooks = stack.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._hooks.close()

    def note_entered(self, module: nn.Module, args: Any) -> None:
        """Note that the forward of a module begins."""
        if module not in self.names:
            return
        if self._is_seen():
            self.modules.append(module)
        else:
            self.threads[self.names[module]] = None

    def _note_left(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._is_seen() and self.modules and self.modules[-1] is module:
            if sys.exc_info()[0] is not None:  # ``always_call``: the forward has raised
                self.failed = self.failed or module
            self.modules.pop()

    def _is_seen(self) -> bool:
        return threading.get_ident() == self._thread

    def place(self, op: str) -> Place:
        """Return the place of the running op; in a backward, the place of its forward op.

        Call it in ``__torch_dispatch__``, whose own frame is left out.
        """
        return self.place_by_graph(self.place_now(op, Way.out_of(sys._getframe(2))))

    def place_now(self, op: str, way: Way) -> Place:
        """Return the place of the innermost running forward."""
        name, kind = None, ""
        if self.modules:
            module = self.modules[-1]
            name, kind = self.names[module], type(module).__name__
        return Place(name, kind, op, way.file, way.number, self.function, self.inside)

    def place_by_graph(self, here: Place) -> Place:
        """Return the place of the running op, and remember it for the op's backward.

        Args:
            here: result of ``place_now``, which knows no module in a backward.
        """
        node = _node()
        origin = None if node is None else self.place_of_node(node)
        if self.in_backward():
            if origin is None and here.file is None:
                return dataclasses.replace(here, op=op_of(node) or here.op)
            if origin is None or here.file is None:
                return origin or here
            return dataclasses.replace(origin, file=here.file, number=here.number)
        # a checkpointed segment that is computed again runs inside of a node
        if origin is not None and here.module is None:
            here = dataclasses.replace(here, module=origin.module, kind=origin.kind)
        # of the op's node, which autograd has just made; private (torch 2.11 to 2.15), nothing
        # public ties the node of a backward to the op of the forward
        self._nodes.setdefault(torch._C._autograd._get_sequence_nr() - 1, here)
        return here

    def in_backward(self) -> bool:
        """Return whether a backward is running.

        Recomputation of a checkpointed segment counts as forward, because it records gradients.
        """
        return _node() is not None and not self.modules and not torch.is_grad_enabled()

    def place_of_node(self, node: Any) -> Place | None:
        """Return the place of the forward op of an autograd node."""
        number = node._sequence_nr()
        # writes to views make two or three nodes for one op
        made = (self._nodes.get(n) for n in range(number, number - 4, -1))
        return next(filter(None, made), None)


def op_of(node: Any) -> str:
    """Return the op of the forward that has made a node of torch: "sqrt" for "SqrtBackward0"."""
    found = re.fullmatch(r"(\w+)Backward\d+", node.name())
    # not before the P of Log1PBackward0
    return re.sub(r"(?<!^)(?=[A-Z][a-z])", "_", found[1]).lower() if found else ""


def _node() -> Any:
    """Return the autograd node that is running; None outside of backwards."""
    # private (torch 2.11 to 2.15): nothing public gives it
    return torch._C._current_autograd_node()
