"""Packed states of ``state="bf16"`` and ``"8bit"``, loaded into every format, plain and enabled."""

import copy
import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from covering import more
from helpers import of_kernels, same, snapshot
from runs import STATES, Training, batch
from torch import Tensor, nn

import tritonamp

pytestmark = of_kernels
HALF, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


class HalfAlone(Training):
    """Trains half parameters without ``enable``."""

    def __init__(
        self, half: torch.dtype, kind: Any = tritonamp.optim.AdamW, state: str = "8bit"
    ) -> None:
        model = lambda: nn.Linear(16, 16).to(half)  # noqa: E731
        super().__init__(model, partial(kind, state=state), level=None, lr=1e-3)
        self.x = batch(0, 4, 16, dtype=half)

    def train(self, seeds: Sequence[int], bad: Sequence[int] = ()) -> Any:
        for seed in seeds:
            self.step(batch(seed, 4, 16, dtype=self.x.dtype))
        return self

    def masters(self) -> list[Tensor]:
        states = self.optimizer.state_dict()["state"].values()
        return [own["master_param"].clone() for own in states]


KINDS = [tritonamp.optim.AdamW, tritonamp.optim.Lion]
each_kind = pytest.mark.parametrize("kind", KINDS)
each_half = pytest.mark.parametrize("half", [BF16, HALF], ids=str)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("state", STATES)
@each_half
@each_kind
def test_rolling_back_has_the_same_bits(
    kind: Any, half: torch.dtype, state: str, packed: bool
) -> None:
    run = HalfAlone(half, kind, state).train(range(3))
    saved = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict(packed=packed)))
    ends = []
    for _ in range(2):
        run.train(range(3, 6))
        ends.append([*run.masters(), *snapshot(run.model)])
        run.model.load_state_dict(saved[0])
        run.optimizer.load_state_dict(saved[1])
    # FP32 moments that become codes again, and masters of float16 below 2^-14, lose bits once
    exact = packed or state == "fp32" or half is BF16
    if exact:
        assert same(*ends)


WHERE = ["plain", "enabled", "enabled later", "enabled and trained"]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(("saved", "loading"), more(itertools.product(STATES, STATES)))
@each_kind
def test_packed_states_have_the_same_fp32_values_wherever_they_are_loaded(
    handles: Any, kind: Any, saved: str, loading: str, where: str, packed: bool
) -> None:
    run = HalfAlone(BF16, kind, saved).train(range(3))
    expected = run.masters()
    state = copy.deepcopy(run.optimizer.state_dict(packed=packed))
    other = HalfAlone(BF16, kind, loading if where == "plain" else "fp32")

    def load() -> None:
        other.model.load_state_dict(run.model.state_dict())
        other.optimizer.load_state_dict(copy.deepcopy(state))

    if where == "plain":
        load()
        assert same(other.masters(), expected)
        return
    if where == "enabled later":
        load()
    other.amp = handles(other.model, other.optimizer, level="O2", dtype=BF16, state=loading)
    if where == "enabled and trained":
        other.train([9])
    if where != "enabled later":
        load()
    assert same(Training.masters(other), expected)
    other.train([3])
    packed_states = other.optimizer.state_dict(packed=True)["state"].values()
    kept = set().union(*(own.keys() for own in packed_states))
    assert not kept & {"remainder", "half_dtype", "master_param"}


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("dtype", [HALF, BF16], ids=str)
@each_half
def test_packed_states_load_into_other_dtypes(
    handles: Any, half: torch.dtype, dtype: torch.dtype, level: str
) -> None:
    """FP32 values of an enabled model hold the half values of either dtype."""
    run = HalfAlone(half).train(range(3))
    other = nn.Linear(16, 16)
    loaded = tritonamp.optim.AdamW(other.parameters(), lr=1e-3)
    amp = handles(other, loaded, level=level, dtype=dtype)
    other.load_state_dict(run.model.state_dict())
    loaded.load_state_dict(run.optimizer.state_dict(packed=True))
    assert same([p.detach() for p in amp.master_params()], run.masters())


@pytest.mark.parametrize("level", ["O1", "O2"])
@each_half
def test_remainders_of_other_values_are_not_added(
    handles: Any, half: torch.dtype, level: str
) -> None:
    """FP32 values that are no half values are newer than a packed state, and stay."""
    run = HalfAlone(half).train(range(3))
    other = nn.Linear(16, 16)
    loaded = tritonamp.optim.AdamW(other.parameters(), lr=1e-3)
    amp = handles(other, loaded, level=level, dtype=half)
    before = [p.detach().clone() for p in amp.master_params()]
    loaded.load_state_dict(run.optimizer.state_dict(packed=True))
    assert same([p.detach() for p in amp.master_params()], before)


def test_packed_states_that_cannot_be_exact_are_refused(handles: Any) -> None:
    run = HalfAlone(BF16).train([0])
    packed = copy.deepcopy(run.optimizer.state_dict(packed=True))
    other = HalfAlone(HALF).optimizer
    with pytest.raises(ValueError, match=r"remainder of torch.bfloat16 values for a parameter of"):
        other.load_state_dict(packed)
    other.load_state_dict(run.optimizer.state_dict())
    # torch casts codes to the dtype of the parameter
    plain = nn.Linear(16, 16).to(BF16)
    torchs = torch.optim.AdamW(plain.parameters())
    torchs.load_state_dict(packed)
    with pytest.raises(ValueError, match=r"load a packed state after tritonamp\.enable, or save"):
        tritonamp.enable(plain, torchs, level="O2")
    torchs = torch.optim.AdamW(plain.parameters())
    amp = handles(plain, torchs, level="O2", state="8bit")
    plain.load_state_dict(run.model.state_dict())
    torchs.load_state_dict(packed)
    assert same([p.detach() for p in amp.master_params()], run.masters())


def test_a_tie_keeps_its_lower_bits(handles: Any) -> None:
    """A packed master halfway between two bfloat16 numbers has the one that is farther from 0."""
    run = HalfAlone(BF16).train([0])
    tie = torch.full((16, 16), 0x3F808000, dtype=torch.int32).view(FP32)
    state = run.optimizer.state_dict()
    state["state"][0]["master_param"] = tie
    for kind in STATES:
        with torch.no_grad():
            run.model.weight.copy_(torch.full((16, 16), 0x3F81, dtype=torch.int16).view(BF16))
        other = HalfAlone(BF16, state=kind)
        other.model.load_state_dict(run.model.state_dict())
        other.optimizer.load_state_dict(copy.deepcopy(state))
        amp = handles(other.model, other.optimizer, level="O2")
        assert torch.equal(next(amp.master_params()), tie)
