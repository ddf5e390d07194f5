"""The hint for a half layer that is called by itself, at the end of a program or of a block."""

import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tritonamp
from tritonamp.casts import past_errors

PROGRAM = """
import sys, torch, tritonamp

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
amp = tritonamp.enable(model, torch.optim.SGD(model.parameters(), lr=0.1), "O2")
if sys.argv[1] == "disabled":
    amp.disable()
    model.half()
model[1](torch.ones(1, 4))
"""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.conv = nn.Linear(4, 4), nn.Conv1d(1, 2, 3)
        self.inner = nn.Sequential(nn.Linear(4, 4))

    def forward(self, x: Tensor, fault: str = "") -> Tensor:
        if fault:
            raise RuntimeError(fault)
        return self.inner(self.linear(x)) + self.conv(x[:, None]).mean()


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Any:
    return lambda: [text for text in caplog.messages if "was called outside the forward" in text]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("name", ["linear", "conv", "inner", "inner.0"])
def test_a_block_that_ends_so(name: str, level: str, dtype: torch.dtype, told: Any) -> None:
    model = Net()
    layer = model.get_submodule(name)
    with pytest.raises(RuntimeError), tritonamp.enable(model, level=level, dtype=dtype):
        layer(torch.ones(1, 1 if name == "conv" else 4, 4))
    (text,) = told()
    short = str(dtype).removeprefix("torch.")
    assert text.startswith(f"Net.{name} was called outside the forward of the enabled model, where")
    assert f"casts its inputs to {short}, the dtype of its weights: call the model, or " in text
    cure = "put 'with amp.autocast():' around that" if level == "O2" else f"x.to({dtype})"
    assert cure in text
    with tritonamp.enable(model, level=level, dtype=dtype) as amp, amp.autocast():  # as it says
        layer(torch.ones(1, 1 if name == "conv" else 4, 4).to(dtype if level == "O3" else None))


def test_other_errors_have_no_hint(told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text, model, plain = "got Float and Half", Net(), nn.Linear(4, 4).half()
    for call in (
        lambda: model(torch.ones(1, 4), text),
        lambda: plain(torch.ones(1, 4)),
        lambda: model.linear(torch.ones(1, 3).half()),
    ):
        with pytest.raises(RuntimeError), tritonamp.enable(model, level="O2"):
            call()
    with pytest.raises(RuntimeError) as raised, tritonamp.enable(model, level="O1"):
        model(torch.ones(1, 4), text)
    monkeypatch.setattr(sys, "last_value", raised.value, raising=False)
    assert told() == []


@pytest.mark.parametrize("how", ["enabled", "disabled"])
def test_a_program_that_ends_so(how: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, how],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 1
    *_, error, last = done.stderr.splitlines()
    if how == "enabled":
        assert error.startswith("RuntimeError: mat1 and mat2 must have the same dtype")
        assert last.startswith("Sequential.1 was called outside the forward of the enabled model")
    else:
        assert last.startswith("RuntimeError: mat1 and mat2 must have the same dtype")


def test_a_handle_that_is_dropped_leaves_nothing_behind() -> None:
    before = len(past_errors._looking)
    amp = tritonamp.enable(torch.nn.Linear(2, 2), level="O2")
    assert len(past_errors._looking) == before + 1
    del amp
    gc.collect()
    assert len(past_errors._looking) == before
