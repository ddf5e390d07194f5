"""Packed states of every form, loaded into every form, plain and enabled."""

import copy
import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import more
from helpers import of_kernels, same, snapshot
from runs import FORMS, OPTIMIZERS, Training, batch, grouped, tensors_of
from torch import Tensor, nn

import tritonamp

pytestmark = of_kernels
HALF, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


class HalfAlone(Training):
    """Trains half parameters without ``enable``."""

    def __init__(
        self, half: torch.dtype, kind: Any = tritonamp.optim.AdamW, form: str = "8bit"
    ) -> None:
        model = lambda: nn.Linear(16, 16).to(half)  # noqa: E731
        super().__init__(model, partial(kind, **FORMS[form]), level=None, lr=1e-3)
        self.x = batch(0, 4, 16, dtype=half)

    def train(self, seeds: Sequence[int], bad: Sequence[int] = ()) -> Any:
        for seed in seeds:
            self.step(batch(seed, 4, 16, dtype=self.x.dtype))
        return self

    def masters(self) -> list[Tensor]:
        states = self.optimizer.state_dict()["state"].values()
        return [own["master_param"].clone() for own in states]


KINDS = [tritonamp.optim.AdamW, tritonamp.optim.Lion, partial(tritonamp.optim.SGD, momentum=0.9)]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=["AdamW", "Lion", "SGD"])
each_half = pytest.mark.parametrize("half", [BF16, HALF], ids=str)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("form", FORMS)
@each_half
@each_kind
def test_rolling_back_has_the_same_bits(
    kind: Any, half: torch.dtype, form: str, packed: bool
) -> None:
    run = HalfAlone(half, kind, form).train(range(3))
    saved = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict(packed=packed)))
    ends = []
    for _ in range(2):
        run.train(range(3, 6))
        ends.append([*run.masters(), *snapshot(run.model)])
        run.model.load_state_dict(saved[0])
        run.optimizer.load_state_dict(saved[1])
    # FP32 moments that become codes again, and masters of float16 below 2^-14, lose bits once
    exact = packed or form == "fp32" or half is BF16
    if exact:
        assert same(*ends)


WHERE = ["plain", "enabled", "enabled later", "enabled and trained"]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(("saved", "loading"), more(itertools.product(FORMS, FORMS)))
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
    other.amp = handles(other.model, other.optimizer, level="O2", dtype=BF16, **FORMS[loading])
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
@pytest.mark.parametrize("form", ["8bit", "packed fp32"])
@each_half
def test_packed_states_load_into_other_dtypes(
    handles: Any, half: torch.dtype, form: str, dtype: torch.dtype, level: str
) -> None:
    """FP32 values of an enabled model hold the half values of either dtype."""
    run = HalfAlone(half, form=form).train(range(3))
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


@pytest.mark.parametrize("form", ["8bit", "packed bf16"])
def test_packed_states_that_cannot_be_exact_are_refused(handles: Any, form: str) -> None:
    run = HalfAlone(BF16, form=form).train([0])
    packed = copy.deepcopy(run.optimizer.state_dict(packed=True))
    other = HalfAlone(HALF).optimizer
    with pytest.raises(ValueError, match=r"remainder of torch.bfloat16 values for a parameter of"):
        other.load_state_dict(packed)
    other.load_state_dict(run.optimizer.state_dict())
    # torch casts codes and remainders to the dtype of the parameter
    plain = nn.Linear(16, 16).to(BF16)
    torchs = torch.optim.AdamW(plain.parameters())
    torchs.load_state_dict(packed)
    with pytest.raises(ValueError, match=r"load a packed state after tritonamp\.enable, or save"):
        tritonamp.enable(plain, torchs, level="O2")
    torchs = torch.optim.AdamW(plain.parameters())
    amp = handles(plain, torchs, level="O2", **FORMS[form])
    plain.load_state_dict(run.model.state_dict())
    torchs.load_state_dict(packed)
    assert same([p.detach() for p in amp.master_params()], run.masters())


@pytest.mark.parametrize(
    ("key", "damaged", "message"),
    [
        (
            "exp_avg",
            lambda codes: codes.view(3, 86),
            r"exp_avg of shape \(3, 86\), where codes have",
        ),
        ("exp_avg", Tensor.tolist, "exp_avg of type list, where a tensor is needed"),
        ("remainder", lambda remainder: remainder.view(16, 16), "remainder that is no tensor of"),
        ("remainder", lambda remainder: None, "remainder that is no tensor of one dimension"),
        ("strides", lambda strides: (32, 1), r"strides \(32, 1\), which no dense tensor of"),
        (
            "strides",
            lambda strides: (1,),
            r"strides \(1,\), which no dense tensor of shape \(16, 16",
        ),
        ("strides", torch.tensor, r"strides tensor\(\[16,  1\]\), which no dense tensor of"),
    ],
)
def test_damaged_states_are_refused(key: str, damaged: Any, message: str) -> None:
    run = HalfAlone(HALF).train([0])
    packed = copy.deepcopy(run.optimizer.state_dict(packed=True))
    packed["state"][0][key] = damaged(packed["state"][0][key])
    before = run.stored()
    with pytest.raises(ValueError, match=f"state 0: {message}"):
        run.optimizer.load_state_dict(packed)
    assert same(run.stored(), before)


def test_state_of_transposed_matrices_is_refused() -> None:
    """Codes and remainders have as many elements, and one dimension."""
    wide, tall = (
        tritonamp.optim.SGD(
            [nn.Parameter(torch.ones(*shape, dtype=HALF))], momentum=0.9, state="8bit"
        )
        for shape in ((2, 3), (3, 2))
    )
    for optimizer in (wide, tall):
        param = optimizer.param_groups[0]["params"][0]
        param.grad = torch.ones_like(param)
        optimizer.step()
    before = snapshot(tall)
    with pytest.raises(
        ValueError, match=r"strides \(3, 1\), which no dense tensor of shape \(3, 2"
    ):
        tall.load_state_dict(wide.state_dict(packed=True))
    assert same(snapshot(tall), before)


@pytest.mark.parametrize("fields", [{}, {"differentiable": True}])
def test_codes_are_refused_by_other_steps(handles: Any, fields: dict[str, Any]) -> None:
    run = HalfAlone(HALF).train([0])
    model = nn.Linear(16, 16)
    kind = torch.optim.AdamW if fields else torch.optim.RAdam
    other = kind(model.parameters(), **fields)
    handles(model, other, level="O2")
    with pytest.raises(
        ValueError, match=r"got state 0 in codes of .*: load a state_dict\(\) without"
    ):
        other.load_state_dict(run.optimizer.state_dict(packed=True))
    other.load_state_dict(run.optimizer.state_dict())


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("number", [0, 1], ids=["matrix of Muon", "vector of AdamW"])
def test_codes_load_into_muon(handles: Any, number: int, enabled: bool) -> None:
    """As FP32 state, because Muon keeps no codes."""
    kinds = tritonamp.optim.SGD, tritonamp.optim.AdamW
    rest: list[dict[str, Any]] = [{"momentum": 0.9}, {}]
    params = [nn.Parameter(torch.randn(16, 16)), nn.Parameter(torch.randn(200))]
    given = kinds[number]([params[number]], lr=0.1, state="8bit", **rest[number])
    params[number].square().sum().backward()
    given.step()
    model = nn.Module()
    model.matrix, model.vector = params
    muon = tritonamp.optim.Muon(params[:1], lr=0.1, adamw_params=params[1:])
    if enabled:
        handles(model, muon, level="O2", dtype=BF16)
    saved = muon.state_dict()
    wide = given.state_dict()["state"][0]
    saved["state"] = {number: copy.deepcopy(given.state_dict(packed=True)["state"][0])}
    # a count and strides are AdamW's and the codes'
    due = {key: wide[key] for key in wide if key not in ("step", "strides")}
    muon.load_state_dict(saved)
    loaded = muon.state_dict()["state"][number]
    assert due and all(torch.equal(loaded[key], value) for key, value in due.items())
    for p in params:
        p.grad = torch.ones_like(p)
    muon.step()
    assert all(bool(p.isfinite().all()) for p in params)


def test_a_tie_keeps_its_lower_bits(handles: Any) -> None:
    """A packed master halfway between two bfloat16 numbers has the one that is farther from 0."""
    run = HalfAlone(BF16).train([0])
    tie = torch.full((16, 16), 0x3F808000, dtype=torch.int32).view(FP32)
    state = run.optimizer.state_dict()
    state["state"][0]["master_param"] = tie
    for form in FORMS:
        with torch.no_grad():
            run.model.weight.copy_(torch.full((16, 16), 0x3F81, dtype=torch.int16).view(BF16))
        other = HalfAlone(BF16, form=form)
        other.model.load_state_dict(run.model.state_dict())
        other.optimizer.load_state_dict(copy.deepcopy(state))
        amp = handles(other.model, other.optimizer, level="O2")
        assert torch.equal(next(amp.master_params()), tie)


# masters


def drifting(model: nn.Module, x: Tensor) -> Tensor:
    """A loss whose gradients do not depend on the weights, so that a tie changes one value only."""
    return (model(x).float() * torch.linspace(-1, 1, 16)).sum()


class Drifting(Training):
    """Trains weights beyond 2^-14 in magnitude, which packed masters hold exactly."""

    def __init__(self, handles: Any, name: str, half: torch.dtype, **fields: Any) -> None:
        super().__init__(
            lambda: self.far_from_zero(nn.Linear(16, 16)), MAKERS[name], "O2", lr=1e-3,
            enable=handles, dtype=half, loss_scale=1.0, **fields,
        )  # fmt: skip
        self.x = batch(0, 4, 16)

    @staticmethod
    def far_from_zero(model: nn.Module) -> nn.Module:
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(p.sign() + p)
        return model

    def loss(self, x: Any = None) -> Tensor:
        return drifting(self.model, self.x if x is None else x)


def muon_and_adamw(params: list[nn.Parameter], **rest: Any) -> torch.optim.Optimizer:
    return tritonamp.optim.Muon(params[:1], adamw_params=params[1:], **rest)


def matrices(params: list[nn.Parameter], **rest: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.Muon(params[:1], **rest), torch.optim.AdamW(params[1:], **rest)]


MAKERS = {
    **{name: OPTIMIZERS[name] for name in [
        "Adam", "AdamW", "amsgrad", "our AdamW", "Lion", "SGD", "SGD momentum", "RMSprop",
        "RMSprop momentum",
    ]},
    "SGD with and without momentum": grouped("SGD", momentum=0.9, dampening=0.5),
    "Muon": matrices,
    "our Muon and AdamW": muon_and_adamw,
}  # fmt: skip
ROWS = [
    (name, state)
    for name in MAKERS
    for state in ("fp32", "bf16", "8bit")
    if state == "fp32" or "Muon" not in name
]


@each_half
@pytest.mark.parametrize(("name", "state"), ROWS)
def test_packed_masters_have_the_bits_of_fp32_ones(
    handles: Any, name: str, state: str, half: torch.dtype
) -> None:
    """Every step, and a skip; half parameters differ at ties of bfloat16 alone."""
    other = "fp32" if state != "8bit" else None  # whose masters are always packed
    packed = Drifting(handles, name, half, state=state, masters="packed")
    plain = Drifting(handles, name, half, state=state, masters=other)
    for seed in range(4):
        for run in (packed, plain):
            run.step(batch(seed, 4, 16), bad=seed == 2)
        assert same(packed.masters(), plain.masters()), seed
        pairs = zip(packed.model.parameters(), plain.model.parameters(), strict=True)
        for (a, b), master in zip(pairs, plain.masters(), strict=True):
            is_tie = (master.view(torch.int32) & 0xFFFF) == 0x8000
            assert ((a == b) | (is_tie & (half is BF16))).all()
    states = [tuple(o.state_dict() for o in run.optimizers) for run in (packed, plain)]
    moments = [[t for s in each for t in tensors_of(s)] for each in states]
    assert same(*moments)
    assert all(
        p.dtype is half for o in packed.optimizers for g in o.param_groups for p in g["params"]
    )


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "Muon"])
def test_packed_masters_resume(handles: Any, name: str, tmp_path: Path) -> None:
    straight = Drifting(handles, name, HALF, masters="packed")
    straight.train(range(3))
    tritonamp.save(tmp_path / "x", **straight.objects())
    resumed = Drifting(handles, name, HALF, masters="packed")
    resumed.train([9])
    tritonamp.load(tmp_path / "x", **resumed.objects())
    for run in (straight, resumed):
        run.train([3, 4])
    assert same(straight.everything(), resumed.everything())


def test_a_group_without_momentum_keeps_no_codes(handles: Any) -> None:
    run = Drifting(handles, "SGD with and without momentum", HALF, state="8bit")
    run.step()
    kept = [run.optimizer.state[p] for g in run.optimizer.param_groups for p in g["params"]]
    assert kept[0]["momentum_buffer"].dtype is torch.uint8
    assert kept[1].keys() == {"step"}
    alone = Drifting(handles, "SGD", HALF, state="8bit")
    alone.step()
    assert not alone.optimizer.state
