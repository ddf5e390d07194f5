"""GradScaler on its own, in a torch.amp loop."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from runs import OPTIMIZERS
from torch import Tensor, nn

import tritonamp
from tritonamp import GradScaler

RATES = {"SGD": 0.1, "AdamW": 1e-2, "fused AdamW": 1e-2, "our AdamW": 1e-2}


def one_step(
    scaler: torch.amp.GradScaler,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    fault: str = "",
    clip: bool = False,
) -> None:
    optimizer.zero_grad()
    loss = model(torch.ones(2, 4, device=next(model.parameters()).device)).square().mean()
    scaler.scale(loss * float("nan") if fault == "loss" else loss).backward()
    if fault == "gradient":
        model.weight.grad[0, 0] = float("inf")
    if clip:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()


def setting(device: torch.device, optimizer: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3).to(device)
    return model, OPTIMIZERS[optimizer](model.parameters(), lr=RATES[optimizer])


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("optimizer", RATES)
def test_without_forward_faults_it_is_torchs(
    device: torch.device, optimizer: str, clip: bool
) -> None:
    faults = ["", "gradient", "", "", "gradient", "gradient", "", "", "", ""]
    runs = []
    for cls in (torch.amp.GradScaler, GradScaler):
        model, opt = setting(device, optimizer)
        scaler = cls(device.type, init_scale=2.0**10, growth_interval=3)
        for fault in faults:
            one_step(scaler, model, opt, fault, clip)
        runs.append((scaler.state_dict(), [p.detach().clone() for p in model.parameters()]))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))


@pytest.mark.parametrize("optimizer", RATES)
def test_forward_faults_skip_and_leave_the_scale(device: torch.device, optimizer: str) -> None:
    model, opt = setting(device, optimizer)
    scaler = GradScaler(device.type)
    one_step(scaler, model, opt)
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(40):
        one_step(scaler, model, opt, "loss")
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert scaler.get_scale() == 2.0**16
    assert scaler._get_growth_tracker() == 1
    one_step(scaler, model, opt)
    assert not torch.equal(before[0], model.weight)


@pytest.mark.long
def test_the_floor_keeps_a_healthy_model_healthy(device: torch.device) -> None:
    """Stock AMP ends with non-finite weights after some 150 halvings: 1/scale leaves FP32."""
    for optimizer in RATES:
        model, opt = setting(device, optimizer)
        scaler = GradScaler(device.type)
        for _ in range(200):
            one_step(scaler, model, opt, "gradient")
        assert scaler.get_scale() == 2.0**-24
        one_step(scaler, model, opt)
        assert all(torch.isfinite(p).all() for p in model.parameters())


def test_growth_stops_at_the_cap(device: torch.device) -> None:
    model, opt = setting(device, "SGD")
    scaler = GradScaler(device.type, init_scale=4.0, max_scale=16.0, growth_interval=1)
    for _ in range(5):
        one_step(scaler, model, opt)
    assert scaler.get_scale() == 16.0


def test_hysteresis_waits_for_overflows_in_a_row(device: torch.device) -> None:
    model, opt = setting(device, "SGD")
    scaler = GradScaler(device.type, init_scale=64.0, hysteresis=3)
    seen = []
    for fault in [
        "gradient",
        "gradient",
        "",
        "gradient",
        "gradient",
        "gradient",
        "gradient",
        "loss",
        "gradient",
        "",
    ]:
        one_step(scaler, model, opt, fault)
        seen.append(scaler.get_scale())
    assert seen == [64, 64, 64, 64, 64, 32, 16, 16, 8, 8]
    assert scaler.state_dict()["_hysteresis_tracker"] == 3


@pytest.mark.parametrize("how", ["state_dict", "pickle", "deepcopy"])
@pytest.mark.parametrize("hysteresis", [1, 2])
def test_saved_and_continued(device: torch.device, how: str, hysteresis: int) -> None:
    def run(scaler: GradScaler, faults: list[str]) -> list[float]:
        seen = []
        for fault in faults:
            one_step(scaler, model, opt, fault)
            seen.append(scaler.get_scale())
        return seen

    model, opt = setting(device, "SGD")
    first, second = ["", "gradient"], ["gradient", "", "", "gradient"]
    scaler = GradScaler(device.type, init_scale=64.0, growth_interval=2, hysteresis=hysteresis)
    run(scaler, first)
    if how == "state_dict":
        other = GradScaler(device.type, hysteresis=hysteresis)
        other.load_state_dict(scaler.state_dict())
    else:
        other = copy.deepcopy(scaler) if how == "deepcopy" else pickle.loads(pickle.dumps(scaler))
    assert run(other, second) == run(scaler, second)


def test_state_dict_has_torchs_keys_and_goes_both_ways() -> None:
    ours, theirs = GradScaler("cpu", init_scale=8.0), torch.amp.GradScaler("cpu", init_scale=32.0)
    assert set(ours.state_dict()) == set(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    assert ours.get_scale() == 32.0
    theirs.load_state_dict(GradScaler("cpu", init_scale=2.0).state_dict())
    assert theirs.get_scale() == 2.0
    ours.load_state_dict({**theirs.state_dict(), "scale": 2.0**-60})
    assert ours.get_scale() == 2.0**-24
    with pytest.raises(RuntimeError, match="The source state dict is empty"):
        ours.load_state_dict({})


def test_half_losses_do_not_overflow(device: torch.device) -> None:
    scaler = GradScaler(device.type)
    loss = torch.tensor(2.0, dtype=torch.float16, device=device, requires_grad=True)
    scaled = scaler.scale(loss)
    assert scaled.dtype == torch.float32
    assert scaled == 2.0**17


def test_a_nan_in_an_earlier_micro_batch_counts(device: torch.device) -> None:
    model, opt = setting(device, "SGD")
    scaler = GradScaler(device.type)
    for factor in (float("nan"), 1.0):
        scaler.scale(model(torch.ones(2, 4, device=device)).mean() * factor).backward()
    scaler.step(opt)
    scaler.update()
    assert scaler.get_scale() == 2.0**16  # a fault of the forward, not an overflow
    scaler.scale(torch.full((), float("nan"), device=device))
    scaler.update(8.0)
    one_step(scaler, model, opt, "gradient")
    assert scaler.get_scale() == 4.0  # the fault before update(8.0) is forgotten


def test_lists_of_losses(device: torch.device) -> None:
    scaler = GradScaler(device.type, init_scale=4.0)
    loss = torch.ones((), device=device)
    assert scaler.scale([loss, (loss, loss * 2)]) == [4.0, (4.0, 8.0)]
    with pytest.raises(
        ValueError, match="outputs: expected a Tensor or an iterable of Tensors, got int"
    ):
        scaler.scale(3)


def test_half_gradients_are_explained(device: torch.device) -> None:
    model = nn.Linear(2, 2).half().to(device)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler(device.type)
    scaler.scale(model.weight.float().sum()).backward()
    with pytest.raises(
        ValueError, match=r'Attempting to unscale FP16 gradients.*level="O2"\) keeps FP32 masters'
    ):
        scaler.step(opt)


def test_misuse_is_torchs(device: torch.device) -> None:
    model, opt = setting(device, "SGD")
    scaler = GradScaler(device.type)
    scaler.scale(model(torch.ones(1, 4, device=device)).sum()).backward()
    scaler.unscale_(opt)
    with pytest.raises(
        RuntimeError, match=r"unscale_\(\) has already been called on this optimizer since the last"
    ):
        scaler.unscale_(opt)
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        scaler.step(opt, lambda: None)
    scaler.step(opt, None)
    with pytest.raises(
        RuntimeError, match=r"step\(\) has already been called since the last update"
    ):
        scaler.step(opt)


def test_a_step_without_gradients_is_a_no_op(device: torch.device) -> None:
    for optimizer in RATES:
        model, opt = setting(device, optimizer)
        scaler = GradScaler(device.type)
        scaler.scale(torch.ones((), device=device, requires_grad=True)).backward()
        before = model.weight.detach().clone()
        scaler.step(opt)
        scaler.update()
        assert torch.equal(before, model.weight)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"min_scale": 0.0}, "expected 0 < min_scale <= init_scale <= max_scale < inf, got min_s"),
        ({"init_scale": 2.0**30}, "got min_scale=.*init_scale=1073741824.0"),
        ({"max_scale": float("inf")}, "max_scale=inf"),
        ({"hysteresis": 0}, "expected hysteresis .* of 1 or more, got hysteresis=0"),
        ({"growth_interval": 0}, "expected .* of 1 or more, got .*growth_interval=0"),
    ],
)
def test_bounds(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        GradScaler("cpu", **arguments)


def test_disabled_is_transparent(device: torch.device) -> None:
    model, opt = setting(device, "SGD")
    scaler = GradScaler(device.type, enabled=False)
    one_step(scaler, model, opt)
    assert scaler.get_scale() == 1.0
    assert scaler.state_dict() == {}
    assert copy.deepcopy(scaler).clone().is_enabled() is False


def test_new_scale(device: torch.device) -> None:
    model, opt = setting(device, "SGD")
    scaler = GradScaler(device.type)
    one_step(scaler, model, opt)
    scaler.update(8.0)
    assert scaler.get_scale() == 8.0
    scaler.update(torch.tensor(2.0, device=device))
    assert scaler.get_scale() == 2.0


@pytest.mark.parametrize("optimizer", RATES)
def test_host_reads(device: torch.device, optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, opt = setting(device, optimizer)
    scaler = GradScaler(device.type)
    one_step(scaler, model, opt)
    reads: list[str] = []

    def counting(name: str) -> Callable[..., Any]:
        original = getattr(Tensor, name)
        return lambda self, *args: (reads.append(name), original(self, *args))[1]

    for name in ("item", "tolist", "cpu", "__bool__", "__float__", "__int__"):
        monkeypatch.setattr(Tensor, name, counting(name))
    one_step(scaler, model, opt)
    skips_on_device = optimizer in ("fused AdamW", "our AdamW")
    if skips_on_device:
        assert reads == []
    else:
        assert "item" in reads or "__bool__" in reads


# mode="headroom"


@pytest.mark.steps
@pytest.mark.parametrize("form", ["backward", "by hand", "plain"])
def test_headroom_is_back_soon_after_a_burst(device: torch.device, form: str) -> None:
    """Forty bad backwards in a row; "plain": a GradScaler around torch's model and optimizer."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = GradScaler(device.type, mode="headroom")
    amp = None if form == "plain" else tritonamp.enable(model, optimizer, level="O2", scaler=scaler)
    x, scales = torch.randn(8, 4, device=device), []
    for i in range(120):
        loss = model(x).square().mean()
        if form == "backward":
            amp.backward(loss)
        else:
            scaler.scale(loss).backward()
        if 20 <= i < 60:
            model.weight.grad[0, 0] = float("inf")
        if form == "backward":
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    assert scales[19] >= 2.0**10 and min(scales) == scales[59] <= scales[19] * 2.0**-24
    assert 2.0**10 <= scales[109] == scales[119] <= scales[19] / 2, "not to where the burst began"
    assert all(torch.frexp(torch.tensor(scale)).mantissa == 0.5 for scale in scales)
    assert all(p.isfinite().all() for p in model.parameters())
    if amp is not None:
        amp.disable()


def test_headroom_stays_on_poisoned_batches(device: torch.device) -> None:
    model = nn.Linear(4, 2).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    amp = tritonamp.enable(
        model, optimizer, level="O2", scaler=GradScaler(device.type, mode="headroom")
    )
    for _ in range(30):
        amp.backward(model(torch.full((1, 4), float("nan"), device=device)).sum())
        optimizer.step()
        optimizer.zero_grad()
    assert amp.stats()["scale"] == 2.0**16
    amp.disable()


def test_what_headroom_remembers_is_saved(device: torch.device) -> None:
    scaler = GradScaler(device.type, mode="headroom")
    scaler.scale(torch.ones((), device=device))
    one, zero = torch.ones((), device=device), torch.zeros((), device=device)
    scaler.note_amax(one.reshape(1))
    scaler.move_scale(zero, zero)
    scaler.move_scale(one, zero)  # an overflow on a clean step
    state = scaler.state_dict()
    assert state["_ceiling"] == state["scale"] == 2.0**16
    for other in (GradScaler(device.type, mode="headroom"), pickle.loads(pickle.dumps(scaler))):
        other.load_state_dict(state)
        other.scale(torch.ones((), device=device))
        assert other.scale_state.ceiling == 2.0**16
    assert "_ceiling" not in GradScaler(device.type).state_dict()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "fast"}, r"mode: expected one of \('interval', 'headroom'\), got 'fast'"),
        (
            {"mode": "headroom", "init_scale": 3.0},
            r"mode='headroom': expected powers of two, got .*init_scale=3.0, ",
        ),
        (
            {"mode": "headroom", "growth_factor": 1.5},
            r"mode='headroom': expected powers of two, got .*growth_factor=1.5, ",
        ),
    ],
)
def test_headroom_takes_powers_of_two(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GradScaler("cpu", **settings)


def test_the_rule_follows_its_settings(device: torch.device) -> None:
    scaler = GradScaler(device.type)
    assert scaler.rule[:3] == (2.0, 0.5, 2000) and scaler.rule.headroom == 0.0
    scaler.set_growth_factor(4.0)
    scaler.set_backoff_factor(0.25)
    scaler.set_growth_interval(3)
    scaler.mode = "headroom"
    assert scaler.rule[:3] == (4.0, 0.25, 3) and scaler.rule.headroom > 0.0
    scaler.load_state_dict(GradScaler(device.type).state_dict())
    assert scaler.rule[:3] == (2.0, 0.5, 2000)
    assert b"ScaleRule" not in pickle.dumps(scaler)  # later versions may have another one
    assert pickle.loads(pickle.dumps(scaler)).rule == scaler.rule


def test_a_pickle_has_numbers_alone(device: torch.device) -> None:
    """What an enabled model, its step and its gradients gave to the scaler stays in the process."""
    model, optimizer = setting(device, "SGD")
    given = GradScaler(device.type, mode="headroom")
    with tritonamp.enable(model, optimizer, level="O2", scaler=given) as amp:
        amp.backward(model(torch.ones(2, 4, device=device)).sum())
        optimizer.step()
        amp.backward(model(torch.ones(2, 4, device=device)).sum())
        given._largest = torch.ones((), device=device)  # as where the user calls unscale_
        plain = int, float, bool, str, type(None)
        others = {k for k, v in given.__getstate__().items() if not isinstance(v, plain)}
        assert others <= {"_per_optimizer_states", "_settings", "_rule_settings"}  # plain inside
        assert pickle.loads(pickle.dumps(given)).state_dict() == given.state_dict()


def test_what_headroom_remembers_goes_with_a_pickle_and_into_a_scaler_that_runs(
    device: torch.device,
) -> None:
    one, zero = torch.ones((), device=device), torch.zeros((), device=device)

    def running() -> GradScaler:
        scaler = GradScaler(device.type, mode="headroom")
        scaler.scale(one)
        scaler.note_amax(one.reshape(1))
        scaler.move_scale(zero, zero)
        return scaler

    scaler, other = running(), running()
    scaler.move_scale(one, zero)
    copied = pickle.loads(pickle.dumps(scaler))
    other.load_state_dict(scaler.state_dict())
    for same in (copied, other):
        same.scale(one)
        assert same.scale_state.ceiling == scaler.scale_state.ceiling == 2.0**16
    unused = pickle.loads(pickle.dumps(GradScaler(device.type, mode="headroom")))
    unused.scale(one)
    assert unused.scale_state.ceiling == 2.0**24
    disabled = GradScaler(device.type, mode="headroom", enabled=False)
    assert pickle.loads(pickle.dumps(disabled)).state_dict() == {}


# backoff_on_fault


@pytest.mark.parametrize("form", ["backward", "by hand"])
@pytest.mark.parametrize("backoff", [True, False])
def test_a_decision_moves_the_scale_once(device: torch.device, form: str, backoff: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = GradScaler(device.type, init_scale=2.0**8, growth_interval=2, backoff_on_fault=backoff)
    amp = tritonamp.enable(model, optimizer, level="O2", scaler=scaler)
    x, scales = torch.randn(8, 4, device=device), []
    for event in ["", "overflow", "", "", "fault", "", ""]:
        loss = model(x).square().mean() * (float("nan") if event == "fault" else 1.0)
        if form == "backward":
            amp.backward(loss)
        else:
            scaler.scale(loss).backward()
        if event == "overflow":
            model.weight.grad[0, 0] = float("inf")
        if form == "backward":
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    assert scales[:4] == [2.0**8, 2.0**7, 2.0**7, 2.0**8]
    assert scales[4:] == ([2.0**7, 2.0**7, 2.0**8] if backoff else [2.0**8, 2.0**8, 2.0**9])
    causes = [record.cause for record in amp.history]
    assert causes == [None, "scale overflow", None, None, "forward fault", None, None]
    amp.disable()


def test_what_a_decision_moves_lies_in_one_aligned_piece(device: torch.device) -> None:
    """A copy of the piece holds all of it, and kernels find pointers as aligned as any."""
    scaler = tritonamp.GradScaler(device.type, init_scale=8.0, hysteresis=3, max_scale=64.0)
    scaler.scale_tensor(device)
    state, before = scaler.scale_state, scaler.scale_memory.clone()
    assert [float(number) for number in state] == [8.0, 0.0, 3.0, 64.0]
    assert all(number.data_ptr() % 16 == 0 for number in state)
    for number in state:
        number.fill_(5)
    scaler.scale_memory.copy_(before)
    assert [float(number) for number in state] == [8.0, 0.0, 3.0, 64.0]
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (8.0, 0)
