"""One step of Lion over lists of tensors. 20 B/param with FP32 masters and half copies.

Source: Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023), Algorithm 2::

    update = sign(beta1 * exp_avg + (1 - beta1) * grad)
    param  = param * (1 - lr * weight_decay) - lr * update
    exp_avg = beta2 * exp_avg + (1 - beta2) * grad
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tritonamp.kernels._cpu_steps import lion_on_cpu
from tritonamp.kernels._implementations import Implementations
from tritonamp.kernels._launch import Launch
from tritonamp.kernels._plan import Plan
from tritonamp.kernels._shipped import BF16, LEVELS, WIDE, Shipped, build_name, shipped_update
from tritonamp.kernels._tables import chunk_bounds, element_pointer, store_copy, tail_offsets
from tritonamp.kernels._update_lists import PendingWrites, UpdateLists, unscaled, update_samples
from tritonamp.kernels.device import tl, triton

NUMBERS = 5
"""Number of numbers of a rule."""
_VEC = 4  # elements that a thread holds, as in adamw


class LionRule(NamedTuple):
    """Hyperparameters of one group."""

    lr: float | Tensor
    beta1: float | Tensor
    beta2: float | Tensor
    weight_decay: float
    maximize: bool

    def numbers(self) -> Sequence[float | Tensor]:
        """Return the row of numbers that lion_kernel reads."""
        return *self[:4], -1.0 if self.maximize else 1.0


@triton.jit
def load_rule(rule_ptr, grad_scale_ptr):
    """Return the factor on gradients and the multipliers of a step, once for all elements.

    They are loaded once, because the compiler cannot know that stores leave them unchanged.
    """
    lr, beta1, beta2 = tl.load(rule_ptr), tl.load(rule_ptr + 1), tl.load(rule_ptr + 2)
    # differences in FP64, then one rounding: FP32 would lose digits of 1 - beta
    rule = (
        lr.to(tl.float32), (1.0 - lr * tl.load(rule_ptr + 3)).to(tl.float32),
        beta1.to(tl.float32), (1.0 - beta1).to(tl.float32),
        beta2.to(tl.float32), (1.0 - beta2).to(tl.float32),
    )  # fmt: skip
    return tl.load(grad_scale_ptr) * tl.load(rule_ptr + 4).to(tl.float32), rule


@triton.jit
def lion_update(p, grad, m, rule):
    """Return the parameter and the moment after a step on an unscaled gradient.

    Each sum with a product is an fma, for the reason that ``adam_update`` gives.
    """
    lr, decay, beta1, weight1, beta2, weight2 = rule
    # update; comparisons, because torch.sign of NaN is 0
    c = tl.fma(beta1, m, weight1 * grad)
    sign = tl.where(c > 0.0, 1.0, tl.where(c < 0.0, -1.0, 0.0))
    # weight decay
    p = tl.fma(p, decay, -lr * sign)
    # moment
    return p, tl.fma(beta2, m, weight2 * grad)


def lion_update_twin(p: Tensor, grad: Tensor, m: Tensor, rule: "LionRule") -> tuple[Tensor, Tensor]:
    """Return what ``lion_update`` returns."""
    # weight decay
    p = p * (1 - rule.lr * rule.weight_decay)
    # update
    update = m * rule.beta1 + grad * (1 - rule.beta1)
    p = p - update.sign() * rule.lr
    # moment
    return p, m * rule.beta2 + grad * (1 - rule.beta2)


@triton.jit
def _update(
    offs, mask, params, grads, exp_avgs, copies, overflow_ptr, factor, rule,
    COPY: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    p = tl.load(params + offs, mask=mask, other=0.0).to(tl.float32)
    m = tl.load(exp_avgs + offs, mask=mask, other=0.0).to(tl.float32)
    # unscale and clip
    grad = tl.load(grads + offs, mask=mask, other=0.0).to(tl.float32) * factor
    p, m = lion_update(p, grad, m, rule)

    # rounded to the nearest also in bfloat16, because a step changes a
    # moment by more than a last bit
    tl.store(exp_avgs + offs, m.to(exp_avgs.dtype.element_ty), mask=mask)
    tl.store(params + offs, p.to(params.dtype.element_ty), mask=mask)
    if COPY:
        store_copy(copies, overflow_ptr, offs, mask, p, VEC)


@triton.jit(do_not_specialize=("chunk",))
def lion_kernel(
    params_ptr, grads_ptr, exp_avgs_ptr, copies_ptr, numel_ptr, first_ptr, number_ptr, rows_ptr,
    groups_ptr, rules_ptr, grad_scale_ptr, found_inf_ptr, overflow_ptr, chunk,
    PARAM: tl.constexpr, GRAD: tl.constexpr, COPY: tl.constexpr, MOMENT: tl.constexpr,
    NUMBERS: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update one chunk. COPY is the type of the copies, or None."""
    # Any flag but 0 skips, and nothing has been written yet: all bits stay.
    if tl.load(found_inf_ptr) != 0.0:
        return
    row = tl.load(rows_ptr + tl.program_id(0))
    number = tl.load(number_ptr + row)
    begin, whole, end = chunk_bounds(numel_ptr, first_ptr, row, chunk, VEC)
    params = element_pointer(params_ptr, row, PARAM, VEC)
    grads = element_pointer(grads_ptr, row, GRAD, VEC)
    exp_avgs = element_pointer(exp_avgs_ptr, row, MOMENT, VEC)
    # a pointer that is never read still needs a type
    copies = params
    if COPY is not None:
        copies = element_pointer(copies_ptr, row, COPY, VEC)
    factor, rule = load_rule(rules_ptr + NUMBERS * tl.load(groups_ptr + number), grad_scale_ptr)
    overflow = overflow_ptr + number
    j = tl.arange(0, BLOCK)
    for at in range(begin, whole, BLOCK):
        _update(
            at + j, at + j < whole, params, grads, exp_avgs, copies, overflow, factor, rule,
            COPY is not None, VEC,
        )  # fmt: skip
    # a tail of its own, because a mask that ends inside a vector splits every load of the loop
    if whole < end:
        offs = tail_offsets(whole, VEC)
        _update(
            offs, offs < end, params, grads, exp_avgs, copies, overflow, factor, rule,
            COPY is not None, VEC,
        )  # fmt: skip


_LISTS = "params", "grads", "exp_avgs", "copies"


def lion_triton(lists: UpdateLists, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
    with lists.tensors.launches(("params", "exp_avgs", "copies")) as plan:
        lists.launch(plan, _launches, grad_scale, found_inf)


def _launches(lists: UpdateLists, plan: Plan) -> Iterator[Launch]:
    for t in plan.tables:
        operands = lists.numbers_and_flags(t.device)
        types = t.type("params"), t.type("grads"), t.type("copies"), t.type("exp_avgs")
        constants = *types, NUMBERS
        yield t.launch_of(lion_kernel, _LISTS, operands, constants, _VEC)


def lion_torch(lists: UpdateLists, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
    results = PendingWrites(found_inf)
    for (param, grad, exp_avg, copy), rule, number in lists.rows(_LISTS):
        dtype = torch.promote_types(param.dtype, torch.float32)
        p, m = param.to(dtype), exp_avg.to(dtype)
        # unscale and clip
        grad = unscaled(grad, grad_scale, rule.maximize, dtype)
        p, m = lion_update_twin(p, grad, m, rule)

        results.put(exp_avg, m)
        results.put(param, p)
        if copy is not param:
            results.put_copy(copy, p, lists.overflow(param.device)[number])
    results.write()


def lion(
    lists: UpdateLists, grad_scale: Tensor | None, found_inf: Tensor | None, backend: str = "auto"
) -> None:
    """Update parameters, moments and half copies in place.

    The state is "exp_avgs", in FP32 or bfloat16 (FP64 for FP64 parameters). Steps are not counted.

    Args:
        lists: lists of n parameters with their hyperparameters, as for ``adamw``, with "exp_avgs"
            as state.
        grad_scale: 0-d factor on the gradients (1/scale times the clip coefficient), or None for 1.
        found_inf: 0-d flag; any value other than 0 leaves every bit unchanged. None: always step.
        backend: "auto", "triton" or "eager".
    """
    lists.run(LION, lion_on_cpu, backend, grad_scale, found_inf)


LION = Implementations(
    lion_triton,
    lion_torch,
    update_samples(LionRule(0.01, 0.9, 0.99, 0.01, False), {"exp_avgs": lambda t: t / 2}, 20),
)


def shipped() -> Iterator[Shipped]:
    """Yield calls for all levels."""
    rows = [(level, WIDE) for level in LEVELS] + [(LEVELS[0], BF16)]
    for (level, moment), aligned in itertools.product(rows, (True, False)):
        rule = LionRule(0.1, 0.9, 0.99, 0.0, False)
        lists = shipped_update(aligned, level, {"exp_avgs": moment}, rule)
        words = not aligned and "unaligned", moment is BF16 and "bf16"
        name = build_name("lion", *level, *words)
        yield Shipped(name, lion_triton, (lists, None, None), max_shared=0)
