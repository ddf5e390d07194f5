"""sgd against torch.optim.SGD in FP64 with derived bounds, special values, skips, bytes."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import Traffic, U, made
from tests.kernels.test_lion import SHAPES
from tritonamp.kernels._multi_tensor import Memory, TensorLists
from tritonamp.kernels._update_lists import UpdateLists
from tritonamp.kernels.sgd import OPTIONAL, SGDRule, sgd

RULES = {
    "plain": SGDRule(0.1, 0.0, 0.0, 0.0, False, False),
    "decay": SGDRule(0.1, 0.0, 0.0, 0.25, False, True),
    "momentum": SGDRule(0.5, 0.9, 0.0, 0.0, False, False),
    "dampening": SGDRule(0.5, 0.75, 0.5, 0.125, False, False),
    "nesterov": SGDRule(0.1, 0.9, 0.0, 0.01, True, False),
}
each_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
each_copy = pytest.mark.parametrize("copy", [None, torch.float16, torch.bfloat16], ids=str)


class Run:
    """Parameters of one group, stepped on by ``sgd``."""

    def __init__(
        self,
        device: torch.device,
        rule: SGDRule,
        copy: torch.dtype | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.rule = rule
        self.params = made(SHAPES, device, dtype, 0)
        state = torch.promote_types(dtype, torch.float32)
        self.buffers = made(SHAPES, device, state, 9) if rule.momentum else self.params
        self.copies = [torch.full_like(p, 9.0, dtype=copy) if copy else p for p in self.params]
        self.memory = Memory()
        self.rules, self.groups = [rule], [0] * len(self.params)

    def step(
        self,
        grads: Sequence[Tensor],
        backend: str,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        tensors = TensorLists(
            memory=self.memory,
            may_repeat=("copies", *OPTIONAL),
            params=self.params,
            grads=grads,
            momentum_buffers=self.buffers,
            copies=self.copies,
        )
        self.lists = UpdateLists(tensors, self.rules, self.groups)
        sgd(self.lists, grad_scale, found_inf, backend)

    def everything(self) -> list[Tensor]:
        return [t.clone() for t in (*self.params, *self.buffers, *self.copies)]


def exact(run: Run, steps: Sequence[Sequence[Tensor]], factor: float) -> list[Tensor]:
    """What torch.optim.SGD makes of it in FP64."""
    params = [torch.nn.Parameter(p.double()) for p in run.params]
    optimizer = torch.optim.SGD(params, **run.rule._asdict(), foreach=False)
    for param, buffer in zip(params, run.buffers, strict=True):
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
    run = Run(device, rule, copy)
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
    ours = Run(device, rule)
    params = [torch.nn.Parameter(p.clone()) for p in ours.params]
    optimizer = torch.optim.SGD(params, **rule._asdict(), foreach=False)
    for param, buffer in zip(params, ours.buffers, strict=True):
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
    run = Run(device, rule, torch.float16)
    run.step(made(SHAPES, device, torch.float16, 1), backend)
    before = run.everything()
    bad = [torch.full_like(g, float("nan")) for g in made(SHAPES, device, torch.float16, 2)]
    run.step(bad, backend, None, torch.tensor(found_inf, device=device))
    assert all(map(torch.equal, run.everything(), before))


def test_each_group_has_its_own_rule(backend: str, device: torch.device) -> None:
    """Within the bound of ``test_against_fp64``, for two steps."""
    rules = [RULES[name] for name in ("momentum", "dampening", "nesterov")]
    mixed = Run(device, rules[0], torch.float16)
    mixed.rules = rules
    mixed.groups = [i % len(rules) for i in range(len(mixed.params))]
    steps = [made(SHAPES, device, torch.float16, seed) for seed in (1, 2)]
    wanted = [exact(Run(device, rule), steps, 1.0) for rule in rules]
    for grads in steps:
        mixed.step(grads, backend)
    for i, group in enumerate(mixed.groups):
        assert (mixed.params[i].double() - wanted[group][i]).abs().max() <= 2 * 64 * U


def test_half_parameters_alone(backend: str, device: torch.device) -> None:
    """FP32 arithmetic and momentum, rounded once."""
    rule = RULES["nesterov"]
    run = Run(device, rule, dtype=torch.float16)
    wide = [p.float() for p in run.params]
    buffers = [b.clone() for b in run.buffers]
    grads = made(SHAPES, device, torch.float16, 1)
    run.step(grads, backend)
    for param, p, grad, before in zip(run.params, wide, grads, buffers, strict=True):
        g = grad.double() + rule.weight_decay * p.double()
        buffer = rule.momentum * before.double() + g
        right = p.double() - rule.lr * (g + rule.momentum * buffer)
        assert (param.double() - right).abs().max() <= torch.finfo(torch.float16).eps * 4


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_copies_beyond_half_are_noticed(backend: str, device: torch.device) -> None:
    run = Run(device, RULES["plain"], torch.float16)
    run.params[1].fill_(1e5)
    run.step([torch.zeros_like(p) for p in run.params], backend)
    flags = run.lists.overflow(device).tolist()
    assert [bool(flag) for flag in flags] == [False, True, *[False] * (len(flags) - 2)]


def test_a_tensor_as_learning_rate(backend: str, device: torch.device) -> None:
    number = Run(device, RULES["momentum"])
    tensor = Run(device, RULES["momentum"]._replace(lr=torch.tensor(0.5, device=device)))
    grads = made(SHAPES, device, torch.float32, 1)
    for run in (number, tensor):
        run.step(grads, backend)
    for a, b in zip(number.params, tensor.params, strict=True):
        assert (a - b).abs().max() <= 4 * U * 4


@pytest.mark.parametrize("grad", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_bytes(momentum: float, grad: torch.dtype, traffic: Traffic, device: torch.device) -> None:
    """The gradient, 4 + 4 of the master, 4 + 4 of momentum, 2 of the half copy."""
    run = Run(device, SGDRule(0.1, momentum, 0.0, 0.0, False, False), torch.float16)
    size = 1 << 16
    run.params = [torch.zeros(size, device=device)]
    run.buffers = [torch.zeros(size, device=device)] if momentum else run.params
    run.copies = [torch.zeros(size, dtype=torch.float16, device=device)]
    run.groups = [0]
    grads = [torch.ones(size, dtype=grad, device=device)]
    run.step(grads, "triton")
    writes = 10 if momentum else 6
    reads = writes - 2 + grad.itemsize
    assert reads * size <= traffic.read <= 1.01 * reads * size
    assert writes * size <= traffic.written <= 1.01 * writes * size
    traffic.written = 0
    run.step(grads, "triton", None, torch.ones((), device=device))
    assert traffic.written == 0
