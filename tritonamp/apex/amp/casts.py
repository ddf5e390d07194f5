"""The casts around torch's functions while they are on, and the half copies of weights."""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

_INHERITED = object()
Listed = tuple[Any, str, Callable[[Any], Any]]  # a function of the user's: module, name, wrapper


class Casts:
    """Which functions are wrapped, and the half copy of each weight that they were given.

    Attributes:
        dtype: the half dtype.
        device_types: tensors elsewhere are left alone.
        owners: the casts end with the last of these; None: they stay.
        user_functions: registered by the user.
        has_cache: whether parameters are cast once an iteration.
        cache: parameter to its half copy.
    """

    def __init__(
        self, enable_caching: bool, dtype: torch.dtype, device_types: frozenset[str]
    ) -> None:
        self.dtype = dtype
        self.device_types = device_types
        self.owners: weakref.WeakSet[Any] | None = None
        self.user_functions: list[Listed] = []
        self.has_cache = enable_caching
        self.cache: dict[Tensor, Tensor] = {}
        self._is_active = True
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

    def _replace(self, module: Any, names: Iterable[str], wrap: Callable[[Any], Any]) -> None:
        """Replace each existing ``module.name`` by ``wrap(module.name)``."""
        for name in names:
            if callable(getattr(module, name, None)):
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

    # the half copies of weights

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return ``tensor.to(dtype)``, for an FP32 parameter a copy kept until ``_clear_cache``.

        The copy is also made again when the parameter was written to, or when gradients are needed
        and the copy has no graph (it was made without gradients, or ``requires_grad`` has changed
        since).
        """
        kept = self.has_cache and isinstance(tensor, nn.Parameter) and tensor.dtype is torch.float32
        if torch.compiler.is_compiling() or not kept or torch.is_inference_mode_enabled():
            return tensor.to(dtype)
        copy = self.cache.get(tensor)
        stale = copy is None or copy.dtype is not dtype or self._versions[tensor] != tensor._version
        if stale or (torch.is_grad_enabled() and copy.requires_grad != tensor.requires_grad):  # type: ignore[union-attr]
            copy = self.cache[tensor] = tensor.to(dtype)
            self._versions[tensor] = tensor._version
        return copy  # type: ignore[return-value]

    def _clear_cache(self) -> None:
        self.cache.clear()
        self._versions.clear()

    def remove_cache(self, param: Tensor) -> None:
        """Forget the copy of one parameter."""
        self.cache.pop(param, None)
