"""The dtype of each parameter and buffer: before ``enable``, while enabled, and afterwards.

::

    before enable              O0, O1                 O2                     O3
    FP32                       FP32                   half (a norm's: FP32)  half
    half, trainable            FP32                   half (a norm's: FP32)  half
    half, frozen               O0: FP32, O1: as is    as is                  half
    half, buffer               FP32, unless its module holds frozen half     half
    quantised, sparse, others  as is                  as is                  as is

Under FSDP2, which gathers FP32 parameters in half, O2 has the dtypes of O1.
"""

import contextlib
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tritonamp.casts.model import flatten_rnns, fp32_modules, set_data
from tritonamp.casts.norm_layers import is_norm, kept_tensors
from tritonamp.casts.replaced import replaced
from tritonamp.casts.tree import TO
from tritonamp.fp32_values import Fp32Values
from tritonamp.kernels._shards import is_plain, is_sharded, to_local
from tritonamp.policy import HALF_DTYPES, Policy

_CASTABLE = frozenset((torch.float32, *HALF_DTYPES))
_QUANTISED = frozenset((torch.int8, torch.uint8, torch.int16, torch.int32))


class Castable(NamedTuple):
    """A parameter or buffer of a module."""

    tensor: Tensor
    name: str  # full name
    module: nn.Module  # first module that holds the tensor
    is_parameter: bool  # else a buffer


def castable_tensors(model: nn.Module) -> Iterator[Castable]:
    """Yield the parameters and buffers that ``enable`` may cast: FP32 and half ones, each once.

    Quantised modules are left out. So are tensor subclasses that hold other tensors, as torchao's
    do, because their kernels take the half tensors inside. So are sparse tensors, because many of
    their ops have no half kernel. A DTensor counts as the local tensor that it holds.
    """
    seen: set[int] = set()
    for path, module in model.named_modules():
        if is_quantised(module):
            continue
        front = f"{path}." if path else ""
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None or id(tensor) in seen:
                    continue
                seen.add(id(tensor))
                if tensor.dtype not in _CASTABLE or tensor.layout is not torch.strided:
                    continue
                if is_plain(tensor) or not hasattr(to_local(tensor), "__tensor_flatten__"):
                    yield Castable(tensor, front + name, module, tensors is module._parameters)


def is_quantised(module: nn.Module) -> bool:
    """Return whether a module holds its weights as integers, as bitsandbytes and GPTQ do."""
    for own in (module._parameters, module._buffers):
        for tensor in own.values():
            if tensor is not None and tensor.dtype in _QUANTISED and tensor.dim() > 1:
                return True
    return False


def is_frozen_half(stored: Castable) -> bool:
    """Return whether this is a frozen half parameter, or a half buffer whose module holds one."""
    if stored.tensor.dtype not in HALF_DTYPES:
        return False
    own = [stored.tensor] if stored.is_parameter else stored.module._parameters.values()
    return any(p is not None and p.dtype in HALF_DTYPES and not p.requires_grad for p in own)


def wanted_dtypes(
    model: nn.Module, policy: Policy, gathered: bool = False
) -> dict[Tensor, torch.dtype]:
    """Return the new dtype of each tensor of ``model`` whose dtype ``policy`` changes.

    Args:
        model: model before its tensors are cast.
        policy: the model's own policy.
        gathered: whether FSDP2 makes half copies of FP32 parameters when it gathers them.

    Raises:
        ValueError: ``policy.fp32_modules`` names a module that the model lacks.
    """
    kept = kept_tensors(model, policy)
    for module in fp32_modules(model, policy):
        kept |= {*module.parameters(), *module.buffers()}
    wanted = {}
    for stored in castable_tensors(model):
        tensor = stored.tensor
        # the set first, because a hash of a tensor runs Python code
        dtype = _wanted_dtype(stored, policy, bool(kept) and tensor in kept, gathered)
        if tensor.dtype is not dtype:
            wanted[tensor] = dtype
    return wanted


def _wanted_dtype(
    stored: Castable, policy: Policy, in_fp32_module: bool, gathered: bool
) -> torch.dtype:
    came = stored.tensor.dtype
    if came in HALF_DTYPES and policy.half_parameters:
        return came
    if in_fp32_module or not (policy.cast_model or policy.op_policy):
        return torch.float32
    if gathered:
        return came if is_frozen_half(stored) else torch.float32
    if not policy.op_policy:  # nothing would reconcile dtypes
        return torch.float32 if _in_fp32_norm(stored, policy) else policy.dtype
    if is_frozen_half(stored):
        return came
    # angles, running statistics and small constants lose too much in half
    casts = policy.cast_model and stored.is_parameter and not _in_fp32_norm(stored, policy)
    return policy.dtype if casts else torch.float32


def _in_fp32_norm(stored: Castable, policy: Policy) -> bool:
    return policy.keep_norms_fp32 and is_norm(stored.module)


class ModelDtypes:
    """Casts the tensors of models in place, and back again. Each stays the same object.

    Args:
        policy: policy that decides on each tensor's dtype.
        fp32_values: receiver of the FP32 value of each tensor that becomes half.
        gathered: whether FSDP2 makes half copies of FP32 parameters when it gathers them.
    """

    def __init__(self, policy: Policy, fp32_values: Fp32Values, gathered: bool) -> None:
        self._policy = policy
        self._fp32_values = fp32_values
        self._gathered = gathered
        self._came: dict[Tensor, torch.dtype] = {}  # the dtypes before ``enable``
        self._widened: dict[Tensor, torch.dtype] = {}  # the dtypes under the policy
        # of half parameters with FP32 gradients: the ``grad_dtype`` before ``enable``
        self._wide_gradients: dict[Tensor, torch.dtype | None] = {}

    @property
    def has_changed(self) -> bool:
        """Whether any tensor or gradient has another dtype than before ``enable``."""
        return bool(self._came or self._wide_gradients)

    def changes(self, tensor: Tensor) -> bool:
        """Return whether a tensor has another dtype than before ``enable``."""
        return tensor in self._came

    def cast(self, model: nn.Module, policy: Policy, stepped: Collection[Tensor]) -> None:
        """Cast the tensors of ``model``.

        Args:
            model: model on any device.
            policy: the model's own, as ``own_policies`` returns it.
            stepped: parameters that get masters. Their FP32 values stay on their device. The FP32
                values of all other tensors go to main memory, unless they are DTensors.
        """
        for tensor, dtype in wanted_dtypes(model, policy, self._gathered).items():
            original = tensor.detach()
            self._came[tensor] = original.dtype
            set_data(tensor, TO[dtype](original))
            if dtype in HALF_DTYPES:
                stays = tensor in stepped or is_sharded(tensor)
                at = original.device if stays else "cpu"
                # ``.data`` has a version counter of its own, not the half tensor's
                self._fp32_values.add(tensor, original.to(at, torch.float32).data)
        if self._policy.grad_dtype is not None and not self._gathered:
            halves = [p for p in model.parameters() if p.dtype in HALF_DTYPES]
            for half in halves:  # frozen ones, too: they may train one day
                self._wide_gradients[half] = self._came.get(half, half.grad_dtype)
                set_data(half, half.detach(), self._policy.grad_dtype)
        flatten_rnns(model)

    def widen(self, module: nn.Module) -> None:
        """Make the half tensors of ``module`` FP32, whatever the policy says."""
        for tensor in (s.tensor for s in castable_tensors(module)):
            if tensor.dtype in HALF_DTYPES:
                self._came.setdefault(tensor, tensor.dtype)
                self._widened[tensor] = tensor.dtype
                set_data(tensor, self._value(tensor).to(tensor.device, torch.float32, copy=True))
        flatten_rnns(module)

    def unwiden(self, module: nn.Module) -> None:
        """Undo ``widen``. The tensors have the dtypes of the policy again."""
        for tensor in (s.tensor for s in castable_tensors(module)):
            if tensor in self._widened:
                dtype = self._widened.pop(tensor)
                value = self._value(tensor).to(tensor.device)
                set_data(tensor, value.to(dtype), self._policy.grad_dtype)
                if tensor in self._fp32_values:
                    self._fp32_values.load(tensor, value)
        flatten_rnns(module)

    @contextlib.contextmanager
    def widened(self, module: nn.Module, models: Iterable[nn.Module]) -> Iterator[None]:
        """Replace the half tensors of ``module`` by FP32 copies inside the block.

        The half tensors keep their dtype, because DDP would lose its hooks on a tensor that changes
        it.

        Args:
            module: module of one of the models.
            models: all models, because other modules may hold the same tensors.
        """
        wide: dict[Tensor, Tensor] = {}
        for half in (s.tensor for s in castable_tensors(module) if s.tensor.dtype in HALF_DTYPES):
            value = self._value(half).to(half.device, torch.float32, copy=True)
            is_parameter = isinstance(half, nn.Parameter)
            wide[half] = nn.Parameter(value, half.requires_grad) if is_parameter else value
        with replaced((m for model in models for m in model.modules()), wide):
            flatten_rnns(module)
            yield

    def _value(self, tensor: Tensor) -> Tensor:
        """Return the FP32 value of a tensor, or the tensor itself where it has none."""
        has_fp32 = tensor in self._fp32_values
        return (self._fp32_values.get(tensor) if has_fp32 else tensor).detach()

    def restore(self) -> dict[Tensor, Tensor]:
        """Give every tensor the dtype that it came in. FP32 values are rounded once.

        Returns:
            FP32 value, before this call, of each tensor that is half afterwards.
        """
        self._fp32_values.push()
        changed = *self._fp32_values, *self._came, *self._wide_gradients
        values = {t: self._value(t) for t in changed}
        for tensor, value in values.items():
            came = self._came.get(tensor)
            # a tensor that stays half may have an FP32 gradient
            data = tensor.detach() if came is None else value.to(tensor.device, came)
            set_data(tensor, data)
        for param, grad_dtype in self._wide_gradients.items():
            if grad_dtype is not param.dtype:  # a setting of the user's
                set_data(param, param.detach(), grad_dtype)
                param.grad_dtype = grad_dtype
        self._came.clear()
        self._widened.clear()
        self._wide_gradients.clear()
        return {t: value for t, value in values.items() if t.dtype in HALF_DTYPES}
