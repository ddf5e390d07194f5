"""Accelerate, Trainer and TRL on two gloo ranks under FSDP2: losses of one process on the joint
batch, one decision of both ranks, and a resume that is not a stop.

The ranks are this file run as a script, see two_ranks.py.
"""

import contextlib
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from two_ranks import RANKS, Pair, on_ranks, serve

import tritonamp

if sys.version_info < (3, 11):
    pytest.skip("transformers 5.23 needs Python 3.11", allow_module_level=True)
os.environ["HF_HUB_OFFLINE"] = "1"  # before it is imported
pytest.importorskip("accelerate", reason="accelerate is not installed")

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

from tritonamp.integrations.accelerate import enable

pytestmark = [
    pytest.mark.clients,
    pytest.mark.ranks,
    pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed"),
]

STEPS, BAD = 6, 2
HALF_ROUNDINGS = 10 * 2.0**-11
"""Between weights and loss: of weights, and of what each layer reads and returns."""


@contextlib.contextmanager
def accelerate_has_fsdp(gpus: bool = True) -> Iterator[None]:
    """Have Accelerate run FSDP over gloo on CPU.

    Accelerate 1.15 does so on GPUs and their like alone (``AcceleratorState.__init__``): on CPUs
    it takes DDP without a word. What is replaced is its answer to which hardware there is.
    """
    rank = str(dist.get_rank())
    told = {"LOCAL_RANK": rank, "RANK": rank, "WORLD_SIZE": str(RANKS)}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in told.items():
            patch.setenv(name, value)
        if gpus:
            found = "gloo", DistributedType.MULTI_GPU
            patch.setattr(PartialState, "_prepare_backend", lambda *_: found)
            patch.setenv("ACCELERATE_TORCH_DEVICE", "cpu")
        AcceleratorState._reset_state(True)
        try:
            yield
        finally:
            AcceleratorState._reset_state(True)


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator))
        for _ in range(STEPS)
    ]


def share(x: Tensor) -> Tensor:
    return x.chunk(RANKS)[dist.get_rank()]


def parts(model: nn.Module) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=0.25)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def scaler() -> tritonamp.GradScaler:
    return tritonamp.GradScaler("cpu", init_scale=2.0**10)


def loss_of(output: Tensor, y: Tensor, overflows: bool) -> Tensor:
    if overflows:
        output.register_hook(lambda grad: grad * math.inf)
    return nn.functional.mse_loss(output, y)


def whole(state: dict[str, Any]) -> dict[str, list[float]]:
    full = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in state.items()}
    return {n: t.double().flatten().tolist() for n, t in full.items()}


def causes(amp: tritonamp.Amp) -> list[str]:
    return [str(record.cause) for record in amp.history]


class Run:
    """A training under Accelerate on the share of this rank."""

    def __init__(self, level: str, mixed_precision: str | None, **settings: Any) -> None:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=20
        )
        self.accelerator: Any = Accelerator(mixed_precision=mixed_precision, fsdp_plugin=plugin)
        enable(self.accelerator, level=level, scaler=scaler(), **settings)
        model = net()
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(model, *parts(model))
        self.losses: list[float] = []
        self.skips: list[bool] = []

    def train(self, start: int, end: int) -> dict[str, list[float]]:
        for i, (x, y) in list(enumerate(batches()))[start:end]:
            with self.accelerator.accumulate(self.model):
                output = self.model(share(x))
                assert output.dtype is torch.float32
                loss = loss_of(output, share(y), i == BAD and dist.get_rank() == 1)
                self.accelerator.backward(loss)
                self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.skips.append(self.accelerator.optimizer_step_was_skipped)
                self.scheduler.step()
                self.optimizer.zero_grad()
            self.losses.append(loss.item())
        return whole(self.model.state_dict())


def alone(level: str, dtype: torch.dtype) -> tuple[list[float], list[str]]:
    """Losses and causes of one process on the joint batches."""
    model, losses = net(), []
    optimizer, scheduler = parts(model)
    amp = tritonamp.enable(model, optimizer, level=level, dtype=dtype, scaler=scaler())
    for i, (x, y) in enumerate(batches()):
        loss = loss_of(model(x), y, i == BAD)
        amp.backward(loss)
        amp.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        for _ in range(RANKS if amp.history[-1].cause is None else 0):  # as Accelerate steps it
            scheduler.step()
        losses.append(loss.item())
    found = causes(amp)
    amp.disable()
    return losses, found


@on_ranks
def by_accelerate(level: str, mixed_precision: str | None, folder: str) -> dict[str, Any]:
    with accelerate_has_fsdp():
        run = Run(level, mixed_precision)
        assert run.accelerator.distributed_type is DistributedType.FSDP
        assert {type(p).__name__ for p in run.model.parameters()} == {"DTensor"}
        run.train(0, BAD + 2)
        run.accelerator.save_state(folder)
        end = run.train(BAD + 2, STEPS)
        stats, found = run.accelerator.amp.stats(), causes(run.accelerator.amp)
        run.accelerator.free_memory()
        AcceleratorState._reset_state(True)
        again = Run(level, mixed_precision)
        again.accelerator.load_state(folder)
        resumed = again.train(BAD + 2, STEPS)
        counts = again.accelerator.amp.stats()
        again.accelerator.free_memory()
    dtype = torch.bfloat16 if mixed_precision == "bf16" else torch.float16
    assert (resumed, again.losses) == (end, run.losses[BAD + 2 :])
    assert [counts[k] for k in ("steps", "scale")] == [stats[k] for k in ("steps", "scale")]
    losses, expected = alone(level, dtype)
    return {
        "losses": run.losses,
        "alone": losses,
        "causes": [found, expected],
        "skips": run.skips,
        "end": end,
    }


def check(answers: list[dict[str, Any]], roundings: float) -> None:
    """Both ranks decide as one process on the joint batch, whose losses theirs have as a mean."""
    first, second = answers
    for key in ("alone", "causes", "end"):
        assert first[key] == second[key]
    assert first["causes"][0] == first["causes"][1]
    pairs = zip(first["losses"], second["losses"], first["alone"], strict=True)
    for one, other, joint in pairs:
        assert one != other
        print(abs((one + other) / 2 - joint) / joint)
        assert abs((one + other) / 2 - joint) <= roundings * joint


@pytest.mark.parametrize(
    ("level", "mixed_precision"), [("O1", None), ("O2", None), ("O2", "fp16"), ("O1", "bf16")]
)
def test_accelerate(pair: Pair, tmp_path: Path, level: str, mixed_precision: str | None) -> None:
    folder = str(tmp_path / "state")
    answers = by_accelerate(pair, level=level, mixed_precision=mixed_precision, folder=folder)
    check(answers, HALF_ROUNDINGS * (8 if mixed_precision == "bf16" else 1))
    for answer in answers:
        assert answer["skips"] == [i == BAD for i in range(STEPS)]


if __name__ == "__main__":
    serve(*sys.argv[1:])
