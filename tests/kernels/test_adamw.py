"""One Adam step against the papers' formulas in FP64, and what it must leave alone."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tritonamp.kernels.adamw import AdamRule, adamw

RULE = AdamRule(
    lr=0.1,
    beta1=0.9,
    beta2=0.99,
    eps=0.03125,
    weight_decay=0.25,
    decoupled_weight_decay=True,
    amsgrad=False,
    maximize=False,
)
SHAPES = [(0,), (), (1,), (1023,), (1024,), (1025,), (5, 7)]
NOT_ZERO = [1.0, 2.0, 0.5, -1.0, float("inf"), float("nan")]


class Tensors:
    """The lists that one call works on. All values are in (0.1, 1.1), so that no sum cancels; every second tensor of
    two dimensions or more is transposed."""

    def __init__(self, device: torch.device, dtype: torch.dtype, grad_dtype: torch.dtype, steps: int = 0) -> None:
        def make(dtype: torch.dtype) -> list[Tensor]:
            return [(torch.rand(shape, device=device) + 0.1).to(dtype) for shape in [*SHAPES, (7, 5)]]

        self.params, self.exp_avgs, self.exp_avg_sqs, self.max_exp_avg_sqs = (make(dtype) for _ in range(4))
        self.grads = make(grad_dtype)
        self.steps = [torch.full((), float(steps), device=device) for _ in self.params]
        self.copies: list[Tensor | None] = [None] * len(self.params)
        for tensors in (self.params, self.exp_avgs, self.exp_avg_sqs, self.max_exp_avg_sqs, self.grads):
            tensors[-1] = tensors[-1].t()

    def __iter__(self) -> Iterator[Tensor]:
        """All that a step may write to."""
        written = (self.params, self.exp_avgs, self.exp_avg_sqs, self.max_exp_avg_sqs, self.steps, self.copies)
        return (tensor for tensor in itertools.chain(*written) if tensor is not None)

    def clone(self) -> "Tensors":
        other = object.__new__(Tensors)
        vars(other).update({k: [t if t is None else t.clone() for t in v] for k, v in vars(self).items()})
        return other

    def step(self, rule: AdamRule, grad_scale: Tensor | None = None, found_inf: Tensor | None = None) -> "Tensors":
        maxima = self.max_exp_avg_sqs if rule.amsgrad else []
        moments = self.exp_avgs, self.exp_avg_sqs, maxima
        adamw(self.params, self.grads, *moments, self.steps, self.copies, rule, grad_scale, found_inf)
        return self


def bits(tensor: Tensor) -> Tensor:
    """NaN equals itself here."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(integer)


def same_bits(a: Tensors, b: Tensors) -> bool:
    return all(torch.equal(bits(x), bits(y)) for x, y in zip(a, b, strict=True))


def textbook(
    p: Tensor, grad: Tensor, m: Tensor, v: Tensor, v_max: Tensor, steps: int, rule: AdamRule
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loshchilov and Hutter, algorithm 2, in FP64, with the bias-corrected moments written out."""
    p, grad, m, v, v_max = (t.double() for t in (p, grad, m, v, v_max))
    lr, beta1, beta2 = (float(h) for h in (rule.lr, rule.beta1, rule.beta2))
    if rule.maximize:
        grad = -grad
    if rule.decoupled_weight_decay:
        p = p - lr * rule.weight_decay * p
    else:
        grad = grad + rule.weight_decay * p
    m = beta1 * m + (1 - beta1) * grad
    v = beta2 * v + (1 - beta2) * grad**2
    v_max = torch.max(v_max, v)
    m_hat = m / (1 - beta1 ** (steps + 1))
    v_hat = (v_max if rule.amsgrad else v) / (1 - beta2 ** (steps + 1))
    return p - lr * m_hat / (v_hat**0.5 + rule.eps), m, v, v_max


@pytest.mark.parametrize("steps", [0, 9, 100_000])
@pytest.mark.parametrize("weight_decay", [0.0, 0.25])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize(
    ("dtype", "grad_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.float32, torch.float16),
        (torch.float32, torch.bfloat16),
        (torch.float64, torch.float64),
    ],
)
def test_one_step_is_the_textbook_step(
    device: torch.device,
    dtype: torch.dtype,
    grad_dtype: torch.dtype,
    decoupled: bool,
    amsgrad: bool,
    maximize: bool,
    weight_decay: float,
    steps: int,
) -> None:
    """u is half an ulp of 1. Without cancellation relative errors add up: a gradient with L2 term carries 3u. Then
    v 12u (6 from the square); m 8u, times (|m| + |g|) / |new m| < 11 for the lerp's difference. The update m / sqrt(v):
    under 128u; the rest of p's change 4u."""
    rule = RULE._replace(
        decoupled_weight_decay=decoupled, amsgrad=amsgrad, maximize=maximize, weight_decay=weight_decay
    )
    before = Tensors(device, dtype, grad_dtype, steps)
    if maximize:
        before.grads = [-g for g in before.grads]
    after = before.clone().step(rule)
    u = torch.finfo(dtype).eps / 2
    for i, param in enumerate(before.params):
        moments = before.exp_avgs[i], before.exp_avg_sqs[i], before.max_exp_avg_sqs[i]
        p, m, v, v_max = textbook(param, before.grads[i], *moments, steps, rule)
        update = (p - param.double()).abs().amax().item() if param.numel() else 0.0
        torch.testing.assert_close(after.exp_avgs[i].double(), m, rtol=88 * u, atol=0)
        torch.testing.assert_close(after.exp_avg_sqs[i].double(), v, rtol=12 * u, atol=0)
        v_max = v_max if amsgrad else before.max_exp_avg_sqs[i].double()
        torch.testing.assert_close(after.max_exp_avg_sqs[i].double(), v_max, rtol=12 * u, atol=0)
        torch.testing.assert_close(after.params[i].double(), p, rtol=4 * u, atol=128 * u * update)
        assert after.params[i].stride() == param.stride()
        assert after.steps[i].item() == steps + 1
    assert all(torch.equal(a, b) for a, b in zip(before.grads, after.grads, strict=True))


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_hyperparameters_may_be_tensors(device: torch.device, dtype: torch.dtype, decoupled: bool) -> None:
    """FP32 holds these values exactly, so nothing differs but the lerp: a tensor's may contract product and sum."""
    start = Tensors(device, torch.float32, torch.float32, steps=3)
    rule = RULE._replace(lr=0.125, beta1=0.875, beta2=0.96875, decoupled_weight_decay=decoupled)
    lr, beta1, beta2 = (torch.tensor(h, dtype=dtype) for h in (rule.lr, rule.beta1, rule.beta2))
    tensors = start.clone().step(rule._replace(lr=lr, beta1=beta1, beta2=beta2))
    for a, b in zip(tensors, start.step(rule), strict=True):
        torch.testing.assert_close(a, b, rtol=2**-22, atol=2**-22)  # two ulps; all values are below 2


def test_smallest_gradients_meet_eps(device: torch.device) -> None:
    """Where sqrt(v) is below eps = 1e-8, eps sets the size of the step: lr * 0.1 m / (0.1 (sqrt(v) + eps))."""
    for grad in (1e-10, 1e-8, 1e-6):
        one = [torch.zeros(1, device=device) for _ in range(5)]
        one[1].fill_(grad)
        p, g, m, v, step = one
        rule = RULE._replace(eps=1e-8, weight_decay=0.0)
        adamw([p], [g], [m], [v], [], [step.view(())], [None], rule, None, None)
        # v = 0.01 * 1e-20 is a normal FP32 number still
        torch.testing.assert_close(p.item(), -0.1 * grad / (grad + 1e-8), rtol=1e-6, atol=0)


def test_zero_gradients_move_nothing(device: torch.device) -> None:
    tensors = Tensors(device, torch.float32, torch.float32)
    for tensor in itertools.chain(tensors.grads, tensors.exp_avgs, tensors.exp_avg_sqs):
        tensor.zero_()
    before = tensors.clone()
    tensors.step(RULE._replace(weight_decay=0.0))
    assert all(torch.equal(a, b) for a, b in zip(before.params, tensors.params, strict=True))


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_copies_are_the_rounded_parameters(device: torch.device, half: torch.dtype) -> None:
    tensors = Tensors(device, torch.float32, half)
    tensors.copies = [None if i == 1 else torch.full_like(p, 9.0, dtype=half) for i, p in enumerate(tensors.params)]
    without = tensors.clone()
    without.copies = [None] * len(without.params)
    tensors.step(RULE)
    for i, (param, copy) in enumerate(zip(tensors.params, tensors.copies, strict=True)):
        assert (copy is None) == (i == 1)
        assert copy is None or torch.equal(copy, param.to(half))
    tensors.copies = without.copies
    assert same_bits(tensors, without.step(RULE))


def test_half_parameters_without_masters_are_computed_in_fp32(device: torch.device) -> None:
    """O3: the parameter is rounded once, at the end."""
    tensors = Tensors(device, torch.float32, torch.float16)
    tensors.params = [p.half() for p in tensors.params]
    wide = tensors.clone()
    wide.params = [p.float() for p in wide.params]
    tensors.step(RULE)
    wide.step(RULE)
    wide.params = [p.half() for p in wide.params]
    assert same_bits(tensors, wide)


@pytest.mark.parametrize("found_inf", NOT_ZERO)
@pytest.mark.parametrize("amsgrad", [False, True])
def test_any_found_inf_leaves_every_bit(device: torch.device, amsgrad: bool, found_inf: float) -> None:
    tensors = Tensors(device, torch.float32, torch.float16, steps=5)
    tensors.copies = [torch.full_like(p, 9.0, dtype=torch.float16) for p in tensors.params]
    for bad, grad in zip(itertools.cycle([float("inf"), float("nan"), 65504.0]), tensors.grads, strict=False):
        grad.fill_(bad)
    tensors.params[-1][0, 0] = float("nan")
    tensors.exp_avgs[-1][0, 0] = -0.0
    before = tensors.clone()
    flag = torch.tensor(found_inf, device=device)
    assert same_bits(before, tensors.step(RULE._replace(amsgrad=amsgrad), torch.tensor(0.5, device=device), flag))


def test_found_inf_of_zero_is_no_found_inf(device: torch.device) -> None:
    start = Tensors(device, torch.float32, torch.float16)
    start.copies = [torch.empty_like(p, dtype=torch.float16) for p in start.params]
    flagged = start.clone().step(RULE, None, torch.zeros((), device=device))
    assert same_bits(flagged, start.step(RULE))


@pytest.mark.parametrize("exponent", [-24, -1, 0, 5, 16])
def test_a_power_of_two_scale_cancels_exactly(device: torch.device, exponent: int) -> None:
    plain = Tensors(device, torch.float32, torch.float32)
    scaled = plain.clone()
    scaled.grads = [g * 2.0**exponent for g in scaled.grads]
    assert same_bits(plain.step(RULE), scaled.step(RULE, torch.tensor(2.0**-exponent, device=device)))


def test_the_gradient_factor_is_one_fp32_product(device: torch.device) -> None:
    factor = torch.tensor(0.3, device=device)
    start = Tensors(device, torch.float32, torch.float16)
    scaled = start.clone()
    scaled.grads = [g.float() * factor for g in scaled.grads]
    assert same_bits(start.step(RULE, factor), scaled.step(RULE))


def test_nothing_to_do(device: torch.device) -> None:
    adamw([], [], [], [], [], [], [], RULE, None, torch.zeros((), device=device))
