"""Two gloo ranks on CPU train the stages of one model by ``torch.distributed.pipelining``.

The ranks are this file run as a script, see two_ranks.py.
"""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collectives import Collectives
from pipelines import MICRO, RUN, STEPS, Alone, Staged, stage_inputs
from ranks import SCALE
from staged import resumed, said_by
from torch import Tensor
from two_ranks import Pair, enable, of_ranks, on_ranks, serve

from tritonamp.kernels.outliers import SIZE

pytestmark = of_ranks

NORM_ULPS = 8 * 2.0**-24  # a norm is a sum in another order; the masters behind it have the bits


@on_ranks
def staged_and_alone(kind: str, fault: str | None = None, **options: Any) -> list[Any]:
    """Dtypes come as names from the other process."""
    max_norm = options.pop("max_norm", math.inf)
    for name in ("dtype", "grad_dtype", "cast_outputs"):
        if options.get(name):
            options[name] = getattr(torch, options[name])
    options = {"level": "O2", **options}
    found = Staged(kind, **options).train(fault, max_norm)
    options |= {
        "traced": {"traced": True},
        "looped": {"last_first": True},  # its backwards
        "dual V": {"micro": 2 * MICRO},
    }.get(kind, {})
    return [found, Alone(**options).train(fault, max_norm)]


VARIANTS: list[dict[str, Any]] = [
    *[{"kind": kind} for kind in RUN],
    *[{"kind": "1F1B", "level": level} for level in ("O0", "O1", "O3")],
    {"kind": "1F1B", "dtype": "bfloat16"},
    {"kind": "GPipe", "optimizer": "AdamW", "half": True},
    {"kind": "1F1B", "half": True, "frozen": True},
    {"kind": "1F1B", "state": "bf16"},
    {"kind": "interleaved", "optimizer": "two"},
    {"kind": "1F1B", "optimizer": "NAdam"},
    *[{"kind": kind, "grad_dtype": "float32"} for kind in ("1F1B", "zero bubble")],
    {"kind": "1F1B", "cast_outputs": None},
]


@pytest.mark.parametrize("options", VARIANTS, ids=lambda o: " ".join(map(str, o.values())))
def test_as_one_process(pair: Pair, options: dict[str, Any]) -> None:
    (first, alone), (second, _) = staged_and_alone(pair, **options)
    assert alone["losses"] in (first["losses"], second["losses"])
    assert first["norms"] == second["norms"]
    assert first["norms"] == pytest.approx(alone["norms"], rel=NORM_ULPS)
    assert first["values"] | second["values"] == alone["values"]
    assert first["state"] == second["state"] == alone["state"]
    assert alone["state"][0] == STEPS


FAULTS = {
    "loss": [STEPS - 1, 1, 1, 0, SCALE, "forward fault"],
    "activation": [STEPS - 1, 1, 1, 0, SCALE, "forward fault"],
    "gradient": [STEPS - 1, 1, 0, 1, SCALE / 2, "scale overflow"],
    "veto": [STEPS - 1, 1, 0, 0, SCALE, "veto"],
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", [kind for kind in ("1F1B", "V") if kind in RUN])
def test_a_fault_on_one_stage_is_a_skip_of_all(pair: Pair, kind: str, fault: str) -> None:
    (first, alone), (second, _) = staged_and_alone(pair, kind=kind, fault=fault)
    assert first["state"] == second["state"] == FAULTS[fault]
    assert first["values"] | second["values"] == alone["values"]


@pytest.mark.parametrize("fault", ["loss", "gradient"])
def test_without_a_loss_scale_stages_decide_together(pair: Pair, fault: str) -> None:
    (first, alone), (second, _) = staged_and_alone(pair, kind="1F1B", fault=fault, dtype="bfloat16")
    assert first["state"] == second["state"] == alone["state"]
    assert first["state"][:2] == [STEPS - 1, 1]
    assert first["values"] | second["values"] == alone["values"]


@pytest.mark.parametrize("kind", ["GPipe", "interleaved"])
def test_clipped_by_the_norm_of_all_stages(pair: Pair, kind: str) -> None:
    """The norm is clipped to has another last bit, so an update has another last bit or two."""
    (first, alone), (second, _) = staged_and_alone(pair, kind=kind, max_norm=0.5)
    assert min(alone["norms"]) > 0.5
    assert first["norms"] == second["norms"]
    assert first["norms"] == pytest.approx(alone["norms"], rel=STEPS * NORM_ULPS)
    update = 0.1 / (1 - 0.5) * 0.5  # of SGD, at most
    for name, found in (first["values"] | second["values"]).items():
        bound = STEPS * update * NORM_ULPS + 2.0**-24 * max(map(abs, found))
        far = [abs(a - b) for a, b in zip(found, alone["values"][name], strict=True)]
        assert max(far) <= bound, name


@on_ranks
def with_an_outlier() -> list[Any]:
    """The gradients of the last step are an outlier on the second rank, whose stage is the last."""
    run = Staged(level="O2", skip_outliers=6.0)
    for group in run.optimizers[0].param_groups:
        group["lr"] = 0.0
    norms = []
    for step in range(SIZE + 1):
        run.factor = (1.0 + 0.02 * (step % 5)) * (4.0 if step == SIZE else 1.0)
        run.backward(stage_inputs(1)[0])
        norms.append(float(run.amp.clip_grad_norm_(math.inf)))
        run.step()
    record, window = run.amp.history[-1], run.amp.state_dict()["outliers"]["0"]
    state = run.state()
    return [record.cause, *state[:2], state[4], window, norms]


def test_outliers_are_told_by_all_stages(pair: Pair) -> None:
    first, second = with_an_outlier(pair)
    assert first == second
    assert first[:4] == ["outlier", SIZE, 1, SCALE]
    losses, norms = first[4][:SIZE], first[4][SIZE : 2 * SIZE]
    assert all(math.isfinite(number) and number > 0 for number in (*losses, *norms))


@on_ranks
def on_no_data(fault: bool) -> list[Any]:
    """Uninitialized memory is NaN, and so are the inputs from which stages learn shapes."""
    run = Staged(level="O2", dtype=torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    run.factor = math.nan if fault else 1.0
    run.walk(stage_inputs(1))
    torch.use_deterministic_algorithms(False)
    return [run.state()[:3], "the input batch was not" in run.amp.explain()]


@pytest.mark.parametrize("fault", [False, True])
def test_forwards_for_shapes_do_not_count(pair: Pair, fault: bool) -> None:
    """Their input is not noted as a batch, nor is their loss taken for one."""
    for state, is_known in on_no_data(pair, fault=fault):
        assert state == ([0, 1, 1] if fault else [1, 0, 0])
        assert is_known == fault


@on_ranks
def frozen_last_stage() -> list[Any]:
    """The loss of the first micro-batch is NaN, and no gradient stays where it was computed."""
    run, x = Staged(level="O2"), stage_inputs()[0]
    if run.has_last_stage:
        run.models[0].requires_grad_(False)
        x[0] = math.nan
    run.walk([x])
    return run.state()


def test_a_frozen_stage_remembers_its_losses(pair: Pair) -> None:
    assert frozen_last_stage(pair) == [[0, 1, 1, 0, SCALE, "forward fault"]] * 2


# Loops


def loop(run: Alone, how: str) -> list[Any]:
    """Other loops than one schedule step for each optimizer step."""
    first, second, third, _ = stage_inputs()
    usual = 1.0 / MICRO if how == "summed" else 1.0
    run.factor = math.nan if how == "a bad batch is dropped" else usual
    if how != "by the scaler":
        run.backward(first)
    if how == "clipped and dropped":
        run.amp.clip_grad_norm_(1.0)
    if "dropped" in how:
        run.optimizers[0].zero_grad()
    run.factor = usual
    run.backward(second)
    if how == "by the scaler":
        run.amp.scaler.unscale_(run.optimizers[0])
        run.amp.scaler.step(run.optimizers[0])
        run.amp.scaler.update()
        run.optimizers[0].zero_grad()
    else:
        run.step()
    run.step()  # without gradients
    run.walk([third])
    return [run.values(), run.state()]


@on_ranks
def loops(how: str) -> list[Any]:
    found = loop(Staged(level="O2", summed=how == "summed"), how)
    return [found, loop(Alone(level="O2", summed=how == "summed"), how)]


@pytest.mark.parametrize(
    "how", ["summed", "a bad batch is dropped", "clipped and dropped", "by the scaler"]
)
def test_other_loops(pair: Pair, how: str) -> None:
    (first, alone), (second, _) = loops(pair, how=how)
    assert first[1] == second[1]
    assert first[0] | second[0] == alone[0]
    # a step without gradients is one of stages, which cannot know whether others have any
    assert first[1] == [alone[1][0] + 1, *alone[1][1:]]


@on_ranks
def forward_only() -> list[Any]:
    """Losses of a forward alone, with parameters that were trained since."""
    run, alone = Staged(level="O2"), Alone(level="O2")
    x, found = stage_inputs(1)[0], []
    for each in (run, alone):
        each.walk([x])
    losses: list[Tensor] = []
    if hasattr(run.schedule, "eval"):  # torch 2.11 has it, too
        targets = {"target": x, "losses": losses} if run.has_last_stage else {}
        with torch.no_grad():
            run.schedule.eval(*([x] if run.has_first_stage else []), **targets)
            expected = [alone.criterion(alone.models[0](part), part) for part in x.chunk(MICRO)]
        found = [[float(loss) for loss in each] for each in (losses, expected)]
    return [*found, run.state()[0]]


def test_forwards_alone_decide_nothing(pair: Pair) -> None:
    _, (losses, expected, steps) = forward_only(pair)
    assert losses == expected
    assert steps == 1


# What moves between ranks


@on_ranks
def collectives_of(kind: str, optimizer: str) -> dict[str, int]:
    run = Staged(kind, optimizer, level="O2")
    with Collectives() as collectives:
        run.walk(stage_inputs(), 1.0)
    return {name: count for name, count in collectives.found.items() if not name.startswith(P2P)}


P2P = "send", "recv"  # activations and their gradients


@pytest.mark.parametrize("optimizer", ["SGD", "two"])
@pytest.mark.parametrize("kind", ["1F1B", "interleaved"])
def test_a_step_moves_seven_numbers(pair: Pair, kind: str, optimizer: str) -> None:
    for found in collectives_of(pair, kind=kind, optimizer=optimizer):
        assert found == {"_allgather_base_ torch.float32 28": STEPS}


# Checkpoints


@on_ranks
def resumed_stages(folder: str, kind: str, options: dict[str, Any]) -> list[Any]:
    """Trains, saves and trains on; resumes in other objects."""
    path = f"{folder}/stages-of-{dist.get_rank()}.pt"
    runs = [Staged(kind, level="O2", seed=seed, **options) for seed in (0, 1)]
    return resumed(path, STEPS, *runs, max_norm=0.5)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("1F1B", {"optimizer": "AdamW", "state": "8bit"}),
        ("GPipe", {"skip_outliers": 6.0, "masters": "packed"}),
        ("interleaved", {"optimizer": "two"}),
    ],
)
def test_each_rank_saves_its_stages_and_resumes_bit_for_bit(
    pair: Pair, tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    for before, loaded, continued, again in resumed_stages(
        pair, folder=str(tmp_path), kind=kind, options=options
    ):
        assert loaded == before
        assert again == continued
        assert continued[0] != before


# What is refused


def lone(**options: Any) -> Staged:
    """Return a pipeline whose one stage needs no other rank, after a backward."""
    run = Staged("1F1B", level="O2", lone=True, **options)
    run.backward(stage_inputs()[0])
    return run


def unscaled_in_between() -> None:
    run = lone()
    run.amp.unscale_()
    run.backward(stage_inputs()[0])


def with_a_loss_id() -> None:
    run = lone()
    run.amp.backward(run.models[0](stage_inputs()[0]).sum(), loss_id=1)


def stepped_twice() -> None:
    run = lone()
    for _ in range(2):
        run.optimizers[0].step()


def without_a_function() -> None:
    layer = torch.nn.Linear(2, 2)
    amp = enable(layer, torch.optim.SGD(layer.parameters()), level="O2")
    amp.pipeline_loss(0.5)  # type: ignore[arg-type]


def without_an_optimizer() -> None:
    enable(torch.nn.Linear(2, 2), level="O2").pipeline_loss(torch.nn.functional.mse_loss)


ACTS: dict[str, Callable[[], Any]] = {
    "alone": lambda: Staged(decides=False, level="O2", dtype=torch.bfloat16).walk(stage_inputs(1)),
    "heal": lambda: lone(on_nonfinite="heal"),
    "no optimizer": without_an_optimizer,
    "no function": without_a_function,
    "unscaled": unscaled_in_between,
    "loss_id": with_a_loss_id,
    "twice": stepped_twice,
    "replay": lambda: lone().amp.explain(replay=True),
}


@on_ranks
def refusal(what: str) -> str:
    return said_by(ACTS[what])


REFUSED = {
    "alone": "optimizer.step(): the model is a stage of a pipeline (torch.distributed.pipelining)",
    "heal": "on_nonfinite: expected 'skip' for a stage of a pipeline, got 'heal'",
    "no optimizer": "this model was enabled without an optimizer",
    "no function": "loss_fn: expected a function of output and target, got float",
    "unscaled": "amp.unscale_() was called between two schedule.step() of a pipeline",
    "loss_id": "loss_id: expected 0 in a pipeline",
    "twice": "optimizer.step(): 8 parameter(s) have gradients, but no amp.backward(loss) fed",
    "replay": "explain(replay=True): in a pipeline no rank can run a batch again by itself",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_work_is_refused(pair: Pair, what: str) -> None:
    for text in refusal(pair, what=what):
        assert text.startswith(REFUSED[what])


if __name__ == "__main__":
    serve(*sys.argv[1:])
