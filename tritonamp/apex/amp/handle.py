"""The casts around torch's functions, the half copies of weights, and how to take them off."""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tritonamp.apex.amp._amp_state import _amp_state
from tritonamp.apex.amp.opt import OptimWrapper

_INHERITED = object()


class UserFunction(NamedTuple):
    """A function of the user's own in the lists: ``module.name``, and what is put around it."""

    module: Any
    name: str
    wrap: Callable[[Any], Any]


class AmpHandle:
    """The casts of ``amp.init``, which returns it, or of an ``amp.initialize`` of level O1 or O4.

    That of ``amp.initialize`` is ``_amp_state.handle``.

    Attributes:
        dtype: the half dtype.
        device_types: tensors elsewhere are left alone.
        loss_scale: of optimizers that ``wrap_optimizer`` and ``scale_loss`` are given.
        owners: the casts end with the last of these; None: they stay.
        user_functions: those that the user has registered.
    """

    def __init__(
        self,
        loss_scale: str | float = "dynamic",
        enable_caching: bool = True,
        verbose: bool = False,
        dtype: torch.dtype = torch.float16,
        device_types: frozenset[str] = frozenset(("cpu", "cuda")),
    ) -> None:
        self.loss_scale = loss_scale
        self.dtype = dtype
        self.device_types = device_types
        self.owners: weakref.WeakSet[Any] | None = None
        self.user_functions: list[UserFunction] = []
        self._enable_caching = enable_caching
        self._verbose = verbose
        self._is_active = True
        self._cache: dict[Tensor, Tensor] = {}
        self._versions: dict[Tensor, int] = {}
        self._all_wrappers: list[tuple[Any, str, Any]] = []

    def is_active(self) -> bool:
        """Whether functions cast now."""
        return self._is_active

    @contextlib.contextmanager
    def _disable_casts(self) -> Iterator[None]:
        before, self._is_active = self._is_active, False
        try:
            yield
        finally:
            self._is_active = before

    # the functions

    def _replace(self, module: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        """Put ``wrap(module.name)`` in the place of ``module.name``, if there is one."""
        if not callable(getattr(module, name, None)):
            return
        self._all_wrappers.append((module, name, vars(module).get(name, _INHERITED)))
        setattr(module, name, wrap(getattr(module, name)))

    def _deactivate(self) -> None:
        """Put all functions back."""
        while self._all_wrappers:
            module, name, original = self._all_wrappers.pop()
            if original is _INHERITED:
                delattr(module, name)
            else:
                setattr(module, name, original)
        self._is_active = False
        self._clear_cache()

    def _end_with(self, owner: Any) -> None:
        """Keep the casts as long as ``owner``, or one of those that were owners before, lives."""
        if self.owners is not None:
            self.owners.add(owner)
            weakref.finalize(owner, _end_without_owners).atexit = False

    # the half copies of weights

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """``tensor.to(dtype)``, of an FP32 parameter once until ``_clear_cache``.

        A copy is made anew, too, when the parameter was written to, or when gradients are wanted
        and the copy has none to hand on (it was made without gradients, or ``requires_grad`` has
        changed since).
        """
        kept = (
            self._enable_caching
            and isinstance(tensor, nn.Parameter)
            and tensor.dtype is torch.float32
        )
        if torch.compiler.is_compiling() or not kept or torch.is_inference_mode_enabled():
            return tensor.to(dtype)
        copy = self._cache.get(tensor)
        stale = copy is None or copy.dtype is not dtype or self._versions[tensor] != tensor._version
        if stale or (torch.is_grad_enabled() and copy.requires_grad != tensor.requires_grad):  # type: ignore[union-attr]
            copy = self._cache[tensor] = tensor.to(dtype)
            self._versions[tensor] = tensor._version
        return copy  # type: ignore[return-value]

    def _clear_cache(self) -> None:
        self._cache.clear()
        self._versions.clear()

    def remove_cache(self, param: Tensor) -> None:
        """Forgets the copy of one parameter."""
        self._cache.pop(param, None)

    @property
    def has_cache(self) -> bool:
        """Whether parameters are cast once an iteration."""
        return self._enable_caching

    @property
    def cache(self) -> dict[Tensor, Tensor]:
        """Parameter to its half copy."""
        return self._cache

    @property
    def verbose(self) -> bool:
        """As given; nothing is printed."""
        return self._verbose

    # the API before ``amp.initialize``

    def wrap_optimizer(self, optimizer: Optimizer, num_loss: int = 1) -> OptimWrapper:
        """Return an optimizer with ``scale_loss``; it expects ``num_loss`` losses a step."""
        return OptimWrapper(optimizer, self, num_loss)

    @contextlib.contextmanager
    def scale_loss(self, loss: Tensor, optimizer: Optimizer) -> Iterator[Tensor]:
        """Yield the scaled loss; after its backward the gradients are true ones.

        Where they are not finite, ``optimizer.step()`` skips.
        """
        with OptimWrapper.of(optimizer, self).scale_loss(loss) as scaled:
            yield scaled


class NoOpHandle:
    """An ``AmpHandle`` that does nothing."""

    dtype, device_types = torch.float16, frozenset[str]()
    has_cache = verbose = False
    owners = None
    user_functions: Sequence[UserFunction] = ()

    def is_active(self) -> bool:
        """Return False: nothing is cast."""
        return False

    @contextlib.contextmanager
    def _disable_casts(self) -> Iterator[None]:
        yield

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """``tensor.to(dtype)``."""
        return tensor.to(dtype)

    def wrap_optimizer(self, optimizer: Optimizer, num_loss: int = 1) -> OptimWrapper:
        """Return an optimizer whose ``scale_loss`` yields the loss as it is."""
        return OptimWrapper(optimizer, self, num_loss)

    @contextlib.contextmanager
    def scale_loss(self, loss: Tensor, optimizer: Optimizer) -> Iterator[Tensor]:
        """Yield the loss as it is."""
        yield loss

    def _clear_cache(self) -> None:
        pass

    def _deactivate(self) -> None:
        pass


def _end_without_owners() -> None:
    handle = _amp_state.handle
    if handle.owners is not None and not any(True for _ in handle.owners):
        handle._deactivate()


@contextlib.contextmanager
def disable_casts() -> Iterator[None]:
    """Inside, torch's functions run in the dtypes of their arguments."""
    with _amp_state.handle._disable_casts():
        yield


_amp_state.handle = NoOpHandle()
