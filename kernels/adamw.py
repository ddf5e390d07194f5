"""One step of AdamW or Adam over lists of tensors. 28 B/param with FP32 masters and half copies.

Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019), and Kingma and Ba,
"Adam" (2015), in the order of operations of ``torch.optim.AdamW``.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tritonamp.kernels._adam_rates import (
    RATES,
    adam_rates_kernel,
    adam_update,
    adam_update_twin,
    load_rates,
)
from tritonamp.kernels._cpu_steps import adamw_on_cpu
from tritonamp.kernels._implementations import Implementations
from tritonamp.kernels._launch import Launch, Operand
from tritonamp.kernels._plan import Plan
from tritonamp.kernels._sample import ListSample
from tritonamp.kernels._shipped import BF16, HALF, LEVELS, WIDE, Shipped, build_name, shipped_update
from tritonamp.kernels._small_state import (
    in_memory_of,
    random_bits,
    random_bits_twin,
    rounded,
    rounded_twin,
)
from tritonamp.kernels._tables import chunk_bounds, element_pointer, store_copy, tail_offsets
from tritonamp.kernels._update_lists import PendingWrites, UpdateLists, unscaled, update_samples
from tritonamp.kernels.device import WARP_SIZE, tl, triton


class AdamRule(NamedTuple):
    """Hyperparameters of one group, named as in ``torch.optim.AdamW``.

    ``decoupled_weight_decay`` is True for AdamW and False for Adam's L2 term.
    """

    lr: float | Tensor
    beta1: float | Tensor
    beta2: float | Tensor
    eps: float
    weight_decay: float
    decoupled_weight_decay: bool
    amsgrad: bool
    maximize: bool

    def numbers(self) -> Sequence[float | Tensor]:
        """Return the row of numbers that adam_rates_kernel reads."""
        signs = float(self.decoupled_weight_decay), -1.0 if self.maximize else 1.0
        return *self[:5], *signs


OPTIONAL = ("max_exp_avg_sqs",)  # state that a group may lack
# Elements that a thread holds. With 8 the compiler converts layouts, which takes shared memory and
# 117 to 255 registers instead of 54.
_VEC = 4


@triton.jit
def _update(
    offs, mask, params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, copies, overflow_ptr, rates,
    step_count, number,
    AMSGRAD: tl.constexpr, COPY: tl.constexpr, LOST: tl.constexpr, BF16: tl.constexpr,
    VEC: tl.constexpr,
):  # fmt: skip
    """Update one tile; return which elements lost their update (under LOST), and which moved."""
    # masked elements are loaded as 0, and none of their results is stored
    stored = tl.load(params + offs, mask=mask, other=0.0)
    m = tl.load(exp_avgs + offs, mask=mask, other=0.0).to(tl.float32)
    v = tl.load(exp_avg_sqs + offs, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(grads + offs, mask=mask, other=0.0).to(tl.float32)
    v_max = v
    if AMSGRAD:
        v_max = tl.load(max_exp_avg_sqs + offs, mask=mask, other=0.0).to(tl.float32)
    p = stored.to(tl.float32)
    p, m, v, v_max, moves = adam_update(p, grad, m, v, v_max, rates, AMSGRAD)

    # Rounded to the nearest in bfloat16, a second moment would never decay (_small_state says why).
    # Both moments get bits of their own.
    if BF16:
        random, other = random_bits(offs, step_count, number)
        m, v, v_max = rounded(m, random, 16), rounded(v, other, 16), rounded(v_max, other, 16)
    tl.store(exp_avgs + offs, m.to(exp_avgs.dtype.element_ty), mask=mask)
    tl.store(exp_avg_sqs + offs, v.to(exp_avg_sqs.dtype.element_ty), mask=mask)
    if AMSGRAD:
        tl.store(max_exp_avg_sqs + offs, v_max.to(exp_avg_sqs.dtype.element_ty), mask=mask)
    # lost: the update is not zero, and the half value stays
    moves &= mask
    lost = moves
    # the old half value is read before the stores below replace it
    if LOST:
        half = tl.load(copies + offs, mask=mask, other=0.0) if COPY else stored
        lost &= p.to(half.dtype) == half
    tl.store(params + offs, p.to(params.dtype.element_ty), mask=mask)
    if COPY:
        store_copy(copies, overflow_ptr, offs, mask, p, VEC)
    return lost, moves


@triton.jit
def count_lost(lost_ptr, lost, moves):
    """Add a tile's counts of lost and of moved elements to those of its tensor, int64."""
    # atomics on integers are exact in any order, so the counts are the same in every run
    tl.atomic_add(lost_ptr, tl.sum(lost, 0).to(tl.int64), sem="relaxed")
    tl.atomic_add(lost_ptr + 1, tl.sum(moves, 0).to(tl.int64), sem="relaxed")


@triton.jit(do_not_specialize=("chunk",))
def adamw_kernel(
    params_ptr, grads_ptr, exp_avgs_ptr, exp_avg_sqs_ptr, max_exp_avg_sqs_ptr, copies_ptr,
    numel_ptr, first_ptr, number_ptr, rows_ptr,
    rates_ptr, found_inf_ptr, overflow_ptr, lost_ptr, chunk,
    PARAM: tl.constexpr, GRAD: tl.constexpr, COPY: tl.constexpr, MOMENT: tl.constexpr,
    AMSGRAD: tl.constexpr, LOST: tl.constexpr, BF16: tl.constexpr, RATES: tl.constexpr,
    VEC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update one chunk.

    COPY is the type of the copies, or None. LOST counts the half values that do not change. BF16
    rounds the moments to bfloat16, whatever the type MOMENT of their memory is.
    """
    # A skip is decided on the device, and every program returns before it writes: all bits stay.
    if tl.load(found_inf_ptr) != 0.0:
        return
    row = tl.load(rows_ptr + tl.program_id(0))
    number = tl.load(number_ptr + row)
    begin, whole, end = chunk_bounds(numel_ptr, first_ptr, row, chunk, VEC)
    params = element_pointer(params_ptr, row, PARAM, VEC)
    grads = element_pointer(grads_ptr, row, GRAD, VEC)
    exp_avgs = element_pointer(exp_avgs_ptr, row, MOMENT, VEC)
    exp_avg_sqs = element_pointer(exp_avg_sqs_ptr, row, MOMENT, VEC)
    # pointers that are never read still need a type
    max_exp_avg_sqs, copies = exp_avg_sqs, params
    if AMSGRAD:
        max_exp_avg_sqs = element_pointer(max_exp_avg_sqs_ptr, row, MOMENT, VEC)
    if COPY is not None:
        copies = element_pointer(copies_ptr, row, COPY, VEC)
    rates_ptr += number * RATES
    rates, step_count = load_rates(rates_ptr), tl.load(rates_ptr + 9)
    overflow = overflow_ptr + number
    j = tl.arange(0, BLOCK)
    all_lost, all_moves = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for at in range(begin, whole, BLOCK):
        lost, moves = _update(
            at + j, at + j < whole, params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, copies,
            overflow, rates, step_count, number, AMSGRAD, COPY is not None, LOST, BF16, VEC,
        )  # fmt: skip
        if LOST:
            all_lost += lost.to(tl.int32)
            all_moves += moves.to(tl.int32)
    if LOST:
        count_lost(lost_ptr + 2 * number, all_lost, all_moves)
    # the tail's mask is separate, because a mask that ends inside a vector splits every load of the
    # loop
    if whole < end:
        offs = tail_offsets(whole, VEC)
        lost, moves = _update(
            offs, offs < end, params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, copies,
            overflow, rates, step_count, number, AMSGRAD, COPY is not None, LOST, BF16, VEC,
        )  # fmt: skip
        if LOST:
            count_lost(lost_ptr + 2 * number, lost.to(tl.int32), moves.to(tl.int32))


def adamw_triton(lists: UpdateLists, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
    with lists.tensors.launches(_WRITTEN) as plan:
        lists.launch(plan, _launches, grad_scale, found_inf)


def _launches(lists: UpdateLists, plan: Plan) -> Iterator[Launch]:
    yield from rate_launches(lists, plan)
    # one launch for each kind of table, because types are constants of a kernel
    for t in plan.tables:
        amsgrad = t.type("max_exp_avg_sqs") is not None
        types = t.type("params"), t.type("grads"), t.type("copies"), t.type("exp_avgs")
        # an FP32 parameter without a half copy has no half value to stay behind
        counts_lost = lists.track_lost and (types[2] or types[0]) != tl.float32
        flags = Operand.FOUND_INF, lists.overflow(t.device), lists.lost(t.device)
        operands = rates_of(lists, t.device), *flags
        constants = *types, amsgrad, counts_lost, lists.state == "bf16", RATES
        yield t.launch_of(adamw_kernel, _LISTS, operands, constants, _VEC)


_LISTS = "params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "copies"
_WRITTEN = "params", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "copies"


def rate_launches(lists: UpdateLists, plan: Plan) -> Iterator[Launch]:
    """Yield the launches that count steps and compute rates."""
    for t in plan.scalar_tables:
        rules, groups = lists.numbers(t.device)
        scalars = Operand.GRAD_SCALE, Operand.FOUND_INF
        results = rates_of(lists, t.device), lists.lost(t.device)
        counts = t.pointers["steps"], t.number, groups, rules, *scalars, *results
        grid = -(-len(t.number) // WARP_SIZE), 1, 1
        options = lists.track_lost, RATES, WARP_SIZE
        yield Launch(adam_rates_kernel, grid, (len(t.number),), options, 1, tensors=counts)


def rates_of(lists: UpdateLists, device: torch.device) -> Tensor:
    """Return the memory of the rates, FP32 of shape (size, RATES)."""
    return lists.tensors.kept("rates", (lists.tensors.size, RATES), torch.float32, device)


def adamw_torch(lists: UpdateLists, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
    results = PendingWrites(found_inf)
    for row, rule, number in lists.rows((*_LISTS, "steps")):
        param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, copy, steps = row
        dtype, step = torch.promote_types(param.dtype, torch.float32), steps + 1
        p, m, v = (x.to(dtype) for x in (param, exp_avg, exp_avg_sq))
        # unscale and clip
        grad = unscaled(grad, grad_scale, rule.maximize, dtype)
        before = max_exp_avg_sq.to(dtype)
        p, m, v, v_max, update = adam_update_twin(p, grad, m, v, before, rule, step)
        decayed, p = p, p + update
        # Rounded to the nearest in bfloat16, a second moment would never decay (_small_state says
        # why). FP64 moments are not rounded.
        if lists.state == "bf16" and dtype is torch.float32:
            both = random_bits_twin(param, step, number)
            random, other = (in_memory_of(param, bits) for bits in both)
            m = rounded_twin(m, random, 16)
            v, v_max = rounded_twin(v, other, 16), rounded_twin(v_max, other, 16)

        for target, value in ((exp_avg, m), (exp_avg_sq, v), (param, p), (steps, step)):
            results.put(target, value)
        if rule.amsgrad:
            results.put(max_exp_avg_sq, v_max)
        if copy is not param:
            results.put_copy(copy, p, lists.overflow(param.device)[number])
        # lost: the update is not zero, and the half value stays
        if lists.track_lost and copy.dtype in (torch.float16, torch.bfloat16):
            moves = (update != 0) | (param.to(dtype) != decayed)
            lost = moves & (p.to(copy.dtype) == copy)
            results.put(lists.lost(param.device)[number], torch.stack([lost.sum(), moves.sum()]))
    results.write()


def adamw(
    lists: UpdateLists, grad_scale: Tensor | None, found_inf: Tensor | None, backend: str = "auto"
) -> None:
    """Update parameters, moments, step counts and half copies in place, with arithmetic in FP32.

    Args:
        lists: lists of n parameters with their hyperparameters. "params" are FP32 masters, or half
            parameters without masters; "grads" have any floating dtype; "exp_avgs", "exp_avg_sqs"
            and "max_exp_avg_sqs" are FP32, or bfloat16 and rounded stochastically if
            ``lists.state`` is "bf16"; FP64 parameters have FP64 moments and arithmetic; "steps" and
            "copies" are as in ``UpdateLists``.
        grad_scale: 0-d factor on the gradients (1/scale times the clip coefficient), or None for 1.
        found_inf: 0-d flag; any value other than 0 leaves every bit unchanged. None: always step.
        backend: "auto", "triton" or "eager".
    """
    on_cpu = adamw_on_cpu if lists.state == "fp32" else None
    lists.run(ADAMW, on_cpu, backend, grad_scale, found_inf)


def _samples() -> Iterator[ListSample]:
    for amsgrad in (False, True):
        rule = AdamRule(0.01, 0.9, 0.99, 1e-8, 0.01, True, amsgrad, False)
        states = {
            "exp_avgs": lambda t: t / 2,
            "exp_avg_sqs": torch.square,
            "max_exp_avg_sqs": torch.square if amsgrad else None,
        }
        with_masters, of_half = update_samples(rule, states, 36 if amsgrad else 28, OPTIONAL)
        yield with_masters._replace(variant="amsgrad" if amsgrad else "")
        if not amsgrad:
            yield of_half


ADAMW = Implementations(adamw_triton, adamw_torch, [*_samples()])


def shipped() -> Iterator[Shipped]:
    """Yield calls for all levels, with amsgrad, lost updates and bfloat16 moments."""
    flags = (False, True)
    for level, amsgrad, aligned, lost, small in itertools.product(
        LEVELS, flags, flags, flags, flags
    ):
        _, grad, copy = level
        if lost and (grad is not HALF or amsgrad or not aligned):
            continue
        if small and (copy is None or amsgrad or lost):
            continue
        moment = BF16 if small else WIDE
        states = {
            "exp_avgs": moment,
            "exp_avg_sqs": moment,
            "max_exp_avg_sqs": WIDE if amsgrad else "params",
        }
        rule = AdamRule(0.1, 0.9, 0.99, 1e-8, 0.0, True, amsgrad, False)
        state = "bf16" if small else "fp32"
        lists = shipped_update(aligned, level, states, rule, lost, state, OPTIONAL)
        words = amsgrad and "amsgrad", not aligned and "unaligned", lost and "lost"
        name = build_name("adamw", *level, *words, small and "bf16")
        registers = 80 if lost or small else 72 if copy and grad is WIDE else 64
        shared = None if lost else 0
        args = lists, None, None
        yield Shipped(name, adamw_triton, args, registers, max_shared=shared)
