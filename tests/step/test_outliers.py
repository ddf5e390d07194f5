"""``skip_outliers``: steps far above the last ones are skipped, and a run that changes goes on."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import same, snapshot, take_step
from runs import Training, started

import tritonamp
from tritonamp.demo.data import batches, digits
from tritonamp.demo.models import DigitNet

FIELDS = {
    "O0": {"level": "O0"},
    "O1": {"level": "O1"},
    "O2 bf16": {"level": "O2", "dtype": torch.bfloat16},
    "O2": {"level": "O2"},
}


class Noisy(Training):
    """Each step has a batch of its own, some of them times another factor."""

    def __init__(self, **fields: Any) -> None:
        scales = fields.get("level", "O2") != "O0" and "dtype" not in fields
        fields = {"skip_outliers": 6.0, **({"init_scale": 256.0} if scales else {}), **fields}
        super().__init__(optimizer="SGD", lr=1e-3, **fields)
        self.random = torch.Generator().manual_seed(1)

    def loss(self, x: Any = None) -> torch.Tensor:
        return super().loss(torch.randn(4, 6, generator=self.random).to(self.device))

    def steps(self, n: int, times: float = 1.0) -> None:
        for _ in range(n):
            self.step(factor=times)


start = started(Noisy)


@pytest.mark.parametrize("level", FIELDS)
def test_an_outlier_is_skipped_with_its_numbers(start: Any, level: str) -> None:
    run = start(**FIELDS[level])
    run.steps(70)
    before, scaler = snapshot(run.model, run.optimizer), run.amp.scaler.state_dict()
    run.steps(1, times=50.0)
    assert same(snapshot(run.model, run.optimizer), before)
    assert run.amp.scaler.state_dict() == scaler
    run.steps(1)
    assert run.causes == [None] * 70 + ["outlier", None]
    stats = run.amp.stats()
    assert (stats["outliers"], stats["skipped"], stats["steps"]) == (1, 1, 71)
    assert run.amp.metrics()["amp/skipped_outlier"] == 1.0
    text = run.amp.explain()
    assert text.startswith("step 71 skipped (1 of 71): outlier: the loss is ")
    assert "the gradient norm is" in text and "6 standard deviations of" in text


def test_it_warms_up(start: Any) -> None:
    run = start()
    run.steps(62)
    run.steps(1, times=50.0)
    assert run.causes == [None] * 63


def test_a_run_that_changes_its_level_goes_on(start: Any) -> None:
    run = start()
    run.steps(70)
    run.steps(130, times=50.0)
    assert run.causes == [None] * 70 + ["outlier"] * 4 + [None] * 126


def test_other_skips_are_not_kept(start: Any) -> None:
    run, undisturbed = start(), start()
    for one in (run, undisturbed):
        one.steps(65)
    window = run.amp.state_dict()["outliers"]["0"]
    run.steps(1, times=float("nan"))
    after = run.amp.state_dict()["outliers"]["0"]
    assert window == after
    assert undisturbed.amp.state_dict()["outliers"]["0"] == window


def test_losses_with_ids_have_windows_of_their_own(start: Any) -> None:
    run = start()
    for _ in range(70):
        for loss_id in (0, 1):
            loss = run.loss() * (1.0 if loss_id == 0 else 100.0)
            run.amp.backward(loss, loss_id=loss_id)
            run.optimizer.step()
            run.optimizer.zero_grad()
    assert run.causes == [None] * 140
    assert set(run.amp.state_dict()["outliers"]) == {"0", "1"}


def test_a_resume_carries_the_window(start: Any) -> None:
    run, resumed = start(), start()
    run.steps(70)
    resumed.model.load_state_dict(run.model.state_dict())
    resumed.amp.load_state_dict(run.amp.state_dict())
    assert resumed.amp.state_dict() == run.amp.state_dict()
    resumed.random = torch.Generator().set_state(run.random.get_state())
    for one in (run, resumed):
        one.steps(1, times=50.0)
        one.steps(2)
    assert resumed.causes == ["outlier", None, None]
    assert resumed.amp.state_dict()["outliers"] == run.amp.state_dict()["outliers"]


@pytest.mark.parametrize(("window", "got"), [([0.0] * 3, "3"), (1.0, "float"), ([], "0")])
def test_a_window_of_another_length_is_refused(start: Any, window: Any, got: str) -> None:
    run = start()
    run.steps(2)
    before = run.amp.state_dict()
    with pytest.raises(ValueError, match=f"numbers in a window of outliers, got {got} for loss_id"):
        run.amp.load_state_dict({**before, "outliers": {"0": window}})
    assert run.amp.state_dict() == before


def test_micro_batches_are_one_value(start: Any) -> None:
    run = start()
    for step in range(66):
        for _ in range(2):
            run.amp.backward(run.loss() / 2 * (50.0 if step == 65 else 1.0))
        run.optimizer.step()
        run.optimizer.zero_grad()
    assert run.causes == [None] * 65 + ["outlier"]


def test_by_hand_the_norm_decides_and_the_scale_stays(start: Any) -> None:
    run = start()
    scaler = run.amp.scaler
    for step in range(70):
        scaler.scale(run.loss() * (50.0 if step == 69 else 1.0)).backward()
        scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad()
    assert run.causes == [None] * 69 + ["outlier"]
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (256.0, 69)
    assert "the loss is" not in run.amp.explain()


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), True, "6"])
def test_what_is_no_number_of_deviations(value: Any) -> None:
    with pytest.raises(ValueError, match=r"skip_outliers: expected None or how many standard"):
        tritonamp.Policy(skip_outliers=value)


def of_digits(
    steps: int, bad: int | None = None, **fields: Any
) -> tuple[list[Any], dict[str, Any]]:
    """Train on digits, one batch of which is bad: inputs times 30, labels shuffled."""
    torch.manual_seed(0)
    model, device = DigitNet(), torch.device("cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    amp = tritonamp.enable(model, optimizer, level="O2", dtype=torch.bfloat16, **fields)
    for step, (x, y) in enumerate(batches(digits(), 64, steps, 0, device), 1):
        if step == bad:
            x, y = x * 30, y.roll(1)
        take_step(amp, optimizer, F.cross_entropy(model(x), y))
    history, stats = amp.history, amp.stats()
    amp.disable()
    return history, stats


@pytest.mark.long
def test_one_bad_batch_does_not_show() -> None:
    ends = {}
    runs = {
        "clean": of_digits(260),
        "bad": of_digits(260, 200),
        "skipped": of_digits(260, 200, skip_outliers=6.0),
    }
    for name, (history, _) in runs.items():
        ends[name] = sum(record.loss for record in history[-20:]) / 20
    assert [r.step for r in runs["skipped"][0] if r.cause] == [200]
    assert ends["skipped"] == pytest.approx(ends["clean"], rel=0.1)
    assert ends["bad"] > 1.1 * ends["clean"]


@pytest.mark.long
def test_a_clean_run_skips_hardly_a_step() -> None:
    _, stats = of_digits(2000, skip_outliers=6.0)
    assert stats["steps"] + stats["skipped"] == 2000
    assert stats["skipped"] <= 2
