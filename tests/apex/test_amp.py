"""amp.initialize and amp.scale_loss: levels, their overrides, what a step does, and apex's defects
staying away.
"""

import copy
import io
import logging
import math
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import same
from torch import Tensor, nn

import tritonamp
from tritonamp import apex
from tritonamp.apex import amp
from tritonamp.apex.amp import _amp_state

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
LEVELS = ["O0", "O1", "O2", "O3"]


@pytest.fixture(autouse=True)
def switches() -> Iterator[None]:
    yield
    _amp_state.handle._deactivate()
    _amp_state.allow_incoming_model_not_fp32 = _amp_state.hard_override = False


class Net(nn.Module):
    """With the layers whose precision the levels differ in."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.LayerNorm(8)
        )
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def batch(device: torch.device, n: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 4, generator=generator)
    return x.to(device), (x[:, 0] > 0).long().to(device)


def start(
    device: torch.device, level: str, optimizer: Any = torch.optim.SGD, **kwargs: Any
) -> tuple[Net, Any]:
    torch.manual_seed(0)
    model = Net().to(device)
    kwargs = {"verbosity": 0, **kwargs}
    return amp.initialize(model, optimizer(model.parameters(), lr=0.05), opt_level=level, **kwargs)


def step(
    model: nn.Module, optimizer: Any, data: tuple[Tensor, Tensor], inf_in: Tensor | None = None
) -> float:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(data[0]).float(), data[1])
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
        if inf_in is not None:
            inf_in.grad.view(-1)[0] = math.inf
    optimizer.step()
    return loss.item()


def values(model: nn.Module) -> list[Tensor]:
    return [t.detach().clone() for t in model.state_dict().values()]


# levels

PROPERTIES = {
    "cast_model_type": (FP32, None, FP16, FP16, None, BF16),
    "patch_torch_functions": (False, True, False, False, True, False),
    "patch_torch_functions_type": (None, FP16, None, None, BF16, None),
    "keep_batchnorm_fp32": (None, None, True, False, None, True),
    "master_weights": (False, None, True, False, None, True),
    "loss_scale": (1.0, "dynamic", "dynamic", 1.0, 1.0, 1.0),
}
WEIGHTS = (FP32, FP32, FP16, FP16, FP32, BF16)
NORMS = (FP32, FP32, FP32, FP16, FP32, FP32)
MASTERS = (FP32, FP32, FP32, FP16, FP32, FP32)
OUTPUTS = (FP32, FP16, FP32, FP32, BF16, FP32)


@pytest.mark.parametrize("number", range(6))
def test_levels(number: int, device: torch.device) -> None:
    model, optimizer = start(device, f"O{number}")
    properties = _amp_state.opt_properties
    assert properties.enabled and properties.opt_level == f"O{number}"
    for name, column in PROPERTIES.items():
        assert getattr(properties, name) == properties.options[name] == column[number]
    assert model.head.weight.dtype is WEIGHTS[number]
    assert (
        model.body[1].weight.dtype is NORMS[number] and model.body[4].weight.dtype is NORMS[number]
    )
    assert {p.dtype for p in amp.master_params(optimizer)} == {MASTERS[number]}
    assert model(batch(device)[0]).dtype is OUTPUTS[number]
    assert {t.dtype for t in model.state_dict().values() if t.is_floating_point()} == {FP32}
    scale = 65536.0 if PROPERTIES["loss_scale"][number] == "dynamic" else 1.0
    assert (
        _amp_state.loss_scalers[0].loss_scale() == _amp_state.loss_scalers[0]._loss_scale == scale
    )


@pytest.mark.steps
@pytest.mark.parametrize("level", [*LEVELS, "O4", "O5"])
def test_training(level: str, device: torch.device) -> None:
    model, optimizer = start(device, level, torch.optim.Adam)
    losses = [step(model, optimizer, batch(device)) for _ in range(40)]
    assert losses[-1] < 0.5 * losses[0]


def test_o0_is_plain_fp32(device: torch.device) -> None:
    torch.manual_seed(0)
    plain = Net().to(device)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    model, optimizer = start(device, "O0")
    x, y = batch(device)
    for _ in range(3):
        step(model, optimizer, (x, y))
        plain_optimizer.zero_grad()
        F.cross_entropy(plain(x), y).backward()
        plain_optimizer.step()
    # a GPU's kernel multiplies and adds in one rounding: an ulp of what is added, in each step
    rtol = 0.0 if device.type == "cpu" else 3 * 2.0**-23
    for ours, theirs in zip(values(model), values(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=rtol)
    assert model(x.double()).dtype is model(x.half()).dtype is FP32


OVERRIDES = [
    ("O2", {"keep_batchnorm_fp32": False}, "keep_batchnorm_fp32", False),
    ("O2", {"keep_batchnorm_fp32": "False"}, "keep_batchnorm_fp32", False),
    ("O3", {"keep_batchnorm_fp32": "True"}, "keep_batchnorm_fp32", True),
    ("O2", {"loss_scale": "128.0"}, "loss_scale", 128.0),
    ("O3", {"loss_scale": 128}, "loss_scale", 128.0),
    ("O0", {"loss_scale": "dynamic"}, "loss_scale", "dynamic"),
    ("O2", {"master_weights": False}, "master_weights", False),
    ("O1", {"patch_torch_functions": False}, "patch_torch_functions", False),
    ("O1", {"cast_model_type": FP32}, "cast_model_type", FP32),
    ("O2", {"cast_model_type": BF16}, "cast_model_type", BF16),
]


@pytest.mark.parametrize(("level", "given", "name", "expected"), OVERRIDES)
def test_overrides(
    level: str, given: dict[str, Any], name: str, expected: Any, device: torch.device
) -> None:
    model, optimizer = start(device, level, **given)
    assert getattr(_amp_state.opt_properties, name) == expected
    assert math.isfinite(step(model, optimizer, batch(device)))
    if name == "keep_batchnorm_fp32":
        assert model.body[1].weight.dtype is (FP32 if expected else FP16)
    if name == "cast_model_type" and expected is BF16:
        assert model.head.weight.dtype is BF16 and next(amp.master_params(optimizer)).dtype is FP32


WRONG = [
    ("O7", {}, RuntimeError, "Unexpected optimization level 'O7'"),
    ("01", {}, RuntimeError, "letter O, not the digit zero"),
    ("O1", {"cast_model_type": FP16}, RuntimeError, "use opt_level='O2'"),
    (
        "O1",
        {"keep_batchnorm_fp32": True},
        RuntimeError,
        "keep_batchnorm_fp32=True: leave keep_batchnorm_fp32 out",
    ),
    ("O1", {"keep_batchnorm_fp32": "False"}, RuntimeError, "leave keep_batchnorm_fp32 out"),
    ("O1", {"master_weights": True}, RuntimeError, "leave master_weights out"),
    ("O2", {"patch_torch_functions": True}, RuntimeError, "come with opt_level='O1'"),
    ("O1", {"patch_torch_functions_type": BF16}, RuntimeError, "O4 is bfloat16"),
    (
        "O2",
        {"keep_batchnorm_fp32": "yes"},
        AssertionError,
        "expected True, False, 'True', 'False' or None, got 'yes'",
    ),
    ("O2", {"loss_scale": "much"}, ValueError, "much"),
]


@pytest.mark.parametrize(("level", "given", "error", "text"), WRONG)
def test_wrong_combinations(level: str, given: dict[str, Any], error: type, text: str) -> None:
    model = Net()
    before = values(model)
    with pytest.raises(error, match=text):
        amp.initialize(model, opt_level=level, verbosity=0, **given)
    assert type(model) is Net and same(values(model), before)


def test_hard_override_prints(capsys: pytest.CaptureFixture[str]) -> None:
    _amp_state.hard_override = True
    amp.initialize(Net(), opt_level="O1", verbosity=0, keep_batchnorm_fp32=True)
    assert "Warning:" in capsys.readouterr().out


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [FP16, FP32])
def test_cast_model_outputs(level: str, dtype: torch.dtype, device: torch.device) -> None:
    model, _ = start(device, level, cast_model_outputs=dtype)
    assert model(batch(device)[0]).dtype is dtype


class Nested(nn.Linear):
    def forward(self, given: dict[str, Any], scale: Tensor) -> dict[str, Any]:
        return {
            "out": [super().forward(given["x"]) * scale],
            "dtypes": (given["x"].dtype, scale.dtype),
            "n": given["n"],
        }


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_inputs_and_outputs_are_cast_inside_containers(level: str, device: torch.device) -> None:
    model = amp.initialize(Nested(4, 4).to(device), opt_level=level, verbosity=0)
    x, scale = torch.ones(2, 4, device=device, dtype=torch.float64), torch.ones(4, device=device)
    result = model({"x": x, "n": torch.arange(3)}, scale=scale)
    assert (
        result["dtypes"] == (FP16, FP16)
        and result["out"][0].dtype is FP32
        and result["n"].dtype is torch.int64
    )


# what initialize takes and returns


def test_returns_what_it_was_given() -> None:
    models, optimizers = [Net(), Net()], []
    optimizers += [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    result = amp.initialize(models, optimizers, opt_level="O2", verbosity=0)
    assert result[0] is models and result[1] is optimizers and len(models) == len(optimizers) == 2
    model = Net()
    assert amp.initialize(model, verbosity=0) is model and isinstance(model, Net)
    single, several = amp.initialize([Net()], None, verbosity=0), [Net()]
    assert isinstance(single, list) and amp.initialize(several, verbosity=0) is several


def test_disabled_initialize_does_nothing(device: torch.device) -> None:
    model, optimizer = start(device, "O2", enabled=False)
    assert (
        type(model) is Net
        and type(optimizer) is torch.optim.SGD
        and model.head.weight.dtype is FP32
    )
    loss = model(batch(device)[0]).sum()
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss
    assert amp.state_dict() == {}


def test_refused_models_and_optimizers() -> None:
    model = Net()
    with pytest.raises(TypeError, match=r"models: expected a module.*got tuple"):
        amp.initialize((model,), verbosity=0)
    with pytest.raises(TypeError, match=r"optimizers: expected.*got generator"):
        amp.initialize(model, (o for o in ()), verbosity=0)
    with pytest.raises(RuntimeError, match="AFTER the model"):
        amp.initialize(nn.DataParallel(model), verbosity=0)
    with pytest.raises(RuntimeError, match=r"body\.0\.weight.*half already.*leave out model\.half"):
        amp.initialize(Net().half(), verbosity=0)


def test_scale_loss_needs_initialize(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    model, optimizer = start(device, "O2")
    loss = model(batch(device)[0]).sum()
    stranger = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.raises(RuntimeError, match="optimizers that one amp"),
        amp.scale_loss(loss, stranger),
    ):
        pass
    with (
        pytest.raises(IndexError, match=r"loss_id: .*num_losses=1, got 1"),
        amp.scale_loss(loss, optimizer, loss_id=1),
    ):
        pass
    monkeypatch.delattr(_amp_state, "opt_properties")
    with (
        pytest.raises(RuntimeError, match=r"scale_loss before amp\.initialize"),
        amp.scale_loss(loss, optimizer),
    ):
        pass


class Weighted(nn.Module):
    """A criterion with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.ones(2))

    def forward(self, output: Tensor) -> Tensor:
        return (output * self.extra).mean() + self.extra.sum()


def test_optimizer_over_more_than_the_models(device: torch.device) -> None:
    """A criterion with parameters of its own has to be initialized, too."""
    model, criterion = Net().to(device), Weighted().to(device)
    optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.1)
    with pytest.raises(ValueError, match=r"SGD holds 1 parameter.*pass all modules it trains"):
        amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert type(model) is Net and type(optimizer) is torch.optim.SGD
    amp.initialize([model, criterion], optimizer, opt_level="O2", verbosity=0)
    _amp_state.loss_scalers[0]._loss_scale = 16.0
    with amp.scale_loss(criterion(model(batch(device)[0])), optimizer) as scaled:
        scaled.backward()
    masters = list(amp.master_params(optimizer))
    assert torch.allclose(masters[-1].grad, 1 + model(batch(device)[0]).mean(0) / 2, atol=1e-3)
    optimizer.step()
    assert masters[-1].dtype is FP32 and bool((masters[-1] != 1).all())


class Refusing(torch.optim.SGD):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return super().step(closure)


REFUSED = {
    "LBFGS": (lambda model: torch.optim.LBFGS(model.parameters()), "LBFGS calls its closure many"),
    "closure": (lambda model: Refusing(model.parameters(), lr=0.1), "Refusing needs a closure"),
    "foreign": (lambda model: torch.optim.SGD(Net().parameters(), lr=0.1), "not the model's"),
}


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("case", REFUSED)
def test_what_enable_refuses_initialize_refuses(case: str, level: str) -> None:
    make, text = REFUSED[case]
    model = Net()
    optimizer, before = make(model), values(model)
    with pytest.raises(ValueError, match=text):
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert type(model) is Net and same(values(model), before)
    assert not hasattr(optimizer, "_stepper") and not _amp_state.handle.is_active()


# a step


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("where", ["head.weight", "body.1.weight"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_inf_written_inside_the_block_skips_the_step(
    level: str,
    where: str,
    optimizer_class: Any,
    device: torch.device,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, optimizer = start(device, level, optimizer_class, verbosity=1)
    assert f"opt_level {level}" in capsys.readouterr().out
    before = [p.detach().clone() for p in model.parameters()]
    step(model, optimizer, batch(device), inf_in=model.get_parameter(where))
    assert same([p.detach() for p in model.parameters()], before)
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 32768.0, "unskipped": 0}}
    if device.type == "cuda":  # the line waits for nobody
        torch.cuda.synchronize()
    step(model, optimizer, batch(device))
    assert not same([p.detach() for p in model.parameters()], before)
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 32768.0, "unskipped": 1}}
    line, cause = capsys.readouterr().out.splitlines()
    assert line == "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0"
    assert f"parameter(s) were inf: {where}" in cause


@pytest.mark.parametrize("loss_scale", [1.0, 128.0])
def test_a_static_scale_is_not_said_to_be_reduced(
    loss_scale: float, device: torch.device, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = start(device, "O2", verbosity=1, loss_scale=loss_scale)
    for _ in range(2):
        step(model, optimizer, batch(device), inf_in=model.head.weight)
        if device.type == "cuda":
            torch.cuda.synchronize()
    step(model, optimizer, batch(device))
    out = capsys.readouterr().out
    line = f"Gradient overflow.  Skipping step, loss scaler 0 loss scale stays {loss_scale}"
    assert out.count(line) == 2 and "reducing" not in out


def test_each_cause_is_said_once(
    device: torch.device, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Printed where it is new; what the log has warned of is not printed as well."""
    model, optimizer = start(device, "O2", verbosity=1)
    capsys.readouterr()
    faults = ["inf", "inf", "nan loss", "inf", "nan loss", ""]
    for fault in faults:
        data = batch(device)
        if fault == "nan loss":
            with amp.scale_loss(model(data[0]).float().mean() * math.nan, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            where = model.head.weight if fault else None
            step(model, optimizer, data, inf_in=where)
        if device.type == "cuda":
            torch.cuda.synchronize()
    out = capsys.readouterr().out
    assert out.count("Gradient overflow.  Skipping step") == 5
    assert out.count("scale overflow: ") == 1
    told = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    long, short = (text for text in told if "forward fault" in text)
    assert "the loss itself was inf or NaN" in long and "as in step 3" in short
    assert "forward fault: " not in out


def test_a_skip_is_printed_though_the_log_does_not_know_it_yet(
    device: torch.device, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log drops records while many are under way."""
    monkeypatch.setattr(tritonamp.Amp, "history", [])
    model, optimizer = start(device, "O2", verbosity=1)
    step(model, optimizer, batch(device), inf_in=model.head.weight)
    if device.type == "cuda":
        torch.cuda.synchronize()
    step(model, optimizer, batch(device))
    assert capsys.readouterr().out.count("Gradient overflow.  Skipping step") == 1


def test_verbosity_0_prints_nothing(
    device: torch.device, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = start(device, "O2")
    for _ in range(2):
        step(model, optimizer, batch(device), inf_in=model.head.weight)
    assert capsys.readouterr().out == ""


def test_a_nonfinite_loss_lowers_the_scale_too_but_never_to_zero(device: torch.device) -> None:
    model, optimizer = start(device, "O2")
    before = values(model.head)
    x, y = batch(device)
    for halvings in range(1, 60):
        step(model, optimizer, (x * math.inf, y))
        assert _amp_state.loss_scalers[0].loss_scale() == max(2.0 ** (16 - halvings), 1.0)
    assert same(values(model.head), before)
    assert math.isfinite(step(model, optimizer, (x, y))) and not same(values(model.head), before)


@pytest.mark.parametrize(
    ("low", "high", "first", "last"), [(2.0**15, 2.0**24, 2.0**16, 2.0**15), (None, 8.0, 8.0, 1.0)]
)
def test_bounds_of_the_scale(
    low: Any, high: float, first: float, last: float, device: torch.device
) -> None:
    model, optimizer = start(device, "O2", min_loss_scale=low, max_loss_scale=high)
    assert _amp_state.loss_scalers[0].loss_scale() == first
    for _ in range(3):
        step(model, optimizer, batch(device), inf_in=model.head.weight)
    assert _amp_state.loss_scalers[0].loss_scale() == last
    _amp_state.loss_scalers[0]._unskipped = 1999
    step(model, optimizer, batch(device))
    assert _amp_state.loss_scalers[0].loss_scale() == min(2 * last, high)


def test_gradients_that_overflow_at_any_scale_leave_it_positive(device: torch.device) -> None:
    """apex went on to 0, and divided by it."""
    model, optimizer = start(device, "O1")
    for _ in range(50):
        step(model, optimizer, batch(device), inf_in=model.head.weight)
    assert _amp_state.loss_scalers[0].loss_scale() == 2.0**-24
    step(model, optimizer, batch(device))
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("level", LEVELS)
def test_a_static_scale_stays_and_skips(level: str, device: torch.device) -> None:
    """apex stepped into the inf."""
    model, optimizer = start(device, level, loss_scale=64.0)
    before = values(model.head)
    step(model, optimizer, batch(device), inf_in=model.head.weight)
    assert same(values(model.head), before)
    step(model, optimizer, batch(device))
    assert not same(values(model.head), before) and _amp_state.loss_scalers[0].loss_scale() == 64.0
    _amp_state.loss_scalers[0]._loss_scale = 4.0
    step(model, optimizer, batch(device), inf_in=model.head.weight)
    assert _amp_state.loss_scalers[0].loss_scale() == 4.0


class Sum(nn.Module):
    """Gradients that are exact in half: eighths."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(4.0) / 8 + start)

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def grads(optimizer: Any) -> list[list[float]]:
    return [p.grad.tolist() for p in amp.master_params(optimizer)]


@pytest.mark.parametrize("zero", ["none", "model", "optimizer"])
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_accumulation(level: str, delay: bool, zero: str, device: torch.device) -> None:
    model = Sum(1.0).to(device)
    x = torch.ones(4, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    _amp_state.loss_scalers[0]._loss_scale = 8.0
    for iteration in range(1, 3):
        for part in range(3):
            with amp.scale_loss(model(x), optimizer, delay_unscale=delay and part < 2) as scaled:
                assert scaled.dtype is FP32
                scaled.backward()
            delayed = delay and part < 2
            assert model.weight.grad is not None
            assert model.weight.grad.tolist() == [(part + 1.0) * (8 if delayed else 1)] * 4
            if not delayed:
                assert grads(optimizer) == [[part + 1.0] * 4]
        optimizer.step()
        wanted = torch.arange(4.0) / 8 + 1.0 - iteration * 3 / 8
        assert torch.equal(model.weight.detach().cpu().float(), wanted)
        if zero == "none":
            model.weight.grad = None
        else:
            {"model": model, "optimizer": optimizer}[zero].zero_grad()


@pytest.mark.parametrize("own_scales", [False, True])
@pytest.mark.parametrize("bad", [None, 0, 1, 2])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_one_overflow_skips_the_optimizers_that_it_feeds(
    level: str, bad: int | None, own_scales: bool, device: torch.device
) -> None:
    """Loss 0 feeds the first optimizer, loss 1 the second, loss 2 both, through a shared model."""
    models = [Sum(i + 1.0).to(device) for i in range(3)]
    optimizers = [
        torch.optim.SGD([*models[0].parameters(), *models[2].parameters()], lr=0.125),
        torch.optim.SGD(models[1].parameters(), lr=0.125),
    ]
    num_losses = 3 if own_scales else 1
    models, optimizers = amp.initialize(
        models, optimizers, opt_level=level, num_losses=num_losses, verbosity=0
    )
    for i in range(num_losses):
        _amp_state.loss_scalers[i]._loss_scale = 4.0 * 4**i
    x = torch.ones(4, device=device)
    fed = [[optimizers[0]], [optimizers[1]], optimizers]
    losses = [models[0](x), models[1](x), models[0](x) + models[1](x) + models[2](x)]
    before = [values(m) for m in models]
    for i, loss in enumerate(losses):
        with amp.scale_loss(loss, fed[i], loss_id=i if own_scales else 0) as scaled:
            scaled.backward()
            if i == bad:
                models[1 if i == 1 else 0].weight.grad[0] = math.inf
    for optimizer in optimizers:
        optimizer.step()
    skipped = [bad in (0, 2), bad in (1, 2), bad in (0, 2)]
    assert [same(values(m), b) for m, b in zip(models, before, strict=True)] == skipped
    for i, moved in enumerate((2.0, 2.0, 1.0)):
        if not skipped[i]:
            assert torch.equal(values(models[i])[0], before[i][0] - moved / 8)
    if own_scales:
        scales = [scaler.loss_scale() for scaler in _amp_state.loss_scalers]
        assert scales == [4.0 * 4**i / (2 if i == bad else 1) for i in range(3)]


@pytest.mark.parametrize("level", LEVELS)
def test_clipping_over_master_params(level: str, device: torch.device) -> None:
    model = Sum(1.0).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    _amp_state.loss_scalers[0]._loss_scale = 16.0
    with amp.scale_loss(model(torch.ones(4, device=device)), optimizer) as scaled:
        scaled.backward()
    norm = nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
    assert norm.item() == 2.0
    optimizer.step()
    wanted = torch.arange(4.0) / 8 + 0.5
    assert torch.allclose(
        model.weight.detach().cpu().float(), wanted, atol=1e-6 if level != "O3" else 1e-3
    )


@pytest.mark.parametrize("level", LEVELS)
def test_groups_added_later_are_updated(level: str, device: torch.device) -> None:
    first, second = Sum(1.0).to(device), Sum(2.0).to(device)
    optimizer = torch.optim.SGD(first.parameters(), lr=0.125)
    [first, second], optimizer = amp.initialize(
        [first, second], optimizer, opt_level=level, verbosity=0
    )
    _amp_state.loss_scalers[0]._loss_scale = 4.0
    x = torch.ones(4, device=device)
    for i in range(3):
        if i == 1:
            optimizer.add_param_group({"params": second.parameters(), "lr": 0.25})
        optimizer.zero_grad()
        with amp.scale_loss(first(x) + second(x), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    assert torch.equal(values(first)[0].cpu(), torch.arange(4.0) / 8 + 1 - 3 / 8)
    assert torch.equal(values(second)[0].cpu(), torch.arange(4.0) / 8 + 2 - 2 / 4)


@pytest.mark.parametrize("level", LEVELS)
def test_half_parameters_that_a_model_came_with(level: str, device: torch.device) -> None:
    """They stay half, with FP32 masters under O2."""
    _amp_state.allow_incoming_model_not_fp32 = True
    model = nn.ModuleList([Sum(1.0), Sum(2.0).half()]).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-12)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, cast_model_type=False, verbosity=0
    )
    x = torch.ones(4, device=device)
    for _ in range(4):
        _amp_state.loss_scalers[0]._loss_scale = 4.0
        with amp.scale_loss(model[0](x) + model[1](x).float(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [p.dtype for p in model.parameters()] == [FP32, FP16]
    masters = [p.detach().cpu() for p in amp.master_params(optimizer)]
    assert torch.equal(masters[0], torch.arange(4.0) / 8 + 1 - 2.0**-10)
    if level == "O2":  # half above 2 has steps of 2^-9: without masters nothing would move
        assert torch.equal(masters[1], torch.arange(4.0) / 8 + 2 - 2.0**-10)
        assert torch.equal(model[1].weight.detach().cpu(), masters[1].half())


# state


def test_state_dict_round_trip(device: torch.device) -> None:
    model, optimizer = start(device, "O2", num_losses=2)
    step(model, optimizer, batch(device))
    _amp_state.loss_scalers[1]._loss_scale = 2.0**10
    state = amp.state_dict()
    assert list(state) == ["loss_scaler0", "loss_scaler1"]
    assert state["loss_scaler0"] == {"loss_scale": 65536.0, "unskipped": 1}
    assert state["loss_scaler1"] == {"loss_scale": 1024.0, "unskipped": 0}
    start(device, "O2", num_losses=2)
    amp.load_state_dict(state)
    assert amp.state_dict() == state
    assert amp.state_dict(destination={"mine": 1})["mine"] == 1


@pytest.mark.parametrize("entries", [1, 3])
def test_states_of_another_number_of_losses_warn(
    entries: int, capsys: pytest.CaptureFixture[str]
) -> None:
    start(torch.device("cpu"), "O2", num_losses=2)
    state = {f"loss_scaler{i}": {"loss_scale": 2.0**i, "unskipped": i} for i in range(entries)}
    with pytest.warns(
        UserWarning, match=f"contains {entries} entries, while 2 loss_scalers are used"
    ):
        amp.load_state_dict(state)
    assert "Warning: state_dict contains" in capsys.readouterr().out
    assert [s.loss_scale() for s in _amp_state.loss_scalers] == [
        1.0,
        2.0 if entries == 3 else 65536.0,
    ]


def test_unknown_keys_raise_and_change_nothing() -> None:
    start(torch.device("cpu"), "O2", num_losses=2)
    state = {"loss_scaler0": {"loss_scale": 2.0, "unskipped": 3}, "other": 1}
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"other"'):
        amp.load_state_dict(state)
    assert _amp_state.loss_scalers[0].loss_scale() == 65536.0


@pytest.mark.parametrize("load_first", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_resuming_gives_the_bits_of_not_stopping(
    level: str, load_first: bool, device: torch.device
) -> None:
    """apex lost the masters of O2."""
    data = batch(device)
    model, optimizer = start(device, level, torch.optim.Adam)
    for _ in range(3):
        step(model, optimizer, data)
    checkpoint = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    state = amp.state_dict()
    losses = [step(model, optimizer, data) for _ in range(3)]
    resumed = Net().to(device)
    resumed_optimizer: Any = torch.optim.Adam(resumed.parameters(), lr=0.05)
    for load in (load_first, not load_first):
        if load:
            resumed.load_state_dict(checkpoint["model"])
            resumed_optimizer.load_state_dict(checkpoint["optimizer"])
        else:
            resumed, resumed_optimizer = amp.initialize(
                resumed, resumed_optimizer, opt_level=level, verbosity=0
            )
    amp.load_state_dict(state)
    assert [step(resumed, resumed_optimizer, data) for _ in range(3)] == losses
    assert same(values(resumed), values(model))


def test_weights_loaded_between_steps_stay(device: torch.device) -> None:
    """In apex the masters overwrote them at the next step."""
    model, optimizer = start(device, "O2")
    step(model, optimizer, batch(device))
    wanted = {name: torch.full_like(value, 0.3) for name, value in model.state_dict().items()}
    model.load_state_dict(wanted)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    step(model, optimizer, batch(device))
    assert all(bool((p == 0.3).all()) for p in amp.master_params(optimizer))


@pytest.mark.parametrize("level", LEVELS)
def test_scripts_put_masters_back_by_hand(level: str, device: torch.device) -> None:
    """As BERT's resume does, which has the masters made first."""
    model, optimizer = start(device, level)
    optimizer._lazy_init_maybe_master_weights()
    optimizer._amp_stash.lazy_init_called = True
    half = [p for p in model.parameters() if p.dtype is FP16]
    found = optimizer._amp_stash.all_fp32_from_fp16_params
    masters = list(amp.master_params(optimizer))
    if level == "O2":
        assert [m.shape for m in found] == [p.shape for p in half]
        assert all(m.dtype is FP32 and any(m is p for p in masters) for m in found)
    else:
        assert found == []
    saved = [master.detach() + 2.0**-20 for master in masters]  # less than half can hold
    for master, value in zip(masters, saved, strict=True):
        master.data.copy_(value)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    step(model, optimizer, batch(device))
    assert same([p.detach() for p in amp.master_params(optimizer)], saved)

    model, optimizer = start(device, level)
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0), opt_level=level, verbosity=0)
    names = "_amp_stash", "_amp_lazy_init", "_lazy_init_maybe_master_weights"
    assert not any(hasattr(optimizer, name) for name in names)  # its run has ended


# defects of apex


@pytest.mark.parametrize("level", LEVELS)
def test_copies_and_pickles_run_on_their_own_weights(level: str, device: torch.device) -> None:
    model, optimizer = start(device, level)
    step(model, optimizer, batch(device))
    x = batch(device)[0]
    model.eval()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(file, weights_only=False),
    ]
    wanted = model(x)
    plain = Net().to(device).eval()
    plain.load_state_dict(model.state_dict())
    # a pickle is the plain model's
    for other, expected in zip(copies, [wanted, plain(x), plain(x)], strict=True):
        assert torch.equal(other(x), expected)
        with torch.no_grad():
            for param in other.parameters():
                param.zero_()
        assert not other(x).any() and torch.equal(model(x), wanted)


@pytest.mark.parametrize("level", LEVELS)
def test_a_model_can_be_initialized_again(level: str, device: torch.device) -> None:
    model, optimizer = start(device, level)
    step(model, optimizer, batch(device))
    with pytest.raises(RuntimeError, match=r"initialized before.*only once"):
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    cls, before = type(model), values(model)
    for _ in range(3):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert type(model) is cls and same(values(model), before)
    assert len(model._forward_pre_hooks) == (0 if level == "O1" else 1)
    assert math.isfinite(step(model, optimizer, batch(device))) and not same(values(model), before)


def test_one_of_two_models_is_not_initialized_again_alone() -> None:
    models = [Net(), Sum(1.0)]
    amp.initialize(models, opt_level="O2", verbosity=0)
    with pytest.raises(RuntimeError, match="together with Sum: initialize all of them again"):
        amp.initialize(models[0], opt_level="O2", verbosity=0)


@pytest.mark.parametrize("level", ["O0", "O1", "O3"])
def test_a_plain_backward_trains_where_parameters_are_their_own_masters(
    level: str, device: torch.device
) -> None:
    model = Sum(1.0).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(4, device=device)).backward()
        optimizer.step()
    assert torch.equal(values(model)[0].cpu(), torch.arange(4.0) / 8 + 1 - 2 / 8)


def test_a_plain_backward_is_refused_under_o2(device: torch.device) -> None:
    """apex trained nothing, and said nothing."""
    model, optimizer = start(device, "O2")
    F.cross_entropy(model(batch(device)[0]), batch(device)[1]).backward()
    with pytest.raises(RuntimeError, match=r"plain loss\.backward\(\)"):
        optimizer.step()


def test_a_scheduler_drives_the_masters(device: torch.device) -> None:
    model, optimizer = start(device, "O2")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(3):
        step(model, optimizer, batch(device))
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05 / 8


@pytest.mark.parametrize("level", LEVELS)
def test_larc_around_the_optimizer(level: str, device: torch.device) -> None:
    from tritonamp.apex.parallel import LARC

    model = Net().to(device)
    optimizer = LARC(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    model, result = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert result is optimizer
    losses = [step(model, optimizer, batch(device)) for _ in range(10)]
    assert losses[-1] < losses[0]


# the API before amp.initialize


@pytest.mark.parametrize("wrapped", [False, True])
def test_training_with_a_handle(wrapped: bool, device: torch.device) -> None:
    torch.manual_seed(0)
    handle = amp.init()
    model = Net().to(device)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05)
    if wrapped:
        optimizer = handle.wrap_optimizer(optimizer, num_loss=2)
    x, y = batch(device)
    before = values(model.head)
    for i in range(6):
        optimizer.zero_grad()
        for half in (slice(0, 8), slice(8, 16)) if wrapped else (slice(0, 16),):
            loss = F.cross_entropy(model(x[half]), y[half])
            block = optimizer.scale_loss(loss) if wrapped else handle.scale_loss(loss, optimizer)
            with block as scaled:
                scaled.backward()
                if i == 0:
                    model.head.weight.grad[0] = math.inf
        optimizer.step()
        assert same(values(model.head), before) == (i == 0)
    assert optimizer.param_groups[0]["lr"] == 0.05


# the alias


def test_install_gives_the_name_apex_to_this_package(tmp_path: Path) -> None:
    code = """
        import sys, tritonamp.apex.amp
        assert not {"apex", "amp_C", "apex_C"} & sys.modules.keys()
        try:
            import apex
        except ImportError:
            pass
        else:
            sys.exit("apex is installed here, nothing to try")
        tritonamp.apex.install()
        tritonamp.apex.install()
        import apex, apex.amp, amp_C, apex_C
        from apex import amp
        from apex.amp import _amp_state
        from apex.optimizers import FusedAdam
        from apex.parallel import DistributedDataParallel as DDP
        from apex.parallel.distributed import flat_dist_call
        assert amp_C is apex.amp_C and apex_C is apex.apex_C
        assert flat_dist_call is tritonamp.apex.parallel.distributed.flat_dist_call
        assert apex is tritonamp.apex and amp is tritonamp.apex.amp is sys.modules["apex.amp"]
        assert _amp_state is tritonamp.apex.amp._amp_state
        assert FusedAdam is tritonamp.apex.optimizers.FusedAdam
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_install_refuses_to_replace_another_apex(monkeypatch: pytest.MonkeyPatch) -> None:
    other = type(sys)("apex")
    other.__file__ = "/somewhere/apex/__init__.py"
    monkeypatch.setitem(sys.modules, "apex", other)
    with pytest.raises(RuntimeError, match="imported already, from /somewhere"):
        apex.install()


def test_a_folder_named_apex_is_no_apex(tmp_path: Path) -> None:
    """A clone next to the script has its package one folder further down."""
    (tmp_path / "apex" / "apex").mkdir(parents=True)
    code = """
        import apex
        assert apex.__file__ is None
        import tritonamp.apex
        tritonamp.apex.install()
        from apex import amp
        assert amp is tritonamp.apex.amp
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_parts_are_imported_when_asked_for() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing': it has amp, "):
        _ = apex.nothing
