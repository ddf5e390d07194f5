"""An accelerator in software that is neither CUDA's nor ROCm's, for a process of its own.

Importing this module makes torch's place for foreign accelerators, "privateuseone", a device
without float64, streams and pinned memory. Models can be trained there. Tensors can also say that
they are on another device, such as "mps", but without gradients: autograd would ask for its driver.
"""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import torch
from gpuless.gpu import Gpu
from gpuless.tensors import CudaTensor, FakeCudaMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "odd"
_setup_privateuseone_for_python_backend(
    NAME,
    SimpleNamespace(
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        is_available=lambda: True,
        is_initialized=lambda: True,
        current_device=lambda: 0,
        device_count=lambda: 1,
        manual_seed_all=lambda seed: None,
        _is_in_bad_fork=lambda: False,
        _lazy_init=lambda: None,
    ),
)
# which torch's own accelerators have, and packages of others register
_fallback = torch.library.Library("_", "IMPL")
_fallback.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")


@contextlib.contextmanager
def in_software(device_type: str = NAME) -> Iterator[torch.device]:
    """Inside, torch has such a device."""
    CudaTensor.place, CudaTensor.gpu = torch.device(device_type, 0), Gpu()
    CudaTensor.gpu.has_float64 = False
    properties = SimpleNamespace(has_fp64=False)
    with (
        mock.patch.object(torch.xpu, "_lazy_init"),
        mock.patch.object(torch.xpu, "get_device_properties", return_value=properties),
        FakeCudaMode(),
    ):
        yield CudaTensor.place
