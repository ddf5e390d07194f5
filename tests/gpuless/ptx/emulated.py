"""A driver instead of Triton's: what the product launches runs in the emulator.

    with emulated(arch=90) as gpu:
        softmax.softmax(x, -1, torch.float16, backend="triton")
    print(gpu.findings, gpu.launches[0].counters.instructions)

The product's own ``launch`` looks kernels up and has Triton compile them, as on a GPU, down to PTX.
Tensors are on the CPU, or on the GPU in software.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from gpuless.ptx.counters import Counters
from gpuless.ptx.findings import Findings
from gpuless.ptx.machine import Options, Program
from gpuless.ptx.memory import GlobalMemory, Region
from gpuless.ptx.regions import TrackedMemory, in_main_memory
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend

from tritonamp.kernels import _launch, device

CPU = torch.device("cpu")
SHARED_KIB = {70: 96, 75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""What a program may have of shared memory, by architecture."""
TAG = 1 << 48
"""Between the addresses of a launch's arguments: who leaves one of them meets no other."""


Submit = Callable[[str, Callable[[], None]], None]


def _now(name: str, work: Callable[[], None]) -> None:
    work()


class Launch(NamedTuple):
    """A launch that was emulated.

    Attributes:
        kernel: its name.
        grid: programs along x, y and z.
        arguments: by name.
        program: that ran.
        counters: what it executed.
        shared: bytes of shared memory of a program.
        share: of the grid's programs that ran.
        bytes: of the whole grid, by kind of request, see ``Counters.distinct_bytes``; only where
            accesses are counted.
    """

    kernel: str
    grid: tuple[int, int, int]
    arguments: dict[str, Any]
    program: Program
    counters: Counters
    shared: int
    share: float
    bytes: dict[str, float]


class Emulator:
    """An architecture, as a driver for Triton.

    Args:
        arch: like 90.
        options: how kernels run.
        submit: takes the kernel's name and the work of each launch, and does it, now or later.

    Attributes:
        launches: in order.
        findings: of all launches.
        memory: what kernels may touch.
        rewrite: what the PTX of newly loaded kernels is passed through, for tests.
    """

    def __init__(self, arch: int, options: Options, submit: Submit) -> None:
        self.arch, self.options, self._submit = arch, options, submit
        self.launches: list[Launch] = []
        self.findings, self.memory = Findings(), TrackedMemory()
        self.rewrite: Callable[[str], str] = str
        self.utils = SimpleNamespace(
            load_binary=self._load,
            unload_module=lambda module: None,
            get_device_properties=lambda _: {"max_shared_mem": SHARED_KIB[arch] << 10},
        )

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch  # Triton remembers by device what it has compiled

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_benchmarker(self) -> Callable[..., list[float]]:
        """Return what times nothing: autotuners take the first of their configurations."""
        return lambda call, quantiles=(), **_: [0.0] * max(len(quantiles), 1)

    def _load(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[Any, ...]:
        registers, spills, max_threads = 0, 0, 1024
        return None, Program(self.rewrite(kernel.decode())), registers, spills, max_threads

    @staticmethod
    def launcher_cls(source: Any, metadata: Any) -> Callable[..., None]:
        """Return what launches a compiled kernel; that may outlive the emulator it was made for."""

        def launch(x: int, y: int, z: int, stream: int, program: Program, *rest: Any) -> None:
            names = source.fn.arg_names
            args = rest[4:]  # after metadata and hooks
            left = names[len(args) :]  # Triton's own launcher looks at no constant, either
            if len(args) > len(names) or any(source.signature[n] != "constexpr" for n in left):
                raise TypeError(f"{len(args)} arguments for a kernel that takes {names}")
            given = dict(zip(names, [*args, *[None] * len(left)], strict=True))
            kinds = [source.signature[name] for name in names]
            _current[-1].launch(program, (x, y, z), given, kinds, metadata.shared)

        return launch

    def launch(
        self,
        program: Program,
        grid: tuple[int, int, int],
        arguments: dict[str, Any],
        kinds: Sequence[str],
        shared: int,
    ) -> None:
        """Run a kernel, or have it run.

        Args:
            program: to run.
            grid: of programs.
            arguments: by name, constants too.
            kinds: their types in Triton's words.
            shared: bytes of shared memory of a program.
        """
        values: list[Any] = []
        tensors: list[tuple[str, int, Tensor]] = []
        for (name, given), kind in zip(arguments.items(), kinds, strict=True):
            if not isinstance(given, Tensor) and hasattr(given, "data_ptr"):
                given = given._base  # FlagGems' views of tensors; here always of the whole
            if isinstance(given, Tensor):
                inner, tag = in_main_memory(given), (len(values) + 1) * TAG
                tensors.append((name, tag, inner))
                values.append(inner.data_ptr() + tag)
            elif kind != "constexpr":
                values.append(given)
        listed = self.memory.of_lists() if "*i64" in kinds else []  # tables are of that type

        def work() -> None:
            regions: list[Region] = [region for region, _ in listed]
            for name, tag, tensor in tensors:
                regions += self.memory.of_argument(tensor, name, tag)
            memory = GlobalMemory(regions, self.findings, self.options.races)
            counters = program.run(grid, values, memory, shared, self.options)
            total = grid[0] * grid[1] * grid[2]
            share = len(self.options.chosen(total)) / max(total, 1)
            ran = program, counters, shared, share, counters.distinct_bytes(regions, share)
            self.launches.append(Launch(program.kernel.name, grid, arguments, *ran))

        self._submit(program.kernel.name, work)


_current: list[Emulator] = []


@contextlib.contextmanager
def kept_as_ptx() -> Iterator[None]:
    """Have Triton compile down to PTX inside of the block; its cache keeps that apart."""

    def keep(self: CUDABackend, ptx: str, *rest: Any) -> bytes:
        return ptx.encode()

    with (
        mock.patch.object(CUDABackend, "make_cubin", keep),
        mock.patch.object(CUDABackend, "hash", return_value="emulated"),
    ):
        yield


@contextlib.contextmanager
def emulated(
    arch: int,
    options: Options | None = None,
    submit: Submit = _now,
) -> Iterator[Emulator]:
    """Have kernels run as emulated PTX inside of the block.

    Args:
        arch: like 90.
        options: how they run.
        submit: takes the kernel's name and the work of each launch, and does it, now or later.
    """
    if not isinstance(device._probe, triton.runtime.JITFunction):
        raise RuntimeError("TRITON_INTERPRET was set when the kernels were imported: unset it")
    emulator = Emulator(arch, options or Options(), submit)
    with contextlib.ExitStack() as stack:
        if triton.runtime.driver._active is None:
            # kernels that live on ask it to unload them in the end
            stack.callback(triton.runtime.driver.set_active, emulator)
        stack.enter_context(kept_as_ptx())
        stack.enter_context(mock.patch.object(triton.runtime.driver, "_active", emulator))
        stack.enter_context(mock.patch.object(_launch, "_compiled", {}))
        stack.enter_context(emulator.memory.in_force())
        _current.append(emulator)
        stack.callback(_current.pop)
        yield emulator


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Have kernels take tensors of the CPU inside of the block."""
    with (
        mock.patch.object(torch.cuda, "current_device", return_value=-1),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", return_value=0),
        # asked where a kernel cannot be loaded, of a driver that is not there
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False),
        mock.patch.dict(device._answers, {CPU: True}),
    ):
        yield
