"""Random generators, autocast and grad mode, recorded and restored around a piece of code."""

import contextlib
import importlib
import random
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

_DEVICE_TYPES = ("cpu", "cuda")


class Generators(NamedTuple):
    """States of the random number generators.

    Attributes:
        python: of ``random``.
        numpy: of ``numpy.random``, as its ``set_state`` takes it; None: not recorded.
        cpu: of torch on the CPU.
        cuda: of torch on some CUDA devices.
    """

    python: Any
    numpy: Any
    cpu: Tensor
    cuda: dict[torch.device, Tensor]

    @classmethod
    def now(cls, devices: Iterable[torch.device] = (), *, numpy: bool = True) -> "Generators":
        """Record the generators.

        Args:
            devices: beside the CPU's, those of the CUDA devices among these.
            numpy: also that of numpy, where it is imported: seven times the price of all others.
        """
        imported = sys.modules.get("numpy") if numpy else None
        return cls(
            random.getstate(),
            None if imported is None else imported.random.get_state(legacy=False),
            torch.get_rng_state(),
            {d: torch.cuda.get_rng_state(d) for d in devices if d.type == "cuda"},
        )

    def restore(self) -> None:
        """Put the generators back to these states; others stay as they are."""
        random.setstate(self.python)
        if self.numpy is not None:
            importlib.import_module("numpy").random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        for device, state in self.cuda.items():
            torch.cuda.set_rng_state(state, device)


class AmbientState(NamedTuple):
    """Random generators, grad mode and autocast, as they were in one thread at one moment.

    Attributes:
        generators: None: not recorded.
        grad: whether gradients are recorded.
        cache: whether autocast caches casts of weights.
        autocast: for each device type, whether autocast is on, and its dtype.
    """

    generators: Generators | None
    grad: bool
    cache: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]

    @classmethod
    def now(cls, generators: Generators | None = None) -> "AmbientState":
        """Record grad mode and autocast of this thread beside ``generators``."""
        return cls(
            generators,
            torch.is_grad_enabled(),
            torch.is_autocast_cache_enabled(),
            tuple(
                (t, torch.is_autocast_enabled(t), torch.get_autocast_dtype(t))
                for t in _DEVICE_TYPES
            ),
        )

    def restore(self) -> None:
        """Make everything that was recorded so again, in this thread."""
        if self.generators is not None:
            self.generators.restore()
        torch.set_grad_enabled(self.grad)
        torch.set_autocast_cache_enabled(self.cache)
        for device_type, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(device_type, enabled)
            torch.set_autocast_dtype(device_type, dtype)


@contextlib.contextmanager
def preserve(devices: Iterable[torch.device]) -> Iterator[None]:
    """Put generators (those of ``devices`` among them), grad mode and autocast back at the end."""
    before = AmbientState.now(Generators.now(devices))
    try:
        yield
    finally:
        before.restore()


def is_traced() -> bool:
    """Tell whether what runs here is not what it seems: functorch, tracing, or a dispatch mode."""
    # private (torch 2.11 to 2.15): nothing public asks for functorch's transforms or for modes
    functorch = torch._C._functorch.peek_interpreter_stack() is not None
    return functorch or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
