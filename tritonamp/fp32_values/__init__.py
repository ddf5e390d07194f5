"""The FP32 values behind half tensors."""

from array import array
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from tritonamp.asleep import Asleep
from tritonamp.fp32_values.lent import Home as Home
from tritonamp.fp32_values.lent import LentValue
from tritonamp.fp32_values.offloaded import OffloadedValue
from tritonamp.fp32_values.packed import PackedValue
from tritonamp.kernels._dynamo import between_graphs
from tritonamp.kernels._facts import addresses, note_versions, versions
from tritonamp.kernels._inference import leaves_inference_mode
from tritonamp.kernels._shards import to_local
from tritonamp.kernels.cast import fp32_value, rounds_to


class Fp32Values:
    """The FP32 values behind half tensors: masters of an optimizer, or else the original values.

    A half tensor that was written to (by a loaded checkpoint, an averaged copy) overrides its FP32
    value where the two no longer agree. Writes are noticed by ``Tensor._version`` and by the
    tensor's address. Writes through ``.data`` are not noticed, unless they give the tensor other
    memory.

    Masters are on the device of their half tensors, and follow in each step. Originals are in main
    memory, and follow when they are read; from a GPU that takes a copy, for which the host waits.
    Packed and offloaded values are ``LentValue`` objects instead of tensors.

    Args:
        home: host memory of masters between steps; None: masters are on the device.

    Attributes:
        asleep: record of the tensors that are away from the device.
        on_write: functions that are called after a write to a half tensor, where its values of
            before are known: with the half tensor, these values (FP32 or half), and its version and
            address then.
    """

    def __init__(self, home: Home | None = None) -> None:
        self.asleep = Asleep()
        self.on_write: list[Callable[[Tensor, Tensor, tuple[int, int]], None]] = []
        self._home = home
        self._index: dict[Tensor, int] = {}  # of a half tensor in the lists below
        self._halves: list[Tensor] = []
        self._values: list[Tensor] = []
        self._pointers = array("Q")  # to the half tensors when both sides agreed
        self._versions = array("Q")  # of the half tensors then
        self._value_versions = array("Q")  # of the values when they were last rounded
        self._lent: dict[Tensor, LentValue] = {}  # by half tensor, instead of a value
        self._unsettled: dict[Tensor, LentValue] = {}  # of these, values that may have been written

    def __contains__(self, half: Tensor) -> bool:
        return half in self._index

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._halves)

    def lend(self, half: Tensor, packs: bool) -> None:
        """Keep the FP32 value of ``half`` as a ``LentValue`` from now on.

        Args:
            half: the half tensor.
            packs: True: keep 16 bits in addition to the half tensor. False: keep the FP32 value in
                host memory.
        """
        if half in self._lent:
            return
        value = self.get(half) if half in self._index else None
        if packs:
            self._lent[half] = PackedValue(half, value, home=self._home)
        else:
            assert self._home is not None
            value = half.detach().float() if value is None else value
            self._lent[half] = self._unsettled[half] = OffloadedValue(half, value, self._home)
        self.add(half, torch.empty(0))  # a placeholder, because all lists go by index

    def lend_packed(
        self, half: Tensor, remainder: Tensor | None, strides: tuple[int, ...] | None
    ) -> Tensor:
        """Keep ``half`` and 16 bits as its FP32 value, unless these bits are kept already.

        Args:
            half: the half tensor.
            remainder: the 16 bits, as for ``PackedValue``; None: zeros.
            strides: strides of the 16 bits, as for ``PackedValue``.

        Returns:
            the 16 bits, in the order of memory of ``half``.
        """
        if half not in self._lent or self._lent[half].stored_form() is not remainder:
            self._lent[half] = PackedValue(half, remainder=remainder, strides=strides)
            self._unsettled.pop(half, None)
            self.add(half, torch.empty(0))
        return self._lent[half].stored_form()

    def stored_form(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Return the stored form of each parameter's FP32 value: 16 bits, or an FP32 host tensor.

        A parameter without a lent value stands for itself. Writes to lent FP32 tensors until now
        count.
        """
        self.settle_lent()
        lent = self._lent
        return [lent[param].stored_form() if param in lent else param for param in params]

    def settle_lent(self) -> None:
        """Take over writes to lent FP32 tensors."""
        for half, value in [*self._unsettled.items()]:
            value.settle()
            if not value.needs_settling:
                del self._unsettled[half]

    def note_step(self) -> None:
        """Give up lent FP32 tensors, because a step has written to the half tensors."""
        for value in self._unsettled.values():
            value.note_step()

    def get(self, half: Tensor) -> Tensor:
        """Return the FP32 value, brought up to date in place."""
        self.asleep.check_training()
        if half in self._lent:
            self._unsettled[half] = self._lent[half]
            return self._lent[half].get()
        i = self._index[half]
        agrees = self._versions[i] == half._version and self._pointers[i] == half.data_ptr()
        # torch does not count what batch_norm writes to running statistics, which are buffers
        if not agrees or not isinstance(half, torch.nn.Parameter):
            self._update(i)
        return self._values[i]

    def held(self, halves: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each half tensor whose FP32 value is lent at present, and the lent FP32 tensor."""
        for half in halves if self._unsettled else ():
            if (view := self._lent[half].view) is not None:
                yield half, view

    def read(self, half: Tensor) -> Tensor:
        """Return the FP32 value for a reader who drops it at once; a lent tensor is not kept."""
        if half in self._lent:
            self.asleep.check_training()
            return self._lent[half].read()
        return self.get(half)

    def refresh(self, indices: Sequence[int]) -> bool:
        """Bring the FP32 values of some half tensors up to date in place.

        Args:
            indices: results of ``indices``.

        Returns:
            whether a half tensor was written to, or has other memory.
        """
        self.settle_lent()
        halves, pointers, seen = self._halves, self._pointers, self._versions
        if isinstance(indices, range):
            of = slice(indices.start, indices.stop)
            halves, pointers, seen = halves[of], pointers[of], seen[of]
        else:
            halves = [halves[i] for i in indices]
            pointers, seen = (array("Q", [all_[i] for i in indices]) for all_ in (pointers, seen))
        changed = pointers.tobytes() != addresses(halves) or seen.tobytes() != versions(halves)
        for half in halves if changed else ():
            self.get(half)
        return changed

    def unlike(self, half: Tensor) -> Tensor | None:
        """Return in how many elements a half tensor differs from its rounded FP32 value.

        They differ after the user has written to either side through ``.data``.

        Returns:
            the number, 0-d. None if the value is lent or on another device, or if torch has counted
            a write, which ``refresh`` or ``push`` takes over.
        """
        i = self._index[half]
        value = self._values[i]
        counted = half._version != self._versions[i] or value._version != self._value_versions[i]
        if counted or half in self._lent or value.device != half.device:
            return None
        rounded, half = to_local(value.detach()).to(half.dtype), to_local(half.detach())
        # a NaN is unlike itself
        return ((rounded != half) & ((rounded == rounded) | (half == half))).sum()

    def _update(self, i: int) -> None:
        """Copy half tensor number i into its value, where the value rounds to anything else."""
        half, value = self._halves[i], self._values[i]
        if value._version == self._value_versions[i]:
            # the value still rounds to the half values of before
            self._tell(half, value, (self._versions[i], self._pointers[i]))
        with torch.no_grad():
            value.copy_(fp32_value(half.detach().to(value.device), value.detach()))
        self._mark_agreed(i)

    def _mark_agreed(self, i: int) -> None:
        half = self._halves[i]
        self._pointers[i] = half.data_ptr()
        self._versions[i] = half._version
        self._value_versions[i] = self._values[i]._version

    @between_graphs
    def push(self) -> None:
        """Round FP32 values that were written to into their half tensors."""
        if self._unsettled:
            self.settle_lent()
        if self._values and versions(self._values) != self._value_versions.tobytes():
            for i, (half, value) in enumerate(zip(self._halves, self._values, strict=True)):
                if value._version != self._value_versions[i]:
                    value = self.get(half)
                    before = half.detach().clone() if self.on_write else half
                    at = half._version, half.data_ptr()
                    with torch.no_grad():
                        half.copy_(value)
                    self._tell(half, before, at)
                    self.mark_rounded([i])

    def _tell(self, half: Tensor, before: Tensor, at: tuple[int, int]) -> None:
        for function in self.on_write:
            function(half, before, at)

    @leaves_inference_mode
    def master(self, half: Tensor) -> Tensor:
        """Return the FP32 value as a leaf on the half tensor's device, for an optimizer.

        A half tensor without an FP32 value gets its own value, which is exact.
        """
        if half not in self._index:
            data = half.detach().float()
            self.add(half, torch.nn.Parameter(data, requires_grad=half.requires_grad))
        value = self.get(half)
        if not isinstance(value, torch.nn.Parameter):
            data = value.detach().to(half.device, copy=True)
            value = torch.nn.Parameter(data, requires_grad=half.requires_grad)
            i = self._index[half]
            self._values[i] = value
            self._value_versions[i] = value._version
        return value

    def add(self, half: Tensor, value: Tensor) -> None:
        """Make ``value``, which rounds to ``half``, the FP32 value of ``half``."""
        i = self._index.setdefault(half, len(self._halves))
        if i == len(self._halves):
            self._halves.append(half)
            self._values.append(value)
            for numbers in (self._pointers, self._versions, self._value_versions):
                numbers.append(0)
        self._values[i] = value
        self._mark_agreed(i)

    def adopt(self, half: Tensor, value: Tensor) -> Tensor:
        """Make ``value`` the FP32 value of ``half``, and return it, brought up to date in place.

        If ``value`` is a tie between two half values, ``half`` becomes the even one.
        """
        if half not in self._index or self._values[self._index[half]] is not value:
            with torch.no_grad():
                value.copy_(torch.where(rounds_to(value, half), value, half.float()))
                half.copy_(value)
            self.add(half, value)
        return self.get(half)

    def load(self, half: Tensor, value: Tensor) -> None:
        """Take over a value of a checkpoint, before it is rounded into ``half``."""
        self.asleep.check_training()
        if half in self._lent:
            if half.shape == value.shape:
                self._unsettled[half] = self._lent[half]
                self._lent[half].load(value)
            return
        target = self._values[self._index[half]]
        if target.shape == value.shape:
            with torch.no_grad():
                target.copy_(value)

    def indices(self, halves: Sequence[Tensor]) -> Sequence[int]:
        """Return the numbers by which ``refresh`` and ``mark_rounded`` know half tensors.

        The numbers never change. A range stands for neighbours, which are asked together.
        """
        found = [self._index[half] for half in halves]
        neighbours = range(found[0], found[0] + len(found)) if found else range(0)
        return neighbours if list(neighbours) == found else found

    def mark_rounded(self, indices: Sequence[int]) -> None:
        """Note that some half tensors hold the rounded FP32 values.

        A half tensor that no step has written to must be unchanged since ``refresh``.

        Args:
            indices: results of ``indices``.
        """
        if isinstance(indices, range):  # two questions for all, not two for each
            note_versions(self._halves, self._versions, indices)
            note_versions(self._values, self._value_versions, indices)
            return
        for i in indices:
            self._versions[i] = self._halves[i]._version
            self._value_versions[i] = self._values[i]._version
