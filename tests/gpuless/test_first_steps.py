"""A CUDA graph captures no first step, because each replay would start from its state again."""

import pytest
import torch
from covering import more
from gpuless.real_cuda import AnyCuda
from gpuless.steps import OnGpu, replays_like_eager
from torch import nn

import tritonamp

STATE = "expected the optimizer's state before a CUDA graph"
LEVELS = pytest.mark.parametrize("level", ["O1", "O2", *more(["O0", "O3"])])


@LEVELS
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "SGD momentum"])
def test_a_first_step(gpu: AnyCuda, level: str, optimizer: str) -> None:
    captured, other = OnGpu(level, optimizer), OnGpu(level, optimizer)
    with pytest.raises(RuntimeError, match="before a CUDA graph is captured"), gpu.capture():
        captured.step()
    replays_like_eager(gpu, other, captured)  # after the steps that the error asks for


@LEVELS
def test_a_first_gradient(gpu: AnyCuda, level: str) -> None:
    """A parameter had none before: its state would be made in the capture."""
    captured, other = OnGpu(level), OnGpu(level)
    for training in (captured, other):
        training.model.first.weight.requires_grad_(False)
        training.step()
        training.model.first.weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match=STATE), gpu.capture():
        captured.step()
    replays_like_eager(gpu, other, captured, before=1)


def test_without_enable(gpu: AnyCuda) -> None:
    model = nn.Linear(3, 3).cuda()
    optimizer, scaler = tritonamp.optim.AdamW(model.parameters()), tritonamp.GradScaler("cuda")
    loss = model(torch.ones(2, 3, device="cuda")).sum()
    with (
        pytest.raises(RuntimeError, match="expected the loss scale before a CUDA graph"),
        gpu.capture(),
    ):
        scaler.scale(loss)
    loss.backward()
    with pytest.raises(RuntimeError, match=STATE), gpu.capture():
        optimizer.step()
    assert not any(optimizer.state.values())
