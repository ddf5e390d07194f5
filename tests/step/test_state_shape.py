"""The state is brought into shape when it is not as an earlier step left it, and only then. Eager
steps are meant, whose state no plan of kernels compares.
"""

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import Net, same
from runs import FORMS, OPTIMIZERS, Training, batch
from torch import Tensor, nn
from two_ways import steps

from tritonamp.step.small_state import StateShape

State = dict[str, Any]
Change = Callable[["Eager"], object]
HALF, FP64 = torch.bfloat16, torch.float64


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(16, 4))


class Eager(Training):
    """Two groups in eager torch."""

    def __init__(self, kind: str, device: torch.device, form: str = "fp32") -> None:
        def in_groups(params: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
            groups = [{"params": params[:1]}, {"params": params[1:], "lr": 2e-2}]
            return OPTIMIZERS[kind](groups, lr=lr)

        fields = {"backend": "eager", "loss_scale": 64.0, **FORMS[form]}
        super().__init__(net, in_groups, "O2", device, **fields)

    def step_on(self, seed: int) -> None:
        self.step(batch(seed, 3, 2, 4, 4, device=self.device))

    def states(self) -> list[State]:  # type: ignore[override]
        return list(self.optimizer.state.values())


@pytest.fixture
def looks(plans: None, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Noted for each time that state is looked at: the number of parameters."""
    noted: list[int] = []
    bring = StateShape.bring

    def spied(self: StateShape, params: Any, *rest: Any) -> Any:
        noted.append(len(params))
        return bring(self, params, *rest)

    monkeypatch.setattr(StateShape, "bring", spied)
    return noted


def trained(run: Eager, change: Change) -> list[Tensor]:
    """All that is written in five steps, with a change before the fourth."""
    for seed in range(5):
        if seed == 3:
            change(run)
        run.step_on(seed)
    return run.everything()


@pytest.fixture
def compared(looks: list[int]) -> Callable[..., list[int]]:
    """A function that compares a training with one that looks at the state in every step.

    Its arguments are the change, and those of ``Eager``. It returns the looks of the training.
    """

    def compare(change: Change, *of: Any) -> list[int]:
        looks.clear()
        with Eager(*of) as run:
            found = trained(run, change)
        noted = list(looks)
        looks.clear()
        with steps(plain=True), Eager(*of) as run:
            expected = trained(run, change)
        assert len(looks) == 5
        assert same(found, expected)
        return noted

    return compare


# changes of one tensor of the state, by key


def with_value(key: str, form: Callable[[Tensor], Any], which: int = -1) -> Change:
    """Return a change that replaces one value of one parameter's state."""

    def change(run: Eager) -> None:
        state = run.states()[which]
        state[key] = form(state[key])

    return change


def without(key: str) -> Change:
    return lambda run: run.states()[1].pop(key)


def set_in_groups(**flags: Any) -> Change:
    return lambda run: [group.update(flags) for group in run.optimizer.param_groups]


def nothing(run: Eager) -> None:
    pass


def rates(run: Eager) -> None:
    run.optimizer.param_groups[0]["lr"] *= 0.5


def loaded(run: Eager) -> None:
    run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))


def loaded_in_half(run: Eager) -> None:
    """Past ``load_state_dict``, as code that restores a state by itself does."""
    for state in run.states():
        state.update({k: v.to(HALF) for k, v in state.items() if k != "step"})


def cleared(run: Eager) -> None:
    run.optimizer.state.clear()


def one_cleared(run: Eager) -> None:
    run.states()[-1].clear()


def one_removed(run: Eager) -> None:
    del run.optimizer.state[run.optimizer.param_groups[1]["params"][-1]]


def order_changed(run: Eager) -> None:
    """The entries of the first and the last parameter, whose groups stay."""
    state = run.optimizer.state
    first = next(iter(state))
    state[first] = state.pop(first)


QUIET: list[tuple[str, Change]] = [
    ("AdamW", nothing),
    ("AdamW", rates),
    ("AdamW", loaded),
    ("AdamW", order_changed),
    ("AdamW", with_value("exp_avg", Tensor.clone)),
    ("AdamW", with_value("step", lambda step: step + 3)),
    ("SGD momentum", with_value("momentum_buffer", torch.zeros_like)),
    ("SGD", nothing),
    ("Lion", nothing),
    ("RMSprop", nothing),
]
CHANGED: list[tuple[str, Change]] = [
    ("AdamW", with_value("exp_avg", lambda m: m.to(HALF))),
    ("AdamW", with_value("exp_avg", lambda m: m.to(FP64), which=0)),
    ("AdamW", with_value("exp_avg_sq", Tensor.to_sparse)),
    ("AdamW", with_value("exp_avg_sq", lambda v: None)),
    ("AdamW", with_value("step", float)),
    ("AdamW", with_value("step", int, which=0)),
    ("AdamW", with_value("step", lambda step: step.to(FP64))),
    ("AdamW", without("exp_avg")),
    ("AdamW", without("step")),
    ("AdamW", loaded_in_half),
    ("AdamW", cleared),
    ("AdamW", one_cleared),
    ("AdamW", one_removed),
    ("AdamW", set_in_groups(amsgrad=True)),
    ("amsgrad", set_in_groups(amsgrad=False)),
    ("SGD", set_in_groups(momentum=0.9)),
    ("SGD momentum", set_in_groups(momentum=0.0)),
    ("SGD momentum", with_value("momentum_buffer", lambda b: None)),
    ("SGD momentum", with_value("momentum_buffer", Tensor.to_sparse)),
    ("SGD momentum", with_value("momentum_buffer", lambda b: b.t().contiguous().t(), which=2)),
]


@pytest.mark.parametrize(("kind", "change"), QUIET)
def test_state_that_a_step_has_left_is_not_looked_at(
    kind: str, change: Change, device: torch.device, compared: Callable[..., list[int]]
) -> None:
    assert compared(change, kind, device) == [4]


@pytest.mark.parametrize(("kind", "change"), CHANGED)
def test_changed_state_is_looked_at_once(
    kind: str, change: Change, device: torch.device, compared: Callable[..., list[int]]
) -> None:
    assert compared(change, kind, device) == [4, 4]


def test_step_counts_in_main_memory_are_looked_at(
    cuda: torch.device, compared: Callable[..., list[int]]
) -> None:
    """Where torch keeps them, and no kernel can count."""
    assert compared(with_value("step", Tensor.cpu), "AdamW", cuda) == [4, 4]


def test_a_moment_of_a_list_raises_as_ever(device: torch.device, looks: list[int]) -> None:
    """Nothing was written, and the step can be repeated."""
    with Eager("AdamW", device) as run:
        run.step_on(0)
        moment = run.states()[0]["exp_avg"]
        run.states()[0]["exp_avg"] = moment.tolist()
        before = run.masters()
        run.backward(run.loss(batch(1, 3, 2, 4, 4, device=device)))
        with pytest.raises(AttributeError, match="is_sparse"):
            run.optimizer.step()
        assert same(run.masters(), before)
        run.states()[0]["exp_avg"] = moment
        run.finish()
        assert not same(run.masters(), before)


@pytest.mark.parametrize("form", ["bf16", "8bit", "packed fp32"])
def test_formats_are_looked_at_once(
    form: str, device: torch.device, compared: Callable[..., list[int]]
) -> None:
    def in_fp32(run: Eager) -> None:
        run.states()[0]["exp_avg"] = torch.zeros(4, 2, 3, 3, device=device)

    assert compared(nothing, "AdamW", device, form) == [4]
    expected = [4] if form == "packed fp32" else [4, 4]
    assert compared(in_fp32, "AdamW", device, form) == expected


def test_codes_of_another_order_are_looked_at(
    device: torch.device, compared: Callable[..., list[int]]
) -> None:
    def channels_last(run: Eager) -> None:
        run.model.to(memory_format=torch.channels_last)

    assert compared(channels_last, "AdamW", device, "8bit") == [4, 4]


def test_kinds_that_alternate_are_all_noted(device: torch.device, looks: list[int]) -> None:
    """A parameter that has a gradient in every other step."""
    with Eager("AdamW", device) as run:
        frozen = run.model[0].weight
        for seed in range(6):
            run.backward(run.loss(batch(seed, 3, 2, 4, 4, device=device)))
            if seed % 2:
                frozen.grad = None
            run.finish()
    assert looks == [4, 3]


def test_two_optimizers_have_kinds_of_their_own(device: torch.device, looks: list[int]) -> None:
    def two(params: list[nn.Parameter], lr: float) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW(params[:3], lr=lr), torch.optim.AdamW(params[3:], lr=lr)]

    with Training(Net, two, "O1", device, backend="eager") as run:
        for _ in range(3):
            run.step()
        counts = [3, len(list(run.model.parameters())) - 3]
        assert looks == counts
        run.optimizers[1].state.clear()
        run.step()
        assert looks == [*counts, counts[1]]


def test_nothing_is_kept_of_state_that_was_removed(device: torch.device, looks: list[int]) -> None:
    with Eager("AdamW", device) as run:
        for seed in range(2):
            run.step_on(seed)
        gone = [weakref.ref(v) for state in run.states() for v in state.values()]
        run.optimizer.state.clear()
        assert not any(ref() is not None for ref in gone)


def test_a_format_that_may_not_round_is_refused_later(
    device: torch.device, looks: list[int]
) -> None:
    """A centered RMSprop needs FP32 state: the group's flag changes what lists there are."""
    with Eager("RMSprop", device, "bf16") as run:
        for seed in range(2):
            run.step_on(seed)
        before = run.masters()
        run.optimizer.param_groups[1]["centered"] = True
        with pytest.raises(ValueError, match="centered=False"):
            run.step_on(2)
        assert same(run.masters(), before)
