"""Loads a checkpoint into the objects that it was saved from, in the order they need."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from tritonamp.checkpoint.random_states import RNGState
from tritonamp.checkpoint.restoring import check_module, check_names, check_optimizer


class _Pair(NamedTuple):
    """One object and the state to load into it."""

    name: str  # as the user would write it
    owner: Any
    state: Any


def load_into(content: Mapping[str, Any], objects: Mapping[str, Any], call: str) -> None:
    """Load the states in ``content`` into ``objects`` of the same names.

    Args:
        content: states by name.
        objects: objects with ``load_state_dict``, or lists, tuples and dicts of such objects in
            the form in which they were saved. None skips a name.
        call: the user's call, for messages.

    Raises:
        ValueError: names, keys or shapes differ; lists them. Nothing was changed.
        RuntimeError: an object's ``load_state_dict`` failed; names the objects loaded before.
    """
    stateful = [name for name, state in content.items() if _has_state(state)]
    check_names(content, stateful, objects, f"{call}: ", "have it returned as it is")
    pairs = [p for name, value in objects.items() for p in _pairs(name, value, content[name])]
    faults = [*filter(None, map(_fault, pairs))]
    if faults:
        raise ValueError(f"{call}: {'; '.join(faults)}. Nothing was changed")
    pairs.sort(key=lambda pair: loading_turn(pair.owner))
    for number, (name, owner, state) in enumerate(pairs):
        try:
            owner.load_state_dict(state)
        except Exception as error:
            before = ", ".join(pair.name for pair in pairs[:number]) or "nothing"
            raise RuntimeError(
                f"{call}: {name} raised {type(error).__name__}: {error}. Before it was loaded: "
                f"{before}; {name} and what comes after it were not"
            ) from error


def loading_turn(owner: Any) -> int:
    """Return the sort key of an object in the order of loading.

    Optimizers follow models, because they compare their masters with the model's parameters. An
    Amp follows both, because it heals modules whose parameters are in place. Averages and
    schedulers read all of these. Random states are last, because loading may draw numbers.
    """
    if isinstance(owner, nn.Module):
        return 0
    if isinstance(owner, Optimizer) or hasattr(owner, "param_groups"):
        return 1
    if hasattr(owner, "master_params"):  # an Amp, which this room does not know
        return 2
    return 4 if isinstance(owner, RNGState) else 3


def _has_state(tree: Any) -> bool:
    """Return whether ``tree`` is a dict, or a list or tuple that holds one."""
    return isinstance(tree, dict) or (
        isinstance(tree, (list, tuple)) and any(map(_has_state, tree))
    )


def _pairs(name: str, value: Any, state: Any) -> Iterator[_Pair]:
    """Yield the objects in ``value`` with their states; a container of another form as it is."""
    if _is_container(value) and _form(value) == _form(state):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from _pairs(f"{name}[{key!r}]", value[key], state[key])
    elif value is not None:
        yield _Pair(name, value, state)


def _loads(value: Any) -> bool:
    return callable(getattr(value, "load_state_dict", None)) and not isinstance(value, type)


def _is_container(value: Any) -> bool:
    return isinstance(value, (list, tuple, dict)) and not _loads(value)


def _form(tree: Any) -> Any:
    """Return the keys of a dict, and the length of a list or tuple; None for other values."""
    if isinstance(tree, dict):
        return tree.keys()
    return len(tree) if isinstance(tree, (list, tuple)) else None


def _described(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"{len(value)} objects"
    if isinstance(value, dict):
        return f"a dict of {', '.join(map(str, value)) or 'nothing'}"
    return type(value).__name__


def _fault(pair: _Pair) -> str | None:
    """Return the error that the object would raise for the state; None if none is foreseeable."""
    name, owner, state = pair
    if _is_container(owner):
        return f"{name}: expected {_described(state)} as saved, got {_described(owner)}"
    if not _loads(owner):
        return (
            f"{name}: expected an object with load_state_dict(), or None to have the value "
            f"returned, got {type(owner).__name__}"
        )
    if not isinstance(state, dict):
        return f"{name}: expected the state of {type(owner).__name__}, got {_described(state)}"
    try:
        if isinstance(owner, nn.Module):
            check_module(name, state, owner.state_dict())
        elif isinstance(owner, Optimizer):
            check_optimizer(name, state, owner)
    except ValueError as error:
        return str(error)
    return None
