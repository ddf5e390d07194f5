"""The FP32 masters that an optimizer steps on, and their gradients."""

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
from tritonamp.kernels._shards import is_sharded
from tritonamp.kernels._transfer import transfer
from tritonamp.kernels.cast import cast
from tritonamp.policy import HALF_DTYPES
from tritonamp.step.gradients import Gradients, GradientState
from tritonamp.step.shown_gradients import ShownGradients
from tritonamp.step.state_loading import widen_state

_grad = operator.attrgetter("grad")
_requires_grad = operator.attrgetter("requires_grad")


class Scale(Protocol):
    """The owner of a loss scale: a decision, as master weights know it."""

    def unscale(self, weights: "MasterWeights") -> None:
        """Unscale one optimizer's gradients, once decided."""

    def unscale_early(self, weights: "MasterWeights") -> None:
        """Unscale one optimizer's gradients because another loss is about to add its own."""


class MasterWeights:
    """One optimizer's parameters, each with the FP32 tensor that the optimizer steps on.

    A parameter that is FP32 already, or that the policy gives no master, is its own master. So is
    a half one whose FP32 value is lent: packed (kept as the parameter and 16 more bits), or in host
    memory between steps.

    Attributes:
        optimizer: the optimizer, whose ``param_groups`` hold the masters.
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
        self.optimizer = optimizer
        self.state = GradientState.CLEAR
        self.decision: Scale | None = None
        self._fp32_values = fp32_values
        self._trains_fp32_values = trains_fp32_values
        self._sharding = sharding
        self._copies: list[int] = []  # of each parameter, on how many ranks; empty: not sharded
        self._statistics: dict[int, Memory] = {}  # by number of copies
        self._sources: dict[Tensor, Tensor] = {}  # master -> parameter of the model
        self._packs = packs
        self._lends = packs or offloads
        self._lent: list[Tensor] = []  # half parameters whose FP32 value is lent
        self._masters: list[Tensor] = []  # keys and values of _sources, as lists
        self._params: list[Tensor] = []
        self._frozen: list[Tensor] = []  # half parameters that train once they require gradients
        self._halves: list[int] = []  # the half parameters' numbers in the FP32 values
        self._memory = Memory()
        self._set_aside: dict[Tensor, Tensor] = {}  # true gradients, while SCALED by another loss
        self._left = b""  # versions of the parameters after the last step, for the log
        self._shown = ShownGradients(grad_dtype)  # true gradients, in ``.grad`` of half parameters
        self.adopt(*optimizer.param_groups)

    # which tensors there are

    def adopt(self, *groups: dict[str, Any]) -> None:
        """Replace the half parameters of groups by masters, which take over their state."""
        for params in (group["params"] for group in groups):
            for i, param in enumerate(params):
                master = param if param in self._sources else self._master_of(param)
                if master is not param:
                    params[i] = master
        masters = [master for group in self.optimizer.param_groups for master in group["params"]]
        # groups that are still to be adopted have no entry yet
        self._masters = [m for m in masters if m in self._sources]
        self._params = [self._sources[master] for master in self._masters]
        if self._sharding is not None:
            self._copies = [self._sharding.copies(param) for param in self._params]
        self._frozen = [p for p in self._params if p.dtype in HALF_DTYPES and not p.requires_grad]
        lends = self._lends and self._trains_fp32_values
        self._lent = [p for p in self._params if lends and p in self._fp32_values]
        self._halves = self._fp32_values.indices(list(self.copies().values()))

    def _master_of(self, param: Tensor) -> Tensor:
        """Return the tensor to step on for ``param``; it takes over the optimizer's state."""
        master = param
        if self._trains_fp32_values and self._needs_master(param):
            if self._lends:
                self._fp32_values.lend(param, self._packs)
            else:
                master = self._fp32_values.master(param)
        self._sources[master] = param
        if master is not param and param in self.optimizer.state:
            self.optimizer.state[master] = self.optimizer.state.pop(param)
        return master

    def _needs_master(self, param: Tensor) -> bool:
        trains_in_half = param.dtype in HALF_DTYPES and param.requires_grad
        return trains_in_half or param in self._fp32_values

    def _adopt_unfrozen(self) -> None:
        """Replace half parameters by masters once they train: they were frozen when adopted."""
        unfrozen = list(filter(_requires_grad, self._frozen))
        self.check_gathered(unfrozen)
        if self._trains_fp32_values and unfrozen:
            widen_state(self.optimizer, unfrozen)
            for param in unfrozen:
                self._sources.pop(param, None)
            self.adopt(*self.optimizer.param_groups)
            self.take_masters()

    def check_gathered(self, params: Sequence[Any]) -> None:
        """Refuse half parameters that train since ``enable``, under FSDP2.

        Raises:
            RuntimeError: says how to make their shards FP32.
        """
        half = [p for p in params if p.dtype in HALF_DTYPES and p.requires_grad]
        if self._sharding is not None and self._sharding.gathered and half:
            raise RuntimeError(
                f"{len(half)} half parameter(s) under FSDP2 require gradients since "
                "tritonamp.enable: expected them to before it, which makes their shards FP32; call "
                "amp.disable(), requires_grad_(), and tritonamp.enable again"
            )

    def give_back(self) -> None:
        """Put the model's parameters, and their state, back into all groups."""
        for group in self.optimizer.param_groups:
            for i, master in enumerate(group["params"]):
                param = self._sources[master]
                if param is not master:
                    group["params"][i] = param
                    if master in self.optimizer.state:
                        self.optimizer.state[param] = self.optimizer.state.pop(master)

    def take_masters(self) -> None:
        """Move ``master_param`` of a ``tritonamp.optim`` state into the masters.

        A master moves only where its rounded value is the parameter: load the model first. Masters
        of frozen half parameters wait until the parameters train.
        """
        lent = set(self._lent)
        for master, param in self._sources.items():
            if self._trains_fp32_values and master.dtype in HALF_DTYPES and param not in lent:
                continue
            value = self.optimizer.state.get(master, {}).pop("master_param", None)
            if value is None:
                continue
            held = self._fp32_values.get(param) if param in self._fp32_values else param
            value = value.to(held.device, torch.float32)
            agrees = [value.to(half) == held for half in HALF_DTYPES]
            with torch.no_grad():
                held.copy_(torch.where(torch.stack(agrees).any(0), value, held))
                if held is not param:
                    param.copy_(held)
                    self._fp32_values.mark_rounded(self._fp32_values.indices([param]))

    def parameters(self) -> list[Tensor]:
        """Return the parameters of the model, in the order of the groups."""
        return self._params

    def copies(self) -> dict[Tensor, Tensor]:
        """Return master to the half parameter that receives its rounded value."""
        return {master: param for master, param in self._sources.items() if master is not param}

    def beside(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Return what is kept beside each lent value, and the tensor itself of other parameters."""
        return self._fp32_values.beside(params)

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
        grad = param.grad if self.has_true_gradients else None
        value.grad = grad if grad is not None and grad.dtype is value.dtype else None
        return value

    def with_groups(self) -> Iterator[tuple[Tensor, Tensor, dict[str, Any]]]:
        """Yield each parameter of the model, its stepped-on tensor, and the tensor's group."""
        for group in self.optimizer.param_groups:
            for master in group["params"]:
                yield self._sources.get(master, master), master, group

    def refresh(self) -> None:
        """Copy half parameters into their masters where somebody else wrote to them.

        Raises:
            RuntimeError: the model was moved to another device since ``enable``.
        """
        groups = self.optimizer.param_groups
        params = [param for group in groups for param in group["params"]]
        same = len(params) == len(self._masters) and all(map(operator.is_, params, self._masters))
        if not same:  # somebody has changed the groups by hand
            self.adopt(*groups)
        if not self._fp32_values.refresh(self._halves):
            return
        for master, param in self.copies().items():
            if master.device != param.device:
                raise RuntimeError(
                    f"a parameter of the model is on {param.device}, its FP32 master on "
                    f"{master.device}: move the model to its device before tritonamp.enable"
                )

    # the gradients

    @property
    def has_true_gradients(self) -> bool:
        """Whether the state is TRUE."""
        return self.state is GradientState.TRUE

    def _of_state(self) -> Sequence[Tensor]:
        """Return the tensors with the step's gradients: masters if TRUE, else parameters."""
        self._take_replaced()
        self._add_up()
        return self._masters if self.has_true_gradients else self._params

    def has_gradients(self) -> bool:
        """Tell whether a backward has left a gradient since the last step or clearing."""
        return bool(self._set_aside) or any(grad is not None for grad in map(_grad, self._params))

    def with_gradient(self) -> int:
        """Return how many parameters of the model have a gradient."""
        return sum(grad is not None for grad in map(_grad, self._params))

    def any_sparse(self) -> bool:
        """Tell whether there are sparse gradients."""
        return any(grad is not None and grad.is_sparse for grad in map(_grad, self._of_state()))

    def gradients(self) -> Gradients:
        """Return the present gradients as the value that a step works on."""
        grads = grads_of(self._of_state())
        return Gradients.of(self._memory, self._masters, grads, self._params)

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
        return [g for g in map(_grad, self._of_state()) if g is not None]

    def memory(self) -> Iterator[Tensor]:
        """Yield masters, gradients, hidden ones included, and what kernels keep between steps.

        Plans are forgotten: the tensors are about to move.
        """
        for master, param in self._sources.items():
            if master is not param:
                yield master
            grads = master.grad, param.grad, self._set_aside.get(master)
            yield from (grad for grad in grads if grad is not None)
        beside = self.beside(self._lent)
        self._fp32_values.note_step()
        yield from (x for x, param in zip(beside, self._lent, strict=True) if x is not param)
        yield from self._shown.hidden()
        for memory in (self._memory, *self._statistics.values()):
            yield from memory.forget_plans()

    def _add_up(self) -> None:
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

    def begin(self, decision: Scale) -> None:
        """Begin a backward that adds gradients scaled by ``decision``; set true ones aside."""
        self._adopt_unfrozen()
        if self.has_true_gradients:
            self._take_replaced()
            masters = self._sources
            self._set_aside |= {m: m.grad for m in masters if m.grad is not None}
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
            self._add_up()
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
        """Show the masters' true gradients in ``.grad`` of the half parameters, until the step.

        Both share one tensor: a change to one is a change to the other.
        """
        for master, param in self.copies().items():
            self._shown.show(param, master.grad)

    def _take_replaced(self) -> None:
        """Take over gradients that the user has assigned in the place of shown ones."""
        for master, param in self.copies().items() if self._shown else ():
            if self._shown.is_replaced(param, master.grad):
                master.grad = None if param.grad is None else param.grad.to(master.dtype)
                self._shown.show(param, master.grad)

    def take_back(self) -> None:
        """Undo ``begin`` after a failed backward: true gradients set aside count again."""
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
        self._shown.put_back()

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear the gradients of the half parameters, and those set aside.

        The state stays: the backward of a loss that was scaled already may still come.
        """
        self._set_aside.clear()
        self._shown.put_back()
        for param in (*self.copies().values(), *self._lent):
            if set_to_none or param.grad is None:
                self._shown.clear(param)
            else:
                param.grad = param.grad.detach().zero_()

    # after the step

    def write_back(self, backend: str) -> None:
        """Round the masters into the half parameters."""
        lists = TensorLists(memory=self._memory, params=self._masters, copies=self._params)
        with torch.no_grad():
            cast(lists, backend)
        self.mark_rounded()

    def mark_rounded(self) -> None:
        """Note that the half parameters hold the rounded masters now."""
        self._fp32_values.mark_rounded(self._halves)
        self._fp32_values.note_step()

    def note_step(self) -> None:
        """Note that the last write to the parameters was a step's."""
        self._left = versions(self._params)

    @property
    def is_untouched(self) -> bool:
        """Whether torch has counted no write to the parameters since the last step."""
        return self._left == versions(self._params)

    def overflowed(self) -> list[Tensor]:
        """Return the parameters that became inf in any step though their master was finite.

        Reads the device.
        """
        kept = self._memory.all_kept("overflow", len(self._params))
        flags = [flag.tolist() for flag in kept]
        return [param for param, *found in zip(self._params, *flags, strict=False) if any(found)]

    def lost_updates(self) -> list[float]:
        """Return by group the share of the last step's updates that changed no half value.

        Reads the device.
        """
        nothing = torch.zeros(1, 2, dtype=torch.int64)
        all_kept = self._memory.all_kept("lost", len(self._params))
        counts = sum((kept.cpu() for kept in all_kept), nothing)
        rows = dict(zip(self._masters, counts.tolist(), strict=False))
        shares = []
        for group in self.optimizer.param_groups:
            found = [rows.get(p, [0, 0]) for p in group["params"]]
            shares.append(sum(lost for lost, _ in found) / max(sum(all_ for _, all_ in found), 1))
        return shares


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
