"""Rules of the op table for ops that have a kernel of their own."""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tritonamp.casts.active import ActivePolicy
from tritonamp.casts.op_rules import Rule, Stock, fp32_rule, norm_dtype, norm_rule
from tritonamp.functional import group_norms, norms
from tritonamp.functional import losses as _losses
from tritonamp.functional.inputs import is_under_transforms, takes
from tritonamp.functional.rows import Softmax, Sum, is_ours, lies_in_pieces
from tritonamp.kernels import group_norm as _group_norm
from tritonamp.kernels import norm as _norm
from tritonamp.kernels import reduce as _reduce
from tritonamp.kernels import softmax as _softmax
from tritonamp.kernels._implementations import MIN_NUMEL, TraceableOp
from tritonamp.kernels._launch import KernelError
from tritonamp.policy import Policy

MOST_PLANS = 4096  # per op; without a bound, new shapes in every call would fill memory


@dataclass(slots=True)
class Choice:
    """The implementation that a rule chose for tensors of one kind. Later calls reuse it.

    Attributes:
        apply: takes the tensors and ``call``; ``apply`` of an autograd function.
        call: arguments of the operation, and its prepared launch.
        plans: all choices of the same op.
    """

    apply: Callable[..., Any]
    call: tuple[tuple[Any, ...], Callable[..., Any]]
    plans: dict[Hashable, Any]

    def __call__(self, *tensors: Tensor | None) -> Tensor:
        """Return the result. Where no gradient is needed, autograd's function is skipped.

        Raises:
            KernelError: the kernel cannot be compiled, and the backend is "triton".
        """
        args, compute = self.call
        try:
            if torch.is_grad_enabled():
                result: Tensor = self.apply(*tensors, self.call)
                return result
            computed = compute(*tensors)
            return computed if isinstance(computed, Tensor) else computed[0]
        except KernelError:
            self.plans.clear()
            result = self.apply(*tensors, (args, None))  # raises it, too, or falls back
            return result


def _find(
    stock: Stock,
    active: ActivePolicy,
    rest: Hashable,
    input: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Hashable, Choice | None]:
    """Return the key of a call, and the choice of an earlier call with that key.

    The key is None where choices must not be reused: under a dispatch mode or torch.func, and for
    nested or traced tensors. It has the id of ``active``, because policies that ``enter`` numbers
    are never freed. ``rest`` has all facts that choices depend on and that no tensor has.
    """
    # private (torch 2.11 to 2.15), nothing public asks it: a dispatch mode looks into what runs
    if torch._C._len_torch_dispatch_stack() or is_under_transforms():
        return None, None
    try:
        key = (
            id(active),
            rest,
            type(input),
            input.dtype,
            input.shape,
            input.get_device(),
            None if weight is None else (weight.dtype, weight.shape, weight.get_device()),
            None if bias is None else (bias.dtype, bias.shape, bias.get_device()),
        )
        return key, stock.plans.get(key)
    except (RuntimeError, TypeError):  # nested tensors have no shape, traced ones no hash
        return None, None


def _least(active: ActivePolicy) -> int:
    """Return the number of elements from which "auto" prefers the kernels here on a GPU."""
    return MIN_NUMEL if active.backend in ("auto", "eager") else 0


def _apply(
    key: Hashable,
    function: Any,
    operation: TraceableOp,
    stock: Stock,
    active: ActivePolicy,
    tensors: tuple[Any, ...],
    *args: Any,
) -> Tensor:
    """Apply an autograd function by its kernel, or by eager torch without any rules.

    A kernel is kept as the plan for calls with the key ``key``.
    """
    compute = operation.chosen(active.backend, tensors[0])
    if not operation.uses_triton(active.backend, tensors[0]):
        backend = active.backend if active.policy.batch_invariant else "eager"
        return stock.run_without_rules(function.apply, *tensors, ((*args, backend), None))
    args = *args, active.backend
    if key is None or operation.is_traceable(compute) or operation.prepared is None:
        result: Tensor = function.apply(*tensors, (args, None))
        return result
    if len(stock.plans) >= MOST_PLANS:
        stock.plans.clear()
    prepared = operation.prepare(active.backend, *tensors, *args[:-1])
    plan = stock.plans[key] = Choice(function.apply, (args, prepared), stock.plans)
    return plan(*tensors)


def _softmax_rule(log: bool, result_dtype: Callable[[Policy, Tensor], torch.dtype]) -> Rule:
    """Return the rule of softmax, or with ``log`` of log_softmax.

    ``result_dtype`` returns the dtype of the result where the caller asks for none.
    """

    def rule(
        stock: Stock,
        active: ActivePolicy,
        input: Tensor,
        dim: int,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        if not takes(input):
            return stock(input, dim, dtype)
        if lies_in_pieces(input, dim):
            return rule(stock, active, input.movedim(dim, -1), -1, dtype).movedim(-1, dim)
        key, plan = _find(stock, active, (dim, dtype), input)
        if plan is not None:
            return plan(input)
        dtype = dtype or result_dtype(active.policy, input)
        if not is_ours(input, dtype, _least(active)):
            return stock(input, dim, None if dtype is input.dtype else dtype)
        operation = _softmax.SOFTMAX
        return _apply(key, Softmax, operation, stock, active, (input,), dim, dtype, log)

    return rule


def _sum_rule(
    stock: Stock,
    active: ActivePolicy,
    input: Tensor,
    *args: Any,  # dim, which may be None, and keepdim; the overload without them takes none
    dtype: torch.dtype | None = None,
) -> Tensor:
    if not takes(input):
        return stock(input, *args, dtype=dtype)
    dim, keepdim = (*args, None, False)[:2] if not args else (*args, False)[:2]
    dims = () if dim is None else tuple(dim)
    dense = input.layout is torch.strided and input.is_contiguous()
    key, plan = _find(stock, active, (dense, dims, keepdim, dtype), input)
    if plan is not None:
        return plan(input)
    dtype = dtype or torch.float32
    if not is_ours(input, dtype, _least(active)):
        return stock(input, *args, dtype=dtype)
    if not dense and not (active.policy.batch_invariant and input.layout is torch.strided):
        active = active._replace(backend="eager")
    return _apply(key, Sum, _reduce.SUM, stock, active, (input,), dims, keepdim, dtype)


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
    tensors = input, weight, bias
    key, plan = _find(stock, active, (*normalized_shape, eps), *tensors)
    if plan is not None:
        return plan(*tensors)
    dtype, least = norm_dtype(active.policy, input), _least(active)
    wide = dtype is not input.dtype
    if not norms.is_ours(input, normalized_shape, weight, bias, least=least, wide=wide):
        given = input, normalized_shape, weight, bias, eps, cudnn_enable
        return norm_rule(stock, active, *given)
    args = math.prod(normalized_shape), eps, True, dtype
    return _apply(key, norms.Norm, _norm.NORM, stock, active, tensors, *args)


def _rms_norm_rule(
    stock: Stock,
    active: ActivePolicy,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    tensors = input, weight, None
    key, plan = _find(stock, active, (*normalized_shape, eps), *tensors)
    if plan is not None:
        return plan(*tensors)
    dtype, least = norm_dtype(active.policy, input), _least(active)
    wide = dtype is not input.dtype
    if not norms.is_ours(input, normalized_shape, weight, least=least, wide=wide):
        return norm_rule(stock, active, input, normalized_shape, weight, eps)
    eps = norms.RMS_EPS if eps is None else eps
    args = math.prod(normalized_shape), eps, False, dtype
    return _apply(key, norms.Norm, _norm.NORM, stock, active, tensors, *args)


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
    tensors = input, weight, bias
    key, plan = _find(stock, active, (input.stride(), num_groups, eps), *tensors)
    if plan is not None:
        return plan(*tensors)
    if not group_norms.is_ours(input, num_groups, weight, bias, least=_least(active)):
        return norm_rule(stock, active, input, num_groups, weight, bias, eps, cudnn_enabled)
    function, operation = group_norms.GroupNorm, _group_norm.GROUP_NORM
    return _apply(key, function, operation, stock, active, tensors, num_groups, eps)


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
    backend = active.backend
    if not _losses.is_ours(backend, input, target, weight, label_smoothing):
        args = input, target, weight, reduction, ignore_index, label_smoothing
        return fp32_rule(stock, active, *args)
    name = _losses.REDUCTIONS[reduction]
    return stock.run_without_rules(
        _losses.fused, input, target, ignore_index, name, label_smoothing, backend
    )


FUSED: dict[str, Rule] = {
    "group_norm": _group_norm_rule,
    "layer_norm": _layer_norm_rule,
    "rms_norm": _rms_norm_rule,
    "cross_entropy_loss": _cross_entropy_rule,
    "softmax.int": _softmax_rule(False, lambda policy, input: policy.softmax_dtype or input.dtype),
    "log_softmax.int": _softmax_rule(True, lambda policy, input: torch.float32),
    "sum": _sum_rule,
    "sum.dim_IntList": _sum_rule,
}
