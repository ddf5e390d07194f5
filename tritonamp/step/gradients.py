"""One optimizer's gradients: what state they are in, and what a step on them takes."""

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

from torch import Tensor

from tritonamp.kernels._facts import dense
from tritonamp.kernels._multi_tensor import Memory, TensorLists


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

    @classmethod
    def of(
        cls,
        memory: Memory,
        params: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        copies: Sequence[Tensor],
        known_as: Sequence[Tensor] | None = None,
    ) -> "Gradients":
        """Return what a step on these takes.

        Args:
            memory: of the optimizer.
            params: what is stepped on, in the order of the groups.
            grads: None where there are none, or some that count elsewhere.
            copies: the parameter of the model for each.
            known_as: what ``param_groups`` and ``state`` know ``params`` as; None: themselves.
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
            memory=memory, numbers=numbers, size=size, params=params, grads=present, copies=copies
        )
        return cls(lists, known_as, any_sparse)
