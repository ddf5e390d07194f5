"""Steps without gradients: one warning where an optimizer makes three in a row."""

import logging

from torch.optim import Optimizer

from tritonamp.class_swap import base_class
from tritonamp.step.masters import Masters
from tritonamp.watched.frames import user_line

logger = logging.getLogger("tritonamp")

_IN_A_ROW = 3


class IdleSteps:
    """The last steps of each optimizer, as far as they found no gradients.

    Optimizers that take turns find none while another one steps: only steps between which none of
    them had gradients are counted. An optimizer whose parameters are all frozen has none by design.
    """

    def __init__(self) -> None:
        self._in_a_row: dict[Optimizer, int] = {}
        self._tried = 0
        self._has_warned = False

    def note(self, masters: Masters, tried: int) -> None:
        """Note a step without gradients.

        Args:
            masters: masters of the optimizer whose ``step`` was called.
            tried: number of steps with gradients so far, of all optimizers together.
        """
        if not any(p.requires_grad and m.requires_grad for p, m, _ in masters.with_groups()):
            return
        optimizer = masters.optimizer
        if tried != self._tried:
            self._in_a_row.clear()
            self._tried = tried
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
