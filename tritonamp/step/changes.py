"""One bit per element: which values of one optimizer's parameters have changed."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from tritonamp.fp32_values import Fp32Values
from tritonamp.kernels._change_bits import other_bits
from tritonamp.kernels._facts import addresses, versions
from tritonamp.kernels._inference import leaves_inference_mode
from tritonamp.kernels._memory_order import memory_strides
from tritonamp.kernels._shards import any_sharded, to_local
from tritonamp.kernels._transfer import transfer
from tritonamp.policy import HALF_DTYPES
from tritonamp.step.parameter_bits import Changed, ParameterBits, kind_of, stored


class Changes:
    """The changed elements of one optimizer's parameters, and on request those of its last step.

    An element has changed if the model's parameter holds other bits; one NaN for another is no
    change. A skip changes none.

    ::

        fused step                      the kernel writes the bits, because it holds the old
                                        master, which rounds to the old half copy
        step of the optimizer's own     compared before the half copies are written; parameters
                                        without a master, with a copy from before the step
        half parameter with an FP32     compared with its values of before, to which the master
        master, one of them written     rounds, or which a written master is about to replace
        any other write                 the whole tensor: FP32 parameters, those of O3, those with
                                        packed or offloaded masters, a change of dtype

    Other writes are noticed by ``Tensor._version`` and by the tensor's address, as ``Fp32Values``
    notices them.

    Args:
        fp32_values: FP32 values of the models' half tensors.
        of_last_step: whether a second row of bits has the changes of the last step alone.
    """

    def __init__(self, fp32_values: Fp32Values, of_last_step: bool) -> None:
        self._rows = 1 + of_last_step
        self._stepped: list[Tensor] = []  # in the order of the groups, as the two lists below
        self._params: list[Tensor] = []
        self._bits: list[ParameterBits] = []
        self._number: dict[Tensor, int] = {}  # of a parameter in these lists
        self._seen = array("Q")  # versions and addresses when the bits were right
        self._before_sleep = array("Q")  # the same, when the parameters left the device
        self._strides: list[Any] = []  # of the tensors that the last fused step worked on
        self._before: dict[int, Tensor] = {}  # by number, copies of parameters that are stepped on
        fp32_values.on_write.append(self._compare_written)

    # which parameters

    @leaves_inference_mode
    def adopt(self, stepped: Sequence[Tensor], params: Sequence[Tensor]) -> None:
        """Keep bits of these parameters; those that join others count as changed.

        Args:
            stepped: tensor that the optimizer steps on, for each parameter.
            params: parameters of the model.
        """
        self.follow()
        known = dict(zip(self._params, self._bits, strict=True))
        self._stepped, self._params = list(stepped), list(params)
        self._number = {param: i for i, param in enumerate(params)}
        self._bits = [known[p] if p in known else ParameterBits.of(p, self._rows) for p in params]
        self._strides = [None] * len(params)
        self.note_step()
        if not known:
            self.clear()

    def mark_all(self) -> None:
        """Count all elements as changed."""
        for i in range(len(self._params)):
            self._mark_whole(i)
        self.note_step()

    def _mark_whole(self, i: int) -> None:
        """Count parameter i as changed as a whole, with its present dtype, device and shape."""
        bits, kind = self._bits[i], kind_of(self._params[i])
        fits = bits.kind[1:] == kind[1:]
        if fits:
            self._bits[i] = bits._replace(kind=kind)
        else:
            self._bits[i] = ParameterBits.of(self._params[i], self._rows)
        self._bits[i].rows[0] = 255

    # writes by other code

    def follow(self) -> None:
        """Mark the parameters that other code has written to or moved."""
        now, seen, n = self._facts(), self._seen, len(self._params)
        if now == seen:
            return
        for i in range(n):
            if now[i::n] != seen[i::n]:
                self._mark_whole(i)
        self.note_step()

    def note_step(self) -> None:
        """Note that the bits are right for the parameters as they are."""
        self._seen = self._facts()

    def fall_asleep(self) -> None:
        """Note addresses and versions of parameters that are about to leave the device."""
        self._before_sleep = self._facts()

    def wake_up(self) -> None:
        """Note the addresses of parameters that came back, so that a move counts as no write."""
        now, seen, before, n = self._facts(), self._seen, self._before_sleep, len(self._params)
        for i, param in enumerate(self._params):
            # The facts are n versions, n addresses, and for parts of DTensors the same again.
            for k in range(n + i, len(seen), 2 * n) if param.is_cuda else ():
                # moved before it left, it has changed, even if it came back to its place of then
                seen[k] = now[k] if seen[k] == before[k] else 1

    def _facts(self) -> "array[int]":
        """Return the parameters' versions, then their addresses, then those of shards."""
        found = versions(self._params) + addresses(self._params)
        # a write may be counted by a DTensor or by the part inside
        if any_sharded(self._params):
            parts = list(map(to_local, self._params))
            found += versions(parts) + addresses(parts)
        return array("Q", found)

    def _compare_written(self, param: Tensor, before: Tensor, at: tuple[int, int]) -> None:
        """Mark the elements of a written parameter that differ from ``before``, rounded.

        Args:
            param: any half tensor.
            before: values of ``param`` before the write, or FP32 values that round to them.
            at: version and address of ``param`` then.
        """
        i, n, seen = self._number.get(param), len(self._params), self._seen
        # after an earlier write that was not seen the whole tensor counts
        if i is None or (seen[i], seen[n + i]) != at or self._bits[i].kind != kind_of(param):
            return
        bits, now = self._bits[i], stored(param)
        before = stored(before).to(now.device, now.dtype)
        bits.rows[0] |= bits.packed(other_bits(before, now))
        seen[i::n] = self._facts()[i::n]

    # steps

    def rows(self, numbers: Sequence[int], params: Sequence[Tensor]) -> list[Tensor]:
        """Return the list "changes" of a fused step.

        Args:
            numbers: numbers of the parameters in the groups.
            params: list "params" of the step, in whose order of memory kernels take the bits.
        """
        for i, tensor in zip(numbers, params, strict=True):
            if tensor.stride() != self._strides[i]:
                self._strides[i] = tensor.stride()
                self._bits[i] = self._bits[i].in_order(memory_strides(stored(tensor)))
        return [self._bits[i].rows for i in numbers]

    def leave_out(self, numbers: Sequence[int], found_inf: Tensor | None) -> None:
        """Clear row 1 of parameters that have no gradient in a fused step, unless it is a skip.

        The step has left all elements of such parameters as they were.

        Args:
            numbers: numbers of the parameters with a gradient.
            found_inf: 0-d flag, not 0 for a skip; None: no skip.
        """
        if self._rows == 1:
            return
        for i in {*range(len(self._bits))}.difference(numbers):
            row = self._bits[i].rows[1]
            if found_inf is None:
                row.zero_()
            else:
                row *= transfer(found_inf, row.device) != 0

    def copy_before(self) -> None:
        """Copy the parameters that the optimizer's own step is about to write to itself."""
        pairs = enumerate(zip(self._stepped, self._params, strict=True))
        self._before = {i: stored(p).clone() for i, (master, p) in pairs if master is p}

    def compare(self) -> None:
        """Note which elements the optimizer's own step has changed, before copies are written."""
        rows = zip(self._stepped, self._params, self._bits, strict=True)
        for i, (master, param, bits) in enumerate(rows):
            before = self._before.get(i, stored(param))
            row = bits.packed(other_bits(before, stored(master).to(before.dtype)))
            bits.rows[0] |= row
            bits.rows[1:] = row
        self._before = {}

    def compare_unfinished(self) -> None:
        """Note which values the optimizer's own step has written before it raised.

        Half parameters with a master are compared when their copies are written.
        """
        for i, before in self._before.items():
            bits, now = self._bits[i], stored(self._params[i])
            bits.rows[0] |= bits.packed(other_bits(before, now))
        self._before = {}

    # results

    def shares_left(self, groups: Iterable[Mapping[str, Any]]) -> list[float]:
        """Return by group the share of all half values that the last taken step did not change.

        The share is 0 before the first step, for groups without half values, and without
        ``of_last_step``. Reads the device.

        Args:
            groups: groups of the optimizer.
        """
        bits, shares = dict(zip(self._stepped, self._bits, strict=True)), []
        if self._rows == 1:
            bits = {}
        for group in groups:
            of_group = [bits[master] for master in group["params"] if master in bits]
            half = [each for each in of_group if each.kind[0] in HALF_DTYPES]
            changed = sum(int(each.unpacked(1).sum()) for each in half)
            size = sum(each.kind[-1].numel() for each in half)
            shares.append(1 - changed / size if size else 0.0)
        return shares

    def read(
        self, names: Mapping[Tensor, str], dense_above: float | None, global_positions: bool
    ) -> dict[Tensor, Changed]:
        """Return the changed elements by parameter. Reads the device.

        Args:
            names: names of the parameters to return.
            dense_above: as for ``Amp.changes``.
            global_positions: as for ``Amp.changes``.

        Raises:
            ValueError, RuntimeError: as for ``ParameterBits.changed``.
        """
        return {
            p: bits.changed(p, names[p], dense_above, global_positions)
            for p, bits in zip(self._params, self._bits, strict=True)
            if p in names
        }

    def clear(self) -> None:
        """Count all elements as unchanged."""
        for bits in self._bits:
            bits.rows[0] = 0

    def memory(self) -> list[Tensor]:
        """Return the bits, which leave the device while training is asleep."""
        return [bits.rows for bits in self._bits]
