"""Four gloo ranks on CPU train two stages of a pipeline, each twice, under DDP or FSDP2.

The ranks are this file run as a script, see two_ranks.py.
"""

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collectives import Collectives
from pipelines import RUN, SCALE, STEPS, Alone, Staged, batches, train
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from two_ranks import Pair, of_ranks, on_ranks, serve

import tritonamp

pytestmark = of_ranks

RANKS = 4


ULP = 2.0**-11  # of half


class Replicated(Staged):
    """Stages under DDP or FSDP2; each replica reads a half of every batch."""

    def __init__(self, way: str, kind: str = "1F1B", **options: Any) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "replica"))
        self._replica = mesh["replica"].get_local_rank()
        self.is_faulty = self._replica == 1

        def wrap(model: nn.Module) -> nn.Module:
            if way == "DDP":
                return DistributedDataParallel(model, process_group=mesh.get_group("replica"))
            half = MixedPrecisionPolicy(param_dtype=torch.float16)
            return fully_shard(model, mesh=mesh["replica"], mp_policy=half)

        super().__init__(kind, mesh=mesh, wrap=wrap, **options)

    def backward(self, x: Tensor) -> list[float]:
        return super().backward(x.chunk(2)[self._replica])


@on_ranks
def run(way: str, kind: str, fault: str | None = None, **options: Any) -> list[Any]:
    found = train(Replicated(way, kind, level="O2", **options), fault, 1.0)
    return [found, train(Alone(level="O2", **options), fault, 1.0)]


FAULTS = "loss", "gradient", "activation"
# plain torch 2.14 fails with DDP under GPipe, and where a rank has two stages
WAYS = [
    ("DDP", "1F1B", None),
    *[("FSDP2", kind, None) for kind in RUN if kind not in ("traced", "dual V")],
    *[(way, "1F1B", fault) for way in ("DDP", "FSDP2") for fault in FAULTS],
]


@pytest.mark.parametrize(("way", "kind", "fault"), WAYS)
def test_as_one_process(pair: Pair, way: str, kind: str, fault: str | None) -> None:
    """The tolerances are those of test_tensor_parallel.py: 10 roundings to half on the way."""
    answers = run(pair, way=way, kind=kind, fault=fault)
    found, alone = answers[0]
    values = {}
    for each, _ in answers:
        assert each["norms"] == found["norms"] or math.isnan(math.fsum(found["norms"]))
        assert each["state"] == found["state"] == alone["state"]
        for name, value in each["values"].items():
            assert values.setdefault(name, value) == value  # of both replicas
    assert values.keys() == alone["values"].keys()
    assert found["state"][:2] == [STEPS - bool(fault), int(bool(fault))]
    assert found["state"][4] == (SCALE / 2 if fault == "gradient" else SCALE)
    for ours, theirs in zip(found["norms"], alone["norms"], strict=True):
        assert not math.isfinite(ours) or ours == pytest.approx(theirs, rel=STEPS * 10 * ULP)
    bound = STEPS * 0.1 / (1 - 0.5) * 10 * ULP  # of SGD, at a norm of 1
    for name, value in values.items():
        far = [abs(a - b) for a, b in zip(value, alone["values"][name], strict=True)]
        assert max(far) <= bound, name


@on_ranks
def moved(way: str) -> dict[str, int]:
    run = Replicated(way, level="O2")
    run.backward(batches()[0])
    run.step()
    with Collectives() as collectives:
        for x in batches():
            run.backward(x)
            run.amp.clip_grad_norm_(1.0)
            run.step()
    run.amp.disable()
    return dict(collectives.found)


@pytest.mark.parametrize("way", ["DDP", "FSDP2"])
def test_a_step_moves_seven_numbers_beside_the_engines(pair: Pair, way: str) -> None:
    for found in moved(pair, way=way):
        assert found.pop("_allgather_base_ torch.float32 28") == STEPS
        kinds = {name.split()[0] for name in found}
        engine = {"_allgather_base_", "_reduce_scatter_base_"}
        if way == "DDP":
            engine = {"allreduce_", "broadcast_"}  # the second as it makes its buckets anew
        assert kinds - {"send", "recv_", "recv_any_source_"} <= engine


@on_ranks
def resumed(folder: str) -> list[Any]:
    """Trains, saves and trains on; resumes in other objects. A stage has a file."""
    stage = dist.get_rank() // 2
    runs = [Replicated("DDP", level="O2", optimizer="AdamW", seed=seed) for seed in (0, 1)]
    parts = [{"models": r.models, "optimizers": r.optimizers, "amp": r.amp} for r in runs]
    for run in runs:
        # torch 2.14 alone rounds the first gradients under DDP otherwise than all later ones
        run.backward(batches()[0])
        run.optimizers[0].zero_grad()
    for x in batches():
        runs[0].backward(x)
        runs[0].step()
    tritonamp.save(f"{folder}/stage{stage}.pt", **parts[0])
    tritonamp.load(f"{folder}/stage{stage}.pt", **parts[1])
    found = []
    for run in runs:
        for x in batches(2):
            run.backward(x)
            run.amp.clip_grad_norm_(0.5)
            run.step()
        found.append([run.values(), run.state()])
        run.amp.disable()
    return found


def test_a_file_for_each_stage_resumes_bit_for_bit(pair: Pair, tmp_path: Path) -> None:
    for continued, again in resumed(pair, folder=str(tmp_path)):
        assert again == continued
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stage0.pt", "stage1.pt"]


@on_ranks
def told(what: str) -> str:
    try:
        if what == "join":
            run = Replicated("DDP", level="O2")
            with run.models[0].join():
                run.backward(batches()[0])
                run.step()
        else:
            Replicated(what, level="O2", lacks_replicas=True).backward(batches()[0])
        return "nothing"
    except (RuntimeError, ValueError) as error:
        return str(error.__cause__ or error)


@pytest.mark.parametrize("what", ["DDP", "FSDP2"])
def test_a_group_without_replicas_is_refused(pair: Pair, what: str) -> None:
    for text in told(pair, what=what):
        assert text.startswith("amp.pipeline_loss: expected a process_group of all ranks")


def test_uneven_inputs_are_refused(pair: Pair) -> None:
    for text in told(pair, what="join"):
        assert text.startswith("model.join(): expected all stages of a pipeline to decide")


if __name__ == "__main__":
    serve(*sys.argv[1:])
