"""The dtypes of an enabled model's tensors in ``state_dict``, and in ``save_pretrained``."""

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tritonamp.fp32_values import Fp32Values
from tritonamp.policy import HALF_DTYPES, Policy

_SAVING = ("save_pretrained", "save_lora_adapter")  # of transformers, diffusers and PEFT
_CASTS_ADAPTERS = "autocast_adapter_dtype"  # an argument of PEFT's load_adapter


class SavedDtypes:
    """The dtypes of saved tensors by name. Copies and pickles of a model have them, too.

    Training resumes from a state, so trainable tensors, and tensors that came in FP32, are FP32 in
    it. The files of ``save_pretrained`` hold the dtypes that the model was loaded in, as a plain
    model's files do.

    Args:
        model: model before its tensors are cast.
        policy: policy of the model.

    Attributes:
        loaded: dtype that each tensor came in, by name.
        as_loaded: whether states have these dtypes now.
    """

    def __init__(self, model: Any, policy: Policy) -> None:
        self.as_loaded = False
        trains = policy.trains_fp32_values or policy.cast_model
        named = named_tensors(model)
        self.loaded = {name: tensor.dtype for name, tensor in named}
        self._stay_half = frozenset(
            name
            for name, tensor in named
            if tensor.dtype in HALF_DTYPES and not (trains and tensor.requires_grad)
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "SavedDtypes":
        """Return the dtypes of a copy, which holds FP32 values and saves all tensors as stored."""
        copied = copy.copy(self)
        copied._stay_half = frozenset(self.loaded)
        return copied

    def in_state(self, name: str, tensor: Tensor, values: Fp32Values) -> torch.dtype:
        """Return the dtype that a tensor of this name has in a state now."""
        if self.as_loaded:
            return self.loaded.get(name, tensor.dtype)
        if tensor.dtype not in HALF_DTYPES:
            return tensor.dtype
        stays_half = name in self._stay_half and tensor not in values
        return tensor.dtype if stays_half else torch.float32


def named_tensors(module: Any) -> list[tuple[str, Tensor]]:
    """Return the parameters and buffers of a module, shared ones under each of their names."""
    return [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]


def changed_values(
    module: Any, saved: SavedDtypes, values: Fp32Values
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield name, tensor and saved value of each tensor that a state holds in another dtype."""
    made: dict[Tensor, Tensor] = {}  # tied tensors stay tied
    for name, tensor in named_tensors(module):
        dtype = saved.in_state(name, tensor, values)
        if dtype is tensor.dtype:
            continue
        if tensor not in made:
            value = values.get(tensor) if tensor in values else tensor
            made[tensor] = value.to(tensor.device, dtype)
        yield name, tensor, made[tensor]


def pretrained_members(base: type) -> dict[str, Any]:
    """Return the members by which a subclass of ``base`` writes files as the plain model does.

    There are none, unless ``base`` has ``save_pretrained`` or a similar method.
    """
    members: dict[str, Any] = {
        name: _saving(getattr(base, name)) for name in _SAVING if hasattr(base, name)
    }
    load = getattr(base, "load_adapter", None)
    if load is not None and _CASTS_ADAPTERS in inspect.signature(load).parameters:
        members["load_adapter"] = _loading_in_place(load)
    dtype = getattr(base, "dtype", None)
    if members and isinstance(dtype, property) and dtype.fget is not None:
        members["dtype"] = property(_with_loaded(dtype.fget))  # goes into the config
    return members


def _saving(save: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(save)
    def save_as_loaded(self: Any, *args: Any, **kwargs: Any) -> Any:
        saved: SavedDtypes = self._tritonamp_saved
        before, saved.as_loaded = saved.as_loaded, True
        try:
            return save(self, *args, **kwargs)
        finally:
            saved.as_loaded = before

    return save_as_loaded


def _loading_in_place(load: Callable[..., Any]) -> Callable[..., Any]:
    """Make PEFT load into existing parameters.

    PEFT would replace half parameters, on which the optimizer steps, by FP32 ones.
    """

    @functools.wraps(load)
    def load_in_place(self: Any, *args: Any, **kwargs: Any) -> Any:
        return load(self, *args, **{_CASTS_ADAPTERS: False, **kwargs})

    return load_in_place


def _with_loaded(dtype: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a getter like ``dtype`` that gives the loaded dtype while the model is saved."""

    def loaded_or_own(self: Any) -> Any:
        saved: SavedDtypes = self._tritonamp_saved
        if saved.as_loaded:
            for name, param in self.named_parameters():
                if param.is_floating_point():
                    return saved.loaded.get(name, param.dtype)
        return dtype(self)

    return loaded_or_own
