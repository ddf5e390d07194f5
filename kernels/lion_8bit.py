"""One step of Lion with 3 bytes of state a parameter: 12.02 B/param in one pass.

A half parameter is the upper part of its FP32 master, and an int16 remainder is the lower part. The
moment has one byte for each element and one exponent for each block of 128, in the formats of
``_small_state``. The arithmetic is that of ``lion``, in FP32. Steps are counted, because the random
bits that round the moment depend on the count.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from tritonamp.kernels._implementations import Implementations
from tritonamp.kernels._launch import Launch, Operand
from tritonamp.kernels._packed_lists import (
    LISTS,
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
from tritonamp.kernels.device import WARP_SIZE, tl, triton
from tritonamp.kernels.lion import NUMBERS, LionRule, lion_update, lion_update_twin, load_rule


@triton.jit
def _update(
    at, end, params, grads, remainders, moments, stride, overflow_ptr, factor, rule, step, number,
    HALF: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Update one tile of whole blocks."""
    row = tl.arange(0, ROWS)
    offs = at + (tl.expand_dims(row, 1) * 128 + tl.expand_dims(tl.arange(0, 128), 0))
    # A block is stored whole, elements after the last one included,
    # because its codes share an exponent.
    blocks, mask, whole = at // 128 + row, offs < end, (end + 127) // 128 * 128
    exponents = moments + stride
    _, p = load_master(params, remainders, offs, mask, whole, HALF)
    # unscale and clip
    grad = tl.load(grads + offs, mask=mask, other=0.0).to(tl.float32) * factor
    m = load_moment(moments, exponents, offs, blocks, whole, 15)
    random, _ = random_bits(offs, step, number)
    p, m = lion_update(p, grad, m, rule)
    store_moment(moments, exponents, offs, blocks, whole, m, random, 15)
    store_master(p, params, remainders, overflow_ptr, offs, mask, whole, HALF, ROWS)


@triton.jit(do_not_specialize=("rows",))
def count_steps_kernel(steps_ptr, number_ptr, found_inf_ptr, counts_ptr, rows, BLOCK: tl.constexpr):
    """Count a step of each tensor, and store the count at the tensor's number."""
    # a skipped step is not counted, or a run without the skip would have other random bits
    if tl.load(found_inf_ptr) != 0.0:
        return
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < rows
    step_ptr = tl.load(steps_ptr + row, mask=mask, other=0).to(tl.pointer_type(tl.float32))
    step = tl.load(step_ptr, mask=mask, other=0.0) + 1.0
    tl.store(step_ptr, step, mask=mask)
    # the update reads counts by number, since "steps" have a table of their own
    tl.store(counts_ptr + tl.load(number_ptr + row, mask=mask, other=0), step, mask=mask)


@triton.jit(do_not_specialize=("chunk",))
def lion_8bit_kernel(
    params_ptr, grads_ptr, remainders_ptr, moments_ptr, numel_ptr, first_ptr, number_ptr, rows_ptr,
    groups_ptr, rules_ptr, grad_scale_ptr, found_inf_ptr, overflow_ptr, counts_ptr, chunk,
    PARAM: tl.constexpr, GRAD: tl.constexpr, HALF: tl.constexpr, NUMBERS: tl.constexpr,
    VEC: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Update one chunk. HALF is the name of a half parameter's type, or None."""
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
    factor, rule = load_rule(rules_ptr + NUMBERS * tl.load(groups_ptr + number), grad_scale_ptr)
    overflow, step = overflow_ptr + number, tl.load(counts_ptr + number)
    whole = end // TILE * TILE
    for at in range(begin, whole, TILE):
        _update(
            at, whole, params, grads, remainders, moments, stride, overflow, factor, rule, step,
            number, HALF, TILE // 128,
        )  # fmt: skip
    if whole < end:
        _update(
            whole, end, params, grads, remainders, moments, stride, overflow, factor, rule, step,
            number, HALF, TILE // 128,
        )  # fmt: skip


def lion_8bit_triton(
    lists: UpdateLists, grad_scale: Tensor | None, found_inf: Tensor | None
) -> None:
    with lists.tensors.launches(("params",)) as plan:
        lists.launch(plan, _launches, grad_scale, found_inf)


def _launches(lists: UpdateLists, plan: Plan) -> Iterator[Launch]:
    def counts(device: torch.device) -> Tensor:
        return lists.tensors.kept("counts", (lists.tensors.size,), torch.float32, device)

    # before the updates, which read the counts; launches of one stream run in order
    for t in plan.scalar_tables:
        grid, options = (-(-len(t.number) // WARP_SIZE), 1, 1), (WARP_SIZE,)
        tensors = t.pointers["steps"], t.number, Operand.FOUND_INF, counts(t.device)
        yield Launch(count_steps_kernel, grid, (len(t.number),), options, 1, tensors=tensors)
    for t in plan.tables:
        operands = *lists.numbers_and_flags(t.device), counts(t.device)
        yield packed_launch(t, lion_8bit_kernel, operands, (NUMBERS,))


def lion_8bit_torch(
    lists: UpdateLists, grad_scale: Tensor | None, found_inf: Tensor | None
) -> None:
    results = PendingWrites(found_inf)
    for row, rule, number in lists.rows((*LISTS, "steps")):
        param, grad, remainder, moments, steps = row
        step, n = steps + 1, param.numel()
        p = load_master_twin(param, remainder)
        (moment,) = split_moments(moments, padded(n), 1)
        m = decode(*moment, SIGNED)[:n]
        # unscale and clip
        grad = unscaled(grad, grad_scale, rule.maximize, torch.float32)
        # the gradient may have another memory order than the codes
        grad = in_order_of_memory(grad, like=param)
        random, _ = random_bits_twin(param, step, number)
        p, m = lion_update_twin(p, grad, m, rule)

        store_moment_twin(results, moment, m, random, SIGNED)
        results.put(steps, step)
        overflow = lists.overflow(param.device)[number]
        store_master_twin(results, param, remainder, p, overflow)
    results.write()


def lion_8bit(
    lists: UpdateLists, grad_scale: Tensor | None, found_inf: Tensor | None, backend: str = "auto"
) -> None:
    """Update parameters, remainders and moments in place, with arithmetic in FP32.

    Args:
        lists: lists of n parameters with their hyperparameters, as for ``adamw_8bit``, with
            "moments" of shape (moments_size(numel, 1),).
        grad_scale: 0-d factor on the gradients (1/scale times the clip coefficient), or None for 1.
        found_inf: 0-d flag; any value other than 0 leaves every bit unchanged. None: always step.
        backend: "auto", "triton" or "eager".
    """
    lists.run(LION_8BIT, None, backend, grad_scale, found_inf)


_RULE = LionRule(0.01, 0.9, 0.99, 0.01, False)
LION_8BIT = Implementations(lion_8bit_triton, lion_8bit_torch, packed_samples(_RULE, 1, 12))


def shipped() -> Iterator[Shipped]:
    """Yield the calls of ``packed_builds``."""
    yield from packed_builds("lion_8bit", lion_8bit_triton, _RULE, 1)
