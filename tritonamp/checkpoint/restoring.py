"""The tensors into which a sharded checkpoint is read."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tritonamp.checkpoint.content import Path, for_each, replace_tensors, tensor_at


def targets(
    content: dict[str, Any], saved: Sequence[str], objects: dict[str, Any]
) -> dict[str, Any]:
    """Return the states in `content` with tensors to read into, sharded like those of `objects`.

    For a module these are its own tensors, if dtypes agree. An optimizer's state with the shape of
    a parameter is sharded like the parameter, because an optimizer has no state before its first
    step. Other tensors are new, of the saved dtype, on the device of the object's own tensor or
    else on the CPU.

    Args:
        content: states by name, with tensors on the meta device.
        saved: names that were saved as objects.
        objects: objects by name; None leaves a name out.

    Raises:
        ValueError: names, keys or shapes differ; lists them.
    """
    check_names(content, saved, objects, "", "leave it out")
    _check_objects(objects)
    left_out = [name for name, value in objects.items() if value is None]
    wanted = {name: tree for name, tree in content.items() if name not in left_out}
    return for_each(wanted, lambda name, tree: _state(name, tree, objects.get(name)))


def check_names(
    content: Collection[str],
    stateful: Iterable[str],
    objects: Mapping[str, Any],
    call: str,
    without: str,
) -> None:
    """Check that ``content`` has all names of ``objects``, and these all of ``stateful``.

    Args:
        content: names in the checkpoint.
        stateful: names in the checkpoint that need an object.
        objects: the user's objects by name.
        call: the user's call with a colon, for the message.
        without: purpose of ``name=None``, for the message.

    Raises:
        ValueError: names differ; lists them.
    """
    if unknown := [name for name in objects if name not in content]:
        raise ValueError(
            f"{call}not in the checkpoint: {', '.join(unknown)}; it has {', '.join(content)}"
        )
    if missing := [name for name in stateful if name not in objects]:
        raise ValueError(
            f"{call}the checkpoint also has the state of {', '.join(missing)}: give the objects "
            f"to load it into, or {missing[0]}=None to {without}"
        )


def _check_objects(objects: Mapping[str, Any]) -> None:
    for name, value in objects.items():
        if value is not None and not (
            hasattr(value, "load_state_dict") and hasattr(value, "state_dict")
        ):
            raise ValueError(
                f"{name}: expected an object with state_dict() and load_state_dict(), or None to "
                f"leave it out, got {type(value).__name__}; values are returned without being named"
            )


def _state(name: str, tree: Any, value: Any) -> Any:
    if value is None:
        return replace_tensors(tree, lambda _, tensor: _fresh(tensor, None))
    own = value.state_dict()
    if isinstance(value, nn.Module):
        check_module(name, tree, own)
        return replace_tensors(tree, lambda path, tensor: _in_place(tensor, tensor_at(own, path)))
    params = check_optimizer(name, tree, value) if isinstance(value, Optimizer) else {}

    def like(path: Path, tensor: Tensor) -> Tensor:
        of_param = len(path) == 3 and path[0] == "state" and tensor.dim()
        param = params.get(path[1]) if of_param else None
        shaped = param is not None and param.shape == tensor.shape
        return _fresh(tensor, param if shaped else tensor_at(own, path))

    return replace_tensors(tree, like)


def _fresh(saved: Tensor, like: Tensor | None) -> Tensor:
    if like is None or like.shape != saved.shape:
        return torch.empty(saved.shape, dtype=saved.dtype)
    return torch.empty_like(like, dtype=saved.dtype, requires_grad=False)


def _in_place(saved: Tensor, own: Tensor | None) -> Tensor:
    same = own is not None and own.shape == saved.shape and own.dtype == saved.dtype
    return own.detach() if own is not None and same else _fresh(saved, own)


_COMPILED = "_orig_mod."


def check_module(name: str, tree: dict[str, Any], own: dict[str, Any]) -> None:
    """Raise ValueError unless ``tree`` has the keys and shapes of the module's ``own`` state."""
    shapes = {key: value.shape for key, value in own.items() if isinstance(value, Tensor)}
    faults = {
        "missing in the checkpoint": [key for key in own if key not in tree],
        "not in the module": [key for key in tree if key not in own],
        "of other shapes": [
            f"{key} (saved {tuple(value.shape)}, here {tuple(shapes[key])})"
            for key, value in tree.items()
            if isinstance(value, Tensor) and key in shapes and value.shape != shapes[key]
            and not key.endswith("_extra_state")  # which may have any
        ],
        "on the meta device (call to_empty first)": [
            key for key, value in own.items() if isinstance(value, Tensor) and value.is_meta
        ],
    }  # fmt: skip
    wrapped = {any(key.startswith(_COMPILED) for key in keys) for keys in (tree, own)}
    if len(wrapped) == 2:
        raise ValueError(
            f"{name}: one of the checkpoint and the module is the result of torch.compile(model), "
            f"whose keys begin with {_COMPILED!r}: save and load the model that was compiled"
        )
    if found := [f"{what}: {', '.join(keys)}" for what, keys in faults.items() if keys]:
        raise ValueError(f"{name} is not what was saved; {'; '.join(found)}")


def check_optimizer(name: str, tree: dict[str, Any], optimizer: Optimizer) -> dict[Any, Tensor]:
    """Return the optimizer's parameters by their numbers in the saved state.

    Raises:
        ValueError: the groups' numbers of parameters differ.
    """
    groups = [group["params"] for group in tree["param_groups"]] if "param_groups" in tree else []
    sizes = list(map(len, groups))
    own = [len(group["params"]) for group in optimizer.param_groups]
    if sizes != own:
        raise ValueError(
            f"{name} is not what was saved: {own} parameters in its groups, {sizes} in the "
            "checkpoint"
        )
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return dict(zip([number for group in groups for number in group], params, strict=True))
