"""The FP32 masters of one optimizer, with their gradients: scaled, true, or none."""

import operator
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from tritonamp.distributed.sharding import Sharding
from tritonamp.fp32_values import Fp32Values
from tritonamp.kernels._facts import grads as grads_of
from tritonamp.kernels._facts import versions
from tritonamp.kernels._multi_tensor import Memory, TensorLists
from tritonamp.kernels.cast import cast
from tritonamp.kernels.device import is_capturing
from tritonamp.policy import Policy
from tritonamp.step.gradients import Gradients, GradientState, add_up_summands, unscaled
from tritonamp.step.masters import Masters
from tritonamp.step.steady_step import SteadyStep
from tritonamp.step.true_gradients import TrueGradients

_grad = operator.attrgetter("grad")


class Scale(Protocol):
    """The owner of a loss scale: the parts of a ``Decision`` that master weights use.

    Attributes:
        scale: the loss scale, 0-d.
    """

    scale: Tensor

    def unscale(self, weights: "MasterWeights") -> None:
        """Unscale one optimizer's gradients. Call it after the decision."""

    def unscale_early(self, weights: "MasterWeights") -> None:
        """Unscale one optimizer's gradients, because another loss is about to add its own."""


class MasterWeights:
    """The masters of one optimizer, the gradients of its parameters, and its last step.

    Args:
        optimizer: the optimizer; its ``param_groups`` and ``state`` are changed.
        fp32_values: FP32 values of the models' half tensors.
        policy: policy of the ``Amp``.
        sharding: how parameters are spread over ranks; None: each rank has whole parameters.

    Attributes:
        optimizer: the optimizer, whose ``param_groups`` hold the masters.
        masters: tensor that the optimizer steps on, for each parameter.
        memory: plans and tensors of its steps.
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
        self.optimizer = optimizer
        self.state = GradientState.CLEAR
        self.decision: Scale | None = None
        self.memory = Memory()
        self.masters = Masters(optimizer, fp32_values, policy, sharding)
        self._fp32_values = fp32_values
        self._sharding = sharding
        self._versions_after_step = b""  # of the parameters, for the log
        self._steady: SteadyStep | None = None  # the last step, if another one may repeat it
        self._true = TrueGradients(policy.grad_dtype)
        self._has_true = False  # whether there may be true gradients, shown or set aside

    # masters

    def adopt(self, group: dict[str, Any]) -> None:
        """Replace half parameters of a new group by masters, as ``Masters.adopt`` does."""
        self._steady = None
        self.masters.adopt(group)

    def refresh(self) -> None:
        """Bring the masters up to date, as ``Masters.refresh`` does."""
        if self.masters.refresh():
            self._steady = None

    def parameters(self) -> list[Tensor]:
        """Return the parameters of the model, in the order of the groups."""
        return self.masters.stepped.params

    def fp32_values(self, *, lends: bool = True) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each parameter of the model and its FP32 value.

        A parameter without another value stands for itself.

        Args:
            lends: True: lent values are tensors that last until the next step, and writes to them
                count. False: values are only read, and a lent one takes no memory longer than the
                reader holds it.
        """
        lent = set(self.masters.stepped.lent)
        value = self._view if lends else self._fp32_values.read
        for param, master, _ in self.masters.with_groups():
            yield param, value(param) if param in lent else master

    def _view(self, param: Tensor) -> Tensor:
        """Return the lent FP32 value of a parameter, with its true gradient if that is known."""
        value = self._fp32_values.get(param)
        if self.has_true_gradients:
            self._true.show_lent(param, value)
        return value

    # the steady step

    def steady_step(self, decisions: Sequence[Scale]) -> SteadyStep | None:
        """Return the last step if this one is like it; None: this step has to be built.

        Args:
            decisions: decisions that the optimizer waits for.
        """
        steady = None
        if len(decisions) == 1 and decisions[0] is self.decision:
            steady = self._steady_on(decisions[0])
        if steady is not None:
            self._fp32_values.settle_lent()
            if steady.is_like():
                return steady
        return None

    def _steady_on(self, decision: Scale) -> SteadyStep | None:
        """Return the last step, unless true gradients, the device or a CUDA graph rule it out.

        Args:
            decision: decision whose scale the gradients carry.
        """
        steady, device = self._steady, decision.scale.device
        if steady is None or device != steady.device or is_capturing(device):
            return None
        return None if self._has_true else steady

    def record(self, step: SteadyStep | None) -> None:
        """Keep a step that was built, which the next one may repeat."""
        self._steady = step

    def statistics(
        self, decision: Any, known: Gradients | SteadyStep | None, backend: str
    ) -> tuple[Tensor, Tensor]:
        """Return statistics of the present gradients, as ``grad_stats`` does.

        Args:
            decision: decision whose scale the gradients carry.
            known: the gradients, or the last step if this one is like it; None: not known.
            backend: "auto", "triton" or "eager".
        """
        steady = known if isinstance(known, SteadyStep) else None
        if known is None:
            steady = self._steady_on(decision)
        if steady is not None:
            stats = steady.stats(are_like=known is not None)
            if stats is not None:
                return stats
        self.forget_step()  # the plans are about to get other addresses
        gradients = known if isinstance(known, Gradients) else self.gradients()
        return gradients.stats(self.masters.stepped, decision.scale.device, backend)

    def forget_step(self) -> None:
        """Forget the ``SteadyStep`` of the last step, because this step is built."""
        if self._steady is not None:
            if self._steady.untouched():
                self._versions_after_step = versions(self.masters.stepped.params)
            self._steady = None

    # after the step

    def write_back(self, backend: str) -> None:
        """Round the masters into the half parameters."""
        stepped = self.masters.stepped
        lists = TensorLists(memory=self.memory, params=stepped.masters, copies=stepped.params)
        if self.masters.changes is not None:
            self.masters.changes.compare()
        with torch.no_grad():
            cast(lists, backend)
        self.masters.mark_rounded()

    def note_step(self) -> None:
        """Note that a step was the last to write to the parameters."""
        if self._steady is None:
            self._versions_after_step = versions(self.masters.stepped.params)

    @property
    def is_untouched(self) -> bool:
        """Whether torch has counted no write to the parameters since the last step."""
        if self._steady is not None:
            return self._steady.untouched()
        return self._versions_after_step == versions(self.masters.stepped.params)

    def overflowed(self) -> list[Tensor]:
        """Return the parameters that became inf in any step though their master was finite.

        Reads the device.
        """
        params = self.masters.stepped.params
        flags = [flag.tolist() for flag in self.memory.all_kept("overflow", len(params))]
        return [param for param, *found in zip(params, *flags, strict=False) if any(found)]

    # gradients

    @property
    def has_true_gradients(self) -> bool:
        """Whether the state is TRUE."""
        return self.state is GradientState.TRUE

    def grad_holders(self) -> Sequence[Tensor]:
        """Return the tensors that hold the step's gradients: masters if TRUE, else parameters."""
        if self._has_true:
            self._true.adopt_replaced(self.masters.sources)
        stepped = self.masters.stepped
        add_up_summands(stepped.params, self._sharding)
        return stepped.masters if self.has_true_gradients else stepped.params

    def has_gradients(self) -> bool:
        """Tell whether a backward has left a gradient since the last step or clearing."""
        for grad in map(_grad, self.masters.stepped.params):
            if grad is not None:
                return True
        return self._true.is_aside

    def with_gradient(self) -> int:
        """Return the number of parameters of the model that have a gradient."""
        return sum(grad is not None for grad in map(_grad, self.masters.stepped.params))

    def any_sparse(self) -> bool:
        """Tell whether any gradient is sparse."""
        return any(grad.is_sparse for grad in self.all_gradients())

    def gradients(self) -> Gradients:
        """Return the present gradients as the value that a step works on."""
        grads, stepped = grads_of(self.grad_holders()), self.masters.stepped
        return Gradients.of(
            self.memory, stepped.masters, grads, stepped.params, sharded=stepped.any_sharded
        )

    def all_gradients(self) -> list[Tensor]:
        """Return the present gradients, sparse ones included."""
        return [g for g in map(_grad, self.grad_holders()) if g is not None]

    def owned(self) -> Iterator[Tensor]:
        """Yield masters, gradients (hidden ones included), and the tensors that kernels keep.

        Plans are forgotten, because the tensors are about to move.
        """
        self._steady = None
        self._true.adopt_replaced(self.masters.sources)
        for master, param in self.masters.sources.items():
            if master is not param:
                yield master
            yield from (grad for grad in (master.grad, param.grad) if grad is not None)
        lent = self.masters.stepped.lent
        stored_form = self.masters.stored_form(lent)
        # Lent FP32 tensors belong to the user. They do not move, and a write to one after this
        # raises.
        self._fp32_values.note_step()
        yield from (x for x, param in zip(stored_form, lent, strict=True) if x is not param)
        yield from self._true.hidden()
        yield from () if self.masters.changes is None else self.masters.changes.memory()
        yield from self.memory.forget_plans()

    # gradients, from state to state

    def begin_scaled(self, decision: Scale) -> None:
        """Begin a backward that adds gradients scaled by ``decision``; set true gradients aside."""
        if self.masters.stepped.frozen and self.masters.adopt_unfrozen():
            self._steady = None
        # The backward would add scaled gradients to true ones.
        if self.state is GradientState.TRUE:
            self._true.set_aside(self.masters.sources)
        self.state = GradientState.SCALED
        self.decision = decision

    def unscale_(self, grad_scale: Tensor) -> None:
        """Put ``grad_scale`` times the scaled gradients, plus any set aside, into the masters.

        A parameter that is its own master keeps its gradient's tensor, because a CUDA graph may
        write it again.

        Args:
            grad_scale: factor that unscales and clips, 0-d.
        """
        lent = set(self.masters.stepped.lent)
        self._has_true = True
        with torch.no_grad():
            add_up_summands(self.masters.stepped.params, self._sharding)
            for master, param in self.masters.sources.items():
                true = unscaled(param, master, grad_scale, param in lent)
                self._true.put(master, param, self._true.plus_aside(master, true), param in lent)
        self.state = GradientState.TRUE
        self.decision = None

    def show_true_gradients(self) -> None:
        """Show true gradients on half parameters and on their masters, until the step."""
        self._true.show(self.masters.sources, self._fp32_values.held(self.masters.stepped.lent))

    def undo_begin(self) -> None:
        """Undo ``begin_scaled`` after a failed backward: true gradients set aside count again."""
        aside = self._true.take_aside()
        self.clear()
        if aside:
            self._has_true = True
            lent = set(self.masters.stepped.lent)
            for master, param in self.masters.sources.items():
                # gradients that the failed backward has added so far
                param.grad = None
                self._true.put(master, param, aside.get(master), param in lent)
            self.state = GradientState.TRUE
            self.show_true_gradients()

    def clear(self) -> None:
        """Forget the gradients, because a step has used them or they are not to count.

        Half parameters get the tensors of their backward back, because a CUDA graph may write them
        again.
        """
        self.state = GradientState.CLEAR
        self.decision = None
        if self._has_true:
            self._true.clear()
            self._has_true = False

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear the gradients of half parameters, and those that were set aside.

        The state stays, because the backward of a loss that is scaled already may still run.

        Args:
            set_to_none: False: gradients become zeros.
        """
        # Before the loop, which clears the tensors of the backward. Put back later, they would
        # return with their old numbers.
        self._true.clear()
        for param in (*self.masters.copies().values(), *self.masters.stepped.lent):
            if set_to_none or param.grad is None:
                self._true.clear_param(param)
            else:
                param.grad = param.grad.detach().zero_()
