"""Norms whose result has a dtype of its own, computed in FP32 and rounded once."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tritonamp.functional.inputs import min_numel
from tritonamp.functional.norms import is_ours, norm
from tritonamp.policy import HALF_DTYPES

STORED = (*HALF_DTYPES, torch.float32)  # dtypes that the kernels write


def mixed_layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    dtype: torch.dtype,
) -> Tensor:
    """Return ``layer_norm`` in a dtype of its own, computed in FP32 and rounded once.

    Half input, of which no FP32 copy is made, half or FP32 weights and result are one pass.

    Args:
        input: as of ``layer_norm``.
        normalized_shape: as of ``layer_norm``.
        weight: as of ``layer_norm``; any floating dtype.
        bias: as ``weight``.
        eps: as of ``layer_norm``.
        dtype: of the result.
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
    """Return ``rms_norm`` in a dtype of its own, computed in FP32 and rounded once.

    Half input, of which no FP32 copy is made, half or FP32 weight and result are one pass.

    Args:
        input: as of ``rms_norm``.
        normalized_shape: as of ``rms_norm``.
        weight: as of ``rms_norm``; any floating dtype.
        eps: as of ``rms_norm``.
        dtype: of the result.
    """
    if dtype in STORED and is_ours(input, normalized_shape, weight, least=min_numel()):
        return norm(input, normalized_shape, weight, None, eps, False, dtype)
    x, w = _alike(dtype, input, weight)
    return torch.nn.functional.rms_norm(x, normalized_shape, w, eps).to(dtype)


def _alike(dtype: torch.dtype, input: Tensor, *weights: Tensor | None) -> Iterator[Any]:
    """Return tensors as torch takes them: in FP32 at least, unless all are of ``dtype``."""
    given = input, *weights
    if any(t is not None and t.dtype is not dtype for t in given):
        dtype = torch.promote_types(input.dtype, torch.float32)
    return (None if t is None else t.to(dtype) for t in given)
