"""The gradients of one optimizer: their state, and the tensor lists that a step works on."""

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonamp.distributed.sharding import Sharding
from tritonamp.kernels._facts import dense
from tritonamp.kernels._multi_tensor import Memory, TensorLists
from tritonamp.kernels._shards import is_sharded
from tritonamp.kernels._transfer import transfer
from tritonamp.kernels.grad_stats import grad_stats
from tritonamp.step.stepped_params import SteppedParams

Stats = tuple[Tensor, Tensor]
"""Results of ``grad_stats``: largest magnitude of each parameter's gradient, sums of squares."""


class GradientState(Enum):
    """State of the gradients of one optimizer's parameters.

    ::

        CLEAR  --begin_scaled(d)--> SCALED by d --unscale_--> TRUE --step--> CLEAR
        TRUE   --begin_scaled(d2)--> SCALED by d2, true set aside --unscale_--> TRUE (their sum)
        SCALED --backward raised--> CLEAR, or TRUE again where true ones were set aside
        SCALED --step or skip--> CLEAR
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

    def stats(self, stepped: SteppedParams, device: torch.device, backend: str) -> Stats:
        """Return statistics of all gradients, of which several ranks may hold the same.

        Args:
            stepped: parameters of the optimizer.
            device: device of the results.
            backend: "auto", "triton" or "eager".
        """
        found = []
        for lists, copies in _by_copies(self.lists, stepped.copies):
            amax, square_sum = grad_stats(lists, device, backend)
            # The ranks add up their sums of squares. A gradient that several of them hold counts
            # once, so each of them gives its share.
            found.append((amax, square_sum if copies == 1 else square_sum / copies))
        if self.any_sparse:
            found.append(grad_stats(_sparse_values(stepped.params), device, backend))
        if len(found) == 1:
            return found[0]
        amaxes, square_sums = zip(*found, strict=True)
        return torch.stack(amaxes).amax(0), torch.cat(square_sums)


def _by_copies(lists: TensorLists, copies: Sequence[int]) -> list[tuple[TensorLists, int]]:
    """Return gradients in groups, each with the number of ranks that hold the same.

    Args:
        lists: gradients of one step.
        copies: number of ranks that hold each of the optimizer's parameters; empty: one rank each.
    """
    kinds = sorted(set(copies)) or [1]
    if len(kinds) == 1:
        return [(lists, kinds[0])]
    found: dict[int, dict[int, Tensor]] = {kind: {} for kind in kinds}
    for i, grad in zip(lists.numbers, lists["grads"], strict=True):
        found[copies[i]][i] = grad
    # Each group has statistics in memory of its own. In one memory the second group's would
    # overwrite the first one's.
    return [
        (
            TensorLists(
                memory=lists.memory.part(kind),
                numbers=list(grads),
                size=lists.size,
                grads=list(grads.values()),
            ),
            kind,
        )
        for kind, grads in found.items()
    ]


def _sparse_values(params: Sequence[Tensor]) -> TensorLists:
    """Return the values of sparse gradients, coalesced in place, as the list "grads".

    Args:
        params: all parameters of one optimizer.
    """
    values = {}
    for i, param in enumerate(params):
        if param.grad is not None and param.grad.is_sparse:
            # Rows of a sparse gradient may repeat. A sum of two of them may be inf though
            # neither is.
            param.grad = param.grad.coalesce()
            values[i] = param.grad._values()
    return TensorLists(numbers=list(values), size=len(params), grads=list(values.values()))


def add_up_summands(params: Sequence[Any], sharding: Sharding | None) -> None:
    """Add up gradients of which tensor parallelism has left each rank a summand.

    These are gradients of norms under sequence parallelism. All ranks take part.

    Args:
        params: parameters of the model.
        sharding: how parameters are spread over ranks; None: each rank has whole parameters.
    """
    # FSDP2 has added its gradients up in the backward
    if sharding is None or sharding.gathered:
        return
    for param in filter(is_sharded, params):
        if is_sharded(param.grad) and param.grad.placements != param.placements:
            param.grad = param.grad.redistribute(placements=param.placements)


def unscaled(param: Tensor, master: Tensor, grad_scale: Tensor, lent: bool) -> Tensor | None:
    """Return the true gradient of a parameter, in FP32 or wider; None if it has no gradient.

    Args:
        param: parameter of the model.
        master: tensor that the optimizer steps on.
        grad_scale: factor that unscales and clips, 0-d.
        lent: whether the FP32 value of ``param`` is lent.
    """
    grad = param.grad
    if grad is None:
        return None
    if grad.is_sparse:
        grad = grad.coalesce()
    wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
    grad_scale = transfer(grad_scale, grad.device)
    if lent:
        return wide * grad_scale
    if param is master and not grad.is_sparse:
        # An FP32 gradient is multiplied in place, and copied to itself, which does nothing.
        return grad.copy_(wide.mul_(grad_scale))
    # a parameter that is its own master takes gradients of the dtype that its backward makes
    return (wide * grad_scale).to(grad.dtype if param is master else master.dtype)
