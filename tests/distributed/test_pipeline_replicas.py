"""Four gloo ranks on CPU train two stages of a pipeline, each twice, under DDP or FSDP2.

The ranks are this file run as a script, see two_ranks.py.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from collectives import Collectives
from pipelines import RUN, STEPS, Alone, stage_inputs
from staged import Replicated, assert_as_alone, resumed, said_by
from two_ranks import Pair, of_ranks, on_ranks, serve

pytestmark = of_ranks

RANKS = 4


@on_ranks
def replicated_and_alone(way: str, kind: str, fault: str | None = None) -> list[Any]:
    found = Replicated(way, kind, level="O2").train(fault, 1.0)
    return [found, Alone(level="O2").train(fault, 1.0)]


FAULTS = "loss", "gradient", "activation"
# plain torch 2.14 fails with DDP under GPipe, and where a rank has two stages
WAYS = [
    ("DDP", "1F1B", None),
    *[("FSDP2", kind, None) for kind in RUN if kind not in ("traced", "dual V")],
    *[(way, "1F1B", fault) for way in ("DDP", "FSDP2") for fault in FAULTS],
]


@pytest.mark.parametrize(("way", "kind", "fault"), WAYS)
def test_as_one_process(pair: Pair, way: str, kind: str, fault: str | None) -> None:
    assert_as_alone(replicated_and_alone(pair, way=way, kind=kind, fault=fault), fault)


@on_ranks
def collectives_of(way: str) -> dict[str, int]:
    run = Replicated(way, level="O2")
    run.walk(stage_inputs(1))
    with Collectives() as collectives:
        run.walk(stage_inputs(), 1.0)
    return dict(collectives.found)


@pytest.mark.parametrize("way", ["DDP", "FSDP2"])
def test_a_step_moves_seven_numbers_beside_the_engines(pair: Pair, way: str) -> None:
    for found in collectives_of(pair, way=way):
        assert found.pop("_allgather_base_ torch.float32 28") == STEPS
        kinds = {name.split()[0] for name in found}
        engine = {"_allgather_base_", "_reduce_scatter_base_"}
        if way == "DDP":
            engine = {"allreduce_", "broadcast_"}  # the second as it rebuilds its buckets
        assert kinds - {"send", "recv_", "recv_any_source_"} <= engine


@on_ranks
def resumed_stages(folder: str) -> list[Any]:
    """Trains, saves and trains on; resumes in other objects. A stage has a file."""
    stage = dist.get_rank() // 2
    runs = [Replicated("DDP", level="O2", optimizer="AdamW", seed=seed) for seed in (0, 1)]
    for run in runs:
        # torch 2.14 alone rounds the first gradients under DDP otherwise than all later ones
        run.backward(stage_inputs()[0])
        run.optimizers[0].zero_grad()
    return resumed(f"{folder}/stage{stage}.pt", STEPS, *runs)[2:]


def test_a_file_for_each_stage_resumes_bit_for_bit(pair: Pair, tmp_path: Path) -> None:
    for continued, again in resumed_stages(pair, folder=str(tmp_path)):
        assert again == continued
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stage0.pt", "stage1.pt"]


def in_join() -> None:
    run = Replicated("DDP", level="O2")
    with run.models[0].join():
        run.walk(stage_inputs(1))


@on_ranks
def refusal_of_join() -> str:
    return said_by(in_join)


@on_ranks
def refusal_without_replicas(what: str) -> str:
    def act() -> None:
        Replicated(what, level="O2", lacks_replicas=True).backward(stage_inputs()[0])

    return said_by(act)


@pytest.mark.parametrize("what", ["DDP", "FSDP2"])
def test_a_group_without_replicas_is_refused(pair: Pair, what: str) -> None:
    for text in refusal_without_replicas(pair, what=what):
        assert text.startswith("amp.pipeline_loss: expected a process_group of all ranks")


def test_uneven_inputs_are_refused(pair: Pair) -> None:
    for text in refusal_of_join(pair):
        assert text.startswith("model.join(): expected all stages of a pipeline to decide")


if __name__ == "__main__":
    serve(*sys.argv[1:])
