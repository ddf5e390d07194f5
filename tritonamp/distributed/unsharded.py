"""A model under FSDP2 whose forwards and backwards need no other rank for a while.

Private names of FSDP2's (torch 2.11 to 2.15): its public setters cannot be read, to be put back.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tritonamp.distributed.fsdp import groups_of, mp_policy

_SETTINGS = "post_forward_mesh_info", "reshard_after_backward", "reduce_grads"


@contextlib.contextmanager
def unsharded(modules: Sequence[Any]) -> Iterator[None]:
    """Gather all parameters of modules, and keep them whole inside the block.

    All ranks enter the block together. Inside, each runs forwards and backwards by itself:
    gradients are not reduced. Afterwards the modules, which come outer ones first, are as they
    were, also where a forward has raised.
    """
    states = list(dict.fromkeys(module._get_fsdp_state() for module in modules))
    for state in states:
        state._lazy_init()
    groups = list(dict.fromkeys(group for module in modules for group in groups_of(module)))
    before = [{name: getattr(group, name) for name in _SETTINGS} for group in groups]
    for group in groups:
        group.post_forward_mesh_info = None  # not resharded after the forward
        group.reshard_after_backward = group.reduce_grads = False
    try:
        for module in modules:
            module.unshard()
        yield
    finally:
        for state in states:
            _end_iteration(state)
        for group, settings in zip(groups, before, strict=True):
            vars(group).update(settings)
            group._training_state = type(group._training_state).IDLE
            group._post_forward_indices.clear()
        for module in modules:
            module.reshard()


def _end_iteration(state: Any) -> None:
    """Have FSDP2 take the next forward for the first one of a step."""
    state._training_state = type(state._training_state).IDLE
    state._modules_to_run_forward.clear()
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False
    state._comm_ctx.post_forward_order.clear()


def missing_memory(modules: Sequence[Any]) -> str:
    """Return in words which memory the whole parameters of modules would need and lack; else ""."""
    of_groups = {group: mp_policy(module) for module in modules for group in groups_of(module)}
    needed = sum(
        param.numel() * (policy.param_dtype or param.dtype).itemsize
        for group, policy in of_groups.items()
        for param in (p.sharded_param for p in group.fsdp_params)
    )
    free = free_memory(modules[0]._get_fsdp_state()._device)
    if free is None or needed <= free:
        return ""
    return f"{needed / 2**30:.3g} GiB of whole parameters, {free / 2**30:.3g} GiB are free"


def free_memory(device: torch.device) -> int | None:
    """Return the number of bytes that torch can still allocate on a device; None if unknown."""
    if device.type != "cuda":
        return None
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused
