"""Random generators, autocast and grad mode, recorded and restored around a piece of code."""

import contextlib
import importlib
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_DEVICE_TYPES = ("cpu", "cuda")


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
            [(t, torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in _DEVICE_TYPES]
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
    """Records the ambient state of each of many forwards, and reads seldom what does not change.

    Reading the generators of Python and of torch on the CPU takes longer than an empty forward. A
    generator that was the same at eight readings is read at every 32nd forward, until a reading
    finds that it has changed; then at each forward again. The first forward that draws from it is
    recorded right: the state before it is the one that was read. Up to 31 forwards after it are
    not, and draw other numbers if they run again. numpy's generator is not recorded: it takes seven
    times as long as all others. While autocast is off, changes of its dtypes are not recorded.
    """

    STILL = 8  # readings without a change, after which a generator is read seldom
    EVERY = 32  # forwards from one of these readings to the next

    def __init__(self) -> None:
        self._read: tuple[Callable[[], Any], ...] = (
            random.getstate,
            torch.default_generator.get_state,
        )
        self._states: list[Any] = [read() for read in self._read]
        self._still = [0, 0]
        self._waits = [0, 0]  # forwards until each is read again
        self._plain: AmbientState | None = None  # of these states, without autocast or a GPU

    def now(self, gpus: Sequence[torch.device]) -> AmbientState:
        """Return the record of this moment, with the generators of these CUDA devices."""
        for i in (0, 1):
            if self._waits[i]:
                self._waits[i] -= 1
            else:
                self._read_generator(i)
        # private (torch 2.11 to 2.15): of all device types at once
        is_plain = not gpus and not torch._C._is_any_autocast_enabled()
        if is_plain and self._plain is not None:
            return self._plain
        python, cpu = self._states
        cuda = {d: torch.cuda.get_rng_state(d) for d in gpus}
        state = AmbientState.now(Generators(python, None, cpu, cuda))
        if is_plain:
            self._plain = state
        return state

    def _read_generator(self, i: int) -> None:
        """Read one generator, and decide for how many forwards it is not read again."""
        before, state = self._states[i], self._read[i]()
        is_same = torch.equal(state, before) if isinstance(state, Tensor) else state == before
        self._still[i] = self._still[i] + 1 if is_same else 0
        self._waits[i] = self.EVERY - 1 if self._still[i] >= self.STILL else 0
        self._states[i], self._plain = state, None


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
    # private (torch 2.11 to 2.15): nothing public asks for functorch's transforms or for modes
    functorch = torch._C._functorch.peek_interpreter_stack() is not None
    return functorch or torch._C._len_torch_dispatch_stack() > 0
