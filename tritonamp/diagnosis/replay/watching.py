"""A dispatch mode that notes at which ops of a run inf and NaN begin and end."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tritonamp.diagnosis.replay.calls import Call, amax, floats, is_finite, is_watched
from tritonamp.diagnosis.replay.exact_values import ExactValues
from tritonamp.diagnosis.replay.known_ops import (
    ADDS_A_NUMBER,
    DIVISORS,
    DOES_NOT_FIT,
    ON_PURPOSE,
    UNWRITTEN,
    are_same,
    differ,
    family,
    is_masked,
)
from tritonamp.diagnosis.replay.places import Names, PlaceTracker, Rule, storage
from tritonamp.diagnosis.replay.verdicts import Event, Operand, Place


class Watch(TorchDispatchMode):
    """Looks at every op while it is active. Waits for the device at each.

    Attributes:
        names: of parameters and buffers.
        tracker: knows where ops run.
        in_backward: set by the owner when the backward begins.
        looks_for_zeros: ``zeroed`` becomes the first event of a backward whose result in half is
            zero, and should not.
        events: in the order in which they happened.
        zeroed: see ``looks_for_zeros``.
        writes: name of a parameter or buffer that an op wrote to, to the tensor and its value
            before.
    """

    def __init__(self, names: Names) -> None:
        super().__init__()
        self.names = names
        self.tracker = PlaceTracker(names)
        self.in_backward = False
        self.looks_for_zeros = False
        self.events: list[Event] = []
        self.zeroed: Event | None = None
        self.writes: dict[str, tuple[Tensor, Tensor]] = {}
        self._origins: dict[int, Event] = {}  # of what is not finite, by storage
        # what was added and is zero in that format, by storage
        self._eps: dict[int, tuple[float, torch.dtype]] = {}
        self._exact = ExactValues()
        self._unwritten: set[int] = set()  # storages that an op allocated and none has written to

    def __enter__(self) -> "Watch":
        self.tracker.begin()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self.tracker.end()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = Call(func, args, kwargs or {})
        place, rule = self.tracker.current(call.signature.name, call.inputs(), self.in_backward)
        before = self._before(call)
        try:
            result = func(*args, **call.kwargs)
        except RuntimeError as error:
            if DOES_NOT_FIT in str(error):
                dtype = next((t.dtype for t in call.inputs()), torch.float16)
                event = Event(
                    place, "forward", dtype, str(func), scalars=call.scalars(), refused=True
                )
                self.events.append(event)
            raise
        results = floats([result, call.pick(call.signature.written)])
        # private (torch 2.11 to 2.15): for all device types at once, and without a change of what
        # ops see of autocast
        with torch.no_grad(), torch._C._DisableAutocast():
            self._look(before, place, rule, results, floats([args, call.kwargs]))
        return result

    def _before(self, call: Call) -> Call:
        """Return the call with copies of what it is about to write to."""
        written = call.signature.written
        if not written:
            return call
        for tensor in tree_leaves(call.pick(written)):
            weight = self.names.weight(tensor) if is_watched(tensor) else None
            if weight is not None:
                self.writes.setdefault(weight[0], (weight[1], weight[1].detach().clone()))
        with torch.no_grad():
            return call.map(self._copy, written)

    def _copy(self, value: Any) -> Any:
        if not is_watched(value):
            return value
        copy = value.detach().clone()
        for known in (self._origins, self._eps):
            known.pop(storage(copy), None)
            if storage(value) in known:
                known[storage(copy)] = known[storage(value)]  # type: ignore[assignment]
        values = self._exact.get(value)
        if values is not None:
            self._exact.put(copy, values)
        return copy

    def _look(
        self,
        call: Call,
        place: Place,
        rule: Rule | None,
        results: list[Tensor],
        given: list[Tensor],
    ) -> None:
        held = set() if call.signature.name == "lift_fresh" else {storage(t) for t in given}
        for t in results:
            if storage(t) not in held:  # new memory, perhaps where older one has been
                self._origins.pop(storage(t), None)
                self._eps.pop(storage(t), None)
                self._exact.forget(t)
                self._unwritten.discard(storage(t))
        if call.signature.name in UNWRITTEN:
            self._unwritten.update(storage(t) for t in results)
            return
        if not call.signature.written:  # a view of memory that is still to be written to
            results = [t for t in results if storage(t) not in self._unwritten]
        bad = [t for t in results if not is_finite(t)]
        if bad:
            event = self._cause(call, place, rule, bad)
            self._origins.update((storage(t), event) for t in bad)
        self._follow(call, place, results)
        self.tracker.made(results, place)
        self._note_eps(call, results)
        if self.looks_for_zeros and self.in_backward and results and self.zeroed is None:
            self._note_zeros(call, place, results[0])

    # inf and NaN

    def _cause(self, call: Call, place: Place, rule: Rule | None, bad: list[Tensor]) -> Event:
        """Return the event behind results that are not finite.

        It is an earlier one that reached this op, or a new one.
        """
        causes = [self.origin(t, place) for t in call.inputs() if not is_finite(t)]
        nan = any(bool(t.isnan().any()) for t in bad)
        masked = nan and is_masked(call)
        if masked:  # log(0) may stand for a mask, too
            causes = [
                e for e in causes if not e.quiet and not ("log" in family(e.place.op) and e.zero)
            ]
        elif nan:
            for e in causes:
                e.quiet = e.quiet and e.source != "data"
        loud = [e for e in causes if not e.quiet]
        if loud:
            event = min(loud, key=self.events.index)
            event.later += 1
            if nan and not event.nan and event.first_nan is None:
                event.first_nan = place
            return event
        infinite = any(not math.isfinite(s) for s in call.scalars())
        if causes and not nan:
            return causes[0]
        return self._new(call, place, rule, bad[0], nan, masked, bool(causes) or infinite)

    def _new(
        self,
        call: Call,
        place: Place,
        rule: Rule | None,
        bad: Tensor,
        nan: bool,
        masked: bool,
        constant: bool,
    ) -> Event:
        name = call.signature.name
        inputs = call.inputs()
        given = inputs if rule is None else floats([rule.args, rule.kwargs])
        divisor = None
        if name in DIVISORS and len(call.args) > DIVISORS[name]:
            divisor = call.args[DIVISORS[name]]
        rounded = False
        if "cast" in family(name):
            rounded = rule is None or storage(inputs[0]) in {storage(t) for t in given}
        named = [self.names.weight(t) for t in inputs] if rounded else []
        event = Event(
            place,
            "backward" if self.in_backward else "forward",
            bad.dtype,
            str(call.func if rule is None else rule.func),
            tuple(Operand(t.dtype, tuple(t.shape), amax(t)) for t in given[:6]),
            nan=nan,
            exact=None if constant and not nan else call.exact(bad),
            quiet=constant and not nan,
            names=tuple(weight[0] for weight in named if weight),
            scalars=call.scalars(),
            eps=self._eps.get(storage(divisor)) if isinstance(divisor, Tensor) else None,
            zero=divisor is not None and bool(torch.as_tensor(divisor == 0).any()),
            masked=masked,
            constant=constant,
            rounding=rounded,
            squares=name == "mul" and are_same(call.args),
        )
        self.events.append(event)
        return event

    def origin(self, tensor: Tensor, place: Place) -> Event:
        """Return the event behind a tensor that is not finite; ``place`` is where it was met."""
        known = self._origins.get(storage(tensor))
        if known is not None:
            return known
        weight = self.names.weight(tensor)
        label = self.tracker.inputs.get(storage(tensor))
        nan = bool(tensor.isnan().any())
        only_negative = not nan and not bool((tensor == math.inf).any())
        quiet = only_negative or (tensor.dim() == 0 and not nan)
        samples: tuple[int, ...] = ()
        if weight is not None:
            source = "parameters"
            name = weight[0]
            quiet = quiet and not isinstance(weight[1], nn.Parameter)
        elif storage(tensor) in self._unwritten or self.in_backward:
            source = "propagated"
            name = label or "a tensor that no op of torch wrote"
        else:
            source = "data"
            name = label or f"a tensor of shape {tuple(tensor.shape)} from outside the model"
            if tensor.dim() > 1:
                bad = ~torch.isfinite(tensor)
                samples = tuple(bad.flatten(1).any(1).nonzero().flatten().tolist())
        event = Event(
            place,
            "backward" if self.in_backward else "forward",
            tensor.dtype,
            nan=nan,
            quiet=quiet,
            source=source,
            names=(name,),
            samples=samples,
        )
        self._origins[storage(tensor)] = event
        self.events.append(event)
        return event

    def _follow(self, call: Call, place: Place, results: list[Tensor]) -> None:
        """Note where inf of an overflow became finite, and wrong; follow what it should be."""
        found = [self._origins.get(storage(t)) for t in call.inputs() if not is_finite(t)]
        met = [event for event in found if event is not None and event.overflowed]
        made = [self._origins.get(storage(t)) for t in results if not is_finite(t)]
        if self.in_backward or not (met or any(e is not None and e.overflowed for e in made)):
            return
        exact = self._exact.results(call)
        if call.signature.written:
            for t in results:
                self._exact.forget(t)
        for result, values in zip(results, exact, strict=False):
            if result.shape != values.shape:
                continue
            finite = torch.isfinite(result)
            wrong = differ(result[finite], values[finite])
            if met and met[0].absorbed is None and wrong and call.signature.name not in ON_PURPOSE:
                met[0].absorbed = place
            if not bool(finite.all()):
                self._exact.put(result, values)
        if met and not made and met[0].vanished is None:
            met[0].vanished = place

    # numbers that round to zero

    def _note_eps(self, call: Call, results: list[Tensor]) -> None:
        found = next(
            (self._eps[storage(t)] for t in call.inputs() if storage(t) in self._eps), None
        )
        for t in results:
            eps = found
            if call.signature.name in ADDS_A_NUMBER:
                small = torch.finfo(t.dtype).smallest_normal * torch.finfo(t.dtype).eps / 2
                eps = next(((s, t.dtype) for s in call.scalars() if 0 < abs(s) <= small), found)
            if eps is not None and bool((t == 0).any()):
                self._eps[storage(t)] = eps

    def _note_zeros(self, call: Call, place: Place, result: Tensor) -> None:
        if result.dtype.itemsize > 2 or bool(result.any()):
            return
        values = [amax(t) for t in call.in_float64()[:1]]
        if values and values[0] > 0:
            inputs = tuple(Operand(t.dtype, tuple(t.shape), amax(t)) for t in call.inputs())
            self.zeroed = Event(
                place, "backward", result.dtype, str(call.func), inputs, exact=values[0]
            )
