"""An optimizer's last step, to be made again as long as nothing but gradients and rates differs."""

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer

from tritonamp.kernels._facts import addresses, identities
from tritonamp.kernels.device import is_capturing
from tritonamp.step.gradients import Gradients


class StepPlan:
    """The launches of a step, and the facts that make them right again.

    A step that was looked at as a whole leaves behind tables that hold all pointers. Where a later
    one finds the same parameters, state and groups at the same addresses, it sends new pointers to
    gradients and new hyperparameters, if there are any, and launches.

    Args:
        optimizer: that has stepped.
        gradients: that it has stepped on, of all parameters; nothing was released yet.
        keys: of all tensors in the state of a parameter.
        order: where the parameters' states are among the optimizer's, which may have others.
        kinds: gives by group which optional state there is.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        gradients: Gradients,
        keys: Sequence[str],
        order: Sequence[int],
        kinds: Callable[[], list[list[bool]]],
    ) -> None:
        self._optimizer = optimizer
        self._gradients = gradients
        self._values_of = [operator.itemgetter(key) for key in keys]
        self._order = order
        self._kinds = kinds
        self._layout = gradients.lists.layout()
        self._facts = self._facts_now()

    @classmethod
    def after(
        cls,
        optimizer: Optimizer,
        gradients: Gradients,
        keys: Sequence[str],
        order: Sequence[int],
        kinds: Callable[[], list[list[bool]]],
    ) -> "StepPlan | None":
        """Return a plan after a step; None: its launches would not be all that a next one does."""
        tensors = gradients.lists
        plain = (
            len(tensors) == tensors.size  # a parameter without gradient may have no state yet
            and not tensors.layout().copies
            and not any(map(is_capturing, tensors.layout().devices))
            and not hasattr(gradients.params[0], "_local_tensor")  # which may be another one later
        )
        return cls(optimizer, gradients, keys, order, kinds) if plain else None

    def holds(self, gradients: Gradients) -> bool:
        """Tell whether the launches are right for these gradients, and give them their pointers."""
        try:
            return (
                gradients is self._gradients
                and not any(map(is_capturing, self._layout.devices))
                and self._facts_now() == self._facts
                and gradients.lists.renews(self._layout, "grads")
            )
        except (LookupError, TypeError):  # state is missing, or no tensor
            return False

    def _facts_now(self) -> list[Any]:
        groups = self._optimizer.param_groups
        found = list(self._optimizer.state.values())
        states = [found[k] for k in self._order] if self._values_of else []
        values = list(itertools.chain.from_iterable(map(of, states) for of in self._values_of))
        which = identities(values)
        values += self._gradients.lists["params"]  # half copies are known to be where they were
        return [
            [len(group["params"]) for group in groups],
            self._kinds(),
            which,
            addresses(values),
        ]
