"""A dispatch mode that notes at which ops of a run inf and NaN begin and end."""

import dataclasses
import math
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tritonamp.casts.enabled_module import Fp32Module
from tritonamp.casts.uncast import uncast
from tritonamp.diagnosis.replay import known_ops
from tritonamp.diagnosis.replay.memories import Memories
from tritonamp.diagnosis.replay.model_names import ModelNames
from tritonamp.diagnosis.replay.small_numbers import SmallNumbers
from tritonamp.diagnosis.replay.user_calls import Patch, UserCalls
from tritonamp.diagnosis.replay.verdicts import Event, OpInput
from tritonamp.watched.ops import (
    READ_NO_VALUES,
    OpCall,
    amax,
    floats,
    is_finite,
    is_watched,
    nonfinite_samples,
    storage_id,
)
from tritonamp.watched.places import Place, PlacedOps, Way
from tritonamp.watched.products import Products


class _Ran(NamedTuple):
    """An op that has run.

    Attributes:
        call: the op, with copies of the tensors that it has written to.
        asked: the op that the user called.
        place: place of the call in the user's code.
        own: whether a backward or a hook that the user wrote calls it.
    """

    call: OpCall
    asked: OpCall
    place: Place
    own: bool


class Watch(PlacedOps):
    """Reads the results of every op while it is active, and waits for the device at each.

    Args:
        names: names of the models.
        patch: change of the user's code that is tried in this run.
        products: counts of the forward's products.
    """

    outside = "from outside the model"  # origin of the tensors that the run did not make, in words

    def __init__(
        self, names: ModelNames, patch: Patch | None = None, products: Products | None = None
    ) -> None:
        super().__init__(names.modules)
        self._products = products
        self._user_calls = UserCalls(self, patch)
        self._computed_again: list[nn.Module] = []  # their forwards have entered it in a backward
        self.model_names = names
        self.phase = "forward"  # the owner sets "backward" when the backward begins
        self.events: list[Event] = []  # in the order in which they happened
        # name of a parameter or buffer that was written to, to the tensor and its value before
        self.writes: dict[str, tuple[Tensor, Tensor]] = {}
        self.memories = Memories()
        self._small = SmallNumbers(self.memories)
        self._casts: dict[Place, Place | None] = {}  # where the values of a cast were computed

    def __enter__(self) -> "Watch":
        super().__enter__()
        self._user_calls.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._user_calls.__exit__(*exception)
        super().__exit__(*exception)

    def note_entered(self, module: nn.Module, args: Any) -> None:
        super().note_entered(module, args)
        # torch disables function modes in a backward, and a checkpoint needs the same edits again
        if module in self.modules and self._user_calls.is_disabled_in_backward():
            self._user_calls.__enter__()
            self._computed_again.append(module)
        if module in self.model_names.roots:
            for i, value in enumerate(args):
                if is_watched(value):
                    self.memories.of(value).label = f"input {i}"
            return
        for value in filter(is_watched, args):
            event = self.memories.of(value).origin
            if event is not None and module in self.names and uncast(value) is not value:
                self._blame_reader(event, module)

    def _note_left(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._computed_again[-1:] == [module]:
            self._computed_again.pop()
            self._user_calls.__exit__(None, None, None)
        super()._note_left(module, args, output)

    def _blame_reader(self, event: Event, module: nn.Module) -> None:
        """Move the place of a cast at the model's edge to the innermost module that reads it."""
        name, blamed, root = self.names[module], event.place.module, self.modules[0]
        if blamed == self.names[root] or f"{name}.".startswith(f"{blamed}."):
            # a module in FP32 reads the value from before the cast
            reader = root if isinstance(module, Fp32Module) else module
            kind = type(reader).__name__
            event.place = dataclasses.replace(event.place, module=self.names[reader], kind=kind)

    def _ran(self, call: OpCall) -> _Ran:
        """Return the call with the op that the user called. A rule may run other ops for it."""
        way = Way.out_of(sys._getframe(1))
        if way.rule is not None:
            found = way.rule.f_locals
            asked = OpCall(found["stock"].target, found["args"], found["kwargs"])
        else:
            asked = call
        here = self.place_now(asked.schema.name, way)
        is_cast = way.at_edge and asked is call and call.schema.name == "to_copy"
        if is_cast and self.modules and self.modules[-1] in self.model_names.roots:
            # blame the cast of an output on the op that made the output
            here = next((self.memories.of(t).maker or here for t in call.inputs()), here)
        before = self._with_copies(call)
        own = way.file is not None and self.in_backward()
        return _Ran(before, before if asked is call else asked, self.place_by_graph(here), own)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = OpCall(func, args, kwargs or {})
        ran = self._ran(call)
        result = call.run()
        if self._products is not None and self.phase == "forward":
            self._products.add(call, result, ran.place.module)
        results = floats([result, call.written_arguments()])
        # private (torch 2.11 to 2.15): for all device types at once, and without a change of what
        # ops see of autocast
        with torch.no_grad(), torch._C._DisableAutocast():
            self._note_results(ran, results)
        return result

    def _with_copies(self, call: OpCall) -> OpCall:
        """Return the call with copies of the arguments that it is about to write to."""
        written = call.schema.written
        if not written:
            return call
        for tensor in tree_leaves(call.written_arguments()):
            weight = self.model_names.weight(tensor) if is_watched(tensor) else None
            if weight is not None:
                self.writes.setdefault(weight[0], (weight[1], weight[1].detach().clone()))
        with torch.no_grad():
            copy = self.memories.copied
            return call.map_arguments(
                lambda value: copy(value) if is_watched(value) else value, written
            )

    def _note_results(self, ran: _Ran, results: list[Tensor]) -> None:
        call = ran.call
        if not call.schema.written:
            for t in results:
                self.memories.of(t).unwritten |= call.allocates
            # views of memory without values have none either
            results = [t for t in results if not self.memories.of(t).unwritten]
        elif call.allocates:
            return
        bad = [t for t in results if not is_finite(t)]
        if bad:
            position = next(i for i, t in enumerate(results) if t is bad[0])
            event = self._event_behind(ran, bad, position)
            for t in bad:
                self.memories.of(t).origin = event
        self._follow_overflows(ran, results)
        for t in results if not call.schema.is_view else ():
            self.memories.of(t).maker = ran.place
        if self.phase == "forward":
            self._small.note(call, ran.place, results)
            if "cast" in known_ops.family(call.schema.name):
                makers = [self.memories.of(t).maker for t in call.inputs()]
                self._casts[ran.place] = next(iter(makers), None)

    # inf and NaN

    def _event_behind(self, ran: _Ran, bad: list[Tensor], position: int) -> Event:
        """Return the earlier event that reached the results that are not finite, or a new one."""
        causes = [self.origin(t, ran.place) for t in ran.call.inputs() if not is_finite(t)]
        nan = any(bool(t.isnan().any()) for t in bad)
        masked = nan and known_ops.is_masked(ran.call)
        if masked:  # log(0) may stand for a mask, too
            causes = [
                e
                for e in causes
                if not e.quiet and not ("log" in known_ops.family(e.place.op) and e.zero)
            ]
        elif nan:
            for e in causes:
                e.quiet = e.quiet and e.source != "data"
        loud = [e for e in causes if not e.quiet]
        if loud:
            event = min(loud, key=self.events.index)
            event.later += 1
            if nan and not event.nan and event.first_nan is None:
                event.first_nan = ran.place
            return event
        if causes and not nan:
            return causes[0]
        constant = bool(causes) or not all(map(math.isfinite, ran.call.scalars()))
        exact = None if constant and not nan else ran.call.exact_magnitude(bad[0], position)
        event = self._new_event(ran, bad[0], exact, nan, masked, constant)
        self.events.append(event)
        return event

    def _new_event(
        self,
        ran: _Ran,
        bad: Tensor,
        exact: float | None,
        nan: bool,
        masked: bool,
        constant: bool,
    ) -> Event:
        call, asked, place, own = ran
        name = call.schema.name
        if own:  # the place has the op of the forward
            place = dataclasses.replace(place, op=name)
        inputs = call.inputs()
        given = asked.inputs()
        divisor = self._small.divisor(call)
        small = self._small.read_at(place) if self.phase == "backward" else self._small.now(call)
        rounded = False
        if "cast" in known_ops.family(name):
            rounded = asked is call or storage_id(inputs[0]) in {storage_id(t) for t in given}
        named = [self.model_names.weight(t) for t in inputs] if rounded else []
        return Event(
            place,
            self.phase,
            bad.dtype,
            str(asked.func),
            tuple(OpInput(t.dtype, tuple(t.shape), amax(t)) for t in given[:6]),
            nan=nan,
            exact=exact,
            quiet=constant and not nan,
            names=tuple(weight[0] for weight in named if weight),
            scalars=call.scalars(),
            eps=small.eps,
            zero=divisor is not None and bool(torch.as_tensor(divisor == 0).any()),
            masked=masked,
            constant=constant,
            rounding=rounded,
            squares=name == "mul" and known_ops.are_same(call.args),
            own=own,
            softmax=small.softmax,
            divisor=small.divisor,
            divider=small.divider,
            maker=self._maker(place, inputs if rounded else []),
        )

    def _maker(self, place: Place, rounded: list[Tensor]) -> Place | None:
        """Return where the value of a cast was computed; None: no cast, or not known.

        Args:
            place: place of the cast; in a backward, of the forward's cast.
            rounded: floating inputs of a cast of the forward.
        """
        if self.phase == "backward":
            return self._casts.get(place) if "cast" in known_ops.family(place.op) else None
        return self.memories.of(rounded[0]).maker if rounded else None

    def origin(self, tensor: Tensor, place: Place) -> Event:
        """Return the event behind a tensor that is not finite, which was met at ``place``."""
        memory = self.memories.of(tensor)
        if memory.origin is not None:
            return memory.origin
        weight = self.model_names.weight(tensor)
        nan = bool(tensor.isnan().any())
        only_negative = not nan and not bool((tensor == math.inf).any())
        quiet = only_negative or (tensor.dim() == 0 and not nan)
        samples: tuple[int, ...] = ()
        if weight is not None:
            source = "parameters"
            name = weight[0]
            quiet = quiet and not isinstance(weight[1], nn.Parameter)
        elif memory.unwritten or self.phase == "backward":
            source = "propagated"
            name = memory.label or "a tensor that no op of torch wrote"
        elif tensor.grad_fn is not None and not memory.label:
            source = "propagated"
            shape = tuple(tensor.shape)
            name = f"a tensor of shape {shape} that was computed before this run began"
        else:
            source = "data"
            name = memory.label or f"a tensor of shape {tuple(tensor.shape)} {self.outside}"
            if tensor.dim() > 1:
                bad = nonfinite_samples(tensor)
                samples = tuple(bad) if len(bad) < len(tensor) else ()
        event = Event(place, self.phase, tensor.dtype, nan=nan, quiet=quiet, source=source)
        event.names, event.samples = (name,), samples
        event.tensor = tensor if source == "data" else None
        memory.origin = event
        self.events.append(event)
        return event

    def _follow_overflows(self, ran: _Ran, results: list[Tensor]) -> None:
        """Note where the inf of an overflow became finite and wrong; follow the exact values."""
        call, place = ran.call, ran.place
        if call.schema.name in READ_NO_VALUES or self.phase == "backward":
            return
        met, made = self._overflows(call.inputs()), self._overflows(results)
        if not met and not made:
            return
        exact = self.memories.results(call)
        if call.schema.written:
            for t in results:
                self.memories.of(t).exact.clear()
        on_purpose = call.schema.name in known_ops.ON_PURPOSE
        for result, values in zip(results, exact, strict=False):
            if result.shape != values.shape:
                continue
            finite = torch.isfinite(result)
            known = finite.to(values.device)
            if met and not on_purpose and known_ops.differ(result[finite], values[known]):
                met[0].absorbed = met[0].absorbed or place
            if not bool(finite.all()):
                self.memories.put(result, values)
        if met and results and all(map(is_finite, results)):
            met[0].vanished = met[0].vanished or place

    def _overflows(self, tensors: list[Tensor]) -> list[Event]:
        origins = [self.memories.of(t).origin for t in tensors if not is_finite(t)]
        return [event for event in origins if event is not None and event.overflowed]
