"""A CUDA driver of two functions, for machines that have none: see driver.c."""

import ctypes
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

MAX_DEVICES = 8  # torch's own stand-in for guards of devices has so many
_driver: ctypes.CDLL | None = None


def load() -> None:
    """Load the driver, where no other is, a C compiler is, and torch has not been imported.

    Its functions have to be there before torch's: whoever is first in the process is found.
    """
    global _driver
    if _driver or "torch" in sys.modules or shutil.which("cc") is None or _has_libcuda():
        return
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "libcuda.so.1"
        source = Path(__file__).with_name("driver.c")
        options = ["-shared", "-fPIC", f"-Wl,-soname,{library.name}"]
        subprocess.run(["cc", *options, "-o", str(library), str(source)], check=True)
        _driver = ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


def _has_libcuda() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def is_loaded() -> bool:
    """Return whether ``set_devices`` can be called."""
    return _driver is not None


def obstacle() -> str | None:
    """Return why there is no GPU in software here, or None."""
    from torch.backends import cuda  # not before the driver is loaded

    if not is_loaded():
        return "the GPU in software needs cc, and a machine without a GPU"
    if not cuda.is_built():
        return "the GPU in software needs a torch that is built with CUDA, and this is one for CPUs"
    return None


def set_devices(count: int) -> None:
    """Say how many devices there are."""
    ctypes.c_int.in_dll(_driver, "devices").value = count


def start_device_threads() -> None:
    """Have autograd's engine start its threads for devices.

    It does so at the first backward of a process, for as many devices as there are then: without
    them a backward on the GPU fails.
    """
    import torch  # not before the driver is loaded

    if obstacle():
        return
    torch._C._ensureCUDADeviceGuardSet()
    set_devices(MAX_DEVICES)
    torch.zeros((), requires_grad=True).backward()
    set_devices(0)
