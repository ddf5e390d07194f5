"""Two gloo ranks on CPU train one model under FSDP2: each steps on its shards, and all decide
alike.

The ranks are this file run as a script, see two_ranks.py.
"""

import copy
import importlib
import math
import sys
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import (
    SCALE,
    SMALL_STEPS,
    STEP_SIZES,
    Clipped,
    Shared,
    distance,
    joint,
    joint_batches,
    mesh_of,
    scaler,
    sharded,
    share,
)
from small_models import uneven_net
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from two_ranks import RANKS, Pair, enable, of_ranks, on_ranks, refused, serve, whole

import tritonamp

pytestmark = of_ranks

STEPS = 6
KINDS = "AdamW", "SGD"


def sharded_net(
    level: str, dtype: torch.dtype | None = None, mesh: str = "one", **options: Any
) -> Any:
    """Return an uneven net by FSDP2; the first layer is gathered by itself."""
    model = uneven_net()
    policy = {"param_dtype": dtype or (torch.float16 if level == "O2" else None)}
    return sharded(model, [model[0]], policy, mesh=mesh_of(mesh), **options)


@on_ranks
def shards_and_alone(
    optimizer: str, level: str, mesh: str = "one", fault: str | None = None, backend: str = "auto"
) -> list[Any]:
    model = sharded_net(level, mesh=mesh)
    batches, here = joint_batches(STEPS), fault if dist.get_rank() == 1 else None
    run = Clipped(model, batches, here, optimizer, level, backend=backend)
    moments = [t for p in model.parameters() for t in run.optimizer.state[p].values()]
    kinds = {type(t).__name__ for t in (*model.parameters(), *moments) if t.dim()}
    values = [*run.amp.master_params(), *model.state_dict().values()]
    alone = Clipped(uneven_net(), batches, fault and "loss", optimizer, level, share=joint)
    dtypes = {str(value.dtype) for value in values}
    return [run.outcome(), alone.outcome(), sorted(kinds), sorted(dtypes)]


RUNS = [
    *[
        (o, level, "one", fault)
        for o in KINDS
        for level in ("O1", "O2")
        for fault in (None, "loss")
    ],
    ("AdamW", "O2", "one", "gradient"),
    ("AdamW", "O2", "one", "shard"),
    ("SGD", "O1", "one", "shard"),
    ("AdamW", "O2", "copies", None),
    ("AdamW", "O1", "shards", "loss"),
]


@pytest.mark.parametrize(("optimizer", "level", "mesh", "fault"), RUNS)
def test_as_one_process_on_the_joint_batch(
    pair: Pair, optimizer: str, level: str, mesh: str, fault: str | None
) -> None:
    answers = shards_and_alone(pair, optimizer=optimizer, level=level, mesh=mesh, fault=fault)
    assert answers[0] == answers[1]
    found, alone, kinds, dtypes = answers[0]
    assert (kinds, dtypes) == (["DTensor"], ["torch.float32"])
    skipped = int(fault is not None)
    assert (found["steps"], found["skipped"], found["forward_faults"]) == (
        STEPS - skipped,
        skipped,
        fault == "loss",
    )
    assert found["scale"] == (SCALE / 2 if fault in ("gradient", "shard") else SCALE)
    # as in test_ddp.py, and the halves of gathered weights, one more rounding
    relative = 10 * 2.0**-11
    bound = STEPS * STEP_SIZES[optimizer] * alone["largest"] * relative
    assert distance(found["masters"], alone["masters"]) <= bound
    norms = [(float(a), float(b)) for a, b in zip(found["norms"], alone["norms"], strict=True)]
    for a, b in norms:  # of the gradients, to which each earlier step adds its difference
        assert (
            math.isnan(b)
            or not math.isfinite(a)
            or abs(a - b) <= STEPS * relative * alone["largest"]
        )


def test_shards_are_stepped_on_by_the_kernels(pair: Pair) -> None:
    """In Triton's interpreter."""
    by_kernels = shards_and_alone(
        pair, optimizer="AdamW", level="O2", fault="loss", backend="triton"
    )
    eager = shards_and_alone(pair, optimizer="AdamW", level="O2", fault="loss", backend="eager")
    assert by_kernels[0][0] == by_kernels[1][0]
    assert by_kernels[0][0]["skipped"] == eager[0][0]["skipped"] == 1
    # sums in another order, which may tip a weight to the next float16 number as it is gathered
    bound = STEPS * STEP_SIZES["AdamW"] * eager[0][0]["largest"] * 2.0**-11
    assert distance(by_kernels[0][0]["masters"], eager[0][0]["masters"]) <= bound


@on_ranks
def by_scaler_alone(fault: str, optimizer: str) -> list[Any]:
    """A loop of torch.amp's with our scaler, and a fault on rank 1 in the second step."""
    model = sharded_net("O1")
    kinds = {**SMALL_STEPS, "optim.AdamW": tritonamp.optim.AdamW}
    stepper, ours = kinds[optimizer](model.parameters()), scaler()
    for step, x in enumerate(joint_batches(3)):
        here = step == 1 and dist.get_rank() == 1
        ours.scale(model(x).mean() * (math.nan if here and fault == "loss" else 1.0)).backward()
        if here and fault == "shard":
            next(model.parameters()).grad._local_tensor[0] = math.inf
        ours.unscale_(stepper)
        ours.step(stepper)
        ours.update()
        stepper.zero_grad()
    return [ours.get_scale(), [whole(p) for p in model.parameters()]]


@pytest.mark.parametrize("optimizer", [*KINDS, "optim.AdamW"])
@pytest.mark.parametrize("fault", ["loss", "shard"])
def test_scaler_alone(pair: Pair, fault: str, optimizer: str) -> None:
    first, second = by_scaler_alone(pair, fault=fault, optimizer=optimizer)
    assert first == second
    assert first[0] == (2.0**10 if fault == "loss" else 2.0**9)
    assert all(math.isfinite(x) for p in first[1] for x in p)


# Ways to train


def sharded_in(way: str, level: str) -> nn.Module:
    """Return a sharded model that is set up for that way."""
    if way not in ("checkpoint", "compiled block", "compiled"):
        return sharded_net(level, **{"reshard_after_forward": False} if way == "no reshard" else {})
    model = uneven_net()
    if way == "checkpoint":
        checkpoint_wrapper = importlib.import_module(
            "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
        ).checkpoint_wrapper
        model[0] = checkpoint_wrapper(model[0])
    elif way == "compiled block":
        model[0].compile(backend="aot_eager")
    sharded(model, [model[0]], {"param_dtype": torch.float16 if level == "O2" else None})
    if way == "compiled":
        model.compile(backend="aot_eager")
    return model


@on_ranks
def by_way_and_plainly(way: str, level: str, fault: str | None) -> list[Any]:
    """That way, and plainly: two micro-batches a step, with a fault in the first of the second step
    on rank 1.
    """
    warnings.filterwarnings("ignore", "The .grad attribute")  # torch.compile's own, at graph breaks
    rank, found = dist.get_rank(), []
    for kind in (way, "plain"):
        torch.compiler.reset()
        run = Shared(sharded_in(kind, level), "AdamW", level)
        for step, x in enumerate(joint_batches(STEPS)):
            last = step % 2 == 1
            if kind == "no sync":
                run.model.set_requires_gradient_sync(last)
            run.backward(run.loss(x, fault if step == 2 and rank == 1 else None) / 2)
            if last:
                run.finish(0.5)
        found.append([run.values(), run.counts("scale", "steps", "skipped", "forward_faults")])
        run.end()
    return found


WAYS = [
    *[("no sync", level, fault) for level in ("O1", "O2") for fault in (None, "loss", "gradient")],
    *[(way, "O2", "loss") for way in ("no reshard", "checkpoint", "compiled block", "compiled")],
    ("checkpoint", "O1", "gradient"),
]


@pytest.mark.parametrize(("way", "level", "fault"), WAYS)
def test_other_ways_lead_to_the_same(pair: Pair, way: str, level: str, fault: str | None) -> None:
    (found, plain), second = by_way_and_plainly(pair, way=way, level=level, fault=fault)
    assert [found, plain] == second
    assert found[1] == plain[1]
    assert plain[1] == [
        2.0**9 if fault == "gradient" else 2.0**10,
        STEPS // 2 - bool(fault),
        bool(fault),
        fault == "loss",
    ]
    # without a reduction of each micro-batch their sum is rounded elsewhere, 3 times; all else is
    # the same arithmetic
    bound = (
        STEPS * STEP_SIZES["AdamW"] * 0.5 * 2 * 3 * 2.0**-11
        if way == "no sync" and level == "O2"
        else 0.0
    )
    if way == "no sync" and level == "O1":
        bound = STEPS * STEP_SIZES["AdamW"] * 0.5 * 2 * 3 * 2.0**-24
    assert distance(found[0], plain[0]) <= bound


# Norms that people write


class WrittenNorm(nn.Module):
    """A norm as Llama's is written."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 7))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


@on_ranks
def normed(level: str, own: bool, fused: bool) -> list[Any]:
    """``own``: the norm is gathered by itself, else with the rest of the model."""
    model = uneven_net()
    model[1] = WrittenNorm()
    policy = {"param_dtype": torch.float16 if level == "O2" else None}
    sharded(model, [model[0], *([model[1]] if own else [])], policy)
    kind, ran = type(model[1]), []
    model[1].register_forward_hook(lambda _, __, y: ran.append(y.grad_fn.name()))
    run = Shared(model, "SGD", level, fuse_norms=fused)
    run.walk(joint_batches(STEPS), max_norm=math.inf)
    names, values = run.amp.stats()["fused"], run.values()
    run.end()
    return [names, ran[-1], type(model[1]) is kind, max(run.norms), values]


@pytest.mark.parametrize(("level", "own"), [("O1", False), ("O2", True)])
def test_written_norms_are_fused(pair: Pair, level: str, own: bool) -> None:
    first, second = normed(pair, level=level, own=own, fused=True)
    *_, largest, plain = normed(pair, level=level, own=own, fused=False)[0]
    assert first == second and first[:3] == [["1"], "NormBackward", True]
    bound = STEPS * STEP_SIZES["SGD"] * largest * 10 * 2.0**-11  # as above
    assert distance(first[4], plain) <= bound


@on_ranks
def added_up(parts: int) -> float:
    """How far a gradient of bfloat16 batches that are added up is from FP64."""
    model = uneven_net()
    exact = copy.deepcopy(model).double()
    sharded(model, policy={"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32})
    fields = {"dtype": torch.bfloat16, "grad_dtype": torch.float32, "loss_scale": 1.0}
    run = Shared(model, "SGD", share=joint, **fields)
    x = torch.randn(RANKS, 64, 6, generator=torch.Generator().manual_seed(0))
    for part in x[dist.get_rank()].chunk(parts):
        run.backward(run.loss(part) / parts)
    (exact(x.double().flatten(0, 1)) - 1).square().mean().backward()
    far = []
    for param, reference in zip(model.parameters(), exact.parameters(), strict=True):
        assert param.grad.dtype is torch.float32
        difference = param.grad.full_tensor().double() - reference.grad
        far.append(float(difference.norm() / reference.grad.norm()))
    return max(far)


def test_many_micro_batches_are_as_exact_as_one(pair: Pair) -> None:
    one, many = added_up(pair, parts=1)[0], added_up(pair, parts=64)[0]
    assert many <= 1.3 * one


# What is refused


@on_ranks
def enabling(what: str) -> str:
    model: Any = uneven_net()
    before: list[nn.Module] = []
    options: dict[str, Any] = {"level": "O2"}
    if what == "FSDP1":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    elif what == "no half":
        model = sharded_net("O2", torch.float32)
    elif what == "other half":
        model, options = sharded_net("O2", torch.bfloat16), {"level": "O1"}
    elif what == "in part":
        fully_shard(model[0])
        options = {"level": "O1"}
    elif what.startswith("too late"):
        model[1], options = WrittenNorm(), {"level": "O1"}
    elif what == "offloaded":
        model = sharded_net("O2", offload_policy=CPUOffloadPolicy(pin_memory=False))
        next(model.parameters()).device_mesh._device_type = "cuda"  # where it would run with a GPU
    elif what == "half reduction":
        model, options = sharded_net("O2"), {"level": "O2", "grad_dtype": torch.float32}
    elif what == "O3":
        model, options = sharded_net("O2"), {"level": "O3"}
    elif what == "fp32_modules":
        model, options = sharded_net("O2"), {"level": "O2", "fp32_modules": ["3"]}
    elif what == "fp32_modules of the second model":
        model, options = sharded_net("O2"), {"level": "O2", "fp32_modules": ["1.3"]}
        before = [nn.Identity()]

    def act() -> None:
        enable([*before, model], SMALL_STEPS["SGD"](model.parameters()), **options)
        if what.startswith("too late"):
            if what == "too late, a norm":
                fully_shard(model[1])
            fully_shard(model)
            model(joint_batches(1)[0])

    return refused(act)


_POLICY = "MixedPrecisionPolicy(param_dtype=torch.float16)"
_NEEDED = f"model: expected fully_shard(..., mp_policy={_POLICY}) before enable, got"

REFUSED = {
    "FSDP1": "ValueError: model: FullyShardedDataParallel (FSDP1) flattens the parameters",
    "no half": f"ValueError: {_NEEDED} no half param_dtype in its MixedPrecisionPolicy",
    "other half": f"ValueError: {_NEEDED} torch.bfloat16 in its MixedPrecisionPolicy",
    "in part": "ValueError: model: 4 parameter(s) are not sharded by FSDP2 (1.weight, 1.bias, "
    "3.weight), others are",
    "offloaded": "ValueError: model: expected parameters on cuda, where its forwards run, got some "
    "on cpu (CPUOffloadPolicy): call fully_shard without offload_policy",
    "half reduction": "ValueError: grad_dtype=torch.float32: expected fully_shard with mp_policy="
    "MixedPrecisionPolicy(..., reduce_dtype=torch.float32)",
    "O3": "ValueError: level: expected one with FP32 masters for sharded parameters",
    "fp32_modules": "ValueError: fp32_modules: FSDP2 gathers the parameters of Linear in "
    "torch.float16",
    "fp32_modules of the second model": "ValueError: fp32_modules: FSDP2 gathers the parameters of "
    "Linear in torch.float16",
    "too late, a norm": "RuntimeError: fully_shard was called on an enabled model",
    "too late": "RuntimeError: fully_shard was called on an enabled model",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_work_is_refused(pair: Pair, what: str) -> None:
    for text in enabling(pair, what=what):
        assert text.startswith(REFUSED[what])


@on_ranks
def kept_in_fp32() -> list[str]:
    """A module that is sharded with a policy of its own."""
    model = uneven_net()
    fully_shard(model[3], mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32))
    sharded(model, policy={"param_dtype": torch.float16})
    seen: list[str] = []
    model[3].register_forward_hook(
        lambda _, args, output: seen.extend([str(args[0].dtype), str(output.dtype)])
    )
    run = Shared(model, fp32_modules=["3"]).walk(joint_batches(1))
    return [*seen, *map(str, run.counts("steps"))]


def test_a_module_kept_in_fp32(pair: Pair) -> None:
    expected = ["torch.float32", "torch.float32", "1"]
    assert kept_in_fp32(pair) == [expected, expected]


@on_ranks
def by_torchs_muon(fault: bool) -> dict[str, Any]:
    """Losses of shards and of one process on the joint batch, with the masters; a fault on one rank
    at the third step.
    """
    found = {}
    for where, part in (("shards", share), ("alone", joint)):
        model = sharded_net("O2") if part is share else uneven_net()
        params = list(model.parameters())
        muon = torch.optim.Muon(params[:1], lr=0.02)  # torch 2.14 cannot step on shards of one row
        rest = torch.optim.SGD(params[1:], lr=0.02)
        amp = enable(model, [muon, rest], level="O2", loss_scale=256.0)
        losses = []
        for step, x in enumerate(joint_batches(STEPS)):
            loss = (model(part(x)) - 1).square().mean()
            losses.append(float(loss.detach()))
            spoils = fault and step == 2 and (dist.get_rank() == 1 or where == "alone")
            amp.backward(loss * (math.nan if spoils else 1.0))
            muon.step(), rest.step()
            muon.zero_grad(), rest.zero_grad()
        masters = [whole(p) for p in amp.master_params()]
        found[where] = {"losses": losses, "masters": masters, "skipped": amp.stats()["skipped"]}
    return found


@pytest.mark.parametrize("fault", [False, True])
def test_torchs_muon_works_on_whole_matrices(pair: Pair, fault: bool) -> None:
    """Orthogonal updates are as large as lr whatever their gradients, so roundings do not shrink:
    bfloat16 products leave 2^-5 of each step.
    """
    first, second = by_torchs_muon(pair, fault=fault)
    assert first["shards"]["masters"] == second["shards"]["masters"]
    assert first["shards"]["skipped"] == first["alone"]["skipped"] == int(fault)
    joint = [
        (a + b) / 2
        for a, b in zip(first["shards"]["losses"], second["shards"]["losses"], strict=True)
    ]
    assert joint == pytest.approx(first["alone"]["losses"], rel=0.02)
    pairs = first["shards"]["masters"], first["alone"]["masters"]
    assert distance(*pairs) <= STEPS * 0.02 * 2.0**-5


if __name__ == "__main__":
    serve(*sys.argv[1:])
