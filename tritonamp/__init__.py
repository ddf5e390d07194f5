"""Mixed precision for PyTorch that stays finite and explains itself."""

import importlib
from typing import TYPE_CHECKING, Any

from tritonamp import functional as functional
from tritonamp.casts.user_functions import disable_casts as disable_casts
from tritonamp.casts.user_functions import float_function as float_function
from tritonamp.casts.user_functions import half_function as half_function
from tritonamp.casts.user_functions import promote_function as promote_function
from tritonamp.casts.user_functions import register_float_function as register_float_function
from tritonamp.casts.user_functions import register_half_function as register_half_function
from tritonamp.casts.user_functions import register_promote_function as register_promote_function
from tritonamp.kernels.device import UnsupportedDeviceError as UnsupportedDeviceError
from tritonamp.policy import O0 as O0
from tritonamp.policy import O1 as O1
from tritonamp.policy import O2 as O2
from tritonamp.policy import O3 as O3
from tritonamp.policy import Policy as Policy
from tritonamp.runtime import Amp as Amp
from tritonamp.runtime import enable as enable
from tritonamp.runtime import handle as handle
from tritonamp.scaler import GradScaler as GradScaler
from tritonamp.step.outcome import NonFiniteError as NonFiniteError

if TYPE_CHECKING:
    from tritonamp import optim as optim
    from tritonamp.checkpoint import RNGState as RNGState
    from tritonamp.checkpoint import load as load
    from tritonamp.checkpoint import load_sharded as load_sharded
    from tritonamp.checkpoint import save as save
    from tritonamp.checkpoint import save_sharded as save_sharded
    from tritonamp.forecast import Comparison as Comparison
    from tritonamp.forecast import Forecast as Forecast
    from tritonamp.forecast import check as check

__version__ = "0.1.0"

__all__ = [
    "O0",
    "O1",
    "O2",
    "O3",
    "Amp",
    "Comparison",
    "Forecast",
    "GradScaler",
    "NonFiniteError",
    "Policy",
    "RNGState",
    "UnsupportedDeviceError",
    "check",
    "disable_casts",
    "enable",
    "float_function",
    "functional",
    "half_function",
    "handle",
    "load",
    "load_sharded",
    "optim",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "save",
    "save_sharded",
]

# Modules that training with an optimizer of torch does not need, and the names that come from them.
_LATER = {
    "checkpoint": ("RNGState", "load", "load_sharded", "save", "save_sharded"),
    "forecast": ("Comparison", "Forecast", "check"),
    "optim": (),
}


def __getattr__(name: str) -> Any:
    """Import one of these modules when it, or a name from it, is first asked for."""
    for module, names in _LATER.items():
        if name == module or name in names:
            found = importlib.import_module(f"{__name__}.{module}")
            return found if name == module else getattr(found, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names, those that are not imported yet included."""
    return sorted(__all__)
