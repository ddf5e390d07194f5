"""Layer norm and RMS norm of ``tritonamp.functional``, with apex's rules for dtypes.

The arithmetic is FP32. Under autocast input and result have autocast's dtype. One pass reads half
input and writes the result in any dtype. ``memory_efficient`` is accepted and ignored.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tritonamp.functional import mixed_layer_norm, mixed_rms_norm

Shape = int | Sequence[int]


def _norm(
    norm: Callable[..., Tensor],
    input: Tensor,
    shape: Shape,
    parameters: Sequence[Tensor | None],
    eps: float,
    result_like: Tensor,
) -> Tensor:
    """Return ``norm`` of the input in the dtype of ``result_like``, computed in FP32.

    FP64 input is computed in FP64.
    """
    shape, device_type = [shape] if isinstance(shape, int) else list(shape), input.device.type
    dtype = result_like.dtype
    if torch.is_autocast_enabled(device_type) and input.is_floating_point():
        dtype = torch.get_autocast_dtype(device_type)
        input = input.to(dtype)
    with torch.autocast(device_type, enabled=False):
        return norm(input, shape, *parameters, eps, dtype=dtype)


def fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Layer norm with weights; the result has the input's dtype."""
    return _norm(mixed_layer_norm, input, normalized_shape, (weight, bias), eps, input)


def fused_layer_norm(
    input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Layer norm without weights."""
    return _norm(mixed_layer_norm, input, normalized_shape, (None, None), eps, input)


def mixed_dtype_fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Layer norm with weights; the result has the weight's dtype."""
    return _norm(mixed_layer_norm, input, normalized_shape, (weight, bias), eps, weight)


def fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """RMS norm with a weight; the result has the input's dtype."""
    return _norm(mixed_rms_norm, input, normalized_shape, (weight,), eps, input)


def fused_rms_norm(
    input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """RMS norm without a weight."""
    return _norm(mixed_rms_norm, input, normalized_shape, (None,), eps, input)


def mixed_dtype_fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """RMS norm with a weight; the result has the weight's dtype."""
    return _norm(mixed_rms_norm, input, normalized_shape, (weight,), eps, weight)


def manual_rms_norm(
    input: Tensor, normalized_shape: Shape, weight: Tensor | None, eps: float
) -> Tensor:
    """RMS norm; the result has the dtype of the weight, or without one of the input."""
    like = input if weight is None else weight
    return _norm(mixed_rms_norm, input, normalized_shape, (weight,), eps, like)


class _FusedNorm(nn.Module):
    """Arguments of the modules, and the tensor whose dtype the result has."""

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine)  # of torch's module
        self.memory_efficient = memory_efficient

    def _result_like(self, input: Tensor) -> Tensor:
        return input


class FusedLayerNorm(_FusedNorm, nn.LayerNorm):
    """``torch.nn.LayerNorm`` of half input with FP32 weights; the output is half."""

    def forward(self, input: Tensor) -> Tensor:
        parameters, like = (self.weight, self.bias), self._result_like(input)
        return _norm(mixed_layer_norm, input, self.normalized_shape, parameters, self.eps, like)


class FusedRMSNorm(_FusedNorm, nn.RMSNorm):
    """``torch.nn.RMSNorm`` of half input with an FP32 weight; the output is half."""

    eps: float

    def forward(self, x: Tensor) -> Tensor:
        like = self._result_like(x)
        return _norm(mixed_rms_norm, x, self.normalized_shape, (self.weight,), self.eps, like)


class _MixedNorm(_FusedNorm):
    """The modules whose result has the weight's dtype.

    Raises:
        RuntimeError: ``elementwise_affine=False``.
    """

    weight: nn.Parameter

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        *,
        memory_efficient: bool = False,
        **kwargs: Any,
    ) -> None:
        if "elementwise_affine" in kwargs:
            text = f"{type(self).__name__} does not support `elementwise_affine"
            warnings.warn(f"{text}` argument", stacklevel=2)
            if not kwargs["elementwise_affine"]:
                raise RuntimeError(f"{text} = False`: drop the argument")
        super().__init__(normalized_shape, eps, memory_efficient=memory_efficient)

    def _result_like(self, input: Tensor) -> Tensor:
        return self.weight


class MixedFusedLayerNorm(_MixedNorm, FusedLayerNorm):
    """``FusedLayerNorm`` whose result has the dtype of the weight, which is required."""


class MixedFusedRMSNorm(_MixedNorm, FusedRMSNorm):
    """``FusedRMSNorm`` whose result has the dtype of the weight, which is required."""
