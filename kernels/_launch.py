"""Launch of a kernel: find the compiled kernel or compile it, then start it."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey

# private (torch 2.11 to 2.15): Inductor allocates by these. They skip torch's dispatcher and take
# half of the time of ``new_empty_strided``.
from torch._C._dynamo.guards import (  # type: ignore[attr-defined]
    _empty_strided_cpu,
    _empty_strided_cuda,
)

from tritonamp.kernels.device import (
    AMD_WAVES,
    INTERPRETED,
    WARP_SIZE,
    amd_architecture,
    require_triton,
)


class Operand(IntEnum):
    """Placeholders in the launches of an update for tensors that each step passes."""

    GRAD_SCALE = 0
    FOUND_INF = 1


Room = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides and dtype of a tensor that a launch allocates."""


def run_again(launches: Sequence["Launch"], device: torch.device, *given: Tensor) -> None:
    """Run the kernels of several launches on one device, one after the other.

    A launch that has run on the device before starts the same kernel again.

    Args:
        launches: launches with fixed tensors, whose addresses have not changed.
        device: their device.
        given: tensors for the slots of each launch, by ``Operand``.
    """
    pointers, index = 0, -1 if device.index is None else device.index
    for tensor in given:
        pointers |= tensor.data_ptr()
    is_usual = not (INTERPRETED or pointers & 15 or torch._C._len_torch_dispatch_stack())
    if is_usual and torch.cuda.current_device() == index:
        # a current stream may change between calls, as under torch.cuda.stream, so it is never kept
        stream = torch._C._cuda_getCurrentRawStream(index)
        for launch in launches:
            kernels, run = launch._runs.get(index, _NOT_COMPILED)
            if kernels is not _compiled:
                launch(*given)
                continue
            arguments = launch._arguments.copy()
            for i, operand in launch._operands:
                arguments[i] = given[operand]
            run(*arguments, stream=stream)
    else:
        for launch in launches:
            launch(*given)


class KernelError(RuntimeError):
    """A kernel could not be compiled or loaded; nothing was launched."""


# Private (torch 2.11 to 2.15): the modes that record or simulate operations instead of running
# them. FakeTensorMode, make_fx, torch.export and AOTAutograd consist of them. Any other mode
# observes an operation and runs it.
_MODE = torch._C._TorchDispatchModeKey
_TRACERS = _MODE.FAKE, _MODE.PROXY, _MODE.FUNCTIONAL


def is_traced(x: Tensor) -> bool:
    """Tell whether a tracer records a kernel on ``x`` instead of running it."""
    # the length of the stack first: it is 0 in nearly every call, and costs one C call
    return (torch._C._len_torch_dispatch_stack() > 0 and _has_tracer()) or (
        type(x) is not Tensor and _is_wrapper(x)
    )


def has_torch_dispatch(x: Tensor) -> bool:
    """Tell whether a ``__torch_dispatch__``, of a mode or of a class, sees operations on ``x``."""
    return torch._C._len_torch_dispatch_stack() > 0 or (type(x) is not Tensor and _is_wrapper(x))


def _has_tracer() -> bool:
    return any(torch._C._get_dispatch_mode(kind) is not None for kind in _TRACERS)


def _is_wrapper(x: Tensor) -> bool:
    return torch._C._dispatch_keys(x).has(DispatchKey.Python)


@dataclass(slots=True, eq=False)
class Launch:
    """A launch of a kernel that can be repeated with other tensors.

    Compiled kernels are found by dtypes, alignment, sizes beyond 2**31 and constants, in less time
    than Triton's own launch takes. A repeated call reads little more than addresses.

    Args:
        kernel: a ``triton.jit`` function whose parameters are tensors, sizes and constants, in this
            order. The results come last among the tensors.
        grid: number of programs along each axis.
        sizes: arguments that the kernel marks as ``do_not_specialize``.
        constants: values of the ``tl.constexpr`` parameters.
        num_warps: warps of 32 threads; ``compile_options`` converts them for AMD.
        maxnreg: largest number of registers of a thread, or None for no limit.
        tensors: fixed arguments; an ``Operand`` marks a slot that each call fills. The first must
            be fixed. None: each call passes all tensors.
        results: rooms of tensors that each call allocates and returns.
    """

    kernel: Any
    grid: tuple[int, int, int]
    sizes: tuple[float, ...]
    constants: tuple[Any, ...]
    num_warps: int
    maxnreg: int | None = None
    tensors: tuple[Any, ...] | None = None
    results: tuple[Room, ...] = ()
    _operands: list[tuple[int, Operand]] = field(init=False)
    _rest: tuple[Any, ...] = field(init=False)  # arguments after the tensors
    _arguments: list[Any] = field(init=False)  # all arguments, with each ``Operand`` in its slot
    # by device and alignment: the start function, and the dictionary that the kernel was found
    # in, since broken_compiler() exchanges it
    _runs: dict[Any, tuple[Any, Any]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        tensors = self.tensors or ()
        self._operands = [(i, t) for i, t in enumerate(tensors) if isinstance(t, Operand)]
        self._rest = (*self.sizes, *self.constants)
        self._arguments = [*tensors, *self._rest]

    def __call__(self, *given: Tensor) -> Sequence[Tensor]:
        """Run the kernel on the tensors' device, on its current stream.

        Args:
            given: tensors for the slots, by ``Operand``, or all tensors except the results. A slot
                has one dtype in all calls.

        Returns:
            The results.

        Raises:
            KernelError: the kernel could not be compiled or loaded.
            UnsupportedDeviceError: kernels do not run on the device of the tensors.
        """
        tensors = given if self.tensors is None else self.all_tensors(given)
        first = tensors[0]
        # the condition of ``has_torch_dispatch``, written out to save a call
        watched = torch._C._len_torch_dispatch_stack() > 0 or (
            type(first) is not Tensor and _is_wrapper(first)
        )
        if INTERPRETED or (watched and is_traced(first)):
            return self._record_or_interpret(tensors)
        # One OR over the addresses settles alignment in the usual case, in which all are multiples
        # of 16, as those of results always are. Only other calls need a flag for each tensor.
        pointers = 0
        for tensor in given:
            pointers |= tensor.data_ptr()
        device = first.get_device()
        kind: Any = device
        if pointers & 15:
            kind = device, *[tensor.data_ptr() & 15 == 0 for tensor in given]
        kernels, run = self._runs.get(kind, _NOT_COMPILED)
        # -1 is the CPU; the check is skipped once a kernel for this kind is known
        if kernels is not _compiled and device < 0:
            require_triton(first.device)
        # Triton compiles for, and starts on, the current device, not the tensors'
        if device != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self(*given)
        results: Sequence[Tensor] = ()
        if self.results:
            # a mode that watches has to see the allocation
            results = allocate(first, self.results) if watched else _new(device, self.results)
            tensors = *tensors, *results
        if kernels is not _compiled:
            run = self._find(tensors)[self.grid]
            self._runs[kind] = _compiled, run
        # a current stream may change between calls, as under torch.cuda.stream, so it is never kept
        stream = torch._C._cuda_getCurrentRawStream(device)
        run(*tensors, *self._rest, stream=stream)
        return results

    def _record_or_interpret(self, tensors: tuple[Tensor, ...]) -> Sequence[Tensor]:
        """Do the work of a call in a tracer or in Triton's interpreter."""
        first = tensors[0]
        results = allocate(first, self.results)
        tensors = *tensors, *results
        if is_traced(first):
            kernel = torch.library.wrap_triton(self.kernel)[self.grid]
            kernel(*tensors, *self._rest, **self._options(first.device))
        else:
            _interpret(self.kernel, self.grid, tensors, self._rest)
        return results

    def prepare(self, *given: Tensor) -> None:
        """Compile the kernel for a call with these tensors without running it.

        Raises:
            KernelError: the kernel could not be compiled or loaded.
        """
        tensors = self.all_tensors(given)
        if INTERPRETED:
            _check_compiler(self.kernel)
        elif tensors[0].is_cuda and not is_traced(tensors[0]):
            with torch.cuda.device(tensors[0].device):
                self._find(tensors)

    @property
    def device(self) -> torch.device:
        """Device of the fixed tensors."""
        assert self.tensors is not None
        device: torch.device = self.tensors[0].device
        return device

    def all_tensors(self, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return all tensor arguments of a call that passes ``given``."""
        if self.tensors is None:
            return given
        if not self._operands:
            return self.tensors
        tensors = [*self.tensors]
        for i, operand in self._operands:
            tensors[i] = given[operand]
        return tuple(tensors)

    def _options(self, device: torch.device) -> dict[str, Any]:
        return compile_options(self.num_warps, self.maxnreg, amd_architecture(device))

    def _find(self, tensors: tuple[Tensor, ...]) -> Any:
        """Return the compiled kernel, found by everything that its compilation depends on."""
        device = tensors[0].get_device()
        # kernels are defined at module level and live as long as the process, so an id is unique
        key: list[Any] = [id(self.kernel), device, self.num_warps, self.maxnreg, self.constants]
        pointers = 0
        for tensor in tensors:
            key.append(tensor.dtype)
            pointers |= tensor.data_ptr()
        # As Triton specialises: an address by divisibility by 16, a size by whether 32 bits hold
        # it. In the usual case, aligned and small, the key stays short.
        if pointers & 15 or max(self.sizes, default=0) >= 1 << 31:
            key += [tensor.data_ptr() & 15 == 0 for tensor in tensors]
            key += [size >= 1 << 31 for size in self.sizes]
        compiled = _compiled.get(tuple(key))
        if compiled is None:
            args = *tensors, *self._rest
            options = self._options(tensors[0].device)
            compiled = _compiled[tuple(key)] = _compile(self.kernel, self.grid, args, options)
        return compiled


def allocate(first: Tensor, rooms: Iterable[Room]) -> list[Tensor]:
    """Return a new tensor for each room, on the device of ``first``."""
    return [first.new_empty_strided(shape, strides, dtype=dtype) for shape, strides, dtype in rooms]


def _new(device: int, rooms: tuple[Room, ...]) -> list[Tensor]:
    """Return a new tensor for each room, on the current device, which has the index ``device``."""
    empty = _empty_strided_cpu if device < 0 else _empty_strided_cuda
    results = []
    for room in rooms:  # a comprehension costs a frame in Python 3.11
        results.append(empty(*room))
    return results


def compile_options(
    num_warps: int, maxnreg: int | None = None, amd: str | None = None
) -> dict[str, Any]:
    """Return a kernel's compile options; torch 2.11's Inductor keeps ``num_warps`` alone.

    Args:
        num_warps: warps of 32 threads. A GPU with waves of 64 threads gets half as many.
        maxnreg: largest number of registers of a thread, or None. Ignored on AMD, whose compiler
            has no such option.
        amd: one of ``AMD_WAVES``, or None for an NVIDIA GPU.
    """
    if amd is not None:
        num_warps, maxnreg = max(num_warps * WARP_SIZE // AMD_WAVES.get(amd, WARP_SIZE), 1), None
    # fp_fusion is set explicitly because Triton 3.10 changes its default, and bits depend on it
    options = {"num_warps": num_warps, "enable_fp_fusion": True}
    return options if maxnreg is None else {**options, "maxnreg": maxnreg}


# compiled kernels by key; broken_compiler() exchanges the dictionary, so that none of them runs
_compiled: dict[tuple[Any, ...], Any] = {}
_NOT_COMPILED = None, None
_compiler_works = True


@contextlib.contextmanager
def broken_compiler() -> Iterator[None]:
    """Make every compilation fail in the block, and hide kernels that were compiled earlier."""
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

    bfloat16 tensors are replaced by FP32 ones, and torch rounds the results, because the
    interpreter truncates to bfloat16 and loses its subnormals.
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
        # An earlier kernel's error (an illegal address, a failed assertion) is reported by the next
        # call of the driver, such as this load, and by every call after it. If there is one, this
        # raises it as torch does elsewhere, because it says nothing about this kernel, and eager
        # torch could not continue either.
        torch.cuda.is_current_stream_capturing()
        raise KernelError(
            f"{kernel.__name__} cannot be compiled: {type(error).__name__}: {error}"
        ) from error
    return compiled
