"""What tests of several functions get."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the norms' kernels, in the order of their launches."""
    from tritonamp.kernels import group_norm, group_norm_backward, norm, norm_backward

    names: list[str] = []
    for module in (norm, norm_backward, group_norm, group_norm_backward):
        launch: Callable[..., None] = module.launch

        def noted(kernel: Any, *args: Any, launch: Callable[..., None] = launch) -> None:
            names.append(kernel.__name__)
            launch(kernel, *args)

        monkeypatch.setattr(module, "launch", noted)
    return names
