"""Casts: of nested inputs and outputs, and of a model's parameters and buffers, in place and back."""

import copy
import dataclasses
import operator
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from tritonamp.policy import HALF_DTYPES, Policy

NORMS = (
    nn.modules.batchnorm._NormBase,  # BatchNorm, InstanceNorm and SyncBatchNorm
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
)


class Cast(NamedTuple):
    """Tensors whose dtype is among ``sources`` become ``target``; all others pass."""

    sources: tuple[torch.dtype, ...]
    target: torch.dtype


def to_half(dtype: torch.dtype) -> Cast:
    """FP32 and the other half format become ``dtype``; FP64, integers and complex pass."""
    return Cast((torch.float32, *HALF_DTYPES), dtype)


def from_half(dtype: torch.dtype) -> Cast:
    """Half tensors become ``dtype``; everything else passes."""
    return Cast(HALF_DTYPES, dtype)


def cast_tree(value: Any, cast: Cast) -> Any:
    """``value`` with ``cast`` applied to every tensor inside it; the same object where nothing
    changed.

    Looks into lists, tuples, named tuples, mappings and dataclasses, which keep their type, and
    calls ``obj.to(dtype)`` on other objects that have it.
    """
    return _cast(value, cast)[0]


def _cast(value: Any, cast: Cast) -> tuple[Any, bool]:
    """The cast value, and whether anything changed (asked by ``is``, torch.compile could not
    follow).
    """
    if isinstance(value, Tensor):
        return (value.to(cast.target), True) if value.dtype in cast.sources else (value, False)
    if value is None:  # torch.compile cannot ask None whether it is a dataclass
        return value, False
    if isinstance(value, PackedSequence):
        data, changed = _cast(value.data, cast)
        return (value._replace(data=data), True) if changed else (value, False)
    if isinstance(value, (list, tuple)):
        items = [_cast(item, cast) for item in value]
        if not any(changed for _, changed in items):
            return value, False
        new = [item for item, _ in items]
        named = isinstance(value, tuple) and hasattr(value, "_fields")
        return (type(value)(*new) if named else type(value)(new)), True
    if isinstance(value, MutableMapping):
        return _with(
            value, {key: _cast(item, cast) for key, item in value.items()}, operator.setitem
        )
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        # object's own, because a dataclass may be frozen
        return _with(
            value, {name: _cast(getattr(value, name), cast) for name in names}, object.__setattr__
        )
    if hasattr(value, "to") and not isinstance(value, (nn.Module, type)):
        return _with_to(value, cast)
    return value, False


def _with(
    value: Any, items: dict[Any, tuple[Any, bool]], put: Callable[..., None]
) -> tuple[Any, bool]:
    """A copy of ``value`` with those of ``items`` put in that changed."""
    if not any(changed for _, changed in items.values()):
        return value, False
    new = {key: item for key, (item, _) in items.items()}
    if type(value) is dict:
        return new, True
    if type(value) is OrderedDict:  # torch.compile cannot follow a copy of these two
        return OrderedDict(new), True
    if type(value) is defaultdict:
        return defaultdict(value.default_factory, new), True
    result = copy.copy(value)
    for key, (item, changed) in items.items():
        if changed:
            put(result, key, item)
    return result, True


def _with_to(value: Any, cast: Cast) -> tuple[Any, bool]:
    try:
        new = value.to(cast.target)
        return new, new is not value
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return value, False  # its ``to`` is about something else


def fp32_modules(model: nn.Module, policy: Policy) -> list[nn.Module]:
    """The modules inside ``model`` that ``policy.fp32_modules`` names, and, without an op policy,
    the norms it keeps.

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
                f"fp32_modules: {wanted!r} matches no module of the model; its modules are {names}"
            )
        found |= dict.fromkeys(m for match in matches for m in _with_forward(match))
    if policy.keep_norms_fp32 and not policy.op_policy:
        found |= dict.fromkeys(m for m in named.values() if isinstance(m, NORMS))
    return list(found)


def _with_forward(module: nn.Module) -> list[nn.Module]:
    """The module, or, for a container without a forward of its own, what it holds."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return [m for child in module.children() for m in _with_forward(child)]
    return [module]


def _kept(model: nn.Module, policy: Policy) -> set[int]:
    """Ids of the parameters and buffers that stay FP32."""
    modules: list[nn.Module] = [sub for m in fp32_modules(model, policy) for sub in m.modules()]
    if policy.keep_norms_fp32:
        modules += [m for m in model.modules() if isinstance(m, NORMS)]
    return {id(t) for m in modules for t in _own_tensors(m)}


def _own_tensors(module: nn.Module) -> Iterator[Tensor]:
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None:
            yield tensor


def cast_model(model: nn.Module, policy: Policy) -> dict[Tensor, Tensor]:
    """Makes the FP32 parameters of ``model`` half in place: each Parameter stays the same object.

    Norm layers and ``policy.fp32_modules`` are left alone. Buffers become half only where there is
    no op policy to reconcile dtypes: tables of angles, running statistics and small constants lose
    too much in half.

    Returns:
        the FP32 originals, in main memory where the model is on another device: half tensor to FP32
            values. Of
        parameters that were half already and get masters, their values.
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
            originals[tensor] = tensor.detach().to("cpu")
            set_data(tensor, tensor.detach().to(policy.dtype))
    flatten_rnns(model)
    return originals


def set_data(tensor: Tensor, data: Tensor) -> None:
    """Gives ``tensor`` other storage and dtype, its gradient (where there is one) the same dtype."""
    grad, tensor.grad = (tensor.grad, None) if tensor.is_leaf else (None, None)
    tensor.data = data
    if tensor.is_leaf:
        tensor.grad_dtype = data.dtype
    if grad is not None:
        tensor.grad = grad.to(data.dtype)


def flatten_rnns(model: nn.Module) -> None:
    """cuDNN wants the weights of an RNN in one block; new storage breaks it up."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
