"""The step of every elementwise optimizer: one kernel reads, calls a rule for each element, writes.

A rule is a function of one element, ``update``, with its twin in torch. The functions that load and
store a state come from its format (``_state_formats``). An FP32 master is one tensor, or a half
parameter with 16 more bits.
"""

from tritonamp.kernels._change_bits import note_changes
from tritonamp.kernels._packed_masters import joined, rounded_half, split
from tritonamp.kernels._random_bits import random_bits
from tritonamp.kernels._tables import chunk_bounds, element_pointer, tail_offsets
from tritonamp.kernels.device import tl, triton


@triton.jit
def _set_flag(flag_ptr, found, BLOCKS: tl.constexpr, VEC: tl.constexpr):
    """Set a flag if any element of a tile is true."""
    # reduced inside a thread, which needs no shared memory; all threads store the same 1, so no
    # atomic is needed
    found = found.to(tl.int32)
    if BLOCKS > 0:
        of_thread = tl.max(tl.reshape(found, (BLOCKS, 32, 4)), 2)
    else:
        of_thread = tl.max(tl.reshape(found, (found.shape[0] // VEC, VEC)), 1)
    tl.store(flag_ptr + 0 * of_thread, 1, mask=of_thread != 0)


@triton.jit
def _update_tile(
    at, offs, end, stride, params, grads, copies, remainders, first, second, third, changes,
    overflow_ptr, factor, rule, step, number,
    UPDATE: tl.constexpr, COPY: tl.constexpr, HALF: tl.constexpr,
    LOAD1: tl.constexpr, LOAD2: tl.constexpr, LOAD3: tl.constexpr,
    STORE1: tl.constexpr, STORE2: tl.constexpr, STORE3: tl.constexpr, RANDOM: tl.constexpr,
    CHANGES: tl.constexpr, LAST: tl.constexpr, BLOCKS: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    # Blocks of codes are stored whole, elements after the last one included, because a block
    # shares an exponent. Masked elements are loaded as 0.
    mask, whole = offs < end, (end + 127) // 128 * 128
    blocks = at // 128 + tl.arange(0, BLOCKS) if BLOCKS > 0 else 0
    stored = tl.load(params + offs, mask=mask, other=0.0, eviction_policy="evict_first")
    stored = stored.to(tl.float32)
    p = stored
    if HALF is not None:
        remainder = tl.load(remainders + offs, mask=offs < whole if BLOCKS > 0 else mask, other=0)
        p = joined(stored, remainder, HALF == "bfloat16")
    # unscale and clip; before the state is loaded, because decoding it takes the most registers
    grad = tl.load(grads + offs, mask=mask, other=0.0).to(tl.float32) * factor
    a = LOAD1(first, offs, mask, blocks, whole, stride) if LOAD1 is not None else 0.0
    b = LOAD2(second, offs, mask, blocks, whole, stride) if LOAD2 is not None else 0.0
    c = LOAD3(third, offs, mask, blocks, whole, stride) if LOAD3 is not None else 0.0
    p, a, b, c = UPDATE(
        p, grad, a, b, c, rule, LOAD1 is not None, LOAD2 is not None, LOAD3 is not None
    )

    # the first state gets bits of its own, and the others share bits
    random, other = number, number
    if RANDOM:
        random, other = random_bits(offs, step, number)
    if STORE1 is not None:
        STORE1(first, offs, mask, blocks, whole, stride, a, random)
    if STORE2 is not None:
        STORE2(second, offs, mask, blocks, whole, stride, b, other)
    if STORE3 is not None:
        STORE3(third, offs, mask, blocks, whole, stride, c, other)
    half = p
    if HALF is not None:
        half, remainder = split(p, HALF == "bfloat16")
        mask_of_rest = offs < whole if BLOCKS > 0 else mask
        tl.store(remainders + offs, remainder.to(tl.int16), mask=mask_of_rest)
        tl.store(params + offs, half.to(params.dtype.element_ty), mask=mask)
    else:
        tl.store(params + offs, p.to(params.dtype.element_ty), mask=mask)
    if COPY:
        # rounded here, where both values are in registers: a later check would read them again
        half = p.to(copies.dtype.element_ty)
        tl.store(copies + offs, half, mask=mask)
        half = half.to(tl.float32)
    if COPY or HALF is not None:
        # a finite value that became inf
        beyond = (tl.abs(half) == float("inf")) & (tl.abs(p) < float("inf")) & mask
        _set_flag(overflow_ptr, beyond, BLOCKS, VEC)
    if CHANGES is not None:
        # the old half copy is not read, because it is the rounded old master
        before = stored if HALF is not None else rounded_half(stored, CHANGES)
        after = half if HALF is not None else rounded_half(p, CHANGES)
        note_changes(changes, at, whole, stride, before, after, mask, LAST, BLOCKS)


@triton.jit
def _offsets(at, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the offsets of a tile; each row is a block if there are BLOCKS."""
    if BLOCKS > 0:
        row, column = tl.arange(0, BLOCKS), tl.arange(0, 128)
        return at + (tl.expand_dims(row, 1) * 128 + tl.expand_dims(column, 0))
    else:
        return at + tl.arange(0, BLOCK)


@triton.jit(do_not_specialize=("chunk",))
def update_kernel(
    params_ptr, grads_ptr, copies_ptr, remainders_ptr, first_ptr, second_ptr, third_ptr,
    changes_ptr, numel_ptr, begin_ptr, number_ptr, rows_ptr,
    groups_ptr, rules_ptr, counts_ptr, grad_scale_ptr, found_inf_ptr, overflow_ptr, chunk,
    UPDATE: tl.constexpr, LOAD_RULE: tl.constexpr, NUMBERS: tl.constexpr, COUNTS: tl.constexpr,
    PARAM: tl.constexpr, GRAD: tl.constexpr, COPY: tl.constexpr, HALF: tl.constexpr,
    TYPE1: tl.constexpr, TYPE2: tl.constexpr, TYPE3: tl.constexpr,
    LOAD1: tl.constexpr, LOAD2: tl.constexpr, LOAD3: tl.constexpr,
    STORE1: tl.constexpr, STORE2: tl.constexpr, STORE3: tl.constexpr, RANDOM: tl.constexpr,
    CHANGES: tl.constexpr, LAST: tl.constexpr, BLOCKS: tl.constexpr, VEC: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Update one chunk by a rule.

    UPDATE and LOAD_RULE are the rule's functions, NUMBERS the length of its row of numbers. COUNTS
    is the length of a tensor's row of counts: 0 if steps are not counted, 1 for the count alone,
    more if the row holds the rule's numbers. Types, LOADs and STOREs (functions of a
    ``StateFormat``) are None where there is no such list. RANDOM: a format needs random bits. HALF
    names the type of half parameters with remainders, CHANGES the type of the values whose changes
    are noted, and LAST asks for those of this step alone, too. BLOCKS is the number of blocks of
    codes or bits in a tile, or 0.
    """
    # A skip is decided on the device, and every program returns before it writes: all bits stay.
    if tl.load(found_inf_ptr) != 0.0:
        return
    # From the last chunk to the first: the statistics have read the last gradients last, so that
    # these are in the L2 cache.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    row = tl.load(rows_ptr + program)
    number = tl.load(number_ptr + row)
    # loaded once, because the compiler cannot know that stores leave these numbers unchanged
    counts = counts_ptr + COUNTS * number
    if COUNTS > 1:
        factor, rule = LOAD_RULE(counts + 1, grad_scale_ptr)
    else:
        group = tl.load(groups_ptr + number)
        factor, rule = LOAD_RULE(rules_ptr + NUMBERS * group, grad_scale_ptr)
    step = tl.load(counts) if COUNTS > 0 else 0.0
    # Whole tiles where a tile has blocks: no two programs, and no loop and tail, may share one.
    STEP: tl.constexpr = BLOCK if BLOCKS > 0 else VEC
    begin, whole, end = chunk_bounds(numel_ptr, begin_ptr, row, program, chunk, STEP)
    stride = (tl.load(numel_ptr + row) + 127) // 128 * 128
    params = element_pointer(params_ptr, row, PARAM, VEC)
    grads = element_pointer(grads_ptr, row, GRAD, VEC)
    # pointers that are never read still need a type
    copies, remainders, changes, first, second, third = (
        params, params, params, params, params, params
    )  # fmt: skip
    if COPY is not None:
        copies = element_pointer(copies_ptr, row, COPY, VEC)
    if HALF is not None:
        remainders = element_pointer(remainders_ptr, row, tl.int16, VEC)
    if TYPE1 is not None:
        first = element_pointer(first_ptr, row, TYPE1, VEC)
    if TYPE2 is not None:
        second = element_pointer(second_ptr, row, TYPE2, VEC)
    if TYPE3 is not None:
        third = element_pointer(third_ptr, row, TYPE3, VEC)
    if CHANGES is not None:
        changes = element_pointer(changes_ptr, row, tl.uint8, VEC)
    overflow = overflow_ptr + number
    for at in range(begin, whole, BLOCK):
        _update_tile(
            at, _offsets(at, BLOCKS, BLOCK), whole, stride, params, grads, copies, remainders,
            first, second, third, changes, overflow, factor, rule, step, number,
            UPDATE, COPY is not None, HALF, LOAD1, LOAD2, LOAD3, STORE1, STORE2, STORE3,
            RANDOM, CHANGES, LAST, BLOCKS, VEC,
        )  # fmt: skip
    # the tail's mask is separate, because a mask that ends inside a vector splits every load of the
    # loop
    if whole < end:
        offs = _offsets(whole, BLOCKS, BLOCK) if BLOCKS > 0 else tail_offsets(whole, VEC)
        _update_tile(
            whole, offs, end, stride, params, grads, copies, remainders,
            first, second, third, changes, overflow, factor, rule, step, number,
            UPDATE, COPY is not None, HALF, LOAD1, LOAD2, LOAD3, STORE1, STORE2, STORE3,
            RANDOM, CHANGES, LAST, BLOCKS, VEC,
        )  # fmt: skip


@triton.jit(do_not_specialize=("rows",))
def count_steps_kernel(
    steps_ptr, number_ptr, groups_ptr, rules_ptr, grad_scale_ptr, found_inf_ptr, counts_ptr, rows,
    PREPARE: tl.constexpr, NUMBERS: tl.constexpr, COUNTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Count a step of each tensor, one tensor a thread; store the count in the tensor's row.

    PREPARE fills the rest of the row with numbers of the rule that depend on the count, or is None.
    """
    # Any flag but 0 skips, because GradScaler adds up the flags of devices, and gets 2. A skipped
    # step is not counted, as in torch.
    if tl.load(found_inf_ptr) != 0.0:
        return
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < rows
    step_ptr = tl.load(steps_ptr + row, mask=mask, other=0).to(tl.pointer_type(tl.float32))
    number = tl.load(number_ptr + row, mask=mask, other=0)
    step = tl.load(step_ptr, mask=mask, other=0.0) + 1.0
    tl.store(step_ptr, step, mask=mask)
    # the update reads counts by number, because "steps" have a table of their own
    counts = counts_ptr + COUNTS * number
    tl.store(counts, step, mask=mask)
    if PREPARE is not None:
        rule = rules_ptr + NUMBERS * tl.load(groups_ptr + number, mask=mask, other=0)
        PREPARE(rule, step, grad_scale_ptr, counts + 1, mask)
