"""Makes forwards and backwards under FSDP2 independent of other ranks inside of a block.

It uses names that are private to FSDP2 (torch 2.11 to 2.15), because the public setters have no
getters with which to restore the settings.
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

    All ranks enter the block together. Inside, each rank runs forwards and backwards by itself,
    and gradients are not reduced. At the end everything is restored, even after an error.

    Args:
        modules: modules that ``fully_shard`` was called on, outer ones first.
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
    """Make FSDP2 treat the next forward as the first one of a step."""
    state._training_state = type(state._training_state).IDLE
    state._modules_to_run_forward.clear()
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False
    state._comm_ctx.post_forward_order.clear()


def missing_memory(modules: Sequence[Any]) -> str:
    """Return "" if the modules' whole parameters fit into memory, else their size in words."""
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
