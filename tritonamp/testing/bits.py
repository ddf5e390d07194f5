"""Flips of single bits of tensors."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import tritonamp
from tritonamp.policy import packs_masters
from tritonamp.testing.faults import Fault

IN_BACKWARD = "gradient", "backward"
"""Targets in which a bit flips in the backward."""
OF_MODEL = *IN_BACKWARD, "weight", "master"
"""Targets that need no optimizer."""
_WRAPPERS = "module", "_orig_mod"  # parts of names that DDP and torch.compile add


def flip_bit(tensor: Tensor, element: int, bit: int) -> None:
    """Flip a bit of a number in place. Version counters do not change, as after a fault of memory.

    Args:
        tensor: real tensor of any shape, strides, and dtype of 1, 2, 4 or 8 bytes.
        element: index of the number in the flat tensor.
        bit: number of the bit, from 0, the lowest.

    Raises:
        ValueError: the tensor has no such element, or its dtype no such bit.
    """
    bits = 8 * tensor.dtype.itemsize
    if not 0 <= bit < bits:
        raise ValueError(f"bit: expected 0 to {bits - 1} for {tensor.dtype}, got {bit}")
    if not 0 <= element < tensor.numel():
        raise ValueError(
            f"element: expected 0 to {tensor.numel() - 1} for shape {tuple(tensor.shape)}, got "
            f"{element}"
        )
    place = torch.unravel_index(torch.tensor(element), tensor.shape)
    # little-endian, as all machines with GPUs are: the first byte has the lowest bits
    number = tensor.data[tuple(map(int, place))].unsqueeze(-1).view(torch.uint8)
    number[bit // 8].bitwise_xor_(1 << bit % 8)


def state_of(model: nn.Module, optimizer: Optimizer | None, name: str) -> dict[str, Tensor]:
    """Return the tensors in the optimizer's state of a parameter by key, without its step."""
    stored = {} if optimizer is None else optimizer.state
    # an optimizer has either the parameter or its master
    state = stored.get(model.get_parameter(name)) or stored.get(_master(model, name)) or {}
    return {k: v for k, v in state.items() if isinstance(v, Tensor) and k != "step"}


def flip_stored(
    model: nn.Module, optimizer: Optimizer | None, fault: Fault, flip: Callable[[Tensor], None]
) -> None:
    """Call ``flip`` on the parameter, master or state that a fault targets; else do nothing."""
    if fault.target in IN_BACKWARD:
        return
    if fault.target == "weight":
        flip(model.get_parameter(fault.place))
    elif fault.target == "master":
        _flip_master(model, _master(model, fault.place), flip)
    else:
        state = state_of(model, optimizer, fault.place)
        if fault.target in state:
            flip(state[fault.target])


def _master(model: nn.Module, name: str) -> Tensor:
    """Return the FP32 master of a parameter; without one, the parameter itself."""
    amp = tritonamp.handle(model)
    masters = {} if amp is None else dict(amp.named_master_params())
    param = model.get_parameter(name)
    own = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
    if name in masters or own in masters:
        return masters.get(name, masters.get(own, param))
    # of several models, whose numbers come first in the names of masters
    alike = [m for n, m in masters.items() if n.partition(".")[2] == own]
    return next((m for m in alike if torch.equal(m.to(param.dtype), param)), param)


def _flip_master(model: nn.Module, master: Tensor, flip: Callable[[Tensor], None]) -> None:
    amp = tritonamp.handle(model)
    if amp is None or not packs_masters(amp.policy.masters, amp.policy.state):
        flip(master)
        return
    # packed masters are no tensors: only a write that torch counts reaches their bits
    flipped = master.detach().clone()
    flip(flipped)
    master.detach().copy_(flipped)
