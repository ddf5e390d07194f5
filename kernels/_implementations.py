"""An operation's two implementations, and the choice between them."""

import contextlib
import functools
import importlib
import pkgutil
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tritonamp.kernels._launch import KernelError, broken_compiler, has_torch_dispatch
from tritonamp.kernels._sample import ListSample, Sample
from tritonamp.kernels.device import runs_triton

MIN_NUMEL = 1 << 16
"""Elements below which ATen is faster: its launch is cheaper by more than a kernel saves."""


class Implementations:
    """An operation's kernel and its eager twin, each of which can stand in for the other.

    Attributes:
        samples: calls for the checks that hold for every operation.
    """

    def __init__(
        self,
        triton_function: Callable[..., Any],
        torch_function: Callable[..., Any],
        samples: Sequence[Sample | ListSample] = (),
    ) -> None:
        self.name = torch_function.__name__.removesuffix("_torch")
        self.triton_function, self.torch_function = triton_function, torch_function
        self.samples = tuple(samples)
        _operations[self.name] = self

    def uses_triton(self, backend: str, x: Tensor) -> bool:
        """Tell whether ``backend`` means the kernel where ``x`` is.

        Args:
            backend: "auto", "triton" or "eager".
            x: the tensor that the operation works on.
        """
        return backend == "triton" or (
            backend == "auto" and runs_triton(x.device) and self.name not in failures
        )

    def run(self, backend: str, uses_triton: bool, *args: Any) -> Any:
        """Run the kernel, or its eager twin.

        Raises:
            KernelError: the kernel cannot be compiled; under "auto" a warning instead, and eager
                torch from then on.
        """
        if not uses_triton:
            return self.torch_function(*args)
        try:
            return self.triton_function(*args)
        except KernelError as error:
            if backend == "triton":
                raise
            failures[self.name] = str(error)
            warnings.warn(
                f"{self.name} runs in eager torch from now on: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
            return self.torch_function(*args)


class TraceableOp(Implementations):
    """An operation on a tensor that tracers can follow; it returns one, or a tuple.

    Attributes:
        left_to_inductor: torch.compile gets the eager twin: Inductor's code moves no more bytes,
            and fuses with its neighbours, as a kernel of ours cannot.
        prepared: a function with the arguments of ``triton_function``; it returns the same work
            prepared for tensors that lie in memory like these.
    """

    samples: tuple[Sample, ...]

    def __init__(
        self,
        triton_function: Callable[..., Tensor | tuple[Tensor, ...]],
        torch_function: Callable[..., Tensor | tuple[Tensor, ...]],
        samples: Sequence[Sample] = (),
        *,
        left_to_inductor: bool = False,
        prepared: Callable[..., Callable[..., Any]] | None = None,
    ) -> None:
        super().__init__(triton_function, torch_function, samples)
        self.left_to_inductor = left_to_inductor
        self.prepared = prepared
        # A partial has no source code: triton_op would look for kernels in it (in vain: ``launch``
        # gets them as arguments) with a helper of inductor's, which takes seconds to import.
        function: Any = functools.partial(triton_function)
        function.__globals__ = triton_function.__globals__  # where the schema's types are looked up
        self.traceable = torch.library.triton_op(
            f"tritonamp::{self.name}", function, mutates_args=()
        )

    def __call__(self, backend: str, x: Tensor, *args: Any) -> Any:
        """Run the operation; "auto" takes the kernel only where ``x`` is large enough to gain.

        Raises:
            KernelError: see ``run``.
        """
        return self.chosen(backend, x)(x, *args)

    def chosen(self, backend: str, x: Tensor) -> Callable[..., Any]:
        """Return the function to call for ``x``: the eager twin, or one that runs the kernel."""
        if backend == "eager":
            return self.torch_function
        watched = torch.compiler.is_compiling() or has_torch_dispatch(x)
        if backend == "auto" and not self._gains(x, watched):
            return self.torch_function
        if watched:
            return self.traceable
        return self.triton_function if backend == "triton" else self._kernel_or_twin

    def uses_triton(self, backend: str, x: Tensor) -> bool:
        """Tell whether a call on ``x`` runs the kernel."""
        return self.chosen(backend, x) is not self.torch_function

    def _gains(self, x: Tensor, watched: bool) -> bool:
        """Tell whether the kernel runs where ``x`` is, and is worth it."""
        if x.numel() < MIN_NUMEL or not runs_triton(x.device) or self.name in failures:
            return False
        # DTensor and its like shard eager operations
        return not watched or not (
            (self.left_to_inductor and _is_compiling()) or is_traceable_wrapper_subclass(x)
        )

    def _kernel_or_twin(self, *args: Any) -> Any:
        return self.run("auto", True, *args)


def _is_compiling() -> bool:
    """Tell whether torch.compile traces the running code."""
    # private (torch 2.11 to 2.15): while AOTAutograd traces, the public name is False in 2.11
    return torch.compiler.is_compiling() or torch._guards.TracingContext.try_get() is not None


_operations: dict[str, Implementations] = {}


def operations() -> dict[str, Implementations]:
    """Import all modules of kernels, and return the operations with a kernel by name."""
    package = __name__.rpartition(".")[0]
    for module in pkgutil.iter_modules(sys.modules[package].__path__):
        importlib.import_module(f"{package}.{module.name}")
    return dict(_operations)


failures: dict[str, str] = {}
"""Operations whose kernel could not be compiled here, and why: "auto" runs them in eager torch."""


@contextlib.contextmanager
def compile_failure() -> Iterator[None]:
    """Make every compilation fail inside of the block, and restore the caches after it."""
    earlier = dict(failures)
    failures.clear()
    try:
        with broken_compiler():
            yield
    finally:
        failures.clear()
        failures.update(earlier)
