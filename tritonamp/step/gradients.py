"""One optimizer's gradients: what state they are in, and what a step on them takes."""

import operator
from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

from torch import Tensor

from tritonamp.kernels._facts import identities
from tritonamp.kernels._multi_tensor import TensorLists

_is_sparse = operator.attrgetter("is_sparse")


class GradientState(Enum):
    """What the gradients of one optimizer's parameters are.

    ::

        CLEAR  --begin(d)--> SCALED by d --unscale_--> TRUE --step, zero_grad--> CLEAR
        TRUE   --begin(d2)--> SCALED by d2, true ones set aside --unscale_--> TRUE (their sum)
        SCALED --backward raised--> CLEAR, or TRUE again where true ones were set aside
    """

    CLEAR = "none that a scaled loss has left"
    SCALED = "in the model's parameters, times the scale of one decision"
    TRUE = "in the masters, in FP32, unscaled"


class Gradients(NamedTuple):
    """The dense gradients that one step uses, with what it reads and writes beside them.

    Attributes:
        lists: "params", the tensors that are stepped on; "grads", scaled ones or true ones;
            "copies", the half parameters (the stepped-on tensor again where there is none). Of
            DTensors this rank's parts.
        params: what ``param_groups`` and ``state`` know the stepped-on tensors as.
        any_sparse: whether there are sparse gradients, which are left out here.
    """

    lists: TensorLists
    params: Sequence[Tensor]
    any_sparse: bool = False


class GradientLists:
    """The lists that the steps of one optimizer work on, one step after the other.

    Attributes:
        lists: see ``Gradients``.
    """

    def __init__(self) -> None:
        self.lists = TensorLists()
        self._complete: Gradients | None = None  # the last ones, if no parameter lacked any
        self._of: Any = None  # what those were of

    def take(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        copies: Sequence[Tensor],
        moves: int,
        known_as: Sequence[Tensor] | None = None,
    ) -> Gradients:
        """Return what a step on these takes; it holds until the next call.

        The very object as in the last step where all parameters have gradients that lie as the last
        ones did, in the same memory or other.

        Args:
            params: what is stepped on, in the order of the groups.
            grads: None where there are none, or some that count elsewhere.
            copies: the parameter of the model for each.
            moves: how often one of ``copies`` was found in other memory.
            known_as: what ``param_groups`` and ``state`` know ``params`` as; None: themselves.
        """
        of = identities(params), identities(copies), moves
        if self._complete is not None and of == self._of and self.lists.renew("grads", grads):
            return self._complete
        there = [grad for grad in grads if grad is not None]
        any_sparse = any(map(_is_sparse, there))
        numbers: Sequence[int] = range(len(params))
        complete = len(there) == len(params) and not any_sparse
        if not complete:
            numbers = [i for i, g in enumerate(grads) if g is not None and not g.is_sparse]
            params, copies = [params[i] for i in numbers], [copies[i] for i in numbers]
            known_as = None if known_as is None else [known_as[i] for i in numbers]
            there = [grad for grad in there if not grad.is_sparse]
        self.lists.number(numbers, len(grads))
        self.lists.set("params", params, lasting=True)
        self.lists.set("grads", there)
        self.lists.set("copies", copies, lasting=True)
        found = Gradients(self.lists, params if known_as is None else known_as, any_sparse)
        self._complete, self._of = (found if complete else None), of
        return found

    def release(self) -> None:
        """Let go of the gradients."""
        self.lists.release("grads")
