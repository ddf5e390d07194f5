"""A warning about a loss that was computed outside the forwards of the enabled models."""

import logging
from collections.abc import Sequence

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from tritonamp.casts.active import process
from tritonamp.casts.methods import other_users
from tritonamp.names import parameter_names
from tritonamp.watched.graph import gradient_leaves, nodes

logger = logging.getLogger("tritonamp")

_SHOWN = 3  # parameters and methods in a line


class FirstLoss:
    """Checks at the first loss whether an enabled forward came before it.

    Args:
        models: models that are enabled now.
        watches: whether forwards run under an op policy. Without one, nothing can be missed.

    Attributes:
        is_awaited: whether the first loss is still to be checked.
    """

    def __init__(self, models: Sequence[nn.Module], *, watches: bool) -> None:
        self._models = models
        self._entered = process.entered
        self.is_awaited = watches

    def check_loss(self, loss: Tensor) -> None:
        """Warn if the loss used parameters, but no forward and no method was entered."""
        waits, self.is_awaited = self.is_awaited, False
        if not waits or process.entered != self._entered:
            return
        used = _parameters_used(loss)
        names = [name for param, name in parameter_names(self._models).items() if param in used]
        if not names:
            return
        first = {name.split(".")[len(self._models) > 1] for name in names}
        users = [
            f"{model.__class__.__name__}.{user}"
            for model in self._models
            for user in other_users(model, first)
        ]
        by = f" They are used by {_some(users)}." if users else ""
        logger.warning(
            "amp.backward: the loss was computed without the op table: no forward of the model, "
            "and none of its public methods, ran before it, but parameters were used (%s).%s Call "
            "the model, or put 'with amp.autocast():' around that code",
            _some(names),
            by,
        )


def _parameters_used(loss: Tensor) -> set[Tensor]:
    """Return the leaves of a loss; none if the graph has functions that hide their leaves.

    Graphs of torch.compile hide them, and may have been traced before ``enable``.
    """
    found = list(nodes(loss))
    hides_leaves = any(isinstance(node, BackwardCFunction) for node in found)
    return set() if hides_leaves else gradient_leaves(found)


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
