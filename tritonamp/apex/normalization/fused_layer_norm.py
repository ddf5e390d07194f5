"""Layer norm and RMS norm of ``tritonamp.functional``, with apex's rules for dtypes.

The arithmetic is FP32. The result has the dtype of the input, of the mixed forms that of the
weight; under autocast input and result become autocast's. One pass reads half input and writes the
result, of whatever dtype. ``memory_efficient`` makes no difference.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tritonamp import functional

__all__ = [
    "FusedLayerNorm",
    "FusedRMSNorm",
    "MixedFusedLayerNorm",
    "MixedFusedRMSNorm",
    "fused_layer_norm",
    "fused_layer_norm_affine",
    "fused_rms_norm",
    "fused_rms_norm_affine",
    "manual_rms_norm",
    "mixed_dtype_fused_layer_norm_affine",
    "mixed_dtype_fused_rms_norm_affine",
]

Shape = int | Sequence[int]


def _norm(
    norm: Callable[..., Tensor],
    input: Tensor,
    shape: Shape,
    parameters: Sequence[Tensor | None],
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """Return ``norm`` of the input, computed in FP32 (FP64 for FP64 input), in ``dtype``."""
    shape, device_type = [shape] if isinstance(shape, int) else list(shape), input.device.type
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
    return _norm(
        functional.mixed_layer_norm, input, normalized_shape, (weight, bias), eps, input.dtype
    )


def fused_layer_norm(
    input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Layer norm without weights."""
    return _norm(
        functional.mixed_layer_norm, input, normalized_shape, (None, None), eps, input.dtype
    )


def mixed_dtype_fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Layer norm with weights; the result has the weight's dtype."""
    return _norm(
        functional.mixed_layer_norm, input, normalized_shape, (weight, bias), eps, weight.dtype
    )


def fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """RMS norm with a weight; the result has the input's dtype."""
    return _norm(functional.mixed_rms_norm, input, normalized_shape, (weight,), eps, input.dtype)


def fused_rms_norm(
    input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """RMS norm without a weight."""
    return _norm(functional.mixed_rms_norm, input, normalized_shape, (None,), eps, input.dtype)


def mixed_dtype_fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """RMS norm with a weight; the result has the weight's dtype."""
    return _norm(functional.mixed_rms_norm, input, normalized_shape, (weight,), eps, weight.dtype)


def manual_rms_norm(
    input: Tensor, normalized_shape: Shape, weight: Tensor | None, eps: float
) -> Tensor:
    """RMS norm; the result has the dtype of the weight, where there is one."""
    return _norm(
        functional.mixed_rms_norm,
        input,
        normalized_shape,
        (weight,),
        eps,
        (input if weight is None else weight).dtype,
    )


class FusedLayerNorm(nn.LayerNorm):
    """``torch.nn.LayerNorm`` that takes half input beside FP32 weights, for half output."""

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine)
        self.memory_efficient = memory_efficient

    def forward(self, input: Tensor) -> Tensor:
        return _norm(
            functional.mixed_layer_norm,
            input,
            self.normalized_shape,
            (self.weight, self.bias),
            self.eps,
            input.dtype,
        )


class FusedRMSNorm(nn.RMSNorm):
    """``torch.nn.RMSNorm`` that takes half input beside an FP32 weight, for half output."""

    eps: float

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine)
        self.memory_efficient = memory_efficient

    def forward(self, x: Tensor) -> Tensor:
        return _norm(
            functional.mixed_rms_norm, x, self.normalized_shape, (self.weight,), self.eps, x.dtype
        )


class MixedFusedLayerNorm(FusedLayerNorm):
    """``FusedLayerNorm`` whose result has the weight's dtype.

    Raises:
        RuntimeError: ``elementwise_affine=False``.
    """

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        *,
        memory_efficient: bool = False,
        **kwargs: Any,
    ) -> None:
        _check_affine(type(self), kwargs)
        super().__init__(normalized_shape, eps, memory_efficient=memory_efficient)

    def forward(self, input: Tensor) -> Tensor:
        return _norm(
            functional.mixed_layer_norm,
            input,
            self.normalized_shape,
            (self.weight, self.bias),
            self.eps,
            self.weight.dtype,
        )


class MixedFusedRMSNorm(FusedRMSNorm):
    """``FusedRMSNorm`` whose result has the weight's dtype.

    Raises:
        RuntimeError: ``elementwise_affine=False``.
    """

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        *,
        memory_efficient: bool = False,
        **kwargs: Any,
    ) -> None:
        _check_affine(type(self), kwargs)
        super().__init__(normalized_shape, eps, memory_efficient=memory_efficient)

    def forward(self, x: Tensor) -> Tensor:
        return _norm(
            functional.mixed_rms_norm,
            x,
            self.normalized_shape,
            (self.weight,),
            self.eps,
            self.weight.dtype,
        )


def _check_affine(cls: type, kwargs: dict[str, Any]) -> None:
    """Refuse a word on the affine weights, which the mixed modules always have."""
    if "elementwise_affine" in kwargs:
        warnings.warn(
            f"{cls.__name__} does not support `elementwise_affine` argument", stacklevel=3
        )
        if not kwargs["elementwise_affine"]:
            raise RuntimeError(
                f"{cls.__name__} does not support `elementwise_affine = False`: drop the argument"
            )
