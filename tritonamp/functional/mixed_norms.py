"""Norms with a dtype for the result, computed in FP32 and rounded once."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tritonamp.functional.inputs import min_numel
from tritonamp.functional.norms import STORED, is_ours, norm


def mixed_layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    dtype: torch.dtype,
) -> Tensor:
    """Return ``layer_norm`` in ``dtype``, computed in FP32 and rounded once.

    It is one pass without an FP32 copy for half input with half or FP32 weights and result.

    Args:
        input: any shape that ends in ``normalized_shape``.
        normalized_shape: shape of the last dimensions, which get mean 0 and variance 1.
        weight: factor in ``normalized_shape``, any floating dtype.
        bias: summand in ``normalized_shape``, any floating dtype.
        eps: summand of the variance.
        dtype: dtype of the result.
    """
    if dtype in STORED and is_ours(input, normalized_shape, weight, bias, least=min_numel()):
        return norm(input, normalized_shape, weight, bias, eps, True, dtype)
    x, w, b = _alike(dtype, input, weight, bias)
    return torch.nn.functional.layer_norm(x, normalized_shape, w, b, eps).to(dtype)


def mixed_rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    dtype: torch.dtype,
) -> Tensor:
    """Return ``rms_norm`` in ``dtype``, computed in FP32 and rounded once.

    It is one pass without an FP32 copy for half input with a half or FP32 weight and result.

    Args:
        input: any shape that ends in ``normalized_shape``.
        normalized_shape: shape of the last dimensions, which get mean square 1.
        weight: factor in ``normalized_shape``, any floating dtype.
        eps: summand of the mean square. None: float32's eps, as in torch.
        dtype: dtype of the result.
    """
    if dtype in STORED and is_ours(input, normalized_shape, weight, least=min_numel()):
        return norm(input, normalized_shape, weight, None, eps, False, dtype)
    x, w = _alike(dtype, input, weight)
    return torch.nn.functional.rms_norm(x, normalized_shape, w, eps).to(dtype)


def _alike(dtype: torch.dtype, input: Tensor, *weights: Tensor | None) -> Iterator[Any]:
    """Return the tensors in one dtype: ``dtype`` if all have it, else FP32 or FP64."""
    given = input, *weights
    if any(t is not None and t.dtype is not dtype for t in given):
        dtype = torch.promote_types(input.dtype, torch.float32)
    return (None if t is None else t.to(dtype) for t in given)
