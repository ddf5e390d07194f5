"""FP32 gradients in the ``.grad`` of half parameters, from ``unscale_`` to the step."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from tritonamp.policy import HALF_DTYPES


class Own(NamedTuple):
    """The own gradient of a parameter that shows another gradient.

    Attributes:
        grad: tensor that the parameter's backward has written.
        grad_dtype: dtype of the gradients that the backward makes.
        shown: gradient that ``.grad`` shows.
    """

    grad: Tensor | None
    grad_dtype: torch.dtype | None
    shown: Tensor | None


class ShownGradients:
    """FP32 gradients in ``.grad`` of parameters whose backward makes half gradients.

    ::

        show       .grad: half tensor -> FP32 tensor
        put_back   .grad: FP32 tensor -> the half tensor, as it was
        round_back .grad: FP32 tensor -> the half tensor, with the FP32 values rounded

    The half tensor is kept meanwhile, because a CUDA graph or a bucket of DDP may own its memory.

    Args:
        grad_dtype: dtype of the gradients that backwards make; None: the parameter's dtype.

    Attributes:
        own: own gradient of each parameter that shows another one.
    """

    def __init__(self, grad_dtype: torch.dtype | None = None) -> None:
        self._grad_dtype = grad_dtype
        self.own: dict[Tensor, Own] = {}

    def __len__(self) -> int:
        return len(self.own)

    def show(self, param: Tensor, grad: Tensor | None) -> None:
        """Let ``.grad`` of ``param`` show ``grad``.

        If a gradient is shown already, the user has assigned the present ``.grad`` since then. The
        present one becomes the gradient to put back.
        """
        earlier = self.own.get(param)
        # A parameter that shows a gradient has no ``grad_dtype`` of its own at the moment.
        grad_dtype = param.grad_dtype if earlier is None else earlier.grad_dtype
        self.own[param] = Own(param.grad, grad_dtype, grad)
        # None takes any dtype. If the user clears the gradient now, the next backward makes one in
        # the dtype of the parameter.
        _set_gradient(param, grad, None)

    def hidden_gradients(self) -> list[Tensor]:
        """Return the parameters' own gradients, which are to be put back."""
        return [own.grad for own in self.own.values() if own.grad is not None]

    def is_replaced(self, param: Tensor, grad: Tensor | None) -> bool:
        """Tell whether ``grad`` was shown, and the user has assigned another gradient since."""
        own = self.own.get(param)
        return own is not None and own.shown is grad and param.grad is not grad

    def replace(self, param: Tensor, grad: Tensor | None) -> None:
        """Show another gradient instead of the shown one; the half tensor stays kept."""
        self.own[param] = self.own[param]._replace(shown=grad)
        _set_gradient(param, grad, None)

    def put_back(self) -> None:
        """Put the parameters' own gradients back, unless the user has replaced the shown ones."""
        while self.own:
            param, own = self.own.popitem()
            grad = own.grad if own.grad is not None and param.grad is own.shown else param.grad
            if grad is not None and self._grad_dtype is not None:
                grad = grad.to(self._grad_dtype)
            # the user may have assigned a gradient of another dtype, which torch would refuse
            fits = grad is None or grad.dtype == own.grad_dtype
            _set_gradient(param, grad, own.grad_dtype if fits else None)

    def clear(self, param: Tensor) -> None:
        """Clear ``.grad`` of ``param``; its next backward makes a gradient of its own dtype."""
        _set_gradient(param, None, param.grad_dtype or self._grad_dtype or param.dtype)

    @torch.no_grad()
    def widen(self, params: Iterable[Tensor]) -> None:
        """Show the half gradients of ``params`` as FP32 gradients of the same values."""
        for param in params:
            if param.grad is not None and param.grad.dtype in HALF_DTYPES:
                self.show(param, param.grad.float())

    @torch.no_grad()
    def round_back(self) -> None:
        """Round the present ``.grad`` into the half tensors, and put these back into ``.grad``."""
        while self.own:
            param, own = self.own.popitem()
            grad = param.grad
            if grad is not None and own.grad is not None:
                # torch copies between dense and sparse tensors in neither direction
                sparse = own.grad.is_sparse or grad.is_sparse
                grad = grad.to(own.grad.dtype) if sparse else own.grad.copy_(grad)
            _set_gradient(param, grad, own.grad_dtype)


class LentGradients:
    """True gradients of half parameters, in ``.grad`` of the FP32 tensors that are lent for them.

    A lent tensor and its parameter share one gradient. A gradient that the user assigns to the lent
    tensor, None included, counts for the parameter, as on an FP32 master.
    """

    def __init__(self) -> None:
        self._lent: dict[Tensor, tuple[Tensor, Tensor | None]] = {}  # by parameter

    def show(self, param: Tensor, value: Tensor, shown: ShownGradients) -> None:
        """Put the gradient that ``param`` shows into ``.grad`` of its lent tensor.

        Args:
            param: half parameter.
            value: FP32 tensor that is lent for ``param``.
            shown: shown gradients of the half parameters.
        """
        # first: the user may have assigned a gradient to the lent tensor, which this would
        # overwrite
        self._adopt(param, shown)
        # after a clearing a backward may have left a half gradient, which an FP32 tensor cannot
        # have
        fits = param.grad is not None and param.grad.dtype is value.dtype
        value.grad = param.grad if fits else None
        self._lent[param] = value, value.grad

    def adopt_replaced(self, shown: ShownGradients) -> None:
        """Take over gradients that the user has assigned to lent tensors."""
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
    # torch refuses to change ``grad_dtype`` while there is a gradient of another dtype
    param.grad = None
    param.grad_dtype = grad_dtype
    param.grad = grad
