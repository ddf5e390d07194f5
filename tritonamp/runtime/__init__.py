"""``enable`` and ``Amp``: the only package that knows all the others."""

from tritonamp.runtime.amp import Amp as Amp
from tritonamp.runtime.enabling import enable as enable
from tritonamp.runtime.enabling import scaler_for as scaler_for
from tritonamp.runtime.handles import handle as handle
