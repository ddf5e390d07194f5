"""A single value that no training makes is named, with code that repairs it; others are not."""

import math
import re
from typing import Any

import pytest
import torch
from runs import Training, batch, in_two, started
from torch import Tensor, nn

from tritonamp.diagnosis.odd_values import odd_moments, odd_weights
from tritonamp.diagnosis.skips import Writer
from tritonamp.testing import Fault, FaultInjector

NAN = math.nan
AT = (3, 5)
ELEMENT = 3 * 6 + 5
FORMS: dict[str, dict[str, Any]] = {
    "O0": {"level": "O0"},
    "O1": {"level": "O1"},
    "float16": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "bf16": {"state": "bf16"},
    "packed": {"dtype": torch.bfloat16, "masters": "packed"},
    "8bit": {"dtype": torch.bfloat16, "state": "8bit"},
}


def undecayed(params: Any, **fields: Any) -> torch.optim.Optimizer:
    """Return an optimizer in which only gradients move a weight."""
    return torch.optim.AdamW(params, weight_decay=0.0, **fields)


class Flipped(Training):
    """Trains on another batch at each step."""

    def __init__(self, device: torch.device, **fields: Any) -> None:
        def model() -> nn.Module:
            return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 2))

        # a flip may overflow at no scale, or at each
        if fields.get("dtype", torch.float16) is torch.float16 and fields.get("level") != "O0":
            fields["loss_scale"] = 64.0
        super().__init__(model, fields.pop("optimizer", undecayed), device=device, **fields)
        self.injector = FaultInjector(self.model, self.optimizer)
        self.seed = 0

    def steps(self, count: int, fault: Fault | None = None) -> None:
        for _ in range(count):
            self.seed += 1
            with self.injector.step(fault):
                x = batch(self.seed, 8, 6, device=self.device)
                self.backward((self.model(x).float() - x[:, :2]).square().mean())
                self.finish()
            fault = None

    def flip(self, target: str, bit: int, after: int = 4) -> str:
        """Return the explanation some steps after a flip at `AT`."""
        self.steps(8)
        self.steps(1, Fault("bitflip", "0.weight", target=target, bit=bit, element=ELEMENT))
        self.steps(after - 1)
        return str(self.amp.explain())

    def value(self) -> float:
        return float(dict(self.amp.named_master_params())["0.weight"].detach()[AT])

    def follow(self, text: str) -> None:
        """Run the code that a text advises."""
        code = re.search(r"repair it: (with torch.*)$", text)
        assert code is not None, text
        exec(code[1], {"torch": torch, "amp": self.amp, "optimizer": self.optimizer})


start = started(Flipped)


TARGETS = {"weight": 2, "master": 2, "exp_avg": 2, "exp_avg_sq": 1}
"""Which bit flips, from the highest: 1 is the sign, 2 the highest of the exponent."""
# one byte of a moment cannot hold such a value
FLIPS = [(form, t) for form in FORMS for t in TARGETS if form != "8bit" or "exp" not in t]


@pytest.mark.parametrize(("form", "target"), FLIPS)
def test_a_spoilt_weight_is_named_and_repaired(start: Any, form: str, target: str) -> None:
    """By flips after which every step is skipped, though not for its batch, scale or rate."""
    run = start(**FORMS[form])
    half = form == "bf16" if "exp" in target else target == "weight" and form not in ("O0", "O1")
    text = run.flip(target, (16 if half else 32) - TARGETS[target])
    assert run.causes[-1] == "bad parameters", text
    assert run.amp.history[-1].parameters == ("0.weight",)
    assert "value of 0.weight" in text and str(list(AT)) in text
    assert "A bit has flipped in memory, or other code wrote there" in text
    assert not re.search("Lower the|Look in|look at the batch|Keep their", text)
    if form == "8bit":
        assert text.endswith("Load the last good checkpoint.")
        return
    run.follow(text)
    skipped = run.amp.stats()["skipped"]
    run.steps(1)
    before = run.value()
    run.steps(3)
    assert run.amp.stats()["skipped"] == skipped
    assert 0.0 < abs(run.value() - before) < 0.1
    assert run.amp.explain().startswith(text[:20]) and "Then" not in run.amp.explain()


@pytest.mark.parametrize("form", ["O0", "float16", "packed"])
def test_a_frozen_weight_is_named_without_a_skip(start: Any, form: str) -> None:
    """By a second moment that is far too large: no step is skipped, and nothing else says so."""
    run = start(**FORMS[form])
    text = run.flip("exp_avg_sq", 30)
    assert run.causes == [None] * 12
    frozen = run.value()
    run.steps(3)
    assert run.value() == frozen
    assert text.startswith("No step was skipped.\none value of exp_avg_sq of 0.weight, at [3, 5], ")
    assert (
        "Its weight practically never moves again. A bit has flipped in memory, other code wrote "
        "there, or a single gradient was huge." in text
    )
    run.follow(text)
    run.steps(3)
    assert run.value() != frozen
    assert run.amp.explain() == "No step was skipped."


@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad", "our AdamW"])
def test_a_huge_gradient_is_among_the_reasons(start: Any, optimizer: str) -> None:
    """Of a weight or a moment, where it moves them without bounds; and the advice is the same."""
    run = start(optimizer=optimizer, level="O0", lr=1e-2, dtype=torch.float16)
    run.steps(5)
    run.backward(run.loss())
    run.model[0].weight.grad[AT] = 1e12
    run.finish()
    text = run.amp.explain()
    assert re.match(r"No step was skipped.\none value of (exp_avg of |sum of |)0.weight, at", text)
    assert "other code wrote there, or a single gradient was huge. Load the last" in text
    run.follow(text)
    run.steps(3)
    assert run.amp.explain() == "No step was skipped." and abs(run.value()) < 1.0


def test_a_value_may_be_that_of_the_initialisation(start: Any) -> None:
    run = start(level="O1")
    with torch.no_grad():
        run.model[0].weight[AT] = 1e8
    run.steps(6)
    text = run.amp.explain()
    assert "other code wrote there, perhaps as the model was made or loaded: no scale" in text
    run = start()
    assert "perhaps" not in run.flip("exp_avg_sq", 31)


def test_two_optimizers_have_no_code(start: Any) -> None:
    """A text does not know the names of their variables."""
    text = start(optimizer=in_two).flip("master", 30)
    assert "one value of 0.weight" in text and text.endswith("Load the last good checkpoint.")


def test_a_divergence_is_none(start: Any) -> None:
    run = start(lr=1e3)
    run.steps(12)
    assert "training has diverged" in run.amp.explain()


def test_other_writes_through_data_are_not_to_blame_for_a_fault(start: Any) -> None:
    """Half weights that differ from their masters, as ordinary numbers."""
    run = start(loss_scale=1.0)
    run.steps(6)
    run.model[0].weight.data.mul_(2.0)
    run.step(bad=True)
    assert run.causes[-1] == "forward fault"
    assert "flipped" not in run.amp.explain()


@pytest.mark.parametrize(
    "optimizer", ["AdamW", "amsgrad", "RMSprop", "Adagrad", "SGD momentum", "Lion", "NAdam"]
)
def test_healthy_moments_are_not_named(device: torch.device, optimizer: str) -> None:
    """Of dead neurons, a bias of a loss of 1e6, unused rows, and a single large gradient."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows, self.scale = nn.Embedding(9, 6), nn.Parameter(torch.full((1,), 1e4))
            self.hidden, self.last = nn.Linear(6, 6), nn.Linear(6, 2)
            with torch.no_grad():
                self.hidden.bias[:3] = -1e3

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.last(self.hidden(self.rows(x)).relu())
            return out + self.scale.float() * 1e-8

    with Training(Model, optimizer, level="O1", device=device, lr=1e-3) as run:
        x = torch.tensor([1, 2, 3, 3], device=device)
        for i in range(6):
            run.step(x, 1e4 if i == 3 else 1.0)
        assert run.amp.stats()["steps"] >= 4
        explained = run.amp.explain()
        assert "one value of" not in explained


def found_in(weight: Tensor, master: Tensor | None = None, optimizer: str = "SGD") -> list[Any]:
    writers = {"w": Writer(optimizer, 0.1, torch.float32, master=master)}
    return [(one.at, one.key) for one in odd_weights(writers, {nn.Parameter(weight): "w"})]


def test_limits_of_a_weight() -> None:
    usual = torch.linspace(-1.0, 1.0, 12).view(3, 4)

    def with_one(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        changed = usual.clone()
        changed[1, 2] = value
        return changed.to(dtype)

    assert found_in(usual) == found_in(with_one(2.0**23)) == found_in(torch.tensor([1e38])) == []
    assert found_in(with_one(-(2.0**24) * 1.01)) == found_in(with_one(NAN)) == [((1, 2), "")]
    assert found_in(torch.tensor([0.0, 0.0, 2e6])) == [((2,), "")]
    assert found_in(torch.tensor([0.0, 0.0, 1e6])) == []
    # the root of a negative number, in a centered one
    assert found_in(with_one(NAN), optimizer="RMSprop") == []
    assert found_in(with_one(1e30), optimizer="RMSprop") == [((1, 2), "")]
    two = with_one(1e30)
    two[0, 0] = 1e28
    assert found_in(two) == found_in(with_one(NAN).fill_(NAN)) == []
    half = torch.float16
    assert found_in(with_one(7e4, half)) == []  # too large for the format
    assert found_in(with_one(NAN, half)) == [((1, 2), "")]
    # a half copy, with its master
    assert found_in(with_one(65.0, half), with_one(0.5)) == [((1, 2), "half")]
    assert found_in(with_one(NAN, half), with_one(0.5)) == [((1, 2), "half")]
    assert found_in(with_one(64.0, half), with_one(0.5)) == []
    assert found_in(with_one(7e4, half), with_one(7e4)) == []


def test_limits_of_a_moment() -> None:
    def found(key: str, *states: Tensor) -> list[Any]:
        writers = {}
        for i, state in enumerate(states):
            param = nn.Parameter(torch.zeros_like(state))
            optimizer = torch.optim.AdamW([param])
            optimizer.state[param][key] = state
            names = {"optimizer": optimizer, "stepped": param}
            writers[f"p{i}"] = Writer("AdamW", 0.1, torch.float32, **names)
        return [(one.name, one.at) for one in odd_moments(writers)]

    small, none = torch.full((4,), 1e-8), torch.zeros(4)
    one = torch.tensor([1e-8, 1.0, 1e-8, 1e-8])
    assert found("exp_avg", one) == [("p0", (1,))]
    assert found("exp_avg_sq", one) == found("exp_avg", one, small * 1e7) == []
    assert found("exp_avg_sq", small + one * 1e7 * (one > 0.5), small) == [("p0", (1,))]
    assert found("exp_avg_sq", small, none) == found("exp_avg", none + torch.eye(4)[0], none) == []
    assert found("exp_avg", none, -small) == found("step", one) == []
    assert found("exp_avg_sq", small, none - torch.eye(4)[2]) == [("p1", (2,))]
    assert found("exp_avg_sq", small, none + torch.eye(4)[2] * NAN) == []
    assert found("momentum_buffer", small, one * NAN) == []
    assert found("sum", small, none - torch.eye(4)[2]) == []  # of something else than squares
    assert found("exp_avg", small, torch.ones(1)) == []
    last = small.clone()
    last[3] = math.inf
    assert found("exp_avg_sq", small, last) == [("p1", (3,))]
