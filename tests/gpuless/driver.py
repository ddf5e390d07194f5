"""A CUDA driver without devices, for machines that have none: see driver.c."""

import ctypes
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

MAX_DEVICES = 8  # torch's own stand-in for guards of devices has so many
NAME = "libcuda.so.1"
SOURCE = Path(__file__).with_name("driver.c")
_driver: ctypes.CDLL | None = None


def load() -> None:
    """Load the driver, where no other is, a C compiler is, and torch has not been imported."""
    with tempfile.TemporaryDirectory() as folder:
        load_from(Path(folder))


def load_from(folder: Path, *arguments: str) -> ctypes.CDLL | None:
    """Load the driver after it was built in ``folder``, if ``load`` would do so.

    Its functions have to be there before torch's: whoever is first in the process is found.

    Args:
        folder: where the library is written; it may be deleted afterwards.
        arguments: for the C compiler, like further sources.
    """
    global _driver
    if _driver or "torch" in sys.modules or shutil.which("cc") is None or _has_libcuda():
        return _driver
    options = ["-shared", "-fPIC", f"-Wl,-soname,{NAME}"]
    with tempfile.TemporaryDirectory(dir=folder) as own:  # others may build the same
        built = Path(own) / NAME
        subprocess.run(["cc", *options, "-o", str(built), str(SOURCE), *arguments], check=True)
        library = built.replace(folder / NAME)
    _driver = ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    return _driver


def _has_libcuda() -> bool:
    try:
        ctypes.CDLL(NAME)
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
