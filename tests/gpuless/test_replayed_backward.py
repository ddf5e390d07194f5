"""A CUDA graph replays forward and backward, and eager steps follow, as in torch's own recipe:
https://docs.pytorch.org/docs/stable/notes/cuda.html#usage-with-torch-cuda-amp
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from covering import more
from gpuless.real_cuda import AnyCuda
from gpuless.steps import OnGpu, fed
from helpers import same
from torch import nn

import tritonamp

LEVELS = pytest.mark.parametrize("level", ["O1", "O2", *more(["O0", "O3"])])


class Replayed(OnGpu):
    """A model that has trained for two steps, with the scaler of its handle."""

    def __init__(self, level: str, kind: type = torch.optim.AdamW, **fields: Any) -> None:
        super().__init__(level, kind, **fields)
        self.scaler = self.amp.scaler
        self.x = torch.ones(4, 6, device="cuda")
        for _ in range(2):
            self.scaled_backward()
            scaler_steps(self)
            self.zero_grad()

    def scaled_backward(self) -> None:
        self.scaler.scale(self.loss()).backward()


Step = Callable[[Replayed], None]


def scaler_steps(training: Replayed) -> None:
    training.scaler.step(training.optimizer)
    training.scaler.update()


def clipped_by_torch(training: Replayed) -> None:
    training.scaler.unscale_(training.optimizer)
    nn.utils.clip_grad_norm_(training.model.parameters(), 0.125)
    scaler_steps(training)


def clipped_by_handle(training: Replayed) -> None:
    training.amp.clip_grad_norm_(0.125)
    scaler_steps(training)


@LEVELS
@pytest.mark.parametrize(
    ("kind", "step"),
    [
        (torch.optim.AdamW, scaler_steps),
        (torch.optim.AdamW, clipped_by_torch),
        (torch.optim.AdamW, clipped_by_handle),
        (torch.optim.Adadelta, scaler_steps),  # steps by itself
        *more([(torch.optim.Adadelta, clipped_by_torch)]),
    ],
)
def test_steps_use_what_a_replay_has_written(
    gpu: AnyCuda, level: str, kind: type, step: Step
) -> None:
    """Through an overflow and a batch with NaN, which the log tells from one another."""
    replayed, other = Replayed(level, kind), Replayed(level, kind)
    with gpu.capture() as graph:
        replayed.scaled_backward()
    written = [p.grad for p in replayed.model.parameters()]
    for number, factor in enumerate((1.0, 1.0, 1e3, float("nan"), 1.0, 1.0)):
        for training, backward in (replayed, graph.replay), (other, other.scaled_backward):
            fed(training.x, number, factor)
            backward()
            step(training)
        other.optimizer.zero_grad()
        assert same(replayed.weights(), other.weights()), number
        assert all(p.grad is g for p, g in zip(replayed.model.parameters(), written, strict=True))
    ours, expected = replayed.amp.stats(), other.amp.stats()
    keys = "scale", "steps", "skipped", "scale_overflows", "forward_faults"
    assert [ours[key] for key in keys] == [expected[key] for key in keys]
    assert ours["forward_faults"] == 1


@LEVELS
def test_zeros_go_into_the_tensors_that_a_replay_adds_to(gpu: AnyCuda, level: str) -> None:
    replayed, other = Replayed(level), Replayed(level)
    replayed.scaled_backward()
    replayed.optimizer.zero_grad(set_to_none=False)
    with gpu.capture() as graph:
        replayed.scaled_backward()
    for number in range(4):
        for training, backward in (replayed, graph.replay), (other, other.scaled_backward):
            training.optimizer.zero_grad(set_to_none=False)
            for micro_batch in range(2):
                fed(training.x, 2 * number + micro_batch)
                backward()
            clipped_by_torch(training)
        assert same(replayed.weights(), other.weights()), number


def test_without_a_scale_a_backward_goes_unseen(gpu: AnyCuda) -> None:
    replayed, other = Replayed("O5"), Replayed("O5")
    for training in replayed, other:
        training.scaled_backward = lambda t=training: t.loss().backward()
    with gpu.capture() as graph:
        replayed.scaled_backward()
    for number in range(4):
        for training, backward in (replayed, graph.replay), (other, other.scaled_backward):
            fed(training.x, number)
            backward()
            training.amp.unscale_()
            training.model.last.weight.grad.mul_(2.0)
            training.optimizer.step()
        other.optimizer.zero_grad()
        assert same(replayed.weights(), other.weights()), number


def test_several_graphs_and_eager_losses_of_one_step(gpu: AnyCuda) -> None:
    """One flag for all of their losses, in any order."""
    scaler = tritonamp.GradScaler("cuda")
    x = torch.ones((), device="cuda")
    scaler.scale(x)
    scaler.take_loss_nonfinite()
    graphs = []
    for _ in range(2):
        with gpu.capture() as graph:
            scaler.scale(x)
        graphs.append(graph)
    runs = [graphs[0].replay, graphs[1].replay, lambda: scaler.scale(x)]
    for bad in range(3):
        for number, run in enumerate(runs):
            x.fill_(float("inf") if number == bad else 1.0)
            run()
        assert float(scaler.take_loss_nonfinite()) == 1.0
        assert float(scaler.take_loss_nonfinite()) == 0.0


def test_a_replay_of_our_own_backward_goes_unseen(gpu: AnyCuda) -> None:
    training = Replayed("O1")
    with gpu.capture() as graph:
        training.backward(training.loss())
    graph.replay()
    training.optimizer.step()  # of the backward that was captured
    graph.replay()
    with pytest.raises(RuntimeError, match=r"Replays of a CUDA graph .* capture step\(\) with it"):
        training.optimizer.step()


def test_a_captured_update_uses_the_losses_up(gpu: AnyCuda) -> None:
    """After it, as ever, no gradient counts that no scaled loss has left."""
    training = Replayed("O1")
    with gpu.capture() as graph:
        training.scaled_backward()
        scaler_steps(training)
    graph.replay()
    with pytest.raises(RuntimeError, match=r"no amp\.backward"):
        scaler_steps(training)
