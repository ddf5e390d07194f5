"""Fixtures of several functions' tests."""

import pytest


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels, in the order of their launches; but for sums of partial sums."""
    from launches import note_launches

    from tritonamp.kernels.reduce import sum_kernel

    return note_launches(
        monkeypatch,
        lambda launch: [] if launch.kernel is sum_kernel else [launch.kernel.__name__],
    )
