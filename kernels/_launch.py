"""Launching a kernel: look it up, compile it if it is new, start it."""

import contextlib
from collections.abc import Iterator
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey

from tritonamp.kernels.device import (
    AMD_WAVES,
    INTERPRETED,
    WARP_SIZE,
    amd_architecture,
    require_triton,
)


class Operand(IntEnum):
    """Placeholders for the tensors that change in every step, in the launches of an update."""

    GRAD_SCALE = 0
    FOUND_INF = 1


class KernelError(RuntimeError):
    """A kernel could not be compiled or loaded; nothing was launched."""


# private (torch 2.11 to 2.15): the modes that record or simulate operations in the place of running
# them, which torch keeps apart from all others. FakeTensorMode, make_fx, torch.export and
# AOTAutograd are made of these; any other mode looks on, and runs what it sees
_MODE = torch._C._TorchDispatchModeKey
_TRACERS = _MODE.FAKE, _MODE.PROXY, _MODE.FUNCTIONAL


def is_traced(x: Tensor) -> bool:
    """Tell whether a kernel on ``x`` is to be recorded, as by a tracer, instead of run."""
    return (torch._C._len_torch_dispatch_stack() > 0 and _has_tracer()) or (
        type(x) is not Tensor and _is_wrapper(x)
    )


def has_torch_dispatch(x: Tensor) -> bool:
    """Tell whether a ``__torch_dispatch__`` sees operations on ``x``: of any mode, or its class."""
    return torch._C._len_torch_dispatch_stack() > 0 or (type(x) is not Tensor and _is_wrapper(x))


def _has_tracer() -> bool:
    return any(torch._C._get_dispatch_mode(kind) is not None for kind in _TRACERS)


def _is_wrapper(x: Tensor) -> bool:
    return torch._C._dispatch_keys(x).has(DispatchKey.Python)


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    tensors: tuple[Tensor, ...],
    sizes: tuple[float, ...],
    constants: tuple[Any, ...],
    num_warps: int,
    maxnreg: int | None = None,
) -> Any:
    """Run ``kernel(*tensors, *sizes, *constants)`` on the tensors' device, on the current stream.

    ``sizes`` are to be marked ``do_not_specialize``, ``constants`` are ``tl.constexpr``: a compiled
    kernel is looked up by types, the pointers' alignment and the constants, in less time than
    Triton's own launch takes. ``num_warps`` counts warps of 32 threads, ``maxnreg`` is
    the most registers that a thread may take: see ``compile_options``.

    Returns:
        the compiled kernel; None where there is none: a tracer looks on, or Triton interprets.

    Raises:
        KernelError: it could not be compiled or loaded.
        UnsupportedDeviceError: the tensors are where kernels do not run.
    """
    if is_traced(tensors[0]):
        options = compile_options(num_warps, maxnreg, amd_architecture(tensors[0].device))
        torch.library.wrap_triton(kernel)[grid](*tensors, *sizes, *constants, **options)
        return None
    if INTERPRETED:
        _interpret(kernel, grid, tensors, (*sizes, *constants))
        return None
    device = tensors[0].get_device()
    if device < 0:
        require_triton(tensors[0].device)
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(kernel, grid, tensors, sizes, constants, num_warps, maxnreg)
    compiled = _find(kernel, grid, tensors, sizes, constants, num_warps, maxnreg)
    compiled[grid](*tensors, *sizes, *constants, stream=torch._C._cuda_getCurrentRawStream(device))
    return compiled


class Launch:
    """A repeated launch: each call gives the tensors that change, if any.

    A call reads little more than their addresses: compiled kernels are remembered by alignment.

    Args:
        kernel: the kernel; it and the next arguments are those of ``launch``.
        tensors: the tensors of all calls, of which the first is fixed; an ``Operand`` stands for a
            tensor that each call gives. None: a call gives all.
    """

    __slots__ = (
        *("_operands", "_runs", "_tensors"),
        *("constants", "grid", "kernel", "maxnreg", "num_warps", "sizes"),
    )

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        sizes: tuple[float, ...],
        constants: tuple[Any, ...],
        num_warps: int,
        maxnreg: int | None = None,
        tensors: tuple[Any, ...] | None = None,
    ) -> None:
        self.kernel = kernel
        self.grid = grid
        self.sizes = sizes
        self.constants = constants
        self.num_warps = num_warps
        self.maxnreg = maxnreg
        self._tensors = tensors
        self._operands = [(i, t) for i, t in enumerate(tensors or ()) if isinstance(t, Operand)]
        # by device and alignment: the cache that the kernel was found in, and its start function
        self._runs: dict[Any, tuple[Any, Any]] = {}

    def __call__(self, *given: Tensor) -> None:
        """Run the kernel, see ``launch``.

        Args:
            given: the tensors that change, of the same dtypes in every call; ``Operand`` says which
                is which.
        """
        tensors = given if self._tensors is None else self._filled(given)
        if INTERPRETED or is_traced(tensors[0]):
            launch(*self._call(tensors))
            return
        pointers = 0
        for tensor in given:
            pointers |= tensor.data_ptr()
        device = tensors[0].get_device()
        kind: Any = device
        if pointers & 15:
            kind = device, *[tensor.data_ptr() & 15 == 0 for tensor in given]
        kernels, run = self._runs.get(kind, _NOT_COMPILED)
        if kernels is not _compiled or device != torch.cuda.current_device():
            self._runs[kind] = _compiled, launch(*self._call(tensors))[self.grid]
            return
        stream = torch._C._cuda_getCurrentRawStream(device)
        run(*tensors, *self.sizes, *self.constants, stream=stream)

    def prepare(self, *given: Tensor) -> None:
        """Compile the kernel of a call with these tensors, and run nothing.

        Raises:
            KernelError: it could not be compiled or loaded.
        """
        tensors = given if self._tensors is None else self._filled(given)
        if INTERPRETED:
            _check_compiler(self.kernel)
        elif tensors[0].is_cuda and not is_traced(tensors[0]):
            with torch.cuda.device(tensors[0].device):
                _find(*self._call(tensors))

    @property
    def device(self) -> torch.device:
        """The device of the fixed tensors."""
        assert self._tensors is not None
        device: torch.device = self._tensors[0].device
        return device

    def _filled(self, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return all tensors."""
        tensors = [*self._tensors]  # type: ignore[misc]
        for i, operand in self._operands:
            tensors[i] = given[operand]
        return tuple(tensors)

    def arguments(self, *given: Tensor) -> tuple[Any, ...]:
        """Return the arguments of ``launch`` for a call with these tensors."""
        return self._call(given if self._tensors is None else self._filled(given))

    def _call(self, tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
        rest = self.sizes, self.constants, self.num_warps, self.maxnreg
        return self.kernel, self.grid, tensors, *rest


def _find(
    kernel: Any,
    grid: tuple[int, int, int],
    tensors: tuple[Tensor, ...],
    sizes: tuple[float, ...],
    constants: tuple[Any, ...],
    num_warps: int,
    maxnreg: int | None = None,
) -> Any:
    """Return the compiled kernel, looked up by every input of its compilation."""
    key: list[Any] = [id(kernel), tensors[0].get_device(), num_warps, maxnreg, constants]
    pointers = 0
    for tensor in tensors:
        key.append(tensor.dtype)
        pointers |= tensor.data_ptr()
    if pointers & 15 or max(sizes, default=0) >= 1 << 31:
        key += [
            *[tensor.data_ptr() & 15 == 0 for tensor in tensors],
            *[size >= 1 << 31 for size in sizes],
        ]
    compiled = _compiled.get(tuple(key))
    if compiled is None:
        options = compile_options(num_warps, maxnreg, amd_architecture(tensors[0].device))
        args = *tensors, *sizes, *constants
        compiled = _compiled[tuple(key)] = _compile(kernel, grid, args, options)
    return compiled


def compile_options(
    num_warps: int, maxnreg: int | None = None, amd: str | None = None
) -> dict[str, Any]:
    """Return a kernel's compile options; torch 2.11's Inductor keeps ``num_warps`` alone.

    Args:
        num_warps: warps of 32 threads; where waves have 64, half as many of these hold the threads.
        maxnreg: the most registers that a thread may take. AMD's compiler knows no such option.
        amd: one of ``AMD_WAVES``; None: an NVIDIA GPU.
    """
    if amd is not None:
        num_warps, maxnreg = max(num_warps * WARP_SIZE // AMD_WAVES.get(amd, WARP_SIZE), 1), None
    options = {"num_warps": num_warps, "enable_fp_fusion": True}
    return options if maxnreg is None else {**options, "maxnreg": maxnreg}


_compiled: dict[tuple[Any, ...], Any] = {}  # a new one where those in it are to run no more
_NOT_COMPILED = None, None
_compiler_works = True


@contextlib.contextmanager
def broken_compiler() -> Iterator[None]:
    """Refuse to compile a kernel inside of the block, or to run one from an earlier compilation."""
    global _compiled, _compiler_works
    earlier, _compiled = _compiled, {}
    _compiler_works = False
    try:
        yield
    finally:
        _compiler_works = True
        _compiled = earlier


def _check_compiler(kernel: Any) -> None:
    if not _compiler_works:
        raise KernelError(f"{kernel.__name__} cannot be compiled: broken_compiler() is in force")


def _interpret(
    kernel: Any, grid: tuple[int, int, int], tensors: tuple[Tensor, ...], rest: tuple[Any, ...]
) -> None:
    """Run ``kernel`` in Triton's interpreter.

    That truncates to bfloat16 and loses its subnormals: FP32 stands in, and torch rounds.
    """
    _check_compiler(kernel)
    stand_ins = [tensor.float() if tensor.dtype is torch.bfloat16 else tensor for tensor in tensors]
    kernel[grid](*stand_ins, *rest)
    for tensor, stand_in in zip(tensors, stand_ins, strict=True):
        if stand_in is not tensor:
            tensor.copy_(stand_in)


def _compile(
    kernel: Any, grid: tuple[int, int, int], args: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    _check_compiler(kernel)
    try:
        compiled = kernel.warmup(*args, grid=grid, **options)
        compiled[grid]  # loads it onto the device, also where that failed before
    # a compiler can fail in any way: no C compiler, no ptxas for this GPU, a bug
    except Exception as error:
        # An earlier kernel's error (an illegal address, a failed assertion) comes up at whatever
        # asks the driver next, as loading does, and at everything after it. If there is one, this
        # raises it as torch does everywhere: it says nothing about this kernel, and eager torch
        # could not go on either.
        torch.cuda.is_current_stream_capturing()
        raise KernelError(
            f"{kernel.__name__} cannot be compiled: {type(error).__name__}: {error}"
        ) from error
    return compiled
