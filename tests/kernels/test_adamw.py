"""Numbers of an Adam step that all elements of a tensor share, and its smallest differences."""

from typing import Any

import pytest
import torch

from tests.kernels.conftest import numpy_warns
from tests.kernels.update_rows import ADAM, FP64, ROWS, WIDE
from tests.kernels.updates import Updates
from tritonamp.kernels._launch import Launch
from tritonamp.kernels.adamw import _power
from tritonamp.kernels.device import tl, triton

pytestmark = numpy_warns


@pytest.mark.parametrize(
    "changes",
    [{}, {"lr": 1e-7, "beta2": 0.999, "decoupled_weight_decay": False, "maximize": True}],
)
def test_rates_are_rounded_once(triton_device: torch.device, changes: dict[str, Any]) -> None:
    """What does not depend on the element is FP64: rounding errors of it would bend all elements of
    a step alike.
    """
    rule = ADAM._replace(**changes)
    run = Updates(ROWS["adamw"], triton_device, rules=[rule], shapes=[(1,)] * 33)
    for k, step in enumerate(run.lists["steps"]):
        step.fill_(k * k * k)
    run.step("triton", 0.3)
    rows = run.last.tensors.kept("counts", (34, 10), WIDE, triton_device).tolist()
    decoupled, (lr, beta1, beta2, eps, weight_decay, *_) = rule.decoupled_weight_decay, rule
    for k, found in enumerate(rows):
        corrections = (1 - beta ** (k * k * k + 1) for beta in (beta1, beta2))
        rate, correction = -lr / next(corrections), next(corrections) ** 0.5
        decay, l2 = (1 - lr * weight_decay, 0.0) if decoupled else (1.0, weight_decay)
        factor = -0.3 if rule.maximize else 0.3
        exact = [factor, decay, l2, 1 - beta1, beta2, 1 - beta2, correction, eps, rate]
        assert found == torch.tensor([k * k * k + 1, *exact], dtype=WIDE).tolist(), k


@triton.jit
def power_kernel(base_ptr, exponent_ptr, out_ptr, BLOCK: tl.constexpr):
    j = tl.arange(0, BLOCK)
    tl.store(out_ptr + j, _power(tl.load(base_ptr + j), tl.load(exponent_ptr + j)))


@pytest.mark.parametrize("base", [0.9, 0.999, 0.9999999, 0.0, 1.0, 0.5])
def test_powers(triton_device: torch.device, base: float) -> None:
    """48 roundings of the product, and each earlier one counts as often as its square is squared
    again: n u in all.
    """
    exponents = torch.tensor(
        [0, 1, 2, 3, 10, 1000, 65535, 65537, 2**20 - 1, 2**24 - 1, 2**24, 5, 6, 7, 8, 9]
    )
    bases = torch.full((16,), base, dtype=FP64, device=triton_device)
    out = torch.empty_like(bases)
    Launch(power_kernel, (1, 1, 1), (), (16,), 1)(bases, exponents.int().to(triton_device), out)
    for n, result in zip(exponents.tolist(), out.tolist(), strict=True):
        assert result == pytest.approx(base**n, rel=max(n, 1) * 2.0**-53, abs=1e-300)


@pytest.mark.parametrize("beta1", [0.9, 0.51, 0.0])
def test_the_mean_of_nothing_and_a_gradient_is_rounded_once(
    device: torch.device, backend: str, beta1: float
) -> None:
    """torch.lerp's two formulas: each keeps the smaller term's rounding errors small. A weight of 1
    leaves no trace.
    """
    rules = [ADAM._replace(beta1=beta1)]
    run = Updates(ROWS["adamw"], device, rules=rules, shapes=[(100,)])
    for moment in run.lists["exp_avgs"]:
        moment.mul_(beta1 == 0.0)
    run.step(backend)
    weight = torch.tensor(1 - beta1, dtype=WIDE, device=device)
    for grad, moment in zip(run.lists["grads"], run.lists["exp_avgs"], strict=True):
        assert torch.equal(moment, weight * grad)


def test_smallest_gradients_meet_eps(device: torch.device, backend: str) -> None:
    """Where sqrt(v) is below eps = 1e-8, eps sets the size of the step: lr * 0.1 m / (0.1 (sqrt(v)
    + eps)).
    """
    rules = [ADAM._replace(eps=1e-8, weight_decay=0.0)]
    run = Updates(ROWS["adamw"], device, rules=rules, shapes=[(3,)], steps=0.0)
    for name in ("params", "exp_avgs", "exp_avg_sqs"):
        run.lists[name][0].zero_()
    run.lists["grads"][0].copy_(torch.tensor([1e-10, 1e-8, 1e-6]))
    run.step(backend)
    grads = run.lists["grads"][0]
    # v = 0.01 * 1e-20 is a normal FP32 number still
    expected = -0.1 * grads / (grads + 1e-8)
    torch.testing.assert_close(run.lists["params"][0], expected, rtol=1e-6, atol=0)
