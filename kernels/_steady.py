"""The steady value: what the last step of one optimizer touched, as that step left it."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
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

    Attributes:
        same_gradients: ``same_gradients()`` returns -1 if a gradient is unlike, else the number of
            gradients' moves since ``sent_gradients``. The slots hold the new addresses. At -1 no
            slot has changed.
        same: ``same()`` returns -1 if anything is unlike, else the sum of the changes. 0: none.
            1: hyperparameters that are floats, since ``sent_hyperparameters``, or that can change
            in place, such as tensors. 2: addresses of gradients, since ``sent_gradients``; the
            slots hold the new addresses.
        sent_gradients: ``sent_gradients()`` notes that the slots have been copied to the device.
        sent_hyperparameters: ``sent_hyperparameters()`` notes that the hyperparameters have been
            copied to the device.
        untouched: ``untouched()`` tells whether torch has counted no write to the model's
            parameters since ``wrote``.
        wrote: ``wrote()`` counts a write to each parameter and master that takes part, and notes
            the new versions.
    """

    def __init__(self, native: Any, value: Any, kept: list[Any]) -> None:
        # The list holds each object that the C++ value compares by identity alone, because another
        # object at the address of a dead one would count as the same. It holds neither the state,
        # with its dictionaries, nor the gradients, because these may be replaced long before the
        # next step.
        self._kept = kept
        # C functions, because a method in Python would add a call to each question of a step. A
        # change counts until ``sent_gradients`` or ``sent_hyperparameters``. Otherwise an exception
        # between answer and copy, such as Ctrl-C, would leave old numbers on the device.
        self.same_gradients: Callable[[], int] = partial(native.steady_same_gradients, value)
        self.same: Callable[[], int] = partial(native.steady_same, value)
        self.sent_gradients: Callable[[], None] = partial(native.steady_sent_gradients, value)
        self.sent_hyperparameters: Callable[[], None] = partial(
            native.steady_sent_hyperparameters, value
        )
        self.untouched: Callable[[], bool] = partial(native.steady_untouched, value)
        self.wrote: Callable[[], None] = partial(native.steady_wrote, value)

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
