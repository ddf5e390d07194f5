"""Four gloo ranks on CPU train models under tensor parallelism: over four, or over two and FSDP2
over the other two.

The ranks are this file run as a script, see two_ranks.py.
"""

import itertools
import math
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collectives import Collectives
from ranks import (
    SMALL_STEPS,
    STEP_SIZES,
    Clipped,
    Shared,
    alike,
    distance,
    joint,
    joint_batches,
    outlying,
    sharded,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from two_ranks import Pair, of_ranks, on_ranks, refused, serve, whole

import tritonamp
from tritonamp.kernels.outliers import SIZE

pytestmark = of_ranks

RANKS = 4
STEPS = 4
WIDE = 8


class Neurons(nn.Module):
    """A norm, and a layer that splits its neurons."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDE), nn.Linear(WIDE, 16), nn.Linear(16, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(self.up(self.norm(x)).tanh())
        return result


class Layers(nn.Sequential):
    """(batch, 4, WIDE) to (batch, 4, 4)."""

    def __init__(self, half: bool = False, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.first, self.block, self.head = nn.Linear(WIDE, WIDE), Neurons(), nn.Linear(WIDE, 4)
        self.half() if half else None


def parallel(model: Layers, way: str, **policy: Any) -> Layers:
    """``way``: "layers" or "sequence", with "FSDP2" or without; or "FSDP2" alone."""
    if "FSDP2" in way:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        along = mesh["tensor"]
    else:
        along = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tensor",))
    if "sequence" in way:
        outer = {
            "first": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        parallelize_module(model, along, outer)
        inner = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
    else:
        inner = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if way != "FSDP2":
        parallelize_module(model.block, along, inner)
    if "FSDP2" in way:
        sharded(model, [model.block], policy or None, mesh=mesh["data"])
    return model


def joint_inputs() -> list[Tensor]:
    return joint_batches(STEPS, 4, 4, WIDE)


def optimizer_of(kind: str, model: nn.Module) -> Callable[..., torch.optim.Optimizer]:
    """Return a maker of an optimizer for all parameters of the model, frozen ones, too."""
    return lambda _: SMALL_STEPS[kind](model.parameters())


def part_of(way: str) -> Callable[[Tensor], Tensor]:
    """Return a function that takes this rank's share; ranks with parts of one layer read alike."""
    rank = dist.get_rank()
    return (lambda x: x.chunk(2)[rank // 2]) if "FSDP2" in way else joint


@on_ranks
def layers_and_alone(
    way: str,
    level: str,
    kind: str = "SGD",
    fault: str | None = None,
    came_half: bool = False,
    frozen: bool = False,
    wide: bool = False,
    backend: str = "auto",
) -> dict[str, Any]:
    """``frozen``: the block, which stays half; ``wide``: gradients in FP32."""
    options: dict[str, Any] = {"level": level, "dtype": torch.float16}
    options |= {"grad_dtype": torch.float32} if wide else {}
    model = parallel(Layers(came_half), way)
    model.block.requires_grad_(not frozen)  # SequenceParallel has norms train, whatever they did
    here = dist.get_rank() == RANKS - 1
    run = Clipped(
        model,
        joint_inputs(),
        fault if here else None,
        optimizer_of(kind, model),
        share=part_of(way),
        **options,
        backend=backend,
    )
    found = run.outcome()
    with_placements = {name for name, p in model.named_parameters() if hasattr(p, "placements")}
    masters: Any = dict(run.amp.named_master_params())
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name, master in masters.items():
        if name not in trained:
            assert master.dtype is torch.float16 and not run.optimizer.state[master]
            continue
        tensors = [master, *(t for t in run.optimizer.state[master].values() if t.dim())]
        assert all(t.dtype is torch.float32 for t in tensors)
        assert all(hasattr(t, "placements") == (name in with_placements) for t in tensors)
    state = model.state_dict()
    assert [whole(t) for t in state.values()] == found["masters"]
    assert {state[name].dtype for name in trained} == {torch.float32}
    run.end()
    came = torch.float16 if came_half else torch.float32
    assert {p.dtype for p in model.parameters()} == {came}
    rounded = [torch.tensor(v).to(came).double().tolist() for v in found["masters"]]
    assert [whole(p) for p in model.parameters()] == rounded
    single = Layers(came_half)
    single.block.requires_grad_(not frozen)
    bad = "loss" if fault and here else None
    alone = Clipped(single, joint_inputs(), bad, optimizer_of(kind, single), share=joint, **options)
    return {
        "found": {**found, "losses": run.losses},
        "alone": {**alone.outcome(), "losses": alone.losses},
    }


WAYS = ["layers", "sequence", "layers, FSDP2", "sequence, FSDP2"]
RUNS = [
    *[{"way": way, "level": level} for way in WAYS for level in ("O1", "O2")],
    *[{"way": way, "level": "O2", "came_half": True} for way in ("sequence", "sequence, FSDP2")],
    *[{"way": way, "level": "O2", "wide": True} for way in ("sequence", "sequence, FSDP2")],
    *[
        {"way": way, "level": "O2", "came_half": True, "frozen": True}
        for way in ("sequence", "sequence, FSDP2")
    ],
    {"way": "layers", "level": "O2", "kind": "AdamW", "fault": "loss"},
    {"way": "FSDP2", "level": "O2", "kind": "NAdam"},
    {"way": "sequence", "level": "O2", "kind": "NAdam"},
    {"way": "sequence, FSDP2", "level": "O2", "kind": "NAdam"},
    {"way": "sequence, FSDP2", "level": "O2", "kind": "AdamW", "fault": "shard"},
    {"way": "sequence", "level": "O2", "fault": "shard"},
    {"way": "sequence", "level": "O2", "backend": "triton"},
]


@pytest.mark.parametrize("options", RUNS, ids=lambda o: " ".join(map(str, o.values())))
def test_as_one_process_on_the_joint_batch(pair: Pair, options: dict[str, Any]) -> None:
    answers = layers_and_alone(pair, **options)
    found, fault = answers[0]["found"], options.get("fault")
    for answer in answers:
        assert {**answer["found"], "losses": None} == {**found, "losses": None}
    scale = 2.0**9 if fault == "shard" else 2.0**10
    counts = [found[key] for key in ("steps", "skipped", "forward_faults", "scale")]
    assert counts == [STEPS - bool(fault), int(bool(fault)), int(fault == "loss"), scale]
    alone = answers[-1]["alone"]
    ulp = 2.0**-11
    losses = [a["found"]["losses"] for a in answers]
    # the norm is of each parameter once; 10 roundings on the way, as in test_fsdp.py
    assert [sum(each) / RANKS for each in zip(*losses, strict=True)] == pytest.approx(
        alone["losses"], rel=10 * ulp
    )
    norms = [tuple(map(float, each)) for each in zip(found["norms"], alone["norms"], strict=True)]
    for ours, theirs in norms:
        assert (
            not math.isfinite(theirs)
            or not math.isfinite(ours)
            or abs(ours - theirs)
            <= (STEPS * 10 * ulp * max(n for _, n in norms if math.isfinite(n)))
        )
    bound = STEPS * STEP_SIZES[options.get("kind", "SGD")] * 0.5 * 10 * ulp
    assert distance(found["masters"], alone["masters"]) <= bound


@on_ranks
def outlier_of_a_part(way: str) -> list[Any]:
    """The gradients of the last step are an outlier on the ranks that read one part of a batch."""
    run = Shared(
        parallel(Layers(), way),
        lambda params: torch.optim.SGD(params, lr=0.0),
        loss_scale=16.0,
        skip_outliers=6.0,
    )

    def worse(loss: Tensor) -> Tensor:
        is_bad = "FSDP2" not in way or dist.get_rank() > 1
        return loss + 100.0 * (loss - loss.detach()) if is_bad else loss

    return [*outlying(run, part_of(way)(joint_inputs()[0]), worse, math.inf), run.norms]


@pytest.mark.parametrize("way", ["FSDP2", "sequence", "sequence, FSDP2"])
def test_outliers_are_told_by_the_norm_of_the_whole(pair: Pair, way: str) -> None:
    assert alike(outlier_of_a_part(pair, way=way))[:3] == ["outlier", SIZE, 1]


# What moves between ranks


@on_ranks
def moved_by_us_and_by_torch(way: str) -> list[dict[str, int]]:
    """The collectives of steps at O2, and of the same by torch alone."""
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # torch's own, about views
    found = []
    for level in ("O2", None):
        run = Shared(parallel(Layers(half=True), way, param_dtype=torch.float16), "SGD", level)
        with Collectives() as collectives:
            for x in joint_inputs():
                run.backward(run.model(part_of(way)(x).half()).float().square().mean())
                run.finish()
        found.append(dict(collectives.found))
        run.end()
    return found


@pytest.mark.parametrize("way", WAYS)
def test_a_step_moves_the_numbers_of_its_decision_more(pair: Pair, way: str) -> None:
    # gradients of norms, which are FP32 at O2, are added up once; by torch alone in half, at each
    # use
    sums = 2 * STEPS if way == "sequence" else 0
    expected = {"_allgather_base_ torch.float32 28": STEPS, "all_reduce torch.float32 32": sums}
    for found, alone in moved_by_us_and_by_torch(pair, way=way):
        ours, torchs = Counter(found), Counter(alone)
        assert ours - torchs == +Counter(expected)
        left = torchs - ours
        assert set(left) == ({"all_reduce torch.float16 16"} if sums else set())
        assert left.total() >= sums


# Checkpoints


def stepping(model: Layers, way: str) -> Shared:
    return Shared(model, share=part_of(way) if way else joint)


@on_ranks
def resumed_and_loaded_elsewhere(path: str, way: str, other: str) -> list[Any]:
    """Trains, saves and trains on; resumes the same way, and loads into the other one."""
    first, again, elsewhere = (
        stepping(parallel(Layers(seed=seed), kind), kind)
        for seed, kind in enumerate((way, way, other))
    )
    first.walk(joint_inputs(), max_norm=0.5)
    tritonamp.save_sharded(path, **first.objects())
    before = first.saved()
    for each in (again, elsewhere):
        tritonamp.load_sharded(path, **each.objects())
    found = [each.saved() for each in (again, elsewhere)]
    continued = [each.walk(joint_inputs(), max_norm=0.5).saved() for each in (first, again)]
    return [before, *found, *continued]


@pytest.mark.parametrize("way", WAYS)
def test_resumes_bit_for_bit_and_loads_at_another_mesh(
    pair: Pair, tmp_path: Path, way: str
) -> None:
    path = str(tmp_path / "run")
    other = WAYS[(WAYS.index(way) + 1) % len(WAYS)]
    answers = resumed_and_loaded_elsewhere(pair, path=path, way=way, other=other)
    before, again, elsewhere, continued, resumed = alike(answers)
    assert before == again == elsewhere
    assert continued == resumed != before
    alone = stepping(Layers(seed=3), "")
    tritonamp.load_sharded(path, **alone.objects())
    found = alone.saved()
    alone.end()
    assert found == before


@on_ranks
def changes_of(way: str) -> bool:
    """Tell whether the changes of all ranks make the whole weights, of one copy."""
    run = Shared(parallel(Layers(), way), "SGD", share=joint, track_changes=True)
    sampler = {n: p.full_tensor().detach().clone() for n, p in run.model.named_parameters()}
    run.walk(joint_inputs()[:2])
    found: list[Any] = [None] * RANKS
    dist.all_gather_object(found, run.amp.changes(global_positions=True))
    for name, (positions, values) in itertools.chain(*(each.items() for each in found)):
        sampler[name].put_(positions.long(), values)
    now = {n: p.full_tensor() for n, p in run.model.named_parameters()}
    run.end()
    return all(len(at) for at, _ in found[0].values()) and all(
        torch.equal(sampler[n], p) for n, p in now.items()
    )


def test_changes_of_all_ranks_make_the_whole(pair: Pair) -> None:
    assert changes_of(pair, way="layers FSDP2") == [True] * RANKS


# Other ways, and what is refused


def built(what: str) -> tuple[Any, dict[str, Any]]:
    """A model, and options of enable."""
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    model, options = Layers(), dict[str, Any](level="O2")
    if what == "FSDP2 in part":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        parallelize_module(model.block, mesh["tensor"], plan)
        fully_shard(model.first, mesh=mesh["data"])
    elif what == "two meshes":
        along = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        across = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("data", "tensor"))
        parallelize_module(model.block, along["tensor"], plan)
        parallelize_module(model, across["tensor"], {"head": ColwiseParallel()})
    elif what in ("heal, FSDP2", "replay, FSDP2"):
        model = parallel(model, "layers FSDP2")
    elif what != "too late":
        model = parallel(model, "sequence")
    heal = {"on_nonfinite": "heal"}
    options |= {"O3": {"level": "O3"}, "heal": heal, "heal, FSDP2": heal}.get(what, {})
    return model, options


@on_ranks
def enabling_and_a_step(what: str) -> str:
    """Return the error of ``enable`` or of a step."""
    model, options = built(what)
    return refused(lambda: act_and_step(what, Shared(model, "SGD", share=joint, **options)))


def act_and_step(what: str, run: Shared) -> list[Any]:
    if what == "too late":
        parallel(run.model, "layers")
    loss: Any = run.loss(joint_inputs()[0])
    if what == "a DTensor":
        mesh = next(p for p in run.model.parameters() if hasattr(p, "placements")).device_mesh
        loss = DTensor.from_local(loss, mesh, [Replicate()])
    run.backward(loss)
    run.finish(math.inf)
    if "replay" in what:
        run.amp.explain(replay=True)
    if what == "bundle":
        run.amp.write_bundle("never made")
    return [*run.norms, *run.counts("steps")]


@on_ranks
def norm_and_steps(what: str) -> list[Any]:
    model, options = built(what)
    return act_and_step(what, Shared(model, "SGD", share=joint, **options))


REFUSED = {
    "O3": "level: expected one with FP32 masters for sharded parameters (FSDP2, tensor",
    "heal": "on_nonfinite: expected 'skip', got 'heal': under tensor parallelism no rank can run a",
    "heal, FSDP2": "on_nonfinite: expected 'skip', got 'heal': under tensor parallelism no rank",
    "replay": "explain(replay=True): under tensor parallelism no rank can run a batch again by",
    "replay, FSDP2": "explain(replay=True): under tensor parallelism no rank can run a batch again",
    "bundle": "write_bundle: under tensor parallelism no rank can run a batch again by itself",
    "FSDP2 in part": "model: 8 parameter(s) are not sharded by FSDP2 (block.norm.weight, ",
    "two meshes": "model: expected parameters over one mesh or parts of it, whose ranks decide",
    "too late": "parallelize_module was called on an enabled model, whose optimizer now holds",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_work_is_refused(pair: Pair, what: str) -> None:
    kind = (
        "ValueError" if REFUSED[what].startswith(("level", "on_nonf", "model")) else "RuntimeError"
    )
    for text in enabling_and_a_step(pair, what=what):
        assert text.startswith(f"{kind}: {REFUSED[what]}")


def test_a_loss_may_be_a_dtensor(pair: Pair) -> None:
    plain, parts = norm_and_steps(pair, what="a loss"), norm_and_steps(pair, what="a DTensor")
    assert parts == plain
    assert plain[0][1] == 1 and plain[0][0] > 0.0


if __name__ == "__main__":
    serve(*sys.argv[1:])
