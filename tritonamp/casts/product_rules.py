"""Rules for modules in ``Policy.fp32_results``: products of half operands, with FP32 results."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tritonamp.casts.active import ActivePolicy
from tritonamp.casts.op_rules import Rule, Stock, fp32_rule, rounded_to_half
from tritonamp.functional.inputs import is_under_transforms
from tritonamp.nested import leaves


class Product(torch.autograd.Function):
    """The FP32 product of matrices that are rounded to half, plus an FP32 tensor or None.

    The backward is that of a half product: the gradient of the result is rounded to half, divided
    by a power of two first if it would overflow.
    """

    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        b: Tensor,
        added: Tensor | None,
        half: torch.dtype,
        beta: float,
        alpha: float,
    ) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.shape, ctx.half = None if added is None else added.shape, half
        ctx.beta, ctx.alpha = beta, alpha
        return _wide_product(a.to(half), b.to(half), added, beta=beta, alpha=alpha)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (a, b) = grads, ctx.saved_tensors
        of_a, of_b, of_added, *_ = ctx.needs_input_grad
        half, unit = _fitted(grad if ctx.alpha == 1 else grad * ctx.alpha, ctx.half)
        # a backward inside of ``amp.autocast()`` would round the FP32 products of a CPU to half
        with torch.autocast(grad.device.type, enabled=False):
            return (
                _gradient(half, b.to(ctx.half).mT, a.dtype, unit) if of_a else None,
                _gradient(a.to(ctx.half).mT, half, b.dtype, unit) if of_b else None,
                ctx.beta * grad.sum_to_size(ctx.shape) if of_added else None,
                *(None,) * 3,
            )


def _wide_product(a: Tensor, b: Tensor, added: Tensor | None = None, **factors: float) -> Tensor:
    """Return the FP32 product of half matrices, plus an FP32 tensor."""
    wide = (torch.float32,) if a.is_cuda else ()
    if not wide:  # torch has no such kernel on a CPU; an FP32 product is exact in the operands
        a, b = a.float(), b.float()
    if added is None:
        product: Tensor = (torch.mm if a.dim() == 2 else torch.bmm)(a, b, *wide)
        return product
    with_sum: Any = torch.addmm if a.dim() == 2 else torch.baddbmm
    result: Tensor = with_sum(added, a, b, *wide, **factors)
    return result


def _fitted(grad: Tensor, half: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return an FP32 gradient in half, and the power of two by which it was multiplied.

    None stands for 1, because bfloat16 has the range of FP32. The host does not wait.
    """
    if half is torch.bfloat16 or not grad.numel():
        return grad.to(half), None
    largest = torch.linalg.vector_norm(grad.detach(), torch.inf)
    ratio = torch.finfo(half).max / largest
    # the exponent bits alone: the power of two at or below the ratio; inf for 0 and NaN
    power = (ratio.view(torch.int32) & 0x7F800000).view(torch.float32).clamp(max=1.0)
    unit = torch.where(ratio > 0, power, 1.0)  # inf stays inf
    if torch.is_grad_enabled():  # for a gradient of the gradient
        return (grad * unit).to(half), unit
    return torch.mul(grad, unit, out=torch.empty_like(grad, dtype=half)), unit  # in one pass


def _gradient(a: Tensor, b: Tensor, dtype: torch.dtype, unit: Tensor | None) -> Tensor:
    """Return the product of half matrices, divided by ``unit``, in half or FP32."""
    if dtype is torch.float32:
        product = _wide_product(a, b)
    elif a.is_cuda:
        product = a @ b
    else:  # in FP32, rounded once
        product = (a.float() @ b.float()).to(a.dtype)
    return product if unit is None else product / unit


def _product_rule(
    stock: Stock, active: ActivePolicy, *args: Any, beta: float = 1, alpha: float = 1
) -> Any:
    """Return the FP32 product of the last two arguments; a third one before them is added."""
    *added, a, b = args
    numbers = {"beta": beta, "alpha": alpha} if added else {}
    half = _half_for(args)
    if not all(map(_is_plain, args)):
        return stock(*rounded_to_half(args, half, torch.float32), **numbers)
    wide = added[0].float() if added else None
    return stock.run_without_rules(Product.apply, a, b, wide, half, beta, alpha)


def _half_for(args: Any) -> torch.dtype:
    """Return the half dtype for the device of the tensors among an op's arguments."""
    return torch.get_autocast_dtype(
        next(t for t in leaves(args) if isinstance(t, Tensor)).device.type
    )


def _is_plain(tensor: Tensor) -> bool:
    """Return whether ``Product`` takes a tensor: a plain dense one, and not in torch.func."""
    return (
        tensor.layout is torch.strided
        and tensor.is_floating_point()
        and tensor.dtype is not torch.float64
        and tensor.device.type in ("cpu", "cuda")
        and not is_traceable_wrapper_subclass(tensor)
        and not is_under_transforms()
        and torch.version.hip is None
    )


def _made_of_products(stock: Stock, active: ActivePolicy, *args: Any, **kwargs: Any) -> Any:
    """Run the parts of an op, which follow the rules here. Nested tensors have other parts."""
    if any(isinstance(t, Tensor) and t.is_nested for t in args):
        return _vector_rule(stock, active, *args, **kwargs)
    return stock.target.decompose(*args, **kwargs)


def _tensordot_rule(stock: Stock, active: ActivePolicy, *args: Any) -> Any:
    """Run the parts of tensordot, which asks for operands of one dtype."""
    return stock.target.decompose(*rounded_to_half(args, _half_for(args)))


def _vector_rule(stock: Stock, active: ActivePolicy, *args: Any, **kwargs: Any) -> Any:
    """Compute in FP32 on operands that are rounded to half, with an FP32 result."""
    return stock(*rounded_to_half(args, _half_for(args), torch.float32), **kwargs)


FP32_RESULTS: Mapping[str, Rule] = {
    **dict.fromkeys("mm bmm addmm baddbmm".split(), _product_rule),
    "tensordot": _tensordot_rule,
    **dict.fromkeys("linear matmul einsum".split(), _made_of_products),
    **dict.fromkeys(
        """
        addbmm addmv addr bilinear chain_matmul dot linalg_multi_dot linalg_vecdot mv vdot
        """.split(),
        _vector_rule,
    ),
    # fused paths of nn.TransformerEncoderLayer in eval mode: no module of products runs inside
    **dict.fromkeys(
        "_addmm_activation _native_multi_head_attention _transformer_encoder_layer_fwd".split(),
        _vector_rule,
    ),
    # torch has no convolution of half operands with an FP32 result
    **dict.fromkeys(
        """
        _convolution convolution conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding
        conv_tbc conv_transpose1d conv_transpose2d.input conv_transpose3d.input prelu
        """.split(),
        fp32_rule,
    ),
}
"""Rule of each op inside of a module of ``Policy.fp32_results``. Attention and RNNs are half there,
because their results are means, or lie between -1 and 1.
"""
