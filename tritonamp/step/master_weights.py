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
from tritonamp.step.gradients import Gradients, GradientState
from tritonamp.step.masters import Masters
from tritonamp.step.shown_gradients import LentGradients, ShownGradients

_grad = operator.attrgetter("grad")


class Scale(Protocol):
    """The owner of a loss scale: a decision, as master weights know it."""

    def unscale(self, weights: "MasterWeights") -> None:
        """Unscale one optimizer's gradients, once decided."""

    def unscale_early(self, weights: "MasterWeights") -> None:
        """Unscale one optimizer's gradients because another loss is about to add its own."""


class MasterWeights(Masters):
    """Masters, and the gradients that they step on.

    Attributes:
        state: the state of the gradients.
        decision: the decision whose scale SCALED gradients carry; None in the other states.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        fp32_values: Fp32Values,
        trains_fp32_values: bool,
        grad_dtype: torch.dtype | None = None,
        sharding: Sharding | None = None,
        packs: bool = False,
        offloads: bool = False,
    ) -> None:
        self.state = GradientState.CLEAR
        self.decision: Scale | None = None
        self._statistics: dict[int, Memory] = {}  # by number of copies
        self._set_aside: dict[Tensor, Tensor] = {}  # true gradients, while SCALED by another loss
        self._shown = ShownGradients(grad_dtype)  # true gradients, in ``.grad`` of half parameters
        self._lent_gradients = LentGradients()
        super().__init__(optimizer, fp32_values, trains_fp32_values, sharding, packs, offloads)

    def fp32_values(self, *, lends: bool = True) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each parameter of the model and its FP32 value, itself where it has no other.

        Args:
            lends: a write to a value counts, until the next step; False: values are only read, and
                lent ones take no memory longer than the reader holds them.
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
        """Return the tensors with the step's gradients: masters if TRUE, else parameters."""
        self._adopt_replaced()
        self._add_up_summands()
        return self._masters if self.has_true_gradients else self._params

    def has_gradients(self) -> bool:
        """Tell whether a backward has left a gradient since the last step or clearing."""
        return bool(self._set_aside) or any(grad is not None for grad in map(_grad, self._params))

    def with_gradient(self) -> int:
        """Return how many parameters of the model have a gradient."""
        return sum(grad is not None for grad in map(_grad, self._params))

    def any_sparse(self) -> bool:
        """Tell whether there are sparse gradients."""
        return any(grad is not None and grad.is_sparse for grad in map(_grad, self._grad_holders()))

    def gradients(self) -> Gradients:
        """Return the present gradients as the value that a step works on."""
        grads = grads_of(self._grad_holders())
        return Gradients.of(
            self._memory, self._masters, grads, self._params, sharded=self._any_sharded
        )

    def by_copies(self, gradients: Gradients) -> list[tuple[TensorLists, int]]:
        """Return the gradients apart, by how many ranks hold the same ones."""
        lists, kinds = gradients.lists, sorted(set(self._copies)) or [1]
        if len(kinds) == 1:
            return [(lists, kinds[0])]
        found: dict[int, dict[int, Tensor]] = {copies: {} for copies in kinds}
        for i, grad in zip(lists.numbers, lists["grads"], strict=True):
            found[self._copies[i]][i] = grad
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
        """Return the values of sparse scaled gradients, coalesced, as "grads"."""
        values = {}
        for i, param in enumerate(self._params):
            if param.grad is not None and param.grad.is_sparse:
                param.grad = param.grad.coalesce()
                values[i] = param.grad._values()
        size = len(self._params)
        return TensorLists(numbers=list(values), size=size, grads=list(values.values()))

    def all_gradients(self) -> list[Tensor]:
        """Return the present gradients, sparse ones included."""
        return [g for g in map(_grad, self._grad_holders()) if g is not None]

    def memory(self) -> Iterator[Tensor]:
        """Yield masters, gradients, hidden ones included, and what kernels keep between steps.

        Plans are forgotten: the tensors are about to move.
        """
        self._adopt_replaced()
        for master, param in self._sources.items():
            if master is not param:
                yield master
            grads = master.grad, param.grad, self._set_aside.get(master)
            yield from (grad for grad in grads if grad is not None)
        beside = self.beside(self._lent)
        self._fp32_values.note_step()
        self._lent_gradients.clear()
        yield from (x for x, param in zip(beside, self._lent, strict=True) if x is not param)
        yield from self._shown.hidden_gradients()
        for memory in (self._memory, *self._statistics.values()):
            yield from memory.forget_plans()

    def _add_up_summands(self) -> None:
        """Add up gradients of which tensor parallelism has left each rank a summand.

        Those of norms under sequence parallelism. All ranks take part.
        """
        if self._sharding is None or self._sharding.gathered:  # FSDP2 has done it
            return
        params: Any = self._params
        for param in filter(is_sharded, params):
            if is_sharded(param.grad) and param.grad.placements != param.placements:
                param.grad = param.grad.redistribute(placements=param.placements)

    # from state to state

    def begin_scaled(self, decision: Scale) -> None:
        """Begin a backward that adds gradients scaled by ``decision``; set true ones aside."""
        self._adopt_unfrozen()
        if self.has_true_gradients:  # the backward would add scaled gradients to them
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

        A parameter that is its own master keeps its gradient's tensor: a CUDA graph may write it.
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
                if param in lent:
                    self._shown.show(param, true)
                else:
                    master.grad = true
        self.state = GradientState.TRUE
        self.decision = None

    def show_true_gradients(self) -> None:
        """Show true gradients on half parameters and on their masters, until the step.

        Both share one tensor: a change to one is a change to the other.
        """
        for master, param in self.copies().items():
            self._shown.show(param, master.grad)
        for param, value in self._fp32_values.held(self._lent):
            self._lent_gradients.show(param, value, self._shown)

    def _adopt_replaced(self) -> None:
        """Take over gradients that the user has assigned instead of shown ones."""
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
                param.grad = None
                if param in lent:
                    self._shown.show(param, aside.get(master))
                else:
                    master.grad = aside.get(master)
            self.state = GradientState.TRUE
            self.show_true_gradients()

    def clear(self) -> None:
        """Forget the gradients: a step has used them, or they are not to count.

        Half parameters get the tensors of their backward back: a CUDA graph may write them again.
        """
        self.state = GradientState.CLEAR
        self.decision = None
        self._set_aside.clear()
        self._lent_gradients.clear()
        self._shown.put_back()

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear the gradients of the half parameters, and those set aside.

        The state stays: the backward of a loss that was scaled already may still come.
        """
        self._set_aside.clear()
        self._lent_gradients.clear()
        self._shown.put_back()
        for param in (*self.copies().values(), *self._lent):
            if set_to_none or param.grad is None:
                self._shown.clear(param)
            else:
                param.grad = param.grad.detach().zero_()


def _unscaled(param: Tensor, master: Tensor, grad_scale: Tensor, lent: bool) -> Tensor | None:
    """Return the true gradient: in its own tensor where the parameter is its own master.

    That of a parameter with a lent value is FP32, as of one that has a master.
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
        return grad.copy_(wide.mul_(grad_scale))  # a no-op where ``wide`` is ``grad``
    return (wide * grad_scale).to(master.dtype)
