"""A kernel is looked up, compiled where it is new, and started."""

import contextlib
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey

from tritonamp.kernels.device import INTERPRETED, require_triton


class Operand(IntEnum):
    """What is another tensor in each step, in the launches of an update."""

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
    """Tell whether a kernel on ``x`` is to be recorded, as by a tracer, in the place of run."""
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
    Triton's own launch takes. ``maxnreg`` is the most registers that a thread may take.

    Returns:
        the compiled kernel; None where there is none: a tracer looks on, or Triton interprets.

    Raises:
        KernelError: it could not be compiled or loaded.
        UnsupportedDeviceError: the tensors are where kernels do not run.
    """
    if is_traced(tensors[0]):
        options = _options(num_warps, maxnreg)
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
    """A launch on tensors of a kind, all of it but the tensors: a call takes these, and makes it.

    Where one is kept, as for a shape, a call looks at little more than the tensors' addresses.

    Args:
        kernel: and what follows, as for ``launch``.
    """

    __slots__ = ("_known", "constants", "grid", "kernel", "maxnreg", "num_warps", "sizes")

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        sizes: tuple[float, ...],
        constants: tuple[Any, ...],
        num_warps: int,
        maxnreg: int | None = None,
    ) -> None:
        self.kernel = kernel
        self.grid = grid
        self.sizes = sizes
        self.constants = constants
        self.num_warps = num_warps
        self.maxnreg = maxnreg
        self._known: dict[int, tuple[_Build, Any, Any]] = {}  # for aligned memory, by device

    def __call__(self, *tensors: Tensor) -> None:
        """Run the kernel, see ``launch``.

        Args:
            tensors: of the same dtypes in every call.
        """
        if INTERPRETED or is_traced(tensors[0]):
            self._launch(tensors)
            return
        pointers = 0
        for tensor in tensors:
            pointers |= tensor.data_ptr()
        device = tensors[0].get_device()
        build, compiled, run = self._known.get(device, _UNKNOWN)
        if (
            pointers & 15
            or _compiled.get(build, self) is not compiled
            or device != torch.cuda.current_device()
        ):
            compiled = self._launch(tensors)
            if not pointers & 15:
                self._known[device] = self._build(tensors), compiled, compiled[self.grid]
            return
        stream = torch._C._cuda_getCurrentRawStream(device)
        run(*tensors, *self.sizes, *self.constants, stream=stream)

    _once = staticmethod(launch)

    def _launch(self, tensors: tuple[Tensor, ...]) -> Any:
        rest = self.sizes, self.constants, self.num_warps, self.maxnreg
        return self._once(self.kernel, self.grid, tensors, *rest)

    def _build(self, tensors: tuple[Tensor, ...]) -> "_Build":
        return _build_of(
            self.kernel, tensors, self.sizes, self.constants, self.num_warps, self.maxnreg
        )


class PreparedLaunch:
    """A launch that is made in each step: its kernel and its tables are looked up once.

    Args:
        kernel: and what follows, as for ``launch``.
        tensors: the first one has memory; ``Operand`` in the place of what each call gives.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        tensors: tuple[Any, ...],
        sizes: tuple[float, ...],
        constants: tuple[Any, ...],
        num_warps: int,
        maxnreg: int | None = None,
    ) -> None:
        self.device: torch.device = tensors[0].device
        self._index: int = tensors[0].get_device()
        self._grid = grid
        self._call = kernel, grid, tensors, sizes, constants, num_warps, maxnreg
        self._slots = [(i, t) for i, t in enumerate(tensors) if isinstance(t, Operand)]
        self._args: list[Any] = [*tensors, *sizes, *constants]
        self._compiled: dict[Any, Any] = {}  # by dtypes and last four bits of the operands

    def prepare(self, operands: Sequence[Tensor] = ()) -> None:
        """Compile what a call with these operands runs, and run nothing.

        Raises:
            KernelError: it could not be compiled or loaded.
        """
        kernel, _, tensors, *_ = call = self._call_with(operands)
        if INTERPRETED:
            _check_compiler(kernel)
        elif tensors[0].is_cuda and not is_traced(tensors[0]):
            with torch.cuda.device(self._index):
                _find(*call)

    def __call__(self, operands: Sequence[Tensor] = ()) -> None:
        """Run the kernel, with operands by their numbers."""
        given = [operands[operand] for _, operand in self._slots]
        kind = tuple([(operand.dtype, operand.data_ptr() & 15) for operand in given])
        compiled = self._compiled.get(kind)
        if (
            compiled is None
            or torch._C._len_torch_dispatch_stack() > 0
            or self._index != torch.cuda.current_device()
        ):
            self._compiled[kind] = launch(*self._call_with(operands))
            return
        args = self._args.copy()
        for i, operand in self._slots:
            args[i] = operands[operand]
        compiled[self._grid](*args, stream=torch._C._cuda_getCurrentRawStream(self._index))

    def _call_with(self, operands: Sequence[Tensor]) -> tuple[Any, ...]:
        """Return what ``launch`` takes, with operands by their numbers."""
        kernel, grid, tensors, *rest = self._call
        given = [operands[t] if isinstance(t, Operand) else t for t in tensors]
        return kernel, grid, tuple(given), *rest


def _find(
    kernel: Any,
    grid: tuple[int, int, int],
    tensors: tuple[Tensor, ...],
    sizes: tuple[float, ...],
    constants: tuple[Any, ...],
    num_warps: int,
    maxnreg: int | None = None,
) -> Any:
    build = _build_of(kernel, tensors, sizes, constants, num_warps, maxnreg)
    compiled = _compiled.get(build)
    if compiled is None:
        options = _options(num_warps, maxnreg)
        compiled = _compiled[build] = _compile(
            kernel, grid, (*tensors, *sizes, *constants), options
        )
    return compiled


class _Build:
    """Stands for all that a kernel is compiled from, which takes longer to compare."""


def _build_of(
    kernel: Any,
    tensors: tuple[Tensor, ...],
    sizes: tuple[float, ...],
    constants: tuple[Any, ...],
    num_warps: int,
    maxnreg: int | None,
) -> _Build:
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
    return _builds.setdefault(tuple(key), _Build())


def _options(num_warps: int, maxnreg: int | None) -> dict[str, Any]:
    """Return what a kernel is compiled with; torch 2.11's Inductor keeps ``num_warps`` alone."""
    options = {"num_warps": num_warps, "enable_fp_fusion": True}
    return options if maxnreg is None else {**options, "maxnreg": maxnreg}


_builds: dict[tuple[Any, ...], _Build] = {}
_compiled: dict[_Build, Any] = {}
_UNKNOWN = _Build(), None, None
_compiler_works = True


@contextlib.contextmanager
def broken_compiler() -> Iterator[None]:
    """Refuse to compile a kernel inside of the block, or to run one from an earlier compilation."""
    global _compiler_works
    earlier = dict(_compiled)
    _compiled.clear()
    _compiler_works = False
    try:
        yield
    finally:
        _compiler_works = True
        _compiled.update(earlier)


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
