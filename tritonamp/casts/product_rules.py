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
    """The FP32 product of half matrices, plus an FP32 tensor or None.

    The backward is that of a half product: the gradient of the result is rounded to half, and the
    gradients of the operands are half.
    """

    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor, added: Tensor | None, beta: float, alpha: float
    ) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.shape, ctx.beta, ctx.alpha = None if added is None else added.shape, beta, alpha
        wide = (torch.float32,) if a.is_cuda else ()
        if not wide:  # torch has no such kernel on a CPU; an FP32 product is exact in the operands
            a, b = a.float(), b.float()
        if added is None:
            product: Tensor = (torch.mm if a.dim() == 2 else torch.bmm)(a, b, *wide)
            return product
        with_sum: Any = torch.addmm if a.dim() == 2 else torch.baddbmm
        result: Tensor = with_sum(added, a, b, *wide, beta=beta, alpha=alpha)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (a, b) = grads, ctx.saved_tensors
        of_a, of_b, of_added = ctx.needs_input_grad[:3]
        half = (grad if ctx.alpha == 1 else grad * ctx.alpha).to(a.dtype)
        return (
            _half_product(half, b.mT) if of_a else None,
            _half_product(a.mT, half) if of_b else None,
            ctx.beta * grad.sum_to_size(ctx.shape) if of_added else None,
            None,
            None,
        )


def _half_product(a: Tensor, b: Tensor) -> Tensor:
    """Return the half product of half matrices; a CPU computes it in FP32 and rounds once."""
    if a.is_cuda:
        return a @ b
    return (a.float() @ b.float()).to(a.dtype)


def _product_rule(
    stock: Stock, active: ActivePolicy, *args: Any, beta: float = 1, alpha: float = 1
) -> Any:
    """Return the FP32 product of the last two arguments; a third one before them is added."""
    *added, a, b = args
    numbers = {"beta": beta, "alpha": alpha} if added else {}
    half = _half_for(args)
    if not all(map(_is_plain, args)):
        return stock(*rounded_to_half(args, half, torch.float32), **numbers)
    operands = rounded_to_half((a, b), half)
    wide = added[0].float() if added else None
    return stock.run_without_rules(Product.apply, *operands, wide, beta, alpha)


def _half_for(args: Any) -> torch.dtype:
    """Return the half dtype for the device of the tensors among an op's arguments."""
    return torch.get_autocast_dtype(
        next(t for t in leaves(args) if isinstance(t, Tensor)).device.type
    )


def _is_plain(tensor: Tensor) -> bool:
    """Return whether ``Product`` takes a tensor: not in torch.func, of no class of its own."""
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
    """Run the parts of an op, which follow the rules here."""
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
