"""optim.Adam and optim.AdamW: torch's optimizers on FP32, FP64 and complex parameters, FP32 masters
on half ones.
"""

import copy
import functools
import io
import itertools
import pickle
import pydoc
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import agree, odd_parameters, snapshot, torchs_database
from torch import Tensor
from torch.nn import Parameter

import tritonamp
from tritonamp import optim

HALVES = [torch.float16, torch.bfloat16]
TORCHS = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}
OURS = {"Adam": optim.Adam, "AdamW": optim.AdamW}
INF, NAN = float("inf"), float("nan")
HYPERPARAMETERS: dict[str, dict[str, Any]] = {
    "default": {},
    "eps": {"eps": 0.5},
    "betas": {"betas": (0.5, 0.75)},
    "all": {
        "lr": 0.02,
        "betas": (0.8, 0.9),
        "weight_decay": 0.1,
        "amsgrad": True,
        "maximize": True,
    },
}

each_name = pytest.mark.parametrize("name", TORCHS)
each_half = pytest.mark.parametrize("half", HALVES, ids=str)
each_setting = pytest.mark.parametrize("setting", HYPERPARAMETERS)


def gradients(
    params: list[Parameter], steps: int, seed: int = 0, dtype: torch.dtype | None = None
) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def one(param: Parameter) -> Tensor:
        wide = torch.complex64 if param.is_complex() else torch.float32
        return torch.randn(param.shape, generator=generator, dtype=wide).to(
            param.device, dtype or param.dtype
        )

    return [[one(param) for param in params] for _ in range(steps)]


def train(
    optimizer: torch.optim.Optimizer,
    grads: list[list[Tensor]],
    after: Callable[[], object] = lambda: None,
) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for row in grads:
        for param, grad in zip(params, row, strict=True):
            param.grad = grad.clone()
        optimizer.step()
        after()


def clone(params: list[Parameter]) -> list[Parameter]:
    return [Parameter(p.detach().clone()) for p in params]


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor


def same_bits(a: list[Tensor], b: list[Tensor]) -> bool:
    """NaN equals itself here."""
    return len(a) == len(b) and all(
        (x.dtype, x.shape) == (y.dtype, y.shape) and torch.equal(bits(x), bits(y))
        for x, y in zip(a, b, strict=True)
    )


def assert_follows(ours: torch.optim.Optimizer, torchs: torch.optim.Optimizer, steps: int) -> None:
    """A step rounds p twice, u |p| each, in each of the two runs, and its update, at most 2 lr
    here, carries under 64 roundings. With weight decay the deviation of p is fed back, lr times
    smaller. m forgets: 10 steps of 4 u |g|; v sums up to 5 u relatively a step. A tensor lr or beta
    of FP32 makes torch's update FP32.
    """
    for group, reference in zip(ours.param_groups, torchs.param_groups, strict=True):
        hypers = [h for h in (group["lr"], *group["betas"]) if isinstance(h, Tensor)]
        for p, q in zip(group["params"], reference["params"], strict=True):
            if not p.numel():
                continue
            u = torch.finfo(q.dtype).eps / 2
            u_update = max([u, *(torch.finfo(h.dtype).eps / 2 for h in hypers)])
            drift = steps * (4 * u * q.abs().max().item() + 2 * 64 * u_update * float(group["lr"]))
            torch.testing.assert_close(p, q, rtol=0, atol=drift)
            if p not in ours.state:
                continue
            state, expected = ours.state[p], torchs.state[q]
            assert state["step"].item() == expected["step"].item()
            atol = 80 * u_update * 4 + group["weight_decay"] * drift
            torch.testing.assert_close(state["exp_avg"], expected["exp_avg"], rtol=0, atol=atol)
            for key in ("exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])):
                rtol = 5 * min(steps, 1000) * u_update
                torch.testing.assert_close(
                    state[key], expected[key], rtol=rtol, atol=8 * group["weight_decay"] * drift
                )


def assert_same_format(ours: dict[str, Any], torchs: dict[str, Any]) -> None:
    assert ours["param_groups"] == torchs["param_groups"]
    assert list(ours["state"]) == list(torchs["state"])
    for number, state in torchs["state"].items():
        assert list(ours["state"][number]) == list(state)
        for key, value in state.items():
            mine = ours["state"][number][key]
            assert (mine.dtype, mine.shape, mine.stride()) == (
                value.dtype,
                value.shape,
                value.stride(),
            )
            assert mine.device == value.device or key == "step"


# torch's own cases


@functools.cache
def database() -> dict[str, Any]:
    optim_db = torchs_database("common_optimizers", "optim_db")
    return {info.optim_cls.__name__: info for info in optim_db}


@pytest.mark.steps
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
@each_name
def test_optimizer_database(device: torch.device, name: str, dtype: torch.dtype) -> None:
    """Asked for "cuda", it also yields the inputs with tensor lr and betas, which are capturable
    there.
    """
    inputs = database()[name].optim_inputs_func(device="cuda")
    assert len(inputs) >= 10
    for case in inputs:
        params, others = (odd_parameters(device, dtype)[::3] for _ in range(2))
        kwargs, reference = copy.deepcopy(case.kwargs), copy.deepcopy(case.kwargs)
        reference.pop("capturable", None)  # torch has none of it on a CPU
        ours, torchs = (
            OURS[name](params, **kwargs),
            TORCHS[name](others, **reference, foreach=False),
        )
        for optimizer in (ours, torchs):
            train(optimizer, gradients(params, 100))
        assert_follows(ours, torchs, 100)


def outcome(make: Callable[[], object]) -> tuple[type, str]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            make()
        except Exception as error:
            return type(error), str(error)
    pytest.fail("nothing was raised")


@each_name
def test_error_inputs_of_the_database(name: str) -> None:
    errors = database()[name].optim_error_inputs_func("cpu", torch.float32)
    assert len(errors) >= 10
    for error in errors:
        case = error.optimizer_error_input
        params = [Parameter(torch.zeros(1))] if case.params is None else case.params
        ours, torchs = (
            outcome(functools.partial(cls, params, **case.kwargs))
            for cls in (OURS[name], TORCHS[name])
        )
        assert ours == torchs
        assert ours[0] is error.error_type
        assert re.search(error.error_regex, ours[1])


@each_name
def test_sparse_gradients_are_refused_as_in_torch(device: torch.device, name: str) -> None:
    param = Parameter(torch.zeros(3, device=device))
    param.grad = torch.ones(3, device=device).to_sparse()
    text = outcome(TORCHS[name]([param]).step)
    assert outcome(OURS[name]([param]).step) == text
    assert text[1] == "Adam does not support sparse gradients, please consider SparseAdam instead"


# hyperparameters


@pytest.mark.steps
@each_name
def test_groups_and_schedules(device: torch.device, name: str) -> None:
    runs = []
    for cls in (OURS[name], TORCHS[name]):
        first, second, third, fourth = odd_parameters(device)
        groups = [
            {"params": [first], "lr": 0.01, "weight_decay": 0.0},
            {"params": [second, third], "betas": (0, 0.5), "eps": 0.25, "amsgrad": True},
            {"params": [fourth], "maximize": True, "weight_decay": 0.5},
        ]
        optimizer = cls(groups, lr=0.05, weight_decay=0.1)
        schedulers = [
            torch.optim.lr_scheduler.OneCycleLR(
                optimizer, max_lr=[0.1, 0.01, 0.2], total_steps=100
            ),
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99),
        ]
        train(
            optimizer,
            gradients([first, second, third, fourth], 100),
            lambda s=schedulers: [x.step() for x in s],
        )
        runs.append(optimizer)
    assert runs[0].param_groups[0]["lr"] == runs[1].param_groups[0]["lr"] != 0.01
    for group in (*runs[0].param_groups, *runs[1].param_groups):
        group["lr"] = 0.2  # the largest, for the bound
    assert_follows(*runs, 100)


@each_name
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
@pytest.mark.parametrize("kind", [torch.float32, torch.float64], ids=str)
def test_a_tensor_lr(
    device: torch.device, name: str, shape: tuple[int, ...], kind: torch.dtype
) -> None:
    """A schedule writes to it in place, so it is read again every step."""
    runs = []
    for cls in (OURS[name], TORCHS[name]):
        lr = torch.full(shape, 0.05, dtype=kind)
        optimizer = cls(odd_parameters(device), lr=lr, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        train(optimizer, gradients(odd_parameters(device), 20), scheduler.step)
        assert optimizer.param_groups[0]["lr"] is lr
        lr.fill_(0.05)
        runs.append(optimizer)
    assert_follows(*runs, 20)


@pytest.mark.steps
@each_name
def test_a_tiny_lr(device: torch.device, name: str) -> None:
    runs = []
    for cls in (OURS[name], TORCHS[name]):
        params = [Parameter(p.detach() * 1e-4) for p in odd_parameters(device)]
        runs.append(cls(params, lr=1e-7))
        train(runs[-1], gradients(params, 100))
    assert_follows(*runs, 100)


@each_name
def test_implementation_choices_make_no_difference(device: torch.device, name: str) -> None:
    results = []
    for choice in (
        {},
        {"foreach": True},
        {"foreach": False},
        {"fused": True},
        {"capturable": True},
    ):
        optimizer = OURS[name](odd_parameters(device), lr=0.1, **choice)
        train(optimizer, gradients(odd_parameters(device), 3))
        results.append(snapshot(optimizer))
        assert optimizer._step_supports_amp_scaling == ("fused" in choice)  # as in torch
    assert all(same_bits(results[0], result) for result in results)


@each_name
def test_differentiable_is_torchs(device: torch.device, name: str) -> None:
    """The derivative of the loss after a step by the parameter before it."""
    results = []
    for cls in (OURS[name], TORCHS[name]):
        start = torch.tensor([1.0, -2.0], device=device, requires_grad=True)
        param = start.clone()
        param.grad = start.detach().clone()
        optimizer = cls([param], lr=0.25, differentiable=True)
        optimizer.step()
        results.append(torch.autograd.grad(param.square().sum(), start)[0])
    assert torch.equal(results[0], results[1])
    assert results[0].any()


# the step as a whole


@each_name
def test_parameters_without_gradient_are_left_alone(device: torch.device, name: str) -> None:
    params = [*odd_parameters(device), *odd_parameters(device, torch.float16)]
    optimizer = OURS[name](params, lr=0.1)
    for param in params[::2]:
        param.grad = torch.ones_like(param)
    params[1].requires_grad_(False)
    before = [p.detach().clone() for p in params]
    optimizer.step()
    for i, param in enumerate(params):
        assert (param in optimizer.state) == (i % 2 == 0)
        assert torch.equal(param, before[i]) == (i % 2 == 1 or param.numel() == 0)
    # unfrozen later: its own step count
    params[1].requires_grad_(True).grad = torch.ones_like(params[1])
    params[2].requires_grad_(False)  # frozen with a gradient left: as in torch, the gradient counts
    optimizer.step()
    assert [optimizer.state[p]["step"].item() for p in params[:3]] == [2, 1, 2]


@each_name
def test_closure_and_return_value(device: torch.device, name: str) -> None:
    param = Parameter(torch.ones(3, device=device))
    optimizer = OURS[name]([param], lr=0.1)
    assert optimizer.step() is None
    assert optimizer.step(None) is None

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        assert [optimizer.step(closure=closure).item(), optimizer.step(closure).item() < 3] == [
            3.0,
            True,
        ]
    assert not param.grad_fn


@each_name
def test_hooks_fire_once(device: torch.device, name: str) -> None:
    optimizer = OURS[name](odd_parameters(device))
    fired: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: fired.append("pre"))
    optimizer.register_step_post_hook(lambda *_: fired.append("post"))
    train(optimizer, gradients(odd_parameters(device), 2))
    assert fired == ["pre", "post"] * 2


@each_name
def test_groups_added_later_and_named_parameters(device: torch.device, name: str) -> None:
    model = torch.nn.Linear(3, 2, device=device)
    optimizer = OURS[name](list(model.named_parameters())[:1])
    optimizer.add_param_group({"params": [("bias", model.bias)], "lr": 0.5})
    assert [group["param_names"] for group in optimizer.param_groups] == [["weight"], ["bias"]]
    train(optimizer, [[torch.ones_like(model.weight), torch.ones_like(model.bias)]])
    assert optimizer.state[model.bias]["step"].item() == 1


# state


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
@each_setting
@each_name
def test_the_state_has_torchs_keys_and_formats(
    device: torch.device, name: str, setting: str, dtype: torch.dtype
) -> None:
    states = []
    for cls in (OURS[name], TORCHS[name]):
        optimizer = cls(odd_parameters(device, dtype), **HYPERPARAMETERS[setting])
        train(optimizer, gradients(odd_parameters(device, dtype), 2))
        states.append(optimizer.state_dict())
    assert_same_format(*states)


@pytest.mark.parametrize("way", ["torch, ours", "ours, torch", "ours, ours", "torch, ours, torch"])
@each_setting
@each_name
def test_a_run_continues_in_the_other_optimizer(
    device: torch.device, name: str, setting: str, way: str
) -> None:
    kwargs = HYPERPARAMETERS[setting]
    params, whole = odd_parameters(device), odd_parameters(device)
    grads = gradients(params, 30)
    reference = TORCHS[name](whole, **kwargs)
    train(reference, grads)
    optimizer = None
    for i, which in enumerate(way.split(", ")):
        state = None if optimizer is None else saved_and_loaded(optimizer.state_dict())
        params = clone(params)  # and an lr that the loaded state has to replace
        optimizer = {"torch": TORCHS, "ours": OURS}[which][name](
            params, **(kwargs if state is None else {"lr": 9.0})
        )
        if state is not None:
            optimizer.load_state_dict(state)
        train(optimizer, grads[10 * i : 10 * i + 10])
    assert optimizer is not None
    train(optimizer, grads[10 * len(way.split(", ")) :])
    assert_follows(optimizer, reference, 30)
    assert_same_format(optimizer.state_dict(), reference.state_dict())


def saved_and_loaded(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


COPIES: dict[str, Callable[[torch.optim.Optimizer], torch.optim.Optimizer]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
}


def through_a_state_dict(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    other = type(optimizer)(clone(optimizer.param_groups[0]["params"]))
    other.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    return other


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("how", [*COPIES, "state_dict"])
@each_setting
@each_name
def test_copies_and_checkpoints_go_on_with_the_same_bits(
    device: torch.device, name: str, setting: str, how: str, dtype: torch.dtype
) -> None:
    params = odd_parameters(device, dtype)
    grads = gradients(params, 10)
    optimizer = OURS[name](params, **{"lr": 0.01, **HYPERPARAMETERS[setting]})
    train(optimizer, grads[:5])
    other = COPIES.get(how, through_a_state_dict)(optimizer)
    assert type(other) is type(optimizer)
    assert same_bits(snapshot(other), snapshot(optimizer))
    for one in (optimizer, other):
        train(one, grads[5:])
    assert same_bits(snapshot(other), snapshot(optimizer))
    assert not same_bits(snapshot(other), [p.detach() for p in params])


@each_name
def test_a_state_of_numbers_as_old_torch_saved_it(device: torch.device, name: str) -> None:
    param = odd_parameters(device)[:1]
    optimizer = OURS[name](param)
    state = optimizer.state_dict()
    ones = torch.ones(3, 5)
    state["state"] = {0: {"step": 7, "exp_avg": ones, "exp_avg_sq": ones}}
    optimizer.load_state_dict(state)
    train(optimizer, gradients(param, 1))
    assert optimizer.state[param[0]]["step"].item() == 8
    optimizer.state[param[0]]["step"] = 20
    train(optimizer, gradients(param, 1))
    assert optimizer.state[param[0]]["step"].item() == 21


# half parameters


class ByHand:
    """FP32 masters without any class of ours between: the step on them, then the rounding."""

    def __init__(self, name: str, params: list[Parameter], **kwargs: Any) -> None:
        self.params = params
        self.masters = [Parameter(p.detach().float()) for p in params]
        self.optimizer = OURS[name](self.masters, **kwargs)

    def step(self, grads: list[Tensor]) -> None:
        train(self.optimizer, [[g.float() for g in grads]])
        with torch.no_grad():
            for param, master in zip(self.params, self.masters, strict=True):
                param.copy_(master)


@pytest.mark.steps
@pytest.mark.parametrize("grad_dtype", [None, torch.float32], ids=str)
@each_setting
@each_half
@each_name
def test_half_parameters_are_the_rounded_masters(
    device: torch.device,
    name: str,
    half: torch.dtype,
    setting: str,
    grad_dtype: torch.dtype | None,
    compiled: bool,
) -> None:
    exactly = device.type == "cpu" or not compiled
    kwargs = {"lr": 0.01, **HYPERPARAMETERS[setting]}
    params = odd_parameters(device, half)
    for param in params:
        param.grad_dtype = grad_dtype or half
    expected = ByHand(name, clone(params), **kwargs)
    optimizer = OURS[name](params, **kwargs)
    for grads in gradients(params, 25, dtype=grad_dtype):
        train(optimizer, [grads])
        expected.step(grads)
        agree(exactly, [p.detach() for p in params], [p.detach() for p in expected.params])
    writes = [optimizer.state[param]["master_param"]._version for param in params]
    for param, master in zip(params, expected.masters, strict=True):
        state, reference = dict(optimizer.state[param]), expected.optimizer.state[master]
        agree(exactly, [state.pop("master_param")], [master.detach()])
        assert state.keys() == reference.keys()
        agree(exactly, list(state.values()), [reference[key] for key in state])
        assert all(value.dtype is torch.float32 for value in state.values())
    train(optimizer, gradients(params, 3, dtype=grad_dtype))
    for param, earlier in zip(params, writes, strict=True):
        assert optimizer.state[param]["master_param"]._version <= earlier + 3, (
            "more than one pass a step"
        )


@pytest.mark.steps
@each_half
@each_name
def test_updates_below_half_an_ulp_add_up(
    device: torch.device, name: str, half: torch.dtype
) -> None:
    """1000 steps of lr, each under 1 / 150 of the ulp at 1/16, move 3 to 4 ulps together; torch's
    never move. The master is rounded by at most 2**-29 a step (half an ulp below 1/16).
    """
    lr = {torch.float16: 1e-7, torch.bfloat16: 1e-6}[half]
    kwargs = {"lr": lr, "eps": 1e-3, "weight_decay": 0.0}
    ours, torchs = (
        Parameter(torch.full((3,), 0.0625, dtype=half, device=device)) for _ in range(2)
    )
    optimizers = [OURS[name]([ours], **{**kwargs, "eps": 1e-8}), TORCHS[name]([torchs], **kwargs)]
    for optimizer in optimizers:
        train(optimizer, [[torch.ones_like(ours)]] * 1000)
    assert torch.equal(torchs, torch.full_like(torchs, 0.0625))
    assert (0.0625 - ours).min() >= 2 * torch.finfo(half).eps / 32
    master = optimizers[0].state[ours]["master_param"]
    torch.testing.assert_close(
        master, torch.full_like(master, 0.0625 - 1000 * lr), rtol=0, atol=1000 * 2.0**-29
    )


@each_half
@each_name
def test_what_the_user_writes_to_a_parameter_counts(
    device: torch.device, name: str, half: torch.dtype
) -> None:
    """Where the parameter still is the rounded master, the master's own bits go on; elsewhere the
    new value does.
    """
    params = odd_parameters(device, half)[:1]
    optimizer = OURS[name](params, lr=0.01)
    train(optimizer, gradients(params, 3))
    expected = optimizer.state[params[0]]["master_param"].clone()
    twin = copy.deepcopy(optimizer)
    with torch.no_grad():
        params[0][1].copy_(torch.arange(5.0))
        params[0][2, 2] = NAN
    expected[1] = torch.arange(5.0)
    twin_param = twin.param_groups[0]["params"][0]
    twin.state[twin_param]["master_param"].copy_(expected)
    with torch.no_grad():
        twin_param.copy_(expected)
    for one in (optimizer, twin):
        train(one, gradients(params, 1, seed=7))
    assert torch.equal(params[0][:2], twin_param[:2])
    assert same_bits(
        [optimizer.state[params[0]]["master_param"][:2]],
        [twin.state[twin_param]["master_param"][:2]],
    )
    assert params[0].isnan().sum() == 1

    params[0].data = torch.full_like(params[0], 3.0)  # other storage
    optimizer.state[params[0]]["exp_avg"].zero_()
    train(optimizer, [[torch.zeros_like(params[0])]])
    decay = 1 - 0.01 * 0.01 if name == "AdamW" else 1.0
    torch.testing.assert_close(
        params[0].float(), torch.full((3, 5), 3.0 * decay, device=device).to(half).float()
    )


@each_half
@each_name
def test_loading_never_rounds_fp32_state(
    device: torch.device, name: str, half: torch.dtype
) -> None:
    """torch makes moments of 1e-9 zero here, and masters half."""
    params = odd_parameters(device, half)
    optimizer = OURS[name](params, amsgrad=True)
    train(optimizer, [[g * 1e-4 for g in row] for row in gradients(params, 3, dtype=half)])
    before = snapshot(optimizer)
    assert any(0 < t.abs().max() < 1e-9 for t in before if t.numel())
    other = OURS[name](clone(params))
    other.load_state_dict(optimizer.state_dict())
    assert same_bits(snapshot(other), before)
    for param, copied in zip(params, other.param_groups[0]["params"], strict=True):
        storages = {s["exp_avg"].data_ptr() for s in (other.state[copied], optimizer.state[param])}
        assert len(storages) == 2 or not param.numel(), "no sharing with the optimizer it came from"


@each_half
@each_name
def test_loading_respects_the_users_hooks(
    device: torch.device, name: str, half: torch.dtype
) -> None:
    """A pre-hook may replace the state, here one saved under another layout."""
    params = odd_parameters(device, half)
    optimizer = OURS[name](params)
    train(optimizer, gradients(params, 2))
    other = OURS[name](clone(params))
    other.register_load_state_dict_pre_hook(lambda _, state: state["nested"])
    calls: list[int] = []
    other.register_load_state_dict_post_hook(lambda _: calls.append(1))
    other.load_state_dict({"nested": optimizer.state_dict()})
    assert same_bits(snapshot(other), snapshot(optimizer))
    assert calls == [1]
    assert len(other._optimizer_load_state_dict_pre_hooks) == 1


@each_half
@each_name
def test_fp32_state_of_torch_goes_into_half_parameters(
    device: torch.device, name: str, half: torch.dtype
) -> None:
    """A run begun in FP32 with torch goes on with half parameters: as with masters by hand."""
    wide = [Parameter(p.detach().float()) for p in odd_parameters(device, half)]
    torchs = TORCHS[name](wide, lr=0.01)
    train(torchs, gradients(wide, 5))
    params = [Parameter(p.detach().to(half)) for p in wide]
    optimizer = OURS[name](params)
    expected = ByHand(name, clone(params))
    for one in (optimizer, expected.optimizer):
        one.load_state_dict(copy.deepcopy(torchs.state_dict()))
    for grads in gradients(params, 5, seed=3):
        train(optimizer, [grads])
        expected.step(grads)
    assert same_bits([p.detach() for p in params], [p.detach() for p in expected.params])


@each_half
@each_name
def test_state_that_torch_has_rounded_becomes_fp32_again(
    device: torch.device, name: str, half: torch.dtype
) -> None:
    params = odd_parameters(device, half)
    first = OURS[name](params, eps=1e-4)
    train(first, gradients(params, 2))
    torchs = TORCHS[name](params)
    torchs.load_state_dict(first.state_dict())
    train(torchs, gradients(params, 2, seed=1))
    last = OURS[name](clone(params))
    last.load_state_dict(torchs.state_dict())
    train(last, gradients(params, 50, seed=2))
    for param in last.param_groups[0]["params"]:
        state = last.state[param]
        assert {v.dtype for v in state.values()} == {torch.float32}
        assert torch.equal(param, state["master_param"].to(half))
    start = [p.float() for p in params]
    expected = ByHand(name, clone(params), eps=1e-4)
    for master, param in zip(expected.masters, params, strict=True):
        state = {k: v.float() for k, v in torchs.state[param].items() if k != "master_param"}
        expected.optimizer.state[master] = state
    for grads in gradients(params, 50, seed=2):
        expected.step(grads)
    assert same_bits(
        [p.detach() for p in last.param_groups[0]["params"]], [p.detach() for p in expected.params]
    )
    assert any((a - b).any() for a, b in zip(start, expected.masters, strict=True))


# found_inf and grad_scale


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32, torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize("flag", [[1.0], 1.0, 2.0, 0.5, NAN], ids=str)
@pytest.mark.parametrize("steps", [0, 3])
@each_name
def test_any_found_inf_changes_no_bit(
    device: torch.device, name: str, steps: int, flag: Any, dtype: torch.dtype
) -> None:
    params = odd_parameters(device, dtype)
    optimizer = OURS[name](params, lr=0.1, amsgrad=True, weight_decay=0.1)
    train(optimizer, gradients(params, steps))
    before, start = snapshot(optimizer), [p.detach().clone() for p in params]
    optimizer.found_inf = torch.tensor(flag, device=device)
    optimizer.grad_scale = torch.tensor(4.0, device=device)
    for bad in (1.0, INF, NAN):
        train(optimizer, [[torch.full_like(p, bad) for p in params]])
    assert same_bits([p.detach() for p in params], start)
    if steps:
        assert same_bits(snapshot(optimizer), before)
    del optimizer.found_inf, optimizer.grad_scale
    train(optimizer, gradients(params, 2, seed=5))
    untouched = OURS[name](
        fresh := odd_parameters(device, dtype), lr=0.1, amsgrad=True, weight_decay=0.1
    )
    train(untouched, gradients(fresh, steps) + gradients(fresh, 2, seed=5))
    assert same_bits(snapshot(optimizer), snapshot(untouched))


@pytest.mark.parametrize("flag", [None, 0.0, [0.0]], ids=str)
@pytest.mark.parametrize("exponent", [-24, -3, 0, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@each_name
def test_grad_scale_divides_the_gradients(
    device: torch.device, name: str, dtype: torch.dtype, exponent: int, flag: Any
) -> None:
    """A power of two leaves FP32 and bf16 gradients their bits."""
    plain, scaled = (OURS[name](odd_parameters(device, dtype), lr=0.1) for _ in range(2))
    grads = gradients(odd_parameters(device, dtype), 5)
    train(plain, grads)
    scaled.grad_scale = torch.tensor(2.0**exponent, device=device)
    if flag is not None:
        scaled.found_inf = torch.tensor(flag, device=device)
    train(scaled, [[g * 2.0**exponent for g in row] for row in grads])
    assert same_bits(snapshot(plain), snapshot(scaled))


def test_the_inverse_scale_is_correctly_rounded(device: torch.device) -> None:
    start = torch.ones(1, device=device)
    results = []
    for grad, scale in (
        (torch.full((1,), 3.0, device=device) * torch.tensor(1 / 3, device=device), None),
        (3.0, 3.0),
    ):
        optimizer = optim.AdamW([param := Parameter(start.clone())], lr=0.1)
        if scale is not None:
            optimizer.grad_scale = torch.tensor(scale, device=device)
        param.grad = torch.as_tensor(grad, device=device).reshape(1)
        optimizer.step()
        results.append(snapshot(optimizer))
    assert same_bits(*results)


@pytest.mark.parametrize("flag", [None, 0.0])
def test_a_scale_too_small_to_invert_skips(device: torch.device, flag: float | None) -> None:
    """torch's scaler has no floor. 1 / 2**-130 is inf, and inf times a healthy gradient would make
    every weight NaN.
    """
    params = [*odd_parameters(device), *odd_parameters(device, torch.float16)]
    optimizer = optim.AdamW(params)
    train(optimizer, gradients(params, 1))
    before = snapshot(optimizer)
    optimizer.grad_scale = torch.tensor(2.0**-130, device=device)
    if flag is not None:
        optimizer.found_inf = torch.tensor(flag, device=device)
    train(optimizer, gradients(params, 2))
    assert same_bits(snapshot(optimizer), before)


SCALERS: dict[str, Callable[..., torch.amp.GradScaler]] = {
    "torch": torch.amp.GradScaler,
    "ours": tritonamp.GradScaler,
}


def loop(
    scaler: torch.amp.GradScaler,
    optimizer: torch.optim.Optimizer,
    params: list[Parameter],
    steps: int,
    bad: int | None,
) -> Iterator[None]:
    """Losses that give each parameter a gradient of few bits, so that no scale rounds it; one
    overflows.
    """
    for i, grads in enumerate(gradients(params, steps, dtype=torch.bfloat16)):
        optimizer.zero_grad()
        loss = sum((p.float() * g.float()).sum() for p, g in zip(params, grads, strict=True))
        scaler.scale(loss).backward()
        if i == bad:
            params[0].grad[0, 0] = INF
        scaler.step(optimizer)
        scaler.update()
        assert not hasattr(optimizer, "grad_scale") or optimizer.grad_scale is None
        assert not hasattr(optimizer, "found_inf") or optimizer.found_inf is None
        yield


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", SCALERS)
@each_name
def test_the_scale_of_a_scaler_cancels(
    device: torch.device, name: str, kind: str, dtype: torch.dtype
) -> None:
    results = []
    for exponent in (0, 5, 16):
        params = odd_parameters(device, dtype)
        optimizer = OURS[name](params, lr=0.1)
        scaler = SCALERS[kind](device.type, init_scale=2.0**exponent)
        for _ in loop(scaler, optimizer, params, 5, None):
            pass
        results.append(snapshot(optimizer))
    assert same_bits(results[0], results[1])
    assert same_bits(results[0], results[2])
    assert not same_bits(results[0][:1], [odd_parameters(device, dtype)[0].detach()])


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("kind", SCALERS)
@each_name
def test_a_scaler_skips_the_step_that_overflows(
    device: torch.device, name: str, kind: str, dtype: torch.dtype
) -> None:
    params = odd_parameters(device, dtype)
    optimizer = OURS[name](params, lr=0.1)
    scaler = SCALERS[kind](device.type, init_scale=2.0**8)
    seen = []
    for _ in loop(scaler, optimizer, params, 4, 2):
        seen.append((snapshot(optimizer), scaler.get_scale()))
    moved = [not same_bits(a[0], b[0]) for a, b in itertools.pairwise(seen)]
    assert moved == [True, False, True]
    assert [scale for _, scale in seen] == [2.0**8, 2.0**8, 2.0**7, 2.0**7]
    assert [s["step"].item() for s in optimizer.state.values()] == [3] * 4


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("kind", [*SCALERS, "none"])
@each_name
def test_nothing_reads_the_device(
    device: torch.device, name: str, kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = odd_parameters(device, dtype)
    optimizer = OURS[name](params, lr=torch.tensor(0.1), weight_decay=0.1, amsgrad=True)
    train(optimizer, gradients(params, 1))
    optimizer.load_state_dict(optimizer.state_dict())
    scaler = None
    if kind != "none":
        scaler = SCALERS[kind](device.type)
        scaler.scale(torch.ones((), device=device))
    for param, grad in zip(params, gradients(params, 1, seed=1)[0], strict=True):
        param.grad = grad
    if scaler is not None and kind == "torch":  # its own check of the gradients is torch's affair
        optimizer.grad_scale = scaler._scale
        optimizer.found_inf = torch.zeros((), device=device)
        scaler = None
    reads: list[str] = []

    def counting(read: str) -> Callable[..., Any]:
        original = getattr(Tensor, read)

        def counted(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.device.type == device.type:  # the learning rate is the host's own
                reads.append(read)
            return original(self, *args, **kwargs)

        return counted

    for read in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__"):
        monkeypatch.setattr(Tensor, read, counting(read))
    assert (bool(torch.zeros(1, device=device)), reads.pop()) == (False, "__bool__")  # it counts
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step() if scaler is None else scaler.step(optimizer)
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert reads == []


@pytest.mark.parametrize("name", optim.__all__)
def test_help_describes_the_additions(name: str) -> None:
    text = pydoc.plain(pydoc.render_doc(getattr(optim, name)))
    for argument in ("state: format of", "masters: form of"):
        assert argument in text
