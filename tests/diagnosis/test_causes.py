"""Each skipped step gets its cause, with names; clean steps cost nothing; a healthy run raises no
alarm.
"""

import logging
import weakref
from collections import deque
from typing import Any

import pytest
import torch
from helpers import Net, take_step
from runs import Training, started
from torch import nn

import tritonamp
from tritonamp.diagnosis.causes import Cause
from tritonamp.kernels._decision import RECORD
from tritonamp.step.decision_log import DecisionLog

INF, NAN = float("inf"), float("nan")


class Spoilt(Training):
    def __init__(self, **fields: Any) -> None:
        super().__init__(lr=1e-3, **fields)

    def spoil(self, value: float) -> None:
        """Take a step on gradients of which one holds ``value`` everywhere."""
        self.backward()
        self.model.first.weight.grad.fill_(value)
        self.finish()


start = started(Spoilt)


def test_data(start: Any) -> None:
    run = start()
    x = run.x.clone()
    x[4, 1] = INF
    x[2, 0] = NAN
    run.step()
    run.step(x)
    run.step()
    one, two, three = run.amp.history
    assert (one.cause, two.cause, three.cause) == (None, "data", None)
    assert "input 0: inf or NaN in sample(s) 2, 4 of shape (8, 6)" in two.detail
    assert run.amp.stats()["scale"] == 2.0**16


def test_a_batch_that_was_written_to_since_is_not_blamed(start: Any) -> None:
    run = start()
    x = run.x.clone()
    run.amp.backward(run.model(x).sum() * INF)
    x.fill_(NAN)  # a loader that reuses its buffer
    run.optimizer.step()
    assert run.amp.history[-1].cause == "forward fault"
    assert "Look in the batch, the model" in run.amp.explain()


def test_forward_fault(start: Any) -> None:
    run = start()
    run.step(factor=NAN)
    assert run.amp.history[-1].cause == "forward fault"
    assert "and the input batch was not" in run.amp.explain()


def test_bad_parameters_since_when(start: Any) -> None:
    run = start()
    run.step()
    with torch.no_grad():
        run.model.last.bias[1] = NAN
    for _ in range(3):
        run.step()
    causes = [(record.step, record.cause, record.parameters) for record in run.amp.history]
    assert causes == [(1, None, ()), *((i, "bad parameters", ("last.bias",)) for i in (2, 3, 4))]
    assert (
        "1 parameter(s) of the model were inf or NaN already, seen since step 2: last.bias"
        in run.amp.explain()
    )


OWN_STEPS = [
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
]


@pytest.mark.parametrize("kind", OWN_STEPS, ids=lambda kind: kind.__name__)
def test_a_step_whose_eps_is_zero_in_half(
    device: torch.device, kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It is warned of before, and named after."""
    torch.manual_seed(0)
    model = Net().to(device)
    optimizer = kind(model.parameters(), lr=1e-3)
    eps = optimizer.defaults["eps"]
    with caplog.at_level(logging.WARNING, "tritonamp"):
        amp = tritonamp.enable(model, optimizer, level="O3")
    assert caplog.messages == [
        f"{kind.__name__} steps on float16 parameters itself, and its eps={eps:g} is 0 there: a "
        "small gradient makes parameters inf or NaN. Give eps=1e-4 or more, or level='O2', which "
        "steps in FP32"
    ]
    x = torch.randn(8, 6, device=device)
    for _ in range(12):
        take_step(amp, optimizer, model(x).square().mean() * 1e-5)
    causes = [record.cause for record in amp.history]
    wrote = causes.index("bad parameters")
    assert set(causes[wrote:]) == {"bad parameters"}
    assert (
        f"Step {wrote} wrote them ({kind.__name__}, lr=0.001): eps={eps:g} is 0 in float16, so a "
        "small gradient is divided by 0. Give an eps of 0.0001 or more, or level='O2', which "
        "steps in FP32. (Not tried: it would need the earlier steps again.) Load the last good "
        "checkpoint."
    ) in amp.history[-1].detail
    amp.disable()


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (torch.optim.AdamW, {"level": "O3"}),  # in one pass, which is in FP32
        (torch.optim.SGD, {"level": "O3"}),
        (torch.optim.Adagrad, {"level": "O3"}),  # whose state was made in FP32
        (torch.optim.Adadelta, {"level": "O3"}),  # 1e-6 is not 0
        (torch.optim.NAdam, {"level": "O2"}),
        (torch.optim.NAdam, {"level": "O3", "dtype": torch.bfloat16}),
        (lambda params: torch.optim.NAdam(params, eps=1e-4), {"level": "O3"}),
    ],
)
def test_no_warning_of_an_eps_that_is_held(
    device: torch.device, kind: Any, fields: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = Net().to(device)
    with caplog.at_level(logging.WARNING, "tritonamp"):
        tritonamp.enable(model, kind(model.parameters()), **fields).disable()
    assert caplog.messages == []


@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.NAdam])
def test_a_step_is_not_blamed_for_what_other_code_wrote(
    device: torch.device, level: str, kind: Any
) -> None:
    torch.manual_seed(0)
    model = Net().to(device)
    options = {} if kind is torch.optim.SGD else {"eps": 1e-3}
    optimizer = kind(model.parameters(), lr=1e-3, **options)
    amp = tritonamp.enable(model, optimizer, level=level, loss_scale=1.0)
    for i in range(5):
        if i == 3:
            with torch.no_grad():
                model.last.bias[1] = NAN
        take_step(amp, optimizer, model(torch.randn(8, 6, device=device)).square().mean())
    assert [r.cause for r in amp.history][2:] == [None, "bad parameters", "bad parameters"]
    assert "something else wrote them: a loaded checkpoint" in amp.explain()
    amp.disable()


def test_a_weight_beyond_half_is_told_from_a_spoilt_one(device: torch.device) -> None:
    """No checkpoint helps: the weight is good, and the format is not."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).to(device)
    with torch.no_grad():
        model[1].weight[2, 3] = 7e4
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    amp = tritonamp.enable(model, optimizer, level="O2")
    x = torch.randn(8, 6, device=device)
    take_step(amp, optimizer, model(x).square().mean())
    assert amp.explain() == (
        "step 1 skipped (1 of 1): bad parameters: 1 parameter(s) of the model were inf or NaN "
        "already, seen at step 1: 1.weight. Their FP32 masters are finite, but above 65504, the "
        "largest number of the half format. Keep their modules in FP32: fp32_modules=['1'], or "
        "train in bfloat16: dtype=torch.bfloat16. (Not tried: print(amp.explain(replay=True)) "
        "tries it.)"
    )
    assert "fp32_modules=['1'] (tried: the forward passes)" in amp.explain(replay=True)
    with torch.no_grad():
        model[0].bias[0] = NAN
    take_step(amp, optimizer, model(x).square().mean())
    assert "something else wrote them: a loaded checkpoint" in amp.explain()
    amp.disable()


def test_a_step_of_ours_that_wrote_them_is_named(device: torch.device) -> None:
    """Without an eps to blame: half a parameter has left the format, one step at a time."""
    model = nn.Linear(4, 4, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**14)
    amp = tritonamp.enable(model, optimizer, level="O3")
    x = torch.ones(1, 4, device=device)
    with torch.no_grad():
        model.weight.fill_(6e4)
        model.weight[1:] = 0.0
    for _ in range(3):
        take_step(amp, optimizer, model(x * 1e-3)[0, 0] * -1e3)
    assert "Step 1 wrote them (SGD, lr=16384): Lower the learning rate" in amp.explain()
    amp.disable()


def test_scale_overflow_and_what_it_leaves(start: Any) -> None:
    run = start()
    run.spoil(INF)
    assert run.amp.history[-1] == run.amp.history[-1]._replace(
        step=1, cause="scale overflow", scale=2.0**16, grad_norm=None, parameters=("first.weight",)
    )
    run.step()
    assert run.amp.history[-1].scale == 2.0**15
    assert run.amp.history[-1].grad_norm == run.amp.stats()["grad_norm"] > 0


@pytest.mark.parametrize(
    ("fields", "value", "cause"),
    [
        pytest.param({"loss_scale": 1.0}, INF, "backward fault", id="1"),
        pytest.param({"dtype": torch.bfloat16}, NAN, "backward fault", id="bfloat16"),
        pytest.param({"loss_scale": 4.0}, INF, "scale exhausted", id="4"),
        pytest.param(
            {"scaler": tritonamp.GradScaler("cpu", init_scale=2.0, min_scale=2.0)},
            NAN,
            "scale exhausted",
            id="at-its-floor",
        ),
        pytest.param(
            {"scaler": tritonamp.GradScaler("cpu", init_scale=0.5, min_scale=0.25)},
            INF,
            "backward fault",
            id="below-1",
        ),
        pytest.param(
            {"scaler": tritonamp.GradScaler("cpu", init_scale=2.0)},
            NAN,
            "scale overflow",
            id="above-its-floor",
        ),
    ],
)
def test_gradients_that_no_scale_helps(
    start: Any,
    device: torch.device,
    fields: dict[str, Any],
    value: float,
    cause: str,
) -> None:
    run = start(**fields)
    run.spoil(value)
    assert run.amp.history[-1].cause == cause
    assert "first.weight" in run.amp.explain()


@pytest.mark.parametrize(("value", "cause"), [(NAN, "backward fault"), (INF, "scale overflow")])
def test_a_nan_out_of_nothing_is_no_matter_of_the_scale(
    start: Any, value: float, cause: str
) -> None:
    """The gradients of earlier steps are far below the limit of the format."""
    run = start(scaler=tritonamp.GradScaler("cpu", init_scale=16.0))
    run.step()
    run.spoil(value)
    assert run.amp.history[-1].cause == cause


def test_all_causes_are_reached_above() -> None:
    reached = {
        "data",
        "forward fault",
        "bad parameters",
        "scale overflow",
        "backward fault",
        "scale exhausted",
        "divergence",  # in test_divergence.py
        "outlier",  # in tests/step/test_outliers.py
        "veto",  # in tests/step/test_veto.py
        "huge gradient",  # in tests/step/test_huge_gradients.py
    }
    assert {cause.value for cause in Cause} == reached


def test_calibration_is_quiet_and_a_long_run_is_said_once(
    start: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run = start()
    with caplog.at_level(logging.INFO, "tritonamp"):
        for i in range(12):
            run.spoil(INF) if i else run.step()
        run.step()
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    first, eighth = warnings
    assert first.startswith("step 2 skipped (1 of 2): scale overflow: ")
    assert "That is normal in the first steps." in first
    assert eighth.startswith(
        "step 9 skipped (8 of 9, the last 8 in a row): scale overflow: the loss was finite, but"
    )
    assert len([m for m in caplog.messages if "scale overflow" in m]) == 11


@pytest.mark.long
def test_no_false_alarm_in_a_thousand_steps(start: Any, caplog: pytest.LogCaptureFixture) -> None:
    run = start(scaler=tritonamp.GradScaler("cpu", init_scale=2.0**20, growth_interval=40))
    with caplog.at_level(logging.WARNING, "tritonamp"):
        for _ in range(1000):
            run.step()
    (first,) = caplog.messages
    assert first.startswith("step 1 skipped (1 of 1): scale overflow: ") and " normal " in first
    causes = {record.cause for record in run.amp.history}
    assert causes == {None, "scale overflow"}, "the scale grows until it overflows, again and again"
    assert run.amp.stats()["last_skip_reason"] == "scale overflow"


def test_history_is_bounded(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start()
    assert run.amp.history == []
    assert run.amp._parts.log.history.records.maxlen == 1000
    run.amp._parts.log.history.records = deque(maxlen=3)
    for _ in range(5):
        run.step()
    assert [record.step for record in run.amp.history] == [3, 4, 5]


def test_micro_batches_are_looked_at_too(start: Any) -> None:
    run = start()
    bad = run.x.clone()
    bad[5, 3] = NAN
    for x in (run.x, bad, run.x):
        run.amp.backward(run.model(x).square().mean())
    run.optimizer.step()
    assert run.amp.history[-1].cause == "data"
    assert "sample(s) 5" in run.amp.explain()


def test_the_batch_is_let_go_when_its_decision_is_known(start: Any, device: torch.device) -> None:
    run = start()
    batches = [torch.randn(8, 6, device=device) for _ in range(3)]
    refs = [weakref.ref(x) for x in batches]
    for x in batches:
        run.step(x)
    run.step()
    run.amp.stats()
    del batches, x
    assert [ref() for ref in refs] == [None] * 3


def test_the_rank_is_named(start: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    run = start()
    with caplog.at_level(logging.WARNING, "tritonamp"):
        run.step(factor=NAN)
        run.step()
    assert caplog.messages[0].startswith("step 1 skipped (1 of 1, rank 3): forward fault: the loss")


def test_what_was_noted_stays_with_its_names_and_ranks(device: torch.device) -> None:
    first, second = nn.Linear(2, 1, device=device), nn.Linear(3, 1, device=device)
    known = {first.weight: "first.weight", first.bias: "first.bias"}
    place = DecisionLog(lambda: known).device_record.place
    params = [first.weight, first.bias]
    alone = place([params], device, ())
    alone.numbers[RECORD:] = torch.tensor([1.0, 2.0])
    paired = place([params], device, [4, 6])
    assert paired.numbers[RECORD:].tolist() == [0.0, 0.0, 1.0, 2.0]
    assert paired.places.tolist() == [2, 3, 0, 1]  # of the two ranks, behind the two parameters
    paired.numbers[RECORD:] = torch.tensor([5.0, 6.0, 1.0, 2.0])
    known[second.weight] = "second.weight"
    grown = place([[*params, second.weight]], device, [4, 6])
    assert grown.numbers[RECORD:].tolist() == [5.0, 6.0, 1.0, 2.0, 0.0]
    assert grown.places.tolist() == [3, 4, 0, 1, 2]


def test_running_statistics_that_a_bad_batch_left_behind(device: torch.device) -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    amp = tritonamp.enable(model, optimizer, level="O2")
    for bad in (True, False):
        x = torch.randn(8, 4, device=device)
        x[3, 1] = INF if bad else 0.0
        take_step(amp, optimizer, model(x).square().mean())
    assert [record.cause for record in amp.history] == ["data", None], (
        "statistics of its own serve a training forward"
    )
    assert (
        "Running statistics are inf or NaN, too, and stay so until reset_running_stats()"
        in amp.explain()
    )
    assert "0.running_mean, 0.running_var" in amp.explain()
    amp.disable()


def test_parameters_that_come_later_do_not_disturb_a_skip_on_its_way(
    start: Any,
) -> None:
    run = start()
    run.step(factor=NAN)  # its numbers are still on their way
    run.model.extra = nn.Linear(16, 4).to(run.x.device)
    run.optimizer.add_param_group({"params": run.model.extra.parameters()})
    run.step()
    assert [record.cause for record in run.amp.history] == ["forward fault", None]


def test_calibration_does_not_count_as_bad_parameters(start: Any) -> None:
    run = start()
    for _ in range(3):
        run.spoil(INF)
    with torch.no_grad():
        run.model.last.bias[1] = NAN
    for _ in range(2):
        run.step()
    assert "seen since step 4: last.bias" in run.amp.explain()


def test_a_mask_in_a_buffer_is_no_fault(start: Any) -> None:
    run = start()
    run.model.register_buffer("mask", torch.full((2, 2), -INF, device=run.x.device))
    run.step(factor=NAN)
    assert run.amp.history[-1].cause == "forward fault"
    assert "mask" not in run.amp.explain().replace("masked", "")


def test_without_an_optimizer_no_batch_is_held(device: torch.device) -> None:
    model = nn.Linear(4, 2).to(device)
    amp = tritonamp.enable(model, level="O1")
    x = torch.ones(1, 4, device=device)
    ref = weakref.ref(x)
    model(x)
    del x
    assert ref() is None
    amp.disable()


def test_gradients_that_another_loss_has_joined_are_named(device: torch.device) -> None:
    """The first loss's were unscaled, with their inf, before the second loss's came on top."""
    model = nn.Linear(4, 4, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = tritonamp.enable(model, optimizer, level="O2")
    x = torch.ones(2, 4, device=device)
    amp.backward(model(x).square().mean() * 1e8, loss_id=0)
    amp.backward(model(x).square().mean(), loss_id=1)
    optimizer.step()
    first = amp.history[0]
    amp.disable()
    assert (first.cause, first.parameters) == ("scale overflow", ("weight", "bias"))
    assert "2 parameter(s) were inf: weight, bias." in first.detail
