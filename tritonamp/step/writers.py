"""Which optimizer steps on which parameter, for reports about inf and NaN in parameters."""

from collections.abc import Iterable, Mapping

from torch import Tensor

from tritonamp.class_swap import base_class
from tritonamp.diagnosis.skips import Writer
from tritonamp.step.master_weights import MasterWeights
from tritonamp.step.rules import zero_eps


def writers(weights: Iterable[MasterWeights], names: Mapping[Tensor, str]) -> dict[str, Writer]:
    """Return parameter name to a description of the optimizer that steps on the parameter.

    Args:
        weights: master weights of the optimizers.
        names: parameter to its name.
    """
    return {
        names[param]: Writer(
            base_class(type(w.optimizer)).__name__,
            float(group["lr"]) if "lr" in group else None,
            master.dtype,
            zero_eps(w.optimizer, group, master.dtype),
        )
        for w in weights
        for param, master, group in w.with_groups()
        if param in names
    }
