"""Casts of a model's parameters and buffers, in place and back."""

from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn

from tritonamp.policy import HALF_DTYPES, Policy

NORMS = (
    # private (torch 2.11 to 2.15): the base of BatchNorm, InstanceNorm and SyncBatchNorm
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
)


def fp32_modules(model: nn.Module, policy: Policy) -> list[nn.Module]:
    """Return the modules inside ``model`` that stay FP32.

    Those that ``policy.fp32_modules`` names and, without an op policy, the norms that it keeps.

    Raises:
        ValueError: a name or class that matches nothing in ``model``.
    """
    named = {name: m for name, m in model.named_modules(remove_duplicate=False) if name}
    found: dict[nn.Module, None] = {}
    for wanted in policy.fp32_modules:
        if isinstance(wanted, str):
            matches = [named[wanted]] if wanted in named else []
        else:
            matches = [m for m in named.values() if isinstance(m, wanted)]
        if not matches:
            names = ", ".join(sorted(named)[:20]) or "(it has no submodules)"
            raise ValueError(
                f"fp32_modules: expected names or classes of modules of the model, got {wanted!r}, "
                f"which matches no module; its modules are {names}"
            )
        found |= dict.fromkeys(m for match in matches for m in _with_forward(match))
    if policy.keep_norms_fp32 and not policy.op_policy:
        found |= dict.fromkeys(m for m in named.values() if isinstance(m, NORMS))
    return list(found)


def _with_forward(module: nn.Module) -> list[nn.Module]:
    """Return the module, or, for a container without a forward of its own, what it holds."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return [m for child in module.children() for m in _with_forward(child)]
    return [module]


def _kept(model: nn.Module, policy: Policy) -> set[int]:
    """Return the ids of the parameters and buffers that stay FP32."""
    modules: list[nn.Module] = [sub for m in fp32_modules(model, policy) for sub in m.modules()]
    if policy.keep_norms_fp32:
        modules += [m for m in model.modules() if isinstance(m, NORMS)]
    return {id(t) for m in modules for t in _own_tensors(m)}


def _own_tensors(module: nn.Module) -> Iterator[Tensor]:
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None:
            yield tensor


def cast_model(
    model: nn.Module, policy: Policy, stepped: Collection[Tensor] = ()
) -> dict[Tensor, Tensor]:
    """Make the FP32 parameters of ``model`` half in place: each Parameter stays the same object.

    Norm layers and ``policy.fp32_modules`` are left alone. Buffers become half only where there is
    no op policy to reconcile dtypes: tables of angles, running statistics and small constants lose
    too much in half.

    Args:
        model: whatever its device.
        policy: says what becomes half.
        stepped: parameters that will get masters, made of their originals.

    Returns:
        half tensor to its FP32 original, which it was rounded from: of those that are ``stepped``
        on its device, else in main memory; of parameters that were half already and get masters,
        their values.
    """
    originals: dict[Tensor, Tensor] = {}
    if policy.half_parameters and policy.master_weights:
        originals = {p: p.detach().float() for p in model.parameters() if p.dtype in HALF_DTYPES}
    if not policy.cast_model:
        return originals
    kept = _kept(model, policy)
    tensors: dict[Tensor, None] = dict.fromkeys(p for p in model.parameters())
    if not policy.op_policy:
        tensors |= dict.fromkeys(model.buffers())
    for tensor in tensors:
        if tensor.dtype is torch.float32 and id(tensor) not in kept:
            original = tensor.detach()
            originals[tensor] = original if tensor in stepped else original.to("cpu")
            set_data(tensor, tensor.detach().to(policy.dtype))
    flatten_rnns(model)
    return originals


def set_data(tensor: Tensor, data: Tensor) -> None:
    """Give ``tensor`` other storage and dtype, and its gradient, if any, the same dtype.

    ``grad_dtype`` has to follow: autograd refuses a gradient of another dtype.
    """
    grad, tensor.grad = (tensor.grad, None) if tensor.is_leaf else (None, None)
    tensor.data = data
    if tensor.is_leaf:
        tensor.grad_dtype = data.dtype
    if grad is not None:
        tensor.grad = grad.to(data.dtype)


def flatten_rnns(model: nn.Module) -> None:
    """Put the weights of each RNN into one block for cuDNN: new storage has broken it up."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
