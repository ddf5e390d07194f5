"""Two gloo ranks on CPU tell which elements of their parameters, or shards, have changed.

They are this file run as a script, see two_ranks.py.
"""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import SMALL_STEPS, Shared, joint, sharded
from small_models import uneven_net
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from two_ranks import RANKS, Pair, of_ranks, on_ranks, serve

pytestmark = of_ranks


def model_by(how: str) -> nn.Module:
    model = uneven_net() if how == "FSDP2" else nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
    if how == "DDP":
        return DistributedDataParallel(model)
    if how == "FSDP2":
        return sharded(model, policy={"param_dtype": torch.float16})  # type: ignore[no-any-return]
    mesh = init_device_mesh("cpu", (RANKS,))
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})


def parts(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the parts of the parameters that this rank holds."""
    named = getattr(model, "module", model).named_parameters()
    return {n: getattr(p, "_local_tensor", p).detach().clone() for n, p in named}


@on_ranks
def sent(how: str, kind: str) -> dict[str, Any]:
    """Train two steps of which the second is skipped, write a parameter, and send twice."""
    make: Callable[..., Any] = SMALL_STEPS[kind]
    run = Shared(model_by(how), make, "O2", share=joint, track_changes=True)
    sampler, counts = parts(run.model), []
    for write in (False, True):
        run.walk([run.x], {})
        run.walk([run.x], {0: "loss"})
        before = parts(run.model)
        if write:
            with torch.no_grad():
                next(iter(run.model.parameters())).mul_(2)
        found = run.amp.changes()
        for name, (positions, values) in found.items():
            sampler[name].view(-1)[positions.long()] = values
        now = parts(run.model)
        written = sum(int((now[n] != before[n]).sum()) for n in now)
        counts.append([sum(len(at) for at, _ in found.values()), written])
    equal = all(torch.equal(sampler[n], p) for n, p in parts(run.model).items())
    small = {str(at.dtype) for at, _ in found.values()} == {"torch.int32"}
    left = [len(at) for at, _ in run.amp.changes().values()]
    shares = run.amp.stats()["lost_updates"]
    run.end()
    return {"equal": equal, "small": small, "left": sum(left), "counts": counts, "shares": shares}


@pytest.mark.parametrize("kind", ["AdamW", "NAdam"])
@pytest.mark.parametrize("how", ["DDP", "FSDP2", "layers"])
def test_parts_of_ranks(pair: Pair, how: str, kind: str) -> None:
    for rank in sent(pair, how=how, kind=kind):
        assert rank["equal"] and rank["small"] and rank["left"] == 0
        (stepped, _), (both, written) = rank["counts"]
        assert 0 < written <= both and stepped > 0


if __name__ == "__main__":
    serve(*sys.argv[1:])
