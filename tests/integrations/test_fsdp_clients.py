"""Accelerate, Trainer and TRL on two gloo ranks under FSDP2: losses of one process on the joint
batch, one decision of both ranks, and a resume that is not a stop.

The ranks are this file run as a script, see two_ranks.py.
"""

import contextlib
import math
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from clients import client_net
from ranks import SMALL_STEPS, Shared, joint, joint_batches, scaler, share
from tiny_models import losses_of, make_llama, make_tokenizer, rows_of, sft_trainer_of, trainer_of
from torch import Tensor, nn
from two_ranks import RANKS, Pair, on_ranks, refused, serve, whole

import tritonamp

pytest.importorskip("accelerate")
pytest.importorskip("datasets")
pytest.importorskip("trl")

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

from tritonamp.integrations.accelerate import enable
from tritonamp.integrations.transformers import enable as enable_trainer

OF_TRL = "`(is_)?gradient_checkpointing.*` is deprecated"  # and of PEFT, to transformers

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{OF_TRL}"),
    pytest.mark.clients,
    pytest.mark.ranks,
    pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed"),
]

STEPS, BAD = 6, 2
ROUNDINGS = 4
"""Between weights and loss: of two layers' weights, and of what they return."""


@contextlib.contextmanager
def accelerate_has_fsdp(gpus: bool = True) -> Iterator[None]:
    """Have Accelerate run FSDP over gloo on CPU.

    Accelerate 1.15 does so on GPUs and their like alone (``AcceleratorState.__init__``): on CPUs
    it takes DDP without a word. What is replaced is its answer to which hardware there is.
    """
    rank = str(dist.get_rank())
    told = {"LOCAL_RANK": rank, "RANK": rank}
    told |= {"LOCAL_WORLD_SIZE": str(RANKS), "WORLD_SIZE": str(RANKS)}
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


def with_scheduler(optimizer: torch.optim.Optimizer) -> Any:
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def whole_state(state: dict[str, Any]) -> dict[str, list[float]]:
    return {name: whole(value) for name, value in state.items()}


def causes_in(amp: tritonamp.Amp) -> list[str]:
    return [str(record.cause) for record in amp.history]


class Accelerated:
    """A training under Accelerate on the share of this rank."""

    def __init__(self, level: str, mixed_precision: str | None, by_fsdp: bool) -> None:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=20
        )
        self.accelerator: Any = Accelerator(
            cpu=not by_fsdp, mixed_precision=mixed_precision, fsdp_plugin=plugin
        )
        engine = DistributedType.FSDP if by_fsdp else DistributedType.MULTI_CPU  # as on any CPU
        assert self.accelerator.distributed_type is engine
        enable(self.accelerator, level=level, scaler=scaler())
        model = client_net()
        parts = with_scheduler(SMALL_STEPS["AdamW"](model.parameters()))
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(model, *parts)
        self.losses: list[float] = []
        self.skips: list[bool] = []

    def go_on(self, start: int, end: int) -> dict[str, list[float]]:
        for i, x in list(enumerate(joint_batches(STEPS)))[start:end]:
            with self.accelerator.accumulate(self.model):
                output = self.model(share(x))
                assert output.dtype is torch.float32
                if i == BAD and dist.get_rank() == 1:
                    output.register_hook(lambda grad: grad * math.inf)
                loss = (output - 1).square().mean()
                self.accelerator.backward(loss)
                self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.skips.append(self.accelerator.optimizer_step_was_skipped)
                self.scheduler.step()
                self.optimizer.zero_grad()
            self.losses.append(loss.item())
        return whole_state(self.model.state_dict())


def losses_and_causes_alone(level: str, dtype: torch.dtype) -> tuple[list[float], list[str]]:
    """Losses and causes of one process on the joint batches."""
    run = Shared(client_net(), level=level, share=joint, dtype=dtype)
    _, scheduler = with_scheduler(run.optimizer)
    for i, x in enumerate(joint_batches(STEPS)):
        run.walk([x], {0: "gradient"} if i == BAD else {}, max_norm=1.0)
        for _ in range(RANKS if run.causes[-1] is None else 0):  # as Accelerate steps it
            scheduler.step()
    return run.losses, causes_in(run.amp)


@on_ranks
def by_accelerate(
    level: str, mixed_precision: str | None, sharded: bool, folder: str
) -> dict[str, Any]:
    with accelerate_has_fsdp(gpus=sharded):
        run = Accelerated(level, mixed_precision, sharded)
        assert {type(p).__name__ == "DTensor" for p in run.model.parameters()} == {sharded}
        run.go_on(0, BAD + 2)
        run.accelerator.save_state(folder)
        end = run.go_on(BAD + 2, STEPS)
        stats, found = run.accelerator.amp.stats(), causes_in(run.accelerator.amp)
        run.accelerator.free_memory()
        AcceleratorState._reset_state(True)
        again = Accelerated(level, mixed_precision, sharded)
        again.accelerator.load_state(folder)
        resumed = again.go_on(BAD + 2, STEPS)
        counts = again.accelerator.amp.stats()
        again.accelerator.free_memory()
    dtype = torch.bfloat16 if mixed_precision == "bf16" else torch.float16
    assert (resumed, again.losses) == (end, run.losses[BAD + 2 :])
    assert [counts[k] for k in ("steps", "scale")] == [stats[k] for k in ("steps", "scale")]
    losses, expected = losses_and_causes_alone(level, dtype)
    return {
        "losses": run.losses,
        "alone": losses,
        "causes": [found, expected],
        "skips": run.skips,
        "end": end,
    }


def decide_as_one(answers: list[dict[str, Any]], dtype: torch.dtype) -> None:
    """Both ranks decide as one process on the joint batch, whose losses theirs have as a mean."""
    first, second = answers
    for key in ("alone", "causes", "end"):
        assert first[key] == second[key]
    assert first["causes"][0] == first["causes"][1]
    pairs = zip(first["losses"], second["losses"], first["alone"], strict=True)
    for one, other, of_both in pairs:
        assert one != other
        assert abs((one + other) / 2 - of_both) <= ROUNDINGS * torch.finfo(dtype).eps / 2 * of_both


@pytest.mark.parametrize(
    ("level", "mixed_precision", "sharded"),
    [
        ("O1", None, True),
        ("O2", None, True),
        ("O2", "fp16", True),
        ("O1", "bf16", True),
        ("O2", None, False),
    ],
)
def test_accelerate(
    pair: Pair, tmp_path: Path, level: str, mixed_precision: str | None, sharded: bool
) -> None:
    how = dict(level=level, mixed_precision=mixed_precision, sharded=sharded)
    answers = by_accelerate(pair, folder=str(tmp_path / "state"), **how)
    decide_as_one(answers, torch.bfloat16 if mixed_precision == "bf16" else torch.float16)
    for answer in answers:
        assert answer["skips"] == [i == BAD for i in range(STEPS)]


@on_ranks
def by_fsdp1() -> str:
    with accelerate_has_fsdp():
        accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=1))
        return refused(lambda: enable(accelerator, level="O2"))


def test_fsdp1_is_refused(pair: Pair) -> None:
    for text in by_fsdp1(pair):
        assert text.startswith(
            "ValueError: accelerator: expected FSDP2, whose shards can be FP32 masters"
        )


# transformers


def overflow_in_training(module: nn.Module) -> None:
    """Have gradients of its output overflow in the third batch of training: on rank 1, or alone."""
    here, calls = not dist.is_initialized() or dist.get_rank() == 1, []

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        if module.training and output.requires_grad:
            calls.append(len(calls))
            if here and calls[-1] == BAD:
                output.register_hook(lambda grad: grad * math.inf)

    module.register_forward_hook(hook)


def overflowing_llama(tokenizer: Any) -> Any:
    model = make_llama(tokenizer, layers=2)
    overflow_in_training(model.model.norm)
    return model


def trainer_of_llama(folder: str, size: int, **arguments: Any) -> Any:
    """With ``size`` rows in a batch; ``RANKS`` * ``size`` are those of a joint step."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(3, 12, (4 * STEPS, 8), generator=generator)
    return trainer_of(
        folder,
        overflowing_llama(make_tokenizer()),
        rows_of(rows),
        max_steps=STEPS,
        per_device_train_batch_size=size,
        learning_rate=0.01,
        adam_epsilon=0.01,
        save_strategy="steps",
        save_steps=BAD + 2,
        train_sampling_strategy="sequential",
        **arguments,
    )


FSDP: dict[str, Any] = dict(fsdp=True)  # version 2 by default


@on_ranks
def by_trainer(level: str, folder: str, arguments: dict[str, Any]) -> dict[str, Any]:
    with accelerate_has_fsdp():
        ends = []
        for start in (None, f"{folder}/checkpoint-{BAD + 2}"):
            # torch warns where a sharded checkpoint is there already
            to = folder if start is None else f"{folder}/again"
            trainer = trainer_of_llama(to, 2, **FSDP, **arguments)
            enable_trainer(trainer, level=level, scaler=scaler())
            trainer.train(resume_from_checkpoint=start)
            assert {type(p).__name__ for p in trainer.model.parameters()} == {"DTensor"}
            ends.append(whole_state(trainer.model.state_dict()))
            ends[-1]["steps"] = trainer.accelerator.amp.stats()["steps"]
            if start is None:
                losses, found = losses_of(trainer), causes_in(trainer.accelerator.amp)
            trainer.accelerator.free_memory()
            AcceleratorState._reset_state(True)
    assert ends[0] == ends[1]
    return {"losses": losses, "causes": found, "end": ends[0]}


def check_trainer(answers: list[dict[str, Any]], trainer: Any) -> None:
    """Both ranks decide as one process on the joint batch, whose losses they log."""
    for answer in answers:
        assert answer["end"] == answers[0]["end"]
        assert answer["causes"] == causes_in(trainer.accelerator.amp)
    losses = losses_of(trainer)
    rounding = ROUNDINGS * torch.finfo(torch.float16).eps / 2
    assert losses[0] - losses[-1] > 10 * rounding * losses[0]
    for a, b in zip(answers[0]["losses"], losses, strict=True):
        assert abs(a - b) <= rounding * b


@pytest.mark.parametrize(
    ("level", "arguments"),
    [
        ("O1", {}),
        ("O2", {"fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}),
        ("O2", {"fp16": True}),
    ],
    ids=str,
)
def test_trainer(pair: Pair, tmp_path: Path, level: str, arguments: dict[str, Any]) -> None:
    answers = by_trainer(pair, level=level, folder=str(tmp_path / "run"), arguments=arguments)
    trainer = trainer_of_llama(str(tmp_path / "alone"), 2 * RANKS, **arguments)
    enable_trainer(trainer, level=level, scaler=scaler())
    trainer.train()
    check_trainer(answers, trainer)
    trainer.accelerator.free_memory()


# TRL


def sft_of_llama(folder: str, size: int, lora: bool, **arguments: Any) -> Any:
    tokenizer = make_tokenizer()
    return sft_trainer_of(
        folder,
        overflowing_llama(tokenizer),
        tokenizer,
        lora,
        max_steps=STEPS,
        per_device_train_batch_size=size,
        learning_rate=0.02,
        adam_epsilon=0.01,
        train_sampling_strategy="sequential",
        bf16=False,
        **arguments,
    )


@on_ranks
def by_sft(level: str, lora: bool, folder: str, sharded: bool) -> dict[str, Any]:
    with accelerate_has_fsdp(gpus=sharded):
        warnings.filterwarnings("ignore", OF_TRL, FutureWarning)
        trainer = sft_of_llama(f"{folder}/run", 2, lora, **FSDP)
        engine = DistributedType.FSDP if sharded else DistributedType.MULTI_CPU  # as on any CPU
        assert trainer.accelerator.distributed_type is engine
        enable_trainer(trainer, level=level, scaler=scaler())
        trainer.train()
        assert {type(p).__name__ == "DTensor" for p in trainer.model.parameters()} == {sharded}
        end = whole_state({n: p for n, p in trainer.model.named_parameters() if p.requires_grad})
        found = causes_in(trainer.accelerator.amp)
        trainer.accelerator.free_memory()
    return {"losses": losses_of(trainer), "causes": found, "end": end}


@pytest.mark.parametrize(
    ("level", "lora", "sharded"),
    [("O2", True, True), ("O2", True, False), ("O1", True, True), ("O2", False, True)],
)
def test_sft(pair: Pair, tmp_path: Path, level: str, lora: bool, sharded: bool) -> None:
    answers = by_sft(pair, level=level, lora=lora, folder=str(tmp_path), sharded=sharded)
    trainer = sft_of_llama(str(tmp_path / "alone"), 2 * RANKS, lora)
    enable_trainer(trainer, level=level, scaler=scaler())
    trainer.train()
    check_trainer(answers, trainer)
    trainer.accelerator.free_memory()


if __name__ == "__main__":
    serve(*sys.argv[1:])
