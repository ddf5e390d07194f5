"""One optimizer's gradients: their state, and the lists of a step on them."""

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

from torch import Tensor

from tritonamp.kernels._facts import dense
from tritonamp.kernels._multi_tensor import Memory, TensorLists


class GradientState(Enum):
    """The state of the gradients of one optimizer's parameters.

    ::

        CLEAR  --begin_scaled(d)--> SCALED by d --unscale_--> TRUE --step, zero_grad--> CLEAR
        TRUE   --begin_scaled(d2)--> SCALED by d2, true set aside --unscale_--> TRUE (their sum)
        SCALED --backward raised--> CLEAR, or TRUE again where true ones were set aside
    """

    CLEAR = "none that a scaled loss has left"
    SCALED = "in the model's parameters, times the scale of one decision"
    TRUE = "in the masters, in FP32, unscaled"


class Gradients(NamedTuple):
    """The dense gradients of one step, with the tensors that the step reads and writes.

    Attributes:
        lists: "params", the tensors that are stepped on; "grads", scaled or true gradients;
            "copies", the half parameters (the stepped-on tensor again where there is none). A
            DTensor is represented by this rank's part.
        params: the stepped-on tensors as ``param_groups`` and ``state`` name them.
        any_sparse: whether there are sparse gradients, which ``lists`` leaves out.
    """

    lists: TensorLists
    params: Sequence[Tensor]
    any_sparse: bool = False

    @classmethod
    def of(
        cls,
        memory: Memory,
        params: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        copies: Sequence[Tensor],
        known_as: Sequence[Tensor] | None = None,
        sharded: bool | None = None,
    ) -> "Gradients":
        """Return the value that a step on these gradients works on.

        Args:
            memory: the optimizer's memory of earlier steps.
            params: the stepped-on tensors, in the order of the groups.
            grads: gradients by parameter; None: there is none, or it counts elsewhere.
            copies: the parameter of the model for each.
            known_as: ``params`` as ``param_groups`` and ``state`` hold them; None: the same.
            sharded: see ``TensorLists``.
        """
        known_as = params if known_as is None else known_as
        size, numbers, any_sparse = len(params), dense(grads), False
        present: Sequence[Any] = grads
        if len(numbers) < size:
            any_sparse = any(grad is not None and grad.is_sparse for grad in grads)
            present = [grads[i] for i in numbers]
            params, copies, known_as = (
                [tensors[i] for i in numbers] for tensors in (params, copies, known_as)
            )
        lists = TensorLists(
            memory=memory,
            numbers=numbers,
            size=size,
            sharded=sharded,
            params=params,
            grads=present,
            copies=copies,
        )
        return cls(lists, known_as, any_sparse)

    def part(self, places: Sequence[int]) -> "Gradients":
        """Return the gradients of some parameters, by their places in the lists."""
        params = [self.params[i] for i in places]
        return Gradients(self.lists.part(places, {}), params, self.any_sparse)
