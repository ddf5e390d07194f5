"""What every test gets: fixed seeds, each device there is, and no state left behind in torch."""

import gc
from collections.abc import Iterator

import pytest
import torch

from tritonamp import overrides

torch.set_num_threads(1)  # small tensors: threads that wait for a busy core cost more than they bring

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _seeds_and_leaks() -> Iterator[None]:
    registered_before = overrides.is_registered()
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)
    if overrides.is_registered() and not registered_before:  # only the test that leaked fails, not all after it
        gc.collect()  # an enabled model in a reference cycle is not a leak
        assert not overrides.is_registered(), "this test left an enabled model behind: call amp.disable()"
