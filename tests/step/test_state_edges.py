"""Small state at its edges: orders of memory, gradients on lent masters, packed states that are
loaded anywhere, inference mode, dtypes wider than FP32, gradients that no code holds.
"""

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import more
from helpers import Net, of_kernels, same
from torch import Tensor, nn

import tritonamp

pytestmark = of_kernels
HALF, BF16, FP32, FP64, C64 = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
)
STATES = ["fp32", "bf16", "8bit"]
Make = Callable[..., torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda params, **given: torch.optim.AdamW(params, lr=1e-2, **given),
    "Adam": lambda params, **given: torch.optim.Adam(params, lr=1e-2, **given),
    "our AdamW": lambda params, **given: tritonamp.optim.AdamW(params, lr=1e-2, **given),
    "Lion": lambda params, **given: tritonamp.optim.Lion(params, lr=1e-3, **given),
    "SGD": lambda params, **given: torch.optim.SGD(params, lr=0.1, momentum=0.9, **given),
    "RMSprop": lambda params, **given: torch.optim.RMSprop(params, lr=1e-2, **given),
    "Muon": lambda params, **given: tritonamp.optim.Muon(list(params), lr=1e-2, **given),
}
KEEPS = {"SGD": ["fp32", "bf16"], "Muon": ["fp32"], "RMSprop": ["fp32"]}  # others: each of STATES
ROWS = [(name, state) for name in OPTIMIZERS for state in KEEPS.get(name, STATES)]
FUSED = [(name, state) for name, state in ROWS if name not in ("RMSprop", "Muon")]
CODED = ["AdamW", "Adam", "our AdamW", "Lion"]

each_coded = pytest.mark.parametrize("name", CODED)


def batch(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tensors_of(state: Any) -> list[Tensor]:
    return [t for own in state["state"].values() for t in own.values() if isinstance(t, Tensor)]


# orders of memory


class Convolution:
    """A convolution that is trained while its memory format changes."""

    def __init__(
        self, handles: Any, device: torch.device, name: str, state: str, remembers: bool
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Conv2d(3, 5, 3).to(device)
        self.optimizer = OPTIMIZERS[name](self.model.parameters())
        fields = {"level": "O2", "dtype": BF16, "backend": "triton", "state": state}
        self.amp = handles(self.model, self.optimizer, **fields)
        self.device = device
        self.remembers = remembers

    def step(self, seed: int) -> list[Tensor]:
        if not self.remembers:
            self.amp._parts.weights[self.optimizer]._memory.forget_plans()
        x = batch(seed, 2, 3, 6, 6).to(self.device)
        self.amp.backward(self.model(x).float().square().mean())
        self.optimizer.step()
        self.optimizer.zero_grad()
        values = [p.detach().clone() for p in self.amp.master_params()]
        return values + [t.clone() for t in tensors_of(self.optimizer.state_dict())]


@pytest.mark.usefixtures("plans")
@pytest.mark.parametrize(("name", "state"), FUSED)
def test_plans_know_in_which_order_memory_lies(
    handles: Any, device: torch.device, name: str, state: str
) -> None:
    """A format of before comes back, by a change of the model or with a state that is loaded."""
    runs = [Convolution(handles, device, name, state, remembers) for remembers in (True, False)]
    saved: list[Any] = []
    for seed in range(7):
        for run in runs:
            if seed in (2, 4):
                formats = {2: torch.channels_last, 4: torch.contiguous_format}
                run.model.to(memory_format=formats[seed])  # type: ignore[call-overload]
            if seed == 3:
                saved.append(copy.deepcopy(run.optimizer.state_dict(packed=True)))
            if seed == 6:  # codes in the order of channels_last, for contiguous parameters
                run.optimizer.load_state_dict(saved[runs.index(run)])
        assert same(runs[0].step(seed), runs[1].step(seed)), seed


# gradients on lent masters


def cleared(params: list[Tensor]) -> None:
    for p in params:
        p.grad = None


def replaced(params: list[Tensor]) -> None:
    for p in params:
        assert p.grad is not None
        p.grad = p.grad * -0.5


def replaced_twice(params: list[Tensor]) -> None:
    cleared(params)
    for p in params:
        p.grad = torch.ones_like(p)


def changed_in_place(params: list[Tensor]) -> None:
    for p in params:
        assert p.grad is not None
        p.grad.mul_(-0.5)


EDITS = [cleared, replaced, replaced_twice, changed_in_place]


def stepped_on_edited(
    handles: Any,
    device: torch.device,
    name: str,
    edit: Any,
    ways: tuple[bool, bool, bool],
    **fields: Any,
) -> list[Tensor]:
    """Return masters and moments after an edited step and a plain one, on half gradients again."""
    named, asked_before, again = ways
    torch.manual_seed(0)
    model = nn.Linear(8, 8).to(device)
    optimizer = OPTIMIZERS[name](model.parameters())
    amp = handles(model, optimizer, level="O2", dtype=BF16, **fields)

    def params() -> list[Tensor]:
        return [p for _, p in amp.named_master_params()] if named else list(amp.master_params())

    for seed in range(2):
        amp.backward(model(batch(seed, 2, 8).to(device)).float().square().mean())
        if seed == 0:
            held = params() if asked_before else []
            amp.unscale_()
            held = held or params()
            edit(held)
            if again:
                assert all(p.grad is q.grad for p, q in zip(held, params(), strict=True))
        optimizer.step()
        optimizer.zero_grad()
    return [*(p.detach().clone() for p in amp.master_params()), *tensors_of(optimizer.state_dict())]


@pytest.mark.parametrize("edit", EDITS)
@each_coded
@pytest.mark.parametrize(
    "ways", more([(ways,) for ways in itertools.product([False, True], repeat=3)]), ids=str
)
def test_gradients_on_lent_masters_count(
    handles: Any, device: torch.device, name: str, edit: Any, ways: tuple[bool, bool, bool]
) -> None:
    """As if the parameters' own ``.grad`` were edited; and at the step they are half again."""

    def on_parameters(held: list[Tensor]) -> None:
        model = handles_seen[-1]
        edit(list(model.parameters()))

    handles_seen: list[nn.Module] = []

    def spied(model: nn.Module, *args: Any, **fields: Any) -> Any:
        handles_seen.append(model)
        return handles(model, *args, **fields)

    found = stepped_on_edited(spied, device, name, edit, ways, state="8bit")
    expected = stepped_on_edited(
        spied, device, name, on_parameters, (False, False, False), state="8bit"
    )
    assert same(found, expected)
    assert all(p.grad is None for p in handles_seen[0].parameters())


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize(("name", "state"), FUSED)
def test_gradients_on_offloaded_masters_count(
    handles: Any, cuda: torch.device, name: str, state: str, edit: Any
) -> None:
    ways = (False, True, True)
    runs = [
        stepped_on_edited(handles, cuda, name, edit, ways, state=state, **fields)
        for fields in ({"offload": "state"}, {})
    ]
    assert same(*([t.cpu() for t in run] for run in runs))


# packed states


def half_run(half: torch.dtype, kind: Any, state: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Linear(16, 16).to(half)
    return model, kind(model.parameters(), lr=1e-3, state=state)


def train(model: nn.Module, optimizer: Any, seeds: range) -> None:
    half = next(model.parameters()).dtype
    for seed in seeds:
        model(batch(seed, 4, 16).to(half)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def masters(optimizer: Any) -> list[Tensor]:
    states = optimizer.state_dict()["state"].values()
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
    model, optimizer = half_run(half, kind, state)
    train(model, optimizer, range(3))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(packed=packed)))
    ends = []
    for _ in range(2):
        train(model, optimizer, range(3, 6))
        ends.append([*masters(optimizer), *(p.detach().clone() for p in model.parameters())])
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
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
    model, optimizer = half_run(BF16, kind, saved)
    train(model, optimizer, range(3))
    expected = masters(optimizer)
    state = copy.deepcopy(optimizer.state_dict(packed=packed))
    other, loaded = half_run(BF16, kind, loading if where == "plain" else "fp32")

    def load() -> None:
        other.load_state_dict(model.state_dict())
        loaded.load_state_dict(copy.deepcopy(state))

    if where == "plain":
        load()
        assert same(masters(loaded), expected)
        return
    if where == "enabled later":
        load()
    amp = handles(other, loaded, level="O2", dtype=BF16, state=loading)
    if where == "enabled and trained":
        amp.backward(other(batch(9, 4, 16)).square().mean())
        loaded.step()
        loaded.zero_grad()
    if where != "enabled later":
        load()
    assert same([p.detach().clone() for p in amp.master_params()], expected)
    amp.backward(other(batch(3, 4, 16)).square().mean())
    loaded.step()
    kept = set().union(*(own.keys() for own in loaded.state_dict(packed=True)["state"].values()))
    assert not kept & {"remainder", "half_dtype", "master_param"}


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("dtype", [HALF, BF16], ids=str)
@each_half
def test_packed_states_load_into_other_dtypes(
    handles: Any, half: torch.dtype, dtype: torch.dtype, level: str
) -> None:
    """FP32 values of an enabled model hold the half values of either dtype."""
    model, optimizer = half_run(half, tritonamp.optim.AdamW, "8bit")
    train(model, optimizer, range(3))
    other = nn.Linear(16, 16)
    loaded = tritonamp.optim.AdamW(other.parameters(), lr=1e-3)
    amp = handles(other, loaded, level=level, dtype=dtype)
    other.load_state_dict(model.state_dict())
    loaded.load_state_dict(optimizer.state_dict(packed=True))
    assert same([p.detach() for p in amp.master_params()], masters(optimizer))


def test_packed_states_that_cannot_be_exact_are_refused(handles: Any) -> None:
    model, optimizer = half_run(BF16, tritonamp.optim.AdamW, "8bit")
    train(model, optimizer, range(1))
    packed = copy.deepcopy(optimizer.state_dict(packed=True))
    _, other = half_run(HALF, tritonamp.optim.AdamW, "8bit")
    with pytest.raises(ValueError, match=r"remainder of torch.bfloat16 values for a parameter of"):
        other.load_state_dict(packed)
    other.load_state_dict(optimizer.state_dict())
    # torch casts codes to the dtype of the parameter
    plain = nn.Linear(16, 16).to(BF16)
    torchs = torch.optim.AdamW(plain.parameters())
    torchs.load_state_dict(packed)
    with pytest.raises(ValueError, match=r"load a packed state after tritonamp\.enable, or save"):
        tritonamp.enable(plain, torchs, level="O2")
    torchs = torch.optim.AdamW(plain.parameters())
    amp = handles(plain, torchs, level="O2", state="8bit")
    plain.load_state_dict(model.state_dict())
    torchs.load_state_dict(packed)
    assert same([p.detach() for p in amp.master_params()], masters(optimizer))


def test_a_tie_keeps_its_lower_bits(handles: Any) -> None:
    """A packed master halfway between two bfloat16 numbers has the one that is farther from 0."""
    model, optimizer = half_run(BF16, tritonamp.optim.AdamW, "8bit")
    train(model, optimizer, range(1))
    tie = torch.full((16, 16), 0x3F808000, dtype=torch.int32).view(FP32)
    state = optimizer.state_dict()
    state["state"][0]["master_param"] = tie
    for kind in STATES:
        with torch.no_grad():
            model.weight.copy_(torch.full((16, 16), 0x3F81, dtype=torch.int16).view(BF16))
        plain, loaded = half_run(BF16, tritonamp.optim.AdamW, kind)
        plain.load_state_dict(model.state_dict())
        loaded.load_state_dict(copy.deepcopy(state))
        amp = handles(plain, loaded, level="O2")
        assert torch.equal(next(amp.master_params()), tie)


# inference mode


def _named(run: "Enabled") -> None:
    list(run.amp.named_master_params())


def _average(run: "Enabled") -> None:
    average = run.amp.ema(0.9)
    average.update()
    average.load_state_dict(average.state_dict())


def _saved(run: "Enabled") -> None:
    tritonamp.save(run.folder / "x.pt", model=run.model, optimizer=run.optimizer, amp=run.amp)


def _saved_and_loaded(run: "Enabled") -> None:
    _saved(run)
    objects: dict[str, Any] = {"model": run.model, "optimizer": run.optimizer, "amp": run.amp}
    tritonamp.load(run.folder / "x.pt", **objects)


def _healed(run: "Enabled") -> None:
    name = next(name for name, m in run.model.named_modules() if isinstance(m, nn.Linear))
    run.amp.heal(name)
    run.amp.unheal(name)


def _watched(run: "Enabled") -> None:
    run.amp.watch(1)
    run.model(batch(0, 4, 6))


def _scheduled(run: "Enabled") -> None:
    run.amp.step_schedulers(run.schedule)


CALLS: dict[str, Callable[["Enabled"], Any]] = {
    "master_params": lambda run: list(run.amp.master_params()),
    "named_master_params": _named,
    "writes": lambda run: [p.detach().mul_(0.5) for p in run.amp.master_params()],
    "forward": lambda run: run.model(batch(0, 4, 6)),
    "model.state_dict": lambda run: run.model.state_dict(),
    "model.load_state_dict": lambda run: run.model.load_state_dict(run.model.state_dict()),
    "optimizer.state_dict": lambda run: run.optimizer.state_dict(packed=True),
    "load": lambda run: run.optimizer.load_state_dict(run.optimizer.state_dict()),
    "zero_grad": lambda run: run.optimizer.zero_grad(set_to_none=False),
    "amp.load_state_dict": lambda run: run.amp.load_state_dict(run.amp.state_dict()),
    "stats": lambda run: (run.amp.stats(), run.amp.metrics(), run.amp.explain()),
    "ema": _average,
    "save": _saved,
    "save, load": _saved_and_loaded,
    "heal": _healed,
    "watch": _watched,
    "step_schedulers": _scheduled,
    "sleep": lambda run: (run.amp.sleep(), run.amp.wake()),
    "scale": lambda run: run.amp.scaler.scale(run.model(batch(0, 4, 6)).float().mean()),
}
BETWEEN: dict[str, Callable[["Enabled"], Any]] = {
    "unscale_": lambda run: run.amp.unscale_(),
    "clip_grad_norm_": lambda run: run.amp.clip_grad_norm_(0.1),
    "unscale_, clip": lambda run: (run.amp.unscale_(), run.amp.clip_grad_norm_(0.1)),
    "veto": lambda run: run.amp.veto(False),
    "gradients": lambda run: (run.amp.unscale_(), changed_in_place([*run.amp.master_params()])),
    "step": lambda run: run.optimizer.step(),
}


class Enabled:
    """A model in training, with one call before or inside of one of its steps."""

    def __init__(self, handles: Any, folder: Path, name: str, level: str, **fields: Any) -> None:
        torch.manual_seed(0)
        self.model = Net() if name != "Muon" else nn.Sequential(nn.Linear(6, 6, bias=False))
        self.optimizer = OPTIMIZERS[name](self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.amp = handles(self.model, self.optimizer, level=level, **fields)
        self.folder = folder

    def trained(self, call: str, at: int, mode: Any) -> list[Tensor]:
        """Return all state that training continues with."""
        for seed in range(4):
            if call in CALLS and seed == at:
                with mode():
                    CALLS[call](self)
            self.amp.backward(self.model(batch(seed, 4, 6)).float().square().mean())
            if call in BETWEEN and seed == at:
                with mode():
                    BETWEEN[call](self)
            if not (call == "step" and seed == at):
                self.optimizer.step()
            self.optimizer.zero_grad()
        kept = [*self.model.parameters(), *tensors_of(self.optimizer.state_dict(packed=True))]
        assert not any(t.is_inference() for t in kept)
        return [t.detach().clone() for t in [*self.amp.master_params(), *kept]]


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("call", [*CALLS, *BETWEEN])
@pytest.mark.parametrize(
    ("name", "state"),
    [*(("AdamW", s) for s in STATES), ("our AdamW", "8bit"), ("Lion", "8bit"), ("SGD", "bf16"),
     ("Muon", "fp32"), ("RMSprop", "fp32")],
)  # fmt: skip
def test_what_outlives_inference_mode_is_a_normal_tensor(
    handles: Any, tmp_path: Path, name: str, state: str, call: str, at: int
) -> None:
    def run(mode: Any) -> list[Tensor]:
        built = Enabled(handles, tmp_path, name, "O2", state=state, backend="eager")
        found = built.trained(call, at, mode)
        built.amp.disable()
        return found

    assert same(run(torch.inference_mode), run(torch.no_grad))


# dtypes wider than FP32


class Wide(nn.Module):
    """A parameter of each dtype."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(8, 8, dtype=dtype) for dtype in dtypes)

    def forward(self, x: Tensor) -> Tensor:
        return sum((w.abs() * x).square().sum().float() for w in self.weights)  # type: ignore[return-value]


@pytest.mark.parametrize("level", ["O0", "O1"])
@pytest.mark.parametrize("dtype", [FP64, C64, torch.complex128], ids=str)
@pytest.mark.parametrize(("name", "state"), FUSED)
def test_wide_parameters_keep_state_of_their_own_dtype(
    handles: Any, name: str, state: str, dtype: torch.dtype, level: str
) -> None:
    runs = []
    for given in (state, "fp32"):
        model = Wide(dtype, FP32)
        optimizer = OPTIMIZERS[name](model.parameters())
        amp = handles(model, optimizer, level=level, state=given, loss_scale=1.0)
        for seed in range(3):
            amp.backward(model(batch(seed, 8, 8)))
            optimizer.step()
            optimizer.zero_grad()
        wide = model.weights[0]
        moments = [v for v in optimizer.state[wide].values() if isinstance(v, Tensor) and v.dim()]
        assert {m.dtype for m in moments} == {dtype}
        runs.append([wide.detach(), *moments])
    assert same(*runs)
    if name not in ("Adam", "AdamW", "SGD"):
        return
    model = Wide(dtype, FP32)
    optimizer = OPTIMIZERS[name](model.parameters(), foreach=False)
    for seed in range(3):
        model(batch(seed, 8, 8)).backward()
        optimizer.step()
        optimizer.zero_grad()
    # three steps, each some ten roundings
    torch.testing.assert_close(
        runs[0][0], model.weights[0].detach(), rtol=64 * torch.finfo(dtype).eps, atol=0
    )


# gradients that no code holds


@pytest.mark.parametrize("backend", ["triton", "eager"])
@pytest.mark.parametrize("large", [5e20, 1e21, 1e30, 3.38e38])
@pytest.mark.parametrize("name", ["our AdamW", "Lion"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_block_outlives_any_finite_gradient(
    monkeypatch: pytest.MonkeyPatch, name: str, large: float, backend: str
) -> None:
    """Alone, where nothing skips: whatever sign comes next."""
    param = nn.Parameter(torch.ones(300))
    optimizer: Any = OPTIMIZERS[name]([param], state="8bit")
    optimizer._fused_step[0]._backend = backend
    for factor in (1.0, -1.0, 1.0, 1e-30):
        param.grad = torch.full((300,), 1e-3)
        param.grad[130] = large * factor
        optimizer.step()
    moments = tensors_of(optimizer.state_dict())
    assert all(moment.isfinite().all() for moment in moments)
    others = torch.arange(300) != 130
    assert param.isfinite()[others].all()
