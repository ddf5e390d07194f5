"""The response to a skip, by ``on_nonfinite``: explain, heal or raise the fault."""

import logging
from collections.abc import Callable
from typing import Any

from tritonamp.diagnosis.batches import Forwards
from tritonamp.diagnosis.fault_counts import HEAL_AFTER, FaultCounts, is_power_of_two
from tritonamp.diagnosis.log import NonFiniteError, StepLog
from tritonamp.diagnosis.remedies import CURED_BY_FP32
from tritonamp.diagnosis.replay import FaultReport
from tritonamp.diagnosis.replays import Fp32Runs, Replays
from tritonamp.diagnosis.skips import Cause, Explanation
from tritonamp.policy import Policy

logger = logging.getLogger("tritonamp")


class Response:
    """Carries out ``policy.on_nonfinite`` for each skip.

    Args:
        policy: the policy of the Amp.
        log: the log, which knows the cause of the last skip.
        heal: makes the module of a name compute in FP32.
        forwards: the last forwards.
        replays: runs forwards again.
        fp32_runs: runs forwards again in FP32.

    Attributes:
        counts: the counts of faults so far.
    """

    def __init__(
        self,
        policy: Policy,
        log: StepLog,
        heal: Callable[[str], None],
        forwards: Forwards,
        replays: Replays,
        fp32_runs: Fp32Runs,
    ) -> None:
        self._policy = policy
        self._log = log
        self._heal = heal
        self._forwards = forwards
        self._replays = replays
        self._fp32_runs = fp32_runs
        self._reported: tuple[Explanation | None, str] = (None, "")  # the last replay, and of what
        self._vanished = ""  # what was found in a good batch
        self.counts = FaultCounts()
        forwards.holds_recent = policy.on_nonfinite in ("explain", "heal")

    def __call__(self, skipped: bool) -> None:
        """Carry out the policy's response to a decision.

        Args:
            skipped: whether it was a skip.

        Raises:
            NonFiniteError: under "raise", where a lower scale cannot help.
        """
        if skipped:
            self._answer()
            return
        self.counts = self.counts._replace(in_a_row=0)
        if self._forwards.holds_recent:
            self._find_vanished()

    def _find_vanished(self) -> None:
        """Run one good batch again, to find an overflow that became a wrong finite number."""
        self._forwards.holds_recent = False
        batches, self._forwards.recent = self._forwards.recent, []
        report, fault = self._replays.replay_forwards(batches)
        if fault is not None:
            self._vanished = report
            logger.warning("no step was skipped, but %s", report)

    def _answer(self) -> None:
        explanation = self._log.explanation()
        assert explanation is not None
        if not explanation.needs_help:
            logger.info(explanation.text)
            return
        replayable = explanation.cause.replayable
        counts = self.counts = self.counts.with_fault(replayable)
        text = explanation.text
        if replayable and counts.wants_replay:
            report, fault = self._replays.replay()
            self._reported = explanation, report
            text += f"\n{report}"
            if fault is not None and self._policy.on_nonfinite == "heal":
                text += self._heal_after_faults(fault)
        elif replayable:
            text += (
                f" Fault {counts.seen}: only those at powers of two run again by themselves now."
            )
        if self._policy.on_nonfinite == "raise" and counts.in_a_row >= self._policy.raise_after:
            raise NonFiniteError(text)
        is_news = is_power_of_two(counts.in_a_row) or "Healed" in text
        logger.log(logging.WARNING if is_news else logging.INFO, text)

    def _heal_after_faults(self, fault: FaultReport) -> str:
        """Heal the module of a fault if it is the second there; return this in words, or ""."""
        module = fault.module
        if module is None or fault.kind not in CURED_BY_FP32:
            return ""
        self.counts = self.counts.with_module(module)
        if self.counts.by_module[module] != HEAL_AFTER:
            return ""
        self._heal(module)
        self._replays.healed.append(module)
        self.counts = self.counts._replace(seen=0)
        return (
            f"\nHealed: {module or 'the model'} computes in FP32 from now on, after {HEAL_AFTER} "
            f"faults there; amp.unheal({module!r}) undoes it."
        )

    def explain(self, replay: bool | Callable[[], Any]) -> str:
        """Return the cause of the last skip, with the report of a replay if there is one.

        Args:
            replay: run the batch again now; a function: run that.
        """
        if callable(replay):
            self._log.reconsider(lambda batches: self._fp32_runs.of_functions([replay]))
        elif replay:
            self._log.reconsider(self._fp32_runs.of_batches)
        explanation = self._log.explanation()
        drift = self._log.drift()
        if explanation is None:
            found = [drift] if drift else []
            runs_again = callable(replay) or (replay and self._forwards.recent)
            found += [self._replays.replay(replay)[0]] if runs_again else [self._vanished]
            return "\n".join(["No step was skipped.", *filter(None, found)])
        return self._with_report(explanation, replay) + (f"\nThen {drift}" if drift else "")

    def _with_report(self, explanation: Explanation, replay: bool | Callable[[], Any]) -> str:
        if explanation.cause is Cause.DIVERGENCE:  # no operation is to blame
            return explanation.text
        if replay is not False:
            return f"{explanation.text}\n{self._replays.replay(replay)[0]}"
        of, report = self._reported
        if of is None or of.cause != explanation.cause:
            return explanation.text + explanation.hint
        earlier = "" if of is explanation else "Of an earlier one, when it ran again: "
        return f"{explanation.text}\n{earlier}{report}"
