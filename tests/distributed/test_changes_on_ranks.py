"""Two gloo ranks on CPU tell which elements of their parameters, or shards, have changed.

They are this file run as a script, see two_ranks.py.
"""

import itertools
import math
import re
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import SMALL_STEPS, Shared, joint, sharded
from small_models import uneven_net
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from two_ranks import RANKS, Pair, of_ranks, on_ranks, refused, serve

from tritonamp.step import parameter_bits
from tritonamp.step.shard_offsets import offsets, whole_positions

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
    run.end()
    return {"equal": equal, "small": small, "left": sum(left), "counts": counts}


@pytest.mark.parametrize("kind", ["AdamW", "NAdam"])
@pytest.mark.parametrize("how", ["DDP", "FSDP2", "layers"])
def test_parts_of_ranks(pair: Pair, how: str, kind: str) -> None:
    for rank in sent(pair, how=how, kind=kind):
        assert rank["equal"] and rank["small"] and rank["left"] == 0
        (stepped, _), (both, written) = rank["counts"]
        assert 0 < written <= both and stepped > 0


# positions in whole tensors


def joined_model(how: str) -> nn.Module:
    """Return a model of which ranks hold parts of other sizes, one of them nothing of a bias."""
    model = uneven_net()
    if how == "DDP":
        return DistributedDataParallel(model)
    if how == "FSDP2":
        return sharded(model)  # type: ignore[no-any-return]
    if how == "FSDP2 of columns":
        # torch refuses uneven columns
        by_columns = lambda p: Shard(int(p.dim() > 1 and p.shape[1] % RANKS == 0))  # noqa: E731
        return sharded(model, shard_placement_fn=by_columns)  # type: ignore[no-any-return]
    shape = (1, RANKS) if "1 x" in how else (RANKS, 1)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
    plan = {
        "0": ColwiseParallel(output_layouts=Replicate()),
        "3": RowwiseParallel(input_layouts=Replicate()),
    }
    model = parallelize_module(model, mesh["tensor"], plan)
    return sharded(model, mesh=mesh["data"]) if "FSDP2" in how else model


def whole_values(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the whole parameters."""
    named = getattr(model, "module", model).named_parameters()
    full = {n: getattr(p, "full_tensor", lambda p=p: p)() for n, p in named}
    return {n: p.detach().clone() for n, p in full.items()}


@on_ranks
def joined(how: str, dense_above: float | None) -> dict[str, Any]:
    """Apply the changes of all ranks to one whole copy; return how it compares, and its dtypes."""
    run = Shared(joined_model(how), "AdamW", "O2", share=joint, track_changes=True)
    sampler, equal, sizes, dense = whole_values(run.model), [], [], 0
    for fault in (None, None, "loss", None):
        run.walk([run.x], {0: fault})
        found: list[Any] = [None] * RANKS
        changes = run.amp.changes(dense_above=dense_above, global_positions=True)
        assert all(at is None or at.dtype is torch.int32 for at, _ in changes.values())
        dist.all_gather_object(found, changes)
        for name, (positions, values) in itertools.chain(*(each.items() for each in found)):
            if positions is None:
                dense += 1
                sampler[name].copy_(values)
            else:
                sampler[name].put_(positions.long(), values)
        now = whole_values(run.model)
        equal.append(all(torch.equal(sampler[n], now[n]) for n in now))
        sizes.append(sum(len(v.flatten()) for each in found for _, v in each.values()))
    run.end()
    return {
        "equal": equal,
        "sizes": sizes,
        "dense": dense,
        "all": sum(map(Tensor.numel, now.values())),
    }


@pytest.mark.parametrize(
    ("how", "dense_above"),
    [
        *[(how, None) for how in ("FSDP2", "FSDP2 of columns", "layers 1 x 2")],
        *[(how, 0.0) for how in ("DDP", "FSDP2", "FSDP2 and layers 1 x 2", "FSDP2 and layers")],
    ],
)
def test_parts_of_all_ranks_make_the_whole(pair: Pair, how: str, dense_above: float | None) -> None:
    found = joined(pair, how=how, dense_above=dense_above)
    assert found[0] == found[1]
    assert found[0]["equal"] == [True] * 4 and found[0]["sizes"][2] == 0
    assert found[0]["sizes"][0] >= found[0]["all"] // 2
    # a rank with all of a tensor sends it as one, and the others nothing, or the same
    assert found[0]["dense"] == (0 if dense_above is None else 3 * WHOLE_ON_RANKS[how])


WHOLE_ON_RANKS = {"DDP": 12, "FSDP2": 2, "FSDP2 and layers 1 x 2": 6, "FSDP2 and layers": 2}
"""Number of tensors that a rank has whole, on all ranks together, of six."""


def part_of(
    shape: Sequence[int], mesh: Sequence[int], place: Sequence[int], *steps: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Return numbers of a tensor's elements, whole and a part.

    Args:
        shape: shape of the tensor.
        mesh: sizes of the mesh.
        place: place of the rank in the mesh.
        steps: dimensions of mesh and tensor, in the order in which the tensor is split.
    """
    whole = torch.arange(math.prod(shape)).view(*shape)
    part = whole
    for of_mesh, dim in steps:
        chunks = part.chunk(mesh[of_mesh], dim)
        empty = part.narrow(dim, 0, 0)
        part = [*chunks, *[empty] * mesh[of_mesh]][place[of_mesh]]
    return whole, part


def stands_for(whole: Tensor, part: Tensor, mesh: Any, place: Any, placements: Any) -> Any:
    """Return what ``offsets`` reads of a DTensor."""
    at = SimpleNamespace(shape=mesh, get_coordinate=lambda: place)
    return SimpleNamespace(
        shape=whole.shape, _local_tensor=part, placements=placements, device_mesh=at
    )


def strided(dim: int, factor: int) -> Any:
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=factor)


SPLITS: dict[str, tuple[tuple[Any, ...], list[tuple[int, int]]]] = {
    "rows": ((Shard(0), Replicate()), [(0, 0)]),
    "columns": ((Replicate(), Shard(1)), [(1, 1)]),
    "rows and columns": ((Shard(0), Shard(1)), [(0, 0), (1, 1)]),
    "rows twice": ((Shard(0), Shard(0)), [(0, 0), (1, 0)]),
    "layers, then FSDP2": ((strided(0, 3), Shard(0)), [(1, 0), (0, 0)]),
    "layers by columns, then FSDP2 by columns": ((strided(1, 3), Shard(1)), [(1, 1), (0, 1)]),
}


@pytest.mark.parametrize("shape", [(7, 5), (6, 6), (13, 1), (2, 4), (1, 1), (0, 3), (12, 9, 2)])
@pytest.mark.parametrize("split", SPLITS)
def test_positions_of_any_part(split: str, shape: tuple[int, ...]) -> None:
    """On all six ranks of a mesh, those without elements included."""
    placements, steps = SPLITS[split]
    mesh, seen = (2, 3), set()
    for place in itertools.product(*map(range, mesh)):
        whole, part = part_of(shape, mesh, place, *steps)
        tensor = stands_for(whole, part, mesh, place, placements)
        found = whole_positions(tensor, torch.arange(part.numel()), "w")
        assert found.tolist() == part.flatten().tolist()
        seen |= {*found.tolist()}
    assert seen == {*range(whole.numel())}


@pytest.mark.parametrize(
    ("placements", "rows"), [((strided(0, 2), Shard(0)), 2), ((Shard(0), Partial()), 3)]
)
def test_placements_that_tell_no_position(placements: Any, rows: int) -> None:
    whole = torch.arange(12).view(6, 2)
    tensor = stands_for(whole, whole[:rows], (2, 3), (0, 0), placements)
    message = re.escape("of (2, 3) with a part of ") + r".* for w: without global_positions"
    if placements[1].is_partial():
        assert offsets(tensor, "w") == [0, 0]
        tensor._local_tensor = whole[:2]
    with pytest.raises(RuntimeError, match=message):
        offsets(tensor, "w")


@on_ranks
def many_elements(limit: int) -> list[Any]:
    """Return dtypes of positions by parameter, where int32 counts few elements; or an error."""
    run = Shared(joined_model("FSDP2"), "AdamW", "O2", share=joint, track_changes=True)
    run.walk([run.x], {})
    before, parameter_bits.LARGEST = parameter_bits.LARGEST, limit
    try:
        error = refused(run.amp.changes)
        found = run.amp.changes(global_positions=True)
    finally:
        parameter_bits.LARGEST = before
    run.end()
    return [error, {name: str(at.dtype) for name, (at, _) in found.items()}]


def test_more_elements_than_int32_counts(pair: Pair) -> None:
    """The whole tensor decides: its part of half as many elements may be small enough."""
    for error, dtypes in many_elements(pair, limit=30):
        assert error == "done"
        assert dtypes.pop("0.weight") == "torch.int64"
        assert {*dtypes.values()} == {"torch.int32"}
    for error, dtypes in many_elements(pair, limit=17):
        assert "up to 17 elements" in error and "in 0.weight" in error
        assert dtypes["0.weight"] == "torch.int64"


if __name__ == "__main__":
    serve(*sys.argv[1:])
