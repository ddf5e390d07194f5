"""The response to a skip, by ``on_nonfinite``: explain, heal or raise."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tritonamp.casts.healing import Healing
from tritonamp.diagnosis.fault_counts import FIRST_REPLAYS, HEAL_AFTER, FaultCounts, is_power_of_two
from tritonamp.diagnosis.healed_tiers import heal, next_tier
from tritonamp.diagnosis.joint import Finding, explanation_of_all, finding_of_all
from tritonamp.diagnosis.kept_buffers import KeptBuffers
from tritonamp.diagnosis.live_faults import STEPS, LiveFaults
from tritonamp.diagnosis.log import StepLog
from tritonamp.diagnosis.remedies import NOT_OF_CODE
from tritonamp.diagnosis.replay import FaultReport
from tritonamp.diagnosis.replay.faults import BY_FUNCTION, listed
from tritonamp.diagnosis.replays import Replays
from tritonamp.diagnosis.skips import Cause, Explanation
from tritonamp.distributed.replay_ranks import ReplayRanks
from tritonamp.kernels.device import rank
from tritonamp.kernels.outliers import SIZE
from tritonamp.policy import Policy
from tritonamp.step.forwards import Forwards
from tritonamp.step.outcome import NonFiniteError

logger = logging.getLogger("tritonamp")

_WATCHES = (
    f"The next steps run watched, from the forward to the loss, until one has a fault: {STEPS} at "
    "most."
)
_NOT_AGAIN = (
    "Run again, the model shows no fault. The last fault that was found, at step {step}, is"
)
_SAME_AGAIN = (
    "reproduced: run again, the batch gives the same result, so look at the batch and the weights."
)
_NO_BATCH = f"Not replayed: no batch of a step is known. {BY_FUNCTION} runs a function."
_SET_BACK = "Buffers that became inf or NaN were set back to their values before this step"


class _Shown(NamedTuple):
    """The faults of the last full report.

    Attributes:
        faults: facts by which to recognise the same faults.
        headings: headings of their reports.
        step: number of the step.
    """

    faults: Sequence[Any] = ()
    headings: str = ""
    step: int = 0

    @classmethod
    def of(cls, found: Finding, step: int) -> "_Shown":
        """Return the faults of a finding."""
        # edits are left out: a factor in them depends on the batch
        cures = [f.remedy and f.remedy._replace(edits=(), vain=(), costs="") for f in found.faults]
        faults = [
            (f.kind, f.event.place, f.event.phase, cure, f.rank)
            for f, cure in zip(found.faults, cures, strict=True)
        ]
        return cls(faults, "; ".join(fault.heading for fault in found.faults), step)


def _advised(explanation: Explanation, found: Finding) -> Explanation:
    """Return an explanation with the advice that a report does not replace."""
    if found.clears_code:
        return explanation.without_advice()
    return explanation.with_place() if found.faults else explanation


@dataclasses.dataclass(eq=False, repr=False)
class Response:
    """Carries out ``policy.on_nonfinite`` for each skip.

    Ranks that train together have taken one decision, so all ranks come here at the same step.
    They combine their findings, and use only the combined one. So all ranks report, heal and raise
    the same.
    """

    _policy: Policy
    _log: StepLog
    _healing: Healing
    _forwards: Forwards
    _replays: Replays
    _ranks: ReplayRanks
    _buffers: KeptBuffers
    _live: LiveFaults
    counts: FaultCounts = dataclasses.field(default_factory=FaultCounts)  # of the faults so far
    _long_text: Explanation | None = None  # whose text was written whole
    _reported: tuple[Explanation | None, Finding] = (None, Finding(""))  # last skip with a report
    _shown: _Shown = dataclasses.field(default_factory=_Shown)
    _unexplained: int = 0  # faults that a replay did not show
    _restored: tuple[int, str] = (0, "")  # the last step with restored buffers, and a sentence
    _healed: tuple[int, Sequence[str]] = (0, ())  # the last step whose skip has healed, and names
    _gradients_of: Sequence[str] = ()  # modules with FP32 results at the last look at gradients
    _overflow_ran: int = -SIZE  # the last step with a scale overflow that ran again
    _vanished: str = ""  # report about an overflow in the first good batch

    def __post_init__(self) -> None:
        self._forwards.holds_recent = self._policy.on_nonfinite in ("explain", "heal")

    def __call__(self, skipped: bool) -> None:
        """Respond to a decision: to skip, or to step.

        Raises:
            NonFiniteError: under "raise", where a lower scale cannot help.
        """
        self._buffers.decided()
        watched, fault = self._live.decided()
        if skipped:
            self._answer(watched, fault)
            return
        self.counts = self.counts._replace(in_a_row=0)
        if self._forwards.holds_recent and not self._ranks.may_be_missing:
            self._find_vanished()

    def _find_vanished(self) -> None:
        """Run one good batch again, to find an overflow that became a wrong finite number."""
        self._forwards.holds_recent = False
        batches, self._forwards.recent = self._forwards.recent, []
        found = self._replays.replay_forwards(batches)
        if found.faults:
            self._vanished = found.report
            logger.warning("no step was skipped, but %s", found.report)

    def _answer(self, watched: bool, fault: FaultReport | None) -> None:
        """Respond to a skip.

        Args:
            watched: whether the step ran watched.
            fault: fault that the watch has found.
        """
        restored = self._restore_buffers()  # before the batch runs again
        mine = self._log.explanation()
        if restored and mine is not None:
            self._restored = mine.skip.step, restored
        explanation = self._explained(mine)
        assert explanation is not None
        if not explanation.needs_help:
            if healed := self._next_tier(explanation):
                logger.warning(explanation.text + healed)
            else:
                self._run_again(explanation)
            return
        with self._ranks.alone() as hindrance:
            if not hindrance:
                explanation = self._explained(self._log.reconsidered(self._replays.run_in_fp32))
                assert explanation is not None
            if not explanation.needs_help:  # FP32 did not diverge
                logger.info(explanation.text)
                return
            replayable = explanation.cause.replayable
            counts = self.counts = self.counts.with_fault(replayable)
            runs_again = replayable and (watched or counts.wants_replay)
            text = explanation.text if runs_again else self._text_of(explanation)
            found = Finding("")
            if replayable and self._ranks.may_be_missing:
                text += " Nothing runs again inside of model.join(), where ranks may be missing."
            elif runs_again:
                found = self._found(watched, fault)
                if found.faults or found.clears_code:
                    explanation = _advised(explanation, found)
                    self._log.explain_by(explanation)
                text = explanation.with_report(self._report(explanation, found))
            elif replayable and counts.seen == FIRST_REPLAYS + 1:
                text = text.rstrip(".") + ". Of later faults, the 16th, 32nd, 64th... run again."
        if self._policy.on_nonfinite == "heal":
            text += self._heal_after_faults(found.faults)
        if self._policy.on_nonfinite == "raise" and counts.in_a_row >= self._policy.raise_after:
            raise NonFiniteError(text)
        is_news = is_power_of_two(counts.in_a_row) or "Healed" in text
        logger.log(logging.WARNING if is_news else logging.INFO, text)

    def _run_again(self, explanation: Explanation) -> None:
        """Report a skip that needs no help, unless its batch has other bits when it runs again.

        Overflows by which the scale finds its level do not run again: those before the first step,
        and those within 64 steps of one that did.
        """
        step, before = explanation.skip.step, explanation.skip.before
        is_scale = explanation.cause is Cause.SCALE and before > 0.0
        is_scale = is_scale and step - self._overflow_ran >= SIZE
        if is_scale:
            self._overflow_ran = step
        if self._ranks.may_be_missing or not (is_scale or explanation.cause is Cause.OUTLIER):
            self._log.say_expected(explanation, explanation.text)
            return
        found = self._replays.repeat(at_skip=True)
        if found.clears_code:
            self._reported = explanation, found
            logger.warning(_advised(explanation, found).with_report(found.report))
            return
        reproduced = found.repeat is not None and explanation.cause is Cause.OUTLIER
        if reproduced:
            found = found._replace(report=_SAME_AGAIN)
            self._reported = explanation, found
        text = explanation.with_report(found.report) if reproduced else explanation.text
        self._log.say_expected(explanation, text)

    def _text_of(self, explanation: Explanation) -> str:
        """Return the text of a skip; if skips in a row are alike, a reference to the first."""
        earlier = self._long_text or explanation
        in_this_row = 0 < explanation.skip.step - earlier.skip.step < self.counts.in_a_row
        can_refer = in_this_row and self._policy.on_nonfinite != "raise"
        if can_refer and explanation.repeats(earlier):
            return explanation.short_line(earlier)
        self._long_text = explanation
        return explanation.text

    def _explained(self, mine: Explanation | None) -> Explanation | None:
        """Return and store one explanation for all ranks; None: no rank skipped a step."""
        found = {r: one for r, one in self._ranks.gather(mine).items() if one is not None}
        if not found:
            return None
        explanation = explanation_of_all(found)
        step, restored = self._restored
        if step == explanation.skip.step and restored not in explanation.reason:
            explanation = explanation._replace(reason=explanation.reason + restored)
        self._log.explain_by(explanation)
        return explanation

    def _restore_buffers(self) -> str:
        """Restore buffers that the skipped forward made inf or NaN. Return a sentence, or ""."""
        found = self._ranks.gather(self._buffers.restore())
        names = list(dict.fromkeys(name for own in found.values() for name in own))
        if not names:
            return ""
        return f" {_SET_BACK}: {listed(names)}."

    def _found(self, watched: bool, fault: FaultReport | None) -> Finding:
        """Return the fault found in a watched step, else the findings of a replay.

        All ranks must call this together. Arguments are those of ``_answer``.
        """
        if watched:
            if fault is not None and self._ranks.several:
                fault = dataclasses.replace(fault, rank=rank())
            mine = Finding("") if fault is None else Finding(str(fault), [fault])
            found = finding_of_all(self._ranks.gather(mine))
            if found.faults:
                return found
        return self._replays.replay(at_skip=True)

    def _report(self, explanation: Explanation, found: Finding) -> str:
        """Return the report of a fault; if it repeats the last one, only its heading."""
        shown, live = self._shown, ""
        if found.clears_code:
            self._reported = explanation, found
            return found.report
        if not found.faults:
            self._unexplained += 1
            ran = any(self._ranks.gather(bool(self._log.batches)).values())
            if ran and is_power_of_two(self._unexplained) and self._live.arm():
                live = f"\n{_WATCHES}"
            if shown.faults:
                return f"{_NOT_AGAIN.format(step=shown.step)} {shown.headings}.{live}"
        self._reported = explanation, found
        now = _Shown.of(found, explanation.skip.step)
        if found.faults and shown.faults == now.faults and self._policy.on_nonfinite != "raise":
            return f"{now.headings}: as at step {shown.step}."
        self._shown = now
        return f"{found.report}{live}"

    def _next_tier(self, explanation: Explanation) -> str:
        """Heal modules with FP32 results in FP32 if their half gradients need too low a scale.

        Return a report in words, or "".
        """
        names = self._healing.with_results
        is_new = bool(names) and names != self._gradients_of
        if not is_new or explanation.cause is not Cause.SCALE or self._ranks.may_be_missing:
            return ""
        self._gradients_of = names
        return next_tier(self._healing, self._replays.replay().faults)

    def _heal_after_faults(self, faults: Sequence[FaultReport]) -> str:
        """Heal after each second fault of a module. Return a report in words, or ""."""
        found: dict[str, FaultReport] = {}
        for fault in faults:  # on several ranks, at the same step: one fault
            if fault.kind not in NOT_OF_CODE and fault.module is not None:
                found.setdefault(fault.module, fault)
        text, before = "", self._healing.tiers
        for module, fault in found.items():
            self.counts = self.counts.with_module(module)
            if self.counts.by_module[module] % HEAL_AFTER == 0:
                text += heal(self._healing, fault, module, self._replays.model_of(module))
        tiers = self._healing.tiers
        healed = [name or "the model" for name in tiers if tiers[name] is not before.get(name)]
        if healed:
            self.counts = self.counts._replace(seen=0)
        if healed and self._log.last is not None:
            self._healed = self._log.last.skip.step, healed
        return text

    def explain(self, replay: bool | Callable[[], Any]) -> str:
        """Return the cause of the last skip, and the report of a new or an earlier replay.

        All ranks replay together.
        """
        if replay is False:
            return self._told(self._log.explanation(), False)
        in_fp32 = functools.partial(self._replays.run_in_fp32, replay)
        with self._ranks.alone() as hindrance:
            mine = self._log.explanation() if hindrance else self._log.reconsidered(in_fp32)
            return self._told(self._explained(mine), replay)

    def _told(self, explanation: Explanation | None, replay: bool | Callable[[], Any]) -> str:
        drift = self._log.drift()
        if replay is not False:
            drift = next(filter(None, self._ranks.gather(drift).values()), "")
        if explanation is None:
            found = [drift] if drift else []
            held = bool(self._forwards.recent)
            runs_again = callable(replay) or (replay and any(self._ranks.gather(held).values()))
            found += [self._replays.replay(replay).report] if runs_again else [self._vanished]
            if replay is True and not any(found):
                found = [_NO_BATCH]
            told = "\n".join(["No step was skipped.", *filter(None, found)])
            return self._log.terms.told(told)
        return self._with_report(explanation, replay) + (f"\nThen {drift}" if drift else "")

    def _with_report(self, explanation: Explanation, replay: bool | Callable[[], Any]) -> str:
        if explanation.cause is Cause.DIVERGENCE:  # no operation is to blame
            return explanation.text
        of, last = self._reported
        fits = of is not None and of.cause is explanation.cause
        is_outlier = explanation.cause is Cause.OUTLIER and not callable(replay)
        # bits were compared with those of the first run, which is possible only at the skip
        compared = of is not None and of.skip.step == explanation.skip.step
        compared = compared and (is_outlier or last.clears_code)
        if replay is not False and (callable(replay) or not compared):
            found = self._replays.repeat() if is_outlier else self._replays.replay(replay)
            if is_outlier and not found.clears_code:
                return explanation.text  # nothing in it is inf or NaN
            # a fault of a watched step may be in the loss, which a replay of forwards does not run
            if found.faults or callable(replay) or not (fits and self._shown.faults):
                return _advised(explanation, found).with_report(found.report)
        if of is None or not fits:
            return explanation.text + explanation.hint
        earlier = "" if of.skip.step == explanation.skip.step else f"Of step {of.skip.step}:\n"
        told = _advised(explanation, last).with_report(f"{earlier}{last.report}")
        step, healed = self._healed
        if step == explanation.skip.step:
            told += f"\nHealed after this skip: {listed(healed)}."
        return told
