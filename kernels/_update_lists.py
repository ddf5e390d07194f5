"""The lists and hyperparameters of one optimizer's step, and how they reach the device."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from tritonamp.kernels._facts import use_native
from tritonamp.kernels._implementations import Implementations
from tritonamp.kernels._launch import Launch, Operand
from tritonamp.kernels._multi_tensor import Memory, TensorLists
from tritonamp.kernels._plan import Plan
from tritonamp.kernels._transfer import in_main_memory, transfer


class Hyperparameters(Protocol):
    """Hyperparameters of one parameter group, as an operation's own NamedTuple."""

    def numbers(self) -> Sequence[float | Tensor]:
        """Return the row of numbers that the operation's kernel reads; tensors in it are 0-d."""


class UpdateLists:
    """The lists and hyperparameters of one step of an optimizer. A value.

    Attributes:
        tensors: "params", "grads", "copies" (the parameter itself where there is no copy), and the
            optimizer's state under the operation's names (the parameter itself where a group has no
            such state). The dtype of a state says its format (``_state_formats``), and FP64
            parameters have FP64 state. There may be three more lists: "steps", step counts as 0-d
            float32 tensors, if the optimizer counts them or state is codes; "remainders", int16 of
            shape (padded(n),), the bits that half parameters lack of FP32 masters (the parameter
            itself where it is FP32); "changes", the memory of ``_change_bits``.
        rules: hyperparameters by group.
        groups: number of each tensor's group.
        launches: launches of this step with their devices; None: no kernel has run. A step on the
            same tensors may repeat them.
    """

    def __init__(
        self, tensors: TensorLists, rules: Sequence[Hyperparameters], groups: Sequence[int]
    ) -> None:
        self.tensors = tensors
        self.rules = rules
        self.groups = groups
        self.launches: Sequence[tuple[Launch, torch.device]] | None = None
        self._numbers: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def numbers(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return hyperparameters, float64 (groups, n), and groups, int32, on the device."""
        if device not in self._numbers:
            memory = self.tensors.memory
            places = memory.sent_rows("groups", [self.groups], torch.int32, device)[0]
            self._numbers[device] = send_rules(memory, self.rules, device), places
        return self._numbers[device]

    def overflow(self, device: torch.device) -> Tensor:
        """Return int32 flags by number, not 0 where a finite value became inf in half precision."""
        return self.tensors.kept("overflow", (self.tensors.size,), torch.int32, device)

    def numbers_and_flags(self, device: torch.device) -> tuple[Any, ...]:
        """Return a kernel's arguments after the lists: groups, rules, factor, skip, overflow."""
        rules, groups = self.numbers(device)
        return groups, rules, Operand.GRAD_SCALE, Operand.FOUND_INF, self.overflow(device)

    def rows(self, names: Sequence[str]) -> list[tuple[tuple[Any, ...], Any, int]]:
        """Return the tensors at each place, complex ones as real ones, with rule and number.

        Missing lists give None.
        """
        lists = self.tensors.named(names)
        return [
            (
                _as_real(row) if row[0] is not None and row[0].is_complex() else row,
                self.rules[self.groups[number]],
                number,
            )
            for row, number in zip(zip(*lists, strict=True), self.tensors.numbers, strict=True)
        ]

    def run(
        self,
        operation: Implementations,
        on_cpu: Callable[["UpdateLists", Tensor | None, Tensor | None], None] | None,
        backend: str,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """Run an operation's kernel, its eager twin, or the twin's faster form in main memory.

        Args:
            operation: kernel and twin.
            on_cpu: faster form, a function of these lists, ``grad_scale`` and ``found_inf``; None:
                there is none.
            backend: "auto", "triton" or "eager".
            grad_scale: 0-d factor on the gradients, or None for 1.
            found_inf: 0-d flag, not 0 for a skip, or None for 0.
        """
        uses_triton = self.tensors.uses_triton(backend, operation)
        if on_cpu is not None and not uses_triton and self._is_in_main_memory(found_inf):
            on_cpu(self, grad_scale, found_inf)
        else:
            operation.run(backend, uses_triton, self, grad_scale, found_inf)

    def _is_in_main_memory(self, found_inf: Tensor | None) -> bool:
        """Tell whether all parameters and the flag that decides a skip are in main memory."""
        known = found_inf is None or in_main_memory(found_inf) is not None
        return known and {p.device.type for p in self.tensors["params"]} <= {"cpu"}

    def launch(
        self,
        plan: Plan,
        launches: Callable[["UpdateLists", Plan], Iterable[Launch]],
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """Run all launches of an operation, or none if a kernel cannot be compiled.

        Args:
            plan: plan with the tables that the launches read.
            launches: function that makes the launches, with an ``Operand`` for each tensor that
                changes between steps.
            grad_scale: 0-d factor on the gradients, or None for 1.
            found_inf: 0-d flag, not 0 for a skip, or None for 0.
        """
        operands = {}
        for device in plan.devices:
            self.numbers(device)  # sends the hyperparameters that have changed
            operands[device] = operands_of(self.tensors.memory, device, grad_scale, found_inf)

        # all kernels are compiled before the first one runs, so that a failure leaves no half step
        def prepare() -> list[tuple[Launch, torch.device]]:
            use_native()  # a first step waits for compilers anyway
            made = [(launch, launch.device) for launch in launches(self, plan)]
            for launch, device in made:
                launch.prepare(*operands[device])
            return made

        key = launches, len(self.rules)
        self.launches = plan.prepared(key, prepare)
        for launch, device in self.launches:
            launch(*operands[device])


def send_rules(memory: Memory, rules: Sequence[Hyperparameters], device: torch.device) -> Tensor:
    """Return hyperparameters on the device, float64 (groups, n); changed ones are sent.

    Args:
        memory: memory of the steps.
        rules: hyperparameters by group.
        device: device of the step.
    """
    rows, tensors = _rows(rules, device)
    # In memory on the device instead of kernel arguments, so that a schedule of the learning rate
    # neither recompiles a kernel nor re-captures a graph. FP64, as in torch, because kernels
    # compute 1 - beta and bias corrections from them.
    numbers = memory.sent_rows("rules", rows, torch.float64, device)
    for g, k, value in tensors:
        numbers[g, k].copy_(transfer(value, device))
    return numbers


def _rows(
    rules: Sequence[Hyperparameters], device: torch.device
) -> tuple[list[Sequence[Any]], list[tuple[Any, ...]]]:
    """Return rows of numbers by group, and (group, place, value) of tensors on a device."""
    rows: list[Sequence[Any]] = []
    tensors = []
    for g, rule in enumerate(rules):
        row: list[Any] = list(rule.numbers())
        rows.append(row)
        for k, value in enumerate(row):
            if not isinstance(value, Tensor):
                continue
            # A CPU tensor is read at no cost. A tensor on a device is copied there instead,
            # because reading it would make the host wait, and a captured graph has to see its
            # later values.
            if value.device.type == "cpu" != device.type:
                row[k] = float(value)
            else:
                row[k] = None
                tensors.append((g, k, value))
    return rows, tensors


def operands_of(
    memory: Memory, device: torch.device, grad_scale: Tensor | None, found_inf: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the factor on gradients and the skip flag, by ``Operand``, FP32 on the device.

    Args:
        memory: memory of the steps.
        device: device of the step.
        grad_scale: 0-d factor on the gradients, or None for 1.
        found_inf: 0-d flag, not 0 for a skip, or None for 0.
    """
    if grad_scale is None:
        grad_scale = memory.kept("one", (), torch.float32, device).fill_(1.0)
    if found_inf is None:
        found_inf = memory.kept("zero", (), torch.float32, device)
    elif found_inf.dtype is not torch.float32:
        # a kernel is compiled for the dtype of its flag, so all steps pass one dtype
        found_inf = (found_inf != 0).float()
    return transfer(grad_scale, device).float(), transfer(found_inf, device)


class PendingWrites:
    """The results of an eager update, which are written at its end: all of them, or none.

    Args:
        found_inf: 0-d flag; if it is not 0, every target keeps its bits. None: as 0.
    """

    def __init__(self, found_inf: Tensor | None) -> None:
        self._skip = None if found_inf is None else found_inf != 0
        self._rows: list[tuple[Tensor, Tensor]] = []

    def put(self, target: Tensor, value: Tensor) -> None:
        """Plan to write ``value`` to ``target``, rounded to the dtype of ``target``."""
        # rounded before the selection, so that a target that keeps its bits is not rounded
        value = value.to(target.dtype)
        if self._skip is not None:
            # chosen on the device, because the host would have to wait for the flag
            value = torch.where(self._skip.to(target.device), target, value)
        self._rows.append((target, value))

    def put_copy(self, copy: Tensor, value: Tensor, overflow: Tensor) -> None:
        """Plan to write ``value`` to ``copy``, and set the flag if a finite element became inf."""
        self.put(copy, value)
        beyond = value.isfinite() & value.to(copy.dtype).isinf()
        self.put(overflow, overflow | beyond.any())

    def write(self) -> None:
        """Write the results. Nothing here allocates, so nothing can fail half-way."""
        for target, value in self._rows:
            target.copy_(value)


def unscaled(grad: Tensor, grad_scale: Tensor | None, maximize: bool, dtype: torch.dtype) -> Tensor:
    """Return the gradient to descend along, unscaled and clipped."""
    grad = grad.to(dtype)
    if grad_scale is not None:
        grad = grad * grad_scale.to(grad.device)
    return -grad if maximize else grad


def _as_real(row: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Return a row with views of complex tensors; a tensor that stands in two places stays one."""
    complex_ones = {id(t): t for t in row if t is not None and t.is_complex()}
    real = {key: torch.view_as_real(tensor) for key, tensor in complex_ones.items()}
    return tuple(real.get(id(tensor), tensor) for tensor in row)
