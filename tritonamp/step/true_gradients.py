"""The true FP32 gradients of one optimizer, where a backward does not write."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from tritonamp.step.shown_gradients import LentGradients, ShownGradients


class TrueGradients:
    """True gradients: shown in ``.grad`` of half parameters, or set aside.

    They are set aside while the backward of another loss adds scaled gradients.

    Args:
        grad_dtype: dtype of the gradients that backwards make; None: the parameter's dtype.
    """

    def __init__(self, grad_dtype: torch.dtype | None) -> None:
        self._shown = ShownGradients(grad_dtype)
        self._lent = LentGradients()
        self._aside: dict[Tensor, Tensor] = {}  # by master

    @property
    def is_aside(self) -> bool:
        """Whether gradients are set aside."""
        return len(self._aside) > 0

    def put(self, master: Tensor, param: Tensor, grad: Tensor | None, is_lent: bool) -> None:
        """Make ``grad`` the true gradient of a parameter.

        Args:
            master: tensor that the optimizer steps on.
            param: parameter of the model.
            grad: the gradient; None: the parameter has none.
            is_lent: whether the FP32 value of ``param`` is lent. The optimizer steps on the half
                parameter itself then, whose own gradient is half.
        """
        if is_lent:
            self._shown.show(param, grad)
        else:
            master.grad = grad

    def show(self, sources: Mapping[Tensor, Tensor], held: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Show the gradients of masters on their half parameters, and on lent tensors.

        A half parameter and its master share one tensor, so a change to one is a change to the
        other.

        Args:
            sources: master to parameter of the model.
            held: half parameters with the FP32 tensors that are lent for them.
        """
        for master, param in sources.items():
            if master is not param:
                self._shown.show(param, master.grad)
        for param, value in held:
            self.show_lent(param, value)

    def show_lent(self, param: Tensor, value: Tensor) -> None:
        """Show the true gradient of ``param`` on the FP32 tensor that is lent for it."""
        self._lent.show(param, value, self._shown)

    def adopt_replaced(self, sources: Mapping[Tensor, Tensor]) -> None:
        """Take over gradients that the user has assigned instead of shown ones.

        Args:
            sources: master to parameter of the model.
        """
        self._lent.adopt_replaced(self._shown)
        for master, param in sources.items() if self._shown else ():
            if master is not param and self._shown.is_replaced(param, master.grad):
                master.grad = None if param.grad is None else param.grad.to(master.dtype)
                self._shown.show(param, master.grad)

    def set_aside(self, sources: Mapping[Tensor, Tensor]) -> None:
        """Set the gradients of masters aside, and clear ``.grad`` for a backward.

        Args:
            sources: master to parameter of the model.
        """
        # first: the user may have assigned gradients, which count
        self.adopt_replaced(sources)
        self._aside |= {m: m.grad for m in sources if m.grad is not None}
        self._lent.clear()
        self._shown.put_back()
        for master, param in sources.items():
            master.grad = None
            self._shown.clear(param)

    def plus_aside(self, master: Tensor, grad: Tensor | None) -> Tensor | None:
        """Return a gradient plus the one that was set aside for ``master``."""
        aside = self._aside.pop(master, None)
        if grad is None or aside is None:
            return aside if grad is None else grad
        return grad + aside

    def take_aside(self) -> dict[Tensor, Tensor]:
        """Return the gradients that were set aside, by master, and forget them."""
        aside, self._aside = self._aside, {}
        return aside

    def clear(self) -> None:
        """Forget all gradients; half parameters get the tensors of their backward back."""
        self._aside.clear()
        self._lent.clear()
        self._shown.put_back()

    def clear_param(self, param: Tensor) -> None:
        """Clear ``.grad`` of ``param``; its next backward makes a gradient of its own dtype."""
        self._shown.clear(param)

    def hidden(self) -> Iterator[Tensor]:
        """Yield gradients that no ``.grad`` shows; lent tensors show none from now on."""
        self._lent.clear()
        yield from self._aside.values()
        yield from self._shown.hidden_gradients()
