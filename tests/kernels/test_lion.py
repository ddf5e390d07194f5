"""lion and optim.Lion against a reference in FP64, skips, masters, bytes."""

import copy
import math
from functools import partial

import pytest
import torch
from helpers import Net
from runs import Training, batch
from torch import Tensor, nn

import tritonamp
from tests.kernels.conftest import Traffic, U, made
from tests.kernels.updates import SHAPES, Updates, check_bytes, check_skip, resumed
from tritonamp.kernels.lion import LionRule, lion

RULES = {
    "plain": LionRule(0.125, 0.9, 0.99, 0.0, False),
    "decay": LionRule(0.01, 0.75, 0.5, 0.25, False),
    "maximize": LionRule(0.125, 0.9, 0.99, 0.125, True),
}
each_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


lions = partial(Updates, lion, ["exp_avgs"])


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
    run = lions(device, rule, half)
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
            assert (run.states["exp_avgs"][k].double() - m).abs().max() <= 3 * 64 * U
            exact[k] = p, m
    assert uncertain <= 10  # of 25,000
    for param, rounded in zip(run.params, run.copies, strict=True):
        assert torch.equal(rounded, param.to(rounded.dtype))


@pytest.mark.parametrize("found_inf", [1.0, 2.0])
def test_a_skip_writes_nothing(found_inf: float, backend: str, device: torch.device) -> None:
    run = lions(device, RULES["decay"], torch.float16)
    run.step(made(SHAPES, device, torch.float16, 1), backend)
    check_skip(run, found_inf, backend)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float16, torch.float64], ids=str)
def test_a_skip_may_be_of_any_dtype(dtype: torch.dtype, backend: str, device: torch.device) -> None:
    """Also one step after another, by one plan; 1e-300 is not 0."""
    run, grads = (
        lions(device, RULES["decay"], torch.float16),
        made(SHAPES, device, torch.float16, 1),
    )
    skip = 1e-300 if dtype is torch.float64 else 1.0
    for value, of in [(0.0, torch.float32), (0.0, dtype), (skip, dtype), (1.0, torch.float32)]:
        before = run.everything()
        run.step(grads, backend, None, torch.tensor(value, dtype=of, device=device))
        same = all(torch.equal(a, b) for a, b in zip(run.everything(), before, strict=True))
        assert same == (value != 0)


def test_signs_of_zero_and_nan(backend: str, device: torch.device) -> None:
    run = lions(device, RULES["plain"], None)
    before = [p.clone() for p in run.params]
    run.step([torch.zeros_like(p) for p in run.params], backend)
    assert all(map(torch.equal, run.params, before))
    run.step([torch.full_like(p, float("nan")) for p in run.params], backend)
    assert all(m.isnan().all() for m in run.states["exp_avgs"])


def test_each_group_has_its_own_rule(backend: str, device: torch.device) -> None:
    rules = list(RULES.values())
    mixed = lions(device, rules[0], torch.float16)
    mixed.share(rules, [i % len(rules) for i in range(len(mixed.params))])
    alone = [lions(device, rule, torch.float16) for rule in rules]
    for run in (mixed, *alone):
        run.step(made(SHAPES, device, torch.float16, 1), backend)
    for i, group in enumerate(mixed.groups):
        assert torch.equal(mixed.params[i], alone[group].params[i])
        assert torch.equal(mixed.states["exp_avgs"][i], alone[group].states["exp_avgs"][i])


@pytest.mark.parametrize("grad", [torch.float16, torch.float32], ids=str)
def test_bytes(traffic: Traffic, device: torch.device, grad: torch.dtype) -> None:
    """The gradient, 4 + 4 of the master, 4 + 4 of the moment, 2 of the half copy."""
    run = lions(device, RULES["decay"], torch.float16)
    check_bytes(run, traffic, grad, 8 + grad.itemsize, 10, 1 << 16)


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_levels_train_and_skip(level: str, clip: float | None, device: torch.device) -> None:
    ends = []
    for name in (level, "O0"):
        run = Training(optimizer="Lion", level=name, device=device, lr=1e-3)
        for seed in range(6):
            run.step(batch(seed, device=device), math.nan if seed == 2 else 1.0, clip)
        assert run.amp.stats()["steps"] == 5
        ends.append(run.masters())
        run.end()
    for a, b in zip(*ends, strict=True):  # a sign may differ, of five
        assert (a.float() - b).abs().max() <= 2e-3 * (5 if level == "O3" else 3)


def test_state_is_saved_and_loaded_bit_for_bit(device: torch.device) -> None:
    def make(model: nn.Module, lr: float) -> torch.optim.Optimizer:
        return tritonamp.optim.Lion(model.parameters(), lr=lr, weight_decay=0.1)

    torch.manual_seed(0)
    model = Net().to(device).half()
    whole, parts = (resumed(make, copy.deepcopy(model), stops)[0] for stops in (False, True))
    assert all(map(torch.equal, whole, parts))


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
