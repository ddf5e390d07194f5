"""Models that arrive in half, in part or as a whole: what trains gets FP32 values, what is frozen
stays as it is.
"""

import copy
import io
import logging
from functools import partial
from typing import Any

import pytest
import torch
from helpers import same, storage_bytes, take_step
from runs import LEVELS, named
from small_models import Language
from torch import Tensor, nn

import tritonamp

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
HALVES = [FP16, BF16]
OPTIMIZERS = {
    name: partial(make, lr=1e-2)
    for name, make in named("AdamW", "SGD momentum", "Adagrad", "our AdamW").items()
}


class Lora(nn.Module):
    """A frozen linear layer with a low-rank update that trains."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x.to(self.down.weight.dtype))).to(x.dtype)


def make(device: torch.device, half: torch.dtype | None = None, seed: int = 0) -> Language:
    torch.manual_seed(seed)
    return Language().to(device).to(half)


def lora(device: torch.device, half: torch.dtype = FP16, width: int = 16) -> nn.Module:
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, width))
    base.to(half).requires_grad_(False)
    base[0], base[2] = Lora(base[0]), Lora(base[2])
    return base.to(device)


def tokens(device: torch.device, i: int) -> Tensor:
    return torch.randint(0, 7, (16,), generator=torch.Generator().manual_seed(i)).to(device)


def train(model: nn.Module, optimizer: Any, amp: Any, steps: range) -> list[Tensor]:
    losses = []
    for i in steps:
        x = tokens(next(model.parameters()).device, i)
        loss = nn.functional.cross_entropy(model(x), x)
        amp.backward(loss)
        amp.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    return losses


def scaling(level: str, device: torch.device) -> dict[str, Any]:
    return {} if level == "O0" else {"scaler": tritonamp.GradScaler(device.type, 256.0)}


def states(model: nn.Module, optimizer: Any) -> list[Tensor]:
    of_optimizer = [
        t for s in optimizer.state_dict()["state"].values() for t in s.values() if t is not None
    ]
    return [*model.state_dict().values(), *of_optimizer]


# what trains


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_the_same_bits_as_from_fp32(
    handles: Any, device: torch.device, level: str, half: torch.dtype, name: str
) -> None:
    results = []
    for model in (make(device, half), make(device, half).float()):
        optimizer = OPTIMIZERS[name](model.parameters())
        amp = handles(model, optimizer, level=level, dtype=half, **scaling(level, device))
        losses = train(model, optimizer, amp, range(6))
        assert amp.stats()["skipped"] == 0
        results.append([*losses, *states(model, optimizer), *amp.master_params()])
    assert same(*results)
    assert {t.dtype for t in results[0] if t.is_floating_point()} == {FP32}


@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_where_values_are_stored(
    handles: Any, device: torch.device, level: str, half: torch.dtype
) -> None:
    model = make(device, half)
    params, values = list(model.parameters()), copy.deepcopy(model.state_dict())
    pointers = {name: p.data_ptr() for name, p in model.named_parameters()}
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    amp = handles(model, optimizer, level=level)
    assert amp.policy.dtype is half
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    for name, param in model.named_parameters():
        stays = level == "O3" or (level == "O2" and "norm" not in name)
        assert param.dtype is (half if stays else FP32), name
        assert (param.data_ptr() == pointers[name]) == stays, name
        assert torch.equal(param.float(), values[name].float())
    assert model.angles.dtype is (half if level == "O3" else FP32)
    assert model.batch_norm.running_var.dtype is (half if level == "O3" else FP32)
    masters = [m for m in amp.master_params() if level != "O3"]
    assert all(m.dtype is FP32 for m in masters)
    for name, value in model.state_dict().items():
        assert torch.equal(value.float(), values[name].float()), name


def test_an_optimizer_that_has_stepped_on_half_parameters(
    handles: Any, device: torch.device
) -> None:
    """Its state goes on, in FP32."""
    results = []
    for wide in (False, True):
        for name in OPTIMIZERS:
            model = make(device, FP16)
            optimizer = OPTIMIZERS[name](model.parameters())
            optimizer.param_groups[0]["eps"] = 1e-3  # 1e-8 is 0 in half
            for i in range(2):
                x = tokens(device, i)
                nn.functional.cross_entropy(model(x).float(), x).backward()
                optimizer.step()
                optimizer.zero_grad()
            before = copy.deepcopy(optimizer.state_dict()["state"])
            if wide:
                for param in model.parameters():
                    state = optimizer.state[param]
                    master = state.pop("master_param", param.detach().float())
                    state |= {k: v.float() for k, v in state.items() if v is not None}
                    param.data = master.clone()
                    param.grad_dtype = FP32
                for module in (model, model.batch_norm):
                    for buffer in module.buffers(recurse=False):
                        buffer.data = buffer.float() if buffer.is_floating_point() else buffer
            amp = handles(model, optimizer, level="O1", dtype=FP16)
            for number, state in optimizer.state_dict()["state"].items():
                for key, value in state.items():
                    assert torch.equal(value.float(), before[number][key].float()), (name, key)
                    assert value.dtype is FP32
            train(model, optimizer, amp, range(2, 5))
            results.append(states(model, optimizer))
    half = len(OPTIMIZERS)
    assert all(same(a, b) for a, b in zip(results[:half], results[half:], strict=True))


def test_a_state_that_torch_has_rounded_is_warned_of(
    handles: Any, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    """Loaded before enable it is half; loaded after it is exact."""
    model = make(device, FP16)
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    amp = handles(model, optimizer, level="O2")
    train(model, optimizer, amp, range(3))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for early in (True, False):
        caplog.clear()
        resumed = make(device, FP16, seed=1)
        other = OPTIMIZERS["AdamW"](resumed.parameters())
        if early:
            other.load_state_dict(saved[1])
        handles(resumed, other, level="O2")
        warned = [text for text in caplog.messages if "load it again after" in text]
        assert len(warned) == early
        resumed.load_state_dict(saved[0])
        other.load_state_dict(saved[1])
        assert same(states(model, optimizer), states(resumed, other))


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_masters_of_our_optimizer_come_along_and_go_back(
    handles: Any, device: torch.device, level: str
) -> None:
    model = make(device, FP16)
    optimizer = tritonamp.optim.AdamW(model.parameters(), lr=1e-3)

    def step(i: int) -> None:
        x = tokens(device, i)
        (nn.functional.cross_entropy(model(x).float(), x) * 64).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    masters = [optimizer.state[p]["master_param"].clone() for p in model.parameters()]
    assert not same(masters, [p.detach().float() for p in model.parameters()])
    amp = handles(model, optimizer, level=level, dtype=FP16)
    assert same(masters, [m.detach() for m in amp.master_params()])
    assert not any("master_param" in state for state in optimizer.state.values())
    train(model, optimizer, amp, range(1, 3))
    trained = [m.detach().clone() for m in amp.master_params()]
    amp.disable()
    assert same(trained, [optimizer.state[p]["master_param"] for p in model.parameters()])
    assert same([t.half() for t in trained], [p.detach() for p in model.parameters()])
    assert all(state["exp_avg"].dtype is FP32 for state in optimizer.state.values())
    step(3)


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.ASGD])
@pytest.mark.parametrize("level", LEVELS)
def test_numbers_in_the_state_are_not_rounded(
    handles: Any, device: torch.device, level: str, kind: Any
) -> None:
    """NAdam's mu_product, ASGD's eta and mu: FP32 in torch, whatever the parameters are."""
    model = make(device, FP16)
    optimizer = kind(model.parameters(), lr=1e-2)
    nn.functional.cross_entropy(model(tokens(device, 0)).float(), tokens(device, 0)).backward()
    optimizer.step()
    before = copy.deepcopy([optimizer.state[p] for p in model.parameters()])
    handles(model, optimizer, level=level, dtype=FP16).disable()
    for old, param in zip(before, model.parameters(), strict=True):
        new = optimizer.state[param]
        assert {k: v.dtype for k, v in new.items()} == {k: v.dtype for k, v in old.items()}
        assert all(torch.equal(new[key], value) for key, value in old.items())


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_state_of_what_trains_again_later(
    handles: Any, device: torch.device, level: str, name: str
) -> None:
    """Parameters that have trained, and are frozen during enable, go on with FP32 state."""
    results = []
    for wide in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).to(device, FP16)
        optimizer = OPTIMIZERS[name](model.parameters())
        optimizer.param_groups[0]["eps"] = 1e-3
        for i in range(2):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(i)).to(device)
            (model(x.half()).float().square().mean() * 64).backward()
            optimizer.step()
            optimizer.zero_grad()
        if wide:
            for param in model.parameters():
                state = optimizer.state[param]
                master = state.pop("master_param", param.detach().float())
                state |= {k: v.float() for k, v in state.items() if v is not None}
                param.data = master.clone()
                param.grad_dtype = FP32
        model[0].requires_grad_(False)
        amp = handles(model, optimizer, level=level, dtype=FP16, **scaling(level, device))
        model[0].requires_grad_(True)
        for i in range(3):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(i)).to(device)
            take_step(amp, optimizer, model(x).square().mean())
        assert amp.stats()["skipped"] == 0
        numbered = [optimizer.state[m] for m in amp.master_params()]
        found = [t for state in numbered for t in state.values() if t is not None]
        assert {t.dtype for t in found} == {FP32}
        assert not any("master_param" in state for state in numbered)
        results.append([*model.state_dict().values(), *found])
    assert same(*results)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_masters_of_what_stays_frozen_are_kept(
    handles: Any, device: torch.device, level: str
) -> None:
    model = nn.Linear(8, 4).to(device, FP16)
    optimizer = tritonamp.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(2, 8, device=device, dtype=FP16)).float().sum().backward()
    optimizer.step()
    master = optimizer.state[model.weight]["master_param"].clone()
    assert not torch.equal(master, model.weight.float())
    model.weight.requires_grad_(False)
    handles(model, optimizer, level=level).disable()
    assert torch.equal(optimizer.state[model.weight]["master_param"], master)


@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("name", ["AdamW", "SGD momentum", "Adagrad"])
@pytest.mark.parametrize("level", LEVELS)
def test_disable_gives_back_the_dtype_that_came(
    handles: Any, device: torch.device, level: str, name: str, half: torch.dtype
) -> None:
    model = make(device, half)
    optimizer = OPTIMIZERS[name](model.parameters())
    optimizer.param_groups[0]["eps"] = 1e-3
    amp = handles(model, optimizer, level=level, dtype=FP16)
    train(model, optimizer, amp, range(3))
    trained = {n: t.clone() for n, t in model.state_dict().items()}
    params = list(model.parameters())
    amp.disable()
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    for n, value in model.state_dict().items():
        assert value.dtype is (half if value.is_floating_point() else torch.int64), n
        assert torch.equal(value, trained[n].to(value.dtype)), n
    x = tokens(device, 9)  # plain torch goes on
    nn.functional.cross_entropy(model(x).float(), x).backward()
    optimizer.step()
    assert {p.dtype for p in model.parameters()} == {half}


@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_disable_gives_back_gradients_of_the_dtype_that_came(
    handles: Any, device: torch.device, level: str, half: torch.dtype
) -> None:
    model = make(device, half)
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    optimizer.param_groups[0]["eps"] = 1e-3
    pointer = model.hidden.weight.data_ptr()
    amp = handles(model, optimizer, level=level, **scaling(level, device))
    x = tokens(device, 0)
    amp.backward(nn.functional.cross_entropy(model(x), x))
    amp.unscale_()
    true = [m.grad.detach().clone() for m in amp.master_params()]
    amp.disable()
    assert {p.grad.dtype for p in model.parameters()} == {half}
    assert same([grad.to(half) for grad in true], [p.grad for p in model.parameters()])
    assert (model.hidden.weight.data_ptr() == pointer) == (level in ("O2", "O3"))
    optimizer.step()
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x).float(), x).backward()
    optimizer.step()


# bfloat16 for float16


def test_bfloat16_values_for_float16(
    handles: Any, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    model = make(device, BF16)
    with torch.no_grad():
        model.hidden.weight[0, :3] = torch.tensor([2.0**-20, 2.0**-30, -(2.0**-15)])
        model.hidden.weight[1, 1] = 65280.0  # the largest that both formats hold
        model.hidden.bias[1] = 2.0**-40
    loaded = {name: p.detach().float() for name, p in model.named_parameters()}
    optimizer = OPTIMIZERS["SGD momentum"](model.parameters())
    with caplog.at_level(logging.WARNING, "tritonamp"):
        amp = handles(model, optimizer, level="O2", dtype=FP16)
    small = "hidden.weight 2 and 1, hidden.bias 0 and 1"
    (line,) = [r.getMessage() for r in caplog.records if "subnormal" in r.getMessage()]
    others = [part for part in line.split(": ")[1].split(", ") if "hidden" in part]
    assert ", ".join(others) == small
    for name, param in model.named_parameters():
        assert torch.equal(param.detach().float(), loaded[name].to(param.dtype).float()), name
    values = {name: t for name, t in model.state_dict().items() if name in loaded}
    assert all(torch.equal(value, loaded[name]) for name, value in values.items())
    amp.disable()
    assert all(torch.equal(p.float(), loaded[n]) for n, p in model.named_parameters())


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_bfloat16_values_beyond_float16(
    handles: Any, device: torch.device, level: str, frozen: bool
) -> None:
    model = make(device, BF16).requires_grad_(not frozen)
    model.norm.requires_grad_(True)
    with torch.no_grad():
        model.hidden.weight[2, 3] = -70144.0
        model.hidden.bias[2] = 65536.0
    optimizer = OPTIMIZERS["SGD momentum"](p for p in model.parameters() if p.requires_grad)
    before = [(p.dtype, p.data_ptr()) for p in model.parameters()]
    text = (
        r"70144 in 'hidden.weight' and 1 more: use dtype=torch.bfloat16, or keep .*"
        r"fp32_modules=\['hidden'\]"
    )
    with pytest.raises(ValueError, match=text):
        tritonamp.enable(model, optimizer, level=level, dtype=FP16)
    assert before == [(p.dtype, p.data_ptr()) for p in model.parameters()]
    assert not hasattr(model, "_tritonamp")
    handles(model, optimizer, level=level, dtype=FP16, fp32_modules=["hidden"])
    assert model.hidden.weight.dtype is FP32 and model.hidden.weight[2, 3].item() == -70144.0


def test_check_predicts_what_float16_makes_of_bfloat16(caplog: pytest.LogCaptureFixture) -> None:
    device = torch.device("cpu")
    model, batch = make(device, BF16), (tokens(device, 0),)
    with torch.no_grad():
        model.hidden.weight[2, 3] = 2.0**-20
    forecast = tritonamp.check(model, None, batch, dtype=FP16)
    assert not forecast.problems
    (finding,) = [f for f in forecast.findings if f.kind == "bfloat16"]
    with caplog.at_level(logging.WARNING, "tritonamp"):
        tritonamp.enable(model, level="O2", dtype=FP16).disable()
    assert finding.why in [r.getMessage() for r in caplog.records]
    with torch.no_grad():
        model.hidden.weight[2, 3] = -70144.0
    forecast = tritonamp.check(model, None, batch, dtype=FP16)
    assert {f.where: f.kind for f in forecast.problems}["hidden.weight"] == "overflow"
    assert not tritonamp.check(model, None, batch).problems  # bfloat16, as it was loaded


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_no_module_is_named_for_a_value_of_the_model_itself(
    handles: Any, device: torch.device, level: str
) -> None:
    model = nn.Linear(2, 2).to(device, BF16)
    with torch.no_grad():
        model.bias[0] = 70144.0
    with pytest.raises(ValueError, match=r"70144 in 'bias': use dtype=torch.bfloat16$"):
        tritonamp.enable(model, level=level, dtype=FP16)
    handles(model, level=level, dtype=BF16)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_norm_may_hold_what_float16_cannot(
    handles: Any, device: torch.device, level: str
) -> None:
    model = make(device, BF16)
    with torch.no_grad():
        model.norm.weight[0] = 70144.0
    handles(model, level=level, dtype=FP16)
    assert model.norm.weight.dtype is FP32


def test_the_dtype_of_the_model_is_the_default(handles: Any, device: torch.device) -> None:
    for half in HALVES:
        amp = handles(make(device, half), level="O1")
        assert amp.policy.dtype is half
        assert amp.policy.loss_scale == ("dynamic" if half is FP16 else 1.0)
    assert handles(make(device), level="O2").policy.dtype is FP16
    assert handles(lora(device, BF16), level="O2").policy.dtype is BF16
    model = lora(device, BF16)  # what trains decides, however small
    model[0].up.half(), model[0].down.half(), model[2].up.half(), model[2].down.half()
    assert handles(model, level="O2").policy.dtype is FP16
    assert handles(make(device, BF16), level=tritonamp.O2).policy.dtype is FP16
    assert handles(make(device, FP16), level="O5").policy.dtype is BF16


def test_the_dtype_of_quantised_modules_is_the_default(handles: Any, device: torch.device) -> None:
    for said, other, dtype in [
        (BF16, FP32, BF16),
        (FP32, FP32, FP16),
        (None, FP32, FP16),
        (FP16, BF16, BF16),
    ]:
        model = nn.Sequential(IntegerLinear(), nn.Linear(4, 4, dtype=other)).to(device)
        model[0].compute_dtype = said
        assert handles(model, level="O1").policy.dtype is dtype


def test_bfloat16_where_the_device_lacks_it(
    handles: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tritonamp.kernels.device.capability", lambda device: (7, 0))
    model = make(torch.device("cpu"), BF16)
    with caplog.at_level(logging.WARNING, "tritonamp"):
        amp = handles(model, level="O2", backend="eager")
    assert amp.policy.dtype is FP16 and amp.policy.loss_scale == "dynamic"
    assert "loaded in bfloat16, which cpu does not compute in: float16 is used" in caplog.text


# what is frozen


@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("dtype", [FP16, BF16, None], ids=str)
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_frozen_half_parameters_stay(
    handles: Any, device: torch.device, level: str, dtype: torch.dtype | None, half: torch.dtype
) -> None:
    model = lora(device, half)
    optimizer = OPTIMIZERS["AdamW"](model.parameters())  # frozen ones, too, as people write it
    frozen = {n: (p.data_ptr(), half) for n, p in model.named_parameters() if not p.requires_grad}
    assert len(frozen) == 6
    amp = handles(model, optimizer, level=level, dtype=dtype)
    x = torch.randn(8, 16, device=device)
    before = [m.detach().clone() for m in amp.master_params()]
    for _ in range(3):
        take_step(amp, optimizer, model(x).float().square().mean())
    assert amp.stats()["skipped"] == 0
    moved = [not torch.equal(a, b) for a, b in zip(before, amp.master_params(), strict=True)]
    assert moved == [p.requires_grad for p in model.parameters()]
    named = dict(model.named_parameters())
    state = model.state_dict()
    for name, param in named.items():
        if name not in frozen:
            assert state[name].dtype is FP32
        elif level == "O0":
            assert param.dtype is FP32
        else:
            assert (param.data_ptr(), param.dtype) == frozen[name]
            assert state[name].dtype is half
    amp.disable()
    assert {p.dtype for n, p in model.named_parameters() if n in frozen} == {half}
    assert {p.dtype for n, p in model.named_parameters() if n not in frozen} == {FP32}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(
    ("input", "frozen"),  # torch takes FP16 inputs where all is FP16
    [(FP32, "weight bias"), (BF16, "weight bias"), (FP32, "weight"), (FP16, "bias")],
    ids=str,
)
@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.InstanceNorm1d])
def test_frozen_half_norms_with_running_statistics(
    handles: Any,
    device: torch.device,
    kind: Any,
    input: torch.dtype,
    training: bool,
    frozen: str,
) -> None:
    """They take inputs of any dtype, and compute as in FP32; statistics are rounded once."""
    norm = kind(4, affine=True, track_running_stats=True).to(device, FP16).train(training)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.1, 1, 4))
        norm.running_mean.copy_(torch.linspace(-1, 1, 4))
    for name in frozen.split():
        norm.get_parameter(name).requires_grad_(False)
    plain = copy.deepcopy(norm).float()
    handles(norm, level="O1", cast_outputs=None)
    x = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0)).to(device, input)
    output, expected = norm(x), plain(x.float())
    assert output.dtype is input and torch.equal(output, expected.to(input))
    assert norm.running_mean.dtype is FP16
    assert torch.equal(norm.running_mean, plain.running_mean.half())
    assert torch.equal(norm.running_var, plain.running_var.half())
    assert torch.equal(norm.num_batches_tracked, plain.num_batches_tracked)


@pytest.mark.parametrize("frozen", ["original0", "original1"])
def test_weight_norm_frozen_in_part(handles: Any, device: torch.device, frozen: str) -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(8, 4)).to(device, FP16)
    parts = layer.parametrizations.weight
    parts.get_parameter(frozen).requires_grad_(False)
    weight = torch._weight_norm(parts.original1.float(), parts.original0.float())
    handles(layer, level="O1")
    x = torch.ones(2, 8, device=device, dtype=FP16)
    expected = nn.functional.linear(x.float(), weight.half().float(), layer.bias.half().float())
    assert torch.equal(layer(x), expected.half().float())


@pytest.mark.parametrize("function", [torch.lerp, torch.linalg.cross])
@pytest.mark.parametrize("frozen", [0, 1])
def test_ops_that_take_one_dtype_of_what_is_frozen_and_what_trains(
    handles: Any, device: torch.device, frozen: int, function: Any
) -> None:
    model = nn.ParameterList([torch.arange(3.0), torch.arange(3.0) ** 2]).to(device, FP16)
    extra = [torch.full((3,), 0.25, device=device)] if function is torch.lerp else []
    expected = function(*(p.detach().float() for p in model), *extra)
    model[frozen].requires_grad_(False)
    amp = handles(model, level="O1")
    with amp.autocast():
        assert torch.equal(function(*model, *extra), expected)


def test_fp32_modules_and_healing_take_frozen_half_parameters(
    handles: Any, device: torch.device
) -> None:
    x = torch.randn(8, 16, device=device)
    for healed in (True, False):
        model = lora(device)
        optimizer = OPTIMIZERS["SGD momentum"](model.parameters())
        fields = {} if healed else {"fp32_modules": ["2.base"]}
        amp = handles(model, optimizer, level="O2", **fields)
        pointer = model[0].base.weight.data_ptr()
        if healed:
            amp.heal("2.base")
        assert model[2].base.weight.dtype is FP32
        assert model[0].base.weight.data_ptr() == pointer
        amp.backward(model(x).square().mean())
        optimizer.step()
        if healed:
            amp.unheal("2.base")
            assert model[2].base.weight.dtype is FP16
            amp.heal("2.base")
        amp.disable()
        assert model[2].base.weight.dtype is FP16


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("as_group", [True, False])
def test_half_parameters_that_train_later(
    handles: Any, device: torch.device, as_group: bool, level: str
) -> None:
    """They get masters then; small updates do not round away."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device, FP16)
    model[0].requires_grad_(False)
    trains = model[1] if as_group else model
    optimizer = torch.optim.SGD(trains.parameters(), lr=2.0**-16)
    amp = handles(model, optimizer, level=level)
    x = torch.ones(2, 4, device=device)
    for i in range(10):
        if i == 2:
            model[0].requires_grad_(True)
            if as_group:
                optimizer.add_param_group({"params": model[0].parameters()})
            start = model[0].weight.detach().float()
        take_step(amp, optimizer, model(x).sum())
    weight = model[0].weight
    state = model.state_dict()["0.weight"]
    assert state.dtype is FP32 and not torch.equal(state, start)
    assert weight.dtype is FP16 and torch.equal(weight, state.half())
    assert all(m.dtype is FP32 for m in amp.master_params())
    amp.disable()
    assert torch.equal(model[0].weight, state.half())


class Quantised(Tensor):
    """A tensor that says it is bfloat16 and holds integers, as torchao's do."""

    @staticmethod
    def __new__(cls, codes: Tensor) -> "Quantised":
        made: Quantised = Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=BF16, device=codes.device
        )
        made.codes = codes
        return made

    def __tensor_flatten__(self) -> Any:
        return ["codes"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Quantised(args[0].codes)
        raise AssertionError(f"{func} touched a quantised tensor")


class IntegerLinear(nn.Module):
    """Integer weights with half scales, as bitsandbytes and GPTQ have them."""

    def __init__(self) -> None:
        super().__init__()
        codes = torch.randint(-8, 8, (4, 4), dtype=torch.int8)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.register_buffer("scales", torch.ones(4, dtype=FP16))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.codes.to(x.dtype) * self.scales.to(x.dtype)[:, None]
        return nn.functional.linear(x, weight)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_quantised_parameters_are_left_alone(
    handles: Any, device: torch.device, level: str
) -> None:
    model = nn.Sequential(IntegerLinear(), nn.Linear(4, 4)).to(device)
    model.extra = nn.Module()
    model.extra.weight = nn.Parameter(Quantised(torch.ones(4, 4)), requires_grad=False)
    codes, scales, quantised = model[0].codes, model[0].scales, model.extra.weight
    pointers = codes.data_ptr(), scales.data_ptr()
    model.forward = lambda x: model[1](model[0](x))
    optimizer = OPTIMIZERS["AdamW"](model[1].parameters())
    amp = handles(model, optimizer, level=level, dtype=FP16)
    x = torch.ones(2, 4, device=device)
    for _ in range(2):
        amp.backward(model(x).square().mean())
        optimizer.step()
    assert model[0].codes is codes and model[0].scales is scales
    assert (codes.dtype, scales.dtype) == (torch.int8, FP16)
    assert (codes.data_ptr(), scales.data_ptr()) == pointers
    assert model.extra.weight is quantised
    state = model.state_dict()
    assert state["0.scales"].dtype is FP16 and state["1.weight"].dtype is FP32
    amp.disable()
    assert scales.data_ptr() == pointers[1]


@pytest.mark.long
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_memory_of_a_frozen_half_base(handles: Any, level: str) -> None:
    """Nothing of the size of the base is added: not by enable, by steps, nor by a state."""
    width = 512
    model = lora(torch.device("cpu"), width=width)
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    base = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    before = storage_bytes()
    amp = handles(model, optimizer, level=level)
    x = torch.ones(1, width)
    for _ in range(2):
        take_step(amp, optimizer, model(x).square().mean())
    ema = amp.ema(0.9)
    ema.update()
    state = model.state_dict()
    added = storage_bytes() - before
    # half copy, master, two moments, gradients of two kinds, a value in main memory, an average
    assert added < trained * (2 + 4 + 4 + 4 + 2 + 4 + 4 + 4) + 20_000 < base / 4
    del state, ema


# states


@pytest.mark.parametrize("begins", [FP16, FP32], ids=["from half", "from FP32"])
@pytest.mark.parametrize("resumes", [FP16, FP32], ids=["into half", "into FP32"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_save_and_resume_across_starts(
    handles: Any, device: torch.device, level: str, resumes: torch.dtype, begins: torch.dtype
) -> None:
    def start(dtype: torch.dtype, seed: int) -> tuple[nn.Module, Any, Any]:
        model = make(device, dtype, seed)
        optimizer = OPTIMIZERS["AdamW"](model.parameters())
        return model, optimizer, handles(model, optimizer, level=level, dtype=FP16)

    straight, resumed = start(begins, 0), start(resumes, 1)
    train(*straight, range(3))
    buffer = io.BytesIO()
    torch.save([part.state_dict() for part in straight], buffer)
    buffer.seek(0)
    for part, state in zip(resumed, torch.load(buffer), strict=True):
        part.load_state_dict(state)
    losses = train(*straight, range(3, 6)), train(*resumed, range(3, 6))
    assert same(*losses)
    assert same(states(*straight[:2]), states(*resumed[:2]))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_copies_and_pickles_know_what_is_frozen(
    handles: Any, device: torch.device, level: str
) -> None:
    model = lora(device)
    handles(model, OPTIMIZERS["SGD momentum"](model.parameters()), level=level)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    expected = {name: value.dtype for name, value in model.state_dict().items()}
    assert set(expected.values()) == {FP16, FP32}
    for other in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        averaged = other.requires_grad_(False)
        assert {n: v.dtype for n, v in averaged.state_dict().items()} == expected


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_that_were_taken_stay(handles: Any, device: torch.device, name: str) -> None:
    """Neither enable nor disable changes the dtypes in a state that the caller holds."""

    def found(state: Any) -> Any:
        return [
            (key, getattr(t, "dtype", None))
            for of in state["state"].values()
            for key, t in of.items()
        ]

    model = make(device, FP16)
    optimizer = OPTIMIZERS[name](model.parameters())
    amp = handles(model, optimizer, level="O2")
    train(model, optimizer, amp, range(2))
    while_enabled = optimizer.state_dict()
    before = found(while_enabled)
    amp.disable()
    disabled = optimizer.state_dict()
    after = found(disabled)
    handles(model, optimizer, level="O2")
    assert found(while_enabled) == before and found(disabled) == after
    assert before != after


def test_a_state_goes_into_the_plain_half_model(handles: Any, device: torch.device) -> None:
    model = make(device, FP16)
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    amp = handles(model, optimizer, level="O2")
    train(model, optimizer, amp, range(2))
    plain = make(device, FP16, seed=1)
    plain.load_state_dict(model.state_dict())
    amp.disable()
    assert same([p.detach() for p in plain.parameters()], [p.detach() for p in model.parameters()])


# files


class Pretrained(Language):
    """It saves itself as models of transformers and diffusers do."""

    @property
    def dtype(self) -> torch.dtype:
        return next(p.dtype for p in self.parameters())

    def save_pretrained(self, *, refuse: bool = False) -> tuple[torch.dtype, dict[str, Tensor]]:
        if refuse:
            raise OSError("no space left")
        return self.dtype, self.state_dict()


def pretrained(device: torch.device, dtype: torch.dtype) -> Pretrained:
    torch.manual_seed(0)
    return Pretrained().to(device, dtype)


@pytest.mark.parametrize("loaded", [FP16, BF16, FP32], ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_files_are_those_of_the_plain_model(
    handles: Any, device: torch.device, level: str, loaded: torch.dtype
) -> None:
    model = pretrained(device, loaded)
    optimizer = OPTIMIZERS["SGD momentum"](model.parameters())
    amp = handles(model, optimizer, level=level)
    train(model, optimizer, amp, range(2))
    with pytest.raises(OSError, match="no space left"):
        model.save_pretrained(refuse=True)
    before = model.dtype, {name: value.dtype for name, value in model.state_dict().items()}
    copied = copy.deepcopy(model).save_pretrained()
    dtype, saved = model.save_pretrained()
    after = model.dtype, {name: value.dtype for name, value in model.state_dict().items()}
    amp.disable()
    assert before == after and before[1]["hidden.weight"] is FP32
    assert dtype is copied[0] is model.dtype is loaded
    tied = model.embed.weight is model.head.weight  # not so once on a GPU in software
    assert (saved["embed.weight"].data_ptr() == saved["head.weight"].data_ptr()) is tied
    expected = model.save_pretrained()[1]
    assert saved.keys() == copied[1].keys() == expected.keys()
    for name, value in expected.items():
        assert saved[name].dtype is copied[1][name].dtype is value.dtype, name
        assert torch.equal(saved[name], value), name
        # a copy has the half values
        copied_exactly = level in ("O0", "O1") or loaded is not FP32
        assert torch.equal(copied[1][name], value) or not copied_exactly, name


@pytest.mark.compiled
def test_a_compiled_forward_may_ask_for_the_dtype(handles: Any) -> None:
    class Asks(Pretrained):
        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens) + torch.ones((), dtype=self.dtype)

    model, x = Asks().half(), tokens(torch.device("cpu"), 0)
    handles(model, level="O2")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), model(x))


def test_files_of_models_with_names_in_common(handles: Any, device: torch.device) -> None:
    """A teacher that was loaded in half does not narrow the student."""
    for teacher_first in (True, False):
        teacher, student = pretrained(device, FP16), pretrained(device, FP32)
        teacher.requires_grad_(False)
        models = [teacher, student] if teacher_first else [student, teacher]
        amp = handles(models, OPTIMIZERS["SGD momentum"](student.parameters()), level="O2")
        dtype, saved = student.save_pretrained()
        assert dtype is saved["hidden.weight"].dtype is FP32
        amp.disable()


# what is refused


def test_mixed_half_dtypes_are_refused(handles: Any, device: torch.device) -> None:
    model = make(device, FP16)
    model.head.bias.data = model.head.bias.data.to(BF16)
    before = [(p.dtype, p.data_ptr()) for p in model.parameters()]
    text = r"one half dtype.*torch.float16 \('embed.weight', ...\) and torch.bfloat16 \('head.bias'"
    for level in ("O0", "O1", "O2", "O3"):
        with pytest.raises(ValueError, match=text):
            tritonamp.enable(model, level=level)
    assert before == [(p.dtype, p.data_ptr()) for p in model.parameters()]
    model.head.bias.requires_grad_(False)  # frozen, it may be of another
    assert handles(model, level="O1").policy.dtype is FP16


def test_half_parameters_in_the_same_memory_are_refused(handles: Any, device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device, FP16)
    model[1].weight.data = model[0].weight.data
    optimizer = OPTIMIZERS["SGD momentum"](model.parameters())
    with pytest.raises(ValueError, match=r"got '0.weight' and '1.weight' in the same: tie them"):
        tritonamp.enable(model, optimizer, level="O2")
    model[1].weight = model[0].weight
    handles(model, OPTIMIZERS["SGD momentum"](model.parameters()), level="O2")


def test_models_enabled_together_are_saved_each_as_it_came(
    handles: Any, device: torch.device
) -> None:
    """Also where their tensors have the same names."""
    frozen = nn.Linear(4, 4).to(device, FP16).requires_grad_(False)
    trained = nn.Linear(4, 4).to(device, FP16)
    optimizer = OPTIMIZERS["SGD momentum"](trained.parameters())
    handles([frozen, trained], optimizer, level="O2")
    for model in (frozen, copy.deepcopy(frozen)):
        assert {v.dtype for v in model.state_dict().values()} == {FP16}
    for model in (trained, copy.deepcopy(trained)):
        assert {v.dtype for v in model.state_dict().values()} == {FP32}


def test_check_predicts_the_refusal_of_mixed_half_dtypes() -> None:
    model = make(torch.device("cpu"), FP16)
    model.head.bias.data = model.head.bias.data.to(BF16)
    forecast = tritonamp.check(model, None, (tokens(torch.device("cpu"), 0),))
    assert "refused by enable" in [f.kind for f in forecast.problems]
