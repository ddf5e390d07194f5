"""Limits between the causes of a skip, and the texts, for numbers that a device might note."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tritonamp.diagnosis.causes import Cause, Explanation, Skip, find_cause
from tritonamp.diagnosis.divergence import Growth
from tritonamp.diagnosis.skips import NO_STEPS, Steps, Writer
from tritonamp.kernels._decision import FAULT, HUGE, OVERFLOW

INF, NAN = math.inf, math.nan
FP32_MAX = torch.finfo(torch.float32).max
LIMIT = 65504.0

USUAL = Skip(
    outcome=OVERFLOW,
    step=17,
    exact=True,
    skipped=3,
    since=17,
    scale=1024.0,
    lowest=2.0**-24,
    fixed=False,
    amax={"a": 1.0, "b": INF},
    before=1.0,
    limit=LIMIT,
)


def explained(
    *batches: Any,
    known: dict[Tensor, str] | None = None,
    steps: Steps = NO_STEPS,
    **fields: Any,
) -> Explanation:
    return find_cause(USUAL._replace(**fields), batches, known or {}, steps)


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({}, Cause.SCALE),
        # at its minimum or below it, the scale is exhausted
        ({"scale": 4.0, "lowest": 4.0}, Cause.EXHAUSTED),
        ({"scale": 4.0, "lowest": 4.5}, Cause.EXHAUSTED),
        ({"scale": 4.0, "lowest": 3.5}, Cause.SCALE),
        ({"scale": 1.0, "lowest": 1.0}, Cause.EXHAUSTED),
        # a fixed scale of 1 scales nothing up, one above does
        ({"scale": 1.0, "lowest": 1.0, "fixed": True}, Cause.BACKWARD),
        ({"scale": 0.5, "lowest": 0.5, "fixed": True}, Cause.BACKWARD),
        ({"scale": 1.5, "lowest": 1.5, "fixed": True}, Cause.EXHAUSTED),
        # up to 1, a scale that moves has not scaled anything up either
        ({"scale": 1.0}, Cause.BACKWARD),
        ({"scale": 1.0000001}, Cause.SCALE),
        # a NaN is no matter of the scale where the step before was 256 times below the limit
        ({"amax": {"a": NAN}, "scale": 2.0, "before": LIMIT / 512 * 0.999}, Cause.BACKWARD),
        ({"amax": {"a": NAN}, "scale": 2.0, "before": LIMIT / 512}, Cause.SCALE),
        ({"amax": {"a": NAN}, "scale": 2.0, "before": 0.0}, Cause.SCALE),
        ({"amax": {"a": INF}, "scale": 2.0, "before": 1.0}, Cause.SCALE),
        ({"amax": {"a": 1.0, "b": INF, "c": NAN}, "scale": 2.0, "before": 1.0}, Cause.BACKWARD),
    ],
    ids=str,
)
def test_causes_of_an_overflow(fields: dict[str, Any], cause: Cause) -> None:
    assert explained(**fields).cause is cause


@pytest.mark.parametrize(
    ("fields", "advice"),
    [
        ({"lowest": 1024.0}, "The scale is at its minimum"),
        ({"lowest": 1024.0, "fixed": True}, "The scale is fixed, so it cannot back off"),
        ({"scale": 1.0, "lowest": 1.0, "fixed": True}, "Look in the loss, and in the backward of"),
        ({}, "single skips of this kind are how it finds"),
    ],
    ids=str,
)
def test_a_fixed_scale_gets_advice_of_its_own(fields: dict[str, Any], advice: str) -> None:
    """Only where a lower scale would have helped."""
    found = explained(**fields)
    every = [*(cause.advice for cause in Cause), "The scale is fixed, so it cannot back off"]
    given = [text for text in every if text[:25] in found.reason]
    assert [text.startswith(advice[:25]) for text in given] == [True]
    assert advice in found.reason


def test_a_gradient_that_only_fits_scaled_is_not_good() -> None:
    scale = 2.0**-10
    amax = {"fits": FP32_MAX * scale, "does not": FP32_MAX * scale * 1.0001, "nan": NAN}
    assert explained(amax=amax, scale=scale).parameters == ("does not", "nan")


def test_text_of_an_overflow() -> None:
    found = explained(amax={"a": INF, "b": 2.0, "c": NAN}, before=1e3)
    assert found.text == (
        "step 17 skipped (3 of 17): scale overflow: the loss was finite, but at loss scale 1024 "
        "the gradients of 2 parameter(s) were not: a (inf), c (NaN). The scale was lowered; single "
        "skips of this kind are how it finds its level."
    )
    assert found.line("rank 3", "on time").startswith(
        "step 17 skipped (3 of 17, rank 3, on time): "
    )
    assert not found.needs_help and found.hint == ""


def test_text_of_a_huge_gradient() -> None:
    """All are named whose squares leave FP32, or the largest where only a sum of squares does."""
    how = {"outcome": HUGE, "scale": 1024.0}
    found = explained(amax={"a": 2e33, "b": 1.0, "c": 3e34}, **how)
    assert found.text.startswith(
        "step 17 skipped (3 of 17): huge gradient: the gradients were finite, but so large that "
        "FP32 does not hold their squares, which the optimizer keeps: a (2e+30), c (2.9e+31). A "
        "step would leave inf in the state"
    )
    assert (found.parameters, found.needs_help, found.hint) == (("a", "c"), True, "")
    assert explained(amax={"a": 1.0, "b": 1e21}, **how).parameters == ("b",)


def test_a_step_that_nobody_saw_is_told_as_that_or_before() -> None:
    assert explained(exact=False).text.startswith("step <= 17 skipped (3 of 17): scale overflow: ")


@pytest.mark.parametrize("cause", Cause, ids=lambda cause: cause.name)
def test_who_needs_help_and_what_tells_more(cause: Cause) -> None:
    found = Explanation(USUAL, cause, "")
    assert found.needs_help is (cause not in (Cause.SCALE, Cause.OUTLIER, Cause.VETO))
    replayable = {Cause.FORWARD, Cause.BACKWARD, Cause.EXHAUSTED}
    call = "amp.explain(replay=lambda: criterion(model(x), y))"
    assert (call in found.hint) is (cause in replayable)
    assert cause.advice


@pytest.mark.parametrize(
    ("outcome", "by_rank", "ranks"),
    [
        (OVERFLOW, {}, ""),
        (OVERFLOW, {0: 1.0, 1: INF}, "rank 1"),
        (OVERFLOW, {2: NAN, 5: INF}, "ranks 2, 5"),
        (OVERFLOW, {0: 1.0, 1: 2.0}, ""),
        (HUGE, {0: 1.0, 1: 1e30, 2: 1e23}, "ranks 1, 2"),
        (FAULT, {0: 0.0, 1: 1.0, 2: 1.0}, "ranks 1, 2"),
        (FAULT, {0: INF, 1: 0.0}, "rank 0"),
        (FAULT, {0: 0.0, 1: 0.0}, ""),
    ],
    ids=str,
)
def test_ranks_at_fault(outcome: int, by_rank: dict[int, float], ranks: str) -> None:
    skip = USUAL._replace(outcome=outcome, by_rank=by_rank, amax={"a": 1.0})
    assert skip.ranks == ranks
    reason = find_cause(skip, [], {}).reason
    if outcome == FAULT:
        on = f" on {ranks}" if ranks else ""
        assert reason.startswith(f"the loss itself was inf or NaN (loss scale 1024){on}. A lower")
    elif outcome == HUGE:
        assert f"so large on {ranks} that FP32 does not hold" in reason
    else:
        assert f"the gradients of {ranks or 'some parameters'} were not. " in reason


def test_a_forward_fault_with_and_without_its_batch() -> None:
    without, with_batch = explained(outcome=FAULT), explained([], outcome=FAULT)
    assert without.cause is with_batch.cause is Cause.FORWARD
    assert (
        "(loss scale 1024). A lower scale cannot help. Look in the batch, the model and the "
        in (without.reason)
    )
    assert "(loss scale 1024), and the input batch was not. A lower scale cannot help. " in (
        with_batch.reason
    )
    assert "Look in the model and the loss for values above 65504" in with_batch.reason


def test_data_comes_before_parameters_and_those_before_the_forward() -> None:
    bad, good = torch.tensor([[1.0, INF], [0.0, 1.0]]), torch.ones(2, 2)
    known = {nn.Parameter(bad.clone()): "w"}
    batches = [("0", good)], [("['x']", bad)]
    data = explained(*batches, known=known, outcome=FAULT)
    assert data.cause is Cause.DATA
    assert "too: input ['x']: inf or NaN in sample(s) 0 of shape (2, 2). Clean the" in data.reason
    parameters = explained(batches[0], known=known, outcome=FAULT)
    assert (parameters.cause, parameters.parameters) == (Cause.PARAMETERS, ("w",))
    assert explained(batches[0], outcome=FAULT).cause is Cause.FORWARD
    assert explained(*batches, known=known).cause is Cause.SCALE  # its level is to be found first
    assert explained(known=known, lowest=1024.0).cause is Cause.PARAMETERS


def test_one_dimension_has_elements() -> None:
    x = torch.tensor([0.0, NAN, 1.0, INF])
    assert "input 0: inf or NaN in element(s) 1, 3 of shape (4,)." in (
        explained([("0", x)], outcome=FAULT).reason
    )


@pytest.mark.parametrize(("count", "more"), [(8, ""), (9, " and 1 more"), (11, " and 3 more")])
def test_eight_names_are_shown(count: int, more: str) -> None:
    known = {nn.Parameter(torch.tensor([NAN])): f"p{i}" for i in range(count)}
    found = explained(known=known, outcome=FAULT)
    shown = ", ".join(f"p{i}" for i in range(8))
    assert f"{count} parameter(s) of the model were inf or NaN already" in found.reason
    assert f"seen at step 17: {shown}{more}. Skipped steps leave" in found.reason
    assert len(found.parameters) == count
    batches = [[(str(i), torch.tensor([NAN]))] for i in range(count)]
    assert explained(*batches, outcome=FAULT).reason.count("input ") == 1 + 8  # "the input batch"


def test_since_when() -> None:
    known = {nn.Parameter(torch.tensor([NAN])): "p"}
    assert "seen since step 12: p" in explained(known=known, since=12, outcome=FAULT).reason
    assert "seen at step 17: p" in explained(known=known, since=17, outcome=FAULT).reason


def test_the_optimizer_at_fault_is_named_before_others() -> None:
    known = {nn.Parameter(torch.tensor([NAN])): name for name in ("a", "b", "c")}
    healthy = Writer("SGD", 0.5, torch.float16)
    faulty = Writer("Adam", 0.25, torch.float16, zero_eps=1e-8)
    for writers, named in (
        (
            {"a": healthy, "b": faulty, "c": healthy},
            "Step 16 wrote them (Adam, lr=0.25): eps=1e-08",
        ),
        ({"b": healthy}, "Step 16 wrote them (SGD, lr=0.5): Lower the learning rate"),
        ({}, "Skipped steps leave parameters alone"),
    ):
        found = explained(known=known, steps=Steps(writers), outcome=FAULT, wrote=16)
        assert named in found.reason
    unseen = explained(known=known, steps=Steps({"b": faulty}), outcome=FAULT)
    assert "Step " not in unseen.reason  # other code may have written the parameters since


@pytest.mark.parametrize(
    ("master", "says"),
    [
        (torch.tensor([1e5]), "Keep their modules in FP32: fp32_modules=['fc']"),
        (torch.tensor([1.0]), "Skipped steps leave parameters alone"),
        (torch.tensor([math.inf]), "Skipped steps leave parameters alone"),
        (torch.empty(0), "Skipped steps leave parameters alone"),  # another rank has the elements
    ],
)
def test_a_weight_that_only_half_cannot_hold(master: torch.Tensor, says: str) -> None:
    known = {nn.Parameter(torch.tensor([math.inf])): "fc.weight"}
    writer = Writer("SGD", 0.5, torch.float32, master=master)
    found = explained(known=known, steps=Steps({"fc.weight": writer}), outcome=FAULT)
    assert says in found.reason


def test_running_statistics_are_told_with_every_fault() -> None:
    bad = torch.tensor([NAN])
    known = {bad: "norm.running_var", torch.tensor([INF]): "mask", torch.ones(1): "x.running_mean"}
    for batches in ([], [[("0", bad)]]):
        reason = explained(*batches, known=known, outcome=FAULT).reason
        assert "reset_running_stats(): norm.running_var. Evaluation uses them." in reason
        assert reason.endswith(
            "on_nonfinite='explain' or 'heal' restores those that a step spoils."
        )
    assert "Running statistics" not in explained(known=known).reason


@pytest.mark.parametrize(
    ("growth", "fields", "cause"),
    [
        (Growth(weights=20.0, loss=9.9), {}, Cause.SCALE),  # these weights still serve
        (Growth(weights=20.0, loss=10.0), {}, Cause.DIVERGENCE),
        (Growth(weights=20.0, loss=1.0), {"scale": 1.0}, Cause.DIVERGENCE),
        # gradients have grown by 65504 / 1024 at least, or by less than 10 times
        (Growth(weights=2.0, loss=100.0), {}, Cause.DIVERGENCE),
        (Growth(weights=2.0, loss=100.0), {"before": 6.5}, Cause.SCALE),
        (Growth(weights=1.9, loss=100.0), {}, Cause.SCALE),
        (Growth(weights=20.0, loss=100.0), {"before": 0.0}, Cause.SCALE),  # no step was taken
    ],
    ids=str,
)
def test_growth_before_gradients_overflowed(growth: Growth, fields: Any, cause: Cause) -> None:
    assert explained(steps=Steps(growth=lambda: growth), **fields).cause is cause
