"""One step of AdamW or Adam over a list of tensors. 28 B/param with FP32 masters and half copies.

Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019), Kingma and Ba, "Adam" (2015), in the
order of operations of ``torch.optim.AdamW``.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class AdamRule(NamedTuple):
    """Hyperparameters of one group, named as in ``torch.optim.AdamW``.

    ``decoupled_weight_decay`` is True for AdamW, False for Adam's L2 term.
    """

    lr: float | Tensor
    beta1: float | Tensor
    beta2: float | Tensor
    eps: float
    weight_decay: float
    decoupled_weight_decay: bool
    amsgrad: bool
    maximize: bool


def adamw_torch(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    copies: Sequence[Tensor | None],
    rule: AdamRule,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    lr, beta1, beta2, eps, weight_decay, decoupled_weight_decay, amsgrad, maximize = rule
    skip = None if found_inf is None else found_inf != 0

    def store(target: Tensor, value: Tensor) -> None:
        target.copy_(value if skip is None else torch.where(skip.to(target.device), target, value.to(target.dtype)))

    for i, param in enumerate(params):
        compute = torch.promote_types(param.dtype, torch.float32)
        p, grad, m, v = param.to(compute), grads[i].to(compute), exp_avgs[i], exp_avg_sqs[i]
        # unscale and clip
        if grad_scale is not None:
            grad = grad * grad_scale.to(grad.device)
        if maximize:
            grad = -grad
        # weight decay
        if weight_decay != 0:
            p, grad = (p * (1 - lr * weight_decay), grad) if decoupled_weight_decay else (p, grad + weight_decay * p)
        # moments
        m = m.lerp(grad, (1 - beta1).to(m) if isinstance(beta1, Tensor) else 1 - beta1)
        v = v * beta2 + (1 - beta2) * grad * grad
        v_max = torch.maximum(max_exp_avg_sqs[i], v) if amsgrad else v
        # bias corrections, in FP64 from the step count on the device
        step = steps[i] + 1
        bias_correction1 = 1 - beta1 ** step.double()
        bias_correction2 = 1 - beta2 ** step.double()
        # update
        denom = (v_max.sqrt() / bias_correction2.sqrt().to(compute)).add(eps)
        p = p + (-(lr / bias_correction1)).to(compute) * m / denom

        store(exp_avgs[i], m)
        store(exp_avg_sqs[i], v)
        if amsgrad:
            store(max_exp_avg_sqs[i], v_max)
        store(steps[i], step)
        store(param, p)
        copy = copies[i]
        if copy is not None:
            store(copy, p)


def adamw(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    copies: Sequence[Tensor | None],
    rule: AdamRule,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """Updates parameters, moments, step counts and half copies in place; arithmetic in FP32 (FP64 for FP64 params).

    Args:
        params: n tensors to update (FP32 masters, or half parameters that have none).
        grads: n gradients, any floating dtype.
        exp_avgs, exp_avg_sqs: n first and second moments.
        max_exp_avg_sqs: n running maxima, empty unless ``rule.amsgrad``.
        steps: n step counts, 0-d float32 on the parameter's device.
        copies: n tensors that receive the rounded parameter, or None each.
        rule: the hyperparameters all n share.
        grad_scale: 0-d factor on the gradients (1/scale times the clip coefficient), or None.
        found_inf: 0-d; any value other than 0 leaves every bit as it was. None: always step.
    """
    adamw_torch(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps, copies, rule, grad_scale, found_inf)
