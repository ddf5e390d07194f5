"""torch's clipping, called on gradients that carry the loss scale: one warning.

Of gradients that are 65536 times too large a clip to norm 1 leaves a 65536th of what was meant, and
training stands still without an error.
"""

import functools
import logging
import sys
import weakref
from collections.abc import Callable, Iterable
from types import CellType, GeneratorType
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

from tritonamp.watched.frames import Role, outwards

logger = logging.getLogger("tritonamp")

CLIPPING = (clip_grad.clip_grad_norm_, clip_grad.clip_grad_value_)


class ScaledGradients:
    """The gradients of one ``Amp``, and whether anybody has been warned about clipping them.

    Args:
        params: gives the tensors whose gradients carry the loss scale now, and their masters.
    """

    def __init__(self, params: Callable[[], Iterable[Tensor]]) -> None:
        self._params = params
        self._has_warned = False

    def warn_if_clipped(self, given: set[int], function: Callable[..., Any]) -> None:
        """Warn, once, where torch is about to clip some of them.

        Args:
            given: ids of the tensors whose gradients are clipped.
            function: of torch.
        """
        if self._has_warned or not any(id(param) in given for param in self._params()):
            return
        self._has_warned = True
        logger.warning(
            "torch.nn.utils.%s%s is given gradients that still carry the loss scale, so it leaves "
            "next to nothing of them: call amp.clip_grad_norm_(max_norm) in its place, or "
            "amp.unscale_() before it",
            function.__name__,
            _user_line(),
        )


def _user_line() -> str:
    """Return " at FILE:LINE" of the user's innermost frame."""
    for frame, role in outwards(sys._getframe(1)):
        if role is Role.USER:
            return f" at {frame.f_code.co_filename}:{frame.f_lineno}"
    return ""


class _Watched:
    """torch's functions that clip, which are watched while a model is enabled.

    Attributes:
        gradients: of all enabled models.
        stock: where torch's functions keep what they wrap, and what was there.
        owners: how many enabled models there are.
    """

    def __init__(self) -> None:
        self.gradients: weakref.WeakSet[ScaledGradients] = weakref.WeakSet()
        self.stock: list[tuple[CellType, Any]] = []
        self.owners = 0

    def put(self) -> None:
        """Put ours in the place of what torch's functions wrap.

        Inside them, since scripts have said ``from torch.nn.utils import clip_grad_norm_`` before.
        """
        for function in CLIPPING:
            cell = wrapped_cell(function)
            if cell is not None:
                self.stock.append((cell, cell.cell_contents))
                cell.cell_contents = _warning_first(cell.cell_contents, self.gradients)

    def take_back(self) -> None:
        """Put back what was there."""
        for cell, stock in self.stock:
            cell.cell_contents = stock
        self.stock.clear()


def wrapped_cell(function: Any) -> CellType | None:
    """Return where a function of torch keeps the one that it runs without gradients, if it does."""
    # private (torch 2.11 to 2.15): the only free variable of what torch.no_grad has in its place
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
            for one in list(gradients):
                one.warn_if_clipped(set(map(id, given)), function)
        return function(parameters, *args, **kwargs)

    return clip


_watched = _Watched()


def acquire(gradients: ScaledGradients) -> None:
    """Watch the clipping of one more enabled model's gradients, as long as they are there."""
    _watched.gradients.add(gradients)
    _watched.owners += 1
    if _watched.owners == 1:
        _watched.put()


def release() -> None:
    """Take back one ``acquire``; the last one puts torch's functions back."""
    _watched.owners -= 1
    if _watched.owners == 0:
        _watched.take_back()
