"""Steps without gradients: one warning after three in a row."""

import logging

from torch.optim import Optimizer

from tritonamp.class_swap import base_class
from tritonamp.step.master_weights import MasterWeights
from tritonamp.watched.frames import user_line

logger = logging.getLogger("tritonamp")

_IN_A_ROW = 3


class IdleSteps:
    """Counts steps in a row that found no gradients, for each optimizer.

    Optimizers that take turns have no gradients while another one steps. Therefore a step with
    gradients, of any optimizer, restarts all counts. Steps over frozen parameters are not counted,
    because frozen parameters have no gradients by design.
    """

    def __init__(self) -> None:
        self._in_a_row: dict[Optimizer, int] = {}
        self._tried = 0
        self._has_warned = False

    def note(self, weights: MasterWeights, tried: int) -> None:
        """Count a step without gradients, and warn at the third in a row.

        Args:
            weights: master weights of the optimizer whose ``step`` was called.
            tried: number of steps with gradients so far, summed over all optimizers.
        """
        rows = weights.masters.with_groups()
        if not any(param.requires_grad and master.requires_grad for param, master, _ in rows):
            return
        optimizer = weights.optimizer
        if tried != self._tried:
            self._in_a_row.clear()
            self._tried = tried
        # One warning for a whole run: the same loop would repeat the message at every step.
        found = self._in_a_row.get(optimizer, 0) + 1
        self._in_a_row[optimizer] = found
        if found < _IN_A_ROW or self._has_warned:
            return
        self._has_warned = True
        logger.warning(
            "%s.step()%s found no gradient %d times in a row, and did nothing: call "
            "amp.backward(loss) before each step, and zero_grad() after the step or before the "
            "backward, not between the two. If nothing is to train, freeze the parameters by "
            "requires_grad_(False)",
            base_class(type(optimizer)).__name__,
            user_line(),
            found,
        )
