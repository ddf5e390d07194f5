"""The gradients of one optimizer: their state, and the tensor lists that a step works on."""

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

from torch import Tensor

from tritonamp.kernels._facts import dense
from tritonamp.kernels._multi_tensor import Memory, TensorLists


class GradientState(Enum):
    """State of the gradients of one optimizer's parameters.

    ::

        CLEAR  --begin_scaled(d)--> SCALED by d --unscale_--> TRUE --step--> CLEAR
        TRUE   --begin_scaled(d2)--> SCALED by d2, true set aside --unscale_--> TRUE (their sum)
        SCALED --backward raised--> CLEAR, or TRUE again where true ones were set aside
        any    --zero_grad, once decided--> CLEAR
    """

    CLEAR = "none that a scaled loss has left"
    SCALED = "in the model's parameters, times the scale of one decision"
    TRUE = "in the masters, in FP32, unscaled"


class Gradients(NamedTuple):
    """Dense gradients of one step, with the tensors that the step reads and writes.

    Attributes:
        lists: three lists by name. "params" are the stepped-on tensors, "grads" their gradients
            (scaled or true), "copies" the half parameters; a parameter without a half copy stands
            in "copies" itself. This rank's part represents a DTensor.
        params: the stepped-on tensors as ``param_groups`` and ``state`` hold them.
        any_sparse: whether some gradients are sparse; ``lists`` leaves sparse gradients out.
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
        """Return the gradients of one step as a value.

        Args:
            memory: the optimizer's memory of earlier steps.
            params: stepped-on tensors, in the order of the groups.
            grads: gradient of each parameter; None: the parameter takes no part in the step.
            copies: parameter of the model for each stepped-on tensor.
            known_as: stepped-on tensors as ``param_groups`` and ``state`` hold them; None:
                ``params``.
            sharded: whether any tensor is a DTensor; None: the types of ``params`` decide.
        """
        # The usual step has a dense gradient for every parameter. Its lists are passed on as they
        # are, because a copy of each list would cost host time at every step.
        known_as = params if known_as is None else known_as
        size, numbers, any_sparse = len(params), dense(grads), False
        present: Sequence[Any] = grads
        if len(numbers) < size:
            any_sparse = any(grad is not None and grad.is_sparse for grad in grads)
            present = [grads[i] for i in numbers]
            params, copies, known_as = (
                [tensors[i] for i in numbers] for tensors in (params, copies, known_as)
            )
        # Kernels write statistics by a parameter's number among all parameters. A parameter without
        # a gradient therefore keeps its row, and indices into the record stay valid.
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
