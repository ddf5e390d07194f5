"""The fused rules of all optimizers but Muon, as data."""

import inspect
from typing import Any

import torch

from tritonamp.kernels.adamw import AdamRule, adamw
from tritonamp.kernels.adamw_8bit import adamw_8bit
from tritonamp.kernels.lion import LionRule, lion
from tritonamp.kernels.lion_8bit import lion_8bit
from tritonamp.kernels.sgd import SGDRule, sgd
from tritonamp.step.fused_rule import FusedRule


def step_of(kind: type[torch.optim.Optimizer]) -> Any:
    """Return the step function of one of torch's optimizers, without torch's profiler."""
    return inspect.unwrap(kind.step)


# also of AdamW, which derives from Adam in torch
ADAM = FusedRule(
    name="Adam",
    kinds="an Adam or AdamW",
    operations={"fp32": adamw, "bf16": adamw, "8bit": adamw_8bit},
    rule=AdamRule,
    state_keys={
        "exp_avgs": "exp_avg",
        "exp_avg_sqs": "exp_avg_sq",
        "max_exp_avg_sqs": "max_exp_avg_sq",
    },
    flags={"max_exp_avg_sqs": "amsgrad"},
    torch_step=step_of(torch.optim.Adam),
    counts_steps=True,
    foreign={"bias_correction": "FusedAdam"},
    sparse_error="Adam does not support sparse gradients, please consider SparseAdam instead",
)

LION = FusedRule(
    name="Lion",
    kinds="a Lion",
    operations={"fp32": lion, "bf16": lion, "8bit": lion_8bit},
    rule=LionRule,
    state_keys={"exp_avgs": "exp_avg"},
    # torch has no Lion; a step moves the moment of every element
    sparse_error="Lion does not support sparse gradients",
)

SGD = FusedRule(
    name="SGD",
    kinds="an SGD",
    operations={"fp32": sgd, "bf16": sgd},
    rule=SGDRule,
    state_keys={"momentum_buffers": "momentum_buffer"},
    flags={"momentum_buffers": "momentum"},
    torch_step=step_of(torch.optim.SGD),
    # torch sets the buffer of a first step to the gradient, undampened: 0 + (1 - 0) * grad. Without
    # dampening that is the same as any step on a buffer of zeros.
    first_step={"dampening": 0.0},
)

RULES = ADAM, LION, SGD
