"""One step of AdamW or Adam with 4 bytes of state a parameter: 14.1 B/param in one pass.

A half parameter is the upper part of its FP32 master, and an int16 remainder is the lower part.
Both moments have one byte for each element and one exponent for each block of 128, in the formats
of ``_small_state``. The arithmetic is that of ``adamw``, in FP32.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from tritonamp.kernels._adam_rates import RATES, adam_update, adam_update_twin, load_rates
from tritonamp.kernels._implementations import Implementations
from tritonamp.kernels._launch import Launch, Operand
from tritonamp.kernels._packed_lists import (
    LISTS,
    half_name,
    load_master_twin,
    packed_builds,
    packed_launch,
    packed_samples,
    store_master_twin,
    store_moment_twin,
)
from tritonamp.kernels._plan import Plan
from tritonamp.kernels._shipped import Shipped
from tritonamp.kernels._small_state import (
    SIGNED,
    UNSIGNED,
    decode,
    in_order_of_memory,
    load_master,
    load_moment,
    padded,
    random_bits,
    random_bits_twin,
    split_moments,
    store_master,
    store_moment,
)
from tritonamp.kernels._tables import chunk_bounds, element_pointer
from tritonamp.kernels._update_lists import PendingWrites, UpdateLists, unscaled
from tritonamp.kernels.adamw import AdamRule, count_lost, rate_launches, rates_of
from tritonamp.kernels.device import tl, triton


@triton.jit
def _update(
    at, end, params, grads, remainders, moments, stride, overflow_ptr, rates, step_count, number,
    HALF: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Update one tile of whole blocks; return counts of lost and of moved elements by block."""
    row = tl.arange(0, ROWS)
    offs = at + (tl.expand_dims(row, 1) * 128 + tl.expand_dims(tl.arange(0, 128), 0))
    # A block is stored whole, elements after the last one included,
    # because its codes share an exponent.
    blocks, mask, whole = at // 128 + row, offs < end, (end + 127) // 128 * 128
    # memory of the moments: codes of both, then exponents of both, as split_moments has them
    exponents = moments + 2 * stride
    stored, master = load_master(params, remainders, offs, mask, whole, HALF)
    grad = tl.load(grads + offs, mask=mask, other=0.0).to(tl.float32)
    m = load_moment(moments, exponents, offs, blocks, whole, 15)
    v = load_moment(moments + stride, exponents + stride // 128, offs, blocks, whole, 31)
    p, m, v, _, moves = adam_update(master, grad, m, v, v, rates, False)
    moves &= mask

    random, other = random_bits(offs, step_count, number)
    # encoded from registers in the same pass; only whole blocks know their exponent
    store_moment(moments, exponents, offs, blocks, whole, m, random, 15)
    store_moment(moments + stride, exponents + stride // 128, offs, blocks, whole, v, other, 31)
    now = store_master(p, params, remainders, overflow_ptr, offs, mask, whole, HALF, ROWS)
    lost = moves & (now == stored)
    return tl.sum(lost.to(tl.int32), 1), tl.sum(moves.to(tl.int32), 1)


@triton.jit(do_not_specialize=("chunk",))
def adamw_8bit_kernel(
    params_ptr, grads_ptr, remainders_ptr, moments_ptr, numel_ptr, first_ptr, number_ptr, rows_ptr,
    rates_ptr, found_inf_ptr, overflow_ptr, lost_ptr, chunk,
    PARAM: tl.constexpr, GRAD: tl.constexpr, HALF: tl.constexpr, LOST: tl.constexpr,
    RATES: tl.constexpr, VEC: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Update one chunk.

    HALF is the name of a half parameter's type, or None. LOST counts the half values that do not
    change.
    """
    # Any flag but 0 skips, and nothing has been written yet: codes and exponents stay, too.
    if tl.load(found_inf_ptr) != 0.0:
        return
    row = tl.load(rows_ptr + tl.program_id(0))
    number = tl.load(number_ptr + row)
    # chunks are multiples of a tile, and so of a block, so that no two programs share an exponent
    begin, _, end = chunk_bounds(numel_ptr, first_ptr, row, chunk, TILE)
    params = element_pointer(params_ptr, row, PARAM, VEC)
    grads = element_pointer(grads_ptr, row, GRAD, VEC)
    moments = element_pointer(moments_ptr, row, tl.uint8, VEC)
    stride = (tl.load(numel_ptr + row) + 127) // 128 * 128
    # a pointer that is never read still needs a type
    remainders = moments
    if HALF is not None:
        remainders = element_pointer(remainders_ptr, row, tl.int16, VEC)
    rates_ptr += number * RATES
    rates, step_count = load_rates(rates_ptr), tl.load(rates_ptr + 9)
    overflow = overflow_ptr + number
    whole = end // TILE * TILE
    all_lost, all_moves = tl.zeros([TILE // 128], tl.int32), tl.zeros([TILE // 128], tl.int32)
    for at in range(begin, whole, TILE):
        lost, moves = _update(
            at, whole, params, grads, remainders, moments, stride, overflow, rates, step_count,
            number, HALF, TILE // 128,
        )  # fmt: skip
        all_lost += lost
        all_moves += moves
    if whole < end:
        lost, moves = _update(
            whole, end, params, grads, remainders, moments, stride, overflow, rates, step_count,
            number, HALF, TILE // 128,
        )  # fmt: skip
        all_lost += lost
        all_moves += moves
    if LOST:
        count_lost(lost_ptr + 2 * number, all_lost, all_moves)


def adamw_8bit_triton(
    lists: UpdateLists, grad_scale: Tensor | None, found_inf: Tensor | None
) -> None:
    with lists.tensors.launches(("params",)) as plan:
        lists.launch(plan, _launches, grad_scale, found_inf)


def _launches(lists: UpdateLists, plan: Plan) -> Iterator[Launch]:
    yield from rate_launches(lists, plan)
    for t in plan.tables:
        flags = Operand.FOUND_INF, lists.overflow(t.device), lists.lost(t.device)
        counts = lists.track_lost and half_name(t) is not None
        operands = rates_of(lists, t.device), *flags
        yield packed_launch(t, adamw_8bit_kernel, operands, (counts, RATES))


def adamw_8bit_torch(
    lists: UpdateLists, grad_scale: Tensor | None, found_inf: Tensor | None
) -> None:
    results = PendingWrites(found_inf)
    for row, rule, number in lists.rows((*LISTS, "steps")):
        param, grad, remainder, moments, steps = row
        step, n = steps + 1, param.numel()
        before = load_master_twin(param, remainder)
        first, second = split_moments(moments, padded(n), 2)
        m, v = decode(*first, SIGNED)[:n], decode(*second, UNSIGNED)[:n]
        # unscale and clip
        grad = unscaled(grad, grad_scale, rule.maximize, torch.float32)
        # the gradient may have another memory order than the codes
        grad = in_order_of_memory(grad, like=param)
        decayed, m, v, _, update = adam_update_twin(before, grad, m, v, v, rule, step)
        p = decayed + update

        random, other = random_bits_twin(param, step, number)
        store_moment_twin(results, first, m, random, SIGNED)
        store_moment_twin(results, second, v, other, UNSIGNED)
        results.put(steps, step)
        overflow = lists.overflow(param.device)[number]
        now = store_master_twin(results, param, remainder, p, overflow)
        if lists.track_lost and remainder is not param:
            moves = (update != 0) | (before != decayed)
            stays = now == in_order_of_memory(param)
            lost = torch.stack([(moves & stays).sum(), moves.sum()])
            results.put(lists.lost(param.device)[number], lost)
    results.write()


def adamw_8bit(
    lists: UpdateLists, grad_scale: Tensor | None, found_inf: Tensor | None, backend: str = "auto"
) -> None:
    """Update parameters, remainders and moments in place, with arithmetic in FP32.

    Args:
        lists: lists of n parameters with their hyperparameters, without amsgrad. "params" are half
            or FP32; "grads" have any floating dtype; "remainders" are int16 of shape
            (padded(numel),), or the parameter itself if it is FP32; "moments" are uint8 of shape
            (moments_size(numel, 2),); "steps" are step counts.
        grad_scale: 0-d factor on the gradients (1/scale times the clip coefficient), or None for 1.
        found_inf: 0-d flag; any value other than 0 leaves every bit unchanged. None: always step.
        backend: "auto", "triton" or "eager".
    """
    lists.run(ADAMW_8BIT, None, backend, grad_scale, found_inf)


_RULE = AdamRule(0.01, 0.9, 0.99, 1e-8, 0.01, True, False, False)
ADAMW_8BIT = Implementations(adamw_8bit_triton, adamw_8bit_torch, packed_samples(_RULE, 2, 14))


def shipped() -> Iterator[Shipped]:
    """Yield the calls of ``packed_builds``, some of which count lost updates."""
    yield from packed_builds("adamw_8bit", adamw_8bit_triton, _RULE, 2, loses=True)
