"""A hint for an error of half weights that were used outside the forwards of the enabled models.

A half layer refuses FP32 inputs, and torch's error does not say why nothing has cast them. To watch
the calls of layers would cost each call inside the forwards, too. So the hint comes when the
process ends with such an error.
"""

import atexit
import logging
import re
import sys
import traceback
import weakref
from collections.abc import Sequence
from types import FrameType

from torch import nn

from tritonamp.casts.enabled_module import enabled_forward
from tritonamp.names import prefixes, short
from tritonamp.policy import Policy

logger = logging.getLogger("tritonamp")

_OF_DTYPES = re.compile(r"\b(Half|BFloat16|(same|mixed) (d|data )?type)\b", re.IGNORECASE)


_looking: weakref.WeakSet["PastErrors"] = weakref.WeakSet()


@atexit.register
def _look() -> None:
    """Look at the error by which the process ends."""
    for errors in list(_looking):
        errors.look()


class PastErrors:
    """Looks at the error by which the process or the block of the ``Amp`` ends, until ``remove``.

    Args:
        models: models that are enabled now; only weak references are kept.
        policy: policy of the models.
    """

    def __init__(self, models: Sequence[nn.Module], policy: Policy) -> None:
        self._models = [weakref.ref(model) for model in models]
        self._policy = policy
        if policy.cast_model or policy.half_parameters:
            _looking.add(self)

    def remove(self) -> None:
        """Stop looking at errors."""
        _looking.discard(self)

    def look(self, error: BaseException | None = None) -> None:
        """Log a hint if half weights outside of a forward caused an error.

        Args:
            error: the error; None: the last uncaught one.
        """
        if error is None:  # Python notes it before it prints the traceback
            error = getattr(sys, "last_value", None)
        models = [model for ref in self._models if (model := ref()) is not None]
        if not isinstance(error, RuntimeError) or not _OF_DTYPES.search(str(error)):
            return
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        if any(frame.f_code is enabled_forward.__code__ for frame in frames):
            return
        name = _first_module(models, frames)
        if name is None:
            return
        cast = "put 'with amp.autocast():' around that code"
        if not self._policy.op_policy:
            cast = f"cast its inputs, x.to({self._policy.dtype})"
        logger.warning(
            "%s was called outside the forward of the enabled model, where nothing casts its "
            "inputs to %s, the dtype of its weights: call the model, or %s",
            name,
            short(self._policy.dtype),
            cast,
        )


def _first_module(models: Sequence[nn.Module], frames: Sequence[FrameType]) -> str | None:
    """Return the name of the first module of the models whose method has a frame, or None."""
    names = {
        module: f"{type(model).__name__}.{prefix}{name}"
        for model, prefix in zip(models, prefixes(models), strict=True)
        for name, module in model.named_modules()
    }
    modules = (frame.f_locals.get("self") for frame in frames)
    return next((names[m] for m in modules if isinstance(m, nn.Module) and m in names), None)
