"""Run a failing batch again, and find the op where inf or NaN begins. Leaves no trace."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tritonamp.diagnosis.replay.backward import Backward
from tritonamp.diagnosis.replay.faults import FaultReport
from tritonamp.diagnosis.replay.model_names import ModelNames
from tritonamp.diagnosis.replay.untouched import fp32_values_of, same_bits, untouched
from tritonamp.diagnosis.replay.user_calls import Patch
from tritonamp.diagnosis.replay.verdicts import Event, judge
from tritonamp.diagnosis.replay.watching import Watch
from tritonamp.watched.frames import Role, plays
from tritonamp.watched.ops import floats, is_finite
from tritonamp.watched.places import Place
from tritonamp.watched.products import Products


@plays(Role.RUN)
def find_fault(
    model: nn.Module | Iterable[nn.Module],
    run: Callable[[], Any],
    *,
    scale: float = 1.0,
    backward: bool = True,
    harmless: bool = False,
    grad_outputs: Sequence[Tensor | None] | None = None,
    expected: Sequence[Tensor] | None = None,
    around: AbstractContextManager[None] | None = None,
    patch: Patch | None = None,
    products: Products | None = None,
) -> FaultReport | None:
    """Find the first op that makes inf or NaN out of finite numbers and matters to the result.

    Afterwards parameters, buffers, ``.grad``, random number generators, training flags and autocast
    have the same bits as before, even if ``run`` raises. Other attributes that a forward sets are
    not restored. Waits for the device at every op.

    Args:
        model: model or models, enabled by tritonamp or not.
        run: function that computes the loss (a scalar), or the model's output.
        scale: loss scale of the backward.
        backward: whether to run the backward, if the result is a loss that requires a gradient, or
            ``grad_outputs`` is given.
        harmless: whether to report an overflow that vanished, where nothing else is wrong.
        grad_outputs: gradients of the tensors that ``run`` returns, with the scale in them, for a
            model without a loss.
        expected: tensors that ``run`` returned the first time, to compare bits.
        around: block around the run.
        patch: change of the user's code in this run.
        products: counts of the forward's products.

    Raises:
        CollectiveError: the run communicates with other ranks.
    """
    models = [model] if isinstance(model, nn.Module) else list(model)
    with around or contextlib.nullcontext():  # it may put other tensors into the models
        replay = Replay(models, scale, patch, products)
        with untouched(models, replay.watch.writes):
            output = replay.forward(run, expected)
            found = Backward(output, grad_outputs, scale, replay.params, replay.in_backward)
            replay.has_backward = backward and found.is_possible
            fault = replay.fault_of_forward(output)
            if fault is None and replay.has_backward:
                fault = replay.fault_of_backward(found)
            if fault is None and harmless:
                fault = replay.vanished()
    return fault


def result_of(
    models: list[nn.Module], run: Callable[[], Any], around: AbstractContextManager[None]
) -> list[Tensor]:
    """Return the floating tensors that ``run`` returns inside ``around``. Leaves no trace."""
    with around, untouched(models, {}):
        # + 0 computes logits that nothing has read yet, before the modules change
        return [t.detach() + 0 for t in floats(run())]


class Replay:
    """One forward, perhaps with its backward, under a ``Watch``."""

    def __init__(
        self,
        models: list[nn.Module],
        scale: float,
        patch: Patch | None = None,
        products: Products | None = None,
    ) -> None:
        self.names = ModelNames(models)
        self.watch = Watch(self.names, patch, products)
        self.scale = scale
        self.replayed = "not checked"
        self.has_backward = False
        self.models = models
        self.params = {name: t for name, t in self.names.weights() if t.is_leaf and t.requires_grad}

    def forward(self, run: Callable[[], Any], expected: Sequence[Tensor] | None) -> Any:
        """Return the result of ``run``, watched."""
        with self.watch:
            output = run()
        if expected is not None:
            again = [t for t in tree_leaves(output) if isinstance(t, Tensor)]
            same = len(again) == len(expected) and all(map(same_bits, again, expected))
            self.replayed = f"{'' if same else 'not '}bit-identical to the first"
        return output

    def fault_of_forward(self, output: Any) -> FaultReport | None:
        """Report the cause of a non-finite output, else of a wrong one."""
        results = floats(output)
        bad = [t for t in results if not is_finite(t)]
        is_loss = len(results) == 1 and results[0].numel() == 1
        events = [self.watch.origin(t, _RESULT) for t in bad]
        # masked logits may be -inf; a loss may not
        events = [e for e in events if is_loss or not e.quiet]
        if events:
            return self._fault(self._first(events), outcome=_outcome(bad[0], is_loss))
        absorbed = next((e for e in self.watch.events if e.absorbed), None)
        if absorbed is None:
            return None
        outcome = "the result is finite" if results else ""
        return self._fault(absorbed, silent=True, outcome=outcome)

    def vanished(self) -> FaultReport | None:
        """Report an overflow that vanished and, as far as is known, left the right numbers."""
        found = next((e for e in self.watch.events if e.overflowed), None)
        return None if found is None else self._fault(found, harmless=True)

    def _first(self, events: list[Event]) -> Event:
        return min(events, key=self.watch.events.index)

    def _fault(self, event: Event, fits: float | None = None, **fields: Any) -> FaultReport:
        kind, names = judge(event, fits), fields.pop("names", ())
        if event.source or not names:
            names = event.names
        if kind == "parameters":
            held = [(name, t) for name, t in self.names.weights() if floats(t) and not is_finite(t)]
            names = tuple(name for name, _ in held)
            masters = [[v.get(t) for v in fp32_values_of(self.models) if t in v] for _, t in held]
            if held and all(any(map(is_finite, found)) for found in masters):
                kind = "weight_overflow"
        return FaultReport(
            kind,
            event,
            names=names,
            scale=self.scale,
            fits=fits,
            replayed=self.replayed,
            has_backward=self.has_backward,
            **fields,
        )

    # backward

    def fault_of_backward(self, backward: Backward) -> FaultReport | None:
        """Report the cause of non-finite gradients, if the backward can run.

        Where no loss scale from 1 up fits, it is the cause at scale 1: an overflow of the scale
        would hide it.
        """
        if not backward.is_possible or backward.fits(self.scale):
            return None
        found = self._watched_backward(backward, self.scale)
        if found is None:
            return None  # the run is not deterministic
        event, bad = found
        fits = backward.largest_scale(self.scale) if event.overflowed else None
        if event.overflowed and self.scale > 1 and (fits is None or fits < 1):
            at_one = self._watched_backward(backward, 1.0)
            if at_one is not None:
                self.scale = 1.0
                event, bad = at_one
        outcome = f"gradients of {len(bad)} of {len(self.params)} parameters are not finite"
        return self._fault(
            event, fits, names=tuple(bad), outcome=outcome, silent=event.absorbed is not None
        )

    @contextlib.contextmanager
    def in_backward(self) -> Iterator[None]:
        """Watch a backward in the block."""
        self.watch.phase = "backward"
        with self.watch:
            yield

    def _watched_backward(
        self, backward: Backward, scale: float
    ) -> tuple[Event, dict[str, Tensor]] | None:
        """Run the backward at a scale. Return the first fault, and the gradients it reached."""
        with self.in_backward():
            for i, seed in enumerate(backward.seeds):
                self.watch.memories.of(seed).label = f"gradient of output {i}"
            grads = backward.gradients(scale)
        bad = {name: g for name, g in grads.items() if not is_finite(g)}
        if not bad:
            return None
        event = self._first([self.watch.origin(g, _RESULT) for g in bad.values()])
        if event.phase == "forward" and not event.overflowed and not event.source:
            event.phase, event.discarded = "backward", True
        return event, bad


_RESULT = Place()


def _outcome(result: Tensor, is_loss: bool) -> str:
    state = "NaN" if bool(result.isnan().any()) else "inf"
    if is_loss:
        return f"the loss is {state}"
    return (
        f"the output has {state}: {int((~torch.isfinite(result)).sum())} of {result.numel()} "
        "values are not finite"
    )
