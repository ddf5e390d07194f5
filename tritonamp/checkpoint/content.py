"""Content that a checkpoint may hold: trees of tensors and plain values."""

import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

# Exact types, no more than torch's weights_only unpickler takes; it refuses subclasses.
TORCH_CLASSES = {Tensor, torch.nn.Parameter}
_SCALARS = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.Size)

_REMEDIES = {  # of what people put into checkpoints most
    "argparse.Namespace": "convert it (vars(namespace))",
    "numpy.ndarray": "convert it (torch.from_numpy(array))",
}

Path = tuple[Any, ...]  # of a value in a tree: the keys and numbers that lead to it


def collect(objects: dict[str, Any], sharded: bool = False) -> dict[str, Any]:
    """Return states of objects with `state_dict()`, tensors and plain values, by name.

    Tensors are detached, not copied. Scalars of numpy become Python's.

    Raises:
        ValueError: the key path of a value that could not be loaded.
    """
    return for_each(
        objects, lambda name, value: _plain(value, name, stateful=True, sharded=sharded)
    )


def for_each(values: Mapping[str, Any], function: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Return the results of ``function(name, value)`` by name.

    An error is raised at the end, because later values may wait for other ranks, as RNGState does.
    """
    results, errors = {}, []
    for name, value in values.items():
        try:
            results[name] = function(name, value)
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return results


def _plain(value: Any, where: str, stateful: bool = False, sharded: bool = False) -> Any:
    """Return `value` in new containers, with its tensors detached.

    Args:
        value: a tree of tensors and plain values.
        where: key path of the value, for the message.
        stateful: whether objects are replaced by their `state_dict()`. Not inside of state dicts,
            because `load_state_dict` would then miss the object.
        sharded: whether DTensors are allowed, and of others only strided ones.

    Raises:
        ValueError: the value could not be loaded; names `where`.
    """
    kind = type(value)
    if (
        kind in TORCH_CLASSES
        and not value.is_meta
        and (not sharded or value.layout is torch.strided)
    ):
        return value.detach()  # also drops attributes hung on a parameter, which may be anything
    if sharded and hasattr(value, "_local_tensor"):
        return value.detach()
    if kind in _SCALARS and not (kind is int and value.bit_length() > 2032):
        return value
    if (scalar := _scalar_of_numpy(value)) is not None:
        return scalar
    if kind in (list, tuple):
        return kind(
            _plain(item, f"{where}[{i}]", stateful, sharded) for i, item in enumerate(value)
        )
    if kind in (dict, OrderedDict, Counter):  # Counter: the milestones of MultiStepLR
        items = {
            _plain(k, f"a key of {where}"): _plain(v, f"{where}[{k!r}]", stateful, sharded)
            for k, v in value.items()
        }
        copy = kind(items)
        if kind is OrderedDict:  # Module.state_dict() hangs the modules' versions on it
            vars(copy).update(_plain(vars(value), f"vars({where})"))
        return copy
    if stateful and not isinstance(value, type) and callable(getattr(value, "state_dict", None)):
        return _plain(value.state_dict(), f"{where}.state_dict()", sharded=sharded)
    tensors = "strided tensors (no subclass but DTensor" if sharded else "tensors (no subclass"
    name = f"{kind.__module__}.{kind.__qualname__}"
    general = "convert it" if sharded else "convert it (.full_tensor()), use save_sharded"
    remedy = _REMEDIES.get(name, general)
    raise ValueError(
        f"cannot save {where}: expected {tensors}, not on the meta device), None, bool, int (up to "
        "2032 bits), float, complex, str, torch.dtype, torch.device, torch.Size, lists, tuples, "
        "dicts of these, or by name objects with state_dict(), got "
        f"{name}; {remedy} or omit it"
    )


def _scalar_of_numpy(value: Any) -> Any:
    """Return a scalar of numpy as Python's (1.0 for ``numpy.float64(1)``); None for others."""
    numpy = sys.modules.get("numpy")  # who has none has none of its scalars
    if numpy is None or not isinstance(value, numpy.generic):
        return None
    scalar = value.item()
    return scalar if type(scalar) in _SCALARS else None  # longdouble and datetime64 have none


def key_of(path: Path) -> str:
    """Return the name of the value at `path` in torch.distributed.checkpoint."""
    return ".".join(map(str, path))


def replace_tensors(tree: Any, function: Callable[[Path, Tensor], Any], path: Path = ()) -> Any:
    """Return a copy of `tree` with `function(path, tensor)` instead of each tensor."""
    if isinstance(tree, Tensor):
        return function(path, tree)
    if isinstance(tree, (list, tuple)) and not isinstance(tree, torch.Size):
        return type(tree)(
            replace_tensors(item, function, (*path, i)) for i, item in enumerate(tree)
        )
    if isinstance(tree, dict):
        copy = type(tree)(
            {key: replace_tensors(item, function, (*path, key)) for key, item in tree.items()}
        )
        if isinstance(tree, OrderedDict):
            vars(copy).update(vars(tree))
        return copy
    return tree


def find_tensors(tree: Any) -> dict[Path, Tensor]:
    """Return the tensors of `tree` by path."""
    found: dict[Path, Tensor] = {}
    replace_tensors(tree, found.setdefault)
    return found


def outline(tree: Any) -> Any:
    """Return `tree` with tensors on the meta device, so that only shapes and dtypes are stored."""
    return replace_tensors(
        tree, lambda _, tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    )


def tensor_at(tree: Any, path: Path) -> Tensor | None:
    """Return the tensor of `tree` at `path`, or None."""
    for key in path:
        try:
            tree = tree[key]
        except (KeyError, IndexError, TypeError):
            return None
    return tree if isinstance(tree, Tensor) else None


def with_lists(tree: Any) -> Any:
    """Return `tree` with lists instead of tuples that hold tensors.

    torch.distributed.checkpoint does not look into tuples.
    """
    if isinstance(tree, dict):
        return {key: with_lists(item) for key, item in tree.items()}
    if isinstance(tree, list) or (type(tree) is tuple and find_tensors(tree)):
        return [with_lists(item) for item in tree]
    return tree
