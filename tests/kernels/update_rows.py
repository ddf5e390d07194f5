"""The updates of optimizers, a row for each, and the formats of their tensors."""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch

from tritonamp.kernels._update import Update
from tritonamp.kernels.adamw import ADAMW, AdamRule
from tritonamp.kernels.lion import LION, LionRule
from tritonamp.kernels.rmsprop import RMSPROP, RMSpropRule
from tritonamp.kernels.sgd import SGD, SGDRule

HALF, BF16, WIDE, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
CODES = torch.uint8
INF, NAN = float("inf"), float("nan")


class Lion(torch.optim.Optimizer):
    """Algorithm 2 of Lion's paper."""

    def __init__(self, params: Any, **rule: Any) -> None:
        super().__init__(params, rule)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                m, grad = self.state[p]["exp_avg"], -p.grad if group["maximize"] else p.grad
                update = group["beta1"] * m + (1 - group["beta1"]) * grad
                p.sub_(group["lr"] * (update.sign() + group["weight_decay"] * p))
                m.mul_(group["beta2"]).add_((1 - group["beta2"]) * grad)


def torchs_adam(params: Any, **rule: Any) -> torch.optim.Optimizer:
    kind = torch.optim.AdamW if rule.pop("decoupled_weight_decay") else torch.optim.Adam
    return kind(params, betas=(rule.pop("beta1"), rule.pop("beta2")), foreach=False, **rule)


class Row(NamedTuple):
    """One update, with the reference and the bounds of its tests.

    Attributes:
        update: the operation.
        rules: hyperparameters of several groups; kernels take the first two in every format.
        reference: a function of parameters and the fields of a rule, which returns an optimizer.
        errors: bounds of the errors of one step on values between 0.1 and 1.1, in half ulps: of
            each state, relative to its value; of "step", relative to the step.
        drift: bound of the distance from torch's optimizer that a step adds at a learning rate of
            1, in half ulps of 1; None: torch has no such optimizer.
    """

    update: Update
    rules: Sequence[Any]
    reference: Callable[..., torch.optim.Optimizer]
    errors: Mapping[str, int]
    drift: float | None = None

    def states(self, rule: Any) -> list[str]:
        """Return the names of the states of a parameter with this rule."""
        return [name for name in self.update.states if self.update.has(name, rule)]


ADAM = AdamRule(0.1, 0.9, 0.99, 0.03125, 0.25, True, False, False)
# all kinds of an Adam step; number 14 is AMSGrad with an L2 term, and maximizes
ADAMS = [
    ADAM._replace(weight_decay=d, maximize=c, decoupled_weight_decay=not a, amsgrad=b)
    for a, b, c, d in itertools.product(*[(False, True)] * 3, (0.25, 0.0))
]
ROWS = {
    # a moment: 8 roundings, times (|m| + |g|) / |new m| < 11 for the difference in lerp, which has
    # another form for betas below a half
    "adamw": Row(
        ADAMW,
        [ADAM, ADAMS[14], ADAM._replace(beta1=0.25), *ADAMS],
        torchs_adam,
        {"exp_avgs": 88, "exp_avg_sqs": 12, "max_exp_avg_sqs": 12, "step": 128},
        720,
    ),
    "lion": Row(
        LION,
        [
            LionRule(0.125, 0.9, 0.99, 0.01, False),
            LionRule(0.01, 0.75, 0.5, 0.25, True),
            LionRule(0.125, 0.9, 0.99, 0.0, False),
        ],
        Lion,
        {"exp_avgs": 4, "step": 4},
    ),
    # a gradient with weight decay carries 3 roundings, the buffer 6 and the direction 9
    "sgd": Row(
        SGD,
        [
            SGDRule(0.1, 0.9, 0.0, 0.01, True, False),
            SGDRule(0.5, 0.75, 0.5, 0.125, False, True),
            SGDRule(0.5, 0.9, 0.0, 0.0, False, False),
            SGDRule(0.1, 0.0, 0.0, 0.25, False, True),
            SGDRule(0.1, 0.0, 0.0, 0.0, False, False),
        ],
        functools.partial(torch.optim.SGD, foreach=False),
        {"momentum_buffers": 6, "step": 12},
        450,
    ),
    # A centered variance is at least 0.09, of values up to 2.3 with 70 roundings: 780, halved by
    # the root. A step of torch's drifts by half the roundings of the squares, times 1 / (1 - 0.9).
    "rmsprop": Row(
        RMSPROP,
        [
            RMSpropRule(0.1, 0.99, 0.03125, 0.25, 0.0, False, False),
            RMSpropRule(0.05, 0.9, 0.03125, 0.0, 0.9, False, True),
            RMSpropRule(0.1, 0.9, 0.03125, 0.25, 0.5, True, False),
            RMSpropRule(0.1, 0.25, 0.03125, 0.0, 0.0, False, False),
        ],
        functools.partial(torch.optim.RMSprop, foreach=False),
        {"square_avgs": 12, "momentum_buffers": 400, "grad_avgs": 88, "step": 404},
        2000,
    ),
}
each_row = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)


class Form(NamedTuple):
    """The dtypes of parameters, states and gradients.

    Attributes:
        param: dtype of the tensors that a step works on.
        copy: dtype of half copies of FP32 masters, or None.
        packed: whether half parameters have remainders.
        state: dtype of the states; uint8 stands for codes.
        grad: dtype of the gradients.
    """

    param: torch.dtype = WIDE
    copy: torch.dtype | None = None
    packed: bool = False
    state: torch.dtype = WIDE
    grad: torch.dtype = HALF


FORMS = {
    "fp32": Form(grad=WIDE),
    "fp64": Form(FP64, state=FP64, grad=FP64),
    "masters": Form(copy=HALF),
    "masters bfloat16": Form(copy=BF16, grad=BF16),
    "half": Form(HALF),
    "half bfloat16": Form(BF16, grad=BF16),
    "bf16": Form(copy=HALF, state=BF16),
    "packed": Form(HALF, packed=True),
    "packed bfloat16": Form(BF16, packed=True, grad=BF16),
    "packed bf16": Form(BF16, packed=True, state=BF16, grad=BF16),
    "8bit": Form(HALF, packed=True, state=CODES),
    "8bit bfloat16": Form(BF16, packed=True, state=CODES, grad=BF16),
    "8bit fp32": Form(state=CODES, grad=WIDE),
}


def each_form(*names: str) -> pytest.MarkDecorator:
    """Return a mark that gives a test each of these formats, or all on which kernels run."""
    return pytest.mark.parametrize("form", names or [name for name in FORMS if name != "fp64"])
