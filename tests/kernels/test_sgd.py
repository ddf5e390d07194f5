"""sgd against torch.optim.SGD in FP64 with derived bounds, special values, skips, bytes."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import Traffic, U, made
from tests.kernels.updates import SHAPES, Updates, check_bytes, check_skip
from tritonamp.kernels.sgd import OPTIONAL, SGDRule, sgd

RULES = {
    "plain": SGDRule(0.1, 0.0, 0.0, 0.0, False, False),
    "decay": SGDRule(0.1, 0.0, 0.0, 0.25, False, True),
    "momentum": SGDRule(0.5, 0.9, 0.0, 0.0, False, False),
    "dampening": SGDRule(0.5, 0.75, 0.5, 0.125, False, False),
    "nesterov": SGDRule(0.1, 0.9, 0.0, 0.01, True, False),
}
REPEAT = "copies", *OPTIONAL
each_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
each_copy = pytest.mark.parametrize("copy", [None, torch.float16, torch.bfloat16], ids=str)


def sgds(device: torch.device, rule: SGDRule, *args: Any, **fields: Any) -> Updates:
    """Return parameters that are stepped on by ``sgd``; without momentum they have no states."""
    run = Updates(sgd, ["momentum_buffers"], device, rule, *args, may_repeat=REPEAT, **fields)
    start = made(SHAPES, device, torch.float32, 9) if rule.momentum else run.params
    run.states["momentum_buffers"] = start
    return run


def exact(run: Updates, steps: Sequence[Sequence[Tensor]], factor: float) -> list[Tensor]:
    """What torch.optim.SGD makes of it in FP64."""
    params = [torch.nn.Parameter(p.double()) for p in run.params]
    optimizer = torch.optim.SGD(params, **run.rules[0]._asdict(), foreach=False)
    for param, buffer in zip(params, run.states["momentum_buffers"], strict=True):
        optimizer.state[param]["momentum_buffer"] = buffer.double()
    for grads in steps:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.double() * factor
        optimizer.step()
    return [p.detach() for p in params]


@each_rule
@each_copy
def test_against_fp64(
    rule: SGDRule, copy: torch.dtype | None, backend: str, device: torch.device
) -> None:
    """A step has at most eight roundings of quantities that stay below 8: 3 steps, 64 u each."""
    run = sgds(device, rule, copy)
    steps = [made(SHAPES, device, copy or torch.float32, seed) for seed in (1, 2, 3)]
    expected = exact(run, steps, 0.5)
    scale = torch.tensor(0.5, device=device)
    for grads in steps:
        run.step(grads, backend, scale)
    for param, right, rounded in zip(run.params, expected, run.copies, strict=True):
        assert (param.double() - right).abs().max() <= 3 * 64 * U
        assert torch.equal(rounded, param.to(rounded.dtype))


@each_rule
def test_the_eager_form_has_torchs_bits(rule: SGDRule, device: torch.device) -> None:
    ours = sgds(device, rule)
    params = [torch.nn.Parameter(p.clone()) for p in ours.params]
    optimizer = torch.optim.SGD(params, **rule._asdict(), foreach=False)
    for param, buffer in zip(params, ours.states["momentum_buffers"], strict=True):
        optimizer.state[param]["momentum_buffer"] = buffer.clone()
    for seed in (1, 2, 3):
        grads = made(SHAPES, device, torch.float32, seed)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        optimizer.step()
        ours.step(grads, "eager")
    assert all(map(torch.equal, ours.params, params))


@each_rule
@pytest.mark.parametrize("found_inf", [1.0, 2.0])
def test_a_skip_writes_nothing(
    rule: SGDRule, found_inf: float, backend: str, device: torch.device
) -> None:
    run = sgds(device, rule, torch.float16)
    run.step(made(SHAPES, device, torch.float16, 1), backend)
    check_skip(run, found_inf, backend)


def test_each_group_has_its_own_rule(backend: str, device: torch.device) -> None:
    """Within the bound of ``test_against_fp64``, for two steps."""
    rules = [RULES[name] for name in ("momentum", "dampening", "nesterov")]
    mixed = sgds(device, rules[0], torch.float16)
    mixed.share(rules, [i % len(rules) for i in range(len(mixed.params))])
    steps = [made(SHAPES, device, torch.float16, seed) for seed in (1, 2)]
    wanted = [exact(sgds(device, rule), steps, 1.0) for rule in rules]
    for grads in steps:
        mixed.step(grads, backend)
    for i, group in enumerate(mixed.groups):
        assert (mixed.params[i].double() - wanted[group][i]).abs().max() <= 2 * 64 * U


def test_half_parameters_alone(backend: str, device: torch.device) -> None:
    """FP32 arithmetic and momentum, rounded once."""
    rule = RULES["nesterov"]
    run = sgds(device, rule, dtype=torch.float16)
    wide = [p.float() for p in run.params]
    buffers = [b.clone() for b in run.states["momentum_buffers"]]
    grads = made(SHAPES, device, torch.float16, 1)
    run.step(grads, backend)
    for param, p, grad, before in zip(run.params, wide, grads, buffers, strict=True):
        g = grad.double() + rule.weight_decay * p.double()
        buffer = rule.momentum * before.double() + g
        right = p.double() - rule.lr * (g + rule.momentum * buffer)
        assert (param.double() - right).abs().max() <= torch.finfo(torch.float16).eps * 4


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_copies_beyond_half_are_noticed(backend: str, device: torch.device) -> None:
    run = sgds(device, RULES["plain"], torch.float16)
    run.params[1].fill_(1e5)
    run.step([torch.zeros_like(p) for p in run.params], backend)
    flags = run.lists.overflow(device).tolist()
    assert [bool(flag) for flag in flags] == [False, True, *[False] * (len(flags) - 2)]


def test_a_tensor_as_learning_rate(backend: str, device: torch.device) -> None:
    number = sgds(device, RULES["momentum"])
    tensor = sgds(device, RULES["momentum"]._replace(lr=torch.tensor(0.5, device=device)))
    grads = made(SHAPES, device, torch.float32, 1)
    for run in (number, tensor):
        run.step(grads, backend)
    for a, b in zip(number.params, tensor.params, strict=True):
        assert (a - b).abs().max() <= 4 * U * 4


@pytest.mark.parametrize("grad", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_bytes(momentum: float, grad: torch.dtype, traffic: Traffic, device: torch.device) -> None:
    """The gradient, 4 + 4 of the master, 4 + 4 of momentum, 2 of the half copy."""
    run = sgds(device, SGDRule(0.1, momentum, 0.0, 0.0, False, False), torch.float16)
    writes = 10 if momentum else 6
    check_bytes(run, traffic, grad, writes - 2 + grad.itemsize, writes, 1 << 16)
