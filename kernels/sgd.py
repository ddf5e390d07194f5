"""One step of SGD with momentum over lists of tensors. 20 B/param with masters and half copies.

Source: Sutskever et al., "On the importance of initialization and momentum in deep learning"
(2013), in the form and the order of operations of ``torch.optim.SGD``.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tritonamp.kernels._cpu_steps import sgd_on_cpu
from tritonamp.kernels._implementations import Implementations
from tritonamp.kernels._launch import Launch
from tritonamp.kernels._plan import Plan
from tritonamp.kernels._shipped import BF16, HALF, LEVELS, WIDE, Shipped, build_name, shipped_update
from tritonamp.kernels._tables import chunk_bounds, element_pointer, store_copy, tail_offsets
from tritonamp.kernels._update_lists import PendingWrites, UpdateLists, unscaled, update_samples
from tritonamp.kernels.device import tl, triton

OPTIONAL = ("momentum_buffers",)  # state that a group may lack
MAX_REGISTERS = 64  # without a limit, ptxas takes 48 on sm_100 and spills
_NUMBERS = 6  # numbers of a rule
_VEC = 4  # elements that a thread holds, as in adamw


class SGDRule(NamedTuple):
    """Hyperparameters of one group, named as in ``torch.optim.SGD``."""

    lr: float | Tensor
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    maximize: bool

    def numbers(self) -> Sequence[float | Tensor]:
        """Return the row of numbers that sgd_kernel reads."""
        sign = -1.0 if self.maximize else 1.0
        return *self[:4], float(self.nesterov), sign


@triton.jit
def _update(
    offs, mask, params, grads, momentum_buffers, copies, overflow_ptr, factor, rule,
    MOMENTUM: tl.constexpr, COPY: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    lr, momentum, dampening, weight_decay, nesterov = rule
    stored = tl.load(params + offs, mask=mask, other=0.0)
    p = stored.to(tl.float32)
    # unscale and clip
    grad = tl.load(grads + offs, mask=mask, other=0.0).to(tl.float32) * factor
    # weight decay, left out if it is 0, as in torch: 0 * p is NaN for an infinite p
    grad = tl.where(weight_decay == 0.0, grad, tl.fma(weight_decay, p, grad))
    # momentum
    if MOMENTUM:
        before = tl.load(momentum_buffers + offs, mask=mask, other=0.0).to(tl.float32)
        # an fma for each sum with a product, because adam_update's reason holds here, too
        buffer = tl.fma(before, momentum, (1.0 - dampening) * grad)
        tl.store(momentum_buffers + offs, buffer.to(momentum_buffers.dtype.element_ty), mask=mask)
        # nesterov is a number instead of a constant, so that one
        # build serves all groups of a launch
        grad = tl.where(nesterov != 0.0, tl.fma(momentum, buffer, grad), buffer)
    # update
    p = tl.fma(-lr, grad, p)

    tl.store(params + offs, p.to(params.dtype.element_ty), mask=mask)
    if COPY:
        store_copy(copies, overflow_ptr, offs, mask, p, VEC)


@triton.jit(do_not_specialize=("chunk",))
def sgd_kernel(
    params_ptr, grads_ptr, momentum_buffers_ptr, copies_ptr,
    numel_ptr, first_ptr, number_ptr, rows_ptr,
    groups_ptr, rules_ptr, grad_scale_ptr, found_inf_ptr, overflow_ptr, chunk,
    PARAM: tl.constexpr, GRAD: tl.constexpr, COPY: tl.constexpr, MOMENT: tl.constexpr,
    NUMBERS: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update one chunk.

    COPY is the type of the copies, and MOMENT that of the momentum buffers; None: there are none.
    """
    # Any flag but 0 skips, and nothing has been written yet: all bits stay.
    if tl.load(found_inf_ptr) != 0.0:
        return
    row = tl.load(rows_ptr + tl.program_id(0))
    number = tl.load(number_ptr + row)
    begin, whole, end = chunk_bounds(numel_ptr, first_ptr, row, chunk, VEC)
    params = element_pointer(params_ptr, row, PARAM, VEC)
    grads = element_pointer(grads_ptr, row, GRAD, VEC)
    # pointers that are never read still need a type
    momentum_buffers, copies = params, params
    if MOMENT is not None:
        momentum_buffers = element_pointer(momentum_buffers_ptr, row, MOMENT, VEC)
    if COPY is not None:
        copies = element_pointer(copies_ptr, row, COPY, VEC)
    # loaded once, because the compiler cannot know that the stores leave these numbers unchanged
    rule_ptr = rules_ptr + NUMBERS * tl.load(groups_ptr + number)
    # read from memory instead of passed, so that a schedule neither recompiles nor re-captures
    rule = (
        tl.load(rule_ptr).to(tl.float32), tl.load(rule_ptr + 1).to(tl.float32),
        tl.load(rule_ptr + 2).to(tl.float32), tl.load(rule_ptr + 3).to(tl.float32),
        tl.load(rule_ptr + 4).to(tl.float32),
    )  # fmt: skip
    factor = tl.load(grad_scale_ptr) * tl.load(rule_ptr + 5).to(tl.float32)
    overflow = overflow_ptr + number
    j = tl.arange(0, BLOCK)
    for at in range(begin, whole, BLOCK):
        _update(
            at + j, at + j < whole, params, grads, momentum_buffers, copies, overflow, factor, rule,
            MOMENT is not None, COPY is not None, VEC,
        )  # fmt: skip
    # a tail of its own, because a mask that ends inside a vector splits every load of the loop
    if whole < end:
        offs = tail_offsets(whole, VEC)
        _update(
            offs, offs < end, params, grads, momentum_buffers, copies, overflow, factor, rule,
            MOMENT is not None, COPY is not None, VEC,
        )  # fmt: skip


def sgd_triton(lists: UpdateLists, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
    with lists.tensors.launches(("params", "momentum_buffers", "copies")) as plan:
        lists.launch(plan, _launches, grad_scale, found_inf)


def _launches(lists: UpdateLists, plan: Plan) -> Iterator[Launch]:
    for t in plan.tables:
        operands = lists.numbers_and_flags(t.device)
        types = t.type("params"), t.type("grads"), t.type("copies"), t.type("momentum_buffers")
        constants = *types, _NUMBERS
        # only the build with momentum and copies spills without the limit
        writes_all = t.type("momentum_buffers") is not None and t.type("copies") is not None
        maxnreg = MAX_REGISTERS if writes_all else None
        yield t.launch_of(sgd_kernel, _LISTS, operands, constants, _VEC, maxnreg=maxnreg)


_LISTS = "params", "grads", "momentum_buffers", "copies"


def sgd_torch(lists: UpdateLists, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
    results = PendingWrites(found_inf)
    for (param, grad, momentum_buffer, copy), rule, number in lists.rows(_LISTS):
        dtype = torch.promote_types(param.dtype, torch.float32)
        p = param.to(dtype)
        # unscale and clip
        grad = unscaled(grad, grad_scale, rule.maximize, dtype)
        # weight decay
        if rule.weight_decay != 0:
            grad = torch.add(grad, p, alpha=rule.weight_decay)
        # momentum
        if rule.momentum != 0:
            buffer = momentum_buffer.to(dtype) * rule.momentum
            buffer = torch.add(buffer, grad, alpha=1 - rule.dampening)
            results.put(momentum_buffer, buffer)
            grad = torch.add(grad, buffer, alpha=rule.momentum) if rule.nesterov else buffer
        # update
        if isinstance(rule.lr, Tensor) and rule.lr.device.type != "cpu":  # reading it would wait
            p = p - rule.lr.to(p) * grad
        else:
            p = torch.add(p, grad, alpha=-float(rule.lr))

        results.put(param, p)
        if copy is not param:
            results.put_copy(copy, p, lists.overflow(param.device)[number])
    results.write()


def sgd(
    lists: UpdateLists, grad_scale: Tensor | None, found_inf: Tensor | None, backend: str = "auto"
) -> None:
    """Update parameters, momentum buffers and half copies in place.

    The state is "momentum_buffers", in FP32 or bfloat16 (FP64 for FP64 parameters). A buffer is
    zeros before its first step, for which the caller passes dampening 0, as torch does. Steps are
    not counted.

    Args:
        lists: lists of n parameters with their hyperparameters, as for ``adamw``, with
            "momentum_buffers" as state.
        grad_scale: 0-d factor on the gradients (1/scale times the clip coefficient), or None for 1.
        found_inf: 0-d flag; any value other than 0 leaves every bit unchanged. None: always step.
        backend: "auto", "triton" or "eager".
    """
    lists.run(SGD, sgd_on_cpu, backend, grad_scale, found_inf)


SGD = Implementations(
    sgd_triton,
    sgd_torch,
    update_samples(
        SGDRule(0.01, 0.9, 0.0, 0.01, True, False),
        {"momentum_buffers": lambda t: t / 2},
        20,
        OPTIONAL,
    ),
)


def shipped() -> Iterator[Shipped]:
    """Yield calls for all levels, with and without momentum."""
    for level, moment, aligned in itertools.product(LEVELS, (WIDE, None, BF16), (True, False)):
        _, grad, copy = level
        if moment is BF16 and (grad is not HALF or copy is None):
            continue
        momentum = moment is not None
        rule = SGDRule(0.1, 0.9 * momentum, 0.0, 0.0, False, False)
        states = {"momentum_buffers": moment or "params"}
        lists = shipped_update(aligned, level, states, rule, optional=OPTIONAL)
        words = momentum and "momentum", not aligned and "unaligned", moment is BF16 and "bf16"
        name = build_name("sgd", *level, *words)
        yield Shipped(name, sgd_triton, (lists, None, None), max_shared=0)
