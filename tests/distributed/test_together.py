"""Four gloo ranks on CPU nest engines: some train as one process does, others are refused.

The ranks are this file run as a script, see two_ranks.py.
"""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipelines import Alone, Staged, stage_inputs
from staged import ULP, Replicated, assert_as_alone
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from two_ranks import Pair, of_ranks, on_ranks, refused, serve

import tritonamp

pytestmark = of_ranks

RANKS = 4


@on_ranks
def layers_and_alone(fault: str | None) -> list[Any]:
    found = Replicated("layers", level="O2").train(fault, 1.0)
    return [found, Alone(level="O2").train(fault, 1.0)]


@pytest.mark.parametrize("fault", [None, "loss", "gradient", "activation"])
def test_tensor_parallel_stages(pair: Pair, fault: str | None) -> None:
    assert_as_alone(layers_and_alone(pair, fault=fault), fault)


# checkpoints of stages that are sharded


@on_ranks
def sharded_stages(folder: str) -> list[Any]:
    """Return the error of save_sharded, and the ends of a run and of its resume by torch."""
    stage = dist.get_rank() // 2
    runs = [Replicated("FSDP2", level="O2", optimizer="AdamW", seed=seed) for seed in (0, 1)]

    def state(run: Replicated) -> dict[str, Any]:
        model, optimizer = get_state_dict(run.models[0], run.optimizers[0])
        return {f"model{stage}": model, f"optimizer{stage}": optimizer}

    runs[0].walk(stage_inputs())
    parts = {"models": runs[0].models, "amp": runs[0].amp}
    told = refused(lambda: tritonamp.save_sharded(f"{folder}/ours", **parts))
    save({**state(runs[0]), "amp": runs[0].amp.state_dict()}, checkpoint_id=f"{folder}/torch's")
    saved = {**state(runs[1]), "amp": runs[1].amp.state_dict()}
    load(saved, checkpoint_id=f"{folder}/torch's")
    models, optimizers = saved[f"model{stage}"], saved[f"optimizer{stage}"]
    set_state_dict(
        runs[1].models[0],
        runs[1].optimizers[0],
        model_state_dict=models,
        optim_state_dict=optimizers,
    )
    runs[1].amp.load_state_dict(saved["amp"])
    ends = []
    for run in runs:
        run.walk(stage_inputs(2))
        ends.append([run.values(), run.state()[:5]])
    return [told, ends]


def test_sharded_stages_are_saved_by_torch(pair: Pair, tmp_path: Path) -> None:
    for told, (continued, again) in sharded_stages(pair, folder=str(tmp_path)):
        assert told.startswith("ValueError: cannot save stages of a pipeline")
        assert again == continued
    assert [path.name for path in tmp_path.iterdir()] == ["torch's"]


# torch's DDP broadcasts parameters as one, and DTensors are not


@on_ranks
def replicated_layers() -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "tensor"))
    model = parallelize_module(nn.Linear(8, 8), mesh["tensor"], ColwiseParallel())
    return refused(lambda: DistributedDataParallel(model, process_group=mesh.get_group("replica")))


def test_torch_has_no_ddp_around_tensor_parallel_models(pair: Pair) -> None:
    for text in replicated_layers(pair):
        assert re.search("mixed torch.Tensor and DTensor|not have a sharding strategy", text)


# what looks into a stage, and what compiles one


def ranges(run: Alone) -> dict[str, float]:
    """Return the readings of ``amp.watch`` in the last step."""
    watch = run.amp.watch(every=1)
    run.walk(stage_inputs(2))
    found = {f"{r.module} {r.direction}": r.absmax for r in run.amp.ranges()}
    watch.remove()
    return found


@on_ranks
def watched() -> list[Any]:
    how: dict[str, Any] = dict(level="O2", summed=True)
    return [ranges(Replicated("layers", **how)), ranges(Alone(**how))]


def test_watched_stages(pair: Pair) -> None:
    answers = watched(pair)
    found = answers[0][0] | answers[2][0]
    assert answers[1][0].keys() == answers[0][0].keys() != answers[2][0].keys()
    alone = {name: value for name, value in answers[0][1].items() if name[0].isdigit()}
    assert found == pytest.approx(alone, rel=2 * 10 * ULP)


class Compiled(Staged):
    """Two stages, compiled; two ranks and the other two are pipelines of their own."""

    def __init__(self, **options: Any) -> None:
        def wrap(model: nn.Module) -> Any:
            return torch.compile(model, backend="aot_eager")

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "stage"))
        super().__init__(mesh=mesh, wrap=wrap, lacks_replicas=True, **options)


@on_ranks
def run_compiled(fault: str | None) -> list[Any]:
    return [run.train(fault) for run in (Compiled(level="O2"), Alone(level="O2"))]


@pytest.mark.compiled
@pytest.mark.parametrize("fault", [None, "loss", "gradient"])
def test_compiled_stages(pair: Pair, fault: str | None) -> None:
    (first, alone), (second, _), *_ = run_compiled(pair, fault=fault)
    assert second["losses"] == alone["losses"]
    assert first["state"] == second["state"] == alone["state"]
    assert first["norms"] == second["norms"] or fault == "loss"
    for part in (first, second):
        for name, value in part["values"].items():
            assert value == alone["values"][name.removeprefix("_orig_mod.")], name


if __name__ == "__main__":
    serve(*sys.argv[1:])
