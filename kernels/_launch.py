"""Every question about the hardware, and about Triton, is answered in this file and nowhere else."""

import contextlib
import importlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


class _NoTriton:
    """Stands for ``triton`` and ``triton.language`` where they cannot be imported: kernels are
    defined, never run.
    """

    constexpr = None
    __version__ = None

    def jit(self, function: Any = None, **options: Any) -> Any:
        return function if function is not None else lambda function: function


triton: Any = _NoTriton()
tl: Any = triton
with contextlib.suppress(ImportError):
    triton, tl = importlib.import_module("triton"), importlib.import_module("triton.language")

BACKENDS = ("auto", "triton", "eager")
MIN_CAPABILITY = (7, 0)  # the first Tensor Cores
MIN_BF16_CAPABILITY = (8, 0)
TRITON_OPS = frozenset(
    {"softmax", "softmax_backward", "log_softmax", "log_softmax_backward", "sum"}
    | {"grad_stats", "decide", "update_scale", "adamw", "cast"}
)
"""Names of the operations that have a Triton kernel in this version."""
MIN_NUMEL = 1 << 16
"""Below this ATen's launch costs less than what a kernel saves in bytes."""


class UnsupportedDeviceError(RuntimeError):
    """An explicit request that this device, or this installation, cannot carry out."""


class Backend(NamedTuple):
    """What runs the operations, and why.

    Attributes:
        name: "triton" or "eager".
        reason: one sentence for people.
        requested: "auto", "triton" or "eager".
    """

    name: str
    reason: str
    requested: str


def triton_version() -> str | None:
    """The installed Triton's version, or None where it cannot be imported."""
    return triton.__version__


@triton.jit
def _probe() -> None:
    pass


INTERPRETED = triton_version() is not None and not isinstance(_probe, triton.runtime.JITFunction)
"""Whether kernels run in Triton's interpreter, on any device: TRITON_INTERPRET=1 was set when they
were imported.
"""


def capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of an NVIDIA device; None for everything else (initialises CUDA for a CUDA
    device).
    """
    if device.type != "cuda" or torch.version.cuda is None or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(device)


def why_not_triton(device: torch.device) -> str | None:
    """None where Triton kernels can run on ``device``, else the reason why they cannot."""
    found = capability(device)
    if found is None:
        return f"{device} is not an NVIDIA GPU"
    if found < MIN_CAPABILITY:
        return f"{device} has compute capability {found[0]}.{found[1]}, Tensor Cores start at 7.0"
    if triton_version() is None:
        return "Triton cannot be imported"
    return None


def runs_triton(device: torch.device) -> bool:
    """Whether "auto" means Triton there."""
    answer = _answers.get(device)
    if answer is None:
        answer = _answers[device] = why_not_triton(device) is None
    return answer


_answers: dict[torch.device, bool] = {}


def choose_backend(requested: str, device: torch.device) -> Backend:
    """The backend for ``device``.

    Args:
        requested: "auto" (Triton where it can run, else eager torch), "triton" or "eager".
        device: where the model's parameters live.

    Raises:
        ValueError: unknown name.
        UnsupportedDeviceError: "triton" where it cannot run.
    """
    if requested not in BACKENDS:
        raise ValueError(
            f"unknown backend {requested!r}: allowed are {', '.join(map(repr, BACKENDS))}"
        )
    if requested == "eager":
        return Backend("eager", "asked for", requested)
    if requested == "triton" and INTERPRETED:
        return Backend(
            "triton", "TRITON_INTERPRET=1 runs kernels in Triton's interpreter", requested
        )
    obstacle = why_not_triton(device)
    if obstacle is None:
        return Backend(
            "triton", f"{device} has Tensor Cores and Triton {triton_version()} imports", requested
        )
    if requested == "triton":
        raise UnsupportedDeviceError(
            f"backend='triton' cannot run: {obstacle}. "
            "Use backend='auto' or backend='eager' for the same semantics in eager torch"
        )
    return Backend("eager", obstacle, requested)


def check_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """Raises UnsupportedDeviceError for bfloat16 on an NVIDIA GPU that has no bfloat16 Tensor
    Cores.
    """
    found = capability(device)
    if dtype is torch.bfloat16 and found is not None and found < MIN_BF16_CAPABILITY:
        raise UnsupportedDeviceError(
            f"dtype=torch.bfloat16 needs compute capability 8.0, {device} has {found[0]}.{found[1]}: "
            "use dtype=torch.float16, which brings dynamic loss scaling with it"
        )


class KernelError(RuntimeError):
    """A kernel could not be compiled or loaded; nothing was launched."""


class Forms:
    """An operation's two forms, and how they stand in for one another."""

    def __init__(self, triton_form: Callable[..., Any], torch_form: Callable[..., Any]) -> None:
        self.name = torch_form.__name__.removesuffix("_torch")
        self.triton_form, self.torch_form = triton_form, torch_form

    def runs_triton(self, backend: str, device: torch.device) -> bool:
        """Whether ``backend`` ("auto", "triton" or "eager") means the kernel on ``device``."""
        return backend == "triton" or (
            backend == "auto" and runs_triton(device) and self.name not in failures
        )

    def run(self, backend: str, takes_triton: bool, *args: Any) -> Any:
        """Runs the Triton form, or the torch form.

        Raises:
            KernelError: the kernel cannot be compiled; under "auto" a warning instead, and eager
                torch from then on.
        """
        if not takes_triton:
            return self.torch_form(*args)
        try:
            return self.triton_form(*args)
        except KernelError as error:
            if backend == "triton":
                raise
            failures[self.name] = str(error)
            warnings.warn(
                f"{self.name} runs in eager torch from now on: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
            return self.torch_form(*args)


class Operation(Forms):
    """An operation on a tensor that tracers can follow."""

    def __init__(
        self, triton_form: Callable[..., Tensor], torch_form: Callable[..., Tensor]
    ) -> None:
        super().__init__(triton_form, torch_form)
        self.traceable = torch.library.triton_op(
            f"tritonamp::{self.name}", triton_form, mutates_args=()
        )

    def __call__(self, backend: str, x: Tensor, *args: Any) -> Tensor:
        """Runs the operation on ``x`` and ``args``; under "auto" the kernel where ``x`` is large
        enough to gain by it.

        Raises:
            KernelError: see ``run``.
        """
        takes_triton = self.takes_triton(backend, x)
        if takes_triton and (torch.compiler.is_compiling() or is_traced(x)):
            return self.traceable(x, *args)
        return self.run(backend, takes_triton, x, *args)

    def takes_triton(self, backend: str, x: Tensor) -> bool:
        """Whether a call on ``x`` runs the kernel."""
        if backend != "auto":
            return backend == "triton"
        if x.numel() < MIN_NUMEL or not self.runs_triton(backend, x.device):
            return False
        return type(x) is Tensor or not is_traceable_wrapper_subclass(
            x
        )  # DTensor and its like shard eager operations


failures: dict[str, str] = {}
"""Operations whose kernel could not be compiled here, and why: "auto" runs them in eager torch."""


def is_traced(x: Tensor) -> bool:
    """Whether somebody follows the operations on ``x``: a tracer, a dispatch mode, a tensor that is
    not just memory.
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
    """Runs ``kernel(*tensors, *sizes, *constants)`` on the tensors' device, on the current stream.

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
    """Compiles what ``launch`` of the same arguments runs, and runs nothing.

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
    """Inside, no kernel can be compiled, nor run from an earlier compilation; afterwards all is as
    it was.
    """
    global _compiler_works
    known, failed = dict(_compiled), dict(failures)
    _compiled.clear()
    failures.clear()
    _compiler_works = False
    try:
        yield
    finally:
        _compiler_works = True
        failures.clear()
        failures.update(failed)
        _compiled.update(known)


def _check_compiler(kernel: Any) -> None:
    if not _compiler_works:
        raise KernelError(f"{kernel.__name__} cannot be compiled: broken_compiler() is in force")


def _interpret(
    kernel: Any, grid: tuple[int, int, int], tensors: tuple[Tensor, ...], rest: tuple[Any, ...]
) -> None:
    """Triton's interpreter truncates to bfloat16 and loses its subnormals: FP32 stands in, and
    torch rounds.
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
        compiled.run  # loads it onto the device
    except (
        Exception
    ) as error:  # a compiler can fail in any way: no C compiler, no ptxas for this GPU, a bug
        raise KernelError(
            f"{kernel.__name__} cannot be compiled: {type(error).__name__}: {error}"
        ) from error
    return compiled


class Shipped(NamedTuple):
    """A call whose kernels ``bench/static.py`` builds for every architecture, and what the builds
    have to keep.

    Attributes:
        name: for people, unique.
        function: an operation's Triton form.
        args: of the call, tensors on the meta device.
        max_registers: of a thread.
        max_instructions: for each element, None where a tile is too small to judge.
        exp2: MUFU.EX2 instructions for each element.
        max_shared: bytes of shared memory; None: any.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    max_registers: int
    max_instructions: float | None
    exp2: int
    max_shared: int | None = None
