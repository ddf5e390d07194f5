"""Two gloo ranks on CPU train models under FSDP2 that were loaded in half: their shards are FP32.

The ranks are this file run as a script, see two_ranks.py.
"""

import logging
import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from collectives import Collectives
from ranks import (
    SMALL_STEPS,
    Shared,
    distance,
    joint,
    joint_batches,
    listening,
    sharded,
    share,
)
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from two_ranks import RANKS, Pair, enable, of_ranks, on_ranks, refused, serve, whole

import tritonamp
from tritonamp.distributed.fsdp import mp_policy as policy_of

pytestmark = of_ranks

STEPS = 4
HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


class Adapted(nn.Module):
    """A layer with a frozen half base and an adapter that trains."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.base = nn.Linear(wide, wide)
        self.down, self.up = nn.Linear(wide, 2, bias=False), nn.Linear(2, wide, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + self.up(self.down(x))
        return result


def loaded_net(dtype: str | None, adapted: bool = False, seed: int = 0) -> nn.Sequential:
    """With shapes that two ranks cannot share evenly, and a bias of which one has nothing."""
    torch.manual_seed(seed)
    first = Adapted(6) if adapted else nn.Linear(6, 6)
    model = nn.Sequential(first, nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 1))
    return model.to(HALVES[dtype]) if dtype else model


def shards_of(dtype: str | None, adapted: bool = False, seed: int = 0, **policy: Any) -> Any:
    model = loaded_net(dtype, adapted, seed)
    return sharded(model, [model[0]], policy or None)


class LoadedInHalf(Shared):
    """A training by SGD with clipped gradients."""

    def __init__(self, model: nn.Module, level: str = "O2", **how: Any) -> None:
        super().__init__(model, how.pop("optimizer", "SGD"), level, **how)

    def go_on(self, bad: int | None = None) -> "LoadedInHalf":
        """Train; the loss of batch ``bad`` is NaN on rank 1."""
        here = torch.distributed.get_rank() == 1
        self.walk(joint_batches(STEPS), {bad: "loss"} if here and bad is not None else {}, 0.5)
        return self


# As one process on the joint batch


@on_ranks
def half_shards_and_alone(
    level: str,
    dtype: str | None,
    given: bool,
    wide: bool,
    adapted: bool = False,
    warm: bool = False,
    backend: str = "auto",
) -> dict[str, Any]:
    """``given``: a MixedPrecisionPolicy; ``wide``: gradients in FP32; ``warm``: after a forward."""
    reduce = {"reduce_dtype": torch.float32} if wide else {}
    half = HALVES[dtype or "float16"]
    options = {"grad_dtype": torch.float32} if wide and level == "O2" else {}
    model = shards_of(dtype, adapted, **{"param_dtype": half, **reduce} if given else {})
    came = {name: (p.dtype, whole(p)) for name, p in model.named_parameters()}
    x = share(joint_batches(1)[0])
    if warm:
        model(x.to(half)).float().mean().backward()
        model.zero_grad()
    with listening(logging.WARNING) as lines:
        run = LoadedInHalf(model, level, backend=backend, **options)
    dtypes = {str(p.dtype) for p in model.parameters()}
    stepped = {str(p.dtype) for g in run.optimizer.param_groups for p in g["params"]}
    stays = {name for name, p in model.named_parameters() if not p.requires_grad}
    with Collectives() as collectives:
        run.go_on()
    states = run.optimizer.state.values()
    kinds = {(type(t).__name__, str(t.dtype)) for s in states for t in s.values()}
    masters, state = run.values(), {str(v.dtype) for v in model.state_dict().values()}
    trained = {name: whole(p) for name, p in model.named_parameters()}
    run.end()
    model(x.to(half if dtype else torch.float32))  # its shards are gathered as they were
    after = {name: whole(p) for name, p in model.named_parameters()}
    rounded = {n: torch.tensor(v).to(came[n][0]).double().tolist() for n, v in trained.items()}
    alone = LoadedInHalf(loaded_net(dtype, adapted), level, share=joint, **options).go_on()
    return {
        "seen": {"losses": run.losses, "norms": run.norms},
        "masters": masters,
        "alone": {"losses": alone.losses, "masters": alone.values()},
        "dtypes": sorted(dtypes),
        "stays": all(came[n][1] == after[n] for n in stays) and sorted(stays),
        "stepped": sorted(stepped),
        "state": sorted(map(list, kinds)),
        "state dict": sorted(state),
        "came back": after == rounded
        and all(p.dtype is came[n][0] for n, p in model.named_parameters()),
        "lines": lines,
        "collectives": dict(collectives.found),
    }


RUNS = [
    *[(level, dtype, given, False) for level in ("O1", "O2") for dtype in HALVES
      for given in (True, False)],
    ("O2", "float16", True, True),
    ("O2", "bfloat16", False, True),
    ("O2", None, False, False),
]  # fmt: skip


def agreed(answers: list[dict[str, Any]], half: str) -> dict[str, Any]:
    """That ranks agree to the bit, and with one process to the rounding of half gradients."""
    first, second = answers
    for key in ("masters", "dtypes", "stepped", "state", "state dict", "collectives"):
        assert first[key] == second[key], key
    assert first["seen"]["norms"] == second["seen"]["norms"]
    assert first["stepped"] == ["torch.float32"]
    assert first["state"] == [["DTensor", "torch.float32"]]
    assert first["came back"] and second["came back"]
    ulp = torch.finfo(HALVES[half]).eps
    expected = first["alone"]
    losses = [
        sum(pair) / RANKS for pair in zip(*(a["seen"]["losses"] for a in answers), strict=True)
    ]
    # the first is of equal weights: outputs of a few hundredths of rounding, squared
    assert losses[0] == pytest.approx(expected["losses"][0], rel=4 * ulp)
    assert losses == pytest.approx(expected["losses"], rel=10 * ulp)
    # each step is at most lr / (1 - momentum) of clipped gradients off by 10 roundings, see
    # test_fsdp.py
    bound = STEPS * 0.1 / (1 - 0.5) * 0.5 * 10 * ulp
    assert distance(first["masters"], expected["masters"]) <= bound
    return first


@pytest.mark.parametrize(("level", "dtype", "given", "wide"), RUNS)
def test_as_one_process_on_the_joint_batch(
    pair: Pair, level: str, dtype: str | None, given: bool, wide: bool
) -> None:
    half = dtype or "float16"
    how = {"level": level, "dtype": dtype, "given": given, "wide": wide}
    found = agreed(half_shards_and_alone(pair, **how), half)
    assert found["dtypes"] == found["state dict"] == ["torch.float32"]
    reduced = "torch.float32" if wide or (level == "O1" and not given) else f"torch.{half}"
    assert found["lines"] == (
        []
        if given
        else [
            "fully_shard was given no param_dtype for 2 module(s) (FSDPSequential, FSDPLinear): as "
            f"if called with mp_policy=MixedPrecisionPolicy(param_dtype=torch.{half}, "
            f"reduce_dtype={'torch.float32' if reduced == 'torch.float32' else None})"
        ]
    )
    # FSDP2 moves what it did, and a step one collective more: the numbers by which ranks agree
    options = {"param_dtype": half, "reduce_dtype": reduced.removeprefix("torch.")}
    ours, torchs = Counter(found["collectives"]), Counter(by_torch_alone(pair, **options)[0])
    assert ours - torchs == {"_allgather_base_ torch.float32 28": STEPS}
    assert torchs - ours == {}
    gathered = {key.split()[1] for key in torchs if key.startswith("_allgather")}
    assert gathered == {f"torch.{half}"}


@on_ranks
def by_torch_alone(param_dtype: str, reduce_dtype: str) -> dict[str, int]:
    """The collectives of FSDP2 in a loop of torch alone."""
    options = {"param_dtype": param_dtype, "reduce_dtype": reduce_dtype}
    model = shards_of(None, **{key: getattr(torch, name) for key, name in options.items()})
    with Collectives() as collectives:
        for x in joint_batches(STEPS):
            (model(share(x)).float() - 1).square().mean().backward()
            model.zero_grad()
    return dict(collectives.found)


def test_frozen_half_bases_stay_half(pair: Pair) -> None:
    for given in (True, False):
        answers = half_shards_and_alone(
            pair, level="O2", dtype="bfloat16", given=given, wide=False, adapted=True
        )
        found = agreed(answers, "bfloat16")
        assert found["dtypes"] == found["state dict"] == ["torch.bfloat16", "torch.float32"]
        assert found["stays"] == ["0.base.bias", "0.base.weight"]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_enabled_after_a_forward(pair: Pair, level: str) -> None:
    how = {"level": level, "dtype": "float16", "given": False, "wide": False}
    cold, warm = (half_shards_and_alone(pair, **how, warm=warm)[0] for warm in (False, True))
    assert warm["came back"] and warm["masters"] == cold["masters"]


def test_steps_of_kernels(pair: Pair) -> None:
    """In Triton's interpreter."""
    options = {"level": "O2", "dtype": "bfloat16", "given": False, "wide": True}
    agreed(half_shards_and_alone(pair, **options, backend="triton"), "bfloat16")


@on_ranks
def dtypes_of_inputs(level: str, **policy: Any) -> list[str]:
    """In which dtypes layers get their inputs."""
    model = loaded_net("float16")
    sharded(model, [model[0]], {k: HALVES[v] for k, v in policy.items()} or None)
    given = [policy_of(m) for m in (model, model[0])]
    seen: list[str] = []
    for layer in (model[0], model[3]):
        layer.register_forward_hook(lambda _, args, __: seen.append(str(args[0].dtype)))
    LoadedInHalf(model, level).go_on().end()
    assert [policy_of(m) for m in (model, model[0])] == given
    return sorted(set(seen))


@on_ranks
def gathered_dtypes(second: bool) -> list[str]:
    """In which dtypes the first layer and the last, which is kept, have their weights; ``second``:
    in the second of two models.
    """
    model = loaded_net("float16")
    fully_shard(model[3])
    sharded(model, [model[0]], None)
    seen: list[str] = []
    for layer in (model[0], model[3]):
        # before the forward: after it a weight is a shard of the FP32 master again
        layer.register_forward_pre_hook(lambda used, _: seen.append(str(used.weight.dtype)))
    models, name = ([nn.Identity(), model], "1.3") if second else (model, "3")
    optimizer = SMALL_STEPS["SGD"](model.parameters())
    with enable(models, optimizer, level="O2", fp32_modules=[name]):
        model(share(joint_batches(1)[0]))
    return seen


@pytest.mark.parametrize("given", [{}, {"param_dtype": "float16"}], ids=repr)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_level_says_what_is_cast_and_not_fsdp2(
    pair: Pair, level: str, given: dict[str, str]
) -> None:
    """The first layer gets the FP32 input, the last one half activations."""
    assert dtypes_of_inputs(pair, level=level, **given) == [["torch.float16", "torch.float32"]] * 2


@pytest.mark.parametrize("second", [False, True])
def test_a_layer_that_is_kept_is_read_in_fp32(pair: Pair, second: bool) -> None:
    assert gathered_dtypes(pair, second=second) == [["torch.float16", "torch.float32"]] * 2


@on_ranks
def skipped(level: str) -> list[Any]:
    run = LoadedInHalf(shards_of("float16"), level).go_on(bad=1)
    return [run.values(), run.counts("steps", "skipped", "forward_faults", "scale")]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_fault_of_one_rank_is_a_skip_of_all(pair: Pair, level: str) -> None:
    first, second = skipped(pair, level=level)
    assert first == second
    assert first[1] == [STEPS - 1, 1, 1, 2.0**10]
    assert all(math.isfinite(x) for p in first[0] for x in p)


# Checkpoints


@on_ranks
def resumed_from_a_file(path: str, first: str | None, then: str | None, **how: Any) -> list[Any]:
    """Trains a model loaded in ``first``, saves; goes on, and from the file in ``then``."""
    if how:  # a smaller state, which SGD does not have
        how["optimizer"] = lambda params: torch.optim.AdamW(params, lr=0.01)
    run = LoadedInHalf(shards_of(first), **how).go_on()
    tritonamp.save_sharded(path, **run.objects())
    before = run.saved()
    again = LoadedInHalf(shards_of(then, seed=1), **how)
    tritonamp.load_sharded(path, **again.objects())
    return [before, again.saved(), run.go_on().saved(), again.go_on().saved()]


@pytest.mark.parametrize(
    ("first", "then", "options"),
    [
        ("float16", "float16", {}),
        ("float16", None, {}),
        (None, "float16", {}),
        ("float16", "float16", {"state": "bf16"}),
    ],
)
def test_resumes_bit_for_bit(
    pair: Pair, tmp_path: Path, first: str | None, then: str | None, options: dict[str, str]
) -> None:
    answers = resumed_from_a_file(
        pair, path=str(tmp_path / "run"), first=first, then=then, **options
    )
    assert answers[0] == answers[1]
    before, loaded, continued, resumed = answers[0]
    assert loaded == before
    assert resumed == continued != before
    rounded = [torch.tensor(v).half().double().tolist() for v in before[:6]]
    assert rounded != before[:6]  # values of masters


# What is refused


@on_ranks
def enabling(what: str) -> str:
    model, options = loaded_net("float16"), dict[str, Any](level="O2")
    if what == "half parameters":
        options = {"level": "O1", "half_parameters": True}
    elif what == "range":
        model, options = loaded_net("bfloat16"), {"level": "O2", "dtype": torch.float16}
        with torch.no_grad():
            model[0].weight[5, 0] = 1e6  # in the part of rank 1
    elif what == "two halves":
        model[3].bfloat16()
    elif what == "fp32_modules":
        options["fp32_modules"] = ["3"]
    elif what == "O3":
        options["level"] = "O3"
    elif what == "8bit":
        options |= {"state": "8bit", "optimizer": torch.optim.AdamW}
    elif what == "packed masters":
        options |= {"masters": "packed", "optimizer": torch.optim.AdamW}
    elif what == "offload":
        options["offload"] = "state"
    model = sharded(model, [model[0]])
    before = {name: (p.dtype, whole(p)) for name, p in model.named_parameters()}
    text = refused(lambda: LoadedInHalf(model, **options))
    assert before == {name: (p.dtype, whole(p)) for name, p in model.named_parameters()}
    return text


@on_ranks
def training_a_frozen_base(what: str) -> str:
    run = LoadedInHalf(shards_of("float16", adapted=True)).go_on()
    base = list(run.model[0].base.parameters())

    def act() -> None:
        if what == "unfrozen":
            run.optimizer.add_param_group({"params": base})
            base[0].requires_grad_(True)
            run.backward(run.loss(joint_batches(1)[0]))
        base[0].requires_grad_(True)
        run.optimizer.add_param_group({"params": base})

    text = refused(act)
    assert len(run.optimizer.param_groups) == 1 + (what == "unfrozen")
    return text


REFUSED = {
    "half parameters": "half_parameters=True: expected FP32 masters of sharded parameters that "
    "train, got '0.weight' and 5 more in half: call model.float() first",
    "range": "model: expected bfloat16 parameters up to 65504, where float16 ends, got 999424 in "
    "'0.weight'",
    "two halves": "model: expected one half dtype among the parameters that train, got "
    "torch.float16 ('0.weight', ...) and torch.bfloat16 ('3.weight', ...)",
    "unfrozen": "1 half parameter(s) under FSDP2 require gradients since tritonamp.enable: "
    "expected them to before it, which makes their shards FP32",
    "added": "1 half parameter(s) under FSDP2 require gradients since tritonamp.enable",
    "fp32_modules": "fp32_modules: FSDP2 gathers the parameters of Linear in torch.float16: call "
    "fully_shard on it first",
    "8bit": "state='8bit': expected parameters in one piece, got sharded ones (FSDP2, DTensor)",
    "packed masters": "masters='packed': expected parameters in one piece, got sharded ones (FSDP2",
    "offload": "offload='state': expected parameters in one piece, got sharded ones (FSDP2",
    "O3": "level: expected one with FP32 masters for sharded parameters",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_work_is_refused(pair: Pair, what: str) -> None:
    kind = "RuntimeError" if what in ("unfrozen", "added") else "ValueError"
    ask = enabling if kind == "ValueError" else training_a_frozen_base
    for text in ask(pair, what=what):
        assert text.startswith(f"{kind}: {REFUSED[what]}")


if __name__ == "__main__":
    serve(*sys.argv[1:])
