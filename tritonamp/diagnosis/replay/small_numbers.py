"""Small numbers in a run: an eps that was added, probabilities of a softmax, and divisors."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonamp.diagnosis.replay import known_ops
from tritonamp.diagnosis.replay.memories import Memories
from tritonamp.diagnosis.replay.verdicts import SMALL_DIVISOR, Eps
from tritonamp.watched.ops import ADDS_A_NUMBER, OpCall
from tritonamp.watched.places import Place


class Small(NamedTuple):
    """Small numbers in the values that an op reads.

    Attributes:
        eps: the eps that was added to them.
        softmax: place of the softmax that made them.
        divisor: the smallest magnitude that the forward's line divides by; None in a forward.
        divider: the op that divides by it.
    """

    eps: Eps | None
    softmax: Place | None
    divisor: float | None = None
    divider: str = ""


class SmallNumbers:
    """Follows small numbers from op to op of a forward."""

    def __init__(self, memories: Memories) -> None:
        self._memories = memories
        # by place of a logarithm or division, the softmax whose values it reads, the smallest
        # magnitude among these values, and the op
        self._read: dict[Place, tuple[Place | None, float, str]] = {}
        self._eps: dict[Place, Eps] = {}  # in the values that an op reads, by its place

    def note(self, call: OpCall, place: Place, results: list[Tensor]) -> None:
        """Note an op of the forward that has run."""
        self._note_eps(call, place, results)
        name = call.schema.name
        softmax = place if known_ops.is_softmax(name) else self.softmax(call)
        divisor = self.divisor(call)
        if divisor is not None:
            self._read[place] = softmax, float(torch.as_tensor(divisor).abs().min()), place.op
        elif softmax is not None and (
            known_ops.is_softmax(name) or call.moves or known_ops.keeps_probabilities(name)
        ):
            for t in results:
                small = t.abs() < SMALL_DIVISOR
                if known_ops.is_softmax(name):  # a masked entry is 0 in any format
                    same = [x for x in call.inputs() if x.shape == t.shape]
                    small = small & (same[0] > -math.inf) if same else small
                if bool(small.any()):
                    self._memories.of(t).softmax = softmax

    def _note_eps(self, call: OpCall, place: Place, results: list[Tensor]) -> None:
        """Note an eps that was added, where numbers near it are left."""
        found = self.eps(call)
        if found is not None:
            self._eps[place] = found
        for t in results:
            eps = found
            if call.schema.name in ADDS_A_NUMBER:
                small = (abs(s) for s in call.scalars() if 0 < abs(s) <= SMALL_DIVISOR)
                eps = next((Eps(s, t.dtype, place) for s in small), found)
            if eps is not None and bool((t.abs() <= 2 * eps.value).any()):
                self._memories.of(t).eps = eps

    def eps(self, call: OpCall) -> Eps | None:
        """Return an eps that was added to the values that an op reads; None: there is none."""
        return next(filter(None, (self._memories.of(t).eps for t in call.inputs())), None)

    def softmax(self, call: OpCall) -> Place | None:
        """Return the place of the softmax that made the values an op reads."""
        return next(filter(None, (self._memories.of(t).softmax for t in call.inputs())), None)

    def divisor(self, call: OpCall) -> Any:
        """Return the argument of a call that must not be zero; None: there is none."""
        number = known_ops.DIVISORS.get(call.schema.name)
        if number is None or len(call.args) <= number:
            return None
        if call.schema.name == "pow" and isinstance(call.args[1], (int, float)):
            # a power of 1 or more does not divide, and neither does its slope
            return call.args[0] if call.args[1] < 1 else None
        return call.args[number]

    def now(self, call: OpCall) -> Small:
        """Return the small numbers that an op of the forward reads."""
        return Small(self.eps(call), self.softmax(call))

    def read_at(self, place: Place) -> Small:
        """Return the small numbers that the op of the forward at a place has read."""
        return Small(self._eps.get(place), *self._read.get(place, (None, None, "")))
