"""The handles of ``amp.init``: casts, and the API from before ``amp.initialize``."""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tritonamp.apex.amp._amp_state import _amp_state
from tritonamp.apex.amp.casts import Casts
from tritonamp.apex.amp.opt import OptimWrapper


class AmpHandle(Casts):
    """The casts of ``amp.init``, which returns the handle, or of ``amp.initialize`` at O1 or O4.

    The handle of ``amp.initialize`` is ``_amp_state.handle``.

    Attributes:
        loss_scale: loss scale of the optimizers passed to ``wrap_optimizer`` and ``scale_loss``.
        verbose: the argument of ``amp.init``; nothing is printed.
    """

    def __init__(
        self,
        loss_scale: str | float = "dynamic",
        enable_caching: bool = True,
        verbose: bool = False,
        dtype: torch.dtype = torch.float16,
        device_types: frozenset[str] = frozenset(("cpu", "cuda")),
    ) -> None:
        super().__init__(enable_caching, dtype, device_types)
        self.loss_scale = loss_scale
        self.verbose = verbose

    def wrap_optimizer(self, optimizer: Optimizer, num_loss: int = 1) -> OptimWrapper:
        """Return an optimizer with ``scale_loss``, for ``num_loss`` losses per step.

        While casts are off, ``scale_loss`` yields the unscaled loss.
        """
        return OptimWrapper(optimizer, self, num_loss)

    @contextlib.contextmanager
    def scale_loss(self, loss: Tensor, optimizer: Optimizer) -> Iterator[Tensor]:
        """Yield the scaled loss. After its backward the gradients are unscaled.

        If the gradients are not finite, ``optimizer.step()`` skips.
        """
        with OptimWrapper.of(optimizer, self).scale_loss(loss) as scaled:
            yield scaled

    def _end_with(self, owner: Any) -> None:
        """Keep the casts as long as ``owner``, or one of those that were owners before, lives."""
        if self.owners is not None:
            self.owners.add(owner)
            weakref.finalize(owner, _end_without_owners).atexit = False


class NoOpHandle(AmpHandle):
    """A handle that does nothing: no function is cast, and losses stay as they are."""

    def __init__(self) -> None:
        super().__init__(enable_caching=False, device_types=frozenset())
        self._is_active = False


def _end_without_owners() -> None:
    handle = _amp_state.handle
    if handle.owners is not None and not any(True for _ in handle.owners):
        handle._deactivate()


@contextlib.contextmanager
def disable_casts() -> Iterator[None]:
    """Inside the block, torch's functions run in the dtypes of their arguments."""
    with _amp_state.handle._disable_casts():
        yield


_amp_state.handle = NoOpHandle()
