"""The one place that answers questions about the hardware, Triton and other processes."""

import contextlib
import difflib
import functools
import importlib
import logging
import re
from typing import Any, NamedTuple

import torch


class _NoTriton:
    """Stand-in for ``triton`` and ``triton.language`` where Triton cannot be imported.

    Modules of kernels can then be imported; their kernels are defined and never run.
    """

    # annotations of kernels read it when a kernel is defined
    constexpr = None
    __version__ = None

    def jit(self, function: Any = None, **options: Any) -> Any:
        # used both as @triton.jit and as @triton.jit(...), which has to return a decorator
        return function if function is not None else lambda function: function


triton: Any = _NoTriton()
tl: Any = triton
with contextlib.suppress(ImportError):
    triton, tl = importlib.import_module("triton"), importlib.import_module("triton.language")

logger = logging.getLogger("tritonamp")

BACKENDS = ("auto", "triton", "eager")
WARP_SIZE = 32
"""Threads of a warp on every NVIDIA GPU. Tiles and numbers of warps are counted in it."""
AMD_WAVES = {"gfx90a": 64, "gfx942": 64, "gfx1100": 32, "gfx1201": 32}
"""AMD architectures that kernels are built for, and the number of threads of a wave on each."""
MIN_CAPABILITY = (7, 0)  # the first Tensor Cores
MIN_BF16_CAPABILITY = (8, 0)
_TURING = (7, 5)
_TURING_WITHOUT_TENSOR_CORES = re.compile(r"\b(GTX 16\d\d|MX[45]50|T\d{3,4})\b")  # not Tesla T4


class UnsupportedDeviceError(RuntimeError):
    """An explicit request that this device or this installation cannot satisfy."""


class Backend(NamedTuple):
    """The implementation that runs the operations, and the reason for the choice.

    Attributes:
        name: "triton" or "eager".
        reason: one sentence for the user.
        requested: "auto", "triton" or "eager", as the caller asked.
    """

    name: str
    reason: str
    requested: str


def triton_version() -> str | None:
    """Return the version of the installed Triton, or None if it cannot be imported."""
    return triton.__version__


@triton.jit
def _probe() -> None:
    pass


# @triton.jit reads TRITON_INTERPRET when it decorates, and the variable may have changed since
# then. So a decorated function is asked, not the environment.
INTERPRETED = triton_version() is not None and not isinstance(_probe, triton.runtime.JITFunction)
"""Whether kernels run in Triton's interpreter, on any device.

TRITON_INTERPRET=1 has to be set before this module is imported.
"""


def capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of an NVIDIA device, or None for any other device.

    A CUDA device is initialised.
    """
    # torch built for ROCm calls AMD devices "cuda", too: only torch.version.cuda separates them
    if device.type != "cuda" or torch.version.cuda is None or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(device)


def amd_architecture(device: torch.device) -> str | None:
    """Return the architecture of an AMD device, such as "gfx942", or None for any other device.

    torch built for ROCm calls an AMD device "cuda". The device is initialised.
    """
    if device.type != "cuda" or torch.version.hip is None or not torch.cuda.is_available():
        return None
    # gcnArchName lists features after the architecture: gfx90a:sramecc+:xnack-
    name: str = torch.cuda.get_device_properties(device).gcnArchName
    return name.partition(":")[0]


def known_fault(device: torch.device) -> str | None:
    """Return a warning about half precision on ``device``, with a remedy, or None."""
    # GTX 16xx and full Turing GPUs share capability 7.5: only the name of the device differs
    if capability(device) != _TURING:
        return None
    name = torch.cuda.get_device_name(device)
    if _TURING_WITHOUT_TENSOR_CORES.search(name) is None:
        return None
    return (
        f"{name} has no Tensor Cores, and GPUs of its kind are known for NaN in half convolutions, "
        "which no loss scale avoids: use level='O0' for a model that has convolutions; for others "
        "level='O1' with on_nonfinite='explain', which names the operation if there is one"
    )


def warn_of_known_fault(device: torch.device) -> None:
    """Log the known fault of ``device`` once, if it has one."""
    fault = known_fault(device)
    if fault is not None:
        _warn_once(fault)


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)


def why_not_triton(device: torch.device) -> str | None:
    """Return the reason why Triton kernels cannot run on ``device``, or None if they can."""
    found, amd = capability(device), amd_architecture(device)
    if amd is not None:
        if amd not in AMD_WAVES:
            return f"{device} is an AMD GPU of {amd}, kernels are built for {', '.join(AMD_WAVES)}"
    elif found is None:
        return _untried(device) or f"{device} is not an NVIDIA GPU"
    elif found < MIN_CAPABILITY:
        return f"{device} has compute capability {found[0]}.{found[1]}, Tensor Cores start at 7.0"
    if triton_version() is None:
        return "Triton cannot be imported"
    return None


def _untried(device: torch.device) -> str | None:
    """Return a request for reports from devices that tests never had; None for all others."""
    if device.type in ("cpu", "cuda", "meta"):
        return None
    return (
        f"tritonamp has never been run on {device.type}, where eager torch takes the place of "
        "kernels: please report what you see, working or not"
    )


def runs_triton(device: torch.device) -> bool:
    """Tell whether backend="auto" runs Triton kernels on ``device``."""
    # every call of an operation asks, and a query of the device takes microseconds
    answer = _answers.get(device)
    if answer is None:
        answer = _answers[device] = why_not_triton(device) is None
    return answer


_answers: dict[torch.device, bool] = {}


def require_triton(device: torch.device) -> None:
    """Refuse an explicit request for Triton on a device that cannot run it.

    Raises:
        UnsupportedDeviceError: ``device`` cannot run Triton kernels.
    """
    if not runs_triton(device):
        raise UnsupportedDeviceError(
            f"backend='triton' cannot run: {why_not_triton(device)}. "
            "Use backend='auto' or backend='eager' for the same semantics in eager torch"
        )


def is_capturing(device: torch.device) -> bool:
    """Tell whether a CUDA graph captures kernels that are launched on ``device``.

    For other devices CUDA is not asked, because some processes must not initialise it.
    """
    is_cuda = _is_cuda.get(device)
    if is_cuda is None:
        # remembered, because each access to ``type`` makes a new string, which takes 0.4 us
        is_cuda = _is_cuda[device] = device.type == "cuda"
    return is_cuda and torch.cuda.is_current_stream_capturing()


_is_cuda: dict[torch.device, bool] = {}


def refuse_capture(device: torch.device, what: str) -> None:
    """Raise if ``device`` is capturing a graph, because a replay would re-create persistent state.

    Args:
        device: device on which the state would be created.
        what: name of the state, for the message.

    Raises:
        RuntimeError: ``device`` is capturing a CUDA graph.
    """
    if is_capturing(device):
        raise RuntimeError(
            f"expected {what} before a CUDA graph is captured, got a capture that makes it, and "
            "each replay would make it again: run a whole step on the same parameters outside "
            "of the capture first"
        )


def choose_backend(requested: str, device: torch.device) -> Backend:
    """Return the backend for ``device``.

    Args:
        requested: "auto" (Triton where it can run, else eager torch), "triton" or "eager".
        device: device of the model's parameters.

    Raises:
        ValueError: ``requested`` is not one of ``BACKENDS``.
        UnsupportedDeviceError: "triton" is requested where it cannot run.
    """
    if requested not in BACKENDS:
        near = difflib.get_close_matches(str(requested).lower(), BACKENDS, 1)
        raise ValueError(
            f"unknown backend {requested!r}: allowed are {', '.join(map(repr, BACKENDS))}"
            + (f". Did you mean {near[0]!r}?" if near else "")
        )
    if requested == "eager":
        untried = _untried(device)
        return Backend("eager", f"asked for; {untried}" if untried else "asked for", requested)
    # before require_triton, because the interpreter runs kernels on any device
    if requested == "triton" and INTERPRETED:
        return Backend(
            "triton", "TRITON_INTERPRET=1 runs kernels in Triton's interpreter", requested
        )
    if requested == "triton":
        require_triton(device)
    obstacle = why_not_triton(device)
    if obstacle is None:
        found = _found(device)
        return Backend(
            "triton", f"{device} {found} and Triton {triton_version()} imports", requested
        )
    return Backend("eager", obstacle, requested)


def _found(device: torch.device) -> str:
    """Return a phrase for the user about a GPU that runs kernels."""
    amd = amd_architecture(device)
    if amd is not None:
        return f"is an AMD GPU of {amd} (kernels: built ahead of time, never run)"
    return "is an NVIDIA GPU" if known_fault(device) else "has Tensor Cores"


def check_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """Refuse bfloat16 on an NVIDIA GPU without bfloat16 Tensor Cores.

    Raises:
        UnsupportedDeviceError: ``dtype`` is bfloat16 and the compute capability is below 8.0.
    """
    if dtype is torch.bfloat16 and not takes_bfloat16(device):
        found = ".".join(map(str, capability(device) or ()))
        raise UnsupportedDeviceError(
            f"dtype=torch.bfloat16 needs compute capability 8.0, {device} has {found}: "
            "use dtype=torch.float16, which brings dynamic loss scaling with it"
        )


def takes_bfloat16(device: torch.device) -> bool:
    """Tell whether ``device`` computes in bfloat16: all but NVIDIA GPUs below capability 8.0."""
    found = capability(device)
    return found is None or found >= MIN_BF16_CAPABILITY


_wide_dtypes: dict[torch.device, torch.dtype] = {}


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return the widest floating dtype of a device, for numbers that FP32 would round too early.

    This is float64, or float32 if the device lacks or may lack it, such as Apple's GPUs.
    """
    dtype = _wide_dtypes.get(device)
    if dtype is None:
        has_it = device.type in ("cpu", "cuda", "meta")
        if device.type == "xpu":
            has_it = torch.xpu.get_device_properties(device).has_fp64
        dtype = _wide_dtypes[device] = torch.float64 if has_it else torch.float32
    return dtype


def widened(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` in the ``wide_dtype`` of its device."""
    return x.to(wide_dtype(x.device))


def is_distributed() -> bool:
    """Tell whether this process belongs to a process group of ``torch.distributed``."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def rank() -> int:
    """Return the rank of this process in the default process group, or 0 without a group."""
    return torch.distributed.get_rank() if is_distributed() else 0


def world_size() -> int:
    """Return the number of processes in the default process group, or 1 without a group."""
    return torch.distributed.get_world_size() if is_distributed() else 1
