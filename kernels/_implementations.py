"""The two implementations of an operation, and the choice between them."""

import contextlib
import functools
import importlib
import inspect
import pkgutil
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tritonamp.kernels._by_length import aligned, asked_backend, by_length, called_by_length, thread
from tritonamp.kernels._launch import KernelError, broken_compiler, has_torch_dispatch
from tritonamp.kernels._sample import ListSample, Sample
from tritonamp.kernels.device import runs_triton

MIN_NUMEL = 1 << 16
"""Number of elements below which ATen is faster, because its launch costs less host time."""


class Implementations:
    """A Triton kernel and its eager twin, which are interchangeable.

    Args:
        triton_function: launches the kernel.
        torch_function: the eager twin, with the same signature.
        samples: calls for the checks that hold for every operation. Without samples, checks do not
            see the operation.
        name: name of the operation; None: the twin is named "<operation>_torch".
    """

    def __init__(
        self,
        triton_function: Callable[..., Any],
        torch_function: Callable[..., Any],
        samples: Sequence[Sample | ListSample] = (),
        name: str | None = None,
    ) -> None:
        self.name = name or torch_function.__name__.removesuffix("_torch")
        self.triton_function, self.torch_function = triton_function, torch_function
        self.samples = tuple(samples)
        if samples:  # a part of another operation has none
            _operations[self.name] = self

    def uses_triton(self, backend: str, x: Tensor) -> bool:
        """Tell whether ``backend`` selects the kernel on the device of ``x``.

        Args:
            backend: "auto", "triton" or "eager".
            x: a tensor on the device of the operation.
        """
        return backend == "triton" or (
            backend == "auto" and runs_triton(x.device) and self.name not in failures
        )

    def run(self, backend: str, uses_triton: bool, *args: Any) -> Any:
        """Run the kernel or its eager twin.

        Args:
            backend: "auto", "triton" or "eager".
            uses_triton: the kernel runs, instead of the twin.
            args: arguments of both functions.

        Raises:
            KernelError: the kernel cannot be compiled and ``backend`` is "triton". Under "auto" a
                warning is given, and eager torch runs from then on.
        """
        if not uses_triton:
            return self.torch_function(*args)
        try:
            return self.triton_function(*args)
        except KernelError as error:
            if backend == "triton":
                raise
            # remembered, because a compilation that fails would take seconds in every call
            failures[self.name] = str(error)
            warnings.warn(
                f"{self.name} runs in eager torch from now on: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
            return self.torch_function(*args)


class TraceableOp(Implementations):
    """An operation on a tensor that tracers can record. It returns a tensor or a tuple of tensors.

    Args:
        triton_function: launches the kernel.
        torch_function: the eager twin, named "<operation>_torch", with the same signature.
        samples: calls for the checks that hold for every operation.
        left_to_inductor: torch.compile traces the eager twin, because Inductor's code moves no more
            bytes and fuses with its neighbours, which our kernel cannot do.
        prepared: takes the arguments of ``triton_function`` and returns a function that does the
            same work on tensors of the same layout.
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
        self.traceable = _traceable(self.name, triton_function, triton_function)
        self._twin_by_length = functools.partial(called_by_length, torch_function)
        kernel = functools.partial(called_by_length, triton_function)
        self._kernel_by_length = lambda *args: kernel(*map(aligned, args))
        self._traceable_by_length = _traceable(
            f"{self.name}_by_length", self._kernel_by_length, triton_function
        )

    def __call__(self, backend: str, x: Tensor, *args: Any) -> Any:
        """Run the operation; "auto" takes the kernel only if ``x`` is large enough to gain.

        Raises:
            KernelError: the kernel cannot be compiled and ``backend`` is "triton".
        """
        return self.chosen(backend, x)(x, *args)

    def chosen(self, backend: str, x: Tensor) -> Callable[..., Any]:
        """Return the function to call for ``x``, which is the eager twin or runs the kernel."""
        if backend == "eager":
            return self.torch_function
        asked = asked_backend(backend)
        if asked is not None:
            return self._chosen_by_length(asked, x)
        watched = torch.compiler.is_compiling() or has_torch_dispatch(x)
        if backend == "auto" and not self._gains(x, watched):
            return self.torch_function
        # A custom op only for tracers, because its dispatch costs 9 to 20 us in a call on the host.
        if watched:
            return self.traceable
        return self.triton_function if backend == "triton" else self._kernel_or_twin

    def is_traceable(self, compute: Callable[..., Any]) -> bool:
        """Tell whether ``compute``, from ``chosen``, is an operation that tracers record."""
        return compute in (self.traceable, self._traceable_by_length)

    def _chosen_by_length(self, asked: str, x: Tensor) -> Callable[..., Any]:
        """Return a function that gives lines of ``x`` the same bits in every batch.

        On a GPU the kernel runs at every size. It raises if it cannot be compiled, because sums
        of the twin depend on the number of lines there.
        """
        if asked == "eager" or (asked == "auto" and not x.is_cuda):
            # a scope is a side effect, with which Dynamo traces no autograd function
            return self.torch_function if _is_compiling() else self._twin_by_length
        if torch.compiler.is_compiling() or has_torch_dispatch(x):
            # DTensor and similar classes shard eager operations, and know no rule for a kernel
            is_sharded = is_traceable_wrapper_subclass(x)
            return self._twin_by_length if is_sharded else self._traceable_by_length
        return self._kernel_by_length

    def uses_triton(self, backend: str, x: Tensor) -> bool:
        """Tell whether a call on ``x`` runs the kernel."""
        return self.chosen(backend, x) not in (self.torch_function, self._twin_by_length)

    def prepare(self, backend: str, *args: Any) -> Callable[..., Any]:
        """Return the function of ``prepared``, with tiles by length if ``backend`` has them."""
        assert self.prepared is not None
        if asked_backend(backend) is None:
            return self.prepared(*args)
        with by_length():
            run = self.prepared(*args)
        return lambda *tensors: run(*map(aligned, tensors))

    def _gains(self, x: Tensor, watched: bool) -> bool:
        """Tell whether the kernel can run on the device of ``x`` and is faster there."""
        if x.numel() < MIN_NUMEL or not runs_triton(x.device) or self.name in failures:
            return False
        # DTensor and similar classes shard eager operations, and know no rule for a kernel
        return not watched or not (
            (self.left_to_inductor and _is_compiling()) or is_traceable_wrapper_subclass(x)
        )

    def _kernel_or_twin(self, *args: Any) -> Any:
        return self.run("auto", True, *args)


def line_sums(x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    """Return ``x.sum(dim, keepdim)``. Inside of ``by_length``, one line is summed up as in many.

    Outside, torch divides a single sum of more than 32768 elements on a CPU among threads, and adds
    up lines that are not contiguous in another order.
    """
    if not thread.inside or not x.dim():
        return x.sum(dim, keepdim)
    lines = x.movedim(dim, -1).contiguous()
    is_alone = lines.numel() == lines.shape[-1]
    sums = torch.stack([lines, lines]).sum(-1)[0] if is_alone else lines.sum(-1)
    return sums.unsqueeze(dim) if keepdim else sums


def _traceable(
    name: str, function: Callable[..., Any], described: Callable[..., Any]
) -> Callable[..., Any]:
    """Return the custom op of ``function``, with the signature of ``described``."""
    # triton_op searches a function's source for kernels, with a helper of Inductor that takes
    # seconds to import. A partial has no source. Nothing is lost, because ``Launch`` passes
    # kernels as arguments, where the search would miss them.
    partial: Any = functools.partial(function)
    partial.__signature__ = inspect.signature(described)
    partial.__globals__ = described.__globals__  # where the schema's types are looked up
    return torch.library.triton_op(f"tritonamp::{name}", partial, mutates_args=())


def _is_compiling() -> bool:
    """Tell whether torch.compile traces the running code."""
    # private (torch 2.11 to 2.15): in 2.11 the public function is False while AOTAutograd traces
    return torch.compiler.is_compiling() or torch._guards.TracingContext.try_get() is not None


_operations: dict[str, Implementations] = {}


def operations() -> dict[str, Implementations]:
    """Import all modules of kernels, and return the operations that have a kernel, by name."""
    package = __name__.rpartition(".")[0]
    for module in pkgutil.iter_modules(sys.modules[package].__path__):
        importlib.import_module(f"{package}.{module.name}")
    return dict(_operations)


failures: dict[str, str] = {}
"""Operations whose kernel could not be compiled in this process, and the reason. "auto" runs them
in eager torch.
"""


@contextlib.contextmanager
def compile_failure() -> Iterator[None]:
    """Make every compilation fail in the block, and restore the caches after it."""
    earlier = dict(failures)
    failures.clear()
    try:
        with broken_compiler():
            yield
    finally:
        failures.clear()
        failures.update(earlier)
