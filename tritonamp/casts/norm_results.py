"""Which FP32 results of a user-written norm become half, as its input is.

FP32 weights make a half result FP32, and such a result becomes half again. A result that is FP32
with half weights, too, is FP32 on purpose.
"""

import contextlib
import copy
import functools
import itertools
import weakref
from collections import OrderedDict
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

# private (torch 2.11 to 2.15): what runs without data is no op of the forward, and none of the
# modes around it (replays, selective checkpointing, FLOP counters) may see it
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from tritonamp.ambient import Generators
from tritonamp.casts.tree import TO
from tritonamp.class_swap import is_installed, uninstall
from tritonamp.kernels._dynamo import constant_to_dynamo
from tritonamp.policy import HALF_DTYPES

_CASTABLE = (torch.float32, *HALF_DTYPES)

Followers = dict[tuple[Any, ...], tuple[bool, ...]]
"""Flags for the results that follow the input, by mode, number of results, kinds of arguments."""

_numbered: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def unknown_followers(module: nn.Module) -> tuple[Followers, int]:
    """Return the followers of a norm that has not run, and its number.

    The number stands for the norm in graphs of torch.compile.
    """
    number = next(_numbers)
    _numbered[number] = module
    return {}, number


def given_to(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the first floating tensor among the arguments, which is the norm's input."""
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, Tensor) and argument.is_floating_point():
            return argument
    return None


def like_given(module: Any, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a norm's output, with FP32 results that follow its half input in the input's dtype.

    Args:
        module: norm.
        output: result of the norm: a tensor, or lists, tuples and dicts with tensors.
        args: positional arguments of the forward that returned ``output``.
        kwargs: keyword arguments of that forward.
    """
    given = given_to(args, kwargs)
    if given is None:
        return output
    if given.dtype not in HALF_DTYPES:
        policy = module._tritonamp_context.policy
        is_wide = isinstance(output, Tensor) and given.dtype is output.dtype is torch.float32
        if policy.fp32_results and is_wide and output.shape == given.shape:
            return TO[policy.dtype](output)  # the norm ends an FP32 stretch
        return output
    is_compiling = torch.compiler.is_compiling()
    if type(output) is Tensor and not is_compiling:  # most norms: as few calls as possible
        if output.dtype is not torch.float32 or output.shape != given.shape:
            return output
        follows = _followers(module, given, 1, args, kwargs)
        return TO[given.dtype](output) if follows[0] else output
    is_flat = type(output) is tuple and all(type(leaf) is Tensor for leaf in output)
    leaves, structure = ([*output], None) if is_flat else tree_flatten(output)
    wide = [
        i
        for i, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and leaf.dtype is torch.float32 and leaf.shape == given.shape
    ]
    if not wide:
        return output
    results = [leaves[i] for i in wide]
    if not is_compiling:
        results = _cast(module, given, len(leaves), wide, results, args, kwargs)
    elif _fits_into_graph(args, kwargs):
        _tell_dynamo()
        number = module._tritonamp_number
        results = _cast_in_graph(number, given, len(leaves), wide, results, args, kwargs)
    for i, result in zip(wide, results, strict=True):
        leaves[i] = result
    return tuple(leaves) if structure is None else tree_unflatten(leaves, structure)


def _cast(
    module: Any,
    given: Tensor,
    count: int,
    wide: list[int],
    results: list[Tensor],
    args: Any,
    kwargs: Any,
) -> list[Tensor]:
    """Return FP32 results of a norm, in the dtype of ``given`` where they follow it.

    ``wide`` has the positions of ``results`` among all ``count`` results.
    """
    follows = _followers(module, given, count, args, kwargs)
    return [r.to(given.dtype) if follows[i] else r for i, r in zip(wide, results, strict=True)]


def _followers(module: Any, given: Tensor, count: int, args: Any, kwargs: Any) -> tuple[bool, ...]:
    """Return, for each of ``count`` results, whether it follows the dtype of ``given``."""
    known: Followers = module._tritonamp_followers
    kinds = module.training, count, *map(_kind, args), *map(_kind, kwargs.values())
    follows = known.get(kinds)
    if follows is None:
        follows = half_results(module, given.dtype, args, kwargs)
        if follows is None or len(follows) != count:
            follows = (False,) * count
        if not module._tritonamp.policy.op_policy:  # half layers that follow would refuse FP32
            follows = (True, *follows[1:])
        known[kinds] = follows
    return follows


def _kind(argument: Any) -> Any:
    """Return the fact that results may depend on: an argument's dtype, or whether it is None."""
    return getattr(argument, "dtype", argument is None)


def _cast_in_graph(number: int, *args: Any) -> list[Tensor]:
    """Do what ``_cast`` does for the norm of that number, as a leaf call of torch.compile."""
    module = _numbered.get(number)
    results: list[Tensor] = args[3]
    return results if module is None else _cast(module, *args)


@constant_to_dynamo
def _tell_dynamo() -> None:
    """Make torch.compile put ``_cast_in_graph`` into its graphs, and run it while it traces."""
    torch.compiler.allow_in_graph(_cast_in_graph)


def _fits_into_graph(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call in a graph can take these arguments."""
    plain = (Tensor, bool, int, float, str, type(None))
    return all(isinstance(argument, plain) for argument in (*args, *kwargs.values()))


def half_results(
    module: nn.Module, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[bool, ...] | None:
    """Return, for each result of a module, whether it is half if the weights are half.

    A copy of the module runs once on meta tensors, without data, random numbers, hooks or op table.
    Its buffers are half, or unchanged where the code cannot take half buffers. The result is None
    where the copy cannot run, because its code reads values or needs a device.
    """
    generators = Generators.now()
    try:
        for buffers in (dtype, None):
            with contextlib.suppress(Exception):  # the user's code raised
                return _results_without_data(module, dtype, buffers, args, kwargs)
    finally:
        generators.restore()
    return None


def _results_without_data(
    module: nn.Module, dtype: torch.dtype, buffers: torch.dtype | None, args: Any, kwargs: Any
) -> tuple[bool, ...]:
    with torch.no_grad(), _disable_current_modes():
        twin = _without_data(module, dtype, buffers)
        empty_args, empty_kwargs = tree_map_only(Tensor, _empty, (args, kwargs))
        results = tree_leaves(twin.forward(*empty_args, **empty_kwargs))
    return tuple(isinstance(leaf, Tensor) and leaf.dtype is dtype for leaf in results)


def _empty(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor without data. FP32 and half become ``dtype``, if one is given."""
    if dtype is None or tensor.dtype not in _CASTABLE:
        dtype = tensor.dtype
    return torch.empty(tensor.shape, dtype=dtype, device="meta")


def _without_data(module: nn.Module, dtype: torch.dtype, buffers: torch.dtype | None) -> Any:
    """Return a copy of a module whose floating tensors have no data.

    Counters and flags keep their values, because code reads them.

    Args:
        module: module to copy.
        dtype: dtype of the copy's parameters.
        buffers: dtype of the copy's floating buffers; None: that of the module's buffers.
    """
    twin: Any = copy.copy(module)
    if is_installed(twin):
        uninstall(twin)
    own = vars(twin)
    for name, value in own.items():
        own[name] = _of_twin(twin, module, name, value)
        if name == "forward" and own[name] is value:
            raise TypeError("a forward that may use the module itself, and change it")
    for tensors, wanted in ((own["_parameters"], dtype), (own["_buffers"], buffers)):
        for name, tensor in tensors.items():
            if tensor is not None:
                is_float = tensor.is_floating_point()
                tensors[name] = _empty(tensor, wanted) if is_float else tensor.detach().clone()
    for name, child in own["_modules"].items():
        own["_modules"][name] = child and _without_data(child, dtype, buffers)
    return twin


def _of_twin(twin: nn.Module, module: nn.Module, name: str, value: Any) -> Any:
    """Return an attribute for a module's copy, which must change nothing of the module."""
    if name.endswith("hooks"):
        return OrderedDict()
    if isinstance(value, Tensor):
        return _empty(value)
    if isinstance(value, (list, dict, set)):
        return copy.copy(value)
    if isinstance(value, MethodType) and value.__self__ is module:
        return MethodType(value.__func__, twin)
    if isinstance(value, functools.partial) and any(a is module for a in value.args):
        args = [twin if a is module else a for a in value.args]
        return functools.partial(value.func, *args, **value.keywords)
    return value
