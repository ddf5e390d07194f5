"""The steady value: what the last step of one optimizer touched, as that step left it."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from tritonamp.kernels import _facts


class Steady:
    """What the last step of one optimizer touched, as that step left it.

    The next step asks in one call whether it touches the same: the groups with their parameters and
    hyperparameters, the state, the gradients, and the memory and layout of every tensor. If so, the
    launches of the last step can be repeated. A value is never repaired: a step that differs is
    built, and records another value.

    Only ``_native.cpp`` can ask so fast, so there is no twin in Python.
    """

    # Everything that the C++ value compares by identity alone is in the list, because another
    # object at the address of a dead one would count as the same. The state, with its dictionaries,
    # and the gradients are not in it, because they may be replaced long before the next step.
    __slots__ = ("_kept", "_native", "_value")

    def __init__(self, native: Any, value: Any, kept: list[Any]) -> None:
        self._native = native
        self._value = value
        self._kept = kept

    @classmethod
    def record(
        cls,
        *,
        optimizer: Optimizer,
        keys: Sequence[str],
        holders: Sequence[Tensor],
        params: Sequence[Tensor],
        fixed: Iterable[Sequence[Tensor]],
        slots: Sequence[tuple[int, ...]],
    ) -> "Steady | None":
        """Record what a step has touched, right after it.

        A row is a parameter of the groups, in their order. A row without a gradient takes no part.

        Args:
            optimizer: the optimizer, whose ``param_groups`` and ``state`` are recorded.
            keys: keys of the hyperparameters that the step reads.
            holders: tensor of each row whose ``.grad`` the step reads.
            params: parameter of the model of each row.
            fixed: further lists of tensors that the step reads or writes.
            slots: for each row, addresses of the int64 numbers in main memory from which kernels
                take the address of the gradient. The caller keeps that memory.

        Returns:
            The value; None without C++, or if a tensor is a subclass, sparse, or without memory, or
            if the state holds objects that may change in place.
        """
        native = _facts._native
        found = native.steady_record(
            vars(optimizer),
            tuple(keys),
            tuple(holders),
            tuple(params),
            tuple(itertools.chain.from_iterable(fixed)),
            tuple(slots),
        )
        return None if found is None else cls(native, *found)

    def same_gradients(self) -> int:
        """Return -1 if a gradient is unlike, else how often gradients have moved.

        Moves count since ``sent_gradients``. The slots hold the new addresses. At -1 no slot has
        changed.
        """
        moved: int = self._native.steady_same_gradients(self._value)
        return moved

    def same(self) -> int:
        """Return -1 if anything is unlike, else the sum of what has changed.

        Returns:
            0: nothing. 1: hyperparameters that are floats, since ``sent_hyperparameters``, or
            that can change in place, such as tensors. 2: addresses of gradients, since
            ``sent_gradients``; the slots hold them.
        """
        changed: int = self._native.steady_same(self._value)
        return changed

    # An answer repeats until the caller has sent what it names. Otherwise an exception between the
    # answer and the copy to the device, such as Ctrl-C, would leave old numbers there.

    def sent_gradients(self) -> None:
        """Note that the slots have been copied to the device."""
        self._native.steady_sent_gradients(self._value)

    def sent_hyperparameters(self) -> None:
        """Note that the hyperparameters have been copied to the device."""
        self._native.steady_sent_hyperparameters(self._value)

    def untouched(self) -> bool:
        """Tell whether torch has counted no write to the model's parameters since ``wrote``."""
        untouched: bool = self._native.steady_untouched(self._value)
        return untouched

    def wrote(self) -> None:
        """Count a write to each parameter and master that takes part, and note the new versions."""
        self._native.steady_wrote(self._value)
