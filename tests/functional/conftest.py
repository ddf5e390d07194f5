"""What tests of several functions get."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels, in the order of their launches; but for sums of partial sums."""
    from tritonamp.kernels._launch import Launch
    from tritonamp.kernels.reduce import sum_kernel

    names: list[str] = []
    launch: Callable[..., None] = Launch.__call__

    def noted(self: Launch, *tensors: Any) -> None:
        if self.kernel is not sum_kernel:
            names.append(self.kernel.__name__)
        launch(self, *tensors)

    monkeypatch.setattr(Launch, "__call__", noted)
    return names
