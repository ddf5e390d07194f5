"""DistributedDataParallel around an enabled model."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tritonamp.class_swap import Swapped
from tritonamp.policy import HALF_DTYPES


class EnabledDDP(Swapped):
    """A DDP around an enabled model. Its ``join`` also makes FP32 values and loss scales equal."""

    _belongings = ("_tritonamp_ranks",)
    _set_aside = ("_sync_final_model", "_tritonamp_sync")
    _kept_by_copies = False
    _tritonamp_ranks: Any  # the ``Ranks`` that the model belongs to

    # private: DDP of torch 2.11 to 2.15 calls it on every rank when all have left ``join``
    def _sync_final_model(self, is_last_joiner: bool) -> None:
        super()._sync_final_model(is_last_joiner)  # type: ignore[misc]
        self._tritonamp_ranks.catch_up(self)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside of ``torch.compile``'s and DDP's wrappers."""
    if hasattr(model, "_orig_mod"):  # torch.compile's wrapper; private (torch 2.11 to 2.15)
        return unwrapped(model._orig_mod)  # type: ignore[arg-type]
    return unwrapped(model.module) if isinstance(model, DistributedDataParallel) else model


@contextlib.contextmanager
def unsynchronised(wrapper: DistributedDataParallel) -> Iterator[None]:
    """Inside the block, a DDP neither reduces gradients nor broadcasts buffers."""
    sends_buffers = wrapper.require_forward_param_sync
    with wrapper.no_sync():
        wrapper.require_forward_param_sync = False
        try:
            yield
        finally:
            wrapper.require_forward_param_sync = sends_buffers


def has_wide_gradients(wrapper: DistributedDataParallel) -> bool:
    """Return whether a DDP has trainable half parameters with FP32 gradients."""
    trained = (p for p in wrapper.module.parameters() if p.requires_grad)
    return any(p.dtype in HALF_DTYPES and p.grad_dtype is torch.float32 for p in trained)


def check_buckets(wrapper: DistributedDataParallel) -> None:
    """Refuse a DDP that cannot reduce FP32 gradients, because its buckets keep the half dtype.

    Raises:
        ValueError: it has ``find_unused_parameters`` or ``static_graph``.
    """
    for name in ("find_unused_parameters", "static_graph"):
        if getattr(wrapper, name):
            raise ValueError(
                f"grad_dtype=torch.float32: expected a DDP without {name}=True, which keeps its "
                f"buckets in the parameters' half dtype: build it without {name}, or drop "
                "grad_dtype and register a communication hook that sums in FP32"
            )


def rebuild_buckets(wrapper: DistributedDataParallel) -> None:
    """Make DDP rebuild its buckets and hooks after the parameters' dtype has changed.

    DDP would miss gradients otherwise. This does what DDP's ``__setstate__`` does, with names that
    are private to torch (2.11 to 2.15), and registers communication hooks again.

    Raises:
        ValueError: ``check_buckets`` refused the model; nothing was changed.
    """
    c10d: Any = dist
    wide = has_wide_gradients(wrapper)
    params, sparse = wrapper._build_params_for_reducer()
    if wide:
        check_buckets(wrapper)
        params, sparse = params[::-1], sparse[::-1]  # as backwards come to them
    names = wrapper._build_debug_param_to_name_mapping(params)
    wrapper._ddp_init_helper(params, sparse, names, wrapper.static_graph)
    if wide:
        # as torch's own mixed precision of DDP; new buckets follow the setting, the first do not
        reducer: Any = wrapper.reducer
        reducer._set_mixed_precision_param_dtype(torch.float32)
        reducer._push_all_rebuilt_params()
        reducer._rebuild_buckets()
    wrapper._has_rebuilt_buckets = wrapper._static_graph_delay_allreduce_enqueued = False
    if wrapper.static_graph:
        wrapper.reducer._set_static_graph()
        wrapper.logger._set_static_graph()  # type: ignore[union-attr]
    for hook, state in wrapper._comm_hooks:
        wrapper.logger._set_comm_hook_name(hook.__qualname__)  # type: ignore[union-attr]
        c10d._register_comm_hook(wrapper.reducer, state, hook)
