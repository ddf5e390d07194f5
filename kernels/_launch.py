"""A kernel is looked up, compiled where it is new, and started."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey

from tritonamp.kernels.device import INTERPRETED


class KernelError(RuntimeError):
    """A kernel could not be compiled or loaded; nothing was launched."""


def is_traced(x: Tensor) -> bool:
    """Tell whether somebody follows the operations on ``x``.

    That is a tracer, a dispatch mode, or a tensor that is not just memory.
    """
    return torch._C._len_torch_dispatch_stack() > 0 or (
        type(x) is not Tensor and torch._C._dispatch_keys(x).has(DispatchKey.Python)
    )


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    tensors: tuple[Tensor, ...],
    sizes: tuple[float, ...],
    constants: tuple[Any, ...],
    num_warps: int,
    maxnreg: int | None = None,
) -> None:
    """Run ``kernel(*tensors, *sizes, *constants)`` on the tensors' device, on the current stream.

    ``sizes`` are to be marked ``do_not_specialize``, ``constants`` are ``tl.constexpr``: a compiled
    kernel is looked up by types, the pointers' alignment and the constants, in less time than
    Triton's own launch takes. ``maxnreg`` is the most registers that a thread may take.

    Raises:
        KernelError: it could not be compiled or loaded.
    """
    if is_traced(tensors[0]):
        wrapped = torch.library.wrap_triton(kernel)
        wrapped[grid](*tensors, *sizes, *constants, num_warps=num_warps, enable_fp_fusion=True)
        return
    if INTERPRETED:
        _interpret(kernel, grid, tensors, (*sizes, *constants))
        return
    device = tensors[0].get_device()
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(kernel, grid, tensors, sizes, constants, num_warps, maxnreg)
    compiled = _find(kernel, grid, tensors, sizes, constants, num_warps, maxnreg)
    compiled[grid](*tensors, *sizes, *constants, stream=torch._C._cuda_getCurrentRawStream(device))


def prepare(kernel: Any, *args: Any) -> None:
    """Compile what ``launch`` of the same arguments runs, and run nothing.

    Raises:
        KernelError: it could not be compiled or loaded.
    """
    tensors = args[1]
    if INTERPRETED:
        _check_compiler(kernel)
    elif tensors[0].is_cuda and not is_traced(tensors[0]):
        with torch.cuda.device(tensors[0].get_device()):
            _find(kernel, *args)


def _find(
    kernel: Any,
    grid: tuple[int, int, int],
    tensors: tuple[Tensor, ...],
    sizes: tuple[float, ...],
    constants: tuple[Any, ...],
    num_warps: int,
    maxnreg: int | None = None,
) -> Any:
    key: list[Any] = [id(kernel), tensors[0].get_device(), num_warps, maxnreg, constants]
    pointers = 0
    for tensor in tensors:
        key.append(tensor.dtype)
        pointers |= tensor.data_ptr()
    if pointers & 15 or max(sizes) >= 1 << 31:
        key += [
            *[tensor.data_ptr() & 15 == 0 for tensor in tensors],
            *[size >= 1 << 31 for size in sizes],
        ]
    compiled = _compiled.get(tuple(key))
    if compiled is None:
        options = {"num_warps": num_warps, "maxnreg": maxnreg, "enable_fp_fusion": True}
        compiled = _compiled[tuple(key)] = _compile(
            kernel, grid, (*tensors, *sizes, *constants), options
        )
    return compiled


_compiled: dict[tuple[Any, ...], Any] = {}
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
        compiled.run  # noqa: B018  loads it onto the device
    except (
        Exception
    ) as error:  # a compiler can fail in any way: no C compiler, no ptxas for this GPU, a bug
        raise KernelError(
            f"{kernel.__name__} cannot be compiled: {type(error).__name__}: {error}"
        ) from error
    return compiled
