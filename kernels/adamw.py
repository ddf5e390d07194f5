"""One step of AdamW or Adam over lists of tensors. 28 B/param with FP32 masters and half copies.

Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019), Kingma and Ba, "Adam" (2015), in the
order of operations of ``torch.optim.AdamW``.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonamp.kernels._launch import Forms, Shipped, launch, tl, triton
from tritonamp.kernels._multi_tensor import (
    NUM_WARPS,
    TensorLists,
    chunk_bounds,
    element_pointer,
    note_overflow,
    shipped_lists,
)
from tritonamp.kernels._upload import Upload

RATES = 9  # numbers that adam_rates_kernel leaves for each tensor
_VEC = 4  # elements that a thread holds: with 8 the compiler converts layouts


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


class AdamLists:
    """What the steps of one optimizer work on.

    Attributes:
        tensors: "params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs" (the second moments again where a
            group has no amsgrad) and "copies" (the parameter again where there is none).
        steps: "steps", the step counts, 0-d float32.
        rules: hyperparameters by group. ``groups``: by number, which group a tensor belongs to.
    """

    def __init__(self) -> None:
        self.tensors, self.steps = TensorLists(), TensorLists()
        self.rules: list[AdamRule] = []
        self.groups: list[int] = []
        self._sent: dict[torch.device, _Sent] = {}

    def numbers(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Hyperparameters by group, float64 of shape (groups, 7), and the tensors' groups, int32, on the device."""
        sent = self._sent.get(device)
        if sent is None or sent.groups != self.groups or len(sent.numbers) != len(self.rules):
            sent = self._sent[device] = _Sent(device, self.groups, len(self.rules))
        sent.follow(self.rules)
        return sent.numbers, sent.places


class _Sent:
    """Hyperparameters on a device."""

    def __init__(self, device: torch.device, groups: list[int], n: int) -> None:
        self.groups = list(groups)
        self.places = torch.tensor(groups, dtype=torch.int32, device=device)
        self.numbers = torch.zeros((n, 7), dtype=torch.float64, device=device)
        self._upload = Upload(device)
        self._values: list[list[Any]] = []

    def follow(self, rules: Sequence[AdamRule]) -> None:
        """Sends numbers that changed; those that are tensors are copied on the device."""
        values: list[list[Any]] = []
        tensors = []
        for g, rule in enumerate(rules):
            signs = float(rule.decoupled_weight_decay), -1.0 if rule.maximize else 1.0
            values.append([*rule[:5], *signs])
            for k, value in enumerate(rule[:3]):
                if isinstance(value, Tensor) and value.device.type == "cpu" != self.numbers.device.type:
                    values[g][k] = float(value)
                elif isinstance(value, Tensor):
                    values[g][k] = None
                    tensors.append((g, k, value))
        if values != self._values:
            known = [[value or 0.0 for value in row] for row in values]
            self._upload.send(torch.tensor(known, dtype=torch.float64), self.numbers)
            self._values = values
        for g, k, value in tensors:
            self.numbers[g, k].copy_(value, non_blocking=True)


@triton.jit
def _power(base, exponent):
    """``base`` to the power of an int32 ``exponent``, by squaring: at most 48 roundings."""
    result = tl.full(exponent.shape, 1.0, tl.float64)
    for _ in range(25):
        result = tl.where(exponent % 2 == 1, result * base, result)
        base *= base
        exponent //= 2
    return result


@triton.jit(do_not_specialize=("rows",))
def adam_rates_kernel(
    steps_ptr, number_ptr, groups_ptr, rules_ptr, grad_scale_ptr, found_inf_ptr, rates_ptr, rows,
    RATES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Counts the steps; what of the update is the same for all elements of a tensor, in FP64, rounded once."""
    if tl.load(found_inf_ptr) != 0.0:
        return
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < rows
    step_ptr = tl.load(steps_ptr + row, mask=mask, other=0).to(tl.pointer_type(tl.float32))
    number = tl.load(number_ptr + row, mask=mask, other=0)
    rule = rules_ptr + 7 * tl.load(groups_ptr + number, mask=mask, other=0)
    lr, beta1, beta2 = (tl.load(rule, mask=mask), tl.load(rule + 1, mask=mask), tl.load(rule + 2, mask=mask))
    eps, weight_decay = tl.load(rule + 3, mask=mask), tl.load(rule + 4, mask=mask)
    decoupled, sign = tl.load(rule + 5, mask=mask), tl.load(rule + 6, mask=mask)
    step = tl.load(step_ptr, mask=mask, other=0.0) + 1.0
    tl.store(step_ptr, step, mask=mask)
    bias_correction1 = 1.0 - _power(beta1, step.to(tl.int32))
    bias_correction2 = 1.0 - _power(beta2, step.to(tl.int32))
    rates = rates_ptr + number * RATES
    factor = tl.load(grad_scale_ptr) * sign.to(tl.float32)
    tl.store(rates, factor, mask=mask)
    tl.store(rates + 1, tl.where(decoupled != 0.0, 1.0 - lr * weight_decay, 1.0).to(tl.float32), mask=mask)
    tl.store(rates + 2, tl.where(decoupled != 0.0, 0.0, weight_decay).to(tl.float32), mask=mask)
    tl.store(rates + 3, (1.0 - beta1).to(tl.float32), mask=mask)
    tl.store(rates + 4, beta2.to(tl.float32), mask=mask)
    tl.store(rates + 5, (1.0 - beta2).to(tl.float32), mask=mask)
    tl.store(rates + 6, tl.sqrt(bias_correction2).to(tl.float32), mask=mask)
    tl.store(rates + 7, eps.to(tl.float32), mask=mask)
    tl.store(rates + 8, (-lr / bias_correction1).to(tl.float32), mask=mask)


@triton.jit
def _update(
    offs, mask, params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, copies, overflow_ptr, rates,
    AMSGRAD: tl.constexpr, COPY: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    factor, decay, l2, weight1, beta2, weight2, correction, eps, rate = rates
    p = tl.load(params + offs, mask=mask, other=0.0)
    m = tl.load(exp_avgs + offs, mask=mask, other=0.0)
    v = tl.load(exp_avg_sqs + offs, mask=mask, other=0.0)
    # unscale and clip
    grad = tl.load(grads + offs, mask=mask, other=0.0).to(tl.float32) * factor
    # weight decay
    p = p.to(tl.float32)
    grad = tl.where(l2 == 0.0, grad, grad + l2 * p)
    p *= decay
    # moments
    m = tl.where(weight1 < 0.5, m + weight1 * (grad - m), grad - (grad - m) * (1.0 - weight1))
    v = v * beta2 + weight2 * grad * grad
    v_max = v
    if AMSGRAD:
        before = tl.load(max_exp_avg_sqs + offs, mask=mask, other=0.0)
        v_max = tl.maximum(before, v, propagate_nan=tl.PropagateNan.ALL)
        tl.store(max_exp_avg_sqs + offs, v_max, mask=mask)
    # update
    denom = tl.div_rn(tl.sqrt_rn(v_max), correction) + eps
    p += tl.div_rn(rate * m, denom)

    tl.store(exp_avgs + offs, m, mask=mask)
    tl.store(exp_avg_sqs + offs, v, mask=mask)
    tl.store(params + offs, p.to(params.dtype.element_ty), mask=mask)
    if COPY:
        copy = p.to(copies.dtype.element_ty)
        tl.store(copies + offs, copy, mask=mask)
        note_overflow(overflow_ptr, p, copy, mask, VEC)


@triton.jit(do_not_specialize=("chunk",))
def adamw_kernel(
    params_ptr, grads_ptr, exp_avgs_ptr, exp_avg_sqs_ptr, max_exp_avg_sqs_ptr, copies_ptr,
    numel_ptr, first_ptr, number_ptr, rows_ptr, rates_ptr, found_inf_ptr, overflow_ptr, chunk,
    PARAM: tl.constexpr, GRAD: tl.constexpr, COPY: tl.constexpr, AMSGRAD: tl.constexpr,
    RATES: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One chunk. COPY is the copies' type, or None."""
    if tl.load(found_inf_ptr) != 0.0:
        return
    row = tl.load(rows_ptr + tl.program_id(0))
    number = tl.load(number_ptr + row)
    begin, whole, end = chunk_bounds(numel_ptr, first_ptr, row, chunk, VEC)
    params = element_pointer(params_ptr, row, PARAM, VEC)
    grads = element_pointer(grads_ptr, row, GRAD, VEC)
    exp_avgs = element_pointer(exp_avgs_ptr, row, tl.float32, VEC)
    exp_avg_sqs = element_pointer(exp_avg_sqs_ptr, row, tl.float32, VEC)
    max_exp_avg_sqs, copies = exp_avg_sqs, params
    if AMSGRAD:
        max_exp_avg_sqs = element_pointer(max_exp_avg_sqs_ptr, row, tl.float32, VEC)
    if COPY is not None:
        copies = element_pointer(copies_ptr, row, COPY, VEC)
    rates_ptr += number * RATES
    rates = (  # once: the compiler cannot know that the stores leave them alone
        tl.load(rates_ptr), tl.load(rates_ptr + 1), tl.load(rates_ptr + 2), tl.load(rates_ptr + 3),
        tl.load(rates_ptr + 4), tl.load(rates_ptr + 5), tl.load(rates_ptr + 6), tl.load(rates_ptr + 7),
        tl.load(rates_ptr + 8),
    )  # fmt: skip
    overflow = overflow_ptr + number
    j = tl.arange(0, BLOCK)
    for at in range(begin, whole, BLOCK):
        _update(
            at + j, at + j < whole, params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, copies, overflow, rates,
            AMSGRAD, COPY is not None, VEC,
        )  # fmt: skip
    if whole < end:
        offs = whole + tl.arange(0, VEC)
        _update(
            offs, offs < end, params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, copies, overflow, rates,
            AMSGRAD, COPY is not None, VEC,
        )  # fmt: skip


def adamw_triton(lists: AdamLists, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
    tensors = lists.tensors
    with lists.steps.launches(("steps",)) as step_tables, tensors.launches(_WRITTEN) as tables:
        for on in step_tables:
            rules, groups = lists.numbers(on.device)
            rates, scale, skip = _on(lists, on.device, grad_scale, found_inf)
            arrays = on.pointers["steps"], on.number, groups, rules, scale, skip, rates
            rows = len(on.number)
            launch(adam_rates_kernel, (-(-rows // 32), 1, 1), arrays, (rows,), (RATES, 32), 1)
        for t in tables:
            rates, _, skip = _on(lists, t.device, grad_scale, found_inf)
            overflow = tensors.kept("overflow", (tensors.size,), torch.int32, t.device)
            types = t.type("params"), t.type("grads"), t.type("copies"), t.type("max_exp_avg_sqs") is not None
            vec = _VEC if t.aligned else 1
            launch(
                adamw_kernel,
                (t.chunks, 1, 1),
                (*(t.pointers[name] for name in _LISTS), t.numel, t.first, t.number, t.rows, rates, skip, overflow),
                (t.chunk,),
                (*types, RATES, vec, 32 * NUM_WARPS * vec),
                NUM_WARPS,
            )


_LISTS = "params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "copies"
_WRITTEN = "params", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "copies"


def _on(
    lists: AdamLists, device: torch.device, grad_scale: Tensor | None, found_inf: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Rates, factor and flag on ``device``."""
    rates = lists.tensors.kept("rates", (lists.tensors.size, RATES), torch.float32, device)
    if grad_scale is None:
        grad_scale = lists.steps.kept("one", (), torch.float32, device).fill_(1.0)
    if found_inf is None:
        found_inf = lists.steps.kept("zero", (), torch.float32, device)
    return rates, grad_scale.to(device, non_blocking=True), found_inf.to(device, non_blocking=True)


def adamw_torch(lists: AdamLists, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
    tensors = lists.tensors
    skip = None if found_inf is None else found_inf != 0

    def store(target: Tensor, value: Tensor) -> None:
        target.copy_(value if skip is None else torch.where(skip.to(target.device), target, value.to(target.dtype)))

    rows = zip(*(map(_real, tensors[name]) for name in _LISTS), lists.steps["steps"], tensors.numbers, strict=True)
    for param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, copy, steps, number in rows:
        rule = lists.rules[lists.groups[number]]
        lr, beta1, beta2, eps, weight_decay, decoupled_weight_decay, amsgrad, maximize = rule
        compute = torch.promote_types(param.dtype, torch.float32)
        p, grad, m, v = param.to(compute), grad.to(compute), exp_avg, exp_avg_sq
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
        v_max = torch.maximum(max_exp_avg_sq, v) if amsgrad else v
        # bias corrections, in FP64 from the step count on the device
        step = steps + 1
        bias_correction1 = 1 - beta1 ** step.double()
        bias_correction2 = 1 - beta2 ** step.double()
        # update
        denom = (v_max.sqrt() / bias_correction2.sqrt().to(compute)).add(eps)
        p = p + (-(lr / bias_correction1)).to(compute) * m / denom

        store(exp_avg, m)
        store(exp_avg_sq, v)
        if amsgrad:
            store(max_exp_avg_sq, v_max)
        store(steps, step)
        store(param, p)
        if copy is not param:
            store(copy, p)
            overflow = tensors.kept("overflow", (tensors.size,), torch.int32, param.device)
            beyond = (copy.isinf() & param.isfinite()).any()
            overflow[number] |= beyond if skip is None else beyond & ~skip.to(beyond.device)


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def adamw(
    lists: AdamLists, grad_scale: Tensor | None, found_inf: Tensor | None, backend: str = "auto"
) -> None:
    """Updates parameters, moments, step counts and half copies in place; arithmetic in FP32 (FP64 for FP64 params).

    Args:
        lists: of n parameters (FP32 masters, or half parameters that have none), gradients of any floating dtype,
            moments in FP32 (FP64 for FP64 parameters), step counts, copies, and their hyperparameters.
        grad_scale: 0-d factor on the gradients (1/scale times the clip coefficient), or None.
        found_inf: 0-d; any value other than 0 leaves every bit as it was. None: always step.
    """
    takes_triton = lists.tensors.take_triton(backend, ADAMW)
    takes_triton = takes_triton and lists.steps.take_triton(backend, ADAMW)
    ADAMW.run(backend, takes_triton, lists, grad_scale, found_inf)


ADAMW = Forms(adamw_triton, adamw_torch)


def shipped() -> Iterator[Shipped]:
    """The dtypes of the levels: masters with copies, FP32 parameters, half parameters alone."""
    half, bf16, wide = torch.float16, torch.bfloat16, torch.float32
    kinds = [(wide, half, half), (wide, bf16, bf16), (wide, wide, half), (wide, wide, None), (half, half, None)]
    for (param, grad, copy), amsgrad, aligned in itertools.product(kinds, (False, True), (True, False)):
        lists = AdamLists()
        lists.tensors = shipped_lists(
            aligned,
            params=param,
            grads=grad,
            exp_avgs=wide,
            exp_avg_sqs=wide,
            max_exp_avg_sqs=wide if amsgrad else "exp_avg_sqs",
            copies=copy or "params",
        )
        lists.steps = shipped_lists(True, steps=wide)
        lists.rules, lists.groups = [AdamRule(0.1, 0.9, 0.99, 1e-8, 0.0, True, amsgrad, False)], [0]
        name = f"adamw {param} {grad} {copy}{' amsgrad' * amsgrad}{'' if aligned else ' unaligned'}"
        registers = 72 if copy and grad is wide else 64
        yield Shipped(name.replace("torch.", ""), adamw_triton, (lists, None, None), registers, None, 0, 0)
