"""Drop-in for ``apex.optimizers``."""

from tritonamp.apex.optimizers.fused_adagrad import FusedAdagrad as FusedAdagrad
from tritonamp.apex.optimizers.fused_adam import FusedAdam as FusedAdam
from tritonamp.apex.optimizers.fused_lamb import FusedLAMB as FusedLAMB
from tritonamp.apex.optimizers.fused_mixed_precision_lamb import (
    FusedMixedPrecisionLamb as FusedMixedPrecisionLamb,
)
from tritonamp.apex.optimizers.fused_novograd import FusedNovoGrad as FusedNovoGrad
from tritonamp.apex.optimizers.fused_sgd import FusedSGD as FusedSGD

__all__ = [
    "FusedAdagrad",
    "FusedAdam",
    "FusedLAMB",
    "FusedMixedPrecisionLamb",
    "FusedNovoGrad",
    "FusedSGD",
]
