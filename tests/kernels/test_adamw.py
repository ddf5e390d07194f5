"""One Adam step against the papers' formulas in FP64, many against torch, and what a step must
leave alone.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import numpy_warns, unaligned
from tritonamp.kernels import _device_tables
from tritonamp.kernels._adam_rates import RATES, _power
from tritonamp.kernels._launch import Launch
from tritonamp.kernels._multi_tensor import Memory, TensorLists
from tritonamp.kernels._update_lists import UpdateLists
from tritonamp.kernels.adamw import OPTIONAL, AdamRule, adamw
from tritonamp.kernels.device import INTERPRETED, tl, triton

pytestmark = numpy_warns

HALF, BF16, WIDE, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
INF, NAN = float("inf"), float("nan")
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
EVERY_RULE = [
    RULE._replace(
        decoupled_weight_decay=decoupled,
        amsgrad=amsgrad,
        maximize=maximize,
        weight_decay=weight_decay,
    )
    for decoupled, amsgrad, maximize, weight_decay in itertools.product(
        *[(False, True)] * 3, (0.0, 0.25)
    )
]
SHAPES = [(0,), (), (1,), (1023,), (1024,), (1025,), (4099,), (5, 7)]
SMALL = [(3,), (5, 7)]
MAY_REPEAT = "copies", *OPTIONAL
TINY = [(3,)]
NOT_ZERO = [1.0, 2.0, 0.5, -1.0, INF, NAN]


class Tensors:
    """What one call works on, all shapes for each rule. All values are in (0.1, 1.1), so that no
    sum cancels; the last tensor of each rule is transposed. Tensors of the same shape lie at the
    same places in memory modulo 16 bytes.
    """

    def __init__(
        self,
        device: torch.device,
        backend: str,
        dtype: torch.dtype = WIDE,
        grad_dtype: torch.dtype = WIDE,
        copy_dtype: torch.dtype | None = None,
        steps: int = 0,
        rules: Sequence[AdamRule] = (RULE,),
        shapes: Sequence[tuple[int, ...]] = SHAPES,
    ) -> None:
        def make(dtype: torch.dtype) -> list[Tensor]:
            of_rule = [
                (torch.rand(shape, device=device) + 0.1).to(dtype)
                for _ in rules
                for shape in [*shapes, (7, 5)]
            ]
            return [
                t.t() if k % (len(shapes) + 1) == len(shapes) else t for k, t in enumerate(of_rule)
            ]

        self.rules, self.backend = list(rules), backend
        self.groups = [g for g in range(len(rules)) for _ in range(len(shapes) + 1)]
        moments = torch.promote_types(dtype, WIDE)
        self.params = make(dtype)
        self.exp_avgs, self.exp_avg_sqs, self.max_exp_avg_sqs = (make(moments) for _ in range(3))
        self.grads = make(grad_dtype)
        self.steps = [torch.full((), float(steps), device=device) for _ in self.params]
        self.copies: list[Tensor | None] = [None] * len(self.params)
        if copy_dtype is not None:
            self.copies = [torch.full_like(p, 9.0, dtype=copy_dtype) for p in self.params]

    def __iter__(self) -> Iterator[Tensor]:
        """All that a step may write to."""
        written = (
            self.params,
            self.exp_avgs,
            self.exp_avg_sqs,
            self.max_exp_avg_sqs,
            self.steps,
            self.copies,
        )
        return (tensor for tensor in itertools.chain(*written) if tensor is not None)

    def clone(self, **changes: Any) -> "Tensors":
        other = object.__new__(Tensors)
        lists = {k: v for k, v in vars(self).items() if k not in ("rules", "groups", "backend")}
        vars(other).update(
            vars(self) | {k: [t if t is None else t.clone() for t in v] for k, v in lists.items()}
        )
        vars(other).update(changes)
        return other

    def adam_lists(self, memory: Memory | None = None, **changes: Any) -> UpdateLists:
        """What a step takes; ``changes`` are of the lists' numbers, or lists in other places."""
        maxima = [
            v_max if self.rules[g].amsgrad else p
            for g, p, v_max in zip(self.groups, self.params, self.max_exp_avg_sqs, strict=True)
        ]
        copies = [
            p if copy is None else copy for p, copy in zip(self.params, self.copies, strict=True)
        ]
        given = {
            "params": self.params,
            "grads": self.grads,
            "exp_avgs": self.exp_avgs,
            "exp_avg_sqs": self.exp_avg_sqs,
            "max_exp_avg_sqs": maxima,
            "copies": copies,
            "steps": self.steps,
        }
        tensors = TensorLists(
            memory=memory, may_repeat=MAY_REPEAT, scalars=("steps",), **(given | changes)
        )
        return UpdateLists(tensors, self.rules, self.groups)

    def step(self, grad_scale: Tensor | None = None, found_inf: Tensor | None = None) -> "Tensors":
        adamw(self.adam_lists(), grad_scale, found_inf, self.backend)
        return self


def overflow(lists: UpdateLists, device: torch.device) -> list[int]:
    return lists.tensors.kept("overflow", (lists.tensors.size,), torch.int32, device).tolist()


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
@pytest.mark.parametrize(
    ("dtype", "grad_dtype", "shapes"),
    [(WIDE, WIDE, SHAPES), (WIDE, HALF, TINY), (WIDE, BF16, TINY), (FP64, FP64, TINY)],
    ids=["float32", "float16", "bfloat16", "float64"],
)
def test_one_step_is_the_textbook_step(
    device: torch.device,
    backend: str,
    dtype: torch.dtype,
    grad_dtype: torch.dtype,
    shapes: list[tuple[int, ...]],
    steps: int,
) -> None:
    """Groups of all kinds in one call.

    u is half an ulp of 1. Without cancellation relative errors add up: a gradient with L2 term
    carries 3u. Then v 12u (6 from the square); m 8u, times (|m| + |g|) / |new m| < 11 for the
    lerp's difference. The update m / sqrt(v): under 128u; the rest of p's change 4u.
    """
    rules = (
        EVERY_RULE
        if shapes is TINY
        else [RULE, RULE._replace(decoupled_weight_decay=False, amsgrad=True)]
    )
    rules = [*rules, RULE._replace(beta1=0.25)]  # lerp has another form below a half
    before = Tensors(device, backend, dtype, grad_dtype, None, steps, rules, shapes)
    for grad, g in zip(before.grads, before.groups, strict=True):
        if rules[g].maximize:
            grad.neg_()
    after = before.clone().step()
    u = torch.finfo(dtype).eps / 2
    for i, param in enumerate(before.params):
        rule = rules[before.groups[i]]
        moments = before.exp_avgs[i], before.exp_avg_sqs[i], before.max_exp_avg_sqs[i]
        p, m, v, v_max = textbook(param, before.grads[i], *moments, steps, rule)
        update = (p - param.double()).abs().amax().item() if param.numel() else 0.0
        torch.testing.assert_close(after.exp_avgs[i].double(), m, rtol=88 * u, atol=0)
        torch.testing.assert_close(after.exp_avg_sqs[i].double(), v, rtol=12 * u, atol=0)
        v_max = v_max if rule.amsgrad else before.max_exp_avg_sqs[i].double()
        torch.testing.assert_close(after.max_exp_avg_sqs[i].double(), v_max, rtol=12 * u, atol=0)
        torch.testing.assert_close(after.params[i].double(), p, rtol=4 * u, atol=128 * u * update)
        assert after.params[i].stride() == param.stride()
        assert after.steps[i].item() == steps + 1
    assert all(torch.equal(a, b) for a, b in zip(before.grads, after.grads, strict=True))


@pytest.mark.parametrize("programs", [_device_tables.PROGRAMS, 1])
@pytest.mark.parametrize("grad_dtype", [WIDE, HALF], ids=str)
def test_memory_that_is_not_aligned(
    device: torch.device,
    backend: str,
    grad_dtype: torch.dtype,
    programs: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And large chunks: other loops, the same bits."""
    start = Tensors(
        device, backend, WIDE, grad_dtype, HALF, steps=2, shapes=[(), (1,), (255,), (257,), (4099,)]
    )
    aligned = start.clone().step()
    monkeypatch.setattr(_device_tables, "PROGRAMS", programs)
    start.params, start.grads = (
        list(map(unaligned, start.params)),
        list(map(unaligned, start.grads)),
    )
    assert same_bits(aligned, start.step())
    for tensor in start.params:
        memory = torch.as_strided(tensor, (tensor.numel() + 16,), (1,), 0)
        assert memory[0] == 7.0 and (memory[1 + tensor.numel() :] == 7.0).all(), (
            "written out of bounds"
        )


def test_memory_with_gaps(device: torch.device, backend: str) -> None:
    """Gradients of slices, parameters that are columns, moments that lie the other way round."""
    start = Tensors(device, backend, WIDE, HALF, HALF, shapes=[(5, 7), (8, 3)])
    expected = start.clone().step()
    start.grads = [torch.stack([g, g], -1)[..., 0] for g in start.grads]
    start.params[0] = torch.cat([start.params[0]] * 2, 1)[:, :7]
    start.exp_avgs[1] = start.exp_avgs[1].t().contiguous().t()
    start.copies[0] = start.copies[0].t().contiguous().t()
    assert same_bits(expected, start.step())


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("dtype", [WIDE, FP64], ids=str)
def test_hyperparameters_may_be_tensors(
    device: torch.device, backend: str, dtype: torch.dtype, decoupled: bool
) -> None:
    """FP32 holds these values exactly, so nothing differs but the twin's lerp, which may contract
    product and sum.
    """
    rule = RULE._replace(lr=0.125, beta1=0.875, beta2=0.96875, decoupled_weight_decay=decoupled)
    start = Tensors(device, backend, steps=3, rules=[RULE, rule], shapes=SMALL)
    for at in {device, torch.device("cpu")}:
        lr, beta1, beta2 = (
            torch.tensor(h, dtype=dtype, device=at) for h in (rule.lr, rule.beta1, rule.beta2)
        )
        tensors = start.clone(rules=[RULE, rule._replace(lr=lr, beta1=beta1, beta2=beta2)]).step()
        numbers = start.clone().step()
        if backend == "triton":
            assert same_bits(tensors, numbers)
        for a, b in zip(tensors, numbers, strict=True):
            torch.testing.assert_close(
                a, b, rtol=2**-22, atol=2**-22
            )  # two ulps; all values are below 2


@pytest.mark.parametrize("as_tensor", [False, True])
def test_hyperparameters_may_change(device: torch.device, backend: str, as_tensor: bool) -> None:
    """From step to step, with the same memory: schedules, groups added, tensors written to."""
    tensors = Tensors(device, backend, rules=[RULE, RULE], shapes=SMALL)
    memory, expected = Memory(), tensors.clone()
    lr = torch.tensor(0.5, device=device)
    for turn, now in enumerate((0.5, 0.25, 0.25, 0.125)):
        lr.fill_(now)
        rule = RULE._replace(eps=2.0 ** -(turn + 2), weight_decay=turn / 8)
        tensors.rules = [RULE, rule._replace(lr=lr if as_tensor else now)]
        adamw(tensors.adam_lists(memory), None, None, backend)
        expected.rules = [RULE, rule._replace(lr=lr.clone() if as_tensor else now)]
        expected.step()
        assert same_bits(tensors, expected)
    other = RULE._replace(lr=0.75)
    for rules, groups in [
        ([RULE, other], [1 - g for g in tensors.groups]),
        ([RULE, other, RULE], [1 - g for g in tensors.groups]),
        ([RULE, RULE, other], [2 * g for g in tensors.groups]),
        ([other], [0] * len(tensors.groups)),
    ]:
        tensors.rules, tensors.groups = expected.rules, expected.groups = rules, groups
        adamw(tensors.adam_lists(memory), None, None, backend)
        assert same_bits(tensors, expected.step())


@pytest.mark.parametrize(
    "changes",
    [{}, {"lr": 1e-7, "beta2": 0.999, "decoupled_weight_decay": False, "maximize": True}],
)
def test_rates_are_rounded_once(triton_device: torch.device, changes: dict[str, Any]) -> None:
    """What does not depend on the element is FP64: rounding errors of it would bend all elements of
    a step alike.
    """
    rule = RULE._replace(**changes)
    tensors = Tensors(triton_device, "triton", rules=[rule], shapes=[(1,)] * 33)
    for k, step in enumerate(tensors.steps):
        step.fill_(k * k * k)
    lists = tensors.adam_lists()
    adamw(lists, torch.tensor(0.3, device=triton_device), None, "triton")
    rates = lists.tensors.kept("rates", (34, RATES), WIDE, triton_device).tolist()
    decoupled, (lr, beta1, beta2, eps, weight_decay, *_) = rule.decoupled_weight_decay, rule
    for k, found in enumerate(rates):
        corrections = (1 - beta ** (k * k * k + 1) for beta in (beta1, beta2))
        rate, correction = -lr / next(corrections), next(corrections) ** 0.5
        decay, l2 = (1 - lr * weight_decay, 0.0) if decoupled else (1.0, weight_decay)
        factor = -0.3 if rule.maximize else 0.3
        exact = [factor, decay, l2, 1 - beta1, beta2, 1 - beta2, correction, eps, rate]
        assert found == torch.tensor([*exact, k * k * k + 1], dtype=WIDE).tolist(), k


def test_amsgrad_may_be_switched(device: torch.device, backend: str) -> None:
    """With the same memory; tables change with what a list repeats."""
    tensors = Tensors(device, backend, shapes=SMALL)
    memory, expected = Memory(), tensors.clone()
    for amsgrad in (True, False, True):
        rules = [RULE._replace(amsgrad=amsgrad)]
        tensors.rules = expected.rules = rules
        adamw(tensors.adam_lists(memory), None, None, backend)
        assert same_bits(tensors, expected.step()), amsgrad


TORCHS = {  # steps; decoupled, amsgrad, lr of each group
    "AdamW": (100, [(True, False, 1e-3), (True, False, 1e-7)]),
    "others": (20, [(False, False, 1e-3), (True, True, 1e-3), (False, True, 1e-7)]),
}


@pytest.mark.parametrize("name", [pytest.param("AdamW", marks=pytest.mark.long), "others"])
def test_many_steps_are_torchs(device: torch.device, backend: str, name: str) -> None:
    """Gradients have magnitudes from 0.5 to 1.5 = G: sqrt(v_hat) is at least 0.5 and |m_hat| /
    sqrt(v_hat) at most 3.

    In step t of n = 100 two correct implementations drift apart by, in u = 2**-24:
    4 |p|: each rounds p's decay and p's sum;
    lr * 28 G / 0.5 = 84 lr: of m, each rounds by 1.4 G u a step, which fades with 0.9;
    lr * 3 (2 t + 12): of v, each two roundings a step, halved by the root, and those of the
    quotient. That is 4 |p| + 720 lr at most, n times; |p| is of the size of what the steps move. L2
    decay feeds a difference back, less than 1 %.
    """
    n, groups = TORCHS[name]
    rules = [
        AdamRule(lr, 0.9, 0.999, 1e-8, 0.01, decoupled, amsgrad, False)
        for decoupled, amsgrad, lr in groups
    ]
    ours = Tensors(device, backend, rules=rules, shapes=[])
    ours.params = [torch.randn(32, device=device) * n * rule.lr for rule in rules]
    for name in ("exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"):
        setattr(ours, name, [torch.zeros_like(p) for p in ours.params])
    start, memory = ours.clone(), Memory()
    theirs = [torch.nn.Parameter(p.clone()) for p in ours.params]
    optimizers = [
        (torch.optim.AdamW if rule.decoupled_weight_decay else torch.optim.Adam)(
            [param], lr=rule.lr, weight_decay=0.01, amsgrad=rule.amsgrad
        )
        for rule, param in zip(rules, theirs, strict=True)
    ]
    largest = [0.0] * len(rules)
    for _ in range(n):
        grads = [(torch.rand_like(p) + 0.5) * torch.randn_like(p).sign() for p in ours.params]
        for g, (param, grad) in enumerate(zip(theirs, grads, strict=True)):
            param.grad = grad.clone()
            optimizers[g].step()
            largest[g] = max(largest[g], param.detach().abs().max().item())
        adamw(ours.adam_lists(memory, grads=grads), None, None, backend)
    for g, (p, q) in enumerate(zip(ours.params, theirs, strict=True)):
        bound = 1.01 * n * 2.0**-24 * (4 * largest[g] + 720 * rules[g].lr)
        assert bound < 0.01 * (q.detach() - start.params[g]).abs().max().item(), (
            "a bound that can fail"
        )
        torch.testing.assert_close(p, q.detach(), rtol=0, atol=bound)


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
    tensors = Tensors(device, backend, rules=[RULE._replace(beta1=beta1)], shapes=[(100,)])
    for grad, moment in zip(tensors.grads, tensors.exp_avgs, strict=True):
        grad.mul_(torch.randn_like(grad))
        moment.mul_(beta1 == 0.0)
    before = tensors.clone()
    tensors.step()
    weight = torch.tensor(1 - beta1, dtype=WIDE, device=device)
    for grad, moment in zip(before.grads, tensors.exp_avgs, strict=True):
        assert torch.equal(moment, weight * grad)


def test_each_tensor_has_its_own_step_count(device: torch.device, backend: str) -> None:
    tensors = Tensors(device, backend, shapes=[(3,)] * 40)
    for k, step in enumerate(tensors.steps):
        step.fill_(3 * k)
    before = tensors.clone()
    tensors.step()
    for i, step in enumerate(tensors.steps):
        assert step.item() == 3 * i + 1
        moments = before.exp_avgs[i], before.exp_avg_sqs[i], before.max_exp_avg_sqs[i]
        p, *_ = textbook(before.params[i], before.grads[i], *moments, 3 * i, RULE)
        # of what the update is subtracted from: the difference may be near 0
        bound = 132 * 2.0**-24 * before.params[i].double().abs().maximum(p.abs())
        assert ((tensors.params[i].double() - p).abs() <= bound).all()


@pytest.mark.parametrize("half", [HALF, BF16], ids=str)
def test_numbers_with_gaps(device: torch.device, backend: str, half: torch.dtype) -> None:
    """Rules, rates and flags go by the tensors' numbers."""
    rules = [RULE, RULE._replace(lr=0.5, weight_decay=0.0)]
    tensors = Tensors(device, backend, WIDE, half, HALF, rules=rules, shapes=SMALL)
    tensors.params[1].fill_(1e6)
    expected = tensors.clone().step()
    numbers = [1, 2, 5, 6, 7, 9]
    lists = tensors.adam_lists(numbers=numbers, size=11)
    lists.groups = [0] * 6 + [1] * 5
    assert [lists.groups[n] for n in numbers] == tensors.groups
    adamw(lists, None, None, backend)
    assert same_bits(tensors, expected)
    assert overflow(lists, device) == [int(n == 2) for n in range(11)]


def test_smallest_gradients_meet_eps(device: torch.device, backend: str) -> None:
    """Where sqrt(v) is below eps = 1e-8, eps sets the size of the step: lr * 0.1 m / (0.1 (sqrt(v)
    + eps)).
    """
    grads = (1e-10, 1e-8, 1e-6)
    tensors = Tensors(
        device, backend, rules=[RULE._replace(eps=1e-8, weight_decay=0.0)], shapes=[(1,)] * 2
    )
    for name in ("params", "exp_avgs", "exp_avg_sqs"):
        setattr(tensors, name, [torch.zeros(1, device=device) for _ in grads])
    tensors.grads = [torch.full((1,), grad, device=device) for grad in grads]
    tensors.step()
    for p, grad in zip(tensors.params, grads, strict=True):
        # v = 0.01 * 1e-20 is a normal FP32 number still
        torch.testing.assert_close(p.item(), -0.1 * grad / (grad + 1e-8), rtol=1e-6, atol=0)


def test_zero_gradients_move_nothing(device: torch.device, backend: str) -> None:
    tensors = Tensors(device, backend, rules=[RULE._replace(weight_decay=0.0)], shapes=SMALL)
    for tensor in itertools.chain(tensors.grads, tensors.exp_avgs, tensors.exp_avg_sqs):
        tensor.zero_()
    before = tensors.clone()
    tensors.step()
    assert all(torch.equal(a, b) for a, b in zip(before.params, tensors.params, strict=True))


@pytest.mark.parametrize("bad", [INF, NAN])
def test_bad_numbers_are_not_hidden(device: torch.device, backend: str, bad: float) -> None:
    """Without found_inf they go where the formulas send them, weight decay 0 and amsgrad or not."""
    rules = [rule for rule in EVERY_RULE if rule.weight_decay == 0.0]
    tensors = Tensors(device, backend, rules=rules, shapes=[(3,)])
    for params, grads in zip(tensors.params[::2], tensors.grads[::2], strict=True):
        params[1], grads[2] = INF, bad
    tensors.step()
    for i, g in list(enumerate(tensors.groups))[::2]:
        assert tensors.params[i].isfinite().tolist() == [True, False, False], rules[g]
        assert tensors.params[i][1].abs() == INF
        assert tensors.exp_avgs[i].isfinite().tolist() == [True, True, False]
        maxima = tensors.max_exp_avg_sqs[i]
        assert not rules[g].amsgrad or maxima.isnan().tolist() == [False, False, bad != bad]


@pytest.mark.parametrize("half", [HALF, BF16], ids=str)
def test_copies_are_the_rounded_parameters(
    device: torch.device, backend: str, half: torch.dtype
) -> None:
    tensors = Tensors(device, backend, WIDE, half, half)
    tensors.copies[1] = None
    without = tensors.clone(copies=[None] * len(tensors.params))
    tensors.step()
    for i, (param, copy) in enumerate(zip(tensors.params, tensors.copies, strict=True)):
        assert (copy is None) == (i == 1)
        assert copy is None or torch.equal(copy, param.to(half))
    tensors.copies = without.copies
    assert same_bits(tensors, without.step())


def test_parameters_beyond_the_copies_range_are_noted(device: torch.device, backend: str) -> None:
    """At any place; a parameter that is inf or NaN itself is no overflow; the note stays until
    it is cleared.
    """
    values = [65519.9, 65520.0, -65520.0, INF, NAN, 1e38, 0.0]
    tensors = Tensors(
        device,
        backend,
        WIDE,
        WIDE,
        HALF,
        rules=[RULE._replace(weight_decay=0.0)],
        shapes=[(1029,)] * 6,
    )
    for grad, moment in zip(tensors.grads, tensors.exp_avgs, strict=True):
        grad.zero_()
        moment.zero_()
    places = [(0,), (1028,), (1023,), (5,), (1024,), (77,), (0, 0)]
    for param, place, value in zip(tensors.params, places, values, strict=True):
        param[place] = value
    lists = tensors.adam_lists()
    for _ in range(2):
        adamw(lists, None, None, backend)
        assert overflow(lists, device) == [0, 1, 1, 0, 0, 1, 0]
        for param in tensors.params:
            param.zero_()
    lists.tensors.kept("overflow", (7,), torch.int32, device).zero_()
    adamw(lists, None, None, backend)
    assert overflow(lists, device) == [0] * 7


@pytest.mark.parametrize("grad_dtype", [HALF, BF16, WIDE], ids=str)
@pytest.mark.parametrize("half", [HALF, BF16], ids=str)
def test_half_parameters_without_masters_are_computed_in_fp32(
    device: torch.device, backend: str, half: torch.dtype, grad_dtype: torch.dtype
) -> None:
    """O3: the parameter is rounded once, at the end."""
    tensors = Tensors(device, backend, half, grad_dtype, shapes=[(5, 7), (1025,)])
    wide = tensors.clone(params=[p.float() for p in tensors.params])
    tensors.step()
    wide.step()
    wide.params = [p.to(half) for p in wide.params]
    assert same_bits(tensors, wide)


@pytest.mark.parametrize("found_inf", NOT_ZERO)
@pytest.mark.parametrize("amsgrad", [False, True])
def test_any_found_inf_leaves_every_bit(
    device: torch.device, backend: str, amsgrad: bool, found_inf: float
) -> None:
    rules = [RULE._replace(amsgrad=amsgrad)]
    tensors = Tensors(device, backend, WIDE, HALF, HALF, steps=5, rules=rules)
    for bad, grad in zip(itertools.cycle([INF, NAN, 65504.0]), tensors.grads, strict=False):
        grad.fill_(bad)
    tensors.params[-1][0, 0] = NAN
    tensors.params[-1][1, 0] = 1e38
    tensors.exp_avgs[-1][0, 0] = -0.0
    before = tensors.clone()
    lists, flag = tensors.adam_lists(), torch.tensor(found_inf, device=device)
    adamw(lists, torch.tensor(0.5, device=device), flag, backend)
    assert same_bits(before, tensors)
    if backend == "triton":
        assert overflow(lists, device) == [0] * len(tensors.params)


def test_found_inf_of_zero_is_no_found_inf(device: torch.device, backend: str) -> None:
    start = Tensors(device, backend, WIDE, HALF, HALF, shapes=SMALL)
    for zero in (0.0, -0.0):
        flagged = start.clone().step(None, torch.tensor(zero, device=device))
        assert same_bits(flagged, start.clone().step())


def test_a_skip_and_then_a_step(device: torch.device, backend: str) -> None:
    """With the same memory: rates of the step before do not count."""
    tensors = Tensors(device, backend, shapes=SMALL)
    memory, expected = Memory(), tensors.clone()
    flag, factor = torch.zeros((), device=device), torch.ones((), device=device)
    for found_inf, scale in ((0.0, 0.5), (1.0, 8.0), (0.0, 0.25)):
        flag.fill_(found_inf)
        factor.fill_(scale)
        adamw(tensors.adam_lists(memory), factor, flag, backend)
        if not found_inf:
            expected.step(torch.tensor(scale, device=device))
        assert same_bits(tensors, expected)


@pytest.mark.parametrize("exponent", [-10, -1, 0, 5, 15])
@pytest.mark.parametrize("grad_dtype", [WIDE, HALF], ids=str)
def test_a_power_of_two_scale_cancels_exactly(
    device: torch.device, backend: str, grad_dtype: torch.dtype, exponent: int
) -> None:
    rules = [RULE, RULE._replace(maximize=True, decoupled_weight_decay=False)]
    plain = Tensors(device, backend, WIDE, grad_dtype, rules=rules, shapes=SMALL)
    if grad_dtype is HALF:
        plain.grads = [
            (g.float() * 8).round().half() / 8 for g in plain.grads
        ]  # stay normal when scaled down
    scaled = plain.clone(grads=[g * 2.0**exponent for g in plain.grads])
    assert same_bits(plain.step(), scaled.step(torch.tensor(2.0**-exponent, device=device)))


def test_the_gradient_factor_is_one_fp32_product(device: torch.device, backend: str) -> None:
    factor = torch.tensor(0.3, device=device)
    start = Tensors(device, backend, WIDE, HALF, shapes=SMALL)
    scaled = start.clone(grads=[g.float() * factor for g in start.grads])
    assert same_bits(start.step(factor), scaled.step())


def test_parameters_and_copies_get_a_new_version(device: torch.device, backend: str) -> None:
    tensors = Tensors(device, backend, WIDE, HALF, HALF, shapes=SMALL)
    written = [*tensors.params, *tensors.copies]
    before = [t._version for t in written]
    grads = [g._version for g in tensors.grads]
    tensors.step()
    assert all(t._version > version for t, version in zip(written, before, strict=True))
    assert [g._version for g in tensors.grads] == grads


def test_leaves_that_require_grad(device: torch.device, backend: str) -> None:
    tensors = Tensors(device, backend, WIDE, WIDE, HALF, shapes=SMALL)
    expected = tensors.clone().step()
    tensors.params = [p.requires_grad_() for p in tensors.params]
    tensors.copies = [copy.requires_grad_() for copy in tensors.copies]
    with torch.no_grad():
        tensors.step()
        assert same_bits(tensors, expected)


def test_nothing_to_do(device: torch.device, backend: str) -> None:
    Tensors(device, backend, rules=[]).step(None, torch.zeros((), device=device))
    empty = Tensors(device, backend)
    for name in ("params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "steps"):
        setattr(empty, name, getattr(empty, name)[:1])
    empty.groups, empty.copies = [0], [None]
    empty.step()
    assert empty.steps[0] == 1.0, "a parameter without elements counts its steps, too"


LAYOUTS = {  # dtypes of parameter, gradient and copy, amsgrad; bytes for each parameter
    "master": (WIDE, HALF, HALF, False, 28),
    "master amsgrad": (WIDE, HALF, HALF, True, 36),
    "fp32": (WIDE, WIDE, None, False, 28),
    "fp32 gradient": (WIDE, WIDE, HALF, False, 30),
    "half": (HALF, HALF, None, False, 22),
}


@pytest.mark.parametrize("place", [lambda x: x, unaligned], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes(triton_device: torch.device, traffic: Any, layout: str, place: Any) -> None:
    """28 for each parameter with master and half copy. In addition, of the rates: a program of up
    to 32 tensors reads flag and factor (4 each), for each tensor its step's pointer, number (8
    each), group, step (4 each) and rule (7 times 8), and leaves its step and its rates. Each
    program of the step reads flag and row (4 each), of it number, size, first chunk and pointers (8
    each), and the rates.
    """
    dtype, grad_dtype, copy_dtype, amsgrad, expected = LAYOUTS[layout]
    rules = [RULE._replace(amsgrad=amsgrad)]
    shapes = [(5,), (4095,), (4097,)]
    tensors = Tensors(
        triton_device, "triton", dtype, grad_dtype, copy_dtype, rules=rules, shapes=shapes
    )
    tensors.params = list(map(place, tensors.params))
    tensors.step()
    numel, programs, rows = sum(p.numel() for p in tensors.params), 5, 4
    pointers = 4 + amsgrad + (copy_dtype is not None)
    read = (
        traffic.read
        - (4 + 4 + rows * (8 + 8 + 4 + 4 + 56))
        - programs * (4 + 4 + 3 * 8 + pointers * 8 + 4 * RATES)
    )
    written = traffic.written - rows * (4 + 4 * RATES)
    assert read + written == numel * expected
    assert written == numel * (
        dtype.itemsize + 8 + 4 * amsgrad + (copy_dtype.itemsize if copy_dtype else 0)
    )


def test_a_skip_writes_nothing(triton_device: torch.device, traffic: Any) -> None:
    tensors = Tensors(triton_device, "triton", WIDE, HALF, HALF, shapes=SMALL)
    tensors.step(None, torch.tensor(NAN, device=triton_device))
    assert (traffic.read, traffic.written) == (4 * (1 + len(tensors.params)), 0)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("has_master", [True, False])
def test_half_values_that_stay_are_counted(
    device: torch.device, backend: str, half: torch.dtype, has_master: bool
) -> None:
    """From 1, where half an ulp is 2**-12 (float16) or 2**-9, down by lr; a gradient of zero moves
    nothing.
    """
    if half is torch.bfloat16 and backend == "triton" and INTERPRETED:
        pytest.skip("the interpreter's bfloat16 is FP32")
    ulp = torch.finfo(half).eps / 2  # below 1
    for lr, stay in ((ulp / 4, 5000), (ulp, 0)):
        copy = torch.ones(5003, dtype=half, device=device)
        param = copy.float() if has_master else copy
        grad = torch.ones_like(copy)
        grad[:3] = 0.0
        zeros = [torch.zeros(5003, device=device) for _ in range(2)]
        moments = {"exp_avgs": zeros[:1], "exp_avg_sqs": zeros[1:], "max_exp_avg_sqs": [param]}
        tensors = TensorLists(
            may_repeat=MAY_REPEAT,
            scalars=("steps",),
            params=[param],
            grads=[grad],
            **moments,
            copies=[copy],
            steps=[torch.zeros((), device=device)],
        )
        rule = AdamRule(lr, 0.9, 0.999, 1e-12, 0.0, True, False, False)
        lists = UpdateLists(tensors, [rule], [0], track_lost=True)
        for _ in range(2):  # of the last step only
            adamw(lists, None, None, backend)
            if lr == ulp:
                break
            param.fill_(1.0), copy.fill_(1.0)
        (lost,) = lists.tensors.memory.all_kept("lost", 1)
        assert lost.tolist() == [[stay, 5000]]
        adamw(lists, None, torch.ones((), device=device), backend)
        assert lost.tolist() == [[stay, 5000]], "a skip leaves it"
