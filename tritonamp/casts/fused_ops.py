"""Rules of the op table for ops that have a kernel of their own."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tritonamp.casts.active import ActivePolicy
from tritonamp.casts.op_table import Rule, Stock, fp32_rule, storage_rule
from tritonamp.functional import group_norms, norms
from tritonamp.functional import losses as _losses
from tritonamp.functional.rows import LogSoftmax, Softmax, Sum, as_dims, is_ours
from tritonamp.kernels import group_norm as _group_norm
from tritonamp.kernels import norm as _norm
from tritonamp.kernels import reduce as _reduce
from tritonamp.kernels import softmax as _softmax
from tritonamp.kernels._implementations import TraceableOp
from tritonamp.policy import HALF_DTYPES


def _apply(function: Any, operation: Callable[..., Tensor], input: Tensor, *args: Any) -> Tensor:
    """Apply ``function``, or, where there is no gradient to compute, the bare operation.

    The latter costs the host less.
    """
    if input.requires_grad and torch.is_grad_enabled():
        return function.apply(input, *args)
    return operation(input, *args)


def _softmax_rule(
    stock: Stock, active: ActivePolicy, input: Tensor, dim: int, dtype: torch.dtype | None = None
) -> Tensor:
    policy, backend, _ = active
    if not policy.op_policy or input.dtype not in HALF_DTYPES:
        return stock(input, dim, dtype)
    dtype = dtype or policy.softmax_dtype or input.dtype
    if not is_ours(input, dtype):
        return stock(input, dim, None if dtype is input.dtype else dtype)
    if _softmax.SOFTMAX.uses_triton(backend, input):
        return _apply(Softmax, _softmax.softmax, input, dim, dtype, backend)
    return stock.run(Softmax.apply, input, dim, dtype, "eager")


def _log_softmax_rule(
    stock: Stock, active: ActivePolicy, input: Tensor, dim: int, dtype: torch.dtype | None = None
) -> Tensor:
    policy, backend, _ = active
    if not policy.op_policy or input.dtype not in HALF_DTYPES:
        return stock(input, dim, dtype)
    dtype = dtype or torch.float32
    if not is_ours(input, dtype):
        return stock(input, dim, dtype)
    if _softmax.LOG_SOFTMAX.uses_triton(backend, input):
        return _apply(LogSoftmax, _softmax.log_softmax, input, dim, dtype, backend)
    return stock.run(LogSoftmax.apply, input, dim, dtype, "eager")


def _sum_rule(
    stock: Stock,
    active: ActivePolicy,
    input: Tensor,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    policy, backend, _ = active
    args = () if dim is None else (dim, keepdim)
    if not policy.op_policy or input.dtype not in HALF_DTYPES:
        return stock(input, *args, dtype=dtype)
    dtype = dtype or torch.float32
    if not is_ours(input, dtype):
        return stock(input, *args, dtype=dtype)
    if input.is_contiguous() and _reduce.SUM.uses_triton(backend, input):
        return _apply(Sum, _reduce.sum, input, as_dims(dim), keepdim, dtype, backend)
    return stock.run(Sum.apply, input, as_dims(dim), keepdim, dtype, "eager")


def _layer_norm_rule(
    stock: Stock,
    active: ActivePolicy,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    args = input, normalized_shape, weight, bias
    if not active.policy.op_policy or not norms.is_ours(*args):
        return storage_rule(stock, active, *args, eps, cudnn_enable)
    n = norms.numel(normalized_shape)
    return _run_norm(stock, active, input, weight, bias, n, eps, True)


def _rms_norm_rule(
    stock: Stock,
    active: ActivePolicy,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    args = input, normalized_shape, weight
    if not active.policy.op_policy or not norms.is_ours(*args):
        return storage_rule(stock, active, *args, eps)
    n, eps = norms.numel(normalized_shape), norms.RMS_EPS if eps is None else eps
    return _run_norm(stock, active, input, weight, None, n, eps, False)


def _run_norm(stock: Stock, active: ActivePolicy, input: Tensor, *args: Any) -> Tensor:
    return _run(norms.Norm, _norm.NORM, stock, active, input, *args, input.dtype)


def _group_norm_rule(
    stock: Stock,
    active: ActivePolicy,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    if not active.policy.op_policy or not group_norms.is_ours(input, num_groups, weight, bias):
        return storage_rule(stock, active, input, num_groups, weight, bias, eps, cudnn_enabled)
    args = input, weight, bias, num_groups, eps
    return _run(group_norms.GroupNorm, _group_norm.GROUP_NORM, stock, active, *args)


def _run(
    function: Any,
    operation: TraceableOp,
    stock: Stock,
    active: ActivePolicy,
    input: Tensor,
    *args: Any,
) -> Tensor:
    """Apply a norm's function by its kernel, or by eager torch without any rules."""
    if operation.uses_triton(active.backend, input):
        return function.apply(input, *args, active.backend)
    return stock.run(function.apply, input, *args, "eager")


def _cross_entropy_rule(
    stock: Stock,
    active: ActivePolicy,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    policy, backend, _ = active
    if not policy.op_policy or not _losses.uses_triton(
        backend, input, target, weight, label_smoothing
    ):
        return fp32_rule(
            stock, active, input, target, weight, reduction, ignore_index, label_smoothing
        )
    name = _losses.REDUCTIONS[reduction]
    args = input, target, ignore_index, name, label_smoothing, backend
    return stock.run(_losses.fused, *args)


FUSED: dict[str, Rule] = {
    "group_norm": _group_norm_rule,
    "layer_norm": _layer_norm_rule,
    "rms_norm": _rms_norm_rule,
    "cross_entropy_loss": _cross_entropy_rule,
    "softmax.int": _softmax_rule,
    "log_softmax.int": _log_softmax_rule,
    "sum": _sum_rule,
    "sum.dim_IntList": _sum_rule,
}
