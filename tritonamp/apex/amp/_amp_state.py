"""The one state that apex.amp keeps for a process; scripts reach into it by name."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from tritonamp.apex.amp.casts import Casts
from tritonamp.apex.amp.properties import Properties
from tritonamp.apex.amp.scaler import LossScaler
from tritonamp.kernels.device import rank


class AmpState:
    """What the last ``initialize`` left, and a few switches.

    Attributes:
        opt_properties: its properties; missing before the first.
        loss_scalers: by loss_id; all losses use them, also those of models that were initialized
            earlier.
        handle: the casts around torch's functions.
        allow_incoming_model_not_fp32: half parameters that a model comes with stay half; otherwise
            it is refused.
        hard_override: combinations of properties that make no sense are printed instead of raised.
        verbosity: 0: nothing is printed.
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
    """Return the tensors that ``optimizer`` steps on: FP32 masters where there are any.

    Their gradients are true ones after a ``scale_loss`` block.
    """
    for group in optimizer.param_groups:
        yield from group["params"]
