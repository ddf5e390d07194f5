"""The rules of the op table: how each changes the arguments of an op, and its result."""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet

from tritonamp.casts.active import ActivePolicy, thread
from tritonamp.functional.inputs import is_under_transforms
from tritonamp.kernels.device import widened
from tritonamp.nested import leaves
from tritonamp.policy import HALF_DTYPES, Policy


class Stock:
    """One op at one autocast key, without tritonamp's rules.

    A rule calls it for the result of the op, or calls ``run_without_rules`` for other functions.

    Attributes:
        plans: choices that rules keep, by key.
    """

    def __init__(self, namespace: str, op: str, key_name: str) -> None:
        self.plans: dict[Any, Any] = {}
        self.namespace, self.op = namespace, op
        key = getattr(DispatchKey, key_name)
        self.autocast = DispatchKeySet(key)
        # private (torch 2.11 to 2.15): nothing public gives the keys below one, or says whether a
        # kernel is registered
        self.after = torch._C._dispatch_keyset_full_after(key)
        self.kernel = None
        # torch_nn's ops have no kernel here, and may not be imported yet
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        if namespace == "aten" and has_kernel(f"aten::{op}", key_name):
            self.kernel = torch.library.get_kernel(self.target, key_name)

    @functools.cached_property
    def target(self) -> Any:
        """The op. It is looked up at its first call, because torch_nn's ops are imported late."""
        packet, _, overload = self.op.partition(".")
        return getattr(getattr(getattr(torch.ops, self.namespace), packet), overload or "default")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the op's result without any rule or autocast."""
        return self.run_without_rules(self.target, *args, **kwargs)

    def run_without_rules(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return ``function(*args, **kwargs)``, computed without rules and without autocast."""
        before, thread.in_rule = thread.in_rule, True
        try:
            # private (torch 2.11 to 2.15): torch.autocast(enabled=False) would also change what
            # functions inside see of autocast, and its cache
            with torch._C._ExcludeDispatchKeyGuard(self.autocast):
                return function(*args, **kwargs)
        finally:
            thread.in_rule = before

    def call_torchs(self, keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        """Return the result that torch alone would have at this key."""
        # torch.func comes back here from below a rule, where the guard is undone: hence in_rule
        if self.kernel is not None and not thread.in_rule:
            return self.kernel.call_boxed(keyset, *args, **kwargs)
        return self.target.redispatch(keyset & self.after, *args, **kwargs)


Rule = Callable[..., Any]
"""``rule(stock, active, *args, **kwargs)`` returns the op's result for these arguments.

Rules are called under an op policy. Those of ``ALSO_WITHOUT_OP_POLICY`` are called without one,
too.
"""


AUTOCAST = *HALF_DTYPES, torch.float32
"""The dtypes that autocast casts."""


def _cast(value: Any, *dtypes: torch.dtype) -> Any:
    """Return ``value`` with every float16, bfloat16 or float32 tensor in it cast to each dtype."""
    if isinstance(value, Tensor) and value.dtype in AUTOCAST:
        for dtype in dtypes:
            value = value.to(dtype)
    elif isinstance(value, (list, tuple)):
        return type(value)(_cast(item, *dtypes) for item in value)
    return value


def floating_dtypes(value: Any) -> Iterator[torch.dtype]:
    """Yield the floating dtypes of the tensors in ``value``, without FP64, as autocast does."""
    if isinstance(value, Tensor):
        if value.dtype in AUTOCAST:
            yield value.dtype
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from floating_dtypes(item)


def _to_fp32(value: Any) -> Any:
    return _cast(value, torch.float32)


def rounded_to_half(value: Any, half: torch.dtype, *then: torch.dtype) -> Any:
    """Return ``value`` with every tensor in it rounded to half, and then cast to other dtypes."""
    return _cast(value, half, *then)


def half_rule(stock: Stock, active: ActivePolicy, *args: Any, **kwargs: Any) -> Any:
    half = torch.get_autocast_dtype("cpu")
    found = set(floating_dtypes(args))
    if not found or (not active.policy.op_policy and found != {half}):
        return stock(*args, **kwargs)
    rounded = _cast(args, half, torch.float32)
    return _cast(stock(*rounded, **kwargs), half)


def attention_rule(
    stock: Stock,
    active: ActivePolicy,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    fitted = None if mask is None else _fitted_mask(active, mask)
    return _half_everywhere(stock, active, query, key, value, fitted, *args, **kwargs)


def baddbmm_rule(
    stock: Stock, active: ActivePolicy, added: Tensor, *args: Any, **kwargs: Any
) -> Any:
    return _half_everywhere(stock, active, _fitted_mask(active, added), *args, **kwargs)


def _fitted_mask(active: ActivePolicy, mask: Tensor) -> Tensor:
    """Return a mask for half scores in the half format. Finite values stay finite."""
    half = torch.get_autocast_dtype(mask.device.type)
    if not active.policy.op_policy or mask.dtype not in AUTOCAST or mask.dtype is half:
        return mask
    return _fit_tensor(mask, half)


def rounding_rule(stock: Stock, active: ActivePolicy, *args: Any, **kwargs: Any) -> Any:
    """Compute in half, on accelerators other than CUDA's."""
    tensors = [leaf for leaf in leaves(args) if isinstance(leaf, Tensor)]
    half = torch.get_autocast_dtype(tensors[0].device.type)
    return stock(*_cast(args, half), **kwargs)


def _half_everywhere(stock: Stock, active: ActivePolicy, *args: Any, **kwargs: Any) -> Any:
    """Compute in half, as for HALF, on CUDA, too."""
    kind = args[0].device.type
    if kind == "cpu":
        return half_rule(stock, active, *args, **kwargs)
    if not active.policy.op_policy:
        return stock(*args, **kwargs)
    half = torch.get_autocast_dtype(kind)
    return stock(*_cast(args, half), **kwargs)


def grouped_mm_rule(stock: Stock, active: ActivePolicy, *args: Any) -> Any:
    """Compute in half, as for HALF, on CUDA, too, because torch has this op on no list.

    The fifth argument, ``out_dtype``, is the dtype of the result. torch refuses any but the dtype
    of the operands, which are half here, so the result is cast afterwards.
    """
    args, out_dtype = args[:4], args[4:]
    result = _half_everywhere(stock, active, *args)
    return result.to(*out_dtype) if out_dtype else result


def out_dtype_rule(stock: Stock, active: ActivePolicy, *args: Any, **kwargs: Any) -> Any:
    """Compute in half, as for HALF, with the result in ``out_dtype``, the last argument.

    torch has these ops on CUDA alone. The tensor that is added to the product, the first of three,
    is not rounded.
    """
    half = torch.get_autocast_dtype("cpu")
    *added, a, b, out_dtype = args
    if not active.policy.op_policy and {*floating_dtypes((a, b))} != {half}:
        return stock(*args, **kwargs)
    rounded = _cast((a, b), half, torch.float32)
    product = getattr(torch.ops.aten, stock.target._schema.name.removeprefix("aten::")).default
    result = stock.run_without_rules(product, *_to_fp32(added), *rounded, **kwargs)
    return result.to(out_dtype)


def fp32_rule(stock: Stock, active: ActivePolicy, *args: Any, **kwargs: Any) -> Any:
    """Compute in FP32, with an FP32 result. An explicit ``dtype`` wins."""
    if kwargs.get("dtype") is not None:
        return stock(*args, **kwargs)
    return stock(*_to_fp32(args), **kwargs)


def promote_rule(stock: Stock, active: ActivePolicy, *args: Any, **kwargs: Any) -> Any:
    found = set(floating_dtypes(args))
    if len(found) < 2:
        return stock(*args, **kwargs)
    widest = functools.reduce(torch.promote_types, found)
    return stock(*_cast(args, widest), **kwargs)


def written_into_rule(
    stock: Stock, active: ActivePolicy, into: Tensor, *args: Any, **kwargs: Any
) -> Any:
    if into.dtype not in AUTOCAST:
        return stock(into, *args, **kwargs)
    return stock(into, *_cast(args, into.dtype), **kwargs)


def storage_rule(stock: Stock, active: ActivePolicy, *args: Any, **kwargs: Any) -> Any:
    """Compute in FP32, and return the result in the dtype of the first argument."""
    result = stock(*_to_fp32(args), **kwargs)
    return _cast(result, args[0].dtype)


def norm_dtype(policy: Policy, input: Tensor) -> torch.dtype:
    """Return the dtype of a norm's result.

    It is the dtype of the input. After modules with FP32 results the input may be an FP32 sum, and
    the norm ends the FP32 stretch.
    """
    if policy.fp32_results and input.dtype is torch.float32:
        return policy.dtype
    return input.dtype


def norm_rule(stock: Stock, active: ActivePolicy, input: Tensor, *args: Any) -> Any:
    """Compute in FP32, and return the result in ``norm_dtype``."""
    result = stock(*_to_fp32((input, *args)))
    return _cast(result, norm_dtype(active.policy, input))


def running_norm_rule(
    stock: Stock, active: ActivePolicy, input: Tensor, *args: Any, **kwargs: Any
) -> Any:
    result = _running_norm(stock, input, *args, **kwargs)
    return _cast(result, norm_dtype(active.policy, input))


def _running_norm(
    stock: Stock,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    updates: bool,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Return the norm in the dtype of the input, in FP32 where torch's kernels take no other."""
    own = (weight, bias, mean, var)
    found = set(floating_dtypes(own))
    if found - {input.dtype} and input.dtype in HALF_DTYPES and is_under_transforms():
        # torch.func takes them apart into ops that refuse half and FP32 together
        wide = _to_fp32((input, *own))
        return stock(*wide, updates, *args, **kwargs).to(input.dtype)
    if found in (set(), {torch.float32}, {input.dtype}):
        return stock(input, *own, updates, *args, **kwargs)
    wide = _to_fp32(own)
    result = stock(input, *wide, updates, *args, **kwargs)
    for statistic, new in zip(own[2:], wide[2:], strict=True):
        if updates and statistic is not None and statistic is not new:
            statistic.copy_(new)
    return result


def fitting_rule(stock: Stock, active: ActivePolicy, *args: Any, **kwargs: Any) -> Any:
    dtype = kwargs.get("dtype") or next(floating_dtypes(args), None)
    if dtype not in HALF_DTYPES:
        return stock(*args, **kwargs)
    fitted = [fitted_number(value, dtype) for value in args]
    # tensors before the last one are masks and indices
    if isinstance(args[-1], Tensor) and args[-1].dtype is not dtype:
        fitted[-1] = _fit_tensor(args[-1], dtype)
    return stock(*fitted, **kwargs)


def fitted_number(value: Any, dtype: torch.dtype) -> Any:
    """Return a finite number clamped to the range of ``dtype``, and any other value unchanged."""
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return value
    limit = torch.finfo(dtype).max
    return value if -limit <= value <= limit else math.copysign(limit, value)


def _fit_tensor(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``value`` in ``dtype``, with finite values clamped to its range."""
    limit = torch.finfo(dtype).max
    # FP32 and FP64 hold the limits of half formats exactly
    wide = value if value.dtype is torch.float32 else widened(value)
    return torch.where(value.isinf(), value, wide.clamp(-limit, limit)).to(dtype)


def banned_rule(stock: Stock, active: ActivePolicy, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        "binary_cross_entropy (nn.BCELoss) inside the forward of a mixed-precision model: its "
        "gradient leaves the half range near 0 and 1. Use binary_cross_entropy_with_logits "
        "(nn.BCEWithLogitsLoss) without the sigmoid, compute the loss outside the model's forward, "
        "or wrap the call in tritonamp.disable_casts() with FP32 inputs"
    )


def storage_on_cpu_rule(stock: Stock, active: ActivePolicy, *args: Any, **kwargs: Any) -> Any:
    return storage_rule(stock, active, *args, **kwargs)


ALSO_WITHOUT_OP_POLICY = frozenset(
    {
        half_rule,
        attention_rule,
        baddbmm_rule,
        grouped_mm_rule,
        out_dtype_rule,
        storage_on_cpu_rule,
    }
)
"""Rules for half models at O3 on a CPU, too, because its half kernels are slow or missing."""
