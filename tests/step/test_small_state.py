"""Steps on small state and packed masters: training, resuming, memory, other calls of a loop."""

import copy
import gc
import math
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gpuless.real_cuda import AnyCuda
from helpers import Net, same, snapshot, storage_bytes, take_step
from runs import FORMS, OPTIMIZERS, Classifying, labelled, started
from torch import Tensor, nn
from two_ways import steps

import tritonamp

HALF, BF16 = torch.float16, torch.bfloat16
PACKED = [name for name in FORMS if name.startswith("packed")]
SMALL = ["bf16", "8bit", *PACKED]
ADAMS = "AdamW", "Adam", "our AdamW", "amsgrad"
RATES = {"SGD momentum": 0.1, "Lion": 3e-3, "RMSprop": 2e-3, "RMSprop momentum": 1e-3}

each_form = pytest.mark.parametrize("form", FORMS)
each_small = pytest.mark.parametrize("form", SMALL)
each_half = pytest.mark.parametrize("half", [HALF, BF16], ids=str)


class Small(Classifying):
    def __init__(
        self,
        form: str,
        half: torch.dtype = HALF,
        level: str = "O2",
        optimizer: str = "AdamW",
        *,
        device: Any,
        seed: int = 0,
        **fields: Any,
    ) -> None:
        torch.manual_seed(seed)
        lr = RATES.get(optimizer, 1e-2)
        fields |= {"dtype": half, **FORMS[form]}
        super().__init__(Net(), optimizer, level, device, lr=lr, **fields)


run = started(Small)


# training


@pytest.mark.long  # in an emulator
@each_small
@each_half
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("optimizer", [*ADAMS, *RATES])
def test_it_trains_like_fp32_state(
    run: Any, form: str, half: torch.dtype, level: str, optimizer: str
) -> None:
    """In 30 steps the loss falls by as much, to a tenth of the fall."""
    if level == "O1" and form in PACKED:
        pytest.skip("refused")
    losses = {}
    for kind in ("fp32", form):
        trained = run(kind, half, level, optimizer)
        first = trained.loss(100).item()
        trained.steps(*[100, 101] * 15)
        losses[kind] = first, trained.loss(100).item()
        assert trained.amp.stats()["steps"] == 30
    (first, plain), (_, small) = losses["fp32"], losses[form]
    assert plain < 0.8 * first
    assert abs(small - plain) < 0.1 * (first - plain)


@each_form
@each_half
def test_the_state_has_its_format(run: Any, form: str, half: torch.dtype) -> None:
    trained = run(form, half).steps(0)
    dtype = {"fp32": torch.float32, "bf16": BF16, "8bit": torch.uint8}[FORMS[form]["state"]]
    is_packed = form == "8bit" or form in PACKED
    stepped_on = [p for group in trained.optimizer.param_groups for p in group["params"]]
    for param, own in zip(stepped_on, trained.model.parameters(), strict=True):
        found = {
            k: v.dtype
            for k, v in trained.optimizer.state[param].items()
            if k != "step" and isinstance(v, Tensor)
        }
        assert found == {"exp_avg": dtype, "exp_avg_sq": dtype}
        assert param.dtype is (own.dtype if is_packed else torch.float32)
    named = dict(trained.amp.named_master_params())
    assert list(named) == [name for name, _ in trained.model.named_parameters()]
    for (name, value), param in zip(named.items(), trained.model.parameters(), strict=True):
        assert value.dtype is torch.float32 and value.shape == param.shape, name
        assert torch.equal(value.to(param.dtype), param) or param.dtype is BF16


@pytest.mark.parametrize(
    ("form", "due"),
    [("fp32", 16), ("bf16", 12), ("8bit", 8.02), ("packed fp32", 14), ("packed bf16", 10)],
)
def test_bytes_a_parameter(handles: Callable[..., Any], form: str, due: float) -> None:
    """Half weights, half gradients and state, of a large matrix; one percent is for the rest."""
    assert abs(replace(tritonamp.O2, **FORMS[form]).bytes_per_parameter() - due) < 0.01
    gc.collect()
    before = storage_bytes()
    model = nn.Linear(1024, 1024, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    amp = handles(model, optimizer, level="O2", dtype=BF16, **FORMS[form])
    amp.backward(model(torch.ones(1, 1024)).float().mean())
    optimizer.step()
    found = (storage_bytes() - before) / (1 << 20)
    assert due <= found <= 1.01 * due


def test_averages_keep_no_fp32_values(handles: Callable[..., Any]) -> None:
    """``update`` frees the values that it reads, so that the next step need not hold them."""
    model = nn.Linear(1024, 1024, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    amp = handles(model, optimizer, level="O2", dtype=BF16, state="8bit")
    ema = amp.ema(0.5)
    take_step(amp, optimizer, model(torch.ones(1, 1024)).float().mean())
    ema.update()
    gc.collect()
    before = storage_bytes()
    ema.update()
    gc.collect()
    assert storage_bytes() == before
    masters = list(amp.master_params())
    assert storage_bytes() == before + 4 * masters[0].numel()


@pytest.mark.parametrize("bits", [0x3F808000, 0x3F818000, 0x3F818001, 0xBF808000])
def test_ties_between_bfloat16_numbers_are_loaded(handles: Callable[..., Any], bits: int) -> None:
    """At a tie "8bit" rounds half values away from 0, and a loader rounds to the even one."""
    signed = bits - (1 << 32) if bits >> 31 else bits
    value = torch.tensor([signed] * 6, dtype=torch.int32).view(torch.float32).view(2, 3)
    model = nn.Linear(3, 2, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    amp = handles(model, optimizer, level="O2", dtype=BF16, state="8bit")
    model.load_state_dict({"weight": value})
    assert torch.equal(model.state_dict()["weight"], value)
    assert torch.equal(dict(amp.named_master_params())["weight"], value)
    model(torch.ones(1, 3))
    assert torch.equal(dict(amp.named_master_params())["weight"], value)


# resuming


@each_form
@pytest.mark.parametrize("way", ["state dicts", "file"])
@pytest.mark.parametrize(("half", "level"), [(HALF, "O2"), (BF16, "O2"), (HALF, "O1")])
def test_a_resumed_run_has_the_same_bits(
    run: Any,
    form: str,
    half: torch.dtype,
    level: str,
    way: str,
    tmp_path: Path,
) -> None:
    if level == "O1" and form in PACKED:
        pytest.skip("refused")
    straight = run(form, half, level).steps(0, 1, 2, 3, 4)
    first = run(form, half, level).steps(0, 1, 2)
    resumed = run(form, half, level, seed=1)
    if way == "file":
        tritonamp.save(tmp_path / "x", **first.objects())
        tritonamp.load(tmp_path / "x", **resumed.objects())
    else:
        resumed.load(first.states())
    assert same(resumed.masters(), first.masters())
    resumed.steps(3, 4)
    assert same(resumed.everything(), straight.everything())


@pytest.mark.parametrize("saved", FORMS)
@pytest.mark.parametrize("loading", FORMS)
@pytest.mark.parametrize("steps_before", [0, 2])
def test_each_format_loads_into_each(run: Any, saved: str, loading: str, steps_before: int) -> None:
    """FP32 in the file. Masters come exactly, to 2^-39; moments to an eighth, or 2^-8."""
    first = run(saved).steps(0, 1, 2)
    states = first.states()
    for entry in states["optimizer"]["state"].values():
        assert entry["exp_avg"].dtype is entry["exp_avg_sq"].dtype is torch.float32
    second = run(loading, seed=1).steps(*range(steps_before)).load(states)
    for a, b in zip(first.masters(), second.masters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2.0**-39)
    for entry, expected in zip(
        second.states()["optimizer"]["state"].values(),
        states["optimizer"]["state"].values(),
        strict=True,
    ):
        assert entry["step"] == 3
        for key in ("exp_avg", "exp_avg_sq"):
            old, new = (FORMS[form]["state"] for form in (saved, loading))
            exact = new in (old, "fp32")
            relative = 0.0 if exact else 1 / 8 if new == "8bit" else 2**-8
            # what is small in its block has units of 2^-17 and 2^-33 of the largest
            units = expected[key].abs().max() * 2.0 ** (-16 if key == "exp_avg" else -32)
            bound = relative * expected[key].abs() + (0 if exact else units)
            assert ((entry[key] - expected[key]).abs() <= bound).all()
    second.steps(3)
    assert second.amp.stats()["skipped"] == 0


# steps


@each_small
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_skip_changes_no_bit(run: Any, form: str, level: str) -> None:
    if level == "O1" and form in PACKED:
        pytest.skip("refused")
    trained = run(form, level=level).steps(0, 1)
    before = trained.everything()
    trained.step(2, bad=True)
    assert trained.amp.stats()["skipped"] == 1
    assert same(trained.everything(), before)
    trained.steps(3)
    assert not same(trained.everything(), before)


@each_small
def test_plans_make_no_difference(run: Any, form: str) -> None:
    found = []
    for plain in (False, True):
        with steps(plain):
            found.append(run(form, backend="auto").steps(0, 1, 2, 3).everything())
    assert same(*found)


@each_small
@pytest.mark.parametrize("how", ["amp", "torch"])
def test_clipping(run: Any, form: str, how: str) -> None:
    """As with FP32 state: the norm, and where the parameters go in one step, to a thousandth."""
    moved, norms = [], []
    for kind in ("fp32", form):
        trained = run(kind)
        before = trained.masters()
        trained.amp.backward(trained.loss(0))
        if how == "amp":
            norms.append(trained.amp.clip_grad_norm_(0.01))
        else:
            trained.amp.unscale_()
            norms.append(nn.utils.clip_grad_norm_(trained.amp.master_params(), 0.01))
            shown = [p.grad for p in trained.model.parameters()]
            assert all(g is not None and g.dtype is torch.float32 for g in shown)
            clipped = torch.stack([g.norm() for g in shown]).norm()
            torch.testing.assert_close(clipped, torch.full_like(clipped, 0.01), rtol=1e-3, atol=0)
        trained.optimizer.step()
        trained.optimizer.zero_grad()
        assert all(p.grad is None or p.grad.dtype is p.dtype for p in trained.model.parameters())
        moved.append([a - b for a, b in zip(trained.masters(), before, strict=True)])
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-6, atol=0)
    for a, b in zip(*moved, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2.0**-20)


@each_small
@pytest.mark.parametrize("unscales", [False, True])
def test_two_losses_add_up(run: Any, form: str, unscales: bool) -> None:
    """Also where true gradients of the first are set aside; as one backward of the sum."""
    found = []
    for together in (False, True):
        trained = run(form)
        before = trained.masters()
        if together:
            trained.amp.backward(trained.loss(0) + trained.loss(1))
        else:
            trained.amp.backward(trained.loss(0))
            if unscales:
                trained.amp.unscale_()
            trained.amp.backward(trained.loss(1))
        norm = trained.amp.clip_grad_norm_(1e6)
        trained.optimizer.step()
        found.append((norm, [a - b for a, b in zip(trained.masters(), before, strict=True)]))
    # half gradients are added up in half, or true ones in FP32
    torch.testing.assert_close(found[0][0], found[1][0], rtol=2e-3, atol=0)


@each_small
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_forgets(run: Any, form: str, set_to_none: bool) -> None:
    found = []
    for spoils in (False, True):
        trained = run(form)
        if spoils:
            trained.amp.backward(trained.loss(5))
            trained.amp.unscale_()
            trained.optimizer.zero_grad(set_to_none)
        found.append(trained.steps(0).masters())
    assert same(*found)


@each_small
def test_a_torch_amp_loop_has_the_same_bits(run: Any, form: str) -> None:
    ours, theirs = run(form), run(form)
    for seed in range(5):
        ours.step(seed, bad=seed == 3)
        theirs.optimizer.zero_grad()
        with theirs.amp.autocast():
            loss = theirs.loss(seed) * (math.inf if seed == 3 else 1.0)
        theirs.backward(loss, by_scaler=True)
        theirs.finish(by_scaler=True)
        assert same(ours.everything(), theirs.everything())
    assert ours.amp.stats()["skipped"] == 1


@each_small
def test_averages_are_of_fp32_values(run: Any, form: str) -> None:
    trained = run(form, BF16)
    ema = trained.amp.ema(0.5)
    expected = trained.masters()
    for seed in range(3):
        trained.steps(seed)
        ema.update()
        expected = [0.5 * e + 0.5 * m for e, m in zip(expected, trained.masters(), strict=True)]
    averages = ema.state_dict()
    found = [v for v in _tensors(averages) if v.is_floating_point() and v.dim()]
    for exact in expected:
        near = [v for v in found if v.shape == exact.shape]
        assert any(torch.allclose(v.float(), exact, rtol=0, atol=1e-6) for v in near)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    values = value.values() if isinstance(value, dict) else value
    return [t for v in values if isinstance(v, Tensor | dict | list | tuple) for t in _tensors(v)]


# other parameters


@each_small
def test_a_group_may_be_added(run: Any, form: str, device: torch.device) -> None:
    trained = run(form).steps(0)
    added = nn.Linear(3, 3).to(device)
    before = [p.detach().clone() for p in added.parameters()]
    trained.optimizer.add_param_group({"params": list(added.parameters()), "lr": 0.1})
    x, _ = labelled(0, device)
    loss = added(trained.model(x).float()).square().mean()
    take_step(trained.amp, trained.optimizer, loss)
    assert not same(before, [p.detach() for p in added.parameters()])
    assert all("exp_avg" in trained.optimizer.state[p] for p in added.parameters())


@each_small
def test_frozen_then_unfrozen(handles: Callable[..., Any], device: torch.device, form: str) -> None:
    torch.manual_seed(0)
    model = Net().to(device)
    model.first.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    amp = handles(model, optimizer, level="O2", **FORMS[form])
    x, y = labelled(0, device)
    before = model.first.weight.detach().clone()
    for _ in range(2):
        take_step(amp, optimizer, nn.functional.cross_entropy(model(x).float(), y))
    assert torch.equal(before, model.first.weight)
    model.first.requires_grad_(True)
    for _ in range(4):
        take_step(amp, optimizer, nn.functional.cross_entropy(model(x).float(), y))
    assert not torch.equal(before, model.first.weight)
    value = dict(amp.named_master_params())["first.weight"]
    assert value.dtype is torch.float32 and not torch.equal(value, value.half().float())


@each_small
@each_half
def test_models_that_come_half(
    handles: Callable[..., Any], device: torch.device, form: str, half: torch.dtype
) -> None:
    """Steps too small for their half values add up."""
    model = nn.Linear(4, 4, bias=False).to(device, half)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0)
    amp = handles(model, optimizer, level="O2", dtype=half, **FORMS[form])
    for _ in range(30):
        take_step(amp, optimizer, model(torch.ones(2, 4, device=device)).float().mean())
    (value,) = amp.master_params()
    assert ((1 - value) / 3e-4 - 1).abs().max() < 1 / 8
    assert (model.weight == 1).all() == (half is BF16)


@each_small
def test_tied_weights(handles: Callable[..., Any], device: torch.device, form: str) -> None:
    torch.manual_seed(0)
    embedding, head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    head.weight = embedding.weight
    model = nn.Sequential(embedding, head).to(device)
    head.weight = embedding.weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    amp = handles(model, optimizer, level="O2", **FORMS[form])
    ids = torch.arange(5, device=device)
    losses = []
    for _ in range(20):
        loss = nn.functional.cross_entropy(model(ids).float(), ids)
        losses.append(loss.item())
        take_step(amp, optimizer, loss)
    assert losses[-1] < 0.7 * losses[0]
    assert embedding.weight is head.weight
    assert len(list(amp.master_params())) == 1
    assert len(dict(amp.named_master_params())) == 1


@each_small
def test_healed_and_unhealed(run: Any, form: str) -> None:
    """A module whose values go to FP32 and back loses nothing, and trains meanwhile."""
    trained = run(form).steps(0, 1)
    before = dict((name, v.detach().clone()) for name, v in trained.amp.named_master_params())
    trained.amp.heal("first")
    assert trained.model.first.weight.dtype is torch.float32
    assert torch.equal(trained.model.first.weight, before["first.weight"])
    trained.steps(2)
    healed = trained.model.first.weight.detach().clone()
    assert not torch.equal(healed, before["first.weight"])
    trained.amp.unheal("first")
    assert trained.model.first.weight.dtype is HALF
    after = dict(trained.amp.named_master_params())["first.weight"]
    torch.testing.assert_close(after, healed, rtol=0, atol=2.0**-39)
    trained.steps(3)
    assert trained.amp.stats()["steps"] == 4


@each_small
@pytest.mark.parametrize("optimizer", ["AdamW", "our AdamW"])
def test_disabled_enabled_again(
    run: Any, handles: Callable[..., Any], form: str, optimizer: str
) -> None:
    """After ``disable`` torch's own step goes on, on FP32 parameters and moments."""
    trained = run(form, optimizer=optimizer).steps(0, 1)
    masters = trained.masters()
    moments = [e["exp_avg"].clone() for e in trained.optimizer.state_dict()["state"].values()]
    trained.amp.disable()
    params = list(trained.model.parameters())
    assert same([p.detach() for p in params], masters)
    own = [trained.optimizer.state[p] for p in params]
    assert same([s["exp_avg"] for s in own], moments)
    assert not any("remainder" in s or "strides" in s for s in own)
    trained.loss(2).backward()
    trained.optimizer.step()
    trained.optimizer.zero_grad()
    assert not same([p.detach() for p in params], masters)
    masters = [p.detach().clone() for p in params]
    trained.amp = handles(trained.model, trained.optimizer, level="O2", **FORMS[form])
    for a, b in zip(trained.masters(), masters, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2.0**-39)
    trained.steps(3)
    assert trained.amp.stats()["skipped"] == 0


@each_small
def test_channels_last_after_enable(
    handles: Callable[..., Any], device: torch.device, form: str
) -> None:
    """The order of memory changes; values, masters and moments go with their elements."""
    found = []
    for changes in (False, True):
        torch.manual_seed(0)
        model = nn.Conv2d(3, 4, 3).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        amp = handles(model, optimizer, level="O2", **FORMS[form])
        x = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(1)).to(device)
        for i in range(4):
            if changes and i == 2:
                before = [m.detach().clone() for m in amp.master_params()]
                moments = optimizer.state_dict()["state"]
                model.to(memory_format=torch.channels_last)
                assert model.weight.is_contiguous(memory_format=torch.channels_last)
                assert same([m.detach() for m in amp.master_params()], before)
                after = optimizer.state_dict()["state"]
                for k in moments:
                    assert torch.equal(moments[k]["exp_avg"], after[k]["exp_avg"])
                    assert torch.equal(moments[k]["exp_avg_sq"], after[k]["exp_avg_sq"])
            take_step(amp, optimizer, model(x).float().square().mean())
        found.append([m.detach().clone() for m in amp.master_params()])
    # random bits go by the order of memory, and convolutions add up in another order
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-2 * 2 / 4)


# writes


@each_form
@pytest.mark.parametrize("named", [False, True])
def test_writes_to_masters_count(run: Any, form: str, named: bool) -> None:
    """Also after the tensor is gone; half parameters follow before the next forward."""
    trained = run(form).steps(0)
    values = (
        list(dict(trained.amp.named_master_params()).values())
        if named
        else list(trained.amp.master_params())
    )
    with torch.no_grad():
        for value in values:
            value.mul_(0.5).add_(2.0**-12)
    expected = [v.detach().clone() for v in values]
    del values, value
    gc.collect()
    trained.model(labelled(0, trained.device)[0])
    assert same(trained.masters(), expected)
    for param, right in zip(trained.model.parameters(), expected, strict=True):
        assert torch.equal(param, right.to(param.dtype))
    trained.steps(1)
    for a, b in zip(trained.masters(), expected, strict=True):
        assert 0 < (a - b).abs().max() < 0.05


@pytest.mark.parametrize("form", ["8bit", *PACKED])
def test_a_write_to_a_master_of_before_the_step_raises(run: Any, form: str) -> None:
    trained = run(form).steps(0)
    old = dict(trained.amp.named_master_params())["first.weight"]
    trained.steps(1)
    before = trained.masters()
    with torch.no_grad():
        old.add_(1.0)
    with pytest.raises(RuntimeError, match="masters='packed' or state='8bit' was written to"):
        trained.steps(2)
    trained.optimizer.zero_grad()
    assert same(trained.masters(), before)
    trained.steps(3)


@each_form
def test_writes_to_half_parameters_are_seen(run: Any, form: str) -> None:
    """A master is within half a unit of the written value, or equals it (form "fp32")."""
    trained = run(form).steps(0)
    list(trained.amp.master_params())
    weight = trained.model.first.weight
    with torch.no_grad():
        weight.clamp_(-0.1, 0.1)
        trained.model.last.weight.copy_(torch.full_like(trained.model.last.weight, 0.75))
    named = dict(trained.amp.named_master_params())
    assert named["first.weight"].abs().max() <= 0.1 * (1 + 2**-10)
    ulp = 2.0**-11
    assert (named["last.weight"] - 0.75).abs().max() <= ulp / 2
    trained.steps(1)
    named = dict(trained.amp.named_master_params())
    assert (named["last.weight"] - 0.75).abs().max() < 0.02


# copies, errors


@each_small
@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("half", [HALF, None], ids=str)
def test_copies_of_an_optimizer(
    device: torch.device, form: str, half: torch.dtype | None, how: Callable[[Any], Any]
) -> None:
    """They keep the format, and step to the same bits."""
    torch.manual_seed(0)
    model = Net().to(device, half or torch.float32)
    optimizer = tritonamp.optim.AdamW(model.parameters(), lr=1e-2, **FORMS[form])

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        x, y = labelled(seed, device)
        loss = nn.functional.cross_entropy(model(x.to(half or torch.float32)).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step(model, optimizer, 0)
    other_model, other = how((model, optimizer))
    for m, o in ((model, optimizer), (other_model, other)):
        step(m, o, 1)
    assert same(snapshot(model, optimizer), snapshot(other_model, other))
    assert other.state_dict(packed=True)["state"][0].keys() == (
        optimizer.state_dict(packed=True)["state"][0].keys()
    )


def refused(
    match: str, error: type[Exception], make: Callable[[list[nn.Parameter]], Any], **fields: Any
) -> None:
    """Nothing is changed by an ``enable`` that raises."""
    model = Net()
    optimizer = make(list(model.parameters()))
    before, kind = snapshot(model, optimizer), type(optimizer)
    with pytest.raises(error, match=match):
        tritonamp.enable(model, optimizer, **{"level": "O2"} | fields)
    assert same(snapshot(model, optimizer), before)
    assert type(optimizer) is kind and type(model) is Net
    assert all(p.dtype is torch.float32 for p in model.parameters())


def test_an_unknown_format_is_refused() -> None:
    match = r"state: expected one of 'fp32', 'bf16', '8bit', got 'fp8'"
    refused(match, ValueError, torch.optim.AdamW, state="fp8")
    with pytest.raises(ValueError, match=match):
        tritonamp.optim.AdamW(Net().parameters(), state="fp8")


@pytest.mark.parametrize(
    ("make", "state"),
    [
        (torch.optim.NAdam, "8bit"),
        (torch.optim.NAdam, "bf16"),
        (partial(torch.optim.NAdam, differentiable=True), "bf16"),
        (lambda p: tritonamp.optim.Muon([p[0]], adamw_params=p[1:]), "8bit"),
        (lambda p: tritonamp.optim.Muon([p[0]], adamw_params=p[1:]), "bf16"),
    ],
    ids=["NAdam", "NAdam bf16", "differentiable NAdam", "Muon", "Muon bf16"],
)
def test_optimizers_that_cannot_are_refused(make: Any, state: str) -> None:
    refused(f"state='{state}': expected an optimizer whose step can keep", ValueError, make,
            state=state)  # fmt: skip


OF_FUSED_STEPS = [
    ("state", "bf16"),
    ("state", "8bit"),
    ("masters", "packed"),
    ("offload", "state"),
]


def built(**fields: Any) -> Any:
    return partial(tritonamp.optim.AdamW, **fields)


@pytest.mark.parametrize(
    ("match", "make", "fields"),
    [
        ("needs FP32 values", "AdamW", {"level": "O3", "state": "8bit"}),
        (
            "state='8bit': expected one format for each optimizer, got AdamW, which was built with "
            "state='bf16'",
            built(state="bf16"),
            {"state": "8bit"},
        ),
        (
            "state='8bit': expected a level with FP32 values, got a level without",
            built(state="8bit"),
            {"level": "O3"},
        ),
        (
            "masters: expected one of None, 'packed', 'fp32', got '8bit'",
            "AdamW",
            {"masters": "8bit"},
        ),
        (
            "masters='fp32' needs state='fp32' or 'bf16': masters of state='8bit' are packed",
            "AdamW",
            {"masters": "fp32", "state": "8bit"},
        ),
        (
            "masters='fp32': expected state='fp32' or 'bf16', got state='8bit'",
            built(state="8bit"),
            {"masters": "fp32"},
        ),
        *[
            (match, make, {"level": level, **fields})
            for level in ("O0", "O1", "O3")
            for match, make, fields in [
                ("masters='packed' needs FP32 masters of half", "AdamW", {"masters": "packed"}),
                ("masters='packed': expected a level with FP32", built(masters="packed"), {}),
            ]
        ],
        (
            "masters='packed': expected one form for each optimizer, got AdamW, which was built "
            "with masters='fp32'",
            built(masters="fp32"),
            {"masters": "packed"},
        ),
        *[
            (
                f"state='{state}': expected centered=False, got a group of RMSprop with "
                "centered=True, whose moments may not be rounded: use state='fp32'",
                partial(torch.optim.RMSprop, centered=True),
                {"state": state},
            )
            for state in ("bf16", "8bit")
        ],
        (
            "masters='packed': expected an optimizer with a fused step, got Adagrad, which runs",
            "Adagrad",
            {"masters": "packed"},
        ),
        *[
            (
                f"{name}='{value}': expected an optimizer with a fused step, got RMSprop with "
                f"differentiable=True, which takes torch's step: leave differentiable out, or, "
                f"for tensors that are no leaves and need it, leave {name} out",
                partial(torch.optim.RMSprop, differentiable=True),
                {name: value},
            )
            for name, value in OF_FUSED_STEPS
        ],
    ],
    ids=str,
)
def test_conflicts_are_refused(match: str, make: Any, fields: dict[str, Any]) -> None:
    make = OPTIMIZERS[make] if isinstance(make, str) else make
    refused(re.escape(match), ValueError, make, **fields)


@pytest.mark.parametrize(
    ("kind", "fields", "match"),
    [
        ("Muon", {"state": "8bit"}, "state='8bit': expected an optimizer whose step can keep"),
        (
            "Lion",
            {"masters": "half"},
            "masters: expected one of None, 'packed', 'fp32', got 'half'",
        ),
        ("SGD", {"masters": "fp32", "state": "8bit"}, "masters='fp32': expected state='fp32' or"),
        *[
            (
                kind,
                {"differentiable": True, name: value},
                f"{name}='{value}': expected an optimizer with a fused step, got {kind} with "
                "differentiable=True",
            )
            for kind in ("Adam", "AdamW", "SGD")
            for name, value in OF_FUSED_STEPS[:3]
        ],
    ],
)
def test_optimizers_are_not_built_with_conflicts(
    kind: str, fields: dict[str, Any], match: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(match)):
        getattr(tritonamp.optim, kind)([nn.Parameter(torch.ones(2, 2))], lr=0.1, **fields)


@each_small
def test_amsgrad_may_come_later(run: Any, form: str) -> None:
    trained = run(form).steps(0)
    trained.optimizer.param_groups[0]["amsgrad"] = True
    trained.steps(1)
    for entry in trained.optimizer.state.values():
        assert entry["max_exp_avg_sq"].dtype is entry["exp_avg_sq"].dtype


@pytest.mark.parametrize("form", ["bf16", "8bit"])
def test_rmsprop_may_not_become_centered(run: Any, form: str) -> None:
    """Of rounded moments the variance may be far below 0, and its root is NaN."""
    trained = run(form, optimizer="RMSprop").steps(0, 1)
    trained.optimizer.param_groups[0]["centered"] = True
    before = snapshot(trained.model, trained.optimizer)
    with pytest.raises(ValueError, match=f"state='{form}': expected centered=False"):
        trained.steps(2)
    assert same(snapshot(trained.model, trained.optimizer), before)


@pytest.mark.parametrize("form", ["bf16", "8bit"])
def test_a_centered_group_is_refused_before_anything_changes(run: Any, form: str) -> None:
    trained = run(form, optimizer="RMSprop").steps(0, 1)
    optimizer, param = trained.optimizer, nn.Parameter(torch.ones(3))
    state = optimizer.state_dict()
    state["param_groups"][0]["centered"] = True
    before, groups = snapshot(trained.model, optimizer), copy.deepcopy(optimizer.param_groups)
    with pytest.raises(ValueError, match=f"state='{form}': expected centered=False"):
        optimizer.load_state_dict(state)
    with pytest.raises(ValueError, match=f"state='{form}': expected centered=False"):
        optimizer.add_param_group({"params": [param], "centered": True})
    assert same(snapshot(trained.model, optimizer), before)
    assert len(optimizer.param_groups) == len(groups) and not optimizer.param_groups[0]["centered"]
    # one group may not change, and the other one may: neither does
    optimizer.add_param_group({"params": [param]})
    optimizer.param_groups[0]["momentum"], optimizer.param_groups[1]["centered"] = 0.9, True
    with pytest.raises(ValueError, match=f"state='{form}': expected centered=False"):
        trained.steps(2)
    assert not any("momentum_buffer" in own for own in optimizer.state.values())


@pytest.mark.parametrize("fields", [{"masters": "packed"}, {"state": "8bit"}], ids=str)
def test_sparse_gradients_of_packed_masters_are_refused(
    handles: Callable[..., Any], fields: dict[str, str]
) -> None:
    """torch's own step would round its updates to the half parameters."""
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    amp = handles(model, optimizer, level="O2", dtype=BF16, **fields)
    before = snapshot(model, optimizer)
    amp.backward(model(torch.arange(4)).sum())
    with pytest.raises(RuntimeError, match="expected dense gradients, got sparse ones"):
        optimizer.step()
    assert same(snapshot(model, optimizer), before)
    # what the message says: leave masters and state out
    amp.disable()
    optimizer.zero_grad()
    amp = handles(model, optimizer, level="O2", dtype=BF16)
    amp.backward(model(torch.arange(4)).sum())
    optimizer.step()
    assert not same(snapshot(model, optimizer)[:1], before[:1])


def test_a_lion_refuses_the_state_of_an_adam() -> None:
    """torch would load it, with Adam's hyperparameters."""
    adam, lion = (
        kind([nn.Parameter(torch.ones(3))], lr=lr)
        for kind, lr in ((tritonamp.optim.AdamW, 0.5), (tritonamp.optim.Lion, 0.25))
    )
    for optimizer in (adam, lion):
        optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
        optimizer.step()
    before, group = snapshot(lion), dict(lion.param_groups[0])
    with pytest.raises(ValueError, match="state 0: exp_avg_sq, which a Lion does not keep"):
        lion.load_state_dict(adam.state_dict())
    assert same(snapshot(lion), before) and lion.param_groups[0] == group


def test_packed_state_of_our_optimizers_stays_packed(run: Any) -> None:
    trained = run("8bit", optimizer="our AdamW").steps(0)
    for packed, dtype in ((True, torch.uint8), (False, torch.float32)):
        state = trained.optimizer.state_dict(packed=packed)["state"]
        assert {own["exp_avg"].dtype for own in state.values()} == {dtype}


@pytest.mark.steps
@each_small
def test_a_captured_step(gpu: AnyCuda, form: str) -> None:
    runs = [Small(form, device="cuda") for _ in range(2)]
    x, y = labelled(0, "cuda")

    def step(run: Small) -> None:
        loss = nn.functional.cross_entropy(run.model(x).float(), y)
        take_step(run.amp, run.optimizer, loss)

    captured, other = runs
    for _ in range(2):
        for run in runs:
            step(run)
    with gpu.capture() as graph:
        step(captured)
    for _ in range(2):
        graph.replay()
        step(other)
    assert same(captured.everything(), other.everything())
    for run in runs:
        run.end()
