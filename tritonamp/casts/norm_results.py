"""Which FP32 results of a norm layer that is not torch's become half, as its input is.

FP32 weights make a half result FP32. One that is FP32 with half weights, too, was asked for.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

# private (torch 2.11 to 2.15): what runs without data is no op of the forward, and none of the
# modes around it (replays, selective checkpointing, FLOP counters) may see it
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from tritonamp.ambient import Generators
from tritonamp.class_swap import is_installed, uninstall
from tritonamp.policy import HALF_DTYPES

_CASTABLE = (torch.float32, *HALF_DTYPES)

Followers = dict[tuple[Any, ...], tuple[bool, ...] | None]
"""By kinds of arguments: which results are half where weights are; None: that cannot be told."""


def given_to(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the first floating tensor among the arguments: a norm's input."""
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, Tensor) and argument.is_floating_point():
            return argument
    return None


def like_given(
    output: Any, given: Tensor, followers: Callable[[], tuple[bool, ...] | None], default: bool
) -> Any:
    """Return the output of a norm with FP32 results of the input's shape in the input's dtype.

    Args:
        output: a tensor, or lists, tuples and dicts of tensors.
        given: the norm's half input.
        followers: returns which results are half with half weights; the others stay FP32.
        default: whether all results become half where ``followers`` returns None.
    """
    if type(output) is Tensor and output.dtype is not torch.float32:
        return output
    leaves, structure = tree_flatten(output)
    wide = [
        isinstance(leaf, Tensor) and leaf.dtype is torch.float32 and leaf.shape == given.shape
        for leaf in leaves
    ]
    if not any(wide):
        return output
    follows = followers()
    if follows is None:
        follows = (default,) * len(leaves)
    if len(follows) != len(leaves):
        return output
    results = [
        leaf.to(given.dtype) if is_wide and follow else leaf
        for leaf, is_wide, follow in zip(leaves, wide, follows, strict=True)
    ]
    return tree_unflatten(results, structure)


def kinds_of(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return what decides which results are half: the mode, and dtypes of the arguments."""
    given = (*args, *kwargs.values())
    return (module.training, *[getattr(a, "dtype", a is None) for a in given])


def half_results(
    module: nn.Module, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[bool, ...] | None:
    """Return which results of a module have a half dtype where its weights have.

    A copy of it runs once, on meta tensors: without data, random numbers, hooks or op table.
    None where it cannot, because its code reads values or needs a device.
    """
    generators = Generators.now()
    try:
        with torch.no_grad(), _disable_current_modes():
            twin = _without_data(module, dtype)
            empty_args, empty_kwargs = tree_map_only(Tensor, _empty, (args, kwargs))
            results = tree_leaves(twin.forward(*empty_args, **empty_kwargs))
    except Exception:  # the user's code raised
        return None
    finally:
        generators.restore()
    return tuple(isinstance(leaf, Tensor) and leaf.dtype is dtype for leaf in results)


def _empty(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor without data; FP32 and half become ``dtype``, if there is one."""
    if dtype is None or tensor.dtype not in _CASTABLE:
        dtype = tensor.dtype
    return torch.empty(tensor.shape, dtype=dtype, device="meta")


def _without_data(module: nn.Module, dtype: torch.dtype) -> Any:
    """Return a copy of a module with parameters and buffers of ``dtype`` that have no data.

    Counters and flags keep their values, for code asks them; containers are copied, too.
    """
    twin: Any = copy.copy(module)
    if is_installed(twin):
        uninstall(twin)
    own = vars(twin)
    for name, value in own.items():
        if name.endswith("hooks"):
            own[name] = OrderedDict()
        elif isinstance(value, Tensor):
            own[name] = _empty(value)
        elif isinstance(value, (list, dict, set)):
            own[name] = copy.copy(value)
        elif isinstance(value, MethodType) and value.__self__ is module:
            own[name] = MethodType(value.__func__, twin)
    for tensors in (own["_parameters"], own["_buffers"]):
        for name, tensor in tensors.items():
            if tensor is not None:
                is_float = tensor.is_floating_point()
                tensors[name] = _empty(tensor, dtype) if is_float else tensor.detach().clone()
    for name, child in own["_modules"].items():
        own["_modules"][name] = child and _without_data(child, dtype)
    return twin
