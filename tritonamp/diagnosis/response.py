"""What is done about a skip beyond skipping: replay the batch; name, heal or raise the fault."""

import contextlib
import dataclasses
import functools
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tritonamp.diagnosis.batches import Forwards
from tritonamp.diagnosis.divergence import Fp32Run
from tritonamp.diagnosis.log import NonFiniteError, StepLog
from tritonamp.diagnosis.remedies import CURED_BY_FP32, TrialBlocks, remedy_of
from tritonamp.diagnosis.replay import (
    NOT_REPRODUCED,
    BatchGoneError,
    FaultReport,
    Remedy,
    Snapshot,
    find_fault,
    result_of,
    write_bundle,
)
from tritonamp.diagnosis.skips import Cause, Explanation
from tritonamp.policy import Policy
from tritonamp.watched.ops import amax, is_finite

logger = logging.getLogger("tritonamp")

HEAL_AFTER = 2  # faults in one module
FIRST_REPLAYS = 8  # of the faults since the last heal; later ones at 16, 32, 64...


Rerun = tuple[Callable[[], Any], dict[str, Any]]
"""A function, and what ``find_fault`` can know of its run."""


class Response:
    """Does what ``policy.on_nonfinite`` says about each skip.

    Args:
        models: the enabled ones.
        policy: of the Amp.
        log: knows the cause of the last skip, and the forwards that led to it.
        heal: makes the module of that name compute in FP32.
        forwards: knows the last ones.
        trials: what a fault may be cured by.
    """

    def __init__(
        self,
        models: list[nn.Module],
        policy: Policy,
        log: StepLog,
        heal: Callable[[str], None],
        forwards: Forwards,
        trials: TrialBlocks,
    ) -> None:
        self._forwards = forwards
        self._trials = trials
        forwards.holds_recent = policy.on_nonfinite in ("explain", "heal")
        self._remedies: dict[tuple[str, str | None], Remedy | None] = {}
        self._models = models
        self._policy = policy
        self._log = log
        self._heal = heal
        self._in_a_row = 0
        self._seen = 0  # faults since the last heal that a replay can find
        self._healed: list[str] = []
        self._faults: Counter[str] = Counter()  # by module
        self._reported: tuple[Explanation | None, str] = (None, "")  # the last replay, and of what
        self._vanished = ""  # what was found in a good batch

    def __call__(self, skipped: bool) -> None:
        """Do what the policy says about a decision.

        Args:
            skipped: whether it was a skip.

        Raises:
            NonFiniteError: under "raise", where a lower scale cannot help.
        """
        if skipped:
            self._answer()
            return
        self._in_a_row = 0
        if self._forwards.holds_recent:
            self._look_for_vanished()

    def _look_for_vanished(self) -> None:
        """Run one good batch again: an overflow may have become a wrong finite number in it."""
        self._forwards.holds_recent = False
        batches, self._forwards.recent = self._forwards.recent, []
        report, fault = self._search([(b.run, {"backward": False}) for b in batches])
        if fault is not None:
            self._vanished = report
            logger.warning("no step was skipped, but %s", report)

    def state(self) -> dict[str, Any]:
        """Return what the answers to later faults depend on, as plain values."""
        return {"in_a_row": self._in_a_row, "seen": self._seen, "by_module": dict(self._faults)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what ``state`` returned; an empty one is a new beginning."""
        self._in_a_row = state.get("in_a_row", 0)
        self._seen = state.get("seen", 0)
        self._faults = Counter(state.get("by_module", {}))

    def share(self, states: Sequence[dict[str, Any]]) -> None:
        """Take over what any rank has counted.

        Args:
            states: those of all ranks, this one's among them.
        """
        by_module = Counter[str]()
        for state in states:
            by_module |= Counter(state["by_module"])
        largest = {name: max(state[name] for state in states) for name in ("in_a_row", "seen")}
        self.load_state({**largest, "by_module": by_module})

    def _answer(self) -> None:
        explanation = self._log.explanation()
        assert explanation is not None
        if not explanation.needs_help:
            logger.info(explanation.text)
            return
        self._in_a_row += 1
        raises = self._policy.on_nonfinite == "raise" and self._in_a_row >= self._policy.raise_after
        text = explanation.text
        self._seen += explanation.cause.replayable
        if explanation.cause.replayable and (
            self._seen <= FIRST_REPLAYS or _is_power_of_two(self._seen)
        ):
            report, fault = self.replay()
            self._reported = explanation, report
            text += f"\n{report}"
            if fault is not None and self._policy.on_nonfinite == "heal":
                text += self._count(fault)
        elif explanation.cause.replayable:
            text += f" Fault {self._seen}: only those at powers of two run again by themselves now."
        if raises:
            raise NonFiniteError(text)
        news = _is_power_of_two(self._in_a_row) or "Healed" in text
        logger.log(logging.WARNING if news else logging.INFO, text)

    def explain(self, replay: bool | Callable[[], Any]) -> str:
        """Return the cause of the last skip, with the report of a replay if there is one.

        Args:
            replay: run the batch again now; a function: run that.
        """
        if replay is not False:
            self._log.reconsider(functools.partial(self._in_fp32, replay))
        explanation = self._log.explanation()
        drift = self._log.drift()
        if explanation is None:
            found = [drift] if drift else []
            runs_again = callable(replay) or (replay and self._forwards.recent)
            found += [self.replay(replay)[0]] if runs_again else [self._vanished]
            return "\n".join(["No step was skipped.", *filter(None, found)])
        return self._told(explanation, replay) + (f"\nThen {drift}" if drift else "")

    def _told(self, explanation: Explanation, replay: bool | Callable[[], Any]) -> str:
        if explanation.cause is Cause.DIVERGENCE:  # no operation is to blame
            return explanation.text
        if replay is not False:
            return f"{explanation.text}\n{self.replay(replay)[0]}"
        of, report = self._reported
        if of is None or of.cause != explanation.cause:
            return explanation.text + explanation.hint
        earlier = "" if of is explanation else "Of an earlier one, when it ran again: "
        return f"{explanation.text}\n{earlier}{report}"

    def in_fp32(self, batches: Sequence[Snapshot]) -> Fp32Run | None:
        """Return what forwards give in FP32; None: they cannot run again."""
        return self._in_fp32(True, batches)

    def _in_fp32(
        self, replay: bool | Callable[[], Any], batches: Sequence[Snapshot]
    ) -> Fp32Run | None:
        runs = [replay] if callable(replay) else [b.run for b in batches]
        if not runs:
            return None
        try:
            results = [
                t for run in runs for t in result_of(self._models, run, self._trials.in_fp32())
            ]
            loss = sum(map(float, results)) if all(t.numel() == 1 for t in results) else None
            return Fp32Run(all(map(is_finite, results)), loss)
        except Exception:  # the user's code raised: growth alone has to tell
            return None

    def replay(self, replay: bool | Callable[[], Any] = True) -> tuple[str, FaultReport | None]:
        """Run the forwards of the last skip again, where none was skipped the last ones.

        Args:
            replay: a function to run instead; else True.

        Returns:
            the report in words, and the fault if one was found.
        """
        if callable(replay):
            return self._search([(replay, {})])
        if self._log.last is None:
            return self._search([(b.run, {"backward": False}) for b in self._forwards.recent])
        return self._search([(b.run, _known(b)) for b in self._log.batches])

    def _search(self, runs: Sequence[Rerun]) -> tuple[str, FaultReport | None]:
        if not runs:
            return (
                "Not replayed: no forward led to it that could be run again (a compiled one "
                "leaves no trace).",
                None,
            )
        vanished = ""
        for function, known in runs:
            again = functools.partial(
                find_fault,
                self._models,
                function,
                dtype=self._policy.dtype,
                scale=self._log.last_scale,
                **known,
            )
            try:
                fault = again(harmless=True)
            except BatchGoneError as error:
                return f"Not replayed: {error}, or give a function: {_BY_FUNCTION}.", None
            except Exception as error:  # the user's code raised: training goes on without a report
                return f"The replay failed: {type(error).__name__}: {error}", None
            if fault is not None and fault.harmless:
                vanished = vanished or str(self._compared(fault, function))
            elif fault is not None:
                fault = dataclasses.replace(fault, remedy=self._remedy(fault, again))
                if fault.silent:
                    fault = self._compared(fault, function)
                return str(fault), fault
        if self._log.last is None and vanished:
            return vanished, None
        return "\n".join(filter(None, [self._nothing_found(runs), vanished])), None

    def _compared(self, fault: FaultReport, run: Callable[[], Any]) -> FaultReport:
        """Return the report with what FP32 gives beside it, where that can run."""
        try:
            half = result_of(self._models, run, contextlib.nullcontext())
            full = result_of(self._models, run, self._trials.in_fp32())
            pairs = [(a.double(), b.double()) for a, b in zip(half, full, strict=True)]
            by = max(amax(torch.where(a == b, 0, a - b)) for a, b in pairs)
            return dataclasses.replace(fault, difference=(by, max(amax(b) for _, b in pairs)))
        except Exception:  # the user's code raised, or there is no memory: nothing is said of it
            return fault

    def _remedy(self, fault: FaultReport, again: Callable[..., Any]) -> Remedy | None:
        """Return what cures a fault, tried once for each kind and module."""
        key = fault.kind, fault.module
        if key not in self._remedies:
            try:
                self._remedies[key] = remedy_of(
                    fault, lambda around: again(around=around), self._trials
                )
            except Exception:  # the user's code raised, or there is no memory: nothing is promised
                return None
        return self._remedies[key]

    def _nothing_found(self, runs: Sequence[Rerun]) -> str:
        last = self._log.last
        if last is None:
            nothing = "Run again, nothing overflows, nor does any overflow vanish on the way"
            if not any("backward" in known for _, known in runs):  # a function was given
                return f"{nothing}."
            only = "the backward runs only for a function that computes the loss"
            return f"{nothing} ({only}: {_BY_FUNCTION})."
        ran_forward_only = all(known.get("grad_outputs", ()) is None for _, known in runs)
        if last.cause.scale_moves and ran_forward_only:
            return _SCALE.format(scale=last.skip.scale, call=_BY_FUNCTION)
        if any(known.get("backward") is False for _, known in runs):
            return _IN_THE_LOSS
        healed = f" Healed since: {', '.join(map(repr, self._healed))}." if self._healed else ""
        elsewhere = "If the loss is computed outside of the model, look there."
        return f"{NOT_REPRODUCED}.{healed} {elsewhere}"

    def write_bundle(self, folder: str | Path) -> Path:
        """Write what it takes to run the failing batch of the last skip again elsewhere.

        Raises:
            RuntimeError: there is no such batch.
        """
        self._log.collect(wait=True)
        if not self._log.batches:
            raise RuntimeError(
                "write_bundle: expected a failing batch, got none: no step was skipped whose "
                "forward could run again"
            )
        _, fault = self.replay()
        snapshot = self._log.batches[-1]
        return write_bundle(folder, fault, snapshot, self._policy)

    def _count(self, fault: FaultReport) -> str:
        module = fault.module
        if module is None or fault.kind not in CURED_BY_FP32:
            return ""
        self._faults[module] += 1
        if self._faults[module] != HEAL_AFTER:
            return ""
        self._heal(module)
        self._healed.append(module)
        self._seen = 0
        return (
            f"\nHealed: {module or 'the model'} computes in FP32 from now on, after {HEAL_AFTER} "
            f"faults there; amp.unheal({module!r}) undoes it."
        )


def _is_power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


_BY_FUNCTION = "amp.explain(replay=lambda: criterion(model(x), y))"
_SCALE = (
    "Its forward is finite: gradients overflowed at loss scale {scale:g}, and the next lower scale "
    "is tried at the next step. That needs no explanation unless it comes often; {call}, or "
    "on_nonfinite='explain', names the operation and the scale at which it fits."
)
_IN_THE_LOSS = (
    "Run again, the model's output is finite, but the gradient that came back to it was not: look "
    "in the loss, which is computed from it outside of the model."
)


def _known(batch: Snapshot) -> dict[str, Any]:
    """Return what ``find_fault`` can make use of.

    Gradients that came in bad say nothing about the model's backward.
    """
    grads = batch.grad_outputs
    if grads is not None and not all(g is None or bool(torch.isfinite(g).all()) for g in grads):
        return {"expected": batch.outputs, "backward": False}
    return {"expected": batch.outputs, "grad_outputs": grads}
