"""FP32 values of half parameters, and the gradients that lead from one to the other."""

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tritonamp.fp32_values import Fp32Values
from tritonamp.kernels._multi_tensor import TensorLists
from tritonamp.kernels.cast import cast
from tritonamp.policy import HALF_DTYPES

_grad = operator.attrgetter("grad")
_is_sparse = operator.attrgetter("is_sparse")


def _show_gradient(param: Tensor, grad: Tensor | None) -> None:
    """Makes ``grad``, of any floating dtype, the gradient of ``param``."""
    param.grad = None
    param.grad_dtype = param.dtype if grad is None else grad.dtype
    param.grad = grad


class MasterWeights:
    """One optimizer's parameters: which FP32 tensor it steps on for which parameter of the model.

    A parameter that is FP32 already, or that the policy gives no master, is its own.

    Attributes:
        optimizer: the optimizer, whose ``param_groups`` hold the masters.
        scaled_by: what scaled the gradients that the model's parameters hold now; None: they are
            true gradients, or there are none.
        unscaled: the true FP32 gradients are in ``.grad`` of the masters now.
        sparse: ``lists`` found sparse gradients; it leaves them to ``sparse_lists``.
        listed: the masters whose gradients are in ``lists``; there "params" holds this rank's part
            of them.
    """

    def __init__(self, optimizer: Optimizer, fp32_values: Fp32Values, master_weights: bool) -> None:
        self.optimizer = optimizer
        self.scaled_by: Any = None
        self.unscaled = self.sparse = False
        self._fp32_values = fp32_values
        self._master_weights = master_weights
        self._sources: dict[Tensor, Tensor] = {}  # master -> parameter of the model
        self._masters: list[Tensor] = []  # the same, as lists
        self._params: list[Tensor] = []
        self._halves: list[int] = []  # places of the half parameters among the precise values
        self._moves = -1  # of the precise values, when devices were checked
        self._lists, self._all = TensorLists(), TensorLists()
        self._stepping = self._listed = (
            False  # in a step nobody changes gradients: lists need to be set only once
        )
        self._earlier: dict[
            Tensor, Tensor
        ] = {}  # true gradients set aside while a backward writes scaled ones
        for group in optimizer.param_groups:
            self.adopt(group)

    def adopt(self, group: dict[str, Any]) -> None:
        """Puts masters in the place of the half parameters of a group, the optimizer's state with
        them.
        """
        for i, param in enumerate(group["params"]):
            if param in self._sources:
                continue
            master = (
                self._fp32_values.master(param)
                if self._master_weights and param in self._fp32_values
                else param
            )
            self._sources[master] = param
            if master is not param:
                group["params"][i] = master
                if param in self.optimizer.state:
                    self.optimizer.state[master] = self.optimizer.state.pop(param)
        self._masters = [
            master for group in self.optimizer.param_groups for master in group["params"]
        ]
        self._masters = [
            master for master in self._masters if master in self._sources
        ]  # of groups still to come: none
        self._params = [self._sources[master] for master in self._masters]
        self._halves, self._moves = self._fp32_values.indices(list(self.copies().values())), -1

    def give_back(self) -> None:
        """The reverse of ``adopt`` for all groups."""
        for group in self.optimizer.param_groups:
            for i, master in enumerate(group["params"]):
                param = self._sources[master]
                if param is not master:
                    group["params"][i] = param
                    if master in self.optimizer.state:
                        self.optimizer.state[param] = self.optimizer.state.pop(master)

    def take_masters(self) -> None:
        """Moves the masters that ``tritonamp.optim`` keeps beside half parameters out of a state
        that was just loaded, to where they belong here, wherever the parameters are what they round
        to: load the model first.
        """
        for master, param in self._sources.items():
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
        """The parameters of the model, in the order of ``lists``."""
        return self._params

    def has_gradients(self) -> bool:
        """Whether any backward since the last step, or the last clearing, has left something."""
        return bool(self._earlier) or self.with_gradient() > 0

    def with_gradient(self) -> int:
        """How many parameters of the model have one."""
        return sum(grad is not None for grad in map(_grad, self._params))

    def lists(self) -> TensorLists:
        """Of the parameters that have a dense gradient: "params", the masters; "grads", those that
        the step will use, scaled ones of the model's parameters or true ones of the masters;
        "copies", the half parameters (the master again where there is none).
        """
        if self._listed:
            return self._lists
        params, copies = self._masters, self._params
        grads = list(map(_grad, params if self.unscaled else copies))
        numbers: Sequence[int] = range(len(params))
        complete = all(map(operator.is_not, grads, itertools.repeat(None)))
        self.sparse = any(
            map(_is_sparse, grads if complete else [g for g in grads if g is not None])
        )
        if self.sparse or not complete:
            numbers = [i for i, g in enumerate(grads) if g is not None and not g.is_sparse]
            params, grads, copies = (
                [tensors[i] for i in numbers] for tensors in (params, grads, copies)
            )
        self._lists.number(numbers, len(self._masters))
        self.listed: Sequence[Tensor] = params
        self._lists.set("params", params, lasting=True)
        self._lists.set("grads", grads)
        self._lists.set("copies", copies, lasting=True)
        self._listed = self._stepping
        return self._lists

    def sparse_lists(self) -> TensorLists:
        """The values of sparse scaled gradients, coalesced, as "grads"."""
        lists, values = TensorLists(), {}
        for i, param in enumerate(self._params):
            if param.grad is not None and param.grad.is_sparse:
                param.grad = param.grad.coalesce()
                values[i] = param.grad._values()
        lists.number(list(values), len(self._params))
        lists.set("grads", list(values.values()))
        return lists

    def gradients(self) -> list[Tensor]:
        """What ``lists`` has under "grads", and sparse ones."""
        return [
            g for g in map(_grad, self._masters if self.unscaled else self._params) if g is not None
        ]

    def copies(self) -> dict[Tensor, Tensor]:
        """Master to the half parameter that receives its rounded value."""
        return {master: param for master, param in self._sources.items() if master is not param}

    def refresh(self) -> None:
        """Brings the masters up to date with half parameters that somebody else wrote to.

        Raises:
            RuntimeError: the model was moved to another device since ``enable``.
        """
        if list(map(id, self._masters)) != [
            id(p) for group in self.optimizer.param_groups for p in group["params"]
        ]:
            for group in self.optimizer.param_groups:  # somebody has changed the groups by hand
                self.adopt(group)
        self._stepping, self._listed = True, False
        self._fp32_values.refresh()
        if self._moves != self._fp32_values.moves:
            for master, param in self.copies().items():
                if master.device != param.device:
                    raise RuntimeError(
                        f"a parameter of the model is on {param.device}, its FP32 master on {master.device}: "
                        "move the model to its device before tritonamp.enable"
                    )
            self._moves = self._fp32_values.moves

    def forget_lists(self) -> None:
        """Gradients may change from now on, and are not held on to."""
        self._stepping = self._listed = False
        self._lists.release("grads")

    def begin(self, cause: Any) -> None:
        """A backward with another scale is about to add to the gradients: sets the true ones aside."""
        if self.unscaled:
            for master, param in self._sources.items():
                if master.grad is not None:
                    self._earlier[master] = master.grad
                master.grad = None
                _show_gradient(param, None)
        self.scaled_by, self.unscaled = cause, False

    def unscale_(self, grad_scale: Tensor) -> None:
        """Puts the true FP32 gradients, ``grad_scale`` times the scaled ones, into ``.grad`` of the
        masters.
        """
        with torch.no_grad():
            for master, param in self._sources.items():
                true, earlier = (
                    _unscaled(param.grad, master, grad_scale),
                    self._earlier.pop(master, None),
                )
                if true is not None and earlier is not None:
                    true = true + earlier
                master.grad = earlier if true is None else true
        self.scaled_by, self.unscaled = None, True
        self._listed = False

    def show_true_gradients(self) -> None:
        """Makes the true gradients also those of the half parameters: work on either is work on the
        other.
        """
        for master, param in self.copies().items():
            _show_gradient(param, master.grad)

    def zero_grad(self, set_to_none: bool) -> None:
        """Clears the gradients of the half parameters, and those set aside."""
        self._earlier.clear()
        self.forget_lists()
        for param in self.copies().values():
            had = param.grad is not None
            _show_gradient(param, None)
            if had and not set_to_none:
                param.grad = torch.zeros_like(param)

    def finish(self) -> None:
        """The step is over: the gradients belong to the past."""
        self.scaled_by, self.unscaled = None, False
        self._earlier.clear()
        self.forget_lists()

    def take_back(self) -> None:
        """The backward that ``begin`` announced has failed: the true gradients that were set aside
        count again.
        """
        earlier = dict(self._earlier)
        self.finish()
        if earlier:
            for master, param in self._sources.items():
                param.grad = None
                master.grad = earlier.get(master)
            self.unscaled = True
            self.show_true_gradients()

    def write_back(self, backend: str) -> None:
        """Rounds the masters into the half parameters."""
        self._all.set("params", self._masters, lasting=True)
        self._all.set("copies", self._params, lasting=True)
        with torch.no_grad():
            cast(self._all, backend)
        self.written()

    def overflowed(self) -> list[Tensor]:
        """Parameters of the model that a finite master was too large for, in any step. Reads the
        device.
        """
        flags = [
            flag.tolist()
            for lists in (self._lists, self._all)
            for flag in lists.all_kept("overflow")
        ]
        return [param for param, *found in zip(self._params, *flags, strict=False) if any(found)]

    def lost_updates(self) -> list[float]:
        """By group, the share of the last step's updates of half values that changed none. Reads
        the device.
        """
        counts = sum(
            (kept.cpu() for kept in self._lists.all_kept("lost")),
            torch.zeros(1, 2, dtype=torch.int64),
        )
        rows = dict(zip(self._masters, counts.tolist(), strict=False))
        shares = []
        for group in self.optimizer.param_groups:
            found = [rows.get(p, [0, 0]) for p in group["params"]]
            shares.append(sum(lost for lost, _ in found) / max(sum(moves for _, moves in found), 1))
        return shares

    def written(self) -> None:
        """The half parameters hold the rounded masters now."""
        self._fp32_values.mark_rounded(self._halves)


def _unscaled(grad: Tensor | None, master: Tensor, grad_scale: Tensor) -> Tensor | None:
    if grad is None:
        return None
    if grad.is_sparse:
        grad = grad.coalesce()
    wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
    return (wide * grad_scale.to(grad.device, non_blocking=True)).to(master.dtype)
