"""What every test gets: fixed seeds, each device there is, and no state left behind in torch."""

import gc
import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    # Without a GPU the kernels run in Triton's interpreter; triton.jit asks for it where a kernel
    # is defined.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tritonamp.casts import dispatch
from tritonamp.kernels.device import INTERPRETED, triton_version

if INTERPRETED and triton_version() < "3.7":
    # a scalar that a kernel has loaded is an array of one element there, which today's NumPy makes
    # no index of
    from triton.runtime import interpreter

    def _patch(tensor, scope, original=interpreter._patch_lang_tensor):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(())))

    interpreter._patch_lang_tensor = _patch

# Tensors are small and a process of the tests has each core: threads would only wait for one
# another. The variable is for the processes that tests start.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _seeds_and_leaks() -> Iterator[None]:
    registered_before = dispatch.is_registered()
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)
    if (
        dispatch.is_registered() and not registered_before
    ):  # only the test that leaked fails, not all after it
        gc.collect()  # an enabled model in a reference cycle is not a leak
        assert not dispatch.is_registered(), (
            "this test left an enabled model behind: call amp.disable()"
        )
