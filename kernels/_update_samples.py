"""Lists of any format for an ``Update``: samples, and calls that ``bench/static.py`` builds."""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tritonamp.kernels._change_bits import changes_shape
from tritonamp.kernels._codes import UNSIGNED
from tritonamp.kernels._memory_order import in_order_of_memory, padded
from tritonamp.kernels._multi_tensor import TensorLists
from tritonamp.kernels._packed_masters import join_master
from tritonamp.kernels._sample import ListSample
from tritonamp.kernels._shipped import BF16, HALF, LEVELS, WIDE, Shipped, build_name
from tritonamp.kernels._state_formats import FORMATS
from tritonamp.kernels._update_lists import Hyperparameters, UpdateLists


def update_lists(
    update: Any,
    rule: Hyperparameters,
    params: list[Tensor],
    grads: list[Tensor],
    copies: list[Tensor] | None = None,
    state: str = "fp32",
    packed: bool = False,
    changes: int = 0,
) -> UpdateLists:
    """Return lists of one group for a third step, whose state is computed from the parameters.

    Args:
        update: ``Update`` that steps on the lists.
        rule: hyperparameters of all tensors.
        params: stepped-on tensors.
        grads: gradients.
        copies: half copies; None: there are none.
        state: format of the state, a key of ``FORMATS``.
        packed: whether half parameters have remainders.
        changes: rows of bits of the changes, 0 to 2.
    """
    lists: dict[str, Any] = {"params": params, "grads": grads, "copies": copies or params}
    for name, kind in zip(update.states, update.value_kinds, strict=True):
        has = update.has(name, rule)
        lists[name] = [_state(p, kind, state) for p in params] if has else params
    if packed:
        zeros = [torch.zeros(padded(p.numel()), dtype=torch.int16, device=p.device) for p in params]
        rows = zip(params, zeros, strict=True)
        lists["remainders"] = [p if p.dtype is WIDE else zero for p, zero in rows]
    if changes:
        shapes = [(changes_shape(p.numel(), changes), p.device) for p in params]
        lists["changes"] = [torch.zeros(s, dtype=torch.uint8, device=d) for s, d in shapes]
    if update.counts_steps or FORMATS[state].in_blocks:
        # not the first step, in which bias corrections hide errors of the moments
        lists["steps"] = [torch.full((), 2.0, device=p.device) for p in params]
    may_repeat = "copies", "remainders", *update.optional
    tensors = TensorLists(may_repeat=may_repeat, scalars=("steps",), **lists)
    return UpdateLists(tensors, [rule], [0] * len(params))


def _state(param: Tensor, kind: int, state: str) -> Tensor:
    values = param.float()
    values = torch.square(values) if kind == UNSIGNED else values / 2
    return FORMATS[state].write(values, param, kind, None).to(FORMATS[state].dtype)


def update_samples(update: Any, rules: Sequence[Hyperparameters]) -> list[ListSample]:
    """Return samples in all formats by the first rule, and on masters with copies by the others."""
    samples = [_sample(update, rule, words) for rule in rules[:1] for words in _VARIANTS]
    for rule in rules[1:]:
        samples.append(_sample(update, rule, f"fp32 {_words(update, rule) or 'plain'}"))
    return samples


_VARIANTS = (
    "fp32",
    "fp32 of half parameters",
    "bf16",
    "8bit packed",
    "8bit of FP32 parameters",
    "fp32 packed with changes",
    "bf16 with changes of the last step",
)


def _sample(update: Any, rule: Hyperparameters, words: str) -> ListSample:
    state, packed = words.split()[0], "packed" in words
    changes = ("changes" in words) + ("last step" in words)
    alone = "of half" in words or "of FP32" in words

    def args(tensors: list[Tensor], half: torch.dtype) -> tuple[Any, ...]:
        params = [t.to(half) for t in tensors] if packed or "of half" in words else tensors
        copies = None
        if not packed and not alone:
            copies = [torch.zeros_like(p, dtype=half) for p in params]
        grads = [t.to(half) for t in tensors]
        lists = update_lists(update, rule, params, grads, copies, state, packed, changes)
        return lists, tensors[0].new_full((), 0.5), tensors[0].new_zeros(())

    def results(args: tuple[Any, ...], _: None) -> list[Tensor]:
        lists = args[0].tensors
        names = "params", "copies", *update.states, "steps", "changes"
        found = [t for name in names if name in lists for t in lists[name]]
        if not packed:
            return found
        # Masters are compared instead of remainders: an FP32 ulp may carry into the half value.
        rows = zip(lists["params"], lists["remainders"], strict=True)
        return found + [join_master(in_order_of_memory(p), r[: p.numel()]) for p, r in rows]

    wide = FORMATS[state].dtype.itemsize
    moved = 2 + 2 * wide * sum(update.has(name, rule) for name in update.states)
    moved += 8 if packed else 10
    variant = words.removeprefix("fp32").strip()
    return ListSample(args, results, 0 if alone or changes else moved, variant)


def _words(update: Any, rule: Hyperparameters) -> str:
    """Return the rule's fields that ask for optional states, joined by spaces."""
    return " ".join(flag for flag in update.optional.values() if getattr(rule, flag))


def shipped_updates(
    update: Any, rules: Sequence[Hyperparameters], registers: int = 64
) -> Iterator[Shipped]:
    """Yield calls by each rule at all levels, and by the first rule in all formats.

    Args:
        update: ``Update`` of the calls.
        rules: hyperparameters of the calls.
        registers: limit of a thread's registers with FP32 state.
    """
    shipped = functools.partial(_shipped, update, registers)
    for rule, level, aligned in itertools.product(rules, LEVELS, (True, False)):
        yield shipped(rule, level, aligned)
        _, grad, copy = level
        if rule is rules[0] and copy is not None:
            yield shipped(rule, level, aligned, "bf16")
        if rule is rules[0] and grad is HALF and aligned:
            yield shipped(rule, level, aligned, changes=1)
    packed = [(HALF, HALF), (BF16, BF16), (HALF, WIDE)]
    for (param, grad), aligned in itertools.product(packed, (True, False)):
        for state in ("fp32", "bf16"):
            yield shipped(rules[0], (param, grad, None), aligned, state, packed=True)
    for (param, grad), aligned in itertools.product(
        [*packed, (WIDE, HALF), (WIDE, WIDE)], (True, False)
    ):
        yield shipped(rules[0], (param, grad, None), aligned, "8bit", param is not WIDE)
    yield shipped(rules[0], (HALF, HALF, None), True, "8bit", True, changes=2)


def _shipped(
    update: Any,
    registers: int,
    rule: Hyperparameters,
    level: tuple[torch.dtype, torch.dtype, torch.dtype | None],
    aligned: bool,
    state: str = "fp32",
    packed: bool = False,
    changes: int = 0,
) -> Shipped:
    def make(dtype: torch.dtype) -> list[Tensor]:
        # one element in, the address of a half or FP32 tensor is no multiple of 16
        return [torch.empty(4096 + 8, dtype=dtype)[0 if aligned else 1 :][:4096]]

    param, grad, copy = level
    copies = None if copy is None else make(copy)
    lists = update_lists(update, rule, make(param), make(grad), copies, state, packed, changes)
    has_codes = FORMATS[state].in_blocks
    is_small = state != "fp32" and not has_codes
    words = (
        has_codes and state,
        packed and not has_codes and "packed",
        _words(update, rule) or False,
    )
    more = not aligned and "unaligned", is_small and state, changes > 0 and "changes"
    dtypes = [dtype for dtype in level if dtype is not None or not (packed or has_codes)]
    if has_codes or changes:
        registers = MAX_REGISTERS[aligned]
    elif len(update.states) > 1 and ((copy and grad is WIDE) or is_small):
        registers = 80 if is_small else 72
    # a byte for each block: the exponents of a tile are exchanged through shared memory
    shared: int | None = 8 if has_codes else 0
    if changes or (has_codes and not aligned):
        shared = None
    name = build_name(update.name, *dtypes, *words, *more)
    return Shipped(name, update.launch, (lists, None, None), registers, max_shared=shared)


MAX_REGISTERS = {True: 128, False: 208}
"""Largest number of registers of a thread with codes or bits of changes, by alignment.

Without a limit, ptxas takes fewer on some architectures, and spills. Unaligned memory takes more,
because each element has an address and a mask of its own.
"""
