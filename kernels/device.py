"""Questions about the hardware, Triton and other processes are answered here and nowhere else."""

import contextlib
import functools
import importlib
import logging
import re
from typing import Any, NamedTuple

import torch


class _NoTriton:
    """Stand-in for ``triton`` and ``triton.language`` where they cannot be imported.

    Kernels are defined, never run.
    """

    constexpr = None
    __version__ = None

    def jit(self, function: Any = None, **options: Any) -> Any:
        return function if function is not None else lambda function: function


triton: Any = _NoTriton()
tl: Any = triton
with contextlib.suppress(ImportError):
    triton, tl = importlib.import_module("triton"), importlib.import_module("triton.language")

logger = logging.getLogger("tritonamp")

BACKENDS = ("auto", "triton", "eager")
WARP_SIZE = 32
"""Threads that run as one on every NVIDIA GPU; tiles and numbers of warps are counted in it."""
AMD_WAVES = {"gfx90a": 64, "gfx942": 64, "gfx1100": 32, "gfx1201": 32}
"""AMD's architectures that kernels are built for, and how many threads run as one there."""
MIN_CAPABILITY = (7, 0)  # the first Tensor Cores
MIN_BF16_CAPABILITY = (8, 0)
_TURING = (7, 5)
_TURING_WITHOUT_TENSOR_CORES = re.compile(r"\b(GTX 16\d\d|MX[45]50|T\d{3,4})\b")  # not Tesla T4


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
    """Return the installed Triton's version, or None where it cannot be imported."""
    return triton.__version__


@triton.jit
def _probe() -> None:
    pass


INTERPRETED = triton_version() is not None and not isinstance(_probe, triton.runtime.JITFunction)
"""Whether kernels run in Triton's interpreter, on any device: TRITON_INTERPRET=1 was set when they
were imported.
"""


def capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of an NVIDIA device; None for everything else.

    Initialises CUDA for a CUDA device.
    """
    if device.type != "cuda" or torch.version.cuda is None or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(device)


def amd_architecture(device: torch.device) -> str | None:
    """Return the architecture of an AMD device, like "gfx942"; None for everything else.

    torch built for ROCm calls such a device "cuda", too. Initialises it.
    """
    if device.type != "cuda" or torch.version.hip is None or not torch.cuda.is_available():
        return None
    # with features behind it: gfx90a:sramecc+:xnack-
    name: str = torch.cuda.get_device_properties(device).gcnArchName
    return name.partition(":")[0]


def known_fault(device: torch.device) -> str | None:
    """Return what is known to go wrong in half on ``device``, and what to do; None: nothing is."""
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
    """Log, once, what is known to go wrong in half on ``device``, if anything."""
    fault = known_fault(device)
    if fault is not None:
        _warn_once(fault)


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)


def why_not_triton(device: torch.device) -> str | None:
    """Return None where Triton kernels can run on ``device``, else the reason why they cannot."""
    found, amd = capability(device), amd_architecture(device)
    if amd is not None:
        if amd not in AMD_WAVES:
            return f"{device} is an AMD GPU of {amd}, kernels are built for {', '.join(AMD_WAVES)}"
    elif found is None:
        return f"{device} is not an NVIDIA GPU"
    elif found < MIN_CAPABILITY:
        return f"{device} has compute capability {found[0]}.{found[1]}, Tensor Cores start at 7.0"
    if triton_version() is None:
        return "Triton cannot be imported"
    return None


def runs_triton(device: torch.device) -> bool:
    """Tell whether "auto" means Triton there."""
    answer = _answers.get(device)
    if answer is None:
        answer = _answers[device] = why_not_triton(device) is None
    return answer


_answers: dict[torch.device, bool] = {}


def require_triton(device: torch.device) -> None:
    """Refuse an explicit request for Triton where it cannot run.

    Raises:
        UnsupportedDeviceError: that is so on ``device``.
    """
    if not runs_triton(device):
        raise UnsupportedDeviceError(
            f"backend='triton' cannot run: {why_not_triton(device)}. "
            "Use backend='auto' or backend='eager' for the same semantics in eager torch"
        )


def is_capturing(device: torch.device) -> bool:
    """Tell whether what is launched on ``device`` becomes part of a CUDA graph.

    CUDA is left alone for other devices: a process may be one that must not touch it.
    """
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def refuse_capture(device: torch.device, what: str) -> None:
    """Refuse to make in a CUDA graph what later steps go on from: each replay would make it anew.

    Args:
        device: where it is made.
        what: it is.

    Raises:
        RuntimeError: a CUDA graph is being captured there.
    """
    if is_capturing(device):
        raise RuntimeError(
            f"expected {what} before a CUDA graph is captured, got a capture that makes it, and "
            "each replay would begin with it anew: run a whole step on the same parameters outside "
            "of the capture first"
        )


def choose_backend(requested: str, device: torch.device) -> Backend:
    """Return the backend for ``device``.

    Args:
        requested: "auto" (Triton where it can run, else eager torch), "triton" or "eager".
        device: where the model's parameters live.

    Raises:
        ValueError: unknown name.
        UnsupportedDeviceError: "triton" where it cannot run; any on Apple's GPUs.
    """
    if requested not in BACKENDS:
        raise ValueError(
            f"unknown backend {requested!r}: allowed are {', '.join(map(repr, BACKENDS))}"
        )
    if device.type == "mps":
        raise UnsupportedDeviceError(
            f"expected a model on the CPU, an NVIDIA or AMD GPU, got one on {device}: the op table "
            "is not made for Apple's GPUs, and steps are noted in float64, which they do not have. "
            "Use torch.amp there, torch.autocast('mps') and torch.amp.GradScaler('mps'); or "
            "model.cpu(), to see what half precision does to the model"
        )
    if requested == "eager":
        return Backend("eager", "asked for", requested)
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
    """Return what a GPU on which kernels run is or has, for people."""
    amd = amd_architecture(device)
    if amd is not None:
        return f"is an AMD GPU of {amd} (kernels: built ahead of time, never run)"
    return "is an NVIDIA GPU" if known_fault(device) else "has Tensor Cores"


def check_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """Refuse bfloat16 on an NVIDIA GPU that has no bfloat16 Tensor Cores.

    Raises:
        UnsupportedDeviceError: that is so.
    """
    if dtype is torch.bfloat16 and not takes_bfloat16(device):
        found = ".".join(map(str, capability(device) or ()))
        raise UnsupportedDeviceError(
            f"dtype=torch.bfloat16 needs compute capability 8.0, {device} has {found}: "
            "use dtype=torch.float16, which brings dynamic loss scaling with it"
        )


def takes_bfloat16(device: torch.device) -> bool:
    """Tell whether a device computes in bfloat16: not NVIDIA GPUs below compute capability 8.0."""
    found = capability(device)
    return found is None or found >= MIN_BF16_CAPABILITY


def is_distributed() -> bool:
    """Tell whether this process is one of a process group of ``torch.distributed``."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def rank() -> int:
    """Return this process's number in the default process group; 0 without one."""
    return torch.distributed.get_rank() if is_distributed() else 0


def world_size() -> int:
    """Return how many processes the default process group has; 1 without one."""
    return torch.distributed.get_world_size() if is_distributed() else 1
