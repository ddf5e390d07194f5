"""Two gloo ranks on CPU train one model under FSDP2: each steps on its shards, and all decide
alike.

The ranks are this file run as a script, see two_ranks.py.
"""

import copy
import importlib
import math
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from two_ranks import RANKS, Pair, of_ranks, on_ranks, serve, whole

import tritonamp

pytestmark = of_ranks

STEPS = 6


def net() -> nn.Sequential:
    """With shapes that two ranks cannot share evenly, and a bias of which one has nothing."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 1))


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, eps=0.25, weight_decay=0.0),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.5),
}
STEP_SIZES = {"AdamW": 2 * 0.01 / 0.25, "SGD": 0.1 / (1 - 0.5)}  # see test_ddp.py


def sharded(
    level: str,
    mesh: str = "one",
    dtype: torch.dtype | None = None,
    model: nn.Sequential | None = None,
    **options: Any,
) -> nn.Sequential:
    model = net() if model is None else model
    half = torch.float16 if level == "O2" else None
    policy = MixedPrecisionPolicy(param_dtype=dtype or half)
    shape = {"one": (RANKS,), "copies": (RANKS, 1), "shards": (1, RANKS)}[mesh]
    names = None if mesh == "one" else ("replicate", "shard")
    for part in (model[0], model):
        fully_shard(
            part,
            mesh=init_device_mesh("cpu", shape, mesh_dim_names=names),
            mp_policy=policy,
            **options,
        )
    return model


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 6, generator=generator) for _ in range(STEPS)]


def train(
    model: nn.Module, optimizer: str, level: str, share: Callable[[Tensor], Tensor], **options: Any
) -> tuple[dict[str, Any], tritonamp.Amp, torch.optim.Optimizer]:
    """A run in which the third step is lost, the gradients clipped, and unscaled before the last
    step.
    """
    here, fault = options.pop("here", True), options.pop("fault", None)
    stepper = OPTIMIZERS[optimizer](model.parameters())
    scaler = tritonamp.GradScaler("cpu", init_scale=2.0**10)
    amp = tritonamp.enable(model, stepper, level=level, scaler=scaler, **options)
    largest, norms = 0.0, []
    for step, x in enumerate(batches()):
        bad = step == 2 and here
        output = model(share(x))
        if bad and fault == "gradient":
            output.register_hook(lambda grad: grad * math.inf)
        loss = (output - 1).square().mean() * (math.nan if bad and fault == "loss" else 1.0)
        amp.backward(loss)
        if bad and fault == "shard":
            next(model.parameters()).grad._local_tensor[0] = math.inf
        if step == STEPS - 1:
            amp.unscale_()
        norms.append(float(amp.clip_grad_norm_(0.5)))
        largest = max(largest, *(g for g in norms if math.isfinite(g)))
        stepper.step()
        stepper.zero_grad()
    stats = amp.stats()
    keys = ("scale", "steps", "skipped", "scale_overflows", "forward_faults", "growth_tracker")
    found = {
        "masters": [whole(p.detach()) for p in amp.master_params()],
        "norms": [str(n) for n in norms],
        "largest": largest,
        **{key: stats[key] for key in keys},
    }
    return found, amp, stepper


@on_ranks
def run(
    optimizer: str, level: str, mesh: str = "one", fault: str | None = None, backend: str = "auto"
) -> list[Any]:
    rank = dist.get_rank()
    model = sharded(level, mesh)
    found, amp, stepper = train(
        model,
        optimizer,
        level,
        lambda x: x.chunk(RANKS)[rank],
        here=rank == 1,
        fault=fault,
        backend=backend,
    )
    kinds = {
        type(t).__name__
        for p in model.parameters()
        for t in (p, *stepper.state[p].values())
        if t.dim()
    }
    dtypes = {str(p.dtype) for p in amp.master_params()} | {
        str(v.dtype) for v in model.state_dict().values()
    }
    amp.disable()
    alone, amp, _ = train(net(), optimizer, level, lambda x: x, fault=fault and "loss")
    amp.disable()
    return [found, alone, sorted(kinds), sorted(dtypes)]


RUNS = [
    *[
        (o, level, "one", fault)
        for o in OPTIMIZERS
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
    answers = run(pair, optimizer=optimizer, level=level, mesh=mesh, fault=fault)
    assert answers[0] == answers[1]
    found, alone, kinds, dtypes = answers[0]
    assert (kinds, dtypes) == (["DTensor"], ["torch.float32"])
    skipped = int(fault is not None)
    assert (found["steps"], found["skipped"], found["forward_faults"]) == (
        STEPS - skipped,
        skipped,
        fault == "loss",
    )
    assert found["scale"] == (2.0**9 if fault in ("gradient", "shard") else 2.0**10)
    # as in test_ddp.py, and the halves of gathered weights, one more rounding
    relative = 10 * 2.0**-11
    bound = STEPS * STEP_SIZES[optimizer] * alone["largest"] * relative
    pairs = zip(found["masters"], alone["masters"], strict=True)
    assert max(abs(a - b) for p, q in pairs for a, b in zip(p, q, strict=True)) <= bound
    norms = [(float(a), float(b)) for a, b in zip(found["norms"], alone["norms"], strict=True)]
    for a, b in norms:  # of the gradients, to which each earlier step adds its difference
        assert (
            math.isnan(b)
            or not math.isfinite(a)
            or abs(a - b) <= STEPS * relative * alone["largest"]
        )


def test_shards_are_stepped_on_by_the_kernels(pair: Pair) -> None:
    """In Triton's interpreter."""
    by_kernels = run(pair, optimizer="AdamW", level="O2", fault="loss", backend="triton")
    eager = run(pair, optimizer="AdamW", level="O2", fault="loss", backend="eager")
    assert by_kernels[0][0] == by_kernels[1][0]
    assert by_kernels[0][0]["skipped"] == eager[0][0]["skipped"] == 1
    # sums in another order, which may tip a weight to the next float16 number as it is gathered
    bound = STEPS * STEP_SIZES["AdamW"] * eager[0][0]["largest"] * 2.0**-11
    for ours, theirs in zip(by_kernels[0][0]["masters"], eager[0][0]["masters"], strict=True):
        assert ours == pytest.approx(theirs, rel=0.0, abs=bound)


@on_ranks
def by_scaler_alone(fault: str, optimizer: str) -> list[Any]:
    """A loop of torch.amp's with our scaler, and a fault on rank 1 in the second step."""
    model = sharded("O1")
    kinds = {**OPTIMIZERS, "optim.AdamW": tritonamp.optim.AdamW}
    stepper = kinds[optimizer](model.parameters())
    scaler = tritonamp.GradScaler("cpu", init_scale=2.0**10)
    for step, x in enumerate(batches()[:3]):
        here = step == 1 and dist.get_rank() == 1
        scaler.scale(model(x).mean() * (math.nan if here and fault == "loss" else 1.0)).backward()
        if here and fault == "shard":
            next(model.parameters()).grad._local_tensor[0] = math.inf
        scaler.unscale_(stepper)
        scaler.step(stepper)
        scaler.update()
        stepper.zero_grad()
    return [scaler.get_scale(), [whole(p.detach()) for p in model.parameters()]]


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, "optim.AdamW"])
@pytest.mark.parametrize("fault", ["loss", "shard"])
def test_scaler_alone(pair: Pair, fault: str, optimizer: str) -> None:
    first, second = by_scaler_alone(pair, fault=fault, optimizer=optimizer)
    assert first == second
    assert first[0] == (2.0**10 if fault == "loss" else 2.0**9)
    assert all(math.isfinite(x) for p in first[1] for x in p)


# Ways to train


def prepared(way: str, level: str) -> nn.Module:
    """The sharded model, set up for that way."""
    if way not in ("checkpoint", "compiled block", "compiled"):
        return sharded(level, **{"reshard_after_forward": False} if way == "no reshard" else {})
    model = net()
    if way == "checkpoint":
        checkpoint_wrapper = importlib.import_module(
            "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
        ).checkpoint_wrapper
        model[0] = checkpoint_wrapper(model[0])
    elif way == "compiled block":
        model[0].compile(backend="aot_eager")
    model = sharded(level, model=model)
    if way == "compiled":
        model.compile(backend="aot_eager")
    return model


@on_ranks
def trained(way: str, level: str, fault: str | None) -> list[Any]:
    """That way, and plainly: two micro-batches a step, with a fault in the first of the second step
    on rank 1.
    """
    warnings.filterwarnings("ignore", "The .grad attribute")  # torch.compile's own, at graph breaks
    rank, found = dist.get_rank(), []
    for kind in (way, "plain"):
        torch.compiler.reset()
        model: Any = prepared(kind, level)
        stepper = OPTIMIZERS["AdamW"](model.parameters())
        amp = tritonamp.enable(
            model, stepper, level=level, scaler=tritonamp.GradScaler("cpu", init_scale=2.0**10)
        )
        for step, x in enumerate(batches()):
            last = step % 2 == 1
            if kind == "no sync":
                model.set_requires_gradient_sync(last)
            output = model(x.chunk(RANKS)[rank])
            bad = step == 2 and rank == 1
            if bad and fault == "gradient":
                output.register_hook(lambda grad: grad * math.inf)
            amp.backward(
                (output - 1).square().mean() * (math.nan if bad and fault == "loss" else 0.5)
            )
            if last:
                amp.clip_grad_norm_(0.5)
                stepper.step()
                stepper.zero_grad()
        stats = amp.stats()
        values = [whole(p.detach()) for p in amp.master_params()]
        found.append(
            [values, [stats[key] for key in ("scale", "steps", "skipped", "forward_faults")]]
        )
        amp.disable()
    return found


WAYS = [
    *[("no sync", level, fault) for level in ("O1", "O2") for fault in (None, "loss", "gradient")],
    *[(way, "O2", "loss") for way in ("no reshard", "checkpoint", "compiled block", "compiled")],
    ("checkpoint", "O1", "gradient"),
]


@pytest.mark.parametrize(("way", "level", "fault"), WAYS)
def test_other_ways_lead_to_the_same(pair: Pair, way: str, level: str, fault: str | None) -> None:
    (found, plain), second = trained(pair, way=way, level=level, fault=fault)
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
    pairs = zip(found[0], plain[0], strict=True)
    assert max(abs(a - b) for p, q in pairs for a, b in zip(p, q, strict=True)) <= bound


# Norms that people write


class LlamaRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 7))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


def with_written_norm(level: str, own: bool) -> nn.Sequential:
    """``own``: the norm is gathered by itself, else with the rest of the model."""
    model = net()
    model[1] = LlamaRMSNorm()
    policy = MixedPrecisionPolicy(param_dtype=torch.float16 if level == "O2" else None)
    for part in (model[0], *([model[1]] if own else []), model):
        fully_shard(part, mp_policy=policy)
    return model


@on_ranks
def normed(level: str, own: bool, fused: bool) -> list[Any]:
    model = with_written_norm(level, own)
    kind, ran, norms = type(model[1]), [], []
    model[1].register_forward_hook(lambda _, __, y: ran.append(y.grad_fn.name()))
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    amp = tritonamp.enable(model, optimizer, level=level, fuse_norms=fused)
    for x in batches():
        amp.backward((model(x.chunk(RANKS)[dist.get_rank()]) - 1).square().mean())
        norms.append(float(amp.clip_grad_norm_(math.inf)))
        optimizer.step()
        optimizer.zero_grad()
    names = amp.stats()["fused"]
    values = [whole(p.detach()) for p in amp.master_params()]
    amp.disable()
    return [names, ran[-1], type(model[1]) is kind, max(norms), values]


@pytest.mark.parametrize(("level", "own"), [("O1", False), ("O2", True)])
def test_written_norms_are_fused(pair: Pair, level: str, own: bool) -> None:
    first, second = normed(pair, level=level, own=own, fused=True)
    *_, largest, plain = normed(pair, level=level, own=own, fused=False)[0]
    assert first == second and first[:3] == [["1"], "NormBackward", True]
    bound = STEPS * STEP_SIZES["SGD"] * largest * 10 * 2.0**-11  # as above
    pairs = zip(first[4], plain, strict=True)
    assert max(abs(a - b) for p, q in pairs for a, b in zip(p, q, strict=True)) <= bound


@on_ranks
def added_up(parts: int) -> float:
    """How far a gradient of bfloat16 batches that are added up is from FP64."""
    rank, model = dist.get_rank(), net()
    exact = copy.deepcopy(model).double()
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mp_policy=half)
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    fields = {"level": "O2", "dtype": torch.bfloat16, "grad_dtype": torch.float32}
    amp = tritonamp.enable(model, optimizer, **fields)
    x = torch.randn(RANKS, 64, 6, generator=torch.Generator().manual_seed(0))
    for part in x[rank].chunk(parts):
        amp.backward((model(part) - 1).square().mean() / parts)
    (exact(x.double().flatten(0, 1)) - 1).square().mean().backward()
    far = []
    for param, reference in zip(model.parameters(), exact.parameters(), strict=True):
        assert param.grad.dtype is torch.float32
        difference = param.grad.full_tensor().double() - reference.grad
        far.append(float(difference.norm() / reference.grad.norm()))
    amp.disable()
    return max(far)


def test_many_micro_batches_are_as_exact_as_one(pair: Pair) -> None:
    one, many = added_up(pair, parts=1)[0], added_up(pair, parts=64)[0]
    assert many <= 1.3 * one


# What is refused


@on_ranks
def refused(what: str) -> str:
    model: Any = net()
    options: dict[str, Any] = {"level": "O2"}
    if what == "FSDP1":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    elif what == "no half":
        model = sharded("O2", dtype=torch.float32)
    elif what == "other half":
        model, options = sharded("O2", dtype=torch.bfloat16), {"level": "O1"}
    elif what == "in part":
        fully_shard(model[0])
        options = {"level": "O1"}
    elif what.startswith("too late"):
        model[1], options = LlamaRMSNorm(), {"level": "O1"}
    elif what == "offloaded":
        model = sharded("O2", offload_policy=CPUOffloadPolicy(pin_memory=False))
        next(model.parameters()).device_mesh._device_type = "cuda"  # where it would run with a GPU
    elif what == "half reduction":
        model, options = sharded("O2"), {"level": "O2", "grad_dtype": torch.float32}
    elif what == "O3":
        model, options = sharded("O2"), {"level": "O3"}
    elif what == "fp32_modules":
        model, options = sharded("O2"), {"level": "O2", "fp32_modules": ["3"]}
    try:
        amp = tritonamp.enable(model, OPTIMIZERS["SGD"](model.parameters()), **options)
        if what.startswith("too late"):
            if what == "too late, a norm":
                fully_shard(model[1])
            fully_shard(model)
            try:
                model(batches()[0])
            finally:
                amp.disable()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "enabled"


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
    "too late, a norm": "RuntimeError: fully_shard was called on an enabled model",
    "too late": "RuntimeError: fully_shard was called on an enabled model",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_work_is_refused(pair: Pair, what: str) -> None:
    for text in refused(pair, what=what):
        assert text.startswith(REFUSED[what])


@on_ranks
def kept_in_fp32() -> list[str]:
    """A module that is sharded with a policy of its own."""
    model = net()
    fully_shard(model[3], mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))
    seen: list[str] = []
    model[3].register_forward_hook(
        lambda _, args, output: seen.extend([str(args[0].dtype), str(output.dtype)])
    )
    stepper = OPTIMIZERS["AdamW"](model.parameters())
    amp = tritonamp.enable(model, stepper, level="O2", fp32_modules=["3"])
    amp.backward(model(batches()[0]).mean())
    stepper.step()
    seen.append(str(amp.stats()["steps"]))
    amp.disable()
    return seen


def test_a_module_kept_in_fp32(pair: Pair) -> None:
    expected = ["torch.float32", "torch.float32", "1"]
    assert kept_in_fp32(pair) == [expected, expected]


@on_ranks
def with_muon(fault: bool) -> dict[str, Any]:
    """Losses of shards and of one process on the joint batch, with the masters; a fault on one rank
    at the third step.
    """
    rank, found = dist.get_rank(), {}
    for where in ("shards", "alone"):
        model = sharded("O2") if where == "shards" else net()
        params = list(model.parameters())
        muon = torch.optim.Muon(params[:1], lr=0.02)  # torch 2.14 cannot step on shards of one row
        rest = torch.optim.SGD(params[1:], lr=0.02)
        amp = tritonamp.enable(model, [muon, rest], level="O2", loss_scale=256.0)
        losses = []
        for step, x in enumerate(batches()):
            loss = (model(x.chunk(RANKS)[rank] if where == "shards" else x) - 1).square().mean()
            losses.append(float(loss.detach()))
            spoils = fault and step == 2 and (rank == 1 or where == "alone")
            amp.backward(loss * (math.nan if spoils else 1.0))
            muon.step(), rest.step()
            muon.zero_grad(), rest.zero_grad()
        masters = [whole(p.detach()) for p in amp.master_params()]
        found[where] = {"losses": losses, "masters": masters, "skipped": amp.stats()["skipped"]}
        amp.disable()
    return found


@pytest.mark.parametrize("fault", [False, True])
def test_torchs_muon_works_on_whole_matrices(pair: Pair, fault: bool) -> None:
    """Orthogonal updates are as large as lr whatever their gradients, so roundings do not shrink:
    bfloat16 products leave 2^-5 of each step.
    """
    first, second = with_muon(pair, fault=fault)
    assert first["shards"]["masters"] == second["shards"]["masters"]
    assert first["shards"]["skipped"] == first["alone"]["skipped"] == int(fault)
    joint = [
        (a + b) / 2
        for a, b in zip(first["shards"]["losses"], second["shards"]["losses"], strict=True)
    ]
    assert joint == pytest.approx(first["alone"]["losses"], rel=0.02)
    pairs = zip(first["shards"]["masters"], first["alone"]["masters"], strict=True)
    for ours, theirs in pairs:
        assert ours == pytest.approx(theirs, abs=STEPS * 0.02 * 2.0**-5)


if __name__ == "__main__":
    serve(*sys.argv[1:])
