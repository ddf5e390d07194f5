"""A fault in one rank's batch, under DDP and FSDP2: all ranks run theirs again together, have one
report, and heal or raise alike.

The ranks are this file run as a script, see two_ranks.py.
"""

import importlib
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collectives import Collectives
from ranks import (
    STEP_SIZES,
    Shared,
    alike,
    distance,
    joint,
    listening,
    mesh_of,
    sharded,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from two_ranks import Pair, of_ranks, on_ranks, refused, serve

import tritonamp
from tritonamp.diagnosis.replay.bundles import load_bundle
from tritonamp.diagnosis.replay.search import find_fault
from tritonamp.distributed import unsharded
from tritonamp.distributed.fsdp import fsdp2_modules, mp_policy

pytestmark = of_ranks

STEPS = 6
ENGINES = "DDP", "FSDP2"


class Entropy(nn.Module):
    """NaN where an input is 0."""

    def forward(self, x: Tensor) -> Tensor:
        p = x.abs()
        return -p * p.log()


class Scores(nn.Module):
    """Scores that overflow float16 where inputs are large."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(6, 8), nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        return (self.q(x) @ self.k(x).mT).softmax(-1)


class Root(nn.Module):
    """Its weight gets NaN where an input is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x.abs()).sqrt()


class Attentive(nn.Module):
    """A model whose scores may overflow, behind a module that may give NaN."""

    gain = 0.0  # else what the scores are given is FP32, and larger

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.before, self.first, self.scores = first, nn.Linear(6, 8), Scores()
        self.last = nn.Linear(8, 1)
        self.register_buffer("offset", torch.zeros(6))  # which DDP sends to all

    def forward(self, x: Tensor) -> Tensor:
        scores = self.scores(x.float() * self.gain if self.gain else x)
        h = scores @ self.first(self.before(x))
        return self.last(torch.tanh(h))


def attentive(kind: str = "log") -> Attentive:
    torch.manual_seed(0)
    return Attentive(Root() if kind == "root" else Entropy())


def wrapped(engine: str, model: Any, own: bool = True) -> nn.Module:
    """``own``: the scores are sharded by themselves, else gathered with the rest."""
    if engine == "DDP":
        return DistributedDataParallel(model)
    parts = [*([model.scores] if own else []), model.last]
    return sharded(model, parts, {"param_dtype": torch.float16})  # type: ignore[no-any-return]


def batch_with(fault: str, step: int, here: bool = True) -> Tensor:
    """Return a batch of this rank; ``here``: with that fault."""
    generator = torch.Generator().manual_seed(7 * step + dist.get_rank())
    x = torch.randn(4, 6, generator=generator)
    if here and fault == "scores":
        return x * 1000
    if here and fault in ("log", "root", "data"):
        x[1, 2] = math.nan if fault == "data" else 0.0
    return x


class Faulty(Shared):
    """A training on batches of this rank, some of which have a fault."""

    def __init__(self, model: Any, level: str = "O2", **fields: Any) -> None:
        def adamw(params: Any) -> torch.optim.Optimizer:
            return torch.optim.AdamW(params, lr=0.01, eps=0.25)

        super().__init__(model, adamw, level, share=joint, **fields)

    def go_on(self, start: int, end: int, fault: str = "", bad: Any = (), rank: int = 1) -> None:
        """Take the steps from ``start`` to ``end``; those in ``bad`` have a fault on a rank."""
        for i in range(start, end):
            self.step(batch_with(fault, i, i in bad and dist.get_rank() == rank))

    def skipped(self) -> int:
        return self.amp.stats()["skipped"]  # type: ignore[no-any-return]


# One report


@on_ranks
def explained(engine: str, kind: str, culprit: int = 1, **fields: Any) -> dict[str, Any]:
    """In the third step a rank has a fault."""
    model: Any = wrapped(engine, attentive(kind))
    run = Faulty(model, **{"on_nonfinite": "explain", **fields})
    with listening() as texts:
        run.go_on(0, 2)
        if dist.get_rank() == culprit and kind == "weights":
            next(model.first.parameters())._local_tensor[0] = math.nan
        run.go_on(2, STEPS, kind, [2], culprit)
    return {
        "said": [text for text in texts if text.startswith("step 3 skipped")],
        "explained": run.amp.explain(),
        "detail": run.amp.history[2].detail,
        "skipped": run.skipped(),
        "masters": run.values() if kind != "weights" else [],
    }


def line_of(function: Any, code: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    start = function.__code__.co_firstlineno
    return f"{__file__}:{next(i for i in range(start, len(lines)) if code in lines[i]) + 1}"


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_nan_is_explained_by_all_ranks_alike(pair: Pair, engine: str, culprit: int) -> None:
    first = alike(explained(pair, engine=engine, kind="log", culprit=culprit))
    (said,) = first["said"]
    assert f"forward fault: the loss itself was inf or NaN (loss scale 1024) on rank {culprit}" in (
        said
    )
    line = line_of(Entropy.forward, "p.log()")
    assert f"domain error, forward: before, op log at {line}, on rank {culprit}" in said
    assert first["explained"] == said
    assert said.startswith(first["detail"])
    assert first["skipped"] == 1


@pytest.mark.parametrize("engine", ENGINES)
def test_an_overflow_is_explained_by_all_ranks_alike(pair: Pair, engine: str) -> None:
    first = alike(explained(pair, engine=engine, kind="scores"))
    line = line_of(Scores.forward, "softmax")
    (said,) = first["said"]
    assert f"matmul overflow, forward: scores, op matmul at {line}, on rank 1\n" in said
    advised = "Let products have FP32 results: fp32_results=['scores']"
    assert f"{advised} (tried: the forward passes)" in said


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    ranks = Pair(tmp_path_factory.mktemp("three"), __file__, 3)
    yield ranks
    ranks.stop()


@pytest.mark.parametrize("engine", ENGINES)
def test_the_last_of_three_ranks_is_named(three: Pair, engine: str) -> None:
    (said,) = alike(explained(three, engine=engine, kind="scores", culprit=2))["said"]
    assert said.count("on rank 2") == 2 and "on rank 0" not in said and "on rank 1" not in said


@pytest.mark.parametrize("engine", ENGINES)
def test_a_gradient_is_explained_by_all_ranks_alike(pair: Pair, engine: str) -> None:
    """DDP and FSDP2 give all ranks the NaN: whose batch it was, only running them again tells."""
    first = alike(explained(pair, engine=engine, kind="root", level="O1", loss_scale=1.0))
    (said,) = first["said"]
    assert "backward fault: the loss was finite, but at loss scale 1 the gradients of" in said
    assert "parameter(s) were NaN: before.weight" in said
    line = line_of(Root.forward, "sqrt()")
    assert f"backward nan, backward: before, op sqrt at {line}, on rank 1\n" in said
    assert first["skipped"] == 1


CAUSE = "huge gradient"


@on_ranks
def huge(engine: str) -> list[Any]:
    """In the second step a gradient is finite and its square is not: under FSDP2 on one rank."""
    model = wrapped(engine, attentive("root"))
    run, seen = Faulty(model, "O1"), []
    for i in range(3):
        run.backward(run.loss(batch_with("", i)))
        grad = next(p for name, p in model.named_parameters() if "first.weight" in name).grad
        if i == 1 and (engine == "DDP" or dist.get_rank() == 1):
            getattr(grad, "_local_tensor", grad).view(-1)[0] = 2e33
        before = run.values()
        run.finish()
        seen.append(run.values() != before)
    return [seen, *run.counts("scale"), run.amp.history[1].cause, run.amp.explain()]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_huge_gradient_is_a_skip_on_all_ranks(pair: Pair, engine: str) -> None:
    answers = huge(pair, engine=engine)
    assert alike([answer[:3] for answer in answers]) == [[True, False, True], 2.0**10, CAUSE]
    texts = [answer[3] for answer in answers]
    assert "first.weight (2e+30). A step would" in texts[1]
    assert engine == "DDP" or all("so large on rank 1 that" in text for text in texts)


@pytest.mark.parametrize("engine", ENGINES)
def test_what_one_rank_has_seen_is_the_cause_on_all(pair: Pair, engine: str) -> None:
    (said,) = alike(explained(pair, engine=engine, kind="data"))["said"]
    text = "data: the input batch itself of rank 1 held inf or NaN, and the loss became so, too: "
    assert f"step 3 skipped (1 of 3): {text}input 0: inf or NaN in sample(s) 1" in said


def test_a_shard_of_one_rank_is_the_cause_on_all(pair: Pair) -> None:
    (said,) = alike(explained(pair, engine="FSDP2", kind="weights"))["said"]
    assert "bad parameters: 1 parameter(s) of the model were inf or NaN already" in said
    assert "first.weight" in said


@pytest.mark.parametrize("engine", ENGINES)
def test_running_again_leaves_no_trace(pair: Pair, engine: str) -> None:
    watched = explained(pair, engine=engine, kind="scores")[0]["masters"]
    plain = explained(pair, engine=engine, kind="scores", on_nonfinite="skip")[0]["masters"]
    assert watched == plain


@on_ranks
def both(engine: str) -> dict[str, Any]:
    """Each rank has a fault of its own, twice, in the same steps."""
    run = Faulty(wrapped(engine, attentive()), on_nonfinite="heal")
    kind = ("log", "scores")[dist.get_rank()]
    with listening() as texts:
        run.go_on(0, STEPS, kind, (1, 3), dist.get_rank())
    return {"said": texts, "healed": run.amp.stats()["healed"], "masters": run.values()}


@pytest.mark.parametrize("engine", ENGINES)
def test_faults_of_several_ranks_are_one_report(pair: Pair, engine: str) -> None:
    first = alike(both(pair, engine=engine))
    said = next(text for text in first["said"] if text.startswith("step 2 skipped"))
    assert "the loss itself was inf or NaN (loss scale 1024) on ranks 0, 1" in said
    log, scores = line_of(Entropy.forward, "p.log()"), line_of(Scores.forward, "softmax")
    assert f"\ndomain error, forward: before, op log at {log}, on rank 0\n" in said
    assert said.endswith(
        f"  also:    matmul overflow, forward: scores, op matmul at {scores}, on rank 1"
    )
    assert first["healed"] == ["scores"]  # no precision has a logarithm of 0


# A fault of the loss, and statistics that it has spoilt


def of_square_root(output: Tensor) -> Tensor:
    return (output.square().sum(-1) * 0).sqrt().mean()


@on_ranks
def outside(engine: str) -> dict[str, Any]:
    """Rank 1 has a loss whose slope is infinite, in two steps."""
    run = Faulty(wrapped(engine, attentive()), on_nonfinite="explain", loss_scale=1.0)
    with listening() as texts:
        for i in range(4):
            output = run.model(batch_with("", i))
            fault = i in (1, 2) and dist.get_rank() == 1
            run.backward(of_square_root(output) if fault else output.float().square().mean())
            run.finish()
    return {
        "said": [text for text in texts if " skipped (" in text],
        "modes": torch._C._len_torch_dispatch_stack(),
        "skipped": run.skipped(),
        "masters": run.values(),
    }


@pytest.mark.parametrize("engine", ENGINES)
def test_a_loss_of_one_rank_is_explained_by_all_ranks_alike(pair: Pair, engine: str) -> None:
    """FSDP2's backward needs other ranks, so it does not run before the user's own."""
    first = alike(outside(pair, engine=engine))
    assert (first["modes"], first["skipped"]) == (0, 2)
    line = line_of(of_square_root, "sqrt()")
    named = f"backward nan, backward: outside the model, op sqrt at {line}, on rank 1\n"
    assert [named in text for text in first["said"]] == [False, engine == "DDP"]
    assert ("The next steps run watched" in first["said"][0]) is (engine == "DDP")


@on_ranks
def with_statistics(engine: str) -> dict[str, Any]:
    """Rank 1 has a batch that overflows before a norm."""
    model = attentive()
    model.last = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 1))
    run = Faulty(wrapped(engine, model), on_nonfinite="heal")
    with listening() as texts:
        run.go_on(0, 3, "scores", (1,))
    return {
        "said": [text for text in texts if " skipped (" in text],
        "finite": bool(torch.isfinite(model.last[0].running_var).all()),
    }


@pytest.mark.parametrize("engine", ENGINES)
def test_running_statistics_are_restored_on_all_ranks(pair: Pair, engine: str) -> None:
    first = alike(with_statistics(pair, engine=engine))
    assert first["finite"]
    (said,) = first["said"]
    assert (
        "Buffers that became inf or NaN were set back to their values before this step: last.0"
        in said
    )


# What is done about it


def param_dtypes(model: nn.Module) -> list[str]:
    """Return the dtypes in which FSDP2 gathers."""
    return [str(mp_policy(module).param_dtype) for module in fsdp2_modules(model)]


@on_ranks
def healed(engine: str, own: bool, module: str | None, level: str, kind: str) -> dict[str, Any]:
    """Rank 1 has a fault in three steps: the third is none any more.

    ``module``: one that is healed by hand before.
    """
    model = wrapped(engine, attentive(), own)
    run = Faulty(model, level, on_nonfinite="heal")
    amp, dtypes = run.amp, list[str]()
    scores: Any = amp._parts.models[0].scores
    scores.q.register_forward_hook(
        lambda q, _, output: dtypes.append(f"{q.weight.dtype} {output.dtype}")
    )
    if module is not None:
        amp.heal(module)
    with listening() as texts:
        run.go_on(0, STEPS, kind, (1, 2, 4))
    found = {
        "said": texts,
        "masters": run.values(),
        "healed": amp.stats()["healed"],
        "skipped": run.skipped(),
        "state": [amp.state_dict()[name] for name in ("healed", "healed_results")],
        "counts": amp.state_dict()["faults"],
    }
    last = dtypes[-1]
    if found["healed"]:
        amp.unheal(found["healed"][0])
    run.go_on(STEPS, STEPS + 1)
    steps = amp.stats()["steps"]
    run.end()
    return {
        "found": found,
        "finite": all(map(math.isfinite, run.losses[3:])),
        "last": last,
        "after": dtypes[-1],
        "steps": steps,
        "policies": sorted(set(param_dtypes(model))),
    }


@pytest.mark.parametrize(
    ("engine", "own"),
    [("DDP", False), ("FSDP2", True), ("FSDP2", False)],  # the last: copies of what came in float16
)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_all_ranks_heal_what_one_has_shown(pair: Pair, engine: str, own: bool, level: str) -> None:
    first = alike(healed(pair, engine=engine, own=own, module=None, level=level, kind="scores"))
    found = first["found"]
    assert (found["healed"], found["state"]) == (["scores"], [[], ["scores"]])
    assert found["skipped"] == 2
    assert found["counts"]["by_module"] == {"scores": 2}
    assert first["finite"]
    narrow = "torch.float32" if (engine, level) == ("DDP", "O1") else "torch.float16"
    assert first["last"] == f"{narrow} torch.float32", "weights stay half where they were"
    assert first["after"] == f"{narrow} torch.float16"
    assert first["steps"] == STEPS - 2 + 1
    assert any("Healed: scores has FP32 results from now on" in text for text in found["said"])
    assert first["policies"] == (["torch.float16"] if engine == "FSDP2" else [])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_whole_model_is_healed_by_hand(pair: Pair, engine: str) -> None:
    first = alike(healed(pair, engine=engine, own=True, module="", level="O2", kind="scores"))
    assert (first["found"]["healed"], first["found"]["skipped"]) == ([""], 0)
    assert first["last"] == "torch.float32 torch.float32"
    assert first["after"] == "torch.float16 torch.float16"
    assert first["finite"]


@on_ranks
def raised(engine: str, after: int) -> list[Any]:
    run = Faulty(wrapped(engine, attentive()), on_nonfinite="raise", raise_after=after)
    text = refused(lambda: run.go_on(0, STEPS, "log", range(2, STEPS)))
    return [len(run.losses) - 1, text, run.values()]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("after", [1, 2])
def test_all_ranks_raise_the_same_error(pair: Pair, engine: str, after: int) -> None:
    first = alike(raised(pair, engine=engine, after=after))
    assert first[0] == 1 + after and first[1].startswith("NonFiniteError")
    assert f"op log at {line_of(Entropy.forward, 'p.log()')}, on rank 1" in first[1]


# Replays that are asked for


class Meddler(nn.Module):
    """Scores whose forward also does the work that a test names."""

    def __init__(self, scores: nn.Module) -> None:
        super().__init__()
        self.inner = scores
        self.does: Callable[[], Any] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        self.does()
        return self.inner(x)


@on_ranks
def asked(engine: str, how: str) -> dict[str, Any]:
    """``how`` the last step's fault, of rank 1, is run again, by ``on_nonfinite="skip"``."""
    rank, plain = dist.get_rank(), attentive()
    plain.scores = Meddler(plain.scores)  # type: ignore[assignment]
    model = wrapped(engine, plain)
    run = Faulty(model)
    meddler: Any = plain.scores
    if how == "communicates":
        meddler.does = lambda: dist.all_reduce(torch.zeros(2))
    run.go_on(0, 2)
    x = batch_with("log", 2, rank == 1 and how != "nothing was skipped")
    run.step(x)
    replay: Any = True
    if how in ("function", "fails"):
        replay = lambda: (model(x) - 1).square().mean()  # noqa: E731
    if how == "fails" and rank == 1:
        meddler.does = lambda: [][0]
    if how == "changed" and rank == 1:
        x.add_(1)
    if how == "drift" and rank == 1:
        run.amp._parts.log.drift = lambda: "what this rank alone has seen"  # type: ignore
    if how == "memory" and rank == 1:
        unsharded.free_memory = lambda device: 100
    try:
        with Collectives() as collectives:
            texts = [run.amp.explain(replay=replay)]
    finally:
        unsharded.free_memory = FREE_MEMORY
    for module in fsdp2_modules(model):
        check_between_steps(module._get_fsdp_state())
    meddler.does = lambda: None
    texts.append(run.amp.explain(replay=True) if how == "fails" else "")
    run.go_on(3, 5)
    # those of objects are of another kind
    gathers = sum(n for name, n in collectives.found.items() if "_allgather_base_" in name)
    steps = run.amp.stats()["steps"]
    return {"texts": texts, "masters": run.values(), "steps": steps, "gathers": gathers}


def check_between_steps(state: Any) -> None:
    """FSDP2 is where it is before a forward; on a GPU it would not wait for the optimizer else."""
    context = state._state_ctx
    assert context.iter_forward_root is None and not context.post_backward_final_callback_queued
    assert not state._modules_to_run_forward and not state._comm_ctx.post_forward_order
    assert state._training_state.name == "IDLE"


FREE_MEMORY = unsharded.free_memory
LOG = "domain error, forward: before, op log at "


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("how", ["last batch", "function"])
def test_a_replay_of_all_ranks(pair: Pair, engine: str, how: str) -> None:
    first = alike(asked(pair, engine=engine, how=how))
    text = first["texts"][0]
    assert "on rank 1, and the input batch was not" in text
    assert f"\n{LOG}{line_of(Entropy.forward, 'p.log()')}, on rank 1\n" in text
    # each group of parameters once, however often the batch has run
    assert (first["steps"], first["gathers"]) == (4, 3 if engine == "FSDP2" else 0)


@pytest.mark.parametrize("engine", ENGINES)
def test_all_ranks_leave_a_replay_that_raises_on_one(pair: Pair, engine: str) -> None:
    first = alike(asked(pair, engine=engine, how="fails"))
    failed, again = first["texts"]
    assert "\nrank 0: not reproduced: run again, nothing is inf or NaN" in failed
    assert "\nrank 1: The replay failed: IndexError: list index out of range" in failed
    assert LOG in again  # what was raised in the middle of a forward has left nothing behind
    assert first["masters"] == asked(pair, engine=engine, how="function")[0]["masters"]


@pytest.mark.parametrize(
    ("engine", "how", "text"),
    [
        ("DDP", "communicates", "Not replayed: its forward or backward communicates with other"),
        ("FSDP2", "communicates", "Not replayed: its forward or backward communicates with other"),
        ("DDP", "changed", "rank 1: Not replayed: the batch was changed in place"),
        ("DDP", "nothing was skipped", "Run again, nothing overflows"),
        ("FSDP2", "nothing was skipped", "Run again, nothing overflows"),
    ],
)
def test_all_ranks_say_why_there_is_no_fault(pair: Pair, engine: str, how: str, text: str) -> None:
    first = alike(asked(pair, engine=engine, how=how))
    assert f"\n{text}" in first["texts"][0]
    assert first["steps"] == (5 if how == "nothing was skipped" else 4)


def test_drift_of_one_rank_is_told_by_all(pair: Pair) -> None:
    text = alike(asked(pair, engine="FSDP2", how="drift"))["texts"][0]
    assert text.endswith("\nThen what this rank alone has seen")


def test_parameters_that_do_not_fit_are_not_gathered(pair: Pair) -> None:
    first = alike(asked(pair, engine="FSDP2", how="memory"))
    text = first["texts"][0]
    assert "Not replayed: a batch would run again on each rank by itself, which takes" in text
    assert "GiB of whole parameters, 9.31e-08 GiB are free on rank 1." in text
    assert (first["steps"], first["gathers"]) == (4, 0)


@on_ranks
def without_room() -> list[Any]:
    """Rank 1 has no memory for whole parameters, and faults."""
    run = Faulty(wrapped("FSDP2", attentive()), on_nonfinite="heal")
    run.amp._parts.log.reconsidered = None  # type: ignore[assignment]  # it runs batches
    if dist.get_rank() == 1:
        unsharded.free_memory = lambda device: 100
    try:
        with listening() as texts:
            run.go_on(0, STEPS, "scores", range(3))
    finally:
        unsharded.free_memory = FREE_MEMORY
    return [texts, *run.counts("skipped", "healed"), run.values()]


def test_training_goes_on_where_parameters_do_not_fit(pair: Pair) -> None:
    texts, skipped, healed, _ = alike(without_room(pair))
    assert (skipped, healed) == (3, [])
    assert all("\nNot replayed: a batch would run again on each rank" in text for text in texts)


@on_ranks
def bundles(engine: str, folder: str, what: str) -> list[Any]:
    """``what``: the batch of rank 1, or one that cannot be written, or none."""
    run = Faulty(wrapped(engine, attentive()), on_nonfinite="explain")
    run.go_on(0, 3, "scores" if what != "nothing" else "", [2])
    target = Path(folder) / f"rank{dist.get_rank()}"
    if what == "cannot" and dist.get_rank() == 1:
        target.write_text("a file")
    text = refused(lambda: run.amp.write_bundle(str(target)))
    if text != "done":
        return [text]
    return [sorted(path.name for path in target.glob("*")), run.values()]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_bundle_is_replayed_in_one_process(pair: Pair, engine: str, tmp_path: Path) -> None:
    first, second = bundles(pair, engine=engine, folder=str(tmp_path), what="batch")
    assert first[0] == [] and first[1] == second[1]
    folder = tmp_path / "rank1"
    assert {"inputs.pt", "weights.pt", "policy.json", "report.txt"} < set(second[0])
    report = (folder / "report.txt").read_text()
    assert "matmul overflow, forward: scores" in report and "on rank 1" in report
    model = attentive()
    weights = torch.load(folder / "weights.pt", weights_only=True)
    model.load_state_dict(weights)
    names = [name for name, _ in model.named_parameters()]
    ours = [weights[name].double().flatten().tolist() for name in names]
    assert ours == first[1] if engine == "FSDP2" else sorted(ours) == sorted(first[1])
    policy = tritonamp.Policy.from_json((folder / "policy.json").read_text())
    amp = tritonamp.enable(model, policy=policy)
    fault = find_fault(model, load_bundle(folder, model).run)
    assert fault is not None
    assert (fault.kind, fault.module, fault.rank) == ("matmul_overflow", "scores", None)
    amp.disable()


@pytest.mark.parametrize("engine", ENGINES)
def test_bundles_that_cannot_be_bundles(pair: Pair, engine: str, tmp_path: Path) -> None:
    for text in bundles(pair, engine=engine, folder=str(tmp_path), what="nothing"):
        assert text[0].startswith("RuntimeError: write_bundle: expected a failing batch, got none")
    first, second = bundles(pair, engine=engine, folder=str(tmp_path), what="cannot")
    assert first[0].startswith("RuntimeError: write_bundle: rank 1 could not write: [Errno 17]")
    assert second[0].startswith("FileExistsError: [Errno 17]")


@on_ranks
def joined() -> list[Any]:
    """Rank 0 has run out of batches when rank 1 meets the faults."""
    run = Faulty(wrapped("DDP", attentive()), on_nonfinite="heal", loss_scale=1.0)
    with listening() as texts, run.model.join():
        run.go_on(0, 2 + 3 * dist.get_rank(), "scores", (2, 3))
    return [texts, *run.counts("steps", "healed"), run.values()]


def test_nothing_runs_again_where_ranks_may_be_missing(pair: Pair) -> None:
    first, second = joined(pair)
    assert first[1:] == second[1:]
    assert first[1:3] == [3, []]
    assert "Nothing runs again inside of model.join()" in second[0][-1]


# Ways to shard, and to train


def sharded_in(way: str) -> tuple[Any, dict[str, Any]]:
    """Return a sharded model, and options of enable."""
    model: Any = attentive()
    policy: dict[str, Any] = {"param_dtype": torch.float16}
    fields: dict[str, Any] = {"level": "O1" if way == "O1 without a policy" else "O2"}
    options: dict[str, Any] = {"reshard_after_forward": False} if way == "no reshard" else {}
    if way in ("copies", "copies of shards"):
        options["mesh"] = mesh_of({"copies of shards": "shards"}.get(way, way))
    elif way == "checkpoint":
        wrapper = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
        model.scores = importlib.import_module(wrapper).checkpoint_wrapper(model.scores)
    elif way.startswith("compiled block"):
        model.scores.compile(backend="aot_eager")
    elif way == "half":
        model.half()
    elif way == "frozen":
        model.first.half().requires_grad_(False)
    elif way == "bfloat16":
        policy["param_dtype"] = fields["dtype"] = torch.bfloat16
    if "without a policy" in way:
        policy = {}
    own: list[Any] = [] if way == "compiled block, not its own" else [model.scores]
    if way == "two in a group":
        own = [[model.scores, model.last]]
    return sharded(model, own, policy, **options), fields


@on_ranks
def two_batches_a_step(way: str, on_nonfinite: str, kind: str) -> list[Any]:
    """Rank 1 has a fault in the second step."""
    model, fields = sharded_in(way)
    run = Faulty(model, on_nonfinite=on_nonfinite, **fields)
    for i in range(2 * STEPS):
        last = i % 2 == 1
        if way == "no sync":
            model.set_requires_gradient_sync(last)
        bad = i in (2, 6) and dist.get_rank() == 1
        run.backward(run.loss(batch_with(kind, i, bad)) / 2)
        if last:
            run.finish()
    found = [run.values(), run.skipped(), run.amp.history[1].cause]
    text = run.amp.explain() if on_nonfinite == "explain" else ""
    return [found, text, *run.counts("healed")]


WAYS = [
    "copies",
    "copies of shards",
    "checkpoint",
    "compiled block",
    "compiled block, not its own",
    "half",
    "frozen",
    "no reshard",
    "no sync",
    "two in a group",
    "O1 without a policy",
    "O2 without a policy",
]


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_shard(pair: Pair, way: str) -> None:
    found, text, _ = alike(two_batches_a_step(pair, way=way, on_nonfinite="explain", kind="scores"))
    assert "\nmatmul overflow, forward: scores" in text and ", on rank 1\n" in text
    assert found[1:] == [2, "forward fault"]
    plain = alike(two_batches_a_step(pair, way=way, on_nonfinite="skip", kind="scores"))[0]
    assert found == plain
    found, _, healed = alike(two_batches_a_step(pair, way=way, on_nonfinite="heal", kind="scores"))
    name = "scores._checkpoint_wrapped_module" if way == "checkpoint" else "scores"
    assert healed == [name]
    assert found[1] == 2


def test_a_nan_in_bfloat16(pair: Pair) -> None:
    found, text, _ = alike(
        two_batches_a_step(pair, way="bfloat16", on_nonfinite="explain", kind="log")
    )
    assert f"\n{LOG}{line_of(Entropy.forward, 'p.log()')}, on rank 1\n" in text
    assert found[1] == 2


@on_ranks
def beyond_half(level: str) -> list[Any]:
    """The scores are given more than float16 holds on rank 1 from step 2."""
    run = Faulty(wrapped("FSDP2", attentive()), level, on_nonfinite="heal")
    with listening() as texts:
        for i in range(STEPS):
            run.model.gain = 1e6 if i >= 2 and dist.get_rank() == 1 else 1.0
            run.go_on(i, i + 1)
    return [texts, *run.counts("healed", "skipped"), run.values()]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_what_a_layer_casts_is_healed_with_the_layer(pair: Pair, level: str) -> None:
    """FSDP2 casts nothing, so layers find the FP32 input too large; tried modules are healed."""
    texts, healed, skipped, values = alike(beyond_half(pair, level=level))
    (report, *_) = [text for text in texts if text.startswith("step 3 skipped")]
    line = line_of(Scores.forward, "self.q(x)")
    assert f"\ncast overflow, forward: scores.q, op linear at {line}, on rank 1\n" in report
    assert "fp32_modules=['scores.q', 'scores.k', 'scores'] (tried: the forward passes" in report
    assert (healed, skipped) == (["scores.q", "scores.k", "scores"], 2)
    assert all(math.isfinite(x) for p in values for x in p)


@on_ranks
def in_fp32(engine: str, own: bool, names: list[str]) -> list[Any]:
    """Modules are healed from the beginning; then another model that loads their names."""
    state, found = None, list[Any]()
    for _ in range(2):
        model = wrapped(engine, attentive(), own)
        run = Faulty(model)
        for name in names if state is None else []:
            run.amp.heal(name)
        if state is not None:
            run.amp.load_state_dict(state)
        run.walk([batch_with("", i) for i in range(STEPS)], max_norm=math.inf)
        found += [sorted(run.values()), max(run.norms)]
        state = run.amp.state_dict()
        run.end()
        assert "float32" not in "".join(param_dtypes(model))
    return found


@pytest.mark.parametrize(("own", "names"), [(True, [""]), (False, ["scores"]), (True, ["scores"])])
def test_healed_modules_train_as_under_ddp(pair: Pair, own: bool, names: list[str]) -> None:
    """Of FP32 weights that means: the same bits."""
    ours, largest, *loaded = alike(in_fp32(pair, engine="FSDP2", own=own, names=names))
    theirs = alike(in_fp32(pair, engine="DDP", own=own, names=names))[0]
    assert loaded == [ours, largest]
    if own:
        assert ours == theirs
    # weights that were gathered in float16; as in test_fsdp.py
    bound = STEPS * STEP_SIZES["AdamW"] * largest * 10 * 2.0**-11
    assert distance(ours, theirs) <= bound


if __name__ == "__main__":
    serve(*sys.argv[1:])
