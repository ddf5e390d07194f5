"""lion and optim.Lion against a reference in FP64, skips, masters, bytes."""

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import tritonamp
from tests.kernels.conftest import Traffic, U, made
from tritonamp.kernels._multi_tensor import Memory, TensorLists
from tritonamp.kernels._update_lists import UpdateLists
from tritonamp.kernels.lion import LionRule, lion

SHAPES = [(5,), (3, 7), (64, 65), (), (4100,)]
RULES = {
    "plain": LionRule(0.125, 0.9, 0.99, 0.0, False),
    "decay": LionRule(0.01, 0.75, 0.5, 0.25, False),
    "maximize": LionRule(0.125, 0.9, 0.99, 0.125, True),
}
each_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


class Run:
    """Parameters of one group, stepped on by ``lion``."""

    def __init__(self, device: torch.device, rule: LionRule, half: torch.dtype | None) -> None:
        self.params = made(SHAPES, device, torch.float32, 0)
        self.exp_avgs = [torch.zeros_like(p) for p in self.params]
        self.copies = [torch.full_like(p, 9.0, dtype=half) if half else p for p in self.params]
        self.memory = Memory()
        self.rules, self.groups = [rule], [0] * len(self.params)

    def step(self, grads: Sequence[Tensor], backend: str, *scalars: Tensor | None) -> None:
        tensors = TensorLists(
            memory=self.memory,
            params=self.params,
            grads=grads,
            exp_avgs=self.exp_avgs,
            copies=self.copies,
        )
        lion(UpdateLists(tensors, self.rules, self.groups), *(scalars or (None, None)), backend)

    def everything(self) -> list[Tensor]:
        return [t.clone() for t in (*self.params, *self.exp_avgs, *self.copies)]


def reference(p: Tensor, m: Tensor, grad: Tensor, rule: LionRule) -> tuple[Tensor, Tensor, Tensor]:
    """The paper's Algorithm 2 in FP64; also what the sign is taken of."""
    grad = -grad if rule.maximize else grad
    c = rule.beta1 * m + (1 - rule.beta1) * grad
    p = p - rule.lr * (c.sign() + rule.weight_decay * p)
    return p, rule.beta2 * m + (1 - rule.beta2) * grad, c


@each_rule
@pytest.mark.parametrize("half", [None, torch.float16, torch.bfloat16], ids=str)
def test_against_fp64(
    rule: LionRule, half: torch.dtype | None, backend: str, device: torch.device
) -> None:
    """Five roundings of quantities below 8 a step; a sign can only differ where c is that small."""
    run = Run(device, rule, half)
    exact = [(p.double(), torch.zeros_like(p, dtype=torch.float64)) for p in run.params]
    uncertain = 0
    for seed in (1, 2, 3):
        grads = made(SHAPES, device, half or torch.float32, seed)
        run.step(grads, backend, torch.tensor(0.5, device=device), None)
        for k, grad in enumerate(grads):
            p, m, c = reference(*exact[k], grad.double() * 0.5, rule)
            certain = c.abs() > 64 * U
            uncertain += int((~certain).sum())
            p = torch.where(certain, p, run.params[k].double())
            assert (run.params[k].double() - p).abs().max() <= 3 * 64 * U
            assert (run.exp_avgs[k].double() - m).abs().max() <= 3 * 64 * U
            exact[k] = p, m
    assert uncertain <= 10  # of 25,000
    for param, rounded in zip(run.params, run.copies, strict=True):
        assert torch.equal(rounded, param.to(rounded.dtype))


@pytest.mark.parametrize("found_inf", [1.0, 2.0])
def test_a_skip_writes_nothing(found_inf: float, backend: str, device: torch.device) -> None:
    run = Run(device, RULES["decay"], torch.float16)
    run.step(made(SHAPES, device, torch.float16, 1), backend)
    before = run.everything()
    bad = [torch.full_like(g, float("nan")) for g in made(SHAPES, device, torch.float16, 2)]
    run.step(bad, backend, None, torch.tensor(found_inf, device=device))
    assert all(map(torch.equal, run.everything(), before))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float16, torch.float64], ids=str)
def test_a_skip_may_be_of_any_dtype(dtype: torch.dtype, backend: str, device: torch.device) -> None:
    """Also one step after another, by one plan; 1e-300 is not 0."""
    run, grads = Run(device, RULES["decay"], torch.float16), made(SHAPES, device, torch.float16, 1)
    skip = 1e-300 if dtype is torch.float64 else 1.0
    for value, of in [(0.0, torch.float32), (0.0, dtype), (skip, dtype), (1.0, torch.float32)]:
        before = run.everything()
        run.step(grads, backend, None, torch.tensor(value, dtype=of, device=device))
        same = all(torch.equal(a, b) for a, b in zip(run.everything(), before, strict=True))
        assert same == (value != 0)


def test_signs_of_zero_and_nan(backend: str, device: torch.device) -> None:
    run = Run(device, RULES["plain"], None)
    before = [p.clone() for p in run.params]
    run.step([torch.zeros_like(p) for p in run.params], backend)
    assert all(map(torch.equal, run.params, before))
    run.step([torch.full_like(p, float("nan")) for p in run.params], backend)
    assert all(m.isnan().all() for m in run.exp_avgs)


def test_each_group_has_its_own_rule(backend: str, device: torch.device) -> None:
    rules = list(RULES.values())
    mixed = Run(device, rules[0], torch.float16)
    mixed.rules = rules
    mixed.groups = [i % len(rules) for i in range(len(mixed.params))]
    alone = [Run(device, rule, torch.float16) for rule in rules]
    for run in (mixed, *alone):
        run.step(made(SHAPES, device, torch.float16, 1), backend)
    for i, group in enumerate(mixed.groups):
        assert torch.equal(mixed.params[i], alone[group].params[i])
        assert torch.equal(mixed.exp_avgs[i], alone[group].exp_avgs[i])


@pytest.mark.parametrize("grad", [torch.float16, torch.float32], ids=str)
def test_bytes(traffic: Traffic, device: torch.device, grad: torch.dtype) -> None:
    """The gradient, 4 + 4 of the master, 4 + 4 of the moment, 2 of the half copy."""
    size = 1 << 16
    run = Run(device, RULES["decay"], torch.float16)
    run.params = [torch.zeros(size, device=device)]
    run.exp_avgs = [torch.zeros(size, device=device)]
    run.copies = [torch.zeros(size, dtype=torch.float16, device=device)]
    run.groups = [0]
    grads = [torch.ones(size, dtype=grad, device=device)]
    run.step(grads, "triton")
    reads = 8 + grad.itemsize
    assert reads * size <= traffic.read <= 1.01 * reads * size
    assert 10 * size <= traffic.written <= 1.01 * 10 * size
    traffic.written = 0
    run.step(grads, "triton", None, torch.ones((), device=device))
    assert traffic.written == 0


def net(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Linear(16, 3)).to(device)


def trained(
    model: nn.Module, optimizer: torch.optim.Optimizer, level: str, clip: float | None
) -> list[Tensor]:
    device = next(model.parameters()).device
    amp = tritonamp.enable(model, optimizer, level=level)
    for seed in range(6):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed)).to(device)
        loss = model(x).float().square().mean()
        amp.backward(loss * float("nan") if seed == 2 else loss)
        if clip is not None:
            amp.clip_grad_norm_(clip)
        optimizer.step()
        optimizer.zero_grad()
    assert amp.stats()["steps"] == 5
    found = [p.detach().clone() for p in amp.master_params()]
    amp.disable()
    return found


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_levels_train_and_skip(level: str, clip: float | None, device: torch.device) -> None:
    model = net(device)
    params = trained(model, tritonamp.optim.Lion(model.parameters(), lr=1e-3), level, clip)
    plain = net(device)
    exact = trained(plain, tritonamp.optim.Lion(plain.parameters(), lr=1e-3), "O0", clip)
    for a, b in zip(params, exact, strict=True):  # a sign may differ, of five
        assert (a.float() - b).abs().max() <= 2e-3 * (5 if level == "O3" else 3)


def test_state_is_saved_and_loaded_bit_for_bit(device: torch.device) -> None:
    runs = []
    for stops in (False, True):
        model = net(device).half()
        optimizer = tritonamp.optim.Lion(model.parameters(), lr=1e-2, weight_decay=0.1)
        for seed in range(4):
            if stops and seed == 2:
                state = copy.deepcopy(optimizer.state_dict())
                model = copy.deepcopy(model)
                optimizer = tritonamp.optim.Lion(model.parameters(), lr=1.0)
                optimizer.load_state_dict(state)
            for k, p in enumerate(model.parameters()):
                generator = torch.Generator().manual_seed(10 * seed + k)
                p.grad = torch.randn(p.shape, generator=generator).to(p)
            optimizer.step()
        runs.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *runs))


def test_bad_hyperparameters_are_refused() -> None:
    params = [nn.Parameter(torch.zeros(1))]
    with pytest.raises(ValueError, match="lr: expected 0 or more, got -1"):
        tritonamp.optim.Lion(params, lr=-1.0)
    with pytest.raises(ValueError, match=r"betas: expected two numbers .* got \(0.9, 1.0\)"):
        tritonamp.optim.Lion(params, betas=(0.9, 1.0))
    with pytest.raises(ValueError, match=r"weight_decay: expected 0 or more, got -0\.1"):
        tritonamp.optim.Lion(params, weight_decay=-0.1)


def test_a_foreign_state_is_refused() -> None:
    params = [nn.Parameter(torch.ones(2))]
    adam = torch.optim.Adam(params)
    optimizer = tritonamp.optim.Lion(params)
    params[0].grad = torch.ones(2)
    adam.step()
    state = adam.state_dict()
    state["state"][0].pop("exp_avg")
    with pytest.raises(ValueError, match="expected the state of a Lion"):
        optimizer.load_state_dict(state)
    params[0].grad = torch.ones(2).to_sparse()
    with pytest.raises(RuntimeError, match="Lion does not support sparse gradients"):
        optimizer.step()
