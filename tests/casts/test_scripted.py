"""Scripted functions follow the op table in enabled forwards on a CPU, torch's lists outside."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tritonamp.casts.scripted import ScriptedAutocast


def _mode() -> bool:
    """Whether torch's pass is on."""
    before = torch._C._jit_set_autocast_mode(True)
    torch._C._jit_set_autocast_mode(before)
    return before


class Gated(nn.Module):
    def __init__(self, gate: Any) -> None:
        super().__init__()
        self.layer, self.gate = nn.Linear(4, 4), gate

    def forward(self, x: Tensor) -> Tensor:
        self.mode = _mode()
        hidden = self.layer(x)
        result = self.gate(hidden)
        self.dtypes = hidden.dtype, result.dtype
        if x.sum() > 1e4:
            raise ZeroDivisionError
        return result


def scripted() -> Any:
    def gate(x: Tensor) -> Tensor:
        return torch.sigmoid(x) * x

    return torch.jit.script(gate)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_scripted_function_follows_the_op_table(handles: Any, level: str) -> None:
    model = Gated(scripted())
    handles(model, level=level)
    for _ in range(4):  # the profiling executor makes its graphs by the third call
        model(torch.ones(2, 4))
        assert model.dtypes == (torch.float16, torch.float16)
        assert not model.mode and _mode()


def test_torchs_pass_is_back_after_an_exception_and_stays_off_for_others(handles: Any) -> None:
    model = Gated(torch.relu)
    handles(model, level="O1")
    with pytest.raises(ZeroDivisionError):
        model(torch.full((2, 4), 1e4))
    assert _mode()
    torch._C._jit_set_autocast_mode(False)
    try:
        model(torch.ones(2, 4))
        assert not _mode()  # as it was
    finally:
        torch._C._jit_set_autocast_mode(True)


def test_it_is_off_until_the_last_thread_has_left() -> None:
    switch, seen = ScriptedAutocast(), []

    def in_a_thread() -> None:
        switch.off()
        switch.on()
        switch.on()  # one too many does nothing
        seen.append(_mode())

    switch.off()
    other = threading.Thread(target=in_a_thread)
    other.start()
    other.join()
    assert seen == [False]
    switch.on()
    assert _mode()
