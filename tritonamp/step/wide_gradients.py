"""FP32 gradients in the place of half ones, from ``unscale_`` to the step."""

from collections.abc import Iterable

import torch
from torch import Tensor

from tritonamp.policy import HALF_DTYPES


class WideGradients:
    """FP32 gradients in ``.grad`` of parameters whose backward makes half ones.

    ::

        widen   .grad: half tensor -> its values in FP32, another tensor
        narrow  .grad: FP32 tensor -> its values, rounded, in the half tensor again

    The half tensor is kept meanwhile: a CUDA graph or a bucket of DDP may own its memory.
    """

    def __init__(self) -> None:
        self._own: dict[Tensor, tuple[Tensor, torch.dtype | None]] = {}  # half .grad, grad_dtype

    @torch.no_grad()
    def widen(self, params: Iterable[Tensor]) -> None:
        """Put FP32 gradients of the same values in the place of half ones."""
        for param in params:
            grad = param.grad
            if grad is not None and grad.dtype in HALF_DTYPES:
                self._own.setdefault(param, (grad, param.grad_dtype))
                # None: should somebody clear the gradient, the next backward makes a half one
                _set_gradient(param, grad.float(), None)

    @torch.no_grad()
    def narrow(self) -> None:
        """Round what ``.grad`` holds now into the half tensors, and put these in its place."""
        while self._own:
            param, (own, grad_dtype) = self._own.popitem()
            grad = param.grad
            if grad is not None:
                sparse = own.is_sparse or grad.is_sparse
                grad = grad.to(own.dtype) if sparse else own.copy_(grad)
            _set_gradient(param, grad, grad_dtype)


def _set_gradient(param: Tensor, grad: Tensor | None, grad_dtype: torch.dtype | None) -> None:
    param.grad = None  # of another dtype, it would not let ``grad_dtype`` change
    param.grad_dtype = grad_dtype
    param.grad = grad
