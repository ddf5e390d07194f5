"""Triton's own driver and launcher on the GPU in software: libcuda.c, and what it was asked for."""

import contextlib
import ctypes
import importlib.util
import os
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

from gpuless import driver

if TYPE_CHECKING:
    from gpuless.fake_cuda import FakeCuda

SOURCE = Path(__file__).with_name("libcuda.c")
TYPES = {"u64": ctypes.c_uint64, "u32": ctypes.c_int32, "f32": ctypes.c_float}
"""Of parameters, by their names in PTX: addresses and sizes beyond 2**31, sizes, numbers."""


class Launched(NamedTuple):
    """A launch, as libcuda was asked for it.

    Attributes:
        kernel: its name.
        grid, block: programs and threads along each axis.
        shared: bytes of shared memory of a program.
        stream: as torch names it.
        attributes: number of launch attributes, such as the size of a cluster.
        parameters: values at the addresses that the launcher passed, one for each parameter that
            the compiled kernel declares.
    """

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    stream: int
    attributes: int
    parameters: list[float]


class _Config(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = [
        ("grid", 3 * ctypes.c_uint),
        ("block", 3 * ctypes.c_uint),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("number_of_attributes", ctypes.c_uint),
    ]


_ON_LAUNCH = ctypes.CFUNCTYPE(
    None, ctypes.POINTER(_Config), ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
)


class Libcuda:
    """The libcuda of this process.

    Attributes:
        launches: in order.
        stream: the current one.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self.launches: list[Launched] = []
        self.stream = 0x5151
        self._library = library
        self._on_launch = _ON_LAUNCH(self._note)  # which C calls, so it must stay alive
        address = ctypes.cast(self._on_launch, ctypes.c_void_p)
        ctypes.c_void_p.in_dll(library, "on_launch").value = address.value

    @property
    def loads(self) -> int:
        """How many modules were loaded."""
        return ctypes.c_int.in_dll(self._library, "loads").value

    @contextlib.contextmanager
    def planted(self, **values: int) -> Iterator[None]:
        """Give variables of libcuda.c other values inside of the block."""
        variables = {name: ctypes.c_int.in_dll(self._library, name) for name in values}
        usual = {name: variable.value for name, variable in variables.items()}
        for name, variable in variables.items():
            variable.value = values[name]
        try:
            yield
        finally:
            for name, variable in variables.items():
                variable.value = usual[name]

    @contextlib.contextmanager
    def launching(self, gpu: "FakeCuda") -> Iterator[None]:
        """Have Triton launch kernels; ``gpuless.fake_cuda.in_software`` takes this."""
        import torch

        def current(device: int) -> int:
            return self.stream

        with mock.patch.object(torch._C, "_cuda_getCurrentRawStream", current):
            yield

    def _note(self, given: Any, function: int, parameters: Any) -> None:
        from tritonamp.kernels import _launch

        config = given.contents
        # Nothing says how many parameters there are. A GPU, too, goes by what the kernel declares
        (compiled,) = (c for c in _launch._compiled.values() if c.function == function)
        values = [
            TYPES[kind].from_address(parameters[i]).value
            for i, kind in enumerate(declared(compiled.asm["ptx"]))
        ]
        launched = Launched(
            ctypes.string_at(function).decode(),  # see cuModuleGetFunction
            tuple(config.grid),
            tuple(config.block),
            config.shared,
            config.stream or 0,
            config.number_of_attributes,
            values,
        )
        self.launches.append(launched)


def declared(ptx: str) -> list[str]:
    """Return the types of a kernel's parameters."""
    header = ptx[ptx.index(".entry") :].partition("{")[0]
    return re.findall(r"\.param\s+\.(\w+)", header)


def load() -> Libcuda:
    """Build libcuda and load it, before torch; Triton links its C modules against it, too."""
    # its folder is part of Triton's keys to these modules, so it is the same each time
    cache = os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache"
    folder = Path(cache) / "libcuda-of-tests"
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    os.environ.setdefault("CC", "cc")
    triton = importlib.util.find_spec("triton")
    assert triton is not None and triton.origin is not None
    headers = Path(triton.origin).parent / "backends" / "nvidia" / "include"
    library = driver.load_from(folder, str(SOURCE), f"-I{headers}")
    assert library is not None, "see obstacle()"
    return Libcuda(library)


def obstacle() -> str | None:
    """Return why a process cannot load this libcuda, or None."""
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        return "Triton compiles its launcher, which needs the headers of Python"
    return driver.obstacle()
