"""Find the norm layers of a model, and modules that a model asks to keep in FP32."""

import re
from collections.abc import Iterator

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


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a norm layer."""
    return isinstance(module, NORMS) or is_written_norm(module)


def is_written_norm(module: nn.Module) -> bool:
    """Return whether a module is a norm layer that is not torch's.

    Its class has "norm" in its name, and its parameters are vectors of one length.
    """
    if "norm" not in type(module).__name__.lower() or isinstance(module, NORMS):
        return False
    params = list(module.parameters())
    return bool(params) and all(p.dim() == 1 and p.shape == params[0].shape for p in params)


def _kept_names(model: nn.Module, policy: Policy) -> Iterator[tuple[nn.Module, re.Pattern[str]]]:
    """Yield each module that asks to keep parts in FP32, with a pattern for the parts' names.

    Models of transformers ask in ``_keep_in_fp32_modules`` for float16, and in
    ``_keep_in_fp32_modules_strict`` for both half formats.
    """
    # where parameters are cast, keep_norms_fp32=False refuses; at O1 the field is always False
    if not policy.keep_norms_fp32 and (policy.cast_model or not policy.op_policy):
        return
    attributes = ["_keep_in_fp32_modules_strict"]
    if policy.dtype is torch.float16:
        attributes.append("_keep_in_fp32_modules")
    modules = list(model.modules())
    # hasattr of a module is slow, so classes are asked; modules inside are visited by themselves
    asked = {cls for cls in set(map(type, modules)) if any(hasattr(cls, a) for a in attributes)}
    for module in modules:
        if type(module) not in asked and vars(module).keys().isdisjoint(attributes):
            continue
        named = (getattr(module, attribute, None) for attribute in attributes)
        names = [
            n for found in named if isinstance(found, (list, tuple, set, frozenset)) for n in found
        ]
        if names:
            parts = "|".join(str(name).replace("*", ".*") for name in names)
            yield module, re.compile(rf"(^|\.)({parts})($|\.)")


def kept_modules(model: nn.Module, policy: Policy) -> list[nn.Module]:
    """Return the modules inside ``model`` that it asks to keep in FP32 under ``policy``.

    Modules whose parameters stay half are left out, because they cannot compute in FP32.
    """
    found = []
    for owner, pattern in _kept_names(model, policy):
        for name, module in owner.named_modules(remove_duplicate=False):
            match = pattern.search(name)
            if match is not None and match.end() == len(name):
                found.append(module)
    if not policy.half_parameters:
        return found
    return [m for m in found if all(p.dtype not in HALF_DTYPES for p in m.parameters())]


def kept_tensors(model: nn.Module, policy: Policy) -> set[Tensor]:
    """Return the parameters of ``model`` that it asks to keep in FP32 under ``policy``."""
    return {
        param
        for owner, pattern in _kept_names(model, policy)
        for name, param in owner.named_parameters(remove_duplicate=False)
        if pattern.search(name)
    }
