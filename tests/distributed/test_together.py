"""Four gloo ranks on CPU put engines into one another: what trains as one process does, and what is
refused.

The ranks are this file run as a script, see two_ranks.py.
"""

import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipelines import SCALE, STEPS, Alone, Staged, batches, train
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from two_ranks import Pair, of_ranks, on_ranks, refused, serve

import tritonamp

pytestmark = of_ranks

RANKS = 4
ULP = 2.0**-11  # of half


def split(model: nn.Module, mesh: Any) -> nn.Module:
    """Share the neurons of each block's layer."""
    shared = ColwiseParallel(output_layouts=Replicate())
    return parallelize_module(
        model, mesh, {f"{n}.layer": shared for n, _ in model.named_children()}
    )


class Nested(Staged):
    """Two stages, each of which two ranks share: "layers", or "FSDP2" and half a batch each."""

    def __init__(self, way: str, **options: Any) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "inner"))
        self._part = mesh["inner"].get_local_rank() if way == "FSDP2" else None

        def wrap(model: nn.Module) -> nn.Module:
            if way == "layers":
                return split(model, mesh["inner"])
            half = MixedPrecisionPolicy(param_dtype=torch.float16)
            return fully_shard(model, mesh=mesh["inner"], mp_policy=half)

        super().__init__("1F1B", mesh=mesh, wrap=wrap, **options)

    def backward(self, x: Tensor) -> list[float]:
        return super().backward(x if self._part is None else x.chunk(2)[self._part])


@on_ranks
def run(fault: str | None) -> list[Any]:
    found = train(Nested("layers", level="O2"), fault, 1.0)
    return [found, train(Alone(level="O2"), fault, 1.0)]


@pytest.mark.parametrize("fault", [None, "loss", "gradient", "activation"])
def test_tensor_parallel_stages(pair: Pair, fault: str | None) -> None:
    """The tolerances are those of test_pipeline_replicas.py."""
    answers = run(pair, fault=fault)
    found, alone = answers[0]
    values = dict[str, list[float]]()
    for each, _ in answers:
        assert str(each["norms"]) == str(found["norms"])
        assert each["state"] == alone["state"]
        for name, value in each["values"].items():
            assert values.setdefault(name, value) == value  # of both ranks of a stage
    assert values.keys() == alone["values"].keys()
    assert found["state"][:2] == [STEPS - bool(fault), int(bool(fault))]
    assert found["state"][4] == (SCALE / 2 if fault == "gradient" else SCALE)
    for ours, theirs in zip(found["norms"], alone["norms"], strict=True):
        assert not math.isfinite(ours) or ours == pytest.approx(theirs, rel=STEPS * 10 * ULP)
    bound = STEPS * 0.1 / (1 - 0.5) * 10 * ULP  # of SGD, at a norm of 1
    for name, value in values.items():
        far = [abs(a - b) for a, b in zip(value, alone["values"][name], strict=True)]
        assert max(far) <= bound, name


# checkpoints of stages that are sharded


@on_ranks
def sharded_stages(folder: str) -> list[Any]:
    """What save_sharded says; and a run that goes on, and goes on from torch's checkpoint."""
    stage = dist.get_rank() // 2
    runs = [Nested("FSDP2", level="O2", optimizer="AdamW", seed=seed) for seed in (0, 1)]

    def state(run: Nested) -> dict[str, Any]:
        model, optimizer = get_state_dict(run.models[0], run.optimizers[0])
        return {f"model{stage}": model, f"optimizer{stage}": optimizer}

    for x in batches():
        runs[0].backward(x)
        runs[0].step()
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
        for x in batches(2):
            run.backward(x)
            run.step()
        ends.append([run.values(), run.state()[:5]])
        run.amp.disable()
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
    """What ``amp.watch`` has read in the last step."""
    watch = run.amp.watch(every=1)
    for x in batches(2):
        run.backward(x)
        run.step()
    found = {f"{r.module} {r.direction}": r.absmax for r in run.amp.ranges()}
    watch.remove()
    run.amp.disable()
    return found


@on_ranks
def watched() -> list[Any]:
    how: dict[str, Any] = dict(level="O2", summed=True)
    return [ranges(Nested("layers", **how)), ranges(Alone(**how))]


def test_watched_stages(pair: Pair) -> None:
    answers = watched(pair)
    found = answers[0][0] | answers[2][0]
    assert answers[1][0].keys() == answers[0][0].keys() != answers[2][0].keys()
    alone = {name: value for name, value in answers[0][1].items() if name[0].isdigit()}
    assert found == pytest.approx(alone, rel=2 * 10 * ULP)


class Compiled(Staged):
    """Two stages, compiled; two ranks and the other two are pipelines of their own."""

    def __init__(self, **options: Any) -> None:
        def compiled(model: nn.Module) -> Any:
            return torch.compile(model, backend="aot_eager")

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "stage"))
        super().__init__(mesh=mesh, wrap=compiled, lacks_replicas=True, **options)


@on_ranks
def run_compiled(fault: str | None) -> list[Any]:
    found = train(Compiled(level="O2"), fault)
    return [found, train(Alone(level="O2"), fault)]


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
