"""Run batches again, to find their fault, a remedy, and their result in FP32."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tritonamp.casts.healing import Healing
from tritonamp.diagnosis.divergence import Fp32Run
from tritonamp.diagnosis.joint import Finding, finding_of_all
from tritonamp.diagnosis.log import StepLog
from tritonamp.diagnosis.remedies import remedy_of
from tritonamp.diagnosis.repeats import Place, Repeat, repeat_of
from tritonamp.diagnosis.replay import FaultReport, Remedy
from tritonamp.diagnosis.replay.faults import BY_FUNCTION, NOT_REPRODUCED
from tritonamp.diagnosis.skips import Cause
from tritonamp.distributed.replay_ranks import ReplayRanks
from tritonamp.kernels.device import rank, widened
from tritonamp.names import prefixes
from tritonamp.policy import Policy
from tritonamp.step.forwards import Forwards
from tritonamp.step.snapshots import BatchGoneError, Snapshot
from tritonamp.watched.collectives import CollectiveError
from tritonamp.watched.ops import amax, is_finite

Rerun = tuple[Callable[[], Any], dict[str, Any]]
"""A function to run, and known facts of its run as keywords of ``find_fault``."""

_NOT_ALONE = "Not replayed: a batch would run again on each rank by itself, which takes {why}."
_NO_SEARCH = (
    "The last batch is gone, so it was not searched for overflows that vanish on the way: call "
    "this right after a step."
)
_NOTHING_TO_RUN = (
    "Not replayed: no forward of the enabled model is known. It was compiled, or only parts of the "
    f"model were called. {BY_FUNCTION} runs a function."
)
_SCALE = (
    "Its forward is finite: gradients overflowed at loss scale {scale:g}, and the next lower scale "
    "is tried at the next step. That needs no explanation unless it comes often; {call}, or "
    "on_nonfinite='explain', names the operation and the scale at which it fits."
)
_IN_THE_LOSS = (
    "Run again, the model's output is finite, but the gradient that came back to it was not. The "
    f"loss is computed from it outside of the model, and did not run again: {BY_FUNCTION} runs it, "
    "and names the operation."
)
_FINITE = "not reproduced: run again, the model's {ran} is finite."
_ELSEWHERE = (
    f"If the loss is computed outside of the model, it did not run again: {BY_FUNCTION} runs it."
)


@dataclasses.dataclass(eq=False, repr=False)
class Replays:
    """Runs the forwards of the last skip, or a function, again, and reports what is wrong.

    Ranks that train together each run their own forwards, all at the same step, and share one
    report.
    """

    _models: list[nn.Module]  # the enabled ones
    _policy: Policy
    _log: StepLog
    _forwards: Forwards
    _healing: Healing
    _ranks: ReplayRanks
    # tried remedies of recorded batches, by kind of fault, whether the backward ran, the place,
    # size and samples of the fault, and the healed modules
    _remedies: dict[tuple[Any, ...], Remedy | None] = dataclasses.field(default_factory=dict)

    def model_of(self, module: str) -> str:
        """Return the name of the enabled model that contains a module; "" for an only model."""
        front = next((p for p in prefixes(self._models) if f"{module}.".startswith(p)), "")
        return front.rstrip(".")

    def run_in_fp32(self, replay: bool | Callable[[], Any] = True) -> Fp32Run | None:
        """Return the result of the forwards of the last skip, or of a function, in FP32.

        None: there is nothing to run, or a run raised.
        """
        runs = [replay] if callable(replay) else [batch.run for batch in self._log.batches]
        if not runs:
            return None
        try:
            in_fp32 = self._healing.in_fp32
            results = [t for run in runs for t in self._result_of(run, in_fp32())]
            loss = sum(map(float, results)) if all(t.numel() == 1 for t in results) else None
            return Fp32Run(all(map(is_finite, results)), loss)
        except Exception:  # the user's code raised: growth alone decides
            return None

    def replay(self, replay: bool | Callable[[], Any] = True, at_skip: bool = False) -> Finding:
        """Run a function again, else the forwards of the last skip, else the last forwards of all.

        All ranks must call this together.

        Args:
            replay: function to run; True: run forwards.
            at_skip: whether nothing has changed since the skip, so that bits can be compared with
                those of the first run.
        """
        if callable(replay):
            return self._find_together([(replay, {})])
        if self._log.last is None:
            return self.replay_forwards(self._forwards.recent)
        batches = self._log.batches
        facts = [(batch.run, _facts_of(batch)) for batch in batches]
        return self._find_together(facts, lambda: self._repeat(batches, at_skip))

    def repeat(self, at_skip: bool = False) -> Finding:
        """Run the forwards of the last skip again, and compare bits only.

        All ranks must call this together. ``at_skip`` is as in ``replay``.
        """
        with self._ranks.alone() as hindrance:
            mine = None if hindrance else self._repeat(self._log.batches, at_skip)
        words = "" if mine is None else mine.words
        return finding_of_all(self._ranks.gather(Finding(words, (), mine)))

    def _repeat(self, batches: Sequence[Snapshot], at_skip: bool) -> Repeat | None:
        """Return the verdict on the bits of batches; None: it is not known, or a run raised."""
        last = self._log.last
        if last is None or not batches:
            return None
        forwards = self._forwards if at_skip else None
        place = Place(rank(), self._ranks.members)
        try:
            return repeat_of(self._models, batches, last.skip, place, forwards)
        except Exception:  # the user's code raised, a batch is gone, or there is no memory
            return None

    def replay_forwards(self, batches: Sequence[Snapshot]) -> Finding:
        """Run forwards again, without their backward. All ranks must call this together."""
        return self._find_together([(batch.run, {"backward": False}) for batch in batches])

    def _find_together(
        self, runs: Sequence[Rerun], repeat: Callable[[], Repeat | None] = lambda: None
    ) -> Finding:
        """Return the findings of all ranks, each in its own runs. A rank may have no run.

        Args:
            runs: functions to run.
            repeat: function that compares bits, for a rank without a fault.
        """
        with self._ranks.alone() as hindrance:
            mine = Finding(_NOT_ALONE.format(why=hindrance)) if hindrance else self._find(runs)
            if not (hindrance or mine.faults):
                mine = mine._replace(repeat=repeat())
                if mine.clears_code and mine.repeat is not None:
                    mine = mine._replace(report=mine.repeat.words)
        return finding_of_all(self._ranks.gather(mine))

    def _find(self, runs: Sequence[Rerun]) -> Finding:
        from tritonamp.diagnosis.replay.search import find_fault  # here, because few runs replay

        if not runs:
            return Finding(_NOTHING_TO_RUN)
        vanished = ""
        for function, facts in runs:
            find_again = functools.partial(
                find_fault,
                self._models,
                function,
                scale=self._log.scale(),
                **facts,
            )
            try:
                fault = find_again(harmless=True)
            except (BatchGoneError, CollectiveError) as error:
                if self._log.last is None and isinstance(error, BatchGoneError):
                    return Finding(_NO_SEARCH)
                return Finding(f"Not replayed: {error}, or give a function: {BY_FUNCTION}.")
            except Exception as error:  # the user's code raised: training goes on without a report
                return Finding(f"The replay failed: {type(error).__name__}: {error}")
            if fault is not None and facts and self._is_of_the_loss(fault):
                continue
            if fault is not None and self._ranks.several:
                fault = dataclasses.replace(fault, rank=rank())
            if fault is not None and fault.harmless:
                vanished = vanished or str(self._compared(fault, function))
            elif fault is not None:
                remedy = self._remedy(fault, find_again, is_recorded=bool(facts))
                if remedy is not None and not fault.has_backward:
                    remedy = remedy._replace(forward_only=True)
                again = bool(facts) and self._log.last is not None and not fault.silent
                fault = dataclasses.replace(fault, remedy=remedy, reproduced=again)
                if fault.silent:
                    fault = self._compared(fault, function)
                return Finding(str(fault), [fault])
        if vanished and self._log.last is None:
            return Finding(vanished)
        return Finding("\n".join(filter(None, [self._nothing_found(runs), vanished])))

    def _is_of_the_loss(self, fault: FaultReport) -> bool:
        """Return whether a fault of a backward hides that the loss was inf or NaN before it."""
        last = self._log.last
        return last is not None and last.cause is Cause.FORWARD and fault.event.phase == "backward"

    def _compared(self, fault: FaultReport, run: Callable[[], Any]) -> FaultReport:
        """Return the report with the difference from FP32's result, where FP32 can run."""
        try:
            half = self._result_of(run, contextlib.nullcontext())
            full = self._result_of(run, self._healing.in_fp32())
            pairs = [(widened(a), widened(b)) for a, b in zip(half, full, strict=True)]
            by = max(amax(torch.where(a == b, 0, a - b)) for a, b in pairs)
            return dataclasses.replace(fault, difference=(by, max(amax(b) for _, b in pairs)))
        except Exception:  # the user's code raised, or there is no memory: nothing is said of it
            return fault

    def _result_of(
        self, run: Callable[[], Any], around: AbstractContextManager[None]
    ) -> list[Tensor]:
        from tritonamp.diagnosis.replay.search import result_of

        return result_of(self._models, run, around)

    def _remedy(
        self, fault: FaultReport, find_again: Callable[..., Any], is_recorded: bool
    ) -> Remedy | None:
        """Return the remedy for a fault.

        For recorded batches it is tried once, and again after a heal. A function is always run.
        """
        event, healed = fault.event, self._healing.tiers.items()
        # a factor that made one product fit is too large for a product of twice the size
        multiple = event.multiple or 1.0
        doublings = math.ceil(math.log2(multiple)) if 1 < multiple < math.inf else 0
        key = fault.kind, fault.has_backward, str(event.place), doublings, *event.samples, *healed
        if is_recorded and key in self._remedies:
            return self._remedies[key]
        try:
            remedy = remedy_of(fault, find_again, self._healing)
        except Exception:  # the user's code raised, or there is no memory: nothing is promised
            return None
        if is_recorded:
            self._remedies[key] = remedy
        return remedy

    def _nothing_found(self, runs: Sequence[Rerun]) -> str:
        last = self._log.last
        if last is None:
            nothing = "Run again, nothing overflows, nor does any overflow vanish on the way"
            if not any("backward" in facts for _, facts in runs):  # a function was given
                return f"{nothing}."
            only = "the backward runs only for a function that computes the loss"
            return f"{nothing} ({only}: {BY_FUNCTION})."
        ran_forward_only = all(facts.get("grad_outputs", ()) is None for _, facts in runs)
        if last.cause is Cause.SCALE and ran_forward_only:
            return _SCALE.format(scale=last.skip.scale, call=BY_FUNCTION)
        if any(facts.get("backward") is False for _, facts in runs):
            return _IN_THE_LOSS
        names = ", ".join(map(repr, self._healing.names))
        healed = f" Healed modules: {names}." if names else ""
        if any(facts for _, facts in runs):  # a recorded forward, without its loss
            in_the_loss = last.cause is Cause.FORWARD
            ran = "forward" if ran_forward_only or in_the_loss else "forward and backward"
            return f"{_FINITE.format(ran=ran)}{healed} {_ELSEWHERE}"
        return f"{NOT_REPRODUCED}.{healed}"

    def write_bundle(self, folder: str | Path) -> Path:
        """Write a folder from which the failing batch of the last skip can run again elsewhere.

        All ranks must call this together. The rank whose batch failed writes: the one that the
        report names, else the first rank at fault that has a batch.

        Raises:
            RuntimeError: there is no such batch, or another rank could not write.
        """
        from tritonamp.diagnosis.replay.bundles import write_bundle

        self._log.collect(wait=True)
        batches = self._log.batches
        number = self._models.index(batches[-1].model) if batches else None
        failed = {r: n for r, n in self._ranks.gather(number).items() if n is not None}
        if not failed:
            raise RuntimeError(
                "write_bundle: expected a failing batch, got none: no step was skipped whose "
                "forward could run again"
            )
        fault = next(iter(self.replay().faults), None)
        last = self._log.last
        to_blame = [fault.rank] if fault is not None else last.skip.at_fault if last else []
        writer = next((r for r in to_blame if r in failed), next(iter(failed)))
        state = self._ranks.full_state(self._models[failed[writer]], keep=rank() == writer)
        error = None
        if rank() == writer:
            try:
                skip = "" if last is None else last.text
                scale = self._log.scale()
                write_bundle(folder, fault, batches[-1], self._policy, state, skip, scale)
            except Exception as raised:  # the others wait to be told
                error = raised
        told = self._ranks.gather(None if error is None else str(error))[writer]
        if error is not None:
            raise error
        if told is not None:
            raise RuntimeError(f"write_bundle: rank {writer} could not write: {told}")
        return Path(folder)


def _facts_of(batch: Snapshot) -> dict[str, Any]:
    """Return the facts of a batch's run that ``find_fault`` can use.

    Gradients that arrived at outputs as inf or NaN say nothing about the model's backward.
    """
    grads = batch.grad_outputs
    if grads is not None and not all(g is None or bool(torch.isfinite(g).all()) for g in grads):
        return {"expected": batch.outputs, "backward": False}
    return {"expected": batch.outputs, "grad_outputs": grads}
