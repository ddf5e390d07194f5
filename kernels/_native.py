"""C++ that replaces Python code, built on the user's machine if it has a compiler."""

import functools
import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from tritonamp.kernels.device import triton

logger = logging.getLogger("tritonamp")

PLAIN_STEPS = os.environ.get("TRITONAMP_PLAIN_STEPS") == "1"
"""Whether steps keep no plan and use no C++. Such steps are the reference for the faster ones."""

_NAME = "_tritonamp"


class Attempt(NamedTuple):
    """A built module, or the reason why there is none.

    Attributes:
        module: the module, or None if it could not be built.
        problem: the reason if it could not be built, else "".
    """

    module: Any
    problem: str = ""


@functools.cache
def build() -> Attempt:
    """Build the module of ``_native.cpp``, or find it where Triton keeps its kernels.

    A build takes seconds, once for each version of torch, of Python, and of the source.
    """
    try:
        module = _loaded(_built())
        sample = torch.empty(0)
        # private (torch 2.11 to 2.15): the address of the TensorImpl of a tensor's object
        if module.prepare(sample, sample._cdata, nn.Parameter):
            return Attempt(module)
        problem = "a tensor's object is not as expected"
    # a compiler can fail in any way, and so can a read-only folder
    except Exception as error:
        said = getattr(error, "stderr", None) or error  # the compiler's output
        problem = f"{type(error).__name__}: {str(said)[:500]}"
    logger.info("_native.cpp is not used, and steps take the host longer: %s", problem)
    return Attempt(None, problem)


def _built() -> str:
    """Return the path of the shared library."""
    folder = Path(__file__).parent
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise RuntimeError("there is no C++ compiler (g++, clang++, or CXX in the environment)")
    torch_folder = Path(torch.__file__).parent
    command = [
        *compiler.split(),
        *("-std=c++20", "-O2", "-shared", "-fPIC", "-w"),
        f"-I{torch_folder / 'include'}",
        f"-I{sysconfig.get_paths()['include']}",
        str(folder / "_native.cpp"),
        f"-L{torch_folder / 'lib'}",
        *("-ltorch_python", "-ltorch_cpu", "-lc10"),
    ]
    # The library depends on all of these: one built for another torch must not be loaded.
    sources = [path.read_text() for path in (folder / "_native.cpp", *sorted(folder.glob("*.h")))]
    key = "\n".join([*sources, torch.__version__, sys.version, *command])
    cache = triton.runtime.cache.get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    library = _NAME + sysconfig.get_config_var("EXT_SUFFIX")
    found: str | None = cache.get_file(library)
    if found is not None:
        return found
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, library)
        subprocess.run([*command, "-o", str(path)], check=True, capture_output=True, text=True)
        # Triton's cache puts a file in place in one step: no other process loads half of one.
        return str(cache.put(path.read_bytes(), library, binary=True))


def _loaded(path: str) -> Any:
    spec = importlib.util.spec_from_file_location(_NAME, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
