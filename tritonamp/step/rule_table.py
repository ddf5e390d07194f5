"""The fused rules of all optimizers but Muon, as data."""

import inspect
from typing import Any

import torch

from tritonamp.kernels import adamw, lion, rmsprop, sgd
from tritonamp.step.fused_rule import FusedRule


def step_of(kind: type[torch.optim.Optimizer]) -> Any:
    """Return the step function of one of torch's optimizers, without torch's profiler."""
    return inspect.unwrap(kind.step)


# also of AdamW, which derives from Adam in torch
ADAM = FusedRule(
    name="Adam",
    kinds="an Adam or AdamW",
    update=adamw.ADAMW,
    state_keys={
        "exp_avgs": "exp_avg",
        "exp_avg_sqs": "exp_avg_sq",
        "max_exp_avg_sqs": "max_exp_avg_sq",
    },
    torch_step=step_of(torch.optim.Adam),
    foreign={"bias_correction": "FusedAdam"},
    sparse_error="Adam does not support sparse gradients, please consider SparseAdam instead",
)

LION = FusedRule(
    name="Lion",
    kinds="a Lion",
    update=lion.LION,
    state_keys={"exp_avgs": "exp_avg"},
    # torch has no Lion; a step moves the moment of every element
    sparse_error="Lion does not support sparse gradients",
)

SGD = FusedRule(
    name="SGD",
    kinds="an SGD",
    update=sgd.SGD,
    state_keys={"momentum_buffers": "momentum_buffer"},
    torch_step=step_of(torch.optim.SGD),
    # torch sets the buffer of a first step to the gradient, undampened: 0 + (1 - 0) * grad. Without
    # dampening that is the same as any step on a buffer of zeros.
    first_step={"dampening": 0.0},
)

RMSPROP = FusedRule(
    name="RMSprop",
    kinds="an RMSprop",
    update=rmsprop.RMSPROP,
    state_keys={
        "square_avgs": "square_avg",
        "momentum_buffers": "momentum_buffer",
        "grad_avgs": "grad_avg",
    },
    torch_step=step_of(torch.optim.RMSprop),
    sparse_error="RMSprop does not support sparse gradients",
)

RULES = ADAM, LION, SGD, RMSPROP
