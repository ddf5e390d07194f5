"""The state that apex.amp keeps for a process; scripts access its attributes."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from tritonamp.apex.amp.casts import Casts
from tritonamp.apex.amp.properties import Properties
from tritonamp.apex.amp.scaler import LossScaler
from tritonamp.kernels.device import rank


class AmpState:
    """The results of the last ``initialize``, and a few switches.

    Attributes:
        opt_properties: properties of the last ``initialize``; missing before the first one.
        loss_scalers: loss scalers by loss_id, also for models that were initialized earlier.
        handle: the casts around torch's functions.
        allow_incoming_model_not_fp32: whether models may have half parameters, which stay half.
        hard_override: whether contradictory properties are printed instead of raised.
        verbosity: 0 prints nothing.
    """

    opt_properties: Properties
    handle: Casts

    def __init__(self) -> None:
        self.hard_override = False
        self.allow_incoming_model_not_fp32 = False
        self.verbosity = 1
        self.min_loss_scale: float | None = None
        self.max_loss_scale = 2.0**24
        self.loss_scalers: list[LossScaler] = []


_amp_state = AmpState()


def warn_or_err(message: str) -> None:
    """Raise RuntimeError, or print where the user has set ``hard_override``."""
    if not _amp_state.hard_override:
        raise RuntimeError(message)
    print("Warning:  " + message)


def maybe_print(message: str, rank0: bool = False) -> None:
    """Print unless ``verbosity`` is 0; with ``rank0`` only there."""
    if _amp_state.verbosity > 0 and not (rank0 and rank() != 0):
        print(message)


def master_params(optimizer: Any) -> Iterator[Tensor]:
    """Return the tensors that ``optimizer`` steps on: FP32 masters, else the parameters.

    After a ``scale_loss`` block their gradients are unscaled.
    """
    for group in optimizer.param_groups:
        yield from group["params"]
