"""The edit that replaces the logarithm of a softmax by ``log_softmax``."""

import math
from typing import Any

import torch
from torch import Tensor

from tritonamp.diagnosis.replay.user_calls import Patch, Site

_UNITS = {"log": 1.0, "log2": 1 / math.log(2), "log10": 1 / math.log(10)}
_CASTS = "float half bfloat16 to type contiguous clone".split()
_SHIFTS = "add __add__ __radd__ clamp clamp_min".split()  # of an eps
_PICKS = """reshape view flatten squeeze unsqueeze transpose permute __getitem__ gather index_select
    select narrow take_along_dim""".split()


class LogSoftmax(Patch):
    """``log_softmax(x)`` in place of the logarithm of a softmax of ``x``.

    The patch follows probabilities from the softmax to the logarithm. On the way casts and an added
    eps are left out, and a call that picks elements picks the same elements of the logarithms.

    Args:
        softmax: calls of the softmax.
        log: calls of the logarithm.
    """

    def __init__(self, softmax: Site, log: Site) -> None:
        super().__init__("write log_softmax(x, dim) in place of log(softmax(x, dim))", {})
        self._softmax, self._log = softmax, log
        # by id of a tensor of probabilities: the tensor, and its logarithms
        self._logs: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(
        self, site: Site, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return the result of a call: of the logarithm, that of ``log_softmax``."""
        name = getattr(function, "__name__", "")
        _, logs = self._logs.get(id(args[0]) if args else 0, (None, None))
        if logs is not None and site == self._log and name in _UNITS:
            self.used = True
            return logs * _UNITS[name]
        others = (*args[1:], *kwargs.values())
        if logs is not None and name in _SHIFTS and not any(isinstance(v, Tensor) for v in others):
            return args[0]  # without the eps
        result = function(*args, **kwargs)
        if site == self._softmax and isinstance(result, Tensor):
            dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
            dtype = kwargs.get("dtype")
            self._logs[id(result)] = result, torch.log_softmax(args[0], dim, dtype=dtype)
        elif logs is not None and name in _CASTS:
            self._logs[id(result)] = result, logs
        elif logs is not None and name in _PICKS:
            self._logs[id(result)] = result, function(logs, *args[1:], **kwargs)
        return result
