"""Small state at its edges: orders of memory, gradients on lent masters, dtypes wider than FP32,
gradients that no code holds.
"""

import copy
import itertools
from functools import partial
from typing import Any

import pytest
import torch
from covering import more, one_in
from helpers import of_kernels, same
from runs import FORMS, OPTIMIZERS, STATES, Training, batch, tensors_of
from torch import Tensor, nn

pytestmark = of_kernels
HALF, BF16, FP32, FP64, C64 = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
)
NAMES = "AdamW", "amsgrad", "our AdamW", "Lion", "SGD momentum", "RMSprop momentum"
FUSED = one_in(2, [(name, form) for name in NAMES for form in FORMS])
WIDE = one_in(2, [(name, state) for name in NAMES for state in STATES])

each_name = pytest.mark.parametrize("name", NAMES)


# orders of memory


class Convolution(Training):
    """Trained while its memory format changes."""

    def __init__(self, handles: Any, device: Any, name: str, form: str, remembers: bool) -> None:
        fields = {"dtype": BF16, "backend": "triton", **FORMS[form]}
        super().__init__(lambda: nn.Conv2d(3, 5, 3), name, "O2", device, enable=handles, **fields)
        self.remembers = remembers

    def stepped(self, seed: int) -> list[Tensor]:
        if not self.remembers:
            self.amp._parts.weights[self.optimizer].memory.forget_plans()
        self.step(batch(seed, 2, 3, 6, 6, device=self.device))
        return self.masters() + [t.clone() for t in tensors_of(self.optimizer.state_dict())]


@pytest.mark.usefixtures("plans")
@pytest.mark.parametrize(("name", "form"), FUSED)
def test_plans_know_in_which_order_memory_lies(
    handles: Any, device: torch.device, name: str, form: str
) -> None:
    """A format of before comes back, by a change of the model or with a state that is loaded."""
    runs = [Convolution(handles, device, name, form, remembers) for remembers in (True, False)]
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
        assert same(runs[0].stepped(seed), runs[1].stepped(seed)), seed


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
    fields |= {"enable": handles, "dtype": BF16}
    run = Training(lambda: nn.Linear(8, 8), name, "O2", device, **fields)
    amp = run.amp

    def params() -> list[Tensor]:
        return [p for _, p in amp.named_master_params()] if named else list(amp.master_params())

    for seed in range(2):
        run.backward(run.loss(batch(seed, 2, 8, device=device)))
        if seed == 0:
            held = params() if asked_before else []
            amp.unscale_()
            held = held or params()
            edit(held)
            if again:
                assert all(p.grad is q.grad for p, q in zip(held, params(), strict=True))
        run.finish()
    return run.masters() + tensors_of(run.optimizer.state_dict())


@pytest.mark.parametrize("edit", EDITS)
@each_name
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

    plain = False, False, False
    found = stepped_on_edited(spied, device, name, edit, ways, masters="packed")
    expected = stepped_on_edited(spied, device, name, on_parameters, plain, masters="packed")
    assert same(found, expected)
    assert all(p.grad is None for p in handles_seen[0].parameters())


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize(("name", "form"), FUSED)
def test_gradients_on_offloaded_masters_count(
    handles: Any, cuda: torch.device, name: str, form: str, edit: Any
) -> None:
    ways = (False, True, True)
    runs = [
        stepped_on_edited(handles, cuda, name, edit, ways, **FORMS[form], **fields)
        for fields in ({"offload": "state"}, {})
    ]
    assert same(*([t.cpu() for t in run] for run in runs))


# dtypes wider than FP32


class Wide(nn.Module):
    """A parameter of each dtype."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(8, 8, dtype=dtype) for dtype in dtypes)

    def forward(self, x: Tensor) -> Tensor:
        return sum((w.abs() * x).square().sum().float() for w in self.weights)  # type: ignore[return-value]


class WideTraining(Training):
    def loss(self, x: Any = None) -> Tensor:
        return self.model(x)


@pytest.mark.parametrize("level", ["O0", "O1"])
@pytest.mark.parametrize("dtype", [FP64, C64, torch.complex128], ids=str)
@pytest.mark.parametrize(("name", "state"), WIDE)
def test_wide_parameters_keep_state_of_their_own_dtype(
    handles: Any, name: str, state: str, dtype: torch.dtype, level: str
) -> None:
    def run(optimizer: Any, level: str | None, **fields: Any) -> list[Tensor]:
        made = WideTraining(lambda: Wide(dtype, FP32), optimizer, level, enable=handles, **fields)
        for seed in range(3):
            made.step(batch(seed, 8, 8))
        wide = made.model.weights[0]
        own = made.optimizer.state[wide].values()
        return [wide.detach(), *(v for v in own if isinstance(v, Tensor) and v.dim())]

    runs = [run(name, level, state=given, loss_scale=1.0) for given in (state, "fp32")]
    assert {t.dtype for found in runs for t in found} == {dtype}
    assert same(*runs)
    if name in vars(torch.optim) or name.endswith("momentum"):
        torchs = run(partial(OPTIMIZERS[name], foreach=False), None)
        # three steps, each some ten roundings
        rtol = 64 * torch.finfo(dtype).eps
        # RMSprop's first steps are as large as weights, so that their difference may cancel
        atol = rtol * torchs[0].abs().max().item() if name.startswith("RMSprop") else 0.0
        torch.testing.assert_close(runs[0][0], torchs[0], rtol=rtol, atol=atol)


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
    optimizer: Any = OPTIMIZERS[name]([param], lr=1e-2, state="8bit")
    optimizer._fused_step[0]._backend = backend
    for factor in (1.0, -1.0, 1.0, 1e-30):
        param.grad = torch.full((300,), 1e-3)
        param.grad[130] = large * factor
        optimizer.step()
    moments = tensors_of(optimizer.state_dict())
    assert all(moment.isfinite().all() for moment in moments)
    others = torch.arange(300) != 130
    assert param.isfinite()[others].all()
