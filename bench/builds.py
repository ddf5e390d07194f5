"""Every launch of the calls that kernels ship, and its build for one architecture; needs no GPU."""

import contextlib
import importlib
import pkgutil
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import tritonamp.kernels
from tritonamp.kernels._launch import Launch, allocate, compile_options
from tritonamp.kernels.device import AMD_WAVES, WARP_SIZE

NVIDIA = 70, 75, 80, 86, 89, 90, 100, 120
FIRST_BF16 = 80
Arch = int | str
"""An architecture: a number of NVIDIA's, or a name of AMD's."""
ARCHITECTURES: tuple[Arch, ...] = (*NVIDIA, *AMD_WAVES)

TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}
TYPES |= {torch.int32: "i32", torch.int64: "i64", torch.bool: "i1"}


class FunctionName(NamedTuple):
    """Module and name of a jitted function, by which processes pass it on."""

    module: str
    name: str

    @classmethod
    def of(cls, function: Any) -> "FunctionName":
        """Return the name of a jitted function."""
        return cls(function.fn.__module__, function.__name__)

    def find(self) -> Any:
        """Return the function."""
        return getattr(importlib.import_module(self.module), self.name)


class Build(NamedTuple):
    """One launch of a shipped call, for one architecture.

    Attributes:
        call: name of the call.
        kernel: name of the kernel, with a number if the call launches the kernel again.
        function: name of the kernel.
        signature, constants: types and values by parameter of the kernel; a function is a
            ``FunctionName``.
        warps: number of warps of 32 threads.
        n: length of a line; 0 if the kernel has no such argument.
        max_registers, max_instructions, exp2, max_shared: bounds of ``Shipped``; exp2 counts all
            launches of the call.
    """

    arch: Arch
    call: str
    kernel: str
    function: FunctionName
    signature: dict[str, str]
    constants: dict[str, Any]
    n: int
    warps: int
    maxnreg: int | None
    max_registers: int
    max_instructions: float | None
    exp2: int
    max_shared: int | None

    @property
    def amd(self) -> str | None:
        """The architecture if it is AMD's, else None."""
        return self.arch if isinstance(self.arch, str) else None

    @property
    def target(self) -> str:
        """The architecture as text."""
        return self.amd or f"sm_{self.arch}"

    @property
    def wave(self) -> int:
        """Number of threads in a warp or wave."""
        return AMD_WAVES[self.amd] if self.amd else WARP_SIZE

    @property
    def options(self) -> dict[str, Any]:
        """The compile options of the launch."""
        return compile_options(self.warps, self.maxnreg, self.amd)

    @property
    def threads(self) -> int:
        return self.wave * self.options["num_warps"]

    @property
    def name(self) -> str:
        return f"{self.call}: {self.kernel}"

    @property
    def tile(self) -> int:
        """Number of elements in a program's tile."""
        return self.constants.get("ROWS", 1) * self.constants.get("BLOCK", 1)

    @property
    def moves_tensors(self) -> bool:
        """Whether memory bandwidth limits the kernel; other kernels handle a few numbers."""
        return "ALIGN" in self.constants or "VEC" in self.constants

    @property
    def widest(self) -> int:
        """Number of elements in the widest access."""
        return self.constants.get("VEC", 8)

    @property
    def has_blocks(self) -> bool:
        """Whether the masked tail is a tile, too, because a block of codes or bits is whole."""
        return self.constants.get("BLOCKS", 0) > 0

    @property
    def row_major(self) -> bool:
        return self.constants.get("ROW_MAJOR", True)

    @property
    def aligned(self) -> bool:
        """Whether lines start at multiples of a vector."""
        return self.widest >= 4

    @property
    def judged(self) -> bool:
        """Whether instructions per element are meaningful.

        They are for one whole, long line without masks and loops.
        """
        rows, block = self.constants.get("ROWS", 1), self.constants.get("BLOCK", 1)
        full = self.constants.get("ALIGN", block) == block
        return self.row_major and full and rows == 1 and block >= max(self.n, 1024)


def all_builds(ops: list[str] | None, archs: list[Arch], only: str) -> Iterator[Build]:
    """Yield the builds of kernel modules, for calls whose name matches the expression ``only``.

    A kernel that handles a few numbers belongs to many calls. It is built once, for the first call
    of all, whichever calls are asked for.
    """
    small = set()
    modules = sorted(module.name for module in pkgutil.iter_modules(tritonamp.kernels.__path__))
    asked = [name for name in modules if not ops or name in ops]
    for name in modules:  # also those before: the first call with a small kernel may be theirs
        if name > max(asked, default=""):
            return
        module = importlib.import_module(f"tritonamp.kernels.{name}")
        for arch in archs:
            for build, _ in module_launches(module, arch):
                is_first = (build.kernel, arch) not in small
                if not build.moves_tensors:
                    small.add((build.kernel, arch))
                fits = name in asked and re.search(only, build.call)
                if fits and (build.moves_tensors or is_first):
                    yield build


class Call(NamedTuple):
    """The arguments of a launch: grid, tensors (some on the meta device) and numbers."""

    grid: tuple[int, int, int]
    tensors: tuple[torch.Tensor, ...]
    sizes: tuple[float, ...]


def module_launches(module: Any, arch: Arch, only: str = "") -> Iterator[tuple[Build, Call]]:
    """Yield the launches of a module's shipped calls whose name matches ``only``."""
    for case in module.shipped() if hasattr(module, "shipped") else ():
        if not re.search(only, case.name):
            continue
        with recorded_launches() as launches:
            case.function(*case.args)
        times: Counter[str] = Counter()
        for launch, tensors in launches:
            if not _is_refused(launch, tensors, arch):
                times[launch.kernel.__name__] += 1
                number = times[launch.kernel.__name__]
                build = _build_of(arch, case, launch, tensors, number)
                yield build, Call(launch.grid, tensors, launch.sizes)


def _is_refused(launch: Launch, tensors: tuple[Tensor, ...], arch: Arch) -> bool:
    """Return whether a call raises on that architecture before it launches anything."""
    halves = tl.bfloat16 in launch.constants or any(t.dtype is torch.bfloat16 for t in tensors)
    return halves and isinstance(arch, int) and arch < FIRST_BF16


def _build_of(
    arch: Arch, case: Any, launch: Launch, tensors: tuple[Tensor, ...], number: int
) -> Build:
    """Return the build of a call's ``number``-th launch of a kernel."""
    kernel, sizes = launch.kernel, launch.sizes
    pointers = ["*" + TYPES[tensor.dtype] for tensor in tensors]
    numbers = [
        "fp32" if isinstance(size, float) else "i64" if size >= 1 << 31 else "i32" for size in sizes
    ]
    kinds = pointers + numbers + ["constexpr"] * len(launch.constants)
    constants = [FunctionName.of(c) if hasattr(c, "fn") else c for c in launch.constants]
    given = dict(zip(kernel.arg_names, (*tensors, *sizes, *constants), strict=True))
    return Build(
        arch=arch,
        call=case.name,
        kernel=f"{kernel.__name__} {number}" if number > 1 else kernel.__name__,
        function=FunctionName.of(kernel),
        signature=dict(zip(kernel.arg_names, kinds, strict=True)),
        constants={name: given[name] for name in kernel.arg_names[len(pointers + numbers) :]},
        n=given.get("n", 0),
        warps=launch.num_warps,
        maxnreg=launch.maxnreg,
        max_registers=case.max_registers,
        max_instructions=case.max_instructions,
        exp2=case.exp2,
        max_shared=case.max_shared,
    )


@contextlib.contextmanager
def recorded_launches() -> Iterator[list[tuple[Launch, tuple[Tensor, ...]]]]:
    """Yield a list of the launches in the block, with their tensors; no launch runs."""
    launches: list[tuple[Launch, tuple[Tensor, ...]]] = []

    def record(launch: Launch, *given: Tensor) -> tuple[Tensor, ...]:
        tensors = launch.all_tensors(given)
        results = allocate(tensors[0], launch.results)
        launches.append((launch, (*tensors, *results)))
        return results

    with mock.patch.object(Launch, "__call__", record):
        yield launches


def compiled(build: Build) -> Any:
    pointers = [i for i, kind in enumerate(build.signature.values()) if kind.startswith("*")]
    source = ASTSource(
        fn=build.function.find(),
        signature=build.signature,
        constexprs={
            name: value.find() if isinstance(value, FunctionName) else value
            for name, value in build.constants.items()
        },
        attrs={(i,): [["tt.divisibility", 16]] for i in pointers},
    )
    target = GPUTarget("hip" if build.amd else "cuda", build.arch, build.wave)
    return triton.compile(source, target=target, options=build.options)
