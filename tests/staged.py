"""Pipelines of two ranks for each stage, and checks that pipelines share."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pipelines import STEPS, Alone, Staged, stage_inputs
from ranks import SCALE, sharded
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import tritonamp

ULP = 2.0**-11  # of half


class Replicated(Staged):
    """Two stages of two ranks each.

    Args:
        way: "DDP" or "FSDP2", under which each rank of a stage reads a half of every batch, or
            "layers", whose neurons the ranks share.
        kind: name of the schedule.
        options: arguments of ``Staged``.
    """

    def __init__(self, way: str, kind: str = "1F1B", **options: Any) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "inner"))
        self._part = None if way == "layers" else mesh["inner"].get_local_rank()
        self.is_faulty = self._part != 0

        def wrap(model: nn.Module) -> Any:
            if way == "DDP":
                return DistributedDataParallel(model, process_group=mesh.get_group("inner"))
            if way == "FSDP2":
                policy = {"param_dtype": torch.float16}
                return sharded(model, policy=policy, mesh=mesh["inner"])
            plan = ColwiseParallel(output_layouts=Replicate())
            names = [f"{name}.layer" for name, _ in model.named_children()]
            return parallelize_module(model, mesh["inner"], dict.fromkeys(names, plan))

        super().__init__(kind, mesh=mesh, wrap=wrap, **options)

    def backward(self, x: Tensor) -> list[float]:
        return super().backward(x if self._part is None else x.chunk(2)[self._part])


def assert_as_alone(answers: list[Any], fault: str | None) -> None:
    """Check what ``train`` of `Replicated` on all ranks and of `Alone` returned.

    There are 10 roundings to half on the way.
    """
    found, alone = answers[0]
    values = dict[str, list[float]]()
    for each, _ in answers:
        assert str(each["norms"]) == str(found["norms"])
        assert each["state"] == found["state"] == alone["state"]
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


def resumed(path: str, before: int, *runs: Alone, max_norm: float | None = None) -> list[Any]:
    """Train the first run, save it, and load it into the second one; then both go on.

    Args:
        path: the file.
        before: number of steps before the save.
        runs: the two runs.
        max_norm: the norm that gradients are clipped to before the save; later it is 0.5.

    Returns:
        The values of both after the load, then values and state of each at the end.
    """
    runs[0].walk(stage_inputs(before), max_norm)
    tritonamp.save(path, **runs[0].objects())
    tritonamp.load(path, **runs[1].objects())
    found: list[Any] = [run.values() for run in runs]
    for run in runs:
        run.walk(stage_inputs(2), 0.5)
        found.append([run.values(), run.state()])
    return found


def said_by(act: Callable[[], Any]) -> str:
    """Return the text of the error that an act raises, or of its cause; "nothing" without one."""
    try:
        act()
    except (RuntimeError, ValueError) as error:
        return str(error.__cause__ or error)
    return "nothing"
