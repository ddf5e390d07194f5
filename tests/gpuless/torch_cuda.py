"""What ``torch.cuda`` says and does where there is one GPU, without a driver."""

import contextlib
import importlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from gpuless import driver, streams
from gpuless.gpu import Gpu
from gpuless.tensors import CudaTensor, FakeCudaMode, unwrap, wrap

CAPABILITY = (9, 0)
NAME = "Fake GPU"


def stream_classes(gpu: Gpu) -> dict[str, type]:
    """Return what stands in for the classes of ``torch.cuda`` of the same names."""

    class Stream(streams.Stream):
        def __init__(self, device: Any = None, priority: int = 0) -> None:
            super().__init__("another stream", gpu.waits_for)
            gpu.streams.add(self)

    class Event:
        def __init__(self, enable_timing: bool = False, *args: Any, **kwargs: Any) -> None:
            self._position = self._lag = 0
            self.clocks: streams.Clocks = {}

        def record(self, stream: Any = None) -> None:
            if gpu.graph is None:  # recorded during a capture it says nothing about the host
                self._position, self._lag = gpu.position, gpu.event_lag
                self.clocks = dict((stream or gpu.streams.current[-1]).clocks)

        def query(self) -> bool:
            gpu.note("query", "Event.query")
            if self._lag:
                self._lag -= 1
                return False
            gpu.arrive(self._position)
            streams.join(gpu.streams.host, self.clocks)
            return True

        def synchronize(self) -> None:
            gpu.waits_for("Event.synchronize", self.clocks)
            self._lag = 0

        def wait(self, stream: Any = None) -> None:
            (stream or gpu.streams.current[-1]).wait_event(self)

        def elapsed_time(self, end: Any) -> float:
            return 1.0

    class CUDAGraph:
        def __init__(self, keep_graph: bool = False) -> None:
            self._work: list[Any] = []

        def capture_begin(self, *args: Any, **kwargs: Any) -> None:
            gpu.graph = self._work = []

        def capture_end(self) -> None:
            gpu.graph = None

        def replay(self) -> None:
            for work in self._work:
                work()

        def reset(self) -> None:
            self._work = []

        def pool(self) -> tuple[int, int]:
            return 0, 0

    class graph(contextlib.AbstractContextManager):
        def __init__(self, cuda_graph: CUDAGraph, *args: Any, **kwargs: Any) -> None:
            self._graph = cuda_graph

        def __enter__(self) -> None:
            gpu.waits_for("torch.cuda.graph")
            self._graph.capture_begin()

        def __exit__(self, *exception: Any) -> None:
            self._graph.capture_end()

    class device(contextlib.nullcontext[None]):
        pass

    @contextlib.contextmanager
    def on_stream(stream: Any) -> Iterator[None]:
        gpu.streams.current.append(stream or gpu.streams.current[-1])
        try:
            yield
        finally:
            gpu.streams.current.pop()

    return {
        "device": device,
        "device_of": device,
        "stream": on_stream,
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": CUDAGraph,
        "graph": graph,
    }


def functions(gpu: Gpu) -> dict[str, Any]:
    """Return what stands in for the functions of ``torch.cuda`` of the same names."""
    properties = SimpleNamespace(
        name=NAME, major=CAPABILITY[0], minor=CAPABILITY[1], total_memory=80 << 30,
        multi_processor_count=132, L2_cache_size=50 << 20, warp_size=32,
        max_threads_per_multi_processor=2048, regs_per_multiprocessor=1 << 16,
    )  # fmt: skip
    return {
        "_lazy_init": lambda: None,
        "_initialized": True,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "current_stream": lambda device=None: gpu.streams.current[-1],
        "default_stream": lambda device=None: gpu.streams.default,
        "synchronize": lambda device=None: gpu.waits_for(
            "torch.cuda.synchronize", gpu.streams.clocks
        ),
        "is_current_stream_capturing": lambda: gpu.graph is not None,
        "set_sync_debug_mode": lambda mode: setattr(gpu, "raises_on_wait", mode in ("error", 2)),
        "get_sync_debug_mode": lambda: 2 * gpu.raises_on_wait,
        "get_device_capability": lambda device=None: CAPABILITY,
        "get_device_properties": lambda device=None: properties,
        "get_device_name": lambda device=None: NAME,
        "get_rng_state": lambda device=None: gpu.generator.get_state(),
        "get_rng_state_all": lambda: [gpu.generator.get_state()],
        "set_rng_state": lambda state, device=None: gpu.generator.set_state(state),
        "set_rng_state_all": lambda states: gpu.generator.set_state(states[0]),
        "manual_seed": lambda seed: gpu.generator.manual_seed(seed),
        "manual_seed_all": lambda seed: gpu.generator.manual_seed(seed),
        "is_bf16_supported": lambda including_emulation=True: True,
        "empty_cache": lambda: None,
        "mem_get_info": lambda device=None: (70 << 30, 80 << 30),
        "memory_allocated": lambda device=None: 1 << 20,
        "max_memory_allocated": lambda device=None: 1 << 20,
        "reset_peak_memory_stats": lambda device=None: None,
    }


def tensor(make: Any) -> Any:
    """Return what stands in for ``torch.tensor``, which copies past every dispatch mode."""

    def to_device(data: Any, *, device: Any = None, requires_grad: bool = False, **kwargs: Any):
        device = torch.get_default_device() if device is None else torch.device(device)
        if device.type != "cuda":
            return make(data, device=device, requires_grad=requires_grad, **kwargs)
        return make(data, device="cpu", **kwargs).to(device).requires_grad_(requires_grad)

    return to_device


def as_tensor(make: Any) -> Any:
    """Return what stands in for ``torch.as_tensor``, which copies past every dispatch mode, too."""

    def to_device(data: Any, dtype: Any = None, device: Any = None) -> Any:
        if isinstance(data, CudaTensor):
            return data.to(dtype=dtype, device=data.device if device is None else device)
        if device is None or torch.device(device).type != "cuda":
            return make(data, dtype=dtype, device=device)
        return make(data, dtype=dtype).to(device)

    return to_device


def load(from_file: Any) -> Any:
    """Return what stands in for ``torch.load``, which would take memory from the driver."""

    def to_device(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
        if not isinstance(map_location, str | torch.device):
            return from_file(f, map_location, **kwargs)
        restored_on = torch.device(map_location).type
        with mock.patch.object(CudaTensor, "restored_on", restored_on):
            loaded = from_file(f, "cpu", **kwargs)
        return wrap(loaded) if restored_on == "cuda" else loaded

    return to_device


@contextlib.contextmanager
def in_this_thread() -> Iterator[None]:
    """What torch keeps for each thread: where dispatch goes."""
    with FakeCudaMode():
        yield


def in_its_thread(run: Any) -> Any:
    """Return what stands in for ``Thread.run``."""

    def with_gpu(thread: threading.Thread) -> None:
        with in_this_thread():
            run(thread)

    return with_gpu


def attention_by_parts(gpu: Gpu) -> torch.library.Library:
    """Have attention computed by operations that the CPU has: CUDA's choice asks the driver."""
    library = torch.library.Library("aten", "IMPL")
    by_parts = torch.ops.aten._scaled_dot_product_attention_math

    def attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        with gpu.observer.attention(args, kwargs):
            return by_parts(*args, **kwargs)[0]

    for key in ("CUDA", "AutogradCUDA"):
        library.impl("scaled_dot_product_attention", attention, key)
    return library


@contextlib.contextmanager
def in_force(gpu: Gpu) -> Iterator[None]:
    """Inside, torch has one GPU: the one given."""
    importlib.import_module("torch._dynamo")  # a dispatch mode does; it must see torch as it is
    stack_length = torch._C._len_torch_dispatch_stack
    compatible = torch._has_compatible_shallow_copy_type

    def are_compatible(a: Any, b: Any) -> bool:
        return isinstance(a, CudaTensor) == isinstance(b, CudaTensor) and compatible(a, b)

    with contextlib.ExitStack() as stack:
        for name, value in (stream_classes(gpu) | functions(gpu)).items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        for name, value in {
            "_len_torch_dispatch_stack": lambda: stack_length() - 1,  # FakeCudaMode is the device
            "_cuda_getCurrentRawStream": lambda device: 0,
        }.items():
            stack.enter_context(mock.patch.object(torch._C, name, value))
        stack.enter_context(mock.patch.object(torch, "tensor", tensor(torch.tensor)))
        stack.enter_context(mock.patch.object(torch, "as_tensor", as_tensor(torch.as_tensor)))
        stack.enter_context(mock.patch.object(torch, "load", load(torch.load)))
        # called as a function of the class, too
        data_ptr = torch.Tensor.data_ptr
        stack.enter_context(
            mock.patch.object(torch.Tensor, "data_ptr", lambda x: data_ptr(unwrap(x)))
        )
        # the wrapper's type says where a tensor is
        stack.enter_context(
            mock.patch.object(torch, "_has_compatible_shallow_copy_type", are_compatible)
        )
        run = threading.Thread.run
        stack.enter_context(mock.patch.object(threading.Thread, "run", in_its_thread(run)))
        stack.enter_context(mock.patch.object(CudaTensor, "gpu", gpu, create=True))
        stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        stack.callback(attention_by_parts(gpu)._destroy)
        torch._C._ensureCUDADeviceGuardSet()
        driver.set_devices(driver.MAX_DEVICES)
        stack.callback(driver.set_devices, 0)
        stack.enter_context(in_this_thread())
        yield


driver.start_device_threads()  # before the first backward of the process
