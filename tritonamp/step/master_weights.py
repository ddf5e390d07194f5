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
from tritonamp.policy import HALF_DTYPES, Policy, packs_masters
from tritonamp.step.changes import Changes
from tritonamp.step.gradients import Gradients, GradientState, add_up_summands, unscaled
from tritonamp.step.packed_masters import load_master, masters_form
from tritonamp.step.small_state import state_format
from tritonamp.step.state_loading import widen_state
from tritonamp.step.steady_step import SteadyStep
from tritonamp.step.stepped_params import (
    SteppedParams,
    check_gathered,
    check_same_device,
    refuse_cast,
)
from tritonamp.step.true_gradients import TrueGradients

_grad = operator.attrgetter("grad")
_requires_grad = operator.attrgetter("requires_grad")


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
    """One optimizer's parameters, each with the tensor that the optimizer steps on, and gradients.

    The tensor is an FP32 master, or the parameter itself. It is the parameter itself if the
    parameter is FP32, if the policy has no masters, or if its FP32 value is lent: packed (the
    parameter and 16 more bits) or in host memory between steps.

    Args:
        optimizer: the optimizer; its ``param_groups`` and ``state`` are changed.
        fp32_values: FP32 values of the models' half tensors.
        policy: policy of the ``Amp``.
        sharding: how parameters are spread over ranks; None: each rank has whole parameters.

    Attributes:
        optimizer: the optimizer, whose ``param_groups`` hold the masters.
        stepped: lists of its parameters and masters.
        memory: plans and tensors of its steps.
        state: state of the gradients.
        decision: decision whose scale SCALED gradients carry; None in the other states.
        changes: record of the values that have changed; None: the policy does not ask for it.
        packs: whether an FP32 master is the half parameter and 16 more bits.
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
        self._fp32_values = fp32_values
        self._trains_fp32_values = policy.trains_fp32_values
        self._sharding = sharding
        state = state_format(optimizer, policy.state)
        self.packs = packs_masters(masters_form(optimizer, policy), state)
        self._lends = self.packs or policy.offload is not None
        self._sources: dict[Tensor, Tensor] = {}  # master -> parameter of the model
        self.stepped = SteppedParams([], [])
        self._halves: Sequence[int] = ()  # the half parameters' numbers in the FP32 values
        self._versions_after_step = b""  # of the parameters, for the log
        self._steady: SteadyStep | None = None  # the last step, if another one may repeat it
        self._true = TrueGradients(policy.grad_dtype)
        self.changes = Changes(fp32_values) if policy.tracks_changes else None
        self.adopt(*optimizer.param_groups)

    # masters

    def adopt(self, *groups: dict[str, Any]) -> None:
        """Replace half parameters of some groups by masters, which take over their state.

        Args:
            *groups: groups of the optimizer, changed in place.
        """
        for params in (group["params"] for group in groups):
            for i, param in enumerate(params):
                master = param if param in self._sources else self._master_of(param)
                if master is not param:
                    params[i] = master
        self._steady = None
        lends = self._lends and self._trains_fp32_values
        # groups that are still to be adopted have no entry in the sources yet
        self.stepped = SteppedParams.of(
            self.optimizer.param_groups,
            self._sources,
            self._fp32_values.__contains__ if lends else None,
            self._sharding,
        )
        self._halves = self._fp32_values.indices(list(self.copies().values()))
        if self.changes is not None:
            self.changes.adopt(self.stepped.masters, self.stepped.params)

    def _master_of(self, param: Tensor) -> Tensor:
        """Return the tensor to step on for ``param``, which takes over the optimizer's state."""
        master = param
        if self._trains_fp32_values and self._needs_master(param):
            if self._lends:
                self._fp32_values.lend(param, self.packs)
            else:
                master = self._fp32_values.master(param)
        self._sources[master] = param
        # Moments that were made or loaded before ``enable`` stay in use.
        if master is not param and param in self.optimizer.state:
            self.optimizer.state[master] = self.optimizer.state.pop(param)
        return master

    def _needs_master(self, param: Tensor) -> bool:
        trains_in_half = param.dtype in HALF_DTYPES and param.requires_grad
        return trains_in_half or param in self._fp32_values

    def _adopt_unfrozen(self) -> None:
        """Replace half parameters by masters once they require gradients."""
        unfrozen = list(filter(_requires_grad, self.stepped.frozen))
        if not unfrozen:
            return
        check_gathered(unfrozen, self._sharding)
        if self._trains_fp32_values:
            # half state may be left from a time before these parameters were frozen
            widen_state(self.optimizer, unfrozen)
            for param in unfrozen:
                self._sources.pop(param, None)
            self.adopt(*self.optimizer.param_groups)
            # masters of a loaded state have waited for this, see ``load_master_params``
            self.load_master_params()

    def check_group(self, group: dict[str, Any]) -> None:
        """Raise if the optimizer has a new group's parameters already, or cannot step on them.

        Args:
            group: group that is about to be added; its "params" become a list.

        Raises:
            ValueError: the optimizer has one of the parameters.
            RuntimeError: as for ``check_gathered``.
        """
        check_gathered(self.stepped.check_group(group), self._sharding)

    def check_dtypes(self) -> None:
        """Raise RuntimeError if a cast of a module has made trained parameters half."""
        trained = (m for m in self.stepped.masters if m.dtype in HALF_DTYPES and m.requires_grad)
        bare = [m for m in trained if self._trains_fp32_values and m not in self._fp32_values]
        refuse_cast(len(bare), self.optimizer)

    def restore_groups(self) -> None:
        """Put the model's parameters and their state back into all groups."""
        for group in self.optimizer.param_groups:
            for i, master in enumerate(group["params"]):
                param = self._sources[master]
                if param is not master:
                    group["params"][i] = param
                    if master in self.optimizer.state:
                        self.optimizer.state[param] = self.optimizer.state.pop(master)

    def load_master_params(self) -> None:
        """Move FP32 masters of a ``tritonamp.optim`` state, packed ones too, into the masters.

        A master counts only where its rounded value is the parameter, so the model has to be loaded
        first. Masters of frozen half parameters wait until the parameters require gradients.
        """
        lent = set(self.stepped.lent)
        for master, param in self._sources.items():
            waits = self._trains_fp32_values and master.dtype in HALF_DTYPES and param not in lent
            if not waits:
                load_master(self.optimizer.state.get(master, {}), param, self._fp32_values)

    def parameters(self) -> list[Tensor]:
        """Return the parameters of the model, in the order of the groups."""
        return self.stepped.params

    def copies(self) -> dict[Tensor, Tensor]:
        """Return master to half parameter, for each parameter that has a master of its own."""
        return {master: param for master, param in self._sources.items() if master is not param}

    def stored_form(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Return the stored form of each parameter's lent FP32 value: 16 bits, or a host tensor.

        A parameter without a lent value stands for itself.
        """
        return self._fp32_values.stored_form(params)

    def with_groups(self) -> Iterator[tuple[Tensor, Tensor, dict[str, Any]]]:
        """Yield each parameter of the model, its stepped-on tensor, and that tensor's group."""
        for group in self.optimizer.param_groups:
            for master in group["params"]:
                yield self._sources.get(master, master), master, group

    def fp32_values(self, *, lends: bool = True) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each parameter of the model and its FP32 value.

        A parameter without another value stands for itself.

        Args:
            lends: True: lent values are tensors that last until the next step, and writes to them
                count. False: values are only read, and a lent one takes no memory longer than the
                reader holds it.
        """
        lent, value = set(self.stepped.lent), self._view if lends else self._fp32_values.read
        for param, master, _ in self.with_groups():
            yield param, value(param) if param in lent else master

    def _view(self, param: Tensor) -> Tensor:
        """Return the lent FP32 value of a parameter, with its true gradient if that is known."""
        value = self._fp32_values.get(param)
        if self.has_true_gradients:
            self._true.show_lent(param, value)
        return value

    def refresh(self) -> None:
        """Copy half parameters that were written to since the last step into their masters.

        Groups that the user has changed by hand are adopted.

        Raises:
            RuntimeError: the model was moved to another device since ``enable``.
        """
        groups, masters = self.optimizer.param_groups, self.stepped.masters
        params = [param for group in groups for param in group["params"]]
        # The user may have changed the groups by hand. The comparison is by identity, because
        # ``==`` of tensors would launch kernels and wait for them.
        if len(params) != len(masters) or not all(map(operator.is_, params, masters)):
            self.adopt(*groups)
        changed = self._fp32_values.refresh(self._halves)
        if self.changes is not None:
            self.changes.follow()
        if changed:
            # a move to another device gives half parameters other memory, so it counts as a change
            check_same_device(self.copies())

    def unlike(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return half parameters, and how many elements of each differ from the rounded master.

        Parameters with writes that ``refresh`` takes over are left out.

        Returns:
            the parameters, and their counts as 0-d tensors.
        """
        found = {p: self._fp32_values.unlike(p) for p in self.copies().values()}
        known = {p: count for p, count in found.items() if count is not None}
        return list(known), list(known.values())

    # the steady step

    def steady_step(self, decisions: Sequence[Scale]) -> SteadyStep | None:
        """Return the last step if this one is like it; None: this step has to be built.

        Args:
            decisions: decisions that the optimizer waits for.
        """
        steady = self._steady_with_gradients(decisions)
        if steady is not None:
            self._fp32_values.settle_lent()
            if steady.is_like():
                return steady
        self._forget_steady()
        return None

    def _steady_with_gradients(self, decisions: Sequence[Any]) -> SteadyStep | None:
        """Return the last step if it used gradients in the same tensors' ``.grad``."""
        steady, decision = self._steady, self.decision
        if steady is None or decision is None or list(decisions) != [decision]:
            return None
        device = decision.scale.device
        return None if self._true or device != steady.device or is_capturing(device) else steady

    def record(self, step: SteadyStep | None) -> None:
        """Keep a step that was built, which the next one may repeat."""
        self._steady = step

    def statistics(
        self, decision: Any, known: Gradients | SteadyStep | None, backend: str
    ) -> tuple[Tensor, Tensor]:
        """Return statistics of the present gradients, as ``grad_stats`` does.

        Args:
            decision: decision whose scale the gradients carry.
            known: gradients, where the caller has them; or the last step, which this one is like.
            backend: "auto", "triton" or "eager".
        """
        if known is None:
            known = self._steady_with_gradients([decision])
            if known is not None and not known.has_like_gradients():
                known = None
        if isinstance(known, SteadyStep):
            return known.stats()
        # the plans are about to get other addresses
        self._forget_steady()
        gradients = self.gradients() if known is None else known
        return gradients.stats(self.stepped, decision.scale.device, backend)

    def _forget_steady(self) -> None:
        if self._steady is not None:
            if self._steady.is_untouched:
                self._versions_after_step = versions(self.stepped.params)
            self._steady = None

    # after the step

    def write_back(self, backend: str) -> None:
        """Round the masters into the half parameters."""
        params = self.stepped.params
        lists = TensorLists(memory=self.memory, params=self.stepped.masters, copies=params)
        if self.changes is not None:
            self.changes.compare()
        with torch.no_grad():
            cast(lists, backend)
        self.mark_rounded()

    def mark_rounded(self) -> None:
        """Note that the half parameters hold the rounded masters."""
        self._fp32_values.mark_rounded(self._halves)
        # lent FP32 tensors are out of date now, since a step writes to their stored form
        self._fp32_values.note_step()
        if self.changes is not None:
            self.changes.note_step()

    def note_step(self) -> None:
        """Note that a step was the last to write to the parameters."""
        if self._steady is None:
            self._versions_after_step = versions(self.stepped.params)

    @property
    def is_untouched(self) -> bool:
        """Whether torch has counted no write to the parameters since the last step."""
        if self._steady is not None:
            return self._steady.is_untouched
        return self._versions_after_step == versions(self.stepped.params)

    def overflowed(self) -> list[Tensor]:
        """Return the parameters that became inf in any step though their master was finite.

        Reads the device.
        """
        params = self.stepped.params
        flags = [flag.tolist() for flag in self.memory.all_kept("overflow", len(params))]
        return [param for param, *found in zip(params, *flags, strict=False) if any(found)]

    def lost_updates(self) -> list[float]:
        """Return by group the share of half values that the last step did not change, or zeros.

        The values are zeros if the policy does not track changes. Reads the device.
        """
        groups = self.optimizer.param_groups
        return [0.0] * len(groups) if self.changes is None else self.changes.shares_left(groups)

    # gradients

    @property
    def has_true_gradients(self) -> bool:
        """Whether the state is TRUE."""
        return self.state is GradientState.TRUE

    def grad_holders(self) -> Sequence[Tensor]:
        """Return the tensors that hold the step's gradients: masters if TRUE, else parameters."""
        if self._true:  # most steps show no gradient
            self._true.adopt_replaced(self._sources)
        add_up_summands(self.stepped.params, self._sharding)
        return self.stepped.masters if self.has_true_gradients else self.stepped.params

    def has_gradients(self) -> bool:
        """Tell whether a backward has left a gradient since the last step or clearing."""
        for grad in map(_grad, self.stepped.params):
            if grad is not None:
                return True
        return self._true.is_aside

    def with_gradient(self) -> int:
        """Return the number of parameters of the model that have a gradient."""
        return sum(grad is not None for grad in map(_grad, self.stepped.params))

    def any_sparse(self) -> bool:
        """Tell whether any gradient is sparse."""
        return any(grad.is_sparse for grad in self.all_gradients())

    def gradients(self) -> Gradients:
        """Return the present gradients as the value that a step works on."""
        grads, stepped = grads_of(self.grad_holders()), self.stepped
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
        self._true.adopt_replaced(self._sources)
        for master, param in self._sources.items():
            if master is not param:
                yield master
            yield from (grad for grad in (master.grad, param.grad) if grad is not None)
        lent = self.stepped.lent
        stored_form = self.stored_form(lent)
        # Lent FP32 tensors belong to the user. They do not move, and a write to one after this
        # raises.
        self._fp32_values.note_step()
        yield from (x for x, param in zip(stored_form, lent, strict=True) if x is not param)
        yield from self._true.hidden()
        yield from () if self.changes is None else self.changes.memory()
        yield from self.memory.forget_plans()

    # gradients, from state to state

    def begin_scaled(self, decision: Scale) -> None:
        """Begin a backward that adds gradients scaled by ``decision``; set true gradients aside."""
        self._adopt_unfrozen()
        # The backward would add scaled gradients to true ones.
        if self.has_true_gradients:
            self._true.set_aside(self._sources)
        self.state = GradientState.SCALED
        self.decision = decision

    def unscale_(self, grad_scale: Tensor) -> None:
        """Put ``grad_scale`` times the scaled gradients, plus any set aside, into the masters.

        A parameter that is its own master keeps its gradient's tensor, because a CUDA graph may
        write it again.

        Args:
            grad_scale: factor that unscales and clips, 0-d.
        """
        lent = set(self.stepped.lent)
        with torch.no_grad():
            add_up_summands(self.stepped.params, self._sharding)
            for master, param in self._sources.items():
                true = unscaled(param, master, grad_scale, param in lent)
                self._true.put(master, param, self._true.plus_aside(master, true), param in lent)
        self.state = GradientState.TRUE
        self.decision = None

    def show_true_gradients(self) -> None:
        """Show true gradients on half parameters and on their masters, until the step."""
        self._true.show(self._sources, self._fp32_values.held(self.stepped.lent))

    def undo_begin(self) -> None:
        """Undo ``begin_scaled`` after a failed backward: true gradients set aside count again."""
        aside = self._true.take_aside()
        self.clear()
        if aside:
            lent = set(self.stepped.lent)
            for master, param in self._sources.items():
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
        if self._true:
            self._true.clear()

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear the gradients of half parameters, and those that were set aside.

        The state stays, because the backward of a loss that is scaled already may still run.

        Args:
            set_to_none: False: gradients become zeros.
        """
        # Before the loop, which clears the tensors of the backward. Put back later, they would
        # return with their old numbers.
        self._true.clear()
        for param in (*self.copies().values(), *self.stepped.lent):
            if set_to_none or param.grad is None:
                self._true.clear_param(param)
            else:
                param.grad = param.grad.detach().zero_()
