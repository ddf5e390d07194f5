"""The fixture ``fake_cuda``: a GPU in software. See README.md."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from gpuless import torch_cuda
from gpuless.gpu import Gpu, Record
from gpuless.interpreter import prepared_once
from gpuless.tensors import CUDA, CudaTensor, unwrap
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tritonamp.checkpoint import content
from tritonamp.kernels import _launch, _multi_tensor, device
from tritonamp.watched import ops


class FakeCuda(Gpu):
    """The GPU, as tests see it; whatever the project asks ``torch.cuda``, it answers."""

    @contextlib.contextmanager
    def watch(self, *kinds: str) -> Iterator[list[Record]]:
        """Yield a list that holds, after the block, what its code did of these kinds.

        Args:
            kinds: see ``Record``; by default "wait" and "pageable".
        """
        before, found = len(self.records), []
        yield found
        kinds = kinds or ("wait", "pageable")
        found += [record for record in self.records[before:] if record.kind in kinds]

    @contextlib.contextmanager
    def capture(self) -> Iterator[Any]:
        """Capture the work of the block in the graph that is yielded; ``replay`` does it."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            yield graph


class InterpretedKernel:
    """Stands where a compiled kernel would; Triton's interpreter runs it in main memory."""

    def __init__(self, gpu: Gpu, kernel: Any) -> None:
        self._gpu, self._kernel = gpu, kernel

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def run(*args: Any, stream: int) -> None:
            tensors = tuple(x for x in args if isinstance(x, Tensor))
            assert all(isinstance(x, CudaTensor) for x in tensors), "a kernel got a CPU tensor"
            inner, rest = unwrap(tensors), args[len(tensors) :]
            self._gpu.launches.append(self._kernel.__name__)
            self._gpu.observer.launched(self._kernel.__name__, tensors)
            self._gpu.use(self._kernel.__name__, writes=tensors)

            def work() -> None:
                # a GPU says nothing of infinities and NaN
                with _disable_current_modes(), np.errstate(all="ignore"):
                    _launch._interpret(self._kernel, grid, inner, rest)

            self._gpu.do(work)

        return run


@contextlib.contextmanager
def interpreted(gpu: FakeCuda) -> Iterator[None]:
    """Have Triton's interpreter run what is launched on the GPU."""

    def compile_(kernel: Any, grid: Any, args: Any, options: Any) -> InterpretedKernel:
        _launch._check_compiler(kernel)
        return InterpretedKernel(gpu, kernel)

    with (
        prepared_once(),
        mock.patch.object(_launch, "INTERPRETED", False),
        mock.patch.object(_multi_tensor, "INTERPRETED", False),
        mock.patch.object(device, "INTERPRETED", False),
        mock.patch.object(_launch, "_compile", compile_),
    ):
        yield


def empty_strided(shape: Any, strides: Any, dtype: torch.dtype) -> Tensor:
    """Allocate as torch's function of the same name does, which needs a real GPU."""
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


Kernels = Callable[[FakeCuda], contextlib.AbstractContextManager[None]]
"""What runs the kernels that are launched on a GPU."""


@contextlib.contextmanager
def in_software(kernels: Kernels = interpreted) -> Iterator[FakeCuda]:
    """Inside, torch has one GPU."""
    gpu = FakeCuda()
    with contextlib.ExitStack() as stack:
        is_wrapper = _launch._is_wrapper

        def is_really_wrapper(x: Tensor) -> bool:
            return not isinstance(x, CudaTensor) and is_wrapper(x)

        stack.enter_context(mock.patch.object(_launch, "_is_wrapper", is_really_wrapper))
        stack.enter_context(mock.patch.object(_launch, "_empty_strided_cuda", empty_strided))
        for module in (ops, content):  # which look for tensors that are just memory
            classes = module.TORCH_CLASSES | {CudaTensor}
            stack.enter_context(mock.patch.object(module, "TORCH_CLASSES", classes))
        stack.enter_context(mock.patch.object(_launch, "_compiled", {}))
        stack.enter_context(mock.patch.dict(device._answers, clear=True))
        stack.enter_context(torch_cuda.in_force(gpu))
        stack.enter_context(kernels(gpu))
        yield gpu
        gpu.arrive(gpu.position)


@contextlib.contextmanager
def without_float64(gpu: FakeCuda) -> Iterator[None]:
    """Inside, the GPU has no float64 and no kernels, as Apple's."""
    with (
        mock.patch.object(gpu, "has_float64", False),
        mock.patch.object(device, "capability", return_value=None),
        mock.patch.dict(device._answers, clear=True),
        mock.patch.dict(device._wide_dtypes, {CUDA: torch.float32}),
    ):
        yield
