"""Runs the Triton source that ``torch.compile`` would run on a GPU, on the GPU in software.

    with without_gpu(arch=90):
        softmax = torch.compile(torch.nn.functional.softmax)  # replaced; without dynamo
        y = softmax(x, -1)  # on the GPU in software

Functions are traced on fake tensors and passed to Inductor, and this file answers Inductor's
queries about the device. Inductor's code runs unchanged. Triton's launcher replaces Inductor's, and
takes the first configuration that Inductor would time. Uses private names of torch 2.14.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._inductor.compile_fx as compile_fx
import torch._inductor.config
from gpuless.tensors import CudaTensor, unwrap, wrap
from torch import Tensor
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.fx_passes import joint_graph
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

GUARDS = torch._C._dynamo.guards


def compile_(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
    """Replace ``torch.compile``; compile at the first call, for its shapes."""
    made: list[Callable[..., Any]] = []

    def call(*args: Any) -> Any:
        leaves, spec = tree_flatten(args)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        if not made:
            made.append(_compiled(function, leaves, places, spec))
        return made[0](*(leaves[i] for i in places))

    return call


def _compiled(
    function: Callable[..., Any], leaves: Sequence[Any], places: Sequence[int], spec: Any
) -> Callable[..., Any]:
    """Return Inductor's code for ``function`` as a function of the tensors alone."""
    given: list[Any] = [leaves[i] for i in places]
    structure: list[Any] = []

    def flat(*tensors: Tensor) -> list[Any]:
        filled = list(leaves)
        for i, tensor in zip(places, tensors, strict=True):
            filled[i] = tensor
        results, of_results = tree_flatten(function(*tree_unflatten(filled, spec)))
        structure[:] = [of_results]
        return list(results)

    with _disable_current_modes():
        mode = FakeTensorMode()
        with mode:
            fakes = [
                torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="cuda:0")
                for x in given
            ]
            graph = make_fx(flat)(*fakes)
            fakes = [
                fake.requires_grad_(x.requires_grad) for fake, x in zip(fakes, given, strict=True)
            ]
        run = compile_fx.compile_fx(graph, fakes)

    def call(*tensors: Tensor) -> Any:
        return tree_unflatten(list(run(*tensors)), structure[0])

    return call


def _launch(self: CachingAutotuner, *args: Any, stream: Any, **_: Any) -> None:
    """Replace ``CachingAutotuner.run``; take the first configuration, without timing."""
    config = self.configs[0]
    args, grid = self._interpret_args_grid(args, config)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    self.fn[grid](*args, **config.kwargs, **options)


def _empty_strided(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda:0")


def _reinterpret(x: Tensor, size: Any, stride: Any, offset: int) -> Tensor:
    inner = unwrap(x)
    return wrap(torch.as_strided(inner, size, stride, inner.storage_offset() + offset))


def _itself(x: Tensor, *_: Any) -> Tensor:
    return x


def _properties(arch: int, processors: int) -> SimpleNamespace:
    return SimpleNamespace(
        name="GPU in software", major=arch // 10, minor=arch % 10, warp_size=32,
        multi_processor_count=processors, regs_per_multiprocessor=1 << 16,
        max_threads_per_multi_processor=1024 if arch == 75 else 1536 if arch in (86, 89) else 2048,
        max_threads_per_block=1024, total_memory=80 << 30, L2_cache_size=50 << 20,
        shared_memory_per_block_optin=64 << 10 if arch == 75 else 99 << 10,
    )  # fmt: skip


@contextlib.contextmanager
def without_gpu(arch: int, processors: int = 132) -> Iterator[None]:
    """Make ``torch.compile`` run on the GPU in software inside the block.

    Args:
        arch: architecture that Inductor writes for, like 90.
        processors: number of multiprocessors, over which Inductor splits reductions.
    """
    properties = _properties(arch, processors)
    answers: dict[str, Any] = {
        "get_device_properties": properties,
        "current_device": 0,
        "device_count": 1,
        "is_available": True,
        "get_compute_capability": arch,
        "is_triton_capable": True,
        "raise_if_triton_unavailable": None,
        "get_raw_stream": 0,
        "synchronize": None,
    }
    workers = dict(itertools.islice(answers.items(), 2))
    with contextlib.ExitStack() as stack:
        for owner, methods in ((CudaInterface, answers), (CudaInterface.Worker, workers)):
            for name, answer in methods.items():
                stack.enter_context(mock.patch.object(owner, name, _returning(answer)))
        for owner, name, value in (
            (torch, "compile", compile_),
            (torch.cuda, "_DeviceGuard", lambda _: contextlib.nullcontext()),
            (joint_graph, "lazy_init", lambda *_, **__: None),  # patterns of attention
            (triton_helpers, "set_driver_to_gpu", lambda: None),
            (CachingAutotuner, "precompile", lambda *_, **__: None),
            (CachingAutotuner, "run", _launch),
            (GUARDS, "_empty_strided_cuda", _empty_strided),
            (GUARDS, "_reinterpret_tensor", _reinterpret),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        # a backward calls it on gradients of another class than the traced ones
        same = mock.patch.object(
            CudaTensor, "__coerce_same_metadata_as_tangent__", _itself, create=True
        )
        stack.enter_context(same)
        # folding computes constants on the device
        settings = {"compile_threads": 1, "fx_graph_cache": False}
        settings["joint_graph_constant_folding"] = False
        stack.enter_context(torch._inductor.config.patch(settings))
        yield


def _returning(answer: Any) -> Any:
    return staticmethod(lambda *_, **__: answer)
