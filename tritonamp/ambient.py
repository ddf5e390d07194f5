"""Random generators, autocast and grad mode, recorded and restored around a piece of code."""

import contextlib
import importlib
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

device_types = ["cpu", "cuda"]
"""Device types of enabled models. ``casts.dispatch`` adds others at their first model."""

# private (torch 2.11 to 2.15): nothing public asks for functorch's transforms, or for autocast of
# any device type
_functorch = torch._C._functorch.peek_interpreter_stack
_any_autocast = torch._C._is_any_autocast_enabled


class Generators(NamedTuple):
    """States of the random number generators.

    Attributes:
        python: state of ``random``.
        numpy: state of ``numpy.random``, as its ``set_state`` takes it; None: not recorded.
        cpu: state of torch's generator on the CPU.
        cuda: states of torch's generators on some CUDA devices.
    """

    python: Any
    numpy: Any
    cpu: Tensor
    cuda: dict[torch.device, Tensor]

    @classmethod
    def now(cls, devices: Iterable[torch.device] = ()) -> "Generators":
        """Record the generators of the CPU, and of the CUDA devices among ``devices``."""
        numpy = sys.modules.get("numpy")
        return cls(
            random.getstate(),
            None if numpy is None else numpy.random.get_state(legacy=False),
            torch.get_rng_state(),
            {d: torch.cuda.get_rng_state(d) for d in devices if d.type == "cuda"},
        )

    def restore(self) -> None:
        """Put the recorded generators back to these states."""
        random.setstate(self.python)
        if self.numpy is not None:
            importlib.import_module("numpy").random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        for device, state in self.cuda.items():
            torch.cuda.set_rng_state(state, device)


class AmbientState(NamedTuple):
    """Random generators, grad mode and autocast of one thread at one moment.

    Attributes:
        generators: states of random generators; None: not recorded.
        grad: whether gradients are recorded.
        cache: whether autocast caches casts of weights.
        autocast: device type, whether autocast is on, and autocast's dtype, for each device type.
    """

    generators: Generators | None
    grad: bool
    cache: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]

    @classmethod
    def now(cls, generators: Generators | None = None) -> "AmbientState":
        """Record grad mode and autocast of this thread, together with ``generators``."""
        autocast = tuple(
            [(t, torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in device_types]
        )
        cache = torch.is_autocast_cache_enabled()
        return cls(generators, torch.is_grad_enabled(), cache, autocast)

    def restore(self) -> None:
        """Put everything that was recorded back, in this thread."""
        if self.generators is not None:
            self.generators.restore()
        torch.set_grad_enabled(self.grad)
        torch.set_autocast_cache_enabled(self.cache)
        for device_type, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(device_type, enabled)
            torch.set_autocast_dtype(device_type, dtype)


class AmbientWatch:
    """Records the ambient state of each of many forwards, but for numpy's generator.

    Reading a generator takes as long as an empty forward. Therefore generators are read at every
    32nd forward after eight readings without a change, until a reading finds one. The first forward
    that draws is still recorded right. Up to 31 forwards after that one are not, and draw other
    numbers if they run again. While autocast is off, changes of its dtypes are not recorded.

    Attributes:
        is_exact: whether the last record has generators of the CPU that were read for it.
    """

    STILL = 8  # readings without a change, after which generators are read seldom
    EVERY = 32  # forwards from one of these readings to the next

    def __init__(self) -> None:
        self._generators = self._read()
        self._plain: AmbientState | None = None  # with these, without autocast
        self._still = 0
        self._wait = 0  # forwards until the generators are read again
        self.is_exact = True

    def now(self, gpus: Sequence[torch.device]) -> AmbientState:
        """Return the record of this moment, with the generators of these CUDA devices."""
        self.is_exact = not self._wait
        if self._wait:
            self._wait -= 1
        else:
            self._read_again()
        generators = self._generators
        if gpus:
            generators = generators._replace(cuda={d: torch.cuda.get_rng_state(d) for d in gpus})
        if _any_autocast():
            return AmbientState.now(generators)
        if self._plain is None:
            self._plain = AmbientState.now(self._generators)
        return self._plain._replace(generators=generators) if gpus else self._plain

    @staticmethod
    def _read() -> Generators:
        return Generators(random.getstate(), None, torch.get_rng_state(), {})

    def _read_again(self) -> None:
        before, self._generators = self._generators, self._read()
        same = self._generators.python == before.python
        same = same and torch.equal(self._generators.cpu, before.cpu)
        self._still = self._still + 1 if same else 0
        self._wait = self.EVERY - 1 if self._still >= self.STILL else 0
        self._plain = None


@contextlib.contextmanager
def preserve(devices: Iterable[torch.device]) -> Iterator[None]:
    """Restore generators, grad mode and autocast at the end of the block.

    Args:
        devices: devices whose generators are restored in addition to the CPU's.
    """
    before = AmbientState.now(Generators.now(devices))
    try:
        yield
    finally:
        before.restore()


def is_traced() -> bool:
    """Tell whether functorch or a dispatch mode is active: ops may not run as they are called.

    That includes all tracing except torch.compile's, which ``torch.compiler.is_compiling`` reports.
    """
    # private, as above
    return _functorch() is not None or torch._C._len_torch_dispatch_stack() > 0
