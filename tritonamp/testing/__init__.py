"""Injected faults, for tests of a training loop's reaction to them.

tritonamp itself does not import this package: ``import tritonamp.testing``.
"""

import contextlib

from tritonamp.kernels import _implementations
from tritonamp.testing.faults import CAUSES as CAUSES
from tritonamp.testing.faults import KINDS as KINDS
from tritonamp.testing.faults import Fault as Fault
from tritonamp.testing.injector import FaultInjector as FaultInjector
from tritonamp.testing.injector import InjectedError as InjectedError


def compile_failure() -> contextlib.AbstractContextManager[None]:
    """Return a context in which no Triton kernel can be compiled, nor run if compiled earlier.

    Under ``backend="auto"`` each operation warns once, and runs in eager torch for the rest of the
    block; ``amp.stats()["kernel_failures"]`` lists the operations. ``backend="triton"`` raises.
    Nothing changes where kernels do not run (no NVIDIA GPU).
    """
    return _implementations.compile_failure()
