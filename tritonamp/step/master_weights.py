"""The masters of one optimizer with their gradients: scaled, true, or none."""

import operator
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from tritonamp.distributed.sharding import Sharding
from tritonamp.fp32_values import Fp32Values
from tritonamp.kernels._facts import grads as grads_of
from tritonamp.kernels._multi_tensor import Memory, TensorLists
from tritonamp.kernels._shards import is_sharded
from tritonamp.kernels._transfer import transfer
from tritonamp.policy import Policy
from tritonamp.step.gradients import Gradients, GradientState
from tritonamp.step.masters import Masters
from tritonamp.step.shown_gradients import LentGradients, ShownGradients

_grad = operator.attrgetter("grad")


class Scale(Protocol):
    """The owner of a loss scale: the methods of a ``Decision`` that master weights call."""

    def unscale(self, weights: "MasterWeights") -> None:
        """Unscale one optimizer's gradients. Call it after the decision."""

    def unscale_early(self, weights: "MasterWeights") -> None:
        """Unscale one optimizer's gradients, because another loss is about to add its own."""


class MasterWeights(Masters):
    """The masters of one optimizer, and the gradients that it steps on.

    Args:
        optimizer, fp32_values, policy, sharding: as for ``Masters``.

    Attributes:
        state: state of the gradients.
        decision: decision whose scale SCALED gradients carry; None in the other states.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        fp32_values: Fp32Values,
        policy: Policy,
        sharding: Sharding | None,
    ) -> None:
        # Before the base class, whose ``__init__`` calls ``adopt``.
        self.state = GradientState.CLEAR
        self.decision: Scale | None = None
        self._statistics: dict[int, Memory] = {}  # by number of copies
        self._set_aside: dict[Tensor, Tensor] = {}  # true gradients, while SCALED by another loss
        self._shown = ShownGradients(policy.grad_dtype)  # true gradients, in ``.grad`` of halves
        self._lent_gradients = LentGradients()
        super().__init__(optimizer, fp32_values, policy, sharding)

    def fp32_values(self, *, lends: bool = True) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each parameter of the model and its FP32 value.

        A parameter without another value stands for itself.

        Args:
            lends: True: lent values are tensors that last until the next step, and writes to them
                count. False: values are only read, and a lent one takes no memory longer than the
                reader holds it.
        """
        lent, value = set(self._lent), self._view if lends else self._fp32_values.read
        for param, master, _ in self.with_groups():
            yield param, value(param) if param in lent else master

    def _view(self, param: Tensor) -> Tensor:
        """Return the lent FP32 value of a parameter, with its true gradient if that is known."""
        value = self._fp32_values.get(param)
        if self.has_true_gradients:
            self._lent_gradients.show(param, value, self._shown)
        return value

    @property
    def has_true_gradients(self) -> bool:
        """Whether the state is TRUE."""
        return self.state is GradientState.TRUE

    def _grad_holders(self) -> Sequence[Tensor]:
        """Return the tensors that hold the step's gradients: masters if TRUE, else parameters."""
        self._adopt_replaced()
        self._add_up_summands()
        return self._masters if self.has_true_gradients else self._params

    def has_gradients(self) -> bool:
        """Tell whether a backward has left a gradient since the last step or clearing."""
        return bool(self._set_aside) or any(grad is not None for grad in map(_grad, self._params))

    def with_gradient(self) -> int:
        """Return the number of parameters of the model that have a gradient."""
        return sum(grad is not None for grad in map(_grad, self._params))

    def any_sparse(self) -> bool:
        """Tell whether any gradient is sparse."""
        return any(grad is not None and grad.is_sparse for grad in map(_grad, self._grad_holders()))

    def gradients(self) -> Gradients:
        """Return the present gradients as the value that a step works on."""
        grads = grads_of(self._grad_holders())
        return Gradients.of(
            self._memory, self._masters, grads, self._params, sharded=self._any_sharded
        )

    def by_copies(self, gradients: Gradients) -> list[tuple[TensorLists, int]]:
        """Return the gradients in groups, each with the number of ranks that hold the same."""
        lists, kinds = gradients.lists, sorted(set(self._copies)) or [1]
        if len(kinds) == 1:
            return [(lists, kinds[0])]
        found: dict[int, dict[int, Tensor]] = {copies: {} for copies in kinds}
        for i, grad in zip(lists.numbers, lists["grads"], strict=True):
            found[self._copies[i]][i] = grad
        # Each group has statistics in memory of its own. In one memory the second group's would
        # overwrite the first one's.
        memories = {copies: self._statistics.setdefault(copies, Memory()) for copies in kinds}
        return [
            (
                TensorLists(
                    memory=memories[copies],
                    numbers=list(grads),
                    size=lists.size,
                    grads=list(grads.values()),
                ),
                copies,
            )
            for copies, grads in found.items()
        ]

    def sparse_gradients(self) -> TensorLists:
        """Return the values of sparse scaled gradients, coalesced, as the list "grads"."""
        values = {}
        for i, param in enumerate(self._params):
            if param.grad is not None and param.grad.is_sparse:
                # Rows of a sparse gradient may repeat. A sum of two of them may be inf though
                # neither is.
                param.grad = param.grad.coalesce()
                values[i] = param.grad._values()
        size = len(self._params)
        return TensorLists(numbers=list(values), size=size, grads=list(values.values()))

    def all_gradients(self) -> list[Tensor]:
        """Return the present gradients, sparse ones included."""
        return [g for g in map(_grad, self._grad_holders()) if g is not None]

    def memory(self) -> Iterator[Tensor]:
        """Yield masters, gradients (hidden ones included), and the tensors that kernels keep.

        Plans are forgotten, because the tensors are about to move.
        """
        self._adopt_replaced()
        for master, param in self._sources.items():
            if master is not param:
                yield master
            grads = master.grad, param.grad, self._set_aside.get(master)
            yield from (grad for grad in grads if grad is not None)
        stored_form = self.stored_form(self._lent)
        # Lent FP32 tensors belong to the user. They do not move, and a write to one after this
        # raises.
        self._fp32_values.note_step()
        self._lent_gradients.clear()
        yield from (x for x, param in zip(stored_form, self._lent, strict=True) if x is not param)
        yield from self._shown.hidden_gradients()
        yield from () if self.changes is None else self.changes.memory()
        for memory in (self._memory, *self._statistics.values()):
            yield from memory.forget_plans()

    def _add_up_summands(self) -> None:
        """Add up gradients of which tensor parallelism has left each rank a summand.

        These are gradients of norms under sequence parallelism. All ranks take part.
        """
        # FSDP2 has added its gradients up in the backward
        if self._sharding is None or self._sharding.gathered:
            return
        params: Any = self._params
        for param in filter(is_sharded, params):
            if is_sharded(param.grad) and param.grad.placements != param.placements:
                param.grad = param.grad.redistribute(placements=param.placements)

    # from state to state

    def begin_scaled(self, decision: Scale) -> None:
        """Begin a backward that adds gradients scaled by ``decision``; set true gradients aside."""
        self._adopt_unfrozen()
        # The backward would add scaled gradients to true ones.
        if self.has_true_gradients:
            # first: the user may have assigned gradients, which count
            self._adopt_replaced()
            masters = self._sources
            self._set_aside |= {m: m.grad for m in masters if m.grad is not None}
            self._lent_gradients.clear()
            self._shown.put_back()
            for master, param in masters.items():
                master.grad = None
                self._shown.clear(param)
        self.state = GradientState.SCALED
        self.decision = decision

    def unscale_(self, grad_scale: Tensor) -> None:
        """Put ``grad_scale`` times the scaled gradients, plus any set aside, into the masters.

        A parameter that is its own master keeps its gradient's tensor, because a CUDA graph may
        write it again.

        Args:
            grad_scale: factor that unscales and clips, 0-d.
        """
        lent = set(self._lent)
        with torch.no_grad():
            self._add_up_summands()
            for master, param in self._sources.items():
                true = _unscaled(param, master, grad_scale, param in lent)
                aside = self._set_aside.pop(master, None)
                if true is not None and aside is not None:
                    true = true + aside
                true = aside if true is None else true
                # The optimizer steps on the half parameter itself, whose own gradient is half.
                if param in lent:
                    self._shown.show(param, true)
                else:
                    master.grad = true
        self.state = GradientState.TRUE
        self.decision = None

    def show_true_gradients(self) -> None:
        """Show true gradients on half parameters and on their masters, until the step.

        A half parameter and its master share one tensor, so a change to one is a change to the
        other.
        """
        for master, param in self.copies().items():
            self._shown.show(param, master.grad)
        for param, value in self._fp32_values.held(self._lent):
            self._lent_gradients.show(param, value, self._shown)

    def _adopt_replaced(self) -> None:
        """Take over gradients that the user has assigned instead of shown ones."""
        # Most steps show no gradient. The empty tuple below saves them a walk over all parameters.
        self._lent_gradients.adopt_replaced(self._shown)
        for master, param in self.copies().items() if self._shown else ():
            if self._shown.is_replaced(param, master.grad):
                master.grad = None if param.grad is None else param.grad.to(master.dtype)
                self._shown.show(param, master.grad)

    def undo_begin(self) -> None:
        """Undo ``begin_scaled`` after a failed backward: true gradients set aside count again."""
        aside = dict(self._set_aside)
        self.clear()
        if aside:
            lent = set(self._lent)
            for master, param in self._sources.items():
                # gradients that the failed backward has added so far
                param.grad = None
                if param in lent:
                    self._shown.show(param, aside.get(master))
                else:
                    master.grad = aside.get(master)
            self.state = GradientState.TRUE
            self.show_true_gradients()

    def clear(self) -> None:
        """Forget the gradients, because a step has used them or they are not to count.

        Half parameters get the tensors of their backward back, because a CUDA graph may write them
        again.
        """
        self.state = GradientState.CLEAR
        self.decision = None
        self._set_aside.clear()
        self._lent_gradients.clear()
        self._shown.put_back()

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear the gradients of half parameters, and those that were set aside.

        The state stays, because the backward of a loss that is scaled already may still run.

        Args:
            set_to_none: False: gradients become zeros.
        """
        self._set_aside.clear()
        self._lent_gradients.clear()
        # Before the loop, which clears the tensors of the backward. Put back later, they would
        # return with their old numbers.
        self._shown.put_back()
        for param in (*self.copies().values(), *self._lent):
            if set_to_none or param.grad is None:
                self._shown.clear(param)
            else:
                param.grad = param.grad.detach().zero_()


def _unscaled(param: Tensor, master: Tensor, grad_scale: Tensor, lent: bool) -> Tensor | None:
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
    return (wide * grad_scale).to(master.dtype)
