"""Copies of a model's buffers: two launches for each dtype; a skipped step changes none."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tritonamp.fp32_values import Fp32Values
from tritonamp.kernels._transfer import transfer
from tritonamp.kernels.cast import fp32_value
from tritonamp.names import prefixes
from tritonamp.policy import HALF_DTYPES


class _Place(NamedTuple):
    """The place of a buffer in a model.

    Attributes:
        name: full name of the buffer.
        module: module that holds the buffer.
        key: name of the buffer in ``module``.
    """

    name: str
    module: nn.Module
    key: str

    def buffer(self) -> Tensor:
        # read at every update, because ``module.to`` puts another tensor there
        buffer = self.module._buffers[self.key]
        assert buffer is not None, f"{self.name} was a tensor"
        return buffer


class CopiedBuffers:
    """Copies of all persistent buffers of models, with the values of the last update.

    Half buffers are copied to FP32. The FP32 value behind a half buffer counts as long as it rounds
    to the buffer. Build and update copies without gradients.

    Args:
        models: models that own the buffers.
        fp32_values: FP32 values behind the half buffers.

    Attributes:
        tensors: copies by name; with several models, names begin with the model's number.
    """

    def __init__(self, models: Sequence[nn.Module], fp32_values: Fp32Values) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._flat: list[tuple[list[_Place], Tensor]] = []  # one for each device and dtype
        by_kind: dict[tuple[torch.device, torch.dtype], list[_Place]] = {}
        for place in _places(models):
            buffer = place.buffer()
            by_kind.setdefault((buffer.device, buffer.dtype), []).append(place)
        for places in by_kind.values():
            self._add(places, fp32_values)

    def _add(self, places: list[_Place], fp32_values: Fp32Values) -> None:
        buffers = [place.buffer() for place in places]
        is_half = buffers[0].dtype in HALF_DTYPES
        values = [fp32_of(buffer, fp32_values) for buffer in buffers] if is_half else buffers
        # One launch joins the buffers, and one copies them, because models have hundreds of small
        # buffers.
        flat = torch.cat([value.reshape(-1) for value in values])
        self._flat.append((places, flat))
        # The named copies are views of the flat tensor, so one write updates them all.
        parts = flat.split([buffer.numel() for buffer in buffers])
        for place, buffer, part in zip(places, buffers, parts, strict=True):
            self.tensors[place.name] = part.view(buffer.shape)

    def update(self, found_inf: Tensor | None) -> None:
        """Copy the present values of the buffers, unless the step was skipped.

        Args:
            found_inf: 0-d flag; the copies stay as they are if it is not 0. None: always copy.
        """
        for places, flat in self._flat:
            now = torch.cat([place.buffer().reshape(-1) for place in places])
            if now.dtype != flat.dtype:
                now = fp32_value(now, flat)
            # the device decides, because the host would have to wait for the flag
            if found_inf is not None:
                now = torch.where(transfer(found_inf, flat.device) != 0, flat, now)
            flat.copy_(now)


def _places(models: Sequence[nn.Module]) -> list[_Place]:
    places = []
    for prefix, model in zip(prefixes(models), models, strict=True):
        for path, module in model.named_modules(remove_duplicate=False):
            # private (torch 2.11 to 2.15): torch has no public list of non-persistent buffers
            not_saved = module._non_persistent_buffers_set
            for key, buffer in module._buffers.items():
                if buffer is not None and key not in not_saved:
                    name = f"{path}.{key}" if path else key
                    places.append(_Place(prefix + name, module, key))
    return places


def fp32_of(tensor: Tensor, fp32_values: Fp32Values) -> Tensor:
    """Return the FP32 (or FP64) value of a model's tensor, on the device of ``tensor``."""
    # Parameters of a healed module are FP32 themselves, though ``Fp32Values`` still has a value for
    # them.
    has_other = tensor.dtype in HALF_DTYPES and tensor in fp32_values
    value = fp32_values.read(tensor) if has_other else tensor
    return value.detach().to(tensor.device, torch.promote_types(tensor.dtype, torch.float32))
