"""The launches of kernels, as they happen."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from torch import Tensor

from tritonamp.kernels._launch import Launch


def note_launches(
    monkeypatch: pytest.MonkeyPatch, note: Callable[[Launch], Iterable[Any]]
) -> list[Any]:
    """Return a list to which each later launch adds the results of ``note`` for it."""
    notes: list[Any] = []
    call_launch = Launch.__call__

    def noted(launch: Launch, *tensors: Tensor) -> tuple[Tensor, ...]:
        notes.extend(note(launch))
        return call_launch(launch, *tensors)

    monkeypatch.setattr(Launch, "__call__", noted)
    return notes
