"""FP32 values of half parameters, and the gradients that lead from one to the other."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tritonamp.kernels.cast import cast, fp32_value


def _stamp(tensor: Tensor) -> tuple[int, int]:
    """Changes when somebody writes to the tensor or gives it other storage (through ``.data`` the first escapes)."""
    return tensor.data_ptr(), tensor._version


def _show_gradient(param: Tensor, grad: Tensor | None) -> None:
    """Makes ``grad``, of any floating dtype, the gradient of ``param``."""
    param.grad = None
    param.grad_dtype = param.dtype if grad is None else grad.dtype
    param.grad = grad


class PreciseValues:
    """The FP32 values behind half tensors: masters where an optimizer has them, else the originals.

    A half tensor that somebody else wrote to (a loaded checkpoint, an averaged copy) overrides its FP32 value where
    the two no longer agree.
    """

    def __init__(self, originals: Mapping[Tensor, Tensor]) -> None:
        self._values = dict(originals)
        self._stamps: dict[Tensor, tuple[int, int] | None] = {half: _stamp(half) for half in originals}
        self._versions = {half: value._version for half, value in originals.items()}  # when last rounded into ``half``

    def __contains__(self, half: Tensor) -> bool:
        return half in self._values

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._values)

    def get(self, half: Tensor) -> Tensor:
        """The FP32 value, brought up to date in place."""
        value = self._values[half]
        if self._stamps[half] != _stamp(half):
            with torch.no_grad():
                value.copy_(fp32_value(half.detach().to(value.device), value.detach()))
            self._stamps[half] = _stamp(half)
        return value

    def push(self) -> None:
        """Rounds FP32 values that somebody wrote to into their half tensors."""
        for half, value in self._values.items():
            if value._version != self._versions[half]:
                with torch.no_grad():
                    half.copy_(self.get(half))
                self.written([half])

    def master(self, half: Tensor) -> Tensor:
        """The FP32 value as a leaf on the device of ``half`` that an optimizer can step on."""
        value = self.get(half)
        if not isinstance(value, torch.nn.Parameter):
            data = value.detach().to(half.device, copy=True)
            value = torch.nn.Parameter(data, requires_grad=half.requires_grad)
            self._values[half], self._versions[half] = value, value._version
        return value

    def adopt(self, half: Tensor, value: Tensor) -> Tensor:
        """From now on ``value`` is the FP32 value of ``half``; returns it, brought up to date in place."""
        if self._values.get(half) is not value:
            self._values[half], self._stamps[half] = value, None
            self._versions[half] = self.get(half)._version
        return self.get(half)

    def load(self, half: Tensor, value: Tensor) -> None:
        """Takes a value from a checkpoint, before it is rounded into ``half``."""
        target = self._values[half]
        if target.shape == value.shape:
            with torch.no_grad():
                target.copy_(value)

    def written(self, halves: list[Tensor]) -> None:
        """``halves`` hold the rounded FP32 values now."""
        for half in halves:
            self._stamps[half], self._versions[half] = _stamp(half), self._values[half]._version


class MasterWeights:
    """One optimizer's parameters: which FP32 tensor it steps on for which parameter of the model.

    A parameter that is FP32 already, or that the policy gives no master, is its own.

    Attributes:
        optimizer: the optimizer, whose ``param_groups`` hold the masters.
        scaled_by: what scaled the gradients that the model's parameters hold now; None: they are true gradients, or
            there are none.
        unscaled: the true FP32 gradients are in ``.grad`` of the masters now.
    """

    def __init__(self, optimizer: Optimizer, precise: PreciseValues, master_weights: bool) -> None:
        self.optimizer = optimizer
        self.scaled_by: Any = None
        self.unscaled = False
        self._precise = precise
        self._master_weights = master_weights
        self._sources: dict[Tensor, Tensor] = {}  # master -> parameter of the model
        self._earlier: dict[Tensor, Tensor] = {}  # true gradients set aside while a backward writes scaled ones
        for group in optimizer.param_groups:
            self.adopt(group)

    def adopt(self, group: dict[str, Any]) -> None:
        """Puts masters in the place of the half parameters of a group, the optimizer's state with them."""
        for i, param in enumerate(group["params"]):
            master = self._precise.master(param) if self._master_weights and param in self._precise else param
            self._sources[master] = param
            if master is not param:
                group["params"][i] = master
                if param in self.optimizer.state:
                    self.optimizer.state[master] = self.optimizer.state.pop(param)

    def give_back(self) -> None:
        """The reverse of ``adopt`` for all groups."""
        for group in self.optimizer.param_groups:
            for i, master in enumerate(group["params"]):
                param = self._sources[master]
                if param is not master:
                    group["params"][i] = param
                    if master in self.optimizer.state:
                        self.optimizer.state[param] = self.optimizer.state.pop(master)

    def parameters(self) -> list[Tensor]:
        """The parameters of the model, in the order of the groups."""
        return [self._sources[master] for group in self.optimizer.param_groups for master in group["params"]]

    def scaled_gradients(self) -> list[tuple[Tensor, Tensor]]:
        """(parameter of the model, its gradient's values) for all parameters that have one; sparse ones coalesced."""
        pairs = []
        for param in self._sources.values():
            if param.grad is not None and param.grad.is_sparse:
                param.grad = param.grad.coalesce()
                pairs.append((param, param.grad._values()))
            elif param.grad is not None:
                pairs.append((param, param.grad))
        return pairs

    def has_gradients(self) -> bool:
        """Whether any backward since the last step, or the last clearing, has left something."""
        return bool(self._earlier) or any(param.grad is not None for param in self._sources.values())

    def gradients(self) -> dict[Tensor, Tensor]:
        """Master to the gradient that the step will use: scaled, on the model's parameter, or true, on the master."""
        grads = {}
        for master, param in self._sources.items():
            grad = (master if self.unscaled else param).grad
            if grad is not None:
                grads[master] = grad
        return grads

    def copies(self) -> dict[Tensor, Tensor]:
        """Master to the half parameter that receives its rounded value."""
        return {master: param for master, param in self._sources.items() if master is not param}

    def refresh(self) -> None:
        """Brings the masters up to date with half parameters that somebody else wrote to.

        Raises:
            RuntimeError: the model was moved to another device since ``enable``.
        """
        for master, param in self.copies().items():
            if master.device != param.device:
                raise RuntimeError(
                    f"a parameter of the model is on {param.device}, its FP32 master on {master.device}: "
                    "move the model to its device before tritonamp.enable"
                )
            self._precise.get(param)

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
        """Puts the true FP32 gradients, ``grad_scale`` times the scaled ones, into ``.grad`` of the masters."""
        with torch.no_grad():
            for master, param in self._sources.items():
                true, earlier = _unscaled(param.grad, master, grad_scale), self._earlier.pop(master, None)
                if true is not None and earlier is not None:
                    true = true + earlier
                master.grad = earlier if true is None else true
        self.scaled_by, self.unscaled = None, True

    def show_true_gradients(self) -> None:
        """Makes the true gradients also those of the half parameters: work on either is work on the other."""
        for master, param in self.copies().items():
            _show_gradient(param, master.grad)

    def zero_grad(self, set_to_none: bool) -> None:
        """Clears the gradients of the half parameters, and those set aside."""
        self._earlier.clear()
        for param in self.copies().values():
            had = param.grad is not None
            _show_gradient(param, None)
            if had and not set_to_none:
                param.grad = torch.zeros_like(param)

    def finish(self) -> None:
        """The step is over: the gradients belong to the past."""
        self.scaled_by, self.unscaled = None, False
        self._earlier.clear()

    def take_back(self) -> None:
        """The backward that ``begin`` announced has failed: the true gradients that were set aside count again."""
        earlier = dict(self._earlier)
        self.finish()
        if earlier:
            for master, param in self._sources.items():
                param.grad = None
                master.grad = earlier.get(master)
            self.unscaled = True
            self.show_true_gradients()

    def write_back(self) -> None:
        """Rounds the masters into the half parameters."""
        copies = self.copies()
        with torch.no_grad():
            cast([m.detach() for m in copies], list(copies.values()))
        self.written()

    def written(self) -> None:
        """The half parameters hold the rounded masters now."""
        self._precise.written(list(self.copies().values()))


def _unscaled(grad: Tensor | None, master: Tensor, grad_scale: Tensor) -> Tensor | None:
    if grad is None:
        return None
    if grad.is_sparse:
        grad = grad.coalesce()
    wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
    return (wide * grad_scale.to(grad.device, non_blocking=True)).to(master.dtype)
