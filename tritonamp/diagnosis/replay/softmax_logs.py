"""The edit that takes ``log_softmax`` in place of the logarithm of a softmax."""

import math
from typing import Any

import torch
from torch import Tensor

from tritonamp.diagnosis.replay.user_calls import Patch, Site
from tritonamp.diagnosis.replay.verdicts import SMALL_DIVISOR

_UNITS = {"log": 1.0, "log2": 1 / math.log(2), "log10": 1 / math.log(10)}
_CASTS = "float half bfloat16 to type contiguous clone".split()
_SHIFTS = "add __add__ __radd__ clamp clamp_min".split()
_PICKS = """reshape view flatten squeeze unsqueeze transpose permute __getitem__ gather index_select
    select narrow take_along_dim masked_select t swapaxes swapdims movedim flip expand diagonal
    detach""".split()


class LogSoftmax(Patch):
    """``log_softmax(x)`` in place of the logarithm of a softmax of ``x``.

    The patch follows probabilities from the softmax to the logarithm. On the way casts and an added
    eps are left out, and a call that picks elements picks the same elements of the logarithms.
    Probabilities that were written to are no longer those of a softmax.

    Args:
        softmax: calls of the softmax.
        log: calls of the logarithm.
    """

    def __init__(self, softmax: Site, log: Site) -> None:
        super().__init__("write log_softmax(x, dim) in place of log(softmax(x, dim))", {})
        self._softmax, self._log = softmax, log
        # by id of a tensor of probabilities: the tensor, its count of writes, and its logarithms
        self._logs: dict[int, tuple[Tensor, int, Tensor]] = {}

    def __call__(
        self, site: Site, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return the result of a call: of the logarithm, that of ``log_softmax``."""
        name = getattr(function, "__name__", "")
        logs = self._logs_of(args[0]) if args else None
        if logs is not None and site == self._log and name in _UNITS:
            self.used = True
            return logs * _UNITS[name]
        if logs is not None and name in _SHIFTS and _is_by_eps(name, args, kwargs):
            return args[0]  # without the eps
        result = function(*args, **kwargs)
        if site == self._softmax and isinstance(result, Tensor) and name != "softmin":
            dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
            self._note(result, torch.log_softmax(args[0], dim, dtype=kwargs.get("dtype")))
        elif logs is None:
            return result
        elif name in _CASTS:
            self._note(result, logs)
        elif name in _PICKS:
            self._note(result, function(logs, *args[1:], **kwargs))
        return result

    def _note(self, result: Tensor, logs: Tensor) -> None:
        self._logs[id(result)] = result, result._version, logs

    def _logs_of(self, value: Any) -> Tensor | None:
        """Return the logarithms of probabilities; None: it has others, or none."""
        tensor, version, logs = self._logs.get(id(value), (None, 0, None))
        return logs if tensor is not None and tensor._version == version else None


def _is_by_eps(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call adds an eps, or clamps by an eps from the ends of probabilities."""
    ends = (0.0, 1.0) if name.startswith("clamp") else (0.0,)
    others = [x for x in (*args[1:], *kwargs.values()) if x is not None]
    return all(
        isinstance(x, (int, float)) and any(abs(x - end) <= SMALL_DIVISOR for end in ends)
        for x in others
    )
