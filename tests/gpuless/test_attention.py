"""Readings of attention logits and functions after a step: no waits, and CUDA graphs."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpuless.real_cuda import AnyCuda
from runs import Training, batch
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("plans")


class Attention(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.q, self.k = (nn.Linear(8, 8, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k = (p(x).unflatten(-1, (2, 4)).transpose(1, 2) for p in (self.q, self.k))
        if self.fused:
            return F.scaled_dot_product_attention(q, k, k).transpose(1, 2).flatten(2)
        return (torch.softmax(q @ k.mT, -1) @ k).transpose(1, 2).flatten(2)


class Attending(Training):
    def __init__(self, **fields: Any) -> None:
        model = lambda: nn.Sequential(Attention(True), Attention(False))  # noqa: E731
        super().__init__(model, "AdamW", device="cuda", **fields)
        self.x = batch(0, 2, 5, 8, device="cuda")

    def finish(self, *args: Any, **fields: Any) -> None:
        self.optimizer.step()

    def step(self, *args: Any, **fields: Any) -> Any:
        self.optimizer.zero_grad()
        self.backward(self.loss())
        self.optimizer.step()

    def logits(self) -> list[tuple[Any, ...]]:
        found = [r for r in self.amp.ranges() if r.direction == "attention"]
        return [(r.module, r.step, r.head, r.absmax, r.is_bound) for r in found]


@pytest.mark.parametrize("fields", [{}, {"masters": "packed"}], ids=["fp32", "packed"])
def test_qk_clip_brings_no_wait(gpu: AnyCuda, fields: dict[str, Any]) -> None:
    with Attending(**fields) as training:
        watch = training.amp.watch(every=1)

        def clip(taken: Tensor) -> None:
            masters = dict(training.amp.named_master_params())
            for name, largest in watch.logits().items():
                factor = torch.where(taken, (1e-3 / largest).clamp(max=1.0).sqrt(), 1.0)
                masters[f"{name}.q.weight"].view(len(largest), -1).mul_(factor[:, None])

        training.amp.after_step(clip)
        gpu.event_lag = 3
        for _ in range(2):
            training.step()
        with gpu.watch() as records:
            for _ in range(2):
                training.step()
        assert records == []
        assert len(watch.logits()) == 2


def test_a_graph_reads_logits_in_every_other_replay(gpu: AnyCuda) -> None:
    with Attending() as eager, Attending() as captured:
        for training in (eager, captured):
            training.amp.watch(every=2)
            training.step()
        with gpu.capture() as graph:
            captured.step()
        read = []
        for _ in range(4):
            eager.step()
            graph.replay()
            assert eager.logits() == captured.logits()
            assert len(eager.logits()) == 4
            read.append(captured.logits()[0][1])
        assert read == [1, 3, 3, 5]


def test_a_capture_refuses_functions(gpu: AnyCuda) -> None:
    with Attending() as training:
        handle = training.amp.after_step(lambda taken: None)
        training.step()
        before = training.masters()
        training.optimizer.zero_grad()
        training.backward(training.loss())
        with pytest.raises(RuntimeError, match="no function while a CUDA graph"), gpu.capture():
            training.optimizer.step()
        assert all(map(torch.equal, before, training.masters()))
        handle.remove()
        with gpu.capture():
            training.optimizer.step()
        with pytest.raises(RuntimeError, match="after a capture"):
            training.amp.after_step(lambda taken: None)
