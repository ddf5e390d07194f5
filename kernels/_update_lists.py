"""What the steps of one optimizer work on, and its hyperparameters on their way to the device."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from tritonamp.kernels._blocks import Scratch, cut, overflows
from tritonamp.kernels._facts import use_native
from tritonamp.kernels._launch import Operand, PreparedLaunch, prepare
from tritonamp.kernels._multi_tensor import TensorLists
from tritonamp.kernels._sample import ListSample
from tritonamp.kernels._transfer import in_main_memory, transfer, upload
from tritonamp.kernels.device import is_capturing

_MOST_WAITING = 1 << 20


class Hyperparameters(Protocol):
    """Hyperparameters of one parameter group, as an op's own NamedTuple."""

    def numbers(self) -> Sequence[float | Tensor]:
        """Return the row that the op's kernel reads; tensors are 0-d."""


class UpdateLists:
    """What the steps of one optimizer work on.

    Attributes:
        tensors: "params", "grads", "copies" (the parameter again where there is none), and the
            optimizer's state by the op's names, in FP32 (the parameter again where a group has no
            such state).
        steps: "steps", the step counts, 0-d float32, of an optimizer that counts.
        rules: hyperparameters by group.
        groups: by number, which group a tensor belongs to.
        launches: those of the last update.
        track_lost: whether to count, in memory kept as "lost" (int64, by number), the elements
            whose half value stayed the same although the update was not zero, and all those whose
            update was not zero; 0 for parameters that have no half value.
    """

    def __init__(self, track_lost: bool = False, optional: Iterable[str] = ()) -> None:
        self.track_lost = track_lost
        self.tensors = TensorLists(may_repeat=("copies", *optional))
        self.steps = TensorLists()
        self.rules: list[Hyperparameters] = []
        self.groups: list[int] = []
        self.launches: Sequence[PreparedLaunch] = ()
        self._compiled: list[Any] = []  # launches whose kernels are known to compile
        self._sent: dict[torch.device, _Sent] = {}

    def numbers(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return hyperparameters, float64 (groups, n), and groups, int32, on the device."""
        rows = [list(rule.numbers()) for rule in self.rules]
        shape = len(rows), len(rows[0])
        sent = self._sent.get(device)
        if is_capturing(device):  # what a graph reads is its own
            sent = _Sent(device, self.groups, *shape)
        elif sent is None or sent.groups != self.groups or sent.shape != shape:
            sent = self._sent[device] = _Sent(device, self.groups, *shape)
        sent.follow(rows)
        return sent.numbers, sent.places

    def scalars(
        self, device: torch.device, grad_scale: Tensor | None, found_inf: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the factor on gradients (None: 1) and the flag (None: 0) on the device."""
        if grad_scale is None:
            grad_scale = self.tensors.kept("one", (), torch.float32, device).fill_(1.0)
        if found_inf is None:
            found_inf = self.tensors.kept("zero", (), torch.float32, device)
        return transfer(grad_scale, device), transfer(found_inf, device)

    def overflow(self, device: torch.device) -> Tensor:
        """Return the flags that ``note_overflow`` sets, by number."""
        return self.tensors.kept("overflow", (self.tensors.size,), torch.int32, device)

    def numbers_and_flags(self, device: torch.device) -> tuple[Any, ...]:
        """Return what a kernel takes behind the lists: groups, rules, factor, skip, overflow."""
        rules, groups = self.numbers(device)
        return groups, rules, Operand.GRAD_SCALE, Operand.FOUND_INF, self.overflow(device)

    def rows(self, names: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        """Yield for each tensor those of the lists ``names`` (complex as real), and its number."""
        lists = (map(_as_real, self.tensors[name]) for name in names)
        return zip(*lists, self.tensors.numbers, strict=True)

    def launch_all(
        self,
        calls: Sequence[tuple[Any, ...]],
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """Launch all of them, or, where one cannot be compiled, none.

        Args:
            calls: what ``launch`` takes, with ``Operand`` for the two that follow.
            grad_scale: 0-d factor on the gradients, or None.
            found_inf: 0-d, not 0: skip; or None.
        """
        launches = [PreparedLaunch(*call) for call in calls]
        operands = self._operands(launches, grad_scale, found_inf)
        kinds = [(kernel, arrays[0].device, consts) for kernel, _, arrays, _, consts, *_ in calls]
        if kinds != self._compiled:
            use_native()  # here, where time goes by for compilers
            for each in launches:
                prepare(*each.call(operands[each.device]))
            self._compiled = kinds
        for each in launches:
            each(operands[each.device])
        self.launches = launches

    def launch_again(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        """Make the last update again, on tables that hold, with the hyperparameters of now."""
        operands = self._operands(self.launches, grad_scale, found_inf)
        for device in operands:
            self.numbers(device)
        for each in self.launches:
            each(operands[each.device])

    def _operands(
        self,
        launches: Sequence[PreparedLaunch],
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> dict[torch.device, tuple[Tensor, Tensor]]:
        """Return by device what ``Operand`` numbers."""
        devices = dict.fromkeys(each.device for each in launches)
        return {device: self.scalars(device, grad_scale, found_inf) for device in devices}


class EagerUpdate:
    """The results of an eager update, written together at its end: all of them, or none.

    Except for tensors in main memory that are large enough to be cut into blocks: these are updated
    in place, block by block, since results that wait leave the cache. And of small ones, results
    are written whenever they are 1 MiB.

    Args:
        grad_scale: 0-d factor on the gradients, or None.
        found_inf: 0-d; not 0: every target keeps its bits. None: as 0.

    Attributes:
        skips: True where the host knows that there is nothing to do.
    """

    def __init__(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        known = in_main_memory(found_inf)
        self.skips = bool(known)
        self._grad_scale = None if in_main_memory(grad_scale) == 1.0 else grad_scale
        self._skip = None if found_inf is None or known is not None else found_inf != 0
        self._results: list[tuple[Tensor, Tensor]] = []
        self._waiting = 0  # bytes of those in main memory
        self._overflows: list[tuple[Tensor, Tensor]] = []
        self._in_place = False  # whether the present block is updated so
        self._scratch = Scratch()

    def blocks(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield the elements of tensors of one shape; each block is updated before the next."""
        parts = cut(*tensors)
        self._in_place = parts is not None and self._skip is None
        yield from parts or (tensors,)
        self._in_place = False

    def opened(self, target: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the values of ``target`` to be changed in place, and then to be stored there."""
        return target.to(dtype, copy=not self._in_place)

    def scratch(self, name: str, like: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return memory for a result that the block needs for itself; None: take new memory."""
        return self._scratch(name, like, dtype) if self._in_place else None

    def gradient(self, grad: Tensor, dtype: torch.dtype, maximize: bool) -> Tensor:
        """Return the gradient to descend, unscaled and clipped; it may be the one given."""
        memory = self.scratch("gradient", grad, dtype)
        if grad.dtype != dtype:
            grad = grad.to(dtype) if memory is None else memory.copy_(grad)
        if self._grad_scale is not None:
            grad = torch.mul(grad, self._grad_scale.to(grad.device), out=memory)
        return torch.neg(grad, out=memory) if maximize else grad

    def store(self, target: Tensor, value: Tensor) -> None:
        """Have ``target`` receive ``value``, rounded to its dtype."""
        if self._in_place:
            if value is not target:
                target.copy_(value)
            return
        if self._skip is not None:
            value = torch.where(self._skip.to(target.device), target, value.to(target.dtype))
        self._results.append((target, value))
        if target.device.type == "cpu":
            self._waiting += value.nbytes
            if self._waiting > _MOST_WAITING:
                self._write()

    def store_copy(self, copy: Tensor, value: Tensor, overflow: Tensor) -> None:
        """Have ``copy`` receive ``value``; set the flag where that is finite and became inf."""
        self.store(copy, value)
        found = overflows(value, copy.dtype)
        if found is not None:
            self._overflows.append((overflow, found if self._skip is None else found & ~self._skip))

    def carry_out(self) -> None:
        """Write the results; nothing here takes memory, so nothing can fail half-way."""
        self._write()
        for overflow, found in self._overflows:
            overflow.logical_or_(found)

    def _write(self) -> None:
        for target, result in self._results:
            target.copy_(result)
        self._results.clear()
        self._waiting = 0


def update_samples(
    rule: Hyperparameters,
    states: Mapping[str, Callable[[Tensor], Tensor] | None],
    bytes: int,
    optional: Iterable[str] = (),
) -> list[ListSample]:
    """Return the third step of an optimizer on FP32 masters with half copies, and on half alone.

    Args:
        rule: of all tensors.
        states: by name, a state from what is to be the parameter; None: there is no such state.
        bytes: that a step moves for each parameter with master and copy.
        optional: names of states that a group may lack.
    """

    def args(tensors: list[Tensor], half: torch.dtype, masters: bool) -> tuple[Any, ...]:
        params = tensors if masters else [t.to(half) for t in tensors]
        lists = UpdateLists(optional=optional)
        lists.tensors.set("params", params)
        lists.tensors.set("grads", [t.to(half) for t in tensors])
        for name, make in states.items():
            lists.tensors.set(name, params if make is None else [make(t) for t in tensors])
        lists.tensors.set(
            "copies", [torch.zeros_like(p, dtype=half) for p in params] if masters else params
        )
        lists.steps.set("steps", [t.new_full((), 2.0) for t in tensors])
        lists.rules, lists.groups = [rule], [0] * len(tensors)
        return lists, tensors[0].new_full((), 0.5), tensors[0].new_zeros(())

    def results(args: tuple[Any, ...], _: None) -> list[Tensor]:
        lists = args[0]
        written = [*lists.tensors["params"], *lists.tensors["copies"], *lists.steps["steps"]]
        return written + [t for name in states for t in lists.tensors[name]]

    return [
        ListSample(lambda tensors, half: args(tensors, half, True), results, bytes),
        ListSample(
            lambda tensors, half: args(tensors, half, False), results, variant="of half parameters"
        ),
    ]


def _as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class _Sent:
    """Hyperparameters on a device."""

    def __init__(self, device: torch.device, groups: list[int], n: int, width: int) -> None:
        self.groups = list(groups)
        self.shape = n, width
        self.places = torch.empty(len(groups), dtype=torch.int32, device=device)
        self.numbers = torch.empty((n, width), dtype=torch.float64, device=device)
        upload(torch.tensor(groups, dtype=torch.int32), self.places)
        self._values: list[list[Any]] = []

    def follow(self, rows: Sequence[list[Any]]) -> None:
        """Send numbers that changed; those that are tensors are copied on the device."""
        tensors = []
        for g, row in enumerate(rows):
            for k, value in enumerate(row):
                if not isinstance(value, Tensor):
                    continue
                if value.device.type == "cpu" != self.numbers.device.type:
                    row[k] = float(value)
                else:
                    row[k] = None
                    tensors.append((g, k, value))
        if rows != self._values:
            known = [[value or 0.0 for value in row] for row in rows]
            upload(torch.tensor(known, dtype=torch.float64), self.numbers)
            self._values = list(rows)
        for g, k, value in tensors:
            self.numbers[g, k].copy_(transfer(value, self.numbers.device))
