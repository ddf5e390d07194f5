"""Pickles of an enabled model hold the plain model, in the dtypes of its ``state_dict``."""

import io
import pickle
from typing import Any

import torch
from torch import Tensor, nn

_BY_REFERENCE = (Tensor, torch.UntypedStorage, torch.TypedStorage)


class _Pickler(pickle.Pickler):
    """Pickles an object's state without its tensors, and without the object: ``left_out``."""

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
    """Return a copy of ``state`` with other tensors, wherever in it they are.

    It is copied as pickle does, which calls ``__reduce_ex__`` of what is inside, since only what
    can be pickled has to be; all but the modules' structure is small. Other tensors are not copied.
    ``state`` has the attributes of ``owner``, to which what is inside may refer.
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

    A master is returned itself: in a pickle that holds the optimizer, too, they stay one.
    """
    if not isinstance(tensor, nn.Parameter):
        return value.detach()
    if isinstance(value, nn.Parameter) and value.requires_grad is tensor.requires_grad:
        return value
    param = nn.Parameter(value.detach(), tensor.requires_grad)
    vars(param).update({**vars(tensor), **vars(param)})  # a subclass has some of its own
    return param
