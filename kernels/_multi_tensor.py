"""Lists of tensors for kernels that process any number of tensors in one launch."""

import itertools
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from tritonamp.kernels._facts import count_write, facts
from tritonamp.kernels._implementations import Implementations
from tritonamp.kernels._native import PLAIN_STEPS
from tritonamp.kernels._plan import Facts, Plan
from tritonamp.kernels._shards import any_sharded, to_local
from tritonamp.kernels._transfer import upload
from tritonamp.kernels.device import INTERPRETED, is_capturing, runs_triton

# three for a step (statistics, step counts, update), for eight kinds of steps that alternate
_PLANS = 24


class Memory:
    """The memory of earlier steps: plans, and tensors that kernels read and write.

    A step that is like an earlier one repeats the launches of its plan; any other step builds a
    plan. A captured CUDA graph has a plan of its own, which no later step writes to.

    Attributes:
        kinds: kinds of lists that ``TensorLists.note_kind`` has noted, the latest first.
    """

    def __init__(self) -> None:
        self.kinds: list[Hashable] = []
        self._room = _PLANS
        self._plans: list[Plan] = []  # most recently used first
        self._kept: dict[tuple[str, torch.device, tuple[int, ...]], Tensor] = {}
        self._sent: dict[tuple[str, torch.device, tuple[int, ...]], list[Any]] = {}
        self._parts: dict[Hashable, Memory] = {}

    def part(self, name: Hashable) -> "Memory":
        """Return the memory of steps on a part of the lists, which is forgotten with this one."""
        if name not in self._parts:
            self._parts[name] = Memory()
        return self._parts[name]

    def find_plan(self, facts: Facts) -> Plan | None:
        """Return the plan of an earlier step whose lists had the same kind, or None."""
        # compared, not hashed, because a hash reads all facts, and each step has new objects
        for k, plan in enumerate(self._plans):
            if plan.fits(facts):
                # the most recently used plan comes first, so that a steady run compares once
                if k:
                    self._plans.insert(0, self._plans.pop(k))
                return plan
        return None

    def keep_plan(self, plan: Plan) -> None:
        """Keep a plan for later steps."""
        if not PLAIN_STEPS:
            self._plans = [plan, *self._plans[: self._room - 1]]

    def make_room(self, parts: int) -> None:
        """Keep more plans, for steps that launch on ``parts`` parts of their lists."""
        self._room = max(self._room, parts * _PLANS)

    def forget_plans(self) -> list[Tensor]:
        """Forget plans, which hold addresses, and kinds; return the persistent tensors."""
        self.kinds.clear()
        self._plans.clear()
        of_parts = (part.forget_plans() for part in self._parts.values())
        return [*self._kept.values(), *itertools.chain.from_iterable(of_parts)]

    def kept(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return the persistent tensor of this name, device and shape; it starts as zeros.

        Other shapes do not replace it, because a CUDA graph may have captured it.
        """
        tensor = self._kept.get((name, device, shape))
        if tensor is None:
            tensor = torch.zeros(shape, dtype=dtype, device=device)
            self._kept[name, device, shape] = tensor
        return tensor

    def all_kept(self, name: str, size: int) -> list[Tensor]:
        """Return the persistent tensors of this name whose first dimension is ``size``."""
        return [
            tensor
            for (kept_name, _, shape), tensor in self._kept.items()
            if kept_name == name and shape[:1] == (size,)
        ]

    def sent_rows(
        self, name: str, rows: list[Sequence[Any]], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return rows of numbers on the device; changed numbers are sent without waiting.

        Args:
            name: name of the persistent tensor.
            rows: numbers, all rows of one length. None is sent as 0: the caller writes that number.
            dtype: dtype of the result.
            device: device of the result.

        Returns:
            A tensor of shape (rows, numbers), the same one for each name and shape. A CUDA graph
            gets a tensor of its own.
        """
        shape = len(rows), len(rows[0])
        if is_capturing(device):
            # a replay reads it later, when eager steps have sent other numbers to the kept tensor
            target = torch.empty(shape, dtype=dtype, device=device)
        else:
            target = self.kept(name, shape, dtype, device)
            # hyperparameters rarely change, and comparing them costs less than a copy to the device
            if self._sent.get((name, device, shape)) == rows:
                return target
            self._sent[name, device, shape] = rows
        values = [[0 if number is None else number for number in row] for row in rows]
        upload(torch.tensor(values, dtype=dtype), target)
        return target


class TensorLists:
    """Named lists of n tensors each; tensors at one place share shape and device. A value.

    A step makes one, asks for its facts once, and drops it. If a tensor has gaps, or another layout
    than the first list's tensor at its place, kernels access a copy. A list of ``may_repeat``
    counts as absent at places where it holds the very tensor of "params". A sharded tensor is
    replaced by this rank's part. Kernels access tensors of ``CODES`` without a copy, because these
    lie in the memory order of "params".

    Args:
        lists: lists of tensors, by name.
        memory: memory of earlier steps, or None if nothing persists.
        numbers: indices of the tensors in results of kernels, ascending; None: 0 to n - 1.
        size: length of such results; None: n.
        may_repeat: names of lists that may hold tensors of "params", the first list, again.
        scalars: names of lists of 0-d tensors, which get tables of their own.
        orders: strides of "params" at each place when its codes were made, part of the comparison
            with earlier steps; empty without codes.
        sharded: whether any tensor is sharded; None: decided by the types of the first list.
    """

    def __init__(
        self,
        *,
        memory: Memory | None = None,
        numbers: Sequence[int] | None = None,
        size: int | None = None,
        may_repeat: Iterable[str] = ("copies",),
        scalars: Collection[str] = (),
        orders: Sequence[Hashable] = (),
        sharded: bool | None = None,
        **lists: Sequence[Tensor],
    ) -> None:
        first = next(iter(lists.values()), ())
        n = len(first)
        self._sharded = any_sharded(first) if sharded is None else sharded
        self._lists = _local(lists) if self._sharded else lists
        self.memory = Memory() if memory is None else memory
        self.numbers = range(n) if numbers is None else numbers
        self.size = n if size is None else size
        self.may_repeat = frozenset(may_repeat)
        self._scalars = scalars
        self._orders = orders
        self._facts: dict[tuple[str, ...] | None, Facts] = {}
        self._plans: dict[tuple[str, ...] | None, Plan] = {}

    def __len__(self) -> int:
        return len(self.numbers)

    def __contains__(self, name: str) -> bool:
        return name in self._lists

    def named(self, names: Sequence[str]) -> list[Sequence[Tensor | None]]:
        """Return the named lists; a list of None for each name that has none."""
        missing = [None] * len(self)
        return [self._lists.get(name, missing) for name in names]

    def __getitem__(self, name: str) -> Sequence[Tensor]:
        return self._lists[name]

    def with_lists(
        self,
        may_repeat: Iterable[str],
        scalars: Collection[str],
        lists: Mapping[str, Sequence[Tensor]],
        orders: Sequence[Hashable] | None = None,
        numbers: Sequence[int] | None = None,
    ) -> "TensorLists":
        """Return new ``TensorLists`` in which ``lists`` replace or extend these.

        Arguments are those of ``TensorLists``, but None keeps the present value.
        """
        return TensorLists(
            memory=self.memory,
            numbers=self.numbers if numbers is None else numbers,
            size=self.size,
            may_repeat=may_repeat,
            scalars=scalars,
            orders=self._orders if orders is None else orders,
            sharded=self._sharded,
            **{**self._lists, **lists},
        )

    def part(self, places: Sequence[int], moved: Mapping[Tensor, Tensor]) -> "TensorLists":
        """Return the lists at some places, with the tensors of ``moved`` replaced."""
        lists = {
            name: [moved.get(tensors[i], tensors[i]) for i in places]
            for name, tensors in self._lists.items()
        }
        orders = [self._orders[i] for i in places] if self._orders else ()
        numbers = [self.numbers[i] for i in places]
        return self.with_lists(self.may_repeat, self._scalars, lists, orders, numbers)

    def at(self, place: int) -> list[Tensor]:
        """Return the tensors of all lists at one place."""
        return [tensors[place] for tensors in self._lists.values()]

    def kept(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return a persistent tensor of the memory, as ``Memory.kept`` does."""
        return self.memory.kept(name, shape, dtype, device)

    def uses_triton(
        self, backend: str, operation: Implementations, names: tuple[str, ...] | None = None
    ) -> bool:
        """Tell whether ``operation`` runs its kernel on these lists.

        Kernels accept neither float64 nor wrapper subclasses.

        Args:
            backend: "auto", "triton" or "eager".
            operation: operation that has the kernel.
            names: names of the lists that the operation works on; None: all.
        """
        # tracers see the eager twin, because addresses of traced tensors do not exist
        if not len(self) or torch.compiler.is_compiling():
            return False
        first = next(iter(self._lists.values()))[0]  # a plan checks the others, once
        if not operation.uses_triton(backend, first):
            return False
        devices = self.plan(names).devices
        return len(devices) > 0 and (INTERPRETED or all(map(runs_triton, devices)))

    def plan(self, names: tuple[str, ...] | None = None) -> Plan:
        """Return the plan of the named lists (None: of all), found or built."""
        plan = self._plans.get(names)
        if plan is not None:
            return plan
        facts, is_captured = self.facts(names), self._is_captured()
        plan = None if is_captured else self.memory.find_plan(facts)
        if plan is None:
            lists = {name: self._lists[name] for name in names or self._lists}
            plan = Plan(lists, self._scalars, self.may_repeat, self.numbers, facts)
            # A replay reads a captured plan's tables. If the plan were kept, a later step would
            # write its own pointers into them.
            if not is_captured:
                self.memory.keep_plan(plan)
        self._plans[names] = plan
        return plan

    def is_of_noted_kind(self) -> bool:
        """Tell whether lists of this kind were noted by an earlier step."""
        try:
            return self.facts().kind in self.memory.kinds
        except (AttributeError, TypeError, RuntimeError):
            # A list may hold numbers or None instead of tensors, and sparse tensors have no
            # address.
            return False

    def note_kind(self) -> None:
        """Note the kind of these lists of tensors, for ``is_of_noted_kind`` of later steps."""
        if PLAIN_STEPS:
            return
        # fake tensors and other wrappers have no address, and so no facts
        with suppress(RuntimeError):
            self.memory.kinds = [self.facts().kind, *self.memory.kinds[: _PLANS - 1]]

    def facts(self, names: tuple[str, ...] | None = None) -> Facts:
        """Return the facts of the named lists (None: of all), collected once."""
        # kept, because a step asks for a plan several times, and facts take a look at every tensor
        found = self._facts.get(names)
        if found is None:
            lie, pointers = facts([self._lists[name] for name in names or self._lists])
            kind = names or (*self._lists,), self.numbers, self.size, self._orders, lie
            found = self._facts[names] = Facts(kind, pointers)
        return found

    def _is_captured(self) -> bool:
        return is_capturing(next(iter(self._lists.values()))[0].device)

    @contextmanager
    def launches(
        self, written: Sequence[str] = (), names: tuple[str, ...] | None = None
    ) -> Iterator[Plan]:
        """Yield the plan to a ``with`` block that launches kernels on the lists.

        Args:
            written: names of the lists that the kernels write to.
            names: names of the lists that the kernels work on; None: all.
        """
        plan = self.plan(names)
        plan.send_pointers(self.facts(names))
        # tensors with gaps or another layout: kernels access copies in the first list's order
        for name, i, copy in plan.copies:
            copy.copy_(self._lists[name][i])
        yield plan
        for name, i, copy in plan.copies:
            if name in written:
                self._lists[name][i].copy_(copy)
        # Autograd may have saved these, and cannot see that a kernel writes to them. State and
        # flags are never saved.
        for name in ("params", "copies"):
            if name in written:
                count_write(self._lists[name])


def _local(lists: Mapping[str, Sequence[Tensor]]) -> dict[str, Sequence[Tensor]]:
    """Return the lists with each sharded tensor (DTensor) replaced by this rank's part."""
    # kernels take addresses, which only the parts have
    return {name: list(map(to_local, tensors)) for name, tensors in lists.items()}
