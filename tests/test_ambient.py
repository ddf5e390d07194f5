"""What is recorded of generators, autocast and grad mode comes back, whatever happened since."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from tritonamp.ambient import AmbientState, AmbientWatch, Generators, preserve


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


def test_modes_come_back_without_the_generators(device: torch.device) -> None:
    before, state, first = modes(), AmbientState.now(), draw(device)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
        inside = modes()
        assert inside != before
        state.restore()
        assert modes() == before
        torch.set_grad_enabled(False)
    assert draw(device) != first


DRAWS = {"python": random.random, "cpu": lambda: torch.rand(1)}


@pytest.mark.parametrize("name", DRAWS)
def test_a_watch_knows_a_generator_that_moves_each_time(name: str) -> None:
    watch, draw_one = AmbientWatch(), DRAWS[name]
    for _ in range(20):
        state = watch.now([])
        first = draw_one()
        state.restore()
        assert draw_one() == first


@pytest.mark.parametrize("name", DRAWS)
def test_a_watch_reads_seldom_what_stands_still(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first time that it moves the state is right; at most 31 times later it is read again."""
    reads, getstate, draw_one = [], random.getstate, DRAWS[name]
    monkeypatch.setattr(random, "getstate", lambda: reads.append(None) or getstate())
    watch = AmbientWatch()
    states = [watch.now([]) for _ in range(8 + 2 * 32)]
    assert len(reads) == 1 + 8 + 2
    assert states[-2] is states[-3]
    state = watch.now([])
    first = draw_one()
    state.restore()
    assert draw_one() == first
    for _ in range(31):
        watch.now([])
        draw_one()
    state = watch.now([])
    first = draw_one()
    state.restore()
    assert draw_one() == first


def test_a_watch_records_autocast_and_leaves_numpy_alone() -> None:
    watch = AmbientWatch()
    for _ in range(9):
        before = modes()
        state = watch.now([])
    with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
        inside, inner = modes(), watch.now([])
        state.restore()
        assert modes() == before
        inner.restore()
        assert modes() == inside
    assert inner.generators is not None and inner.generators.numpy is None
    assert watch.now([]).autocast == state.autocast
    watch = AmbientWatch()
    with torch.autocast("cpu", dtype=torch.float16):
        watch.now([])  # reads the generators
    assert watch.now([]).autocast == state.autocast


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
