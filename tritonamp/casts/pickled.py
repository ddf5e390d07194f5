"""Pickles of an enabled model hold the plain model, in the dtypes of its ``state_dict``."""

import io
import pickle
from typing import Any

import torch
from torch import Tensor, nn

_BY_REFERENCE = (Tensor, torch.UntypedStorage, torch.TypedStorage)


class _Pickler(pickle.Pickler):
    """Pickles an object's state. Tensors, and the object itself, go to ``left_out`` instead."""

    def __init__(self, file: io.BytesIO, owner: object) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._owner = owner
        self.left_out: list[Any] = []

    def persistent_id(self, obj: Any) -> int | None:
        if obj is not self._owner and not isinstance(obj, _BY_REFERENCE):
            return None
        self.left_out.append(obj)
        return len(self.left_out) - 1


class _Unpickler(pickle.Unpickler):
    """Puts ``objects`` where the pickler has left some out."""

    def __init__(self, file: io.BytesIO, objects: list[Any]) -> None:
        super().__init__(file)
        self._objects = objects

    def persistent_load(self, pid: Any) -> Any:
        return self._objects[pid]


def with_values(owner: nn.Module, state: Any, values: dict[Tensor, Tensor]) -> Any:
    """Return a copy of ``state`` in which some tensors are replaced, wherever they are.

    The copy is made by ``__reduce_ex__``, as a pickle is, so its parts need to support no more than
    pickling does. All but the structure of the modules is small. Tensors are not copied.

    Args:
        owner: module whose attributes ``state`` has. Parts of ``state`` may refer to it.
        state: state to copy.
        values: replacement of each tensor.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, owner)
    pickler.dump(state)
    file.seek(0)
    placed = {tensor: _as(tensor, value) for tensor, value in values.items()}
    objects = [placed.get(o, o) if isinstance(o, Tensor) else o for o in pickler.left_out]
    return _Unpickler(file, objects).load()


def _as(tensor: Tensor, value: Tensor) -> Tensor:
    """Return ``value`` as a parameter where ``tensor`` is one.

    A master is returned itself. In a pickle that also holds the optimizer, the two stay one tensor.
    """
    if not isinstance(tensor, nn.Parameter):
        return value.detach()
    if isinstance(value, nn.Parameter) and value.requires_grad is tensor.requires_grad:
        return value
    param = nn.Parameter(value.detach(), tensor.requires_grad)
    vars(param).update({**vars(tensor), **vars(param)})  # a subclass has attributes of its own
    return param
