"""Four gloo ranks on CPU train models under tensor parallelism: over four, or over two and FSDP2
over the other two.

The ranks are this file run as a script, see two_ranks.py.
"""

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
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from two_ranks import Pair, of_ranks, on_ranks, serve, whole

import tritonamp
from tritonamp.kernels.outliers import SIZE

pytestmark = of_ranks

RANKS = 4
STEPS = 4
WIDE = 8


class Block(nn.Module):
    """A norm, and a layer that splits its neurons."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDE), nn.Linear(WIDE, 16), nn.Linear(16, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(self.up(self.norm(x)).tanh())
        return result


class Net(nn.Module):
    """(batch, 4, WIDE) to (batch, 4, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.head = nn.Linear(WIDE, WIDE), Block(), nn.Linear(WIDE, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.block(self.first(x)))
        return result


def net(half: bool = False, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().half() if half else Net()


def spread(model: Net, way: str, **mp_policy: Any) -> Net:
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
        options = {"mp_policy": MixedPrecisionPolicy(**mp_policy)} if mp_policy else {}
        for part in (model.block, model):
            fully_shard(part, mesh=mesh["data"], **options)
    return model


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 4, WIDE, generator=generator) for _ in range(STEPS)]


def share(way: str) -> Callable[[Tensor], Tensor]:
    """What this rank reads of a batch: the two ranks of one part of the layers read the same."""
    rank = dist.get_rank()
    return (lambda x: x.chunk(2)[rank // 2]) if "FSDP2" in way else (lambda x: x)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.5),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, eps=0.25, weight_decay=0.0),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.01, eps=0.25, foreach=False),
}
STEP_SIZES = {"SGD": 0.1 / (1 - 0.5), "AdamW": 2 * 0.01 / 0.25, "NAdam": 4 * 0.01 / 0.25}


def train(
    model: nn.Module, kind: str, read: Callable[[Tensor], Tensor], **options: Any
) -> tuple[dict[str, Any], tritonamp.Amp, torch.optim.Optimizer]:
    """With a fault in the second step, and true gradients asked for in the last."""
    fault, here = options.pop("fault", None), dist.get_rank() == RANKS - 1
    optimizer = OPTIMIZERS[kind](model.parameters())
    scaler = tritonamp.GradScaler("cpu", init_scale=2.0**10)
    amp = tritonamp.enable(model, optimizer, scaler=scaler, **options)
    losses, norms = [], []
    for step, x in enumerate(batches()):
        loss = (model(read(x)) - 1).square().mean()
        losses.append(float(loss.detach()))
        amp.backward(loss * (math.nan if step == 1 and here and fault == "loss" else 1.0))
        if step == 1 and here and fault == "part":
            grads: Any = [p.grad for p in model.parameters() if hasattr(p.grad, "placements")]
            grads[-1]._local_tensor.view(-1)[0] = math.inf
        if step == STEPS - 1:
            amp.unscale_()
        norms.append(float(amp.clip_grad_norm_(0.5)))
        optimizer.step()
        optimizer.zero_grad()
    stats = amp.stats()
    found = {
        "losses": losses,
        "norms": [str(norm) for norm in norms],
        "masters": [whole(p) for p in amp.master_params()],
        "stats": [stats[key] for key in ("steps", "skipped", "forward_faults", "scale")],
    }
    return found, amp, optimizer


@on_ranks
def run(
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
    options: dict[str, Any] = {"level": level, "fault": fault, "dtype": torch.float16}
    options |= {"grad_dtype": torch.float32} if wide else {}
    model = spread(net(came_half), way)
    model.block.requires_grad_(not frozen)  # SequenceParallel has norms train, whatever they did
    found, amp, optimizer = train(model, kind, share(way), **options, backend=backend)
    sharded = {name for name, p in model.named_parameters() if hasattr(p, "placements")}
    masters: Any = dict(amp.named_master_params())
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name, master in masters.items():
        if name not in trained:
            assert master.dtype is torch.float16 and not optimizer.state[master]
            continue
        tensors = [master, *(t for t in optimizer.state[master].values() if t.dim())]
        assert all(t.dtype is torch.float32 for t in tensors)
        assert all(hasattr(t, "placements") == (name in sharded) for t in tensors)
    state = model.state_dict()
    assert [whole(t) for t in state.values()] == found["masters"]
    assert {state[name].dtype for name in trained} == {torch.float32}
    amp.disable()
    came = torch.float16 if came_half else torch.float32
    assert {p.dtype for p in model.parameters()} == {came}
    rounded = [torch.tensor(v).to(came).double().tolist() for v in found["masters"]]
    assert [whole(p) for p in model.parameters()] == rounded
    options["fault"] = "loss" if fault and dist.get_rank() == RANKS - 1 else None
    single = net(came_half)
    single.block.requires_grad_(not frozen)
    alone, amp, _ = train(single, kind, lambda x: x, **options)
    amp.disable()
    return {"found": found, "alone": alone}


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
    {"way": "sequence, FSDP2", "level": "O2", "kind": "AdamW", "fault": "part"},
    {"way": "sequence", "level": "O2", "fault": "part"},
    {"way": "sequence", "level": "O2", "backend": "triton"},
]


@pytest.mark.parametrize("options", RUNS, ids=lambda o: " ".join(map(str, o.values())))
def test_as_one_process_on_the_joint_batch(pair: Pair, options: dict[str, Any]) -> None:
    answers = run(pair, **options)
    found, fault = answers[0]["found"], options.get("fault")
    for answer in answers:
        for key in ("norms", "masters", "stats"):
            assert answer["found"][key] == found[key], key
    scale = 2.0**9 if fault == "part" else 2.0**10
    assert found["stats"] == [STEPS - bool(fault), int(bool(fault)), int(fault == "loss"), scale]
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
    pairs = zip(found["masters"], alone["masters"], strict=True)
    assert max(abs(a - b) for p, q in pairs for a, b in zip(p, q, strict=True)) <= bound


@on_ranks
def outlying(way: str) -> list[Any]:
    """The gradients of the last step are an outlier on the ranks that read one part of a batch."""
    model = spread(net(), way)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    amp = tritonamp.enable(model, optimizer, level="O2", loss_scale=16.0, skip_outliers=6.0)
    x, norms = share(way)(batches()[0]), []
    for step in range(SIZE + 1):
        loss = (1.0 + 0.02 * (step % 5)) * model(x).square().mean()
        if step == SIZE and ("FSDP2" not in way or dist.get_rank() > 1):
            loss = loss + 100.0 * (loss - loss.detach())
        amp.backward(loss)
        norms.append(float(amp.clip_grad_norm_(math.inf)))
        optimizer.step()
        optimizer.zero_grad()
    last, window = amp.history[-1], amp.state_dict()["outliers"]["0"]
    state = amp.stats()
    amp.disable()
    return [last.cause, state["steps"], state["skipped"], window, norms]


@pytest.mark.parametrize("way", ["FSDP2", "sequence", "sequence, FSDP2"])
def test_outliers_are_told_by_the_norm_of_the_whole(pair: Pair, way: str) -> None:
    answers = outlying(pair, way=way)
    assert all(answer == answers[0] for answer in answers)
    assert answers[0][:3] == ["outlier", SIZE, 1]


# What moves between ranks


@on_ranks
def moved(way: str) -> list[dict[str, int]]:
    """The collectives of steps at O2, and of the same by torch alone."""
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # torch's own, about views
    found = []
    for ours in (True, False):
        model = spread(net(True), way, param_dtype=torch.float16)
        optimizer = OPTIMIZERS["SGD"](model.parameters())
        amp = tritonamp.enable(model, optimizer, level="O2") if ours else None
        with Collectives() as collectives:
            for x in batches():
                loss = model(share(way)(x).half()).float().square().mean()
                loss.backward() if amp is None else amp.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        found.append(dict(collectives.found))
        if amp is not None:
            amp.disable()
    return found


@pytest.mark.parametrize("way", WAYS)
def test_a_step_moves_the_numbers_of_its_decision_more(pair: Pair, way: str) -> None:
    # gradients of norms, which are FP32 at O2, are added up once; by torch alone in half, at each
    # use
    sums = 2 * STEPS if way == "sequence" else 0
    expected = {"_allgather_base_ torch.float32 28": STEPS, "all_reduce torch.float32 32": sums}
    for found, alone in moved(pair, way=way):
        ours, torchs = Counter(found), Counter(alone)
        assert ours - torchs == +Counter(expected)
        left = torchs - ours
        assert set(left) == ({"all_reduce torch.float16 16"} if sums else set())
        assert left.total() >= sums


# Checkpoints


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[float]]:
    state = optimizer.state_dict()["state"]
    tensors = [t for i in sorted(state) for _, t in sorted(state[i].items())]
    return [whole(t) for t in (*model.state_dict().values(), *tensors)]


def enabled(model: nn.Module) -> dict[str, Any]:
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    scaler = tritonamp.GradScaler("cpu", init_scale=2.0**10)
    amp = tritonamp.enable(model, optimizer, level="O2", scaler=scaler)
    return {"model": model, "optimizer": optimizer, "amp": amp}


def steps(read: Callable[[Tensor], Tensor], model: Any, optimizer: Any, amp: Any) -> None:
    for x in batches():
        amp.backward((model(read(x)) - 1).square().mean())
        amp.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()


@on_ranks
def saved(path: str, way: str, other: str) -> list[Any]:
    """Trains, saves and trains on; resumes the same way, and loads into the other one."""
    parts = enabled(spread(net(), way))
    steps(share(way), **parts)
    tritonamp.save_sharded(path, **parts)
    before = everything(parts["model"], parts["optimizer"])
    again = enabled(spread(net(seed=1), way))
    tritonamp.load_sharded(path, **again)
    elsewhere = enabled(spread(net(seed=2), other))
    tritonamp.load_sharded(path, **elsewhere)
    found = [everything(p["model"], p["optimizer"]) for p in (again, elsewhere)]
    for each in (parts, again):
        steps(share(way), **each)
    continued = [everything(p["model"], p["optimizer"]) for p in (parts, again)]
    for each in (parts, again, elsewhere):
        each["amp"].disable()
    return [before, *found, *continued]


@pytest.mark.parametrize("way", WAYS)
def test_resumes_bit_for_bit_and_loads_at_another_mesh(
    pair: Pair, tmp_path: Path, way: str
) -> None:
    path = str(tmp_path / "run")
    answers = saved(pair, path=path, way=way, other=WAYS[(WAYS.index(way) + 1) % len(WAYS)])
    assert all(answer == answers[0] for answer in answers)
    before, again, elsewhere, continued, resumed = answers[0]
    assert before == again == elsewhere
    assert continued == resumed != before
    alone = enabled(net(seed=3))
    tritonamp.load_sharded(path, **alone)
    found = everything(alone["model"], alone["optimizer"])
    alone["amp"].disable()
    assert found == before


# Other ways, and what is refused


def built(what: str) -> tuple[Any, dict[str, Any]]:
    """A model, and options of enable."""
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    model, options = net(), dict[str, Any](level="O2")
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
        model = spread(model, "layers FSDP2")
    elif what != "too late":
        model = spread(model, "sequence")
    heal = {"on_nonfinite": "heal"}
    options |= {"O3": {"level": "O3"}, "heal": heal, "heal, FSDP2": heal}.get(what, {})
    return model, options


@on_ranks
def told(what: str) -> Any:
    """What enable, or a step, says."""
    model, options = built(what)
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    try:
        amp = tritonamp.enable(model, optimizer, **options)
    except ValueError as error:
        return str(error)
    try:
        if what == "too late":
            spread(model, "layers")
        loss = (model(batches()[0]) - 1).square().mean()
        if what == "a DTensor":
            mesh = next(p for p in model.parameters() if hasattr(p, "placements")).device_mesh
            loss = DTensor.from_local(loss, mesh, [Replicate()])
        amp.backward(loss)
        norm = float(amp.clip_grad_norm_(math.inf))
        optimizer.step()
        if "replay" in what:
            amp.explain(replay=True)
        if what == "bundle":
            amp.write_bundle("never made")
        return [norm, amp.stats()["steps"]]
    except RuntimeError as error:
        return str(error)
    finally:
        amp.disable()


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
    for text in told(pair, what=what):
        assert text.startswith(REFUSED[what])


def test_a_loss_may_be_a_dtensor(pair: Pair) -> None:
    plain, parts = told(pair, what="a loss"), told(pair, what="a DTensor")
    assert parts == plain
    assert plain[0][1] == 1 and plain[0][0] > 0.0


if __name__ == "__main__":
    serve(*sys.argv[1:])
