"""What is recorded of generators, autocast and grad mode comes back, whatever happened since."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from tritonamp.ambient import AmbientState, Generators, preserve


def draw(device: torch.device) -> list[Any]:
    values = [random.random(), random.gauss(0.0, 1.0), np.random.rand(), np.random.randn()]
    return [*values, *torch.rand(3).tolist(), *torch.rand(3, device=device).tolist()]


def modes() -> list[Any]:
    autocast = [(torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in TYPES]
    return [torch.is_grad_enabled(), torch.is_autocast_cache_enabled(), *autocast]


TYPES = ("cpu", "cuda")


def test_generators_come_back(device: torch.device) -> None:
    generators = Generators.now([device])
    first = draw(device)
    assert draw(device) != first
    generators.restore()
    assert draw(device) == first


def test_numpy_is_left_alone_where_it_was_not_recorded(device: torch.device) -> None:
    generators = Generators.now([device], numpy=False)
    first = draw(device)
    generators.restore()
    again = draw(device)
    assert again[:2] + again[4:] == first[:2] + first[4:]
    assert again[2:4] != first[2:4]


def test_modes_come_back_without_the_generators(device: torch.device) -> None:
    before, state, first = modes(), AmbientState.now(), draw(device)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
        inside = modes()
        assert inside != before
        state.restore()
        assert modes() == before
        torch.set_grad_enabled(False)
    assert draw(device) != first


@pytest.mark.parametrize("raises", [False, True])
def test_preserve(raises: bool, device: torch.device) -> None:
    before, state = modes(), Generators.now([device])
    first = draw(device)
    state.restore()
    try:
        with preserve([device]):
            draw(device)
            torch.set_grad_enabled(False)
            for device_type in TYPES:
                torch.set_autocast_enabled(device_type, True)
                torch.set_autocast_dtype(device_type, torch.float16)
            torch.set_autocast_cache_enabled(False)
            if raises:
                raise KeyError
    except KeyError:
        assert raises
    assert modes() == before
    assert draw(device) == first
