"""The outcome of a decision, which the step yields, and what listens to it."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tritonamp.kernels._loss_scale import ScaleRule
from tritonamp.step.snapshots import Snapshot


class NonFiniteError(RuntimeError):
    """Raised under ``on_nonfinite="raise"`` for skips that no lower scale could have avoided."""


class Outcome(NamedTuple):
    """A decision that was made; its numbers are on their way from the device to the host.

    Attributes:
        rule: rule of the loss scale.
        forwards: recorded forwards that led to the decision.
        untouched: whether only the last step has written to the parameters since it.
        veto_reason: why the library has vetoed it; "" if it has not.
        has_gradient_in_loss: as of the ``Decision``.
    """

    rule: ScaleRule
    forwards: Sequence[Snapshot] = ()
    untouched: bool = False
    veto_reason: str = ""
    has_gradient_in_loss: bool = False


class Observer(Protocol):
    """An add-on that explains skips, and looks at weights and gradients in a few steps."""

    def look(self, decision: Any) -> bool:
        """Look at a ``Decision`` before it is made, in the first steps and in steps 8, 16, 32...

        Returns:
            whether numbers of a look are on their way, so that the next call is due.
        """

    def collect_looks(self) -> bool:
        """Read numbers of looks that have arrived; return whether others are on their way."""

    def measure(self, counts: Tensor) -> None:
        """Measure the weights before the step of a decision that was looked at.

        Args:
            counts: number of decisions by outcome, with this one, on the device.
        """

    def skipped(self, values: Sequence[float], outcome: Outcome) -> None:
        """Explain a skip whose numbers have arrived.

        Args:
            values: numbers of the record, valid during the call.
            outcome: the decision.
        """


def found_inf_of(decisions: Sequence[Any]) -> Tensor:
    """Return a 0-d flag that is not 0 if any of the decisions is a skip."""
    # almost every step: no launch
    if len(decisions) == 1:
        flag: Tensor = decisions[0].found_inf
        return flag
    return torch.stack([d.found_inf for d in decisions]).amax()
