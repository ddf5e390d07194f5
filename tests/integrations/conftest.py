"""What the tests of all libraries get."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _no_shared_state() -> Iterator[None]:
    """Accelerate keeps one state for the process."""
    yield
    if (state := sys.modules.get("accelerate.state")) is None:
        return
    state.AcceleratorState._reset_state()
    state.GradientState._reset_state()
    state.PartialState._reset_state()
