"""Lists on which any update steps in any format."""

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
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
        changes: rows of bits in which the update notes which elements change, 0 to 2.
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
        changes: int = 0,
        grad: torch.dtype | None = None,
    ) -> None:
        self.row, self.form, self.device = row, FORMS[form], device
        self.rules = list(rules or row.rules[:1])
        self.groups = [g for g in range(len(self.rules)) for _ in range(len(shapes) + 1)]
        generator = torch.Generator().manual_seed(0)
        signs = [torch.randn(s, generator=generator).sign() for s in [*shapes, (7, 5)]]
        signs[-1] = signs[-1].t()

        def values(factor: float = 1.0, kind: int = SIGNED, above: float = 0.0) -> list[Tensor]:
            made = [torch.empty_like(s).uniform_(0.1, 1.1, generator=generator) for s in signs]
            factors = [factor * s if kind == SIGNED else factor for s in signs]
            return [f * (x + above) for f, x in zip(factors, made, strict=True)]

        lists: dict[str, list[Any]] = {}
        for rule in self.rules:
            for name, own in self._of_group(rule, values, grad or self.form.grad).items():
                lists.setdefault(name, []).extend(own)
        if row.update.counts_steps or self.form.state is CODES:
            lists["steps"] = [torch.full((), steps, device=device) for _ in self.groups]
        if changes:
            shapes = [changes_shape(p.numel(), changes) for p in lists["params"]]
            lists["changes"] = [torch.zeros(shape, dtype=CODES, device=device) for shape in shapes]
        self.lists, self.memory = lists, Memory()

    def _of_group(
        self, rule: Any, values: Callable[..., list[Tensor]], grad: torch.dtype
    ) -> dict[str, list[Tensor]]:
        update, direction = self.row.update, -1.0 if getattr(rule, "maximize", False) else 1.0
        new = self._params(values())
        new["grads"] = [g.to(self.device, grad) for g in values(direction)]
        for name, kind in zip(update.states, update.value_kinds, strict=True):
            # squares are above those of all means
            given = values(kind=kind, above=1.21 if name == "square_avgs" else 0.0)
            has_state = update.has(name, rule)
            new[name] = [self._state(x, kind) for x in given] if has_state else new["params"]
        return new

    def _params(self, masters: list[Tensor]) -> dict[str, list[Tensor]]:
        """Return the lists that hold these FP32 values, and their copies."""
        params, half = [m.to(self.device, self.form.param) for m in masters], self.form.copy
        copies = params if half is None else [torch.full_like(p, 9.0, dtype=half) for p in params]
        found = {"params": params, "copies": copies}
        if self.form.packed:
            found["remainders"] = []
            for param, master in zip(params, masters, strict=True):
                upper, lower = split_master(in_order_of_memory(master), self.form.param)
                param.copy_(in_memory_of(master, upper))
                missing = padded(len(lower)) - len(lower)
                remainder = torch.nn.functional.pad(lower, (0, missing))
                found["remainders"].append(remainder.to(self.device))
        return found

    def _state(self, values: Tensor, kind: int) -> Tensor:
        stored = format_of(self.form.state, True).write(values, values, kind, None)
        return stored.to(self.device, self.form.state)

    def clone(self) -> "Updates":
        """Return the same with tensors and memory of its own."""
        other = copy.copy(self)
        made = {t: t.clone() for t in itertools.chain(*self.lists.values())}
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
        kind = self.row.update.value_kinds[self.row.update.states.index(name)]
        dtype = torch.promote_types(param.dtype, WIDE)
        return format_of(state.dtype, True).read(state, param, kind, dtype).clone()

    def states(self) -> Iterator[tuple[str, int]]:
        """Yield the name and the place of each existing state."""
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
        """Take a step; given ``places``, on these tensors alone. Numbers go to ``TensorLists``."""
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

    def bits(self) -> list[Tensor]:
        """Return copies of the bits of all tensors that a step may write."""
        lists = (own for name, own in self.lists.items() if name != "grads")
        return [bits(t) for t in dict.fromkeys(itertools.chain(*lists))]


def bits(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor as integers, of which NaN equals itself, in new memory."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().clone().contiguous().view(integer[tensor.element_size()])


def same_bits(a: Updates, b: Updates) -> bool:
    return all(map(torch.equal, a.bits(), b.bits()))


def same_or_nan(x: Tensor, y: Tensor) -> bool:
    """Tell whether values have the same bits; any NaN is the same as another."""
    kept = ~(x.isnan() & y.isnan())
    return torch.equal(bits(x)[kept], bits(y)[kept])
