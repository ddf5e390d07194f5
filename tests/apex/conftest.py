"""Fixtures of all tests of the apex drop-in."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def casts_end() -> Iterator[None]:
    """No cast of ``amp.initialize`` outlives its test."""
    yield
    from tritonamp.apex.amp import _amp_state

    _amp_state.handle._deactivate()
