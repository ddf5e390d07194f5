"""Small training programs, and how to run them: each collects its losses."""

import pytest
import torch

import tritonamp
from tritonamp.apex.amp import _amp_state

HEAD = """\
import torch
from torch import nn

torch.manual_seed(0)
data = [(torch.randn(4, 6), torch.randn(4, 3)) for _ in range(6)]
criterion = nn.MSELoss()
losses = []


def make():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


"""


def run(text: str, monkeypatch: pytest.MonkeyPatch, **names: object) -> list[float]:
    """Return ``losses`` of a program; what it enables is disabled at its end."""
    handles: list[tritonamp.Amp] = []
    enable = tritonamp.enable

    def enabled(*args: object, **kwargs: object) -> tritonamp.Amp:
        handles.append(enable(*args, **kwargs))  # type: ignore[arg-type]
        return handles[-1]

    with monkeypatch.context() as patch:
        patch.setattr(tritonamp, "enable", enabled)
        namespace: dict[str, object] = {"__name__": "program", **names}
        exec(compile(text, "program.py", "exec"), namespace)
    for handle in handles:
        handle.disable()
    handle = getattr(_amp_state, "handle", None)
    if handle is not None and handle.is_active():
        handle._deactivate()
    losses = namespace["losses"]
    assert isinstance(losses, list) and len(losses) >= 4
    return losses


def same(before: list[float], after: list[float]) -> None:
    """Assert that losses are equal but for the rounding of half."""
    torch.testing.assert_close(torch.tensor(after), torch.tensor(before), rtol=4e-3, atol=1e-4)
