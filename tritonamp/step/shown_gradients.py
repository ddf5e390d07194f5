"""FP32 gradients in the ``.grad`` of half parameters, from ``unscale_`` to the step."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from tritonamp.policy import HALF_DTYPES


class _Own(NamedTuple):
    """A parameter's own gradient while it shows another one.

    Attributes:
        grad: the tensor that the parameter's backward has written.
        grad_dtype: the dtype of gradients that the backward makes.
        shown: the gradient that ``.grad`` shows.
    """

    grad: Tensor | None
    grad_dtype: torch.dtype | None
    shown: Tensor | None


class ShownGradients:
    """FP32 gradients in ``.grad`` of parameters whose backward makes half ones.

    ::

        show       .grad: half tensor -> FP32 tensor
        put_back   .grad: FP32 tensor -> the half tensor, as it was
        round_back .grad: FP32 tensor -> the half tensor, with the FP32 values rounded

    The half tensor is kept meanwhile: a CUDA graph or a bucket of DDP may own its memory.

    Args:
        grad_dtype: of the gradients that backwards make; None: that of the parameter.
    """

    def __init__(self, grad_dtype: torch.dtype | None = None) -> None:
        self._grad_dtype = grad_dtype
        self._own: dict[Tensor, _Own] = {}  # by parameter

    def __len__(self) -> int:
        return len(self._own)

    def show(self, param: Tensor, grad: Tensor | None) -> None:
        """Put ``grad`` in the place of the gradient of ``param``.

        If a gradient is shown already, the user has assigned the present ``.grad`` since: it
        becomes the one to put back.
        """
        earlier = self._own.get(param)
        # what ``param`` has now is not its own if a gradient is shown already
        grad_dtype = param.grad_dtype if earlier is None else earlier.grad_dtype
        self._own[param] = _Own(param.grad, grad_dtype, grad)
        # None: should somebody clear the gradient, the next backward makes a half one
        _set_gradient(param, grad, None)

    def hidden_gradients(self) -> list[Tensor]:
        """Return the parameters' own gradients that are to be put back."""
        return [own.grad for own in self._own.values() if own.grad is not None]

    def is_replaced(self, param: Tensor, grad: Tensor | None) -> bool:
        """Tell whether ``grad`` was shown, and somebody has put another gradient in its place."""
        own = self._own.get(param)
        return own is not None and own.shown is grad and param.grad is not grad

    def replace(self, param: Tensor, grad: Tensor | None) -> None:
        """Show another gradient instead of the one that is shown; the half tensor stays kept."""
        self._own[param] = self._own[param]._replace(shown=grad)
        _set_gradient(param, grad, None)

    def put_back(self) -> None:
        """Put the parameters' own gradients back, unless somebody has replaced the shown ones."""
        while self._own:
            param, own = self._own.popitem()
            grad = own.grad if own.grad is not None and param.grad is own.shown else param.grad
            if grad is not None and self._grad_dtype is not None:
                grad = grad.to(self._grad_dtype)
            # somebody may have assigned one of another dtype, which torch would refuse
            fits = grad is None or grad.dtype == own.grad_dtype
            _set_gradient(param, grad, own.grad_dtype if fits else None)

    def clear(self, param: Tensor) -> None:
        """Clear ``.grad`` of ``param``: its next backward makes its own, whatever was shown."""
        _set_gradient(param, None, param.grad_dtype or self._grad_dtype or param.dtype)

    @torch.no_grad()
    def widen(self, params: Iterable[Tensor]) -> None:
        """Show the half gradients of ``params`` as FP32 gradients of the same values."""
        for param in params:
            if param.grad is not None and param.grad.dtype in HALF_DTYPES:
                self.show(param, param.grad.float())

    @torch.no_grad()
    def round_back(self) -> None:
        """Round the present ``.grad`` into the half tensors, and put these in its place."""
        while self._own:
            param, own = self._own.popitem()
            grad = param.grad
            if grad is not None and own.grad is not None:
                # torch copies between dense and sparse tensors in neither direction
                sparse = own.grad.is_sparse or grad.is_sparse
                grad = grad.to(own.grad.dtype) if sparse else own.grad.copy_(grad)
            _set_gradient(param, grad, own.grad_dtype)


class LentGradients:
    """True gradients of half parameters, in ``.grad`` of the FP32 tensors lent for them.

    A lent tensor and its parameter share one gradient. What the user assigns on the lent tensor,
    None included, counts for the parameter, as on an FP32 master.
    """

    def __init__(self) -> None:
        self._lent: dict[Tensor, tuple[Tensor, Tensor | None]] = {}  # by parameter

    def show(self, param: Tensor, value: Tensor, shown: ShownGradients) -> None:
        """Put the gradient that ``param`` shows into ``.grad`` of its lent tensor ``value``."""
        self._adopt(param, shown)
        fits = param.grad is not None and param.grad.dtype is value.dtype
        value.grad = param.grad if fits else None
        self._lent[param] = value, value.grad

    def adopt_replaced(self, shown: ShownGradients) -> None:
        """Take over gradients that the user has assigned on lent tensors."""
        for param in self._lent:
            self._adopt(param, shown)

    def _adopt(self, param: Tensor, shown: ShownGradients) -> None:
        value, grad = self._lent.get(param, (param, param.grad))
        if value.grad is not grad:
            shown.replace(param, value.grad)
            self._lent[param] = value, value.grad

    def clear(self) -> None:
        """Clear ``.grad`` of all lent tensors."""
        for value, _ in self._lent.values():
            value.grad = None
        self._lent.clear()


def _set_gradient(param: Tensor, grad: Tensor | None, grad_dtype: torch.dtype | None) -> None:
    param.grad = None  # of another dtype, it would not let ``grad_dtype`` change
    param.grad_dtype = grad_dtype
    param.grad = grad
