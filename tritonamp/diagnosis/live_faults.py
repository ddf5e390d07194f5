"""Watch a training step as it runs, to find a fault outside of the model."""

import dataclasses
import sys
from collections.abc import Sequence
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

from tritonamp.ambient import is_traced, preserve
from tritonamp.diagnosis.replay import FaultReport
from tritonamp.diagnosis.replay.faults import BY_FUNCTION
from tritonamp.kernels._dynamo import never_alone
from tritonamp.kernels.device import is_capturing
from tritonamp.scaler import GradScaler
from tritonamp.watched.forwards import Spectator
from tritonamp.watched.frames import Role, outwards, plays
from tritonamp.watched.graph import nodes
from tritonamp.watched.ops import is_finite

_UNTRIED = f"{BY_FUNCTION} runs the loss again, and tries remedies"
FORWARDS = 64  # of a step; more come from a loop that leaves losses out, or from an evaluation
STEPS = 4  # most steps that are watched after an unexplained fault


class LiveFaults(Spectator):
    """Watches whole steps, from their first forward to the loss, after ``arm`` was called.

    A dispatch mode is active while the user's code computes the loss. If the loss is not finite,
    the mode has seen the op where inf or NaN began. Otherwise a watched backward runs before the
    user's own, to find that op for the gradients.

    The mode gives up, and only passes ops through, if it cannot end at the loss: the user has
    entered another mode since, or an exception has left the training loop.

    Args:
        models: enabled models.
        scaler: scaler that the user may drive in a ``torch.amp`` loop.
        can_watch: whether forwards and backwards run without other ranks, unlike those of FSDP2.

    Attributes:
        is_watching: whether the loss of this step is wanted; no property, because each step asks.
    """

    def __init__(self, models: Sequence[nn.Module], scaler: GradScaler, can_watch: bool) -> None:
        self._models = models
        self._scaler = scaler
        self._can_watch = can_watch
        self._steps_left = 0
        self._forwards = 0  # since the watch began
        self._loop: set[tuple[int, CodeType]] = set()  # the frames around the last decision
        self._watch: Any = None  # a LiveWatch, from the first forward to the loss
        self.is_watching = False
        self._replay: Any = None  # the Replay that owns the watch
        self._fault: FaultReport | None = None  # found in this step

    def arm(self) -> bool:
        """Watch the next steps, until one has a fault. Return False where that is not possible."""
        if self._can_watch:
            self._steps_left = STEPS
            self._loop = {(id(f), f.f_code) for f in _user_frames(sys._getframe(1))}
        return self._can_watch

    def decided(self) -> tuple[bool, FaultReport | None]:
        """Note a decision. Return whether its step was watched, and the fault found in it."""
        was_armed, fault = self._steps_left > 0, self._fault
        self._end()
        self._fault = None
        self._steps_left = 0 if fault else max(self._steps_left - 1, 0)
        return was_armed, fault

    @never_alone
    def before(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], method: str) -> Any:
        """Begin to watch at the first forward of a step, if ``arm`` was called."""
        self._forwards += 1
        if self._watch is not None and (self._watch.passive or self._forwards > FORWARDS):
            self._end()
            self._steps_left = 0 if self._forwards > FORWARDS else self._steps_left
        if self._watch is not None or not self._steps_left or self._fault is not None:
            return None
        if not torch.is_grad_enabled() or is_traced() or _is_in_backward() or _captures(model):
            return None
        frames = _user_frames(sys._getframe(1))
        loop = next((f for f in frames if (id(f), f.f_code) in self._loop), None)
        if loop is None:  # another thread, or another program
            return None
        self._begin(loop, model, args)
        return model

    def after(self, noted: Any, output: Any) -> None:
        """Note that the first forward has returned."""
        if self._watch is not None and self._watch.modules[-1:] == [noted]:
            self._watch.modules.pop()

    def failed(self, noted: Any) -> None:
        """Give up a step whose first forward has raised."""
        self._end()

    def _begin(self, loop: FrameType, model: nn.Module, args: tuple[Any, ...]) -> None:
        from tritonamp.diagnosis.live_watch import LiveWatch  # here, because few runs watch
        from tritonamp.diagnosis.replay.search import Replay

        self._forwards = 0
        self._replay = Replay(list(self._models), 1.0)
        self._watch = watch = self._replay.watch = LiveWatch(self._replay.names, loop)
        watch.begin()
        watch.note_entered(model, args)  # the hooks come too late for this forward
        self._scaler.on_loss, self.is_watching = self.note_loss, True

    def _end(self) -> bool:
        """Leave the mode. Return whether it has seen all ops of the step."""
        watch = self._watch
        if watch is None:
            return False
        complete = not watch.passive and watch.is_here()
        if watch.end():
            self._watch = self._scaler.on_loss = None
            self.is_watching = False
        return complete

    def note_loss(self, loss: Tensor, scaler: GradScaler) -> None:
        """Look for the fault in a loss, or in its backward. Raises nothing.

        Args:
            loss: loss of the step, or of a micro-batch of it.
            scaler: scaler of the loss.
        """
        replay = self._replay
        if self._end():
            try:
                replay.scale = scaler.get_scale()
                found = _fault_in(replay, loss)
                self._fault = found and dataclasses.replace(found, untried=_UNTRIED)
            except Exception:  # too little memory, or a backward that runs only once
                self._fault = None
        if self._watch is None:
            self._replay = None


@plays(Role.RUN)
def _fault_in(replay: Any, loss: Tensor) -> FaultReport | None:
    """Return the fault of a loss that a watch has seen, or of its backward."""
    from tritonamp.diagnosis.replay.backward import Backward

    if not is_finite(loss):
        found: FaultReport | None = replay.fault_of_forward(loss)
        return found
    if not _can_repeat(loss):
        return None
    grads = {p: p.grad for p in replay.params.values()}
    with preserve({loss.device}):
        try:
            found = replay.fault_of_backward(Backward(loss, None, replay.scale, replay.params))
        finally:
            for p, grad in grads.items():
                p.grad = grad
    return found


def _can_repeat(loss: Tensor) -> bool:
    """Return whether the backward of a loss may run before the user's own.

    Functions of other libraries may write to the tensors that they have saved, and the backward of
    reentrant checkpoints adds to ``.grad``.
    """
    for node in nodes(loss):
        function = getattr(node, "_forward_cls", None)
        if type(node).__name__ == "CheckpointFunctionBackward":
            return False
        if function is not None and function.__module__.split(".")[0] not in ("torch", "tritonamp"):
            return False
    return True


def _user_frames(frame: FrameType) -> list[FrameType]:
    return [found for found, role in outwards(frame) if role is Role.USER]


def _is_in_backward() -> bool:
    """Return whether a backward is running, which computes a checkpointed segment again."""
    # private (torch 2.11 to 2.15), as in ``PlacedOps``
    return torch._C._current_autograd_node() is not None


def _captures(model: nn.Module) -> bool:
    return any(is_capturing(device) for device in {p.device for p in model.parameters()})
