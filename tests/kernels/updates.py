"""Lists on which any update steps in any format."""

import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.kernels.update_rows import CODES, FORMS, WIDE, Row
from tritonamp.kernels._change_bits import changes_shape
from tritonamp.kernels._codes import SIGNED
from tritonamp.kernels._memory_order import in_memory_of, in_order_of_memory, padded
from tritonamp.kernels._multi_tensor import Memory, TensorLists
from tritonamp.kernels._packed_masters import join_master, split_master
from tritonamp.kernels._state_formats import format_of
from tritonamp.kernels._update_lists import UpdateLists

SHAPES = [(0,), (), (1,), (127,), (128,), (129,), (1023,), (1024,), (1025,), (4099,), (5, 7)]
SMALL = [(3,), (5, 7), (130,)]


class Updates:
    """Parameters, gradients and states of one shape after another for each rule.

    The last tensor of each rule is transposed. Magnitudes are between 0.1 and 1.1, and signs such
    that no sum of a step cancels. Tensors of the same shape lie at the same places in memory modulo
    16 bytes.

    Args:
        row: the update.
        device: the device of all tensors.
        form: the name of a format in ``FORMS``.
        rules: a rule for each group.
        shapes: shapes of each group's parameters.
        steps: the number of steps before.
        changes: whether the update notes which elements change.
        grad: dtype of the gradients; None: the format's.

    Attributes:
        lists: all tensors of a step, by the name of their list.
        memory: the memory of earlier steps.
        last: the lists of the last step.
    """

    def __init__(
        self,
        row: Row,
        device: torch.device,
        form: str = "fp32",
        rules: Sequence[Any] = (),
        shapes: Sequence[tuple[int, ...]] = SMALL,
        steps: float = 3.0,
        changes: bool = False,
        grad: torch.dtype | None = None,
    ) -> None:
        self.row, self.form, self.device = row, FORMS[form], device
        self.rules = list(rules or row.rules[:1])
        self.groups = [g for g in range(len(self.rules)) for _ in range(len(shapes) + 1)]
        generator = torch.Generator().manual_seed(0)
        signs = [torch.randn(s, generator=generator).sign() for s in [*shapes, (7, 5)]]
        signs[-1] = signs[-1].t()

        def values() -> list[Tensor]:
            return [torch.empty_like(s).uniform_(0.1, 1.1, generator=generator) for s in signs]

        lists: dict[str, list[Any]] = {"params": [], "grads": []}
        for rule in self.rules:
            masters = [s * x for s, x in zip(signs, values(), strict=True)]
            for name, own in self._params(masters).items():
                lists.setdefault(name, []).extend(own)
            direction = -1 if getattr(rule, "maximize", False) else 1
            grads = [direction * s * x for s, x in zip(signs, values(), strict=True)]
            lists["grads"] += [g.to(device, grad or self.form.grad) for g in grads]
            for name, kind in zip(row.update.states, row.update.kinds, strict=True):
                # squares are above those of all means
                above = 1.21 if name == "square_avgs" else 0.0
                rows = zip(signs, values(), strict=True)
                new = [(s if kind == SIGNED else 1.0) * (x + above) for s, x in rows]
                given = [self._state(x, kind) for x in new]
                there = row.update.has(name, rule)
                lists.setdefault(name, []).extend(given if there else lists["params"][-len(new) :])
        if row.update.counts_steps or self.form.state is CODES:
            lists["steps"] = [torch.full((), steps, device=device) for _ in self.groups]
        if changes:
            shapes = [changes_shape(p.numel()) for p in lists["params"]]
            lists["changes"] = [torch.zeros(shape, dtype=CODES, device=device) for shape in shapes]
        self.lists, self.memory = lists, Memory()

    def _params(self, masters: list[Tensor]) -> dict[str, list[Tensor]]:
        """Return the lists that hold these FP32 values, and their copies."""
        params = [m.to(self.device, self.form.param) for m in masters]
        if not self.form.packed:
            dtype = self.form.copy
            return {
                "params": params,
                "copies": [torch.full_like(p, 9.0, dtype=dtype) if dtype else p for p in params],
            }
        remainders = []
        for param, master in zip(params, masters, strict=True):
            upper, lower = split_master(in_order_of_memory(master), self.form.param)
            param.copy_(in_memory_of(master, upper))
            missing = padded(len(lower)) - len(lower)
            remainders.append(torch.nn.functional.pad(lower, (0, missing)).to(self.device))
        return {"params": params, "copies": params, "remainders": remainders}

    def _state(self, values: Tensor, kind: int) -> Tensor:
        stored = format_of(self.form.state, True).write(values, values, kind, None)
        return stored.to(self.device, self.form.state)

    def clone(self) -> "Updates":
        """Return the same with tensors and memory of its own."""
        other = copy.copy(self)
        tensors = itertools.chain(*self.lists.values())
        made = {t: t.clone() for t in tensors}
        other.lists = {name: [made[t] for t in own] for name, own in self.lists.items()}
        other.memory = Memory()
        return other

    def wide(self) -> "Updates":
        """Return the same in FP32, with the values that these formats hold."""
        other = copy.copy(self)
        other.form, other.memory = FORMS["fp32"], Memory()
        params = self.masters()
        other.lists = {"params": params, "copies": params}
        other.lists |= {name: [*params] for name in self.row.update.states}
        for name, i in self.states():
            other.lists[name][i] = self.value(name, i)
        other.lists["grads"] = [g.float() for g in self.lists["grads"]]
        if self.row.update.counts_steps:
            other.lists["steps"] = [s.clone() for s in self.lists["steps"]]
        return other

    def masters(self) -> list[Tensor]:
        """Return the FP32 values of the parameters, in new memory."""
        params = self.lists["params"]
        if not self.form.packed:
            return [p.to(torch.promote_types(p.dtype, WIDE), copy=True) for p in params]
        rows = zip(params, self.lists["remainders"], strict=True)
        found = [(p, join_master(in_order_of_memory(p), r[: p.numel()])) for p, r in rows]
        return [in_memory_of(p, flat) for p, flat in found]

    def value(self, name: str, place: int) -> Tensor:
        """Return the values of a state, FP32 or FP64, in new memory."""
        param, state = self.lists["params"][place], self.lists[name][place]
        kind = self.row.update.kinds[self.row.update.states.index(name)]
        dtype = torch.promote_types(param.dtype, WIDE)
        return format_of(state.dtype, True).read(state, param, kind, dtype).clone()

    def states(self) -> Iterator[tuple[str, int]]:
        """Yield the name and the place of each state that there is."""
        for name in self.row.update.states:
            for i, group in enumerate(self.groups):
                if self.row.update.has(name, self.rules[group]):
                    yield name, i

    def step(
        self,
        backend: str,
        grad_scale: Tensor | float | None = None,
        found_inf: Tensor | float | None = None,
        places: Sequence[int] | None = None,
        **numbers: Any,
    ) -> "Updates":
        """Take a step; ``places``: on these tensors alone; numbers: of ``TensorLists``."""
        scalars = [
            torch.tensor(x, device=self.device) if isinstance(x, float) else x
            for x in (grad_scale, found_inf)
        ]
        repeated = "copies", "remainders", *self.row.update.optional
        counted = ("steps",) if "steps" in self.lists else ()
        tensors = TensorLists(
            memory=self.memory, may_repeat=repeated, scalars=counted, **numbers, **self.lists
        )
        if places is not None:
            tensors = tensors.part(places, {})
        self.last = UpdateLists(tensors, self.rules, self.groups)
        self.row.update(self.last, *scalars, backend)
        return self

    def overflow(self) -> list[int]:
        """Return the flags of parameters beyond the range of their half values."""
        return self.last.overflow(self.device).tolist()

    def written(self) -> list[Tensor]:
        """Return all tensors that a step may write."""
        lists = (own for name, own in self.lists.items() if name != "grads")
        return list(dict.fromkeys(itertools.chain(*lists)))

    def bits(self) -> list[Tensor]:
        """Return copies of the bits of all tensors that a step may write."""
        return [bits(t) for t in self.written()]


def bits(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor as integers, of which NaN equals itself, in new memory."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().clone().contiguous().view(integer[tensor.element_size()])


def same_bits(a: Updates, b: Updates) -> bool:
    return all(map(torch.equal, a.bits(), b.bits()))
