"""Copies of half parameters are FP32, and torch's ``AveragedModel`` reads FP32 values.

An average in half stands still, because a step of 1 - decay is smaller than half a unit in the last
place.
"""

import contextlib
import copy
import functools
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from tritonamp.casts.model import set_data
from tritonamp.fp32_values import Fp32Values
from tritonamp.names import short
from tritonamp.policy import HALF_DTYPES

logger = logging.getLogger("tritonamp")

# private (Python 3.10 to 3.14), and asked before ``__deepcopy__``: it serves every class of
# tensors, and torch's own classes do not change
_copiers: dict[type, Any] = copy._deepcopy_dispatch  # type: ignore[attr-defined]


class _Readers:
    """Makes copies and averages read FP32 values, in the whole process, while a model is enabled.

    Attributes:
        values: FP32 values of each ``Amp``.
    """

    def __init__(self) -> None:
        self.values: weakref.WeakSet[Fp32Values] = weakref.WeakSet()
        self._undo = contextlib.ExitStack()
        self._has_warned = False

    def acquire(self, values: Fp32Values) -> None:
        """Serve the half tensors of one more ``Amp``."""
        if not self.values:
            averaged: Any = AveragedModel
            stock = averaged.update_parameters
            self._undo.callback(setattr, averaged, "update_parameters", stock)
            averaged.update_parameters = _reading_fp32(stock)
        self.values.add(values)
        for kind in {nn.Parameter, *map(type, values)} - _copiers.keys():
            _copiers[kind] = _copied
            self._undo.callback(_copiers.pop, kind)

    def release(self, values: Fp32Values | None) -> None:
        """Undo one ``acquire``. The last call restores torch and Python's ``copy``."""
        if values is not None:  # else it is gone
            self.values.discard(values)
        if not self.values:
            self._undo.close()
            self._has_warned = False

    def fp32_value(self, tensor: Tensor) -> Tensor | None:
        """Return the FP32 value of an enabled half tensor, to be read at once; None for others."""
        if tensor.dtype in HALF_DTYPES:
            for values in self.values:
                if tensor in values:
                    return values.read(tensor).detach()
        return None

    def as_averaged(self, averaged: Tensor, tensor: Tensor) -> Tensor:
        """Return the value that enters an average.

        Args:
            averaged: tensor of an ``AveragedModel``.
            tensor: the model's tensor in the same place.
        """
        value = self.fp32_value(tensor)
        value = tensor if value is None else value
        if averaged.dtype not in HALF_DTYPES or value.dtype is not torch.float32:
            return value
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "AveragedModel holds %s parameters, as one made from a half model before "
                "tritonamp.enable does: small steps of the average are rounded away. Make it after "
                "tritonamp.enable, then it is FP32",
                short(averaged.dtype),
            )
        return value.to(averaged.dtype)


_readers = _Readers()
acquire, release = _readers.acquire, _readers.release


def _copied(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """Return the deep copy of a tensor, in FP32 if the tensor is an enabled half one."""
    with torch.inference_mode(False):  # else the copy could not be trained
        value = _readers.fp32_value(tensor)
        copied: Tensor = tensor.__deepcopy__(memo)
        if value is not None:
            set_data(copied, value.to(tensor.device, copy=True))
    return copied


class _Averaged:
    """A model as ``AveragedModel.update_parameters`` reads it: with FP32 values.

    Args:
        average: module inside the AveragedModel.
        model: model that updates the average.
    """

    def __init__(self, average: nn.Module, model: nn.Module) -> None:
        self._average, self._model = average, model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def parameters(self) -> Iterator[Tensor]:
        """Yield the value that enters the average for each parameter."""
        return map(_readers.as_averaged, self._average.parameters(), self._model.parameters())

    def buffers(self) -> Iterator[Tensor]:
        """Yield the value that enters the average for each buffer."""
        return map(_readers.as_averaged, self._average.buffers(), self._model.buffers())


def _reading_fp32(update: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(update)
    def update_parameters(self: Any, model: nn.Module) -> None:
        update(self, _Averaged(self.module, model))

    return update_parameters
