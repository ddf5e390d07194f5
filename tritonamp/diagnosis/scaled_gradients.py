"""Warn once of clipping at the wrong time, and of an optimizer that steps on scaled gradients.

With gradients that are 65536 times too large, a clip to norm 1 leaves a 65536th of the intended
step, and training stands still without an error. An optimizer that ``enable`` did not get steps
65536 times too far. Where ``enable`` got no optimizer, it steps on half weights without masters.
"""

import contextlib
import functools
import itertools
import logging
import math
import sys
import weakref
from collections.abc import Callable, Iterable
from types import CellType, GeneratorType
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tritonamp.class_swap import is_installed
from tritonamp.scaler import keeps_masters
from tritonamp.step.hooks import of_plain_steps
from tritonamp.watched.frames import outwards, user_line

logger = logging.getLogger("tritonamp")

CLIPPING = (clip_grad.clip_grad_norm_, clip_grad.clip_grad_value_)


class ScaledGradients:
    """The gradients of one ``Amp``, and the warnings given so far.

    Args:
        params: function that returns the tensors whose gradients carry the loss scale now, and
            their masters.
        left_out: function that returns parameters with gradients that no enabled optimizer holds,
            so that nothing unscales these gradients.
        halves: function that returns the models' half parameters.
        used: function that returns the tensors whose gradients are from before the last step.

    Attributes:
        has_clipped: whether gradients were clipped, by torch's functions or by ``Amp``.
    """

    def __init__(
        self,
        params: Callable[[], Iterable[Tensor]],
        left_out: Callable[[], Iterable[Tensor]],
        halves: Callable[[], Iterable[Tensor]],
        used: Callable[[], Iterable[Tensor]] = tuple,
    ) -> None:
        self._params = params
        self._left_out = left_out
        self._halves = halves
        self._used = used
        self.has_clipped = False
        self._has_warned = False
        self._has_warned_of_step = False

    def warn_if_clipped(
        self, given: set[int], function: Callable[..., Any], measures: bool = False
    ) -> None:
        """Warn, once, if ``function`` clips scaled gradients, or gradients from before a step.

        Args:
            given: ids of the parameters whose gradients are clipped.
            function: function of torch that clips.
            measures: whether it only returns a norm.
        """
        self.has_clipped = True
        if self._has_warned:
            return
        if any(id(param) in given for param in self._params()):
            text = _CLIPPED
        elif not measures and any(id(param) in given for param in self._used()):
            text = _CLIPPED_LATE
        else:
            return
        self._has_warned = True
        logger.warning(text, function.__name__, user_line())

    def is_news(self) -> bool:
        """Return whether there was no warning of clipping yet. From now on there was one."""
        was_silent, self._has_warned = not self._has_warned, True
        return was_silent

    def warn_if_stepped(self, optimizer: Optimizer) -> None:
        """Warn, once, where an optimizer that is not enabled is about to step on scaled gradients.

        A step on half weights causes a warning with any gradients, unless the optimizer keeps
        masters.
        """
        if self._has_warned_of_step:
            return
        given = {id(param) for group in optimizer.param_groups for param in group["params"]}
        if any(id(param) in given for param in (*self._params(), *self._left_out())):
            text = _SCALED
        elif not keeps_masters(optimizer) and any(id(p) in given for p in self._halves()):
            text = _BARE
        else:
            return
        self._has_warned_of_step = True
        logger.warning(text, type(optimizer).__name__, user_line())


_CLIPPED = (
    "torch.nn.utils.%s%s is given gradients that still carry the loss scale, so it leaves next to "
    "nothing of them: call amp.clip_grad_norm_(max_norm) in its place, or amp.unscale_() before it"
)
_CLIPPED_LATE = (
    "torch.nn.utils.%s%s is given gradients that no amp.backward(loss) has made since the last "
    "step, so it changes no step: call amp.clip_grad_norm_(max_norm) in its place, between "
    "amp.backward(loss) and optimizer.step()"
)
_SCALED = (
    "%s.step()%s is given gradients that carry the loss scale, but the optimizer is not one of "
    "those given to tritonamp.enable: nothing unscales them, nor skips. Call amp.disable(), and "
    "hand over every optimizer, amp = tritonamp.enable(model, [optimizer, other]): a list of "
    "modules instead of model, where the parameters belong to several"
)
_BARE = (
    "%s.step()%s steps on bare half weights, since the optimizer was not given to "
    "tritonamp.enable: small updates are rounded away, and an eps of 1e-8 is 0 in float16, which "
    "makes weights NaN. Call amp.disable(), make the optimizer then, hand it "
    'over, amp = tritonamp.enable(model, optimizer, level="O2"), and call amp.backward(loss) '
    "instead of loss.backward()"
)


class _Watched:
    """torch's functions that clip, and steps of optimizers, watched while a model is enabled."""

    def __init__(self) -> None:
        self.gradients: weakref.WeakSet[ScaledGradients] = weakref.WeakSet()
        self.owners = 0  # enabled models
        self._undo = contextlib.ExitStack()

    def acquire(self, gradients: ScaledGradients) -> None:
        """Watch the gradients of one more enabled model, while they exist."""
        self.gradients.add(gradients)
        self.owners += 1
        if self.owners > 1:
            return
        # inside of torch's functions: scripts have imported ``clip_grad_norm_`` before
        for function in CLIPPING:
            cell = wrapped_cell(function)
            if cell is not None:
                self._undo.callback(setattr, cell, "cell_contents", cell.cell_contents)
                cell.cell_contents = _warning_first(cell.cell_contents, self.gradients)
        self._undo.callback(register_optimizer_step_pre_hook(before_step).remove)

    def forget(self, gradients: ScaledGradients) -> None:
        """Warn no more of the gradients of a model that is disabled, while others are enabled."""
        self.gradients.discard(gradients)

    def release(self) -> None:
        """Undo one ``acquire``. The last call restores torch."""
        self.owners -= 1
        if self.owners == 0:
            self._undo.close()


def wrapped_cell(function: Any) -> CellType | None:
    """Return the cell in which a function of torch keeps its inner function; None: no such cell.

    The inner function is the one that torch.no_grad wraps.
    """
    # private (torch 2.11 to 2.15): the only free variable of the wrapper that torch.no_grad makes
    names = function.__code__.co_freevars
    return function.__closure__[0] if names == ("func",) else None


def _warning_first(
    function: Callable[..., Any], gradients: Iterable[ScaledGradients]
) -> Callable[..., Any]:
    @functools.wraps(function)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            if isinstance(parameters, GeneratorType):  # used up; torch warns of an empty one
                parameters = (param for param in given)
            limit = kwargs.get("max_norm", args[0] if args else None)
            measures = isinstance(limit, float) and math.isinf(limit)
            for one in list(gradients):
                one.warn_if_clipped(set(map(id, given)), function, measures)
        return function(parameters, *args, **kwargs)

    return clip


def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Warn where an optimizer that is not enabled steps on scaled gradients.

    torch calls this before the steps of all optimizers. The steps of a GradScaler are not checked,
    because it has unscaled the gradients.
    """
    if torch.compiler.is_compiling() or is_installed(optimizer) or _is_scalers_step():
        return
    for gradients in list(_watched.gradients):
        gradients.warn_if_stepped(optimizer)


def _is_scalers_step() -> bool:
    """Return whether a GradScaler, a few frames further out, calls the step."""
    frames = itertools.islice(outwards(sys._getframe(1)), 8)
    return any(isinstance(f.f_locals.get("self"), torch.amp.GradScaler) for f, _ in frames)


of_plain_steps.add(before_step)
_watched = _Watched()
acquire, forget, release = _watched.acquire, _watched.forget, _watched.release
