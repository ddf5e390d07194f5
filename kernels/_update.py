"""``Update``: the operation of an optimizer, made from its function of one element."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from tritonamp.kernels._change_bits import other_bits, packed_bits
from tritonamp.kernels._implementations import Implementations
from tritonamp.kernels._launch import Launch, Operand
from tritonamp.kernels._memory_order import BLOCK, in_order_of_memory
from tritonamp.kernels._multi_tensor import TensorLists
from tritonamp.kernels._plan import Plan
from tritonamp.kernels._random_bits import random_bits_twin
from tritonamp.kernels._state_formats import STATE_DTYPES, StateFormat, format_of
from tritonamp.kernels._tables import NUM_WARPS, Table
from tritonamp.kernels._update_kernel import count_steps_kernel, update_kernel
from tritonamp.kernels._update_lists import (
    Hyperparameters,
    PendingWrites,
    UpdateLists,
    unscaled,
)
from tritonamp.kernels._update_samples import MAX_REGISTERS, update_samples
from tritonamp.kernels._update_twin import load_master, put_master
from tritonamp.kernels.device import WARP_SIZE

_STATES = 3  # largest number of states of a rule
# Elements that a thread holds. With 8 the compiler converts layouts, which takes shared memory and
# 117 to 255 registers instead of 54. A warp then holds a block of codes.
_VEC = 4
_TILE = WARP_SIZE * NUM_WARPS * _VEC


class Update(Implementations):
    """An operation that steps on lists by a rule, with a kernel and its eager twin.

    A call takes ``UpdateLists``, the factor on the gradients (1/scale times the clip coefficient,
    0-d, or None for 1), the flag of a skip (0-d; any value other than 0 leaves every bit unchanged;
    None: always step), and a backend ("auto", "triton" or "eager"). Parameters, state and copies
    are updated in place. Arithmetic is in FP32, in FP64 for FP64 parameters.

    Args:
        name: name of the operation.
        rule: class of the hyperparameters of a group, a NamedTuple.
        states: names of the lists of state, at most three, with the kind of their values: SIGNED,
            or UNSIGNED if they are never negative.
        load_rule: jitted function of a row of numbers and the factor on the gradients. It returns
            the factor with the sign of the direction, and the numbers that ``update`` takes.
        update: jitted function of a parameter, its gradient, three states, the numbers, and whether
            there are a first, a second and a third state. It returns the parameter and the states.
        twin: torch form of ``update``, a function of the parameter, its unscaled gradient, the
            states (None where there is none), the hyperparameters, and the step count (None if
            steps are not counted).
        rules: hyperparameters of small calls for generic checks, which try the first in all
            formats.
        optional: names of states that a group may lack, with the field of its hyperparameters that
            is true if the group has the state.
        needs_fp32: names of optional states. A group that has one needs all its states in FP32.
        counts_steps: whether the optimizer counts steps in every format of state.
        prepare: jitted function that stores numbers which depend on the step count, or None.
        prepared: count of the numbers that ``prepare`` stores.
        max_registers: limit of a thread's registers where there are a first state and copies, or
            None.
        on_cpu: faster form in main memory, or None. It takes calls without remainders, changes,
            codes and random bits.
        grads: name of the list of gradients.

    Attributes:
        rule, optional, needs_fp32, counts_steps: the arguments.
        states: names of the lists of state.
        value_kinds: kind of the values of each state, SIGNED or UNSIGNED.
    """

    def __init__(
        self,
        name: str,
        rule: type[Any],
        states: Mapping[str, int],
        load_rule: Any,
        update: Any,
        twin: Callable[..., tuple[Any, ...]],
        *,
        rules: Sequence[Hyperparameters],
        optional: Mapping[str, str] = MappingProxyType({}),
        needs_fp32: tuple[str, ...] = (),
        counts_steps: bool = False,
        prepare: Any = None,
        prepared: int = 0,
        max_registers: int | None = None,
        on_cpu: Callable[[UpdateLists, Tensor | None, Tensor | None], None] | None = None,
        grads: str = "grads",
    ) -> None:
        self.rule, self.optional, self.counts_steps = rule, optional, counts_steps
        self.needs_fp32 = needs_fp32
        self.states, self.value_kinds = tuple(states), tuple(states.values())
        super().__init__(self.launch, self.in_torch, update_samples(self, rules), name)
        self._load_rule, self._update, self._twin = load_rule, update, twin
        self._prepare, self._prepared, self._max_registers = prepare, prepared, max_registers
        self._on_cpu, self._grads = on_cpu, grads

    def __call__(
        self,
        lists: UpdateLists,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        backend: str = "auto",
    ) -> None:
        on_cpu = self._step_on_cpu if self._on_cpu else None
        lists.run(self, on_cpu, backend, grad_scale, found_inf)

    def _step_on_cpu(
        self, lists: UpdateLists, grad_scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        assert self._on_cpu is not None
        step = self._on_cpu if self._is_plain(lists.tensors) else self.in_torch
        step(lists, grad_scale, found_inf)

    def has(self, name: str, rule: Any) -> bool:
        """Tell whether a group with these hyperparameters has the state ``name``."""
        flag = self.optional.get(name)
        return flag is None or bool(getattr(rule, flag))

    def _is_plain(self, tensors: TensorLists) -> bool:
        """Tell whether there are no remainders, changes, codes and random bits."""
        if "remainders" in tensors or "changes" in tensors:
            return False
        dtypes = {state.dtype for name in self.states for state in tensors[name]}
        formats = [STATE_DTYPES[dtype] for dtype in dtypes if dtype in STATE_DTYPES]
        # random bits need a count of steps
        return "steps" not in tensors or not any(form.is_random for form in formats)

    # the kernel

    def launch(
        self, lists: UpdateLists, grad_scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        """Launch the kernel."""
        written = "params", "copies", *self.states
        with lists.tensors.launches(written) as plan:
            lists.launch(plan, self.launches, grad_scale, found_inf)

    def launches(self, lists: UpdateLists, plan: Plan) -> Iterator[Launch]:
        """Yield the launches that count steps, then an update for each table."""
        numbers = len(lists.rules[0].numbers())
        for t in plan.scalar_tables:
            rules, groups = lists.numbers(t.device)
            counts, width = self._counts(lists, t.device)
            scalars = Operand.GRAD_SCALE, Operand.FOUND_INF
            tensors = t.pointers["steps"], t.number, groups, rules, *scalars, counts
            grid, constants = -(-len(t.number) // WARP_SIZE), (self._prepare, numbers, width)
            yield Launch(
                count_steps_kernel,
                (grid, 1, 1),
                (len(t.number),),
                (*constants, WARP_SIZE),
                1,
                tensors=tensors,
            )
        for t in plan.tables:
            yield self._update_launch(lists, t, numbers)

    def _counts(self, lists: UpdateLists, device: torch.device) -> tuple[Tensor, int]:
        """Return each tensor's count and prepared numbers, FP32 (size, width), and the width."""
        width = 1 + self._prepared if "steps" in lists.tensors else 0
        shape = lists.tensors.size, max(width, 1)  # a pointer that is never read must be valid
        return lists.tensors.kept("counts", shape, torch.float32, device), width

    def _update_launch(self, lists: UpdateLists, t: Table, numbers: int) -> Launch:
        """Return the launch of the update on the rows of one table."""
        tensors, missing = lists.tensors, _STATES - len(self.states)
        remainders, changes = (n if n in tensors else "params" for n in ("remainders", "changes"))
        dtypes = [t.dtypes[name] for name in self.states]
        formats = [None if d is None else format_of(d, "steps" in tensors) for d in dtypes]
        has_blocks = "changes" in tensors or any(f and f.in_blocks for f in formats)
        has_first = next(iter(formats), None) is not None
        maxnreg = self._max_registers if has_first and t.dtypes["copies"] else None
        if has_blocks:
            maxnreg = MAX_REGISTERS[t.aligned]
        counts, width = self._counts(lists, t.device)
        groups, rules, *flags = lists.numbers_and_flags(t.device)
        is_packed = "remainders" in tensors and t.dtypes["remainders"] is not None
        constants = (
            *(self._update, self._load_rule, numbers, width),
            *(t.type("params"), t.type(self._grads), t.type("copies")),
            _name(t.dtypes["params"]) if is_packed else None,
            *self._state_constants(t, formats),
            _name(t.dtypes["copies"] or t.dtypes["params"]) if "changes" in tensors else None,
            "changes" in tensors and tensors["changes"][0].shape[0] > 1,
            _TILE // BLOCK if has_blocks else 0,
        )
        states = *self.states, *["params"] * missing
        return t.launch_of(
            update_kernel,
            ("params", self._grads, "copies", remainders, *states, changes),
            (groups, rules, counts, *flags),
            constants,
            _VEC,
            maxnreg=maxnreg,
            # whole blocks in a tile also if pointers are not aligned
            tile=_TILE if has_blocks else None,
        )

    def _state_constants(self, t: Table, formats: Sequence[StateFormat | None]) -> tuple[Any, ...]:
        """Return types, loads and stores of three states, and whether any takes random bits."""
        missing = [None] * (_STATES - len(self.states))
        rows = list(zip(formats, self.value_kinds, strict=True))
        types = [*map(t.type, self.states), *missing]
        loads = [*(f and f.load[kind] for f, kind in rows), *missing]
        stores = [*(f and f.store[kind] for f, kind in rows), *missing]
        return *types, *loads, *stores, any(f and f.is_random for f in formats)

    # the twin

    def in_torch(
        self, lists: UpdateLists, grad_scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        """Run the eager twin."""
        results = PendingWrites(found_inf)
        self.put_results(results, lists, grad_scale)
        results.write()

    def put_results(
        self, results: PendingWrites, lists: UpdateLists, grad_scale: Tensor | None
    ) -> None:
        """Add the results of the eager twin to the planned writes ``results``."""
        names = "params", self._grads, "copies", "remainders", "changes", "steps"
        for row, rule, number in lists.rows((*names, *self.states)):
            param, grad, copy, remainder, changes, steps, *states = row
            dtype = torch.promote_types(param.dtype, torch.float32)
            p = load_master(param, remainder, dtype)
            before = param if copy is param or changes is None else p.to(copy.dtype)
            step = None if steps is None else steps + 1
            # unscale and clip
            grad = unscaled(grad, grad_scale, getattr(rule, "maximize", False), dtype)
            found = [(k, state) for k, state in enumerate(states) if state is not param]
            formats = {k: format_of(state.dtype, step is not None) for k, state in found}
            values: list[Tensor | None] = [None] * len(states)
            for k, state in found:
                values[k] = formats[k].read(state, param, self.value_kinds[k], dtype)
            p, *after = self._twin(p, grad, *values, rule, step)

            random: tuple[Tensor | None, Tensor | None] = None, None
            if step is not None and any(form.is_random for form in formats.values()):
                random = random_bits_twin(param, step, number)
            for k, state in found:
                # a third state is rounded with the bits of the second one
                value = formats[k].write(after[k], param, self.value_kinds[k], random[min(k, 1)])
                results.put(state, value)
            if step is not None:
                results.put(steps, step)
            overflow = lists.overflow(param.device)[number]
            half = put_master(results, param, remainder, copy, p, overflow)
            if changes is not None:
                changed = packed_bits(in_order_of_memory(other_bits(before, half), like=param))
                rows = [changes[0] | changed, changed]
                results.put(changes, torch.stack(rows[: len(changes)]))


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")
