"""enable and disable: same objects, copies, pickles, schedulers, groups, checkpoints, odd
parameters.
"""

import contextlib
import copy
import gc
import io
import pickle
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import dispatch_tables, take_step
from runs import LEVELS, named
from torch import Tensor, nn

import tritonamp
from tritonamp.casts import active, dispatch


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.last = nn.Linear(4 * 16, 3)
        self.register_buffer("table", torch.linspace(0, 1, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(self.conv(x))).flatten(1)) + self.table


def make(device: torch.device) -> tuple[ConvNet, torch.optim.Optimizer, Tensor]:
    torch.manual_seed(0)
    model = ConvNet().to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), torch.randn(8, 1, 4, 4).to(device)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, amp: Any, x: Tensor, steps: int = 3
) -> None:
    for _ in range(steps):
        amp.backward(model(x).square().mean() * 1e-2)  # small enough for the initial scale
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("level", LEVELS)
def test_enable_and_disable_leave_everything_as_it_was(
    handles: Any, device: torch.device, level: str
) -> None:
    tables = dispatch_tables()
    model, optimizer, _ = make(device)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    values = {name: t.clone() for name, t in model.state_dict().items()}
    params, groups, attributes = (
        list(model.parameters()),
        copy.copy(optimizer.param_groups),
        set(vars(optimizer)),
    )
    amp = handles(model, optimizer, level=level)
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    assert isinstance(model, ConvNet)
    assert type(model).__name__ == "ConvNet"
    assert repr(model).startswith("ConvNet(")
    half = level in ("O2", "O3")
    assert model.conv.weight.dtype == (torch.float16 if half else torch.float32)
    assert model.norm.weight.dtype == (torch.float16 if level == "O3" else torch.float32)
    assert all(p.dtype == torch.float32 for p in amp.master_params()) or level == "O3"
    amp.disable()
    assert type(model) is ConvNet
    assert type(optimizer) is torch.optim.AdamW
    assert set(vars(optimizer)) == attributes
    assert scheduler.optimizer is optimizer
    assert all(a is b for a, b in zip(groups, optimizer.param_groups, strict=True))
    assert all(a is b for a, b in zip(params, optimizer.param_groups[0]["params"], strict=True))
    assert all(
        torch.equal(v, values[k]) and v.dtype == values[k].dtype
        for k, v in model.state_dict().items()
    )
    assert not hasattr(model, "_tritonamp")
    assert dispatch_tables() == tables


@pytest.mark.parametrize("level", LEVELS)
def test_disable_keeps_what_was_trained_and_the_optimizer_goes_on(
    handles: Any, device: torch.device, level: str
) -> None:
    model, optimizer, x = make(device)
    amp = handles(model, optimizer, level=level)
    train(model, optimizer, amp, x)
    trained = {k: v.clone() for k, v in model.state_dict().items()}
    moments = [optimizer.state[p]["exp_avg"].clone() for p in optimizer.param_groups[0]["params"]]
    amp.disable()
    assert all(
        v.dtype == trained[k].dtype and torch.equal(v, trained[k])
        for k, v in model.state_dict().items()
    )
    for p, m in zip(model.parameters(), moments, strict=True):
        assert torch.equal(optimizer.state[p]["exp_avg"], m)
    model(x).square().mean().backward()
    optimizer.step()
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("level", LEVELS)
def test_a_with_block_disables_at_its_end(device: torch.device, level: str) -> None:
    model, optimizer, x = make(device)
    with tritonamp.enable(model, optimizer, level=level) as amp:
        assert isinstance(amp, tritonamp.Amp)
        train(model, optimizer, amp, x)
    assert type(model) is ConvNet and type(optimizer) is torch.optim.AdamW
    with pytest.raises(RuntimeError, match="this model was disabled"), amp:
        pass


def test_a_with_block_disables_after_an_exception_and_not_twice(device: torch.device) -> None:
    model, optimizer, _ = make(device)
    with pytest.raises(ZeroDivisionError), tritonamp.enable(model, optimizer, level="O2"):
        raise ZeroDivisionError
    assert type(model) is ConvNet and type(optimizer) is torch.optim.AdamW
    with tritonamp.enable(model, optimizer, level="O2") as amp:
        amp.disable()
    assert type(model) is ConvNet


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam])
def test_around_step_surrounds_decision_and_step(
    handles: Any, device: torch.device, level: str, kind: Any
) -> None:
    seen: list[Any] = []

    @contextlib.contextmanager
    def around_step(optimizer: torch.optim.Optimizer) -> Iterator[None]:
        seen.append((optimizer, amp.stats()["steps"]))
        yield
        seen.append(amp.stats()["steps"])

    model, _, x = make(device)
    optimizer = kind(model.parameters())
    amp = handles(model, optimizer, level=level, around_step=around_step)
    train(model, optimizer, amp, x, steps=2)
    assert seen == [(optimizer, 0), 1, (optimizer, 1), 2]


@pytest.mark.parametrize("level", LEVELS)
def test_copies_behave_like_the_original_and_pickles_like_the_plain_model(
    handles: Any, device: torch.device, level: str
) -> None:
    model, optimizer, x = make(device)
    amp = handles(model, optimizer, level=level)
    train(model, optimizer, amp, x)
    model.eval()
    expected = model(x)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    plain_model = ConvNet().to(device).eval()
    plain_model.load_state_dict(model.state_dict())
    copies = {
        "copy": copy.deepcopy(copy.copy(model)),
        "deepcopy": copy.deepcopy(model),
        "pickle": pickle.loads(pickle.dumps(model)),
        "torch.save": torch.load(buffer, weights_only=False),
    }
    for name, other in copies.items():
        pickled = name in ("pickle", "torch.save")
        assert isinstance(other, ConvNet), name
        assert (type(other) is ConvNet) is pickled, name
        if level == "O3" and not pickled:  # FP32 weights under the op table: test_copies.py
            torch.testing.assert_close(other(x), expected, rtol=2**-9, atol=2**-9)
        else:
            assert torch.equal(other(x), plain_model(x) if pickled else expected), name
        with torch.no_grad():
            other.last.weight.zero_()
        assert torch.equal(model(x), expected), f"{name} shares weights"
        assert not torch.equal(other(x), expected), f"{name} runs the original's forward"
    plain = copy.deepcopy(optimizer)
    assert type(plain) is torch.optim.AdamW
    amp.disable()
    copy_alone = copies["deepcopy"]
    assert copy_alone(x).dtype == torch.float32  # a copy outlives the original
    # no model owns the table that the copy registered again
    dispatch.acquire()
    dispatch.release()


def test_a_copy_that_outlives_the_original_has_the_rules(
    handles: Any, device: torch.device
) -> None:
    model, optimizer, x = make(device)
    amp = handles(model, optimizer, level="O1")
    alone = copy.deepcopy(model)
    amp.disable()
    assert not dispatch.is_registered()
    alone(x)
    registered = dispatch.is_registered()
    dispatch.acquire()
    dispatch.release()
    assert registered


def test_half_parameters_get_fp32_masters(handles: Any, device: torch.device) -> None:
    model = nn.Linear(4, 4, device=device).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = tritonamp.Policy(half_parameters=True, master_weights=True)
    amp = handles(model, optimizer, level=policy)
    masters = list(amp.master_params())
    assert [master.dtype for master in masters] == [torch.float32] * 2
    for master, half in zip(masters, model.parameters(), strict=True):
        assert torch.equal(master, half.float())


def test_a_model_that_is_unhealed_as_a_whole_computes_in_half_again(
    handles: Any, device: torch.device
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = handles(model, optimizer, level="O1")
    seen: list[torch.dtype] = []
    model[0].register_forward_hook(lambda module, args, result: seen.append(result.dtype))
    for change in (lambda name: None, amp.heal, amp.unheal):
        change("")
        model(torch.ones(2, 4, device=device))
    assert seen == [torch.float16, torch.float32, torch.float16]


@pytest.mark.parametrize("half", [None, torch.float16], ids=["FP32", "half"])
@pytest.mark.parametrize(("first", "last"), [("0", ""), ("", "0")])
def test_what_stays_healed_when_one_inside_or_around_it_is_not(
    handles: Any, device: torch.device, first: str, last: str, half: torch.dtype | None
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device, half)
    amp = handles(model, level="O2", dtype=torch.float16)
    amp.heal(first)
    amp.heal(last)
    amp.unheal(last)
    healed = model.get_submodule(first)
    assert {p.dtype for p in healed.parameters()} == {torch.float32}
    model(torch.ones(2, 4, device=device))
    amp.unheal(first)
    assert {p.dtype for p in model.parameters()} == {torch.float16}


def test_schedulers_made_before_and_after(handles: Any, device: torch.device) -> None:
    model, optimizer, x = make(device)
    before = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 / (i + 1))
    amp = handles(model, optimizer, level="O2")
    after = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    seen = []
    for _ in range(3):
        start = [p.detach().clone() for p in amp.master_params()]
        train(model, optimizer, amp, x, 1)
        before.step()
        after.step()
        seen.append(optimizer.param_groups[0]["lr"])
        assert not all(torch.equal(a, b) for a, b in zip(start, amp.master_params(), strict=True))
    # LambdaLR sets, ExponentialLR multiplies
    assert seen == pytest.approx([1e-2 / 2 * 0.5, 1e-2 / 3 * 0.5, 1e-2 / 4 * 0.5])
    amp.disable()
    model(x).mean().backward()
    optimizer.step()
    before.step()


def test_step_hooks_fire_once(handles: Any, device: torch.device) -> None:
    for optimizer_class in (torch.optim.AdamW, torch.optim.SGD):
        model, _, x = make(device)
        optimizer = optimizer_class(model.parameters(), lr=1e-3)
        fired: list[str] = []
        optimizer.register_step_pre_hook(lambda *_, log=fired: log.append("pre"))
        optimizer.register_step_post_hook(lambda *_, log=fired: log.append("post"))
        model.register_forward_hook(lambda *_, log=fired: log.append("forward"))
        amp = handles(model, optimizer, level="O2")
        train(model, optimizer, amp, x, 1)
        assert fired == ["forward", "pre", "post"]


def test_add_param_group_later(handles: Any, device: torch.device) -> None:
    model, _, x = make(device)
    original = model.last.weight.detach().clone()
    optimizer = torch.optim.SGD(model.conv.parameters(), lr=0.1)
    amp = handles(model, optimizer, level="O2")
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        optimizer.add_param_group({"params": [model.conv.weight]})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": model.last.parameters(), "lr": 0.01})
    master = optimizer.param_groups[1]["params"][0]
    assert master.dtype == torch.float32
    assert torch.equal(master, original), (
        "the master starts from the FP32 value, not from the rounded one"
    )
    train(model, optimizer, amp, x, 1)
    assert not torch.equal(master, original)
    assert torch.equal(model.last.weight, master.half())


def calls_of_enable(handles: Any, tensors: int) -> int:
    """Return how many functions are called, of Python's and C's; each tensor in a group."""
    model = nn.ParameterList(torch.zeros(1) for _ in range(tensors))
    optimizer = torch.optim.AdamW([{"params": [p]} for p in model])
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        amp = handles(model, optimizer, level="O2")
    finally:
        sys.setprofile(None)
    amp.disable()
    return calls


def test_a_tensor_costs_the_same_in_a_larger_model(handles: Any) -> None:
    handles(ConvNet(), level="O2")  # what is found out once is known
    few, twice, thrice = (calls_of_enable(handles, tensors) for tensors in (100, 200, 300))
    assert thrice - twice < 1.1 * (twice - few)


def test_parameters_that_came_later_are_named(handles: Any, device: torch.device) -> None:
    model, _, x = make(device)
    amp = handles(model, torch.optim.SGD(model.conv.parameters(), lr=0.1), level="O2")
    amp.backward(model(x).square().mean() * 1e-2)
    optimizer = amp._parts.optimizers[0]
    optimizer.step()
    model.extra = nn.Linear(3, 3).to(device)
    optimizer.add_param_group({"params": model.extra.parameters()})
    optimizer.zero_grad()
    amp.backward(model.extra(model(x)).square().mean() * 1e-2)
    model.extra.weight.grad.fill_(float("inf"))
    optimizer.step()
    assert "1 parameter(s) were inf: extra.weight" in amp.explain()


def test_moving_an_enabled_model_moves_its_op_policy(handles: Any, device: torch.device) -> None:
    model, _, _ = make(device)
    handles(model, level="O1")
    nn.Sequential(model).to("meta")
    assert model._tritonamp.device_type == "meta"
    model.to_empty(device=device)
    assert model._tritonamp.device_type == device.type


@pytest.mark.parametrize("reentrant", [False, True])
def test_stock_checkpoints_beside_an_enabled_model(
    handles: Any, device: torch.device, reentrant: bool
) -> None:
    from torch.utils.checkpoint import checkpoint

    def run() -> tuple[Tensor, Tensor | None]:
        torch.manual_seed(1)
        linear, x = nn.Linear(4, 4).to(device), torch.ones(2, 4, device=device, requires_grad=True)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            y = checkpoint(lambda t: linear(t).softmax(-1).sum(), x, use_reentrant=reentrant)
        y.backward()
        return y.detach(), x.grad

    plain = run()
    model, optimizer, x = make(device)
    amp = handles(model, optimizer, level="O2")
    train(model, optimizer, amp, x, 1)
    after = run()
    assert plain[0].dtype == after[0].dtype
    assert torch.equal(plain[0], after[0])
    assert torch.equal(plain[1], after[1])


def test_frozen_and_later_unfrozen(handles: Any, device: torch.device) -> None:
    model, _, x = make(device)
    model.conv.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    amp = handles(model, optimizer, level="O2")
    frozen = model.conv.weight.detach().clone()
    train(model, optimizer, amp, x, 2)
    assert torch.equal(model.conv.weight, frozen)
    model.conv.requires_grad_(True)
    train(model, optimizer, amp, x, 1)
    assert not torch.equal(model.conv.weight, frozen)


def test_tied_weights_have_one_master(handles: Any, device: torch.device) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, 5)
            self.out = nn.Linear(5, 7, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.embed(x))

    with device:
        model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = handles(model, optimizer, level="O2")
    assert model.out.weight is model.embed.weight
    assert len(list(amp.master_params())) == 1
    train(model, optimizer, amp, torch.arange(7, device=device), 1)
    assert torch.equal(model.out.weight, next(amp.master_params()).half())
    assert set(model.state_dict()) == {"embed.weight", "out.weight"}
    assert {v.dtype for v in model.state_dict().values()} == {torch.float32}


def test_state_dict_is_fp32_from_the_masters(handles: Any, device: torch.device) -> None:
    model, optimizer, x = make(device)
    amp = handles(model, optimizer, level="O2")
    train(model, optimizer, amp, x)
    state = model.state_dict()
    named = dict(model.named_parameters())
    for (name, param), master in zip(named.items(), amp.master_params(), strict=True):
        assert torch.equal(state[name], master)
        assert torch.equal(param, master.to(param.dtype))
    plain = ConvNet().to(device)
    plain.load_state_dict(state)  # strict
    wrapped = nn.DataParallel(model) if device.type == "cuda" else nn.Sequential(model)
    assert all(v.dtype in (torch.float32, torch.int64) for v in wrapped.state_dict().values())


def test_state_dict_dtype_half(handles: Any, device: torch.device) -> None:
    model, optimizer, _ = make(device)
    handles(model, optimizer, level="O2", state_dict_dtype=torch.float16)
    assert model.state_dict()["conv.weight"].dtype == torch.float16


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_loading_after_enable_refreshes_the_masters(
    handles: Any, device: torch.device, level: str, wrap: bool
) -> None:
    model, optimizer, x = make(device)
    torch.manual_seed(5)
    other = ConvNet().to(device).state_dict()
    amp = handles(model, optimizer, level=level)
    target = nn.ModuleDict({"inner": model}) if wrap else model
    target.load_state_dict({("inner." if wrap else "") + k: v for k, v in other.items()})
    assert all(torch.equal(v, other[k]) for k, v in model.state_dict().items())
    start = [p.detach().clone() for p in amp.master_params()]
    train(model, optimizer, amp, x, 1)
    for p, q in zip(start, amp.master_params(), strict=True):
        # one AdamW step of lr 1e-2 away from what was loaded
        assert (p - q).abs().max() <= 1.1e-2 + 1e-3


def test_writing_to_a_half_parameter_reaches_the_master(handles: Any, device: torch.device) -> None:
    model, optimizer, x = make(device)
    amp = handles(model, optimizer, level="O2")
    master = next(amp.master_params())
    before = master.detach().clone()
    with torch.no_grad():
        model.conv.weight[0].fill_(0.25)
    train(model, optimizer, amp, x, 1)
    assert (master[0] - 0.25).abs().max() < 0.02
    assert (master[1:] - before[1:]).abs().max() < 0.02
    assert not torch.equal(before[1:], before[1:].half().float())


def test_writing_to_a_master_reaches_the_forward(handles: Any, device: torch.device) -> None:
    model, optimizer, x = make(device)
    amp = handles(model, optimizer, level="O2")
    train(model, optimizer, amp, x, 1)
    with torch.no_grad():
        for p in amp.master_params():
            p.zero_()
    assert torch.equal(model(x), model.table.expand(8, 3))
    assert not model.last.weight.any()
    model.state_dict()["last.bias"].fill_(1.0)
    assert torch.equal(model(x), model.table + torch.ones_like(model.table).expand(8, 3))


def test_ema_over_masters_moves_where_a_half_one_is_stuck(
    handles: Any, device: torch.device
) -> None:
    model = nn.Linear(8, 8).to(device)
    nn.init.uniform_(model.weight, 0.5, 1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    amp = handles(model, optimizer, level="O2")
    precise = [p.detach().clone() for p in amp.master_params()]
    rounded = [p.detach().clone() for p in model.parameters()]
    start, began = [p.clone() for p in rounded], [p.clone() for p in precise]
    x = torch.ones(4, 8, device=device)
    for _ in range(50):
        take_step(amp, optimizer, model(x).sum())
        for ema, p in zip(precise, amp.master_params(), strict=True):
            ema.lerp_(p.detach(), 1e-4)
        for ema, p in zip(rounded, model.parameters(), strict=True):
            ema.lerp_(p.detach(), 1e-4)
    assert torch.equal(rounded[0], start[0])
    assert (precise[0] < began[0]).all()


def test_two_half_formats_of_the_same_model_agree_on_inference(
    handles: Any, device: torch.device
) -> None:
    model, _, x = make(device)
    model.eval()
    expected = model(x)
    for level in LEVELS:
        for dtype, bound in ((torch.float16, 4e-3), (torch.bfloat16, 4e-2)):
            amp = handles(model, level=level, dtype=dtype)
            with torch.inference_mode():
                torch.testing.assert_close(model(x), expected, rtol=bound, atol=bound)
            amp.disable()


def test_forward_set_on_the_instance(handles: Any, device: torch.device) -> None:
    model, optimizer, x = make(device)
    inner = model.forward
    model.forward = lambda x: inner(x) * 2  # type: ignore[method-assign]
    seen = []
    model.last.register_forward_hook(lambda m, i, o: seen.append(o.dtype))
    own = model.forward
    amp = handles(model, optimizer, level="O1")
    model(x)
    assert seen == [torch.float16]
    amp.disable()
    assert model.forward is own


def test_dropped_without_disable(device: torch.device) -> None:
    tables = dispatch_tables()
    model, optimizer, x = make(device)
    tritonamp.enable(model, optimizer, level="O2")  # the handle is not kept
    assert model(x).dtype == torch.float32
    assert dispatch.is_registered()
    del model, optimizer
    gc.collect()
    assert dispatch_tables() == tables


def test_an_attribute_named_step_stays(handles: Any, device: torch.device) -> None:
    model, optimizer, x = make(device)
    model.step = 7  # type: ignore[assignment]
    amp = handles(model, optimizer, level="O2")
    train(model, optimizer, amp, x, 1)
    assert model.step == 7


def test_forward_keeps_its_signature(handles: Any, device: torch.device) -> None:
    import inspect

    model, _, _ = make(device)
    handles(model, level="O1")
    assert list(inspect.signature(model.forward).parameters) == ["x"]


def test_forward_in_another_thread(handles: Any, device: torch.device) -> None:
    model, _, x = make(device)
    model.eval()
    handles(model, level="O2")
    expected, results = model(x), []
    thread = threading.Thread(target=lambda: results.append(model(x)))
    thread.start()
    thread.join()
    assert torch.equal(results[0], expected)
    assert active.active() is None


def test_exception_in_forward_leaves_nothing_behind(handles: Any, device: torch.device) -> None:
    model, _, x = make(device)
    handles(model, level="O1")
    with pytest.raises(RuntimeError):
        model(x[:, :, :2])
    assert active.active() is None
    assert not torch.is_autocast_enabled(device.type)


def test_optimizer_with_state_goes_on(handles: Any, device: torch.device) -> None:
    """Enabled in mid-run: the moments move to the masters."""
    model, optimizer, x = make(device)
    for _ in range(3):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    steps = [float(optimizer.state[p]["step"]) for p in model.parameters()]
    amp = handles(model, optimizer, level="O2")
    train(model, optimizer, amp, x, 1)
    assert [float(optimizer.state[p]["step"]) for p in amp.master_params()] == [
        s + 1 for s in steps
    ]
    assert set(optimizer.state) == set(amp.master_params())


class Lion(torch.optim.Optimizer):
    """A third party's optimizer."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    assert p.dtype == p.grad.dtype == torch.float32
                    p.add_(p.grad.sign(), alpha=-group["lr"])


class OwnAdam(torch.optim.AdamW):
    """Derived from AdamW, with a step of its own that must not be replaced."""

    def step(self, closure: Any = None) -> None:
        self.stepped = True
        super().step()


OF_TORCH = "SGD RMSprop Adagrad NAdam RAdam Adam Adamax Adadelta ASGD Rprop Adafactor"
OPTIMIZERS = {
    **named(*OF_TORCH.split()),
    "Lion": Lion,
    "OwnAdam": OwnAdam,
    "ours": tritonamp.optim.Adam,
}


@pytest.mark.steps
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_every_optimizer_follows_fp32(
    handles: Any, device: torch.device, level: str, name: str
) -> None:
    runs = []
    for enabled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
        optimizer = OPTIMIZERS[name](model.parameters(), lr=1e-3)
        amp = handles(model, optimizer, level=level) if enabled else None
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(1)).to(device)
        for _ in range(10):
            loss = (model(x) - 1).square().mean()
            if amp is None:
                loss.backward()
            else:
                amp.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        runs.append(
            [p.detach().clone() for p in (amp.master_params() if amp else model.parameters())]
        )
        if name == "OwnAdam":
            assert optimizer.stepped
    for a, b in zip(*runs, strict=True):
        # a gradient near zero may round to the other sign: steps of about lr (of 10 lr at first for
        # RMSprop and Rprop) whatever its size, ten of them
        torch.testing.assert_close(
            b, a, rtol=0, atol=2e-2 if name in ("RMSprop", "Rprop") else 5e-3
        )


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon(handles: Any, device: torch.device) -> None:
    model = nn.Linear(8, 8, bias=False).to(device)
    optimizer = torch.optim.Muon(model.parameters(), lr=1e-2)
    amp = handles(model, optimizer, level="O2")
    before = model.weight.detach().clone()
    train(model, optimizer, amp, torch.randn(4, 8, device=device))
    assert not torch.equal(model.weight, before)


def test_sparse_gradients(handles: Any, device: torch.device) -> None:
    """Duplicate indices are summed before they are judged, and SGD takes the sparse gradient as it
    is.
    """
    for level in ("O1", "O2"):
        model = nn.Embedding(5, 3, sparse=True).to(device)
        start = model.weight.detach().clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        amp = handles(model, optimizer, level=level, loss_scale=8.0)
        amp.backward(model(torch.tensor([1, 1, 3], device=device)).sum())
        optimizer.step()
        moved = start - next(amp.master_params()).detach()
        assert torch.equal(
            moved.round(), torch.tensor([0.0, 2, 0, 1, 0], device=device)[:, None].expand(5, 3)
        )


@pytest.mark.compiled
def test_compiled_model(handles: Any, device: torch.device) -> None:
    for level in LEVELS:
        model, _, x = make(device)
        model.eval()
        handles(model, level=level)
        expected = model(x)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x), expected)
        assert active.active() is None


def test_torchs_ops_are_looked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tritonamp.enable(nn.Linear(1, 1)).disable()
    assert not dispatch.is_registered()
    monkeypatch.setattr(torch._C, "_dispatch_get_all_op_names", None)
    tritonamp.enable(nn.Linear(1, 1)).disable()


@pytest.mark.compiled
def test_enabling_a_compiled_wrapper_enables_the_original(
    handles: Any, device: torch.device
) -> None:
    model, optimizer, x = make(device)
    compiled = torch.compile(model, backend="aot_eager")
    amp = handles(compiled, optimizer, level="O2")
    assert model.conv.weight.dtype == torch.float16
    train(compiled, optimizer, amp, x, 1)
    assert amp.stats()["steps"] == 1
