"""A plain ``loss.backward()`` in addition to ``amp.backward(loss)``: one warning.

Gradients of a plain backward carry no loss scale, so they count 1 / scale as much as the others.
"""

import functools
import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from tritonamp.watched.frames import user_line

logger = logging.getLogger("tritonamp")

_STEPS = 4  # number of watched steps


class PlainBackwards:
    """Notes gradients of backwards that run outside of ``amp.backward``, by hooks on parameters.

    The hooks are removed after the first steps, because they cost a call for each parameter.

    Args:
        params: parameters that optimizers step on.
        is_scaled: function that tells whether the running backward is that of a scaled loss.

    Attributes:
        is_watching: whether the hooks are there.
    """

    def __init__(self, params: Iterable[Tensor], is_scaled: Callable[[], bool]) -> None:
        self._is_scaled = is_scaled
        self._steps = 0
        self._found: list[tuple[Tensor, Tensor, str]] = []  # parameter, gradient, line
        trained: Iterable[Any] = (p for p in params if p.is_leaf and p.requires_grad)
        # Weak, because a hook lives as long as its parameter. A plain method would keep this
        # object, and by ``is_scaled`` the decisions and masters, after the ``Amp`` is gone.
        hook = functools.partial(_note, weakref.ref(self))
        self._hooks = [p.register_post_accumulate_grad_hook(hook) for p in trained]
        self.is_watching = bool(self._hooks)

    def note(self, param: Tensor) -> None:
        """Note that a backward has added to the gradient of a parameter."""
        # The first parameter is enough for the warning, and its line is the only one that is asked
        # for: a walk over the stack for each parameter would slow the backward.
        if not self._is_scaled() and param.grad is not None and not self._found:
            self._found = [(param, param.grad, user_line())]

    def check(self) -> None:
        """Warn, before a step on scaled gradients, if unscaled ones were added to them."""
        found, self._found = self._found, []
        self._steps += 1
        # gradients that were cleared since are other tensors: nothing was mixed
        mixed = [line for param, grad, line in found if param.grad is grad]
        if mixed:
            logger.warning(
                "a plain loss.backward()%s has added gradients to those of amp.backward(loss), "
                "without the loss scale: they count next to nothing. Call amp.backward(loss) for "
                "each loss, or clear gradients that are not to count by zero_grad() before it",
                mixed[0],
            )
        if mixed or self._steps >= _STEPS:
            self.remove()

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._found = []
        self.is_watching = False


def _note(watch: "weakref.ref[PlainBackwards]", param: Tensor) -> None:
    watching = watch()
    if watching is not None:
        watching.note(param)
