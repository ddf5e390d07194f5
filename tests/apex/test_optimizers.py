"""tritonamp.apex.optimizers and parallel.LARC: torch's optimizers where torch has them, FP64
formulas elsewhere.
"""

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import Net, take_step
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

import tritonamp
from tritonamp.apex.optimizers import (
    FusedAdagrad,
    FusedAdam,
    FusedLAMB,
    FusedMixedPrecisionLamb,
    FusedNovoGrad,
    FusedSGD,
)
from tritonamp.apex.parallel import LARC

INF = float("inf")
STEPS = 4
HALVES = [torch.float16, torch.bfloat16]
U32 = torch.finfo(torch.float32).eps
SHAPES: list[tuple[int, ...]] = [(5, 7), (3,), (), (0,), (1,)]

ALL: dict[str, tuple[Any, dict[str, Any]]] = {
    "Adam": (FusedAdam, {}),
    "Adam L2": (FusedAdam, {"adam_w_mode": False, "weight_decay": 0.1}),
    "Adam uncorrected": (FusedAdam, {"bias_correction": False, "lr": 0.01}),
    "SGD": (FusedSGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "SGD plain": (FusedSGD, {"lr": 0.1}),
    "SGD late decay": (
        FusedSGD,
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "wd_after_momentum": True},
    ),
    "SGD nesterov": (FusedSGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "SGD dampened": (FusedSGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    "Adagrad": (FusedAdagrad, {"weight_decay": 0.1}),
    "Adagrad W": (FusedAdagrad, {"weight_decay": 0.1, "adagrad_w_mode": True}),
    "LAMB": (FusedLAMB, {"lr": 0.1}),
    "LAMB L2": (
        FusedLAMB,
        {"lr": 0.1, "adam_w_mode": False, "grad_averaging": False, "max_grad_norm": 50.0},
    ),
    "LAMB no decay": (FusedLAMB, {"lr": 0.1, "weight_decay": 0.0}),
    "NVLAMB": (
        FusedLAMB,
        {"lr": 0.1, "weight_decay": 0.0, "use_nvlamb": True, "bias_correction": False},
    ),
    "mixed LAMB": (FusedMixedPrecisionLamb, {"lr": 0.1}),
    "NovoGrad": (FusedNovoGrad, {"lr": 0.1, "weight_decay": 0.1}),
    "NovoGrad inside": (
        FusedNovoGrad,
        {"lr": 0.1, "weight_decay": 0.1, "reg_inside_moment": True, "norm_type": 0},
    ),
    "NovoGrad zero": (FusedNovoGrad, {"lr": 0.1, "init_zero": True, "grad_averaging": False}),
}
SAMPLE = ["Adam", "Adam uncorrected", "SGD", "Adagrad", "LAMB", "mixed LAMB", "NovoGrad"]

each = pytest.mark.parametrize("name", ALL)
each_kind = pytest.mark.parametrize("name", SAMPLE)
each_half = pytest.mark.parametrize("half", HALVES, ids=str)


def build(name: str, params: Any, **changes: Any) -> Any:
    cls, arguments = ALL[name]
    return cls(params, **{**arguments, **changes})


def parameters(device: torch.device, dtype: torch.dtype = torch.float32) -> list[Parameter]:
    generator = torch.Generator().manual_seed(1)
    params = [torch.randn(shape, generator=generator).to(device, dtype) for shape in SHAPES]
    params[-1].zero_()
    return [Parameter(p) for p in params]


def gradients(dtype: torch.dtype = torch.float32, steps: int = STEPS) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
        for _ in range(steps)
    ]


def train(optimizer: Any, grads: list[list[Tensor]]) -> list[Tensor]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in grads:
        for param, grad in zip(params, step, strict=True):
            param.grad = grad.to(param.device, param.dtype, copy=True)
        optimizer.step()
    return [param.detach().clone() for param in params]


def equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


# against torch


TORCH: dict[str, tuple[str, Callable[..., Optimizer], float]] = {
    "Adam": ("Adam", functools.partial(torch.optim.AdamW, weight_decay=0.0), 4 * U32),
    "Adam L2": ("Adam L2", functools.partial(torch.optim.Adam, weight_decay=0.1), 4 * U32),
    "SGD": ("SGD", functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1), 0.0),
    "SGD plain": ("SGD plain", functools.partial(torch.optim.SGD, lr=0.1), 0.0),
    "SGD nesterov": (
        "SGD nesterov",
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
        0.0,
    ),
    "SGD dampened": (
        "SGD dampened",
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5),
        0.0,
    ),
    "Adagrad": ("Adagrad", functools.partial(torch.optim.Adagrad, weight_decay=0.1), 4 * U32),
}


@pytest.mark.parametrize("name", TORCH)
def test_torchs_own(name: str, device: torch.device) -> None:
    ours, theirs, tolerance = TORCH[name]
    result = train(build(ours, parameters(device)), gradients())
    expected = train(theirs(parameters(device)), gradients())
    for a, b in zip(result, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# against formulas in FP64: generators that are sent gradients and yield the parameter


def adam(p: Tensor, lr: float) -> Any:
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    while True:
        g = yield p
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        p = p - lr * m / (v.sqrt() + 1e-8)


def late_sgd(p: Tensor, lr: float) -> Any:
    momentum = None
    while True:
        g = yield p
        momentum = g if momentum is None else 0.9 * momentum + g
        p = p - lr * (momentum + 0.1 * p)


def adagrad_w(p: Tensor, lr: float) -> Any:
    total = torch.zeros_like(p)
    while True:
        g = yield p
        total = total + g * g
        p = p - lr * (g / (total.sqrt() + 1e-10) + 0.1 * p)


def lamb(
    p: Tensor,
    decay: float = 0.01,
    inside: bool = False,
    averaging: bool = True,
    trust: bool = True,
    correct: bool = True,
) -> Any:
    m, v, t = torch.zeros_like(p), torch.zeros_like(p), 0
    while True:
        g = yield p
        t += 1
        g = g + decay * p if inside else g
        m, v = 0.9 * m + (0.1 if averaging else 1.0) * g, 0.999 * v + 0.001 * g * g
        c1, c2 = (1 - 0.9**t, 1 - 0.999**t) if correct else (1.0, 1.0)
        update = m / c1 / ((v / c2).sqrt() + 1e-6)
        update = update if inside else update + decay * p
        sizes = p.norm(), update.norm()
        p = p - 0.1 * update * (sizes[0] / sizes[1] if trust and all(sizes) else 1.0)


def novograd(
    p: Tensor, inside: bool = False, zero: bool = False, averaging: bool = True, decay: float = 0.1
) -> Any:
    m, v, t = torch.zeros_like(p), None, 0
    while True:
        g = yield p
        t += 1
        size = (g.abs().max() if g.numel() else g.sum()) if inside else g.norm()
        if v is None:
            v = torch.zeros_like(size) if zero else size
        v = 0.999 * v + 0.001 * size if inside else (0.999 * v**2 + 0.001 * size**2).sqrt()
        denom = v / (1 - 0.999**t) ** 0.5 + 1e-8
        if inside:
            m = 0.9 * m + 0.1 * (g / denom + decay * p)
            p = p - 0.1 * m / (1 - 0.9**t)
        else:
            m = 0.9 * m + (0.1 if averaging else 1.0) * g
            p = p - 0.1 * (m / (1 - 0.9**t) / denom + decay * p)


FORMULAS: dict[str, Callable[[Tensor], Any]] = {
    "Adam uncorrected": functools.partial(adam, lr=0.01),
    "SGD late decay": functools.partial(late_sgd, lr=0.1),
    "Adagrad W": functools.partial(adagrad_w, lr=0.01),
    "LAMB": lamb,
    "mixed LAMB": lamb,
    "LAMB L2": functools.partial(lamb, inside=True, averaging=False),
    "LAMB no decay": functools.partial(lamb, decay=0.0, trust=False),
    "NVLAMB": functools.partial(lamb, decay=0.0, correct=False),
    "NovoGrad": novograd,
    "NovoGrad inside": functools.partial(novograd, inside=True),
    "NovoGrad zero": functools.partial(novograd, zero=True, averaging=False, decay=0.0),
}
MAX_GRAD_NORM = {
    "LAMB": 1.0,
    "mixed LAMB": 1.0,
    "LAMB L2": 50.0,
    "LAMB no decay": 1.0,
    "NVLAMB": 1.0,
}


@pytest.mark.parametrize("name", FORMULAS)
def test_formula(name: str, device: torch.device) -> None:
    formulas = [FORMULAS[name](p.detach().double().cpu()) for p in parameters(device)]
    expected = [next(formula) for formula in formulas]
    for step in gradients():
        grads = [g.double() for g in step]
        if name in MAX_GRAD_NORM:
            norm = torch.cat([g.reshape(-1) for g in grads]).norm()
            grads = [g / max(1.0, float(norm) / MAX_GRAD_NORM[name]) for g in grads]
        expected = [formula.send(g) for formula, g in zip(formulas, grads, strict=True)]
    result = train(build(name, parameters(device)), gradients())
    for a, b in zip(result, expected, strict=True):
        # some twenty roundings a step, of values of size 10 at most
        torch.testing.assert_close(
            a.cpu().double(), b, rtol=80 * STEPS * U32, atol=80 * STEPS * U32
        )


# half parameters


@each
@each_half
def test_half_parameters_are_the_rounded_fp32_step(
    name: str, half: torch.dtype, device: torch.device
) -> None:
    halves, wide = (
        parameters(device, half),
        [Parameter(p.detach().float()) for p in parameters(device, half)],
    )
    grads = gradients(half, steps=1)
    result, expected = train(build(name, halves), grads), train(build(name, wide), grads)
    # of first steps the momentum is the gradient, plus decay: it is stored in half, as in apex
    if "SGD" in name:
        tolerance = 0.1 * 4 * torch.finfo(half).eps
        for a, b in zip(result, expected, strict=True):
            torch.testing.assert_close(a, b.to(half), rtol=torch.finfo(half).eps, atol=tolerance)
    else:
        assert equal(result, [p.to(half) for p in expected])


@pytest.mark.parametrize("name", ["Adam", "mixed LAMB"])
@each_half
def test_masters_keep_updates_below_half_an_ulp(
    name: str, half: torch.dtype, device: torch.device
) -> None:
    param = Parameter(torch.ones(8, device=device, dtype=half))
    optimizer = build(name, [param], lr=1e-4)
    train(optimizer, [[torch.ones(8)]] * 40)
    assert (param < 1).all()  # 40 steps of 1e-4 where an ulp is 5e-4 or 4e-3
    with torch.no_grad():
        param.fill_(3.0)
    train(optimizer, [[torch.ones(8)]])
    # what somebody wrote there counts
    assert torch.equal(param.detach(), torch.full_like(param, 3.0))


def test_sgd_on_half_is_torchs_where_no_rounding_differs(device: torch.device) -> None:
    ours, theirs = parameters(device, torch.float16), parameters(device, torch.float16)
    grads = gradients(torch.float16)
    expected = train(torch.optim.SGD(theirs, lr=0.25, momentum=0.125), grads)
    assert equal(train(FusedSGD(ours, lr=0.25, momentum=0.125), grads), expected)


# what every optimizer has to do


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALVES], ids=str)
def test_resume_is_bit_identical(name: str, dtype: torch.dtype, device: torch.device) -> None:
    grads = gradients(dtype)
    expected = train(build(name, parameters(device, dtype)), grads)
    first = build(name, parameters(device, dtype))
    halfway = [Parameter(p) for p in train(first, grads[:2])]
    state = pickle.loads(pickle.dumps(first.state_dict()))
    second = build(name, halfway, lr=7.0)
    second.load_state_dict(state)
    assert equal(train(second, grads[2:]), expected)


@each_half
@pytest.mark.parametrize("name", ["Adagrad", "LAMB", "NovoGrad"])
def test_half_state_of_apex_becomes_fp32(
    name: str, half: torch.dtype, device: torch.device
) -> None:
    """There the moments of half parameters are half."""
    optimizer = build(name, parameters(device, half))
    train(optimizer, gradients(half)[:2])
    state = optimizer.state_dict()
    state["state"] = {
        number: {key: value.to(half) for key, value in moments.items()}
        for number, moments in state["state"].items()
    }
    other = build(name, parameters(device, half))
    other.load_state_dict(state)
    moments = [value for moments in other.state.values() for value in moments.values()]
    assert moments and {value.dtype for value in moments} == {torch.float32}


@each_kind
@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["copy", "pickle"]
)
def test_copies_go_on(name: str, duplicate: Callable[[Any], Any], device: torch.device) -> None:
    optimizer = build(name, parameters(device))
    train(optimizer, gradients()[:2])
    other = duplicate(optimizer)
    assert equal(train(other, gradients()[2:]), train(optimizer, gradients()[2:]))
    other.zero_grad()


@each_kind
def test_closure(name: str, device: torch.device) -> None:
    param = Parameter(torch.full((3,), 2.0, device=device))
    optimizer = build(name, [param])

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (param * param).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 12.0
    assert (param < 2).all()


@each_kind
def test_groups(name: str, device: torch.device) -> None:
    """Groups with their own rate, empty, without gradients, or added later are all stepped."""
    a, b, c, d = (Parameter(torch.ones(3, device=device)) for _ in range(4))
    optimizer = build(
        name, [{"params": [a]}, {"params": [b], "lr": 0.0}, {"params": []}, {"params": [c]}]
    )
    optimizer.add_param_group({"params": [d]})
    for param in (a, b, d):
        param.grad = torch.ones_like(param)
    optimizer.step()
    moved = [bool((param != 1).all()) for param in (a, b, c, d)]
    assert moved == [True, False, False, True]


@each_kind
def test_sparse_gradients_are_refused(name: str, device: torch.device) -> None:
    param = Parameter(torch.ones(3, device=device))
    param.grad = torch.ones(3, device=device).to_sparse()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        build(name, [param]).step()


@each_kind
@pytest.mark.parametrize("none", [True, False])
def test_zero_grad(name: str, none: bool) -> None:
    param = Parameter(torch.ones(3))
    optimizer = (
        build(name, [param]) if name == "mixed LAMB" else build(name, [param], set_grad_none=none)
    )
    param.grad = torch.ones(3)
    optimizer.zero_grad()
    assert (
        param.grad is None
        if none or name == "mixed LAMB"
        else torch.equal(param.grad, torch.zeros(3))
    )
    optimizer.zero_grad(set_to_none=True)
    assert param.grad is None


@pytest.mark.parametrize("cls", [FusedAdam, FusedLAMB, FusedMixedPrecisionLamb, FusedNovoGrad])
def test_amsgrad_is_refused(cls: Any) -> None:
    with pytest.raises(RuntimeError, match=f"{cls.__name__} does not support the AMSGrad variant"):
        cls([Parameter(torch.ones(1))], amsgrad=True)


@pytest.mark.parametrize(
    "arguments",
    [{"lr": -1.0}, {"momentum": -1.0}, {"weight_decay": -1.0}, {"nesterov": True}],
    ids=str,
)
def test_sgd_refuses(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"FusedSGD: {next(iter(arguments))}"):
        FusedSGD([Parameter(torch.ones(1))], **arguments)


def test_novograd_refuses_other_norms() -> None:
    with pytest.raises(RuntimeError, match=r"norm_type: expected 2 or 0 .*got 1"):
        FusedNovoGrad([Parameter(torch.ones(1))], norm_type=1)


def test_no_parameters() -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        FusedAdam([])


# Adam's own


@pytest.mark.parametrize("bias_correction", [True, False])
def test_adam_takes_a_checkpoint_of_apex(bias_correction: bool, device: torch.device) -> None:
    """There the step count is the group's, and state holds the moments alone."""
    name = "Adam" if bias_correction else "Adam uncorrected"
    expected = train(build(name, parameters(device)), gradients())
    first = build(name, parameters(device))
    halfway = [Parameter(p) for p in train(first, gradients()[:2])]
    ours = first.state_dict()
    names = ["lr", "bias_correction", "betas", "eps", "weight_decay", "params"]
    state = {
        "state": {
            n: {k: s[k] for k in ("exp_avg", "exp_avg_sq")} for n, s in ours["state"].items()
        },
        "param_groups": [
            {**{k: group[k] for k in names}, "step": 2} for group in ours["param_groups"]
        ],
    }
    second = build(name, halfway)
    second.load_state_dict(state)
    assert equal(train(second, gradients()[2:]), expected)
    assert not any("step" in group for group in second.param_groups)


def test_capturable_adam_follows_a_schedule(device: torch.device) -> None:
    def run(**arguments: Any) -> tuple[list[Tensor], Any]:
        optimizer = FusedAdam([{"params": p} for p in parameters(device)], lr=0.125, **arguments)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for step in gradients():
            result = train(optimizer, [step])
            schedule.step()
        return result, optimizer

    (result, optimizer), (expected, _) = run(capturable=True, master_weights=True), run()
    assert equal(result, expected)
    rates = [group["lr"] for group in optimizer.param_groups]
    assert [float(rate) for rate in rates] == [0.125 / 2**STEPS] * len(SHAPES)
    assert all(isinstance(rate, Tensor) and rate.device.type == device.type for rate in rates)


# with tritonamp


def enabled(
    name: str, level: str, device: torch.device, wrap: Callable[[Any], Any] = lambda o: o
) -> Any:
    torch.manual_seed(3)
    model = Net(4, 8, 1).to(device)
    optimizer = wrap(build(name, model.parameters(), lr=0.03))
    return model, optimizer, tritonamp.enable(model, optimizer, level=level)


def descend(
    model: nn.Module, optimizer: Any, amp: Any, steps: int, factor: float = 1.0
) -> list[float]:
    torch.manual_seed(4)
    x = torch.randn(32, 4, device=next(model.parameters()).device)
    y, losses = x.sum(1, keepdim=True), []
    for _ in range(steps):
        loss = (model(x * factor).float() - y).square().mean()
        take_step(amp, optimizer, loss)
        losses.append(loss.item())
    return losses


@each_kind
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_enabled(name: str, level: str, device: torch.device) -> None:
    model, optimizer, amp = enabled(name, level, device)
    losses = descend(model, optimizer, amp, 12)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    masters = [p.dtype is torch.float32 for p in params]
    before = [p.detach().clone() for p in params]
    descend(model, optimizer, amp, 1, factor=INF)
    skipped = equal([p.detach() for p in params], before)
    amp.disable()
    assert losses[-1] < losses[0]
    assert all(masters) == (level != "O3")
    assert skipped or level in ("O0", "O3")  # without a loss scale nobody looks


@each_kind
def test_enabled_steps_are_those_on_fp32_masters(name: str, device: torch.device) -> None:
    """The model's half gradients, unscaled, in the same optimizer over FP32 copies of the
    parameters.
    """
    model, optimizer, amp = enabled(name, "O2", device)
    masters = [p for group in optimizer.param_groups for p in group["params"]]
    plain = build(name, [Parameter(p.detach().clone()) for p in masters], lr=0.03)
    for _ in range(3):
        loss = model(torch.randn(16, 4, device=device)).float().square().mean()
        amp.backward(loss)
        amp.unscale_()
        expected = train(plain, [[p.grad.clone() for p in masters if p.grad is not None]])
        optimizer.step()
        optimizer.zero_grad()
    result = [p.detach().clone() for p in masters]
    halves = [(p.dtype, p.detach().clone()) for p in model.parameters()]
    amp.disable()
    assert equal(result, expected)
    assert equal(
        [half for _, half in halves],
        [p.to(dtype) for p, (dtype, _) in zip(expected, halves, strict=True)],
    )


@each_kind
@pytest.mark.parametrize("wrap", [lambda o: o, LARC], ids=["", "LARC"])
def test_gradscaler(name: str, wrap: Callable[[Any], Any], device: torch.device) -> None:
    """torch's own scaler: unscales, and skips at an inf."""
    param, plain = (Parameter(torch.full((3,), 2.0, device=device)) for _ in range(2))
    optimizer, reference = wrap(build(name, [param])), wrap(build(name, [plain]))
    scaler = torch.amp.GradScaler(device.type, init_scale=256.0)
    # LAMB clips none of them
    for values in (
        [0.125, 0.25, 0.5],
        [INF, 0.0, 0.0],
        [0.5, 0.0625, 0.25],
    ):
        grad = torch.tensor(values, device=device)
        scaler.scale((param * grad).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if torch.isfinite(grad).all():
            train(reference, [[grad]])
    torch.testing.assert_close(param, plain, rtol=4 * U32, atol=0)
    assert scaler.get_scale() == 128.0


# LARC


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_larc_formula(clip: bool, decay: float, device: torch.device) -> None:
    # the last has no local rate
    params = [
        *parameters(device),
        Parameter(torch.zeros(3, device=device)),
    ]
    grads = [*gradients(steps=1)[0], torch.ones(3)]
    grads[1] = torch.zeros_like(grads[1])  # nor this
    expected = []
    for param, grad in zip(params, grads, strict=True):
        p, g = param.detach().double().cpu(), grad.double()
        if p.norm() and g.norm():
            rate = 0.02 * p.norm() / (g.norm() + decay * p.norm() + 1e-8)
            rate = min(rate / 0.02, torch.tensor(1.0)) if clip else rate
            g = (g + decay * p) * rate
        expected.append(p - 0.02 * g)
    optimizer = LARC(torch.optim.SGD(params, lr=0.02, weight_decay=decay), clip=clip)
    for a, b in zip(train(optimizer, [grads]), expected, strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=8 * U32, atol=8 * U32)
    assert optimizer.param_groups[0]["weight_decay"] == decay


def test_larc_is_the_optimizer_it_wraps(device: torch.device) -> None:
    inner = torch.optim.SGD(parameters(device), lr=0.5, momentum=0.9)
    larc = LARC(inner)
    schedule = torch.optim.lr_scheduler.StepLR(larc, 1, gamma=0.5)
    train(larc, gradients()[:1])
    schedule.step()
    larc.add_param_group({"params": [Parameter(torch.ones(1, device=device))], "lr": 1.0})
    assert (
        isinstance(larc, Optimizer)
        and larc.state is inner.state
        and larc.defaults is inner.defaults
    )
    assert [group["lr"] for group in inner.param_groups] == [0.25, 1.0]
    assert str(larc.state_dict()) == str(inner.state_dict())
    other = LARC(
        torch.optim.SGD(
            [{"params": parameters(device)}, {"params": [Parameter(torch.ones(1))]}], lr=9.0
        )
    )
    other.load_state_dict(larc.state_dict())
    assert [group["lr"] for group in other.param_groups] == [0.25, 1.0]
    copied = pickle.loads(pickle.dumps(LARC(inner, clip=False)))
    assert copied.clip is False and copied.optim.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_larc_enabled(name: str, level: str, device: torch.device) -> None:
    model, optimizer, amp = enabled(
        name, level, device, lambda o: LARC(o, clip=False, trust_coefficient=1.0)
    )
    losses = descend(model, optimizer, amp, 12)
    before = [p.detach().clone() for p in amp.master_params()]
    descend(model, optimizer, amp, 1, factor=INF)
    skipped = equal([p.detach() for p in amp.master_params()], before)
    amp.disable()
    assert losses[-1] < losses[0]
    assert skipped or level in ("O0", "O3")


def test_larc_closure() -> None:
    param = Parameter(torch.ones(3))
    optimizer = LARC(torch.optim.SGD([param], lr=0.5))

    def closure() -> Tensor:
        loss = param.sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3.0
    assert (param < 1).all()
