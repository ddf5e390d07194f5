"""Run the models of a replay without a trace in them, in generators, or in gradients."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as preserve_versions

from tritonamp.ambient import preserve
from tritonamp.fp32_values import Fp32Values
from tritonamp.kernels.device import world_size
from tritonamp.watched.collectives import NoCollectives


@contextlib.contextmanager
def untouched(
    models: list[nn.Module],
    writes: Mapping[str, tuple[Tensor, Tensor]],
    refuses_collectives: bool = True,
) -> Iterator[None]:
    """Run the block in eager torch, and restore all that a forward and backward change.

    Args:
        models: models that the block runs.
        writes: parameters that it writes to, each with its value before. A ``Watch`` fills them
            inside the block.
        refuses_collectives: whether a collective raises CollectiveError, which takes a dispatch
            mode.
    """
    from tritonamp.diagnosis.range_hooks import silenced  # here, because few runs watch

    alone = world_size() > 1 and refuses_collectives
    for fp32_values in fp32_values_of(models):
        fp32_values.push()  # as the next forward would, before anything is recorded
    modules = list(dict.fromkeys(module for m in models for module in m.modules()))
    flags = [module.training for module in modules]
    buffers = [(module, dict(module._buffers)) for module in modules]
    values = [(b, b.detach().clone()) for _, own in buffers for b in own.values() if b is not None]
    written = [b for b, _ in values]
    params = [p for m in models for p in m.parameters()]
    grads = [p.grad for p in params]
    for p in params:
        p.grad = None
    try:
        # writes count as none: what watches versions must not take the replay for the user
        # (private, and what FSDP2 itself uses, from torch 2.11 to 2.15)
        with (
            preserve({t.device for t in (*params, *written)}),
            preserve_versions((*params, *written)),
            torch.compiler.set_stance("force_eager"),
            silenced(modules),
            _without_spectators(models),
            # other ranks run other batches, or none: a wait for them may not end
            NoCollectives() if alone else contextlib.nullcontext(),
        ):
            try:
                yield
            finally:
                for module, own in buffers:
                    module._buffers.update(own)
                _write_back([*values, *writes.values()])
    finally:
        for module, flag in zip(modules, flags, strict=True):
            module.training = flag
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad


@contextlib.contextmanager
def _without_spectators(models: list[nn.Module]) -> Iterator[None]:
    """Hide forwards inside the block from spectators, because these follow training."""
    enabled: list[Any] = [m for m in models if hasattr(m, "_tritonamp")]
    before = {m._tritonamp: m._tritonamp.spectators for m in enabled}
    for context in before:
        context.spectators = ()
    try:
        yield
    finally:
        for context, spectators in before.items():
            context.spectators = spectators


@torch.no_grad()
def _write_back(values: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Write values into tensors that now hold others."""
    for tensor, value in values:
        if not same_bits(tensor, value):  # a view that was expanded takes no copy
            tensor.copy_(value)


def fp32_values_of(models: list[nn.Module]) -> list[Fp32Values]:
    """Return the FP32 values behind the half tensors of those models that are enabled."""
    enabled: list[Any] = [m for m in models if hasattr(m, "_tritonamp")]
    return [m._tritonamp.fp32_values for m in enabled]


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors hold equal bits; False for sparse and quantized tensors."""
    if one.layout is not torch.strided or one.is_quantized:
        return False
    if one.dtype is not other.dtype or one.shape != other.shape:
        return False
    bits = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return torch.equal(*bits)
