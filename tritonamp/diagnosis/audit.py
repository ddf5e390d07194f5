"""Audits: one backward runs twice, and the bits of its gradients are compared before the step."""

import contextlib
import logging
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tritonamp.diagnosis.audit_passes import CLEAN, Finding, Passes
from tritonamp.diagnosis.replay.faults import listed
from tritonamp.diagnosis.skips import ranks_in_words
from tritonamp.kernels.device import is_capturing
from tritonamp.kernels.grad_stats import checksums
from tritonamp.names import parameter_names
from tritonamp.step.decision import Decision
from tritonamp.step.decision_log import DecisionLog
from tritonamp.step.pending import PendingDecisions

logger = logging.getLogger("tritonamp")

KINDS = "clean", "unclear", "suspected"
_NOT_SEEN = (
    "amp.audit has seen no backward: those of scaler.scale(loss) and loss.backward() are not "
    "audited. Write amp.backward(loss) instead"
)


class Audit:
    """Runs the backward of every ``every``-th step twice.

    ::

        a loss of an audited step   its backward runs into other tensors first, then as usual
        its decision                ranks exchange their findings; all ranks skip, or none

    The first step is audited, and each ``every`` steps after it. Optimizers that take turns have
    turns of their own.

    Args:
        every: number of steps from one audit to the next.
        models: enabled models.
        pending: decisions that optimizers wait for.
        log: log of all decisions.
        counts: number of audits by kind, which is updated.
        backend: "auto", "triton" or "eager".

    Attributes:
        every: the argument.
        keeps_graph: whether the caller of the next block keeps the graph while ``is_running``.
        is_running: whether a block with an audited backward is open.
    """

    def __init__(
        self,
        every: int,
        models: Sequence[torch.nn.Module],
        pending: PendingDecisions,
        log: DecisionLog,
        counts: Counter[str],
        backend: str,
    ) -> None:
        self.every = every
        self.keeps_graph = self.is_running = False
        self._models, self._pending, self._log = models, pending, log
        self._counts, self._backend = counts, backend
        # by scaler and optimizers: the last decision, and the number of decisions
        self._turns: dict[Any, tuple[weakref.ref[Decision], int]] = {}
        self._found: weakref.WeakKeyDictionary[Decision, list[Finding]] = (
            weakref.WeakKeyDictionary()
        )
        self._said: set[str] = set()
        self._decisions = 0  # without an audit

    @contextlib.contextmanager
    def around(
        self, opened: AbstractContextManager[Tensor], feeds: Sequence[Optimizer]
    ) -> Iterator[Tensor]:
        """Yield the scaled loss of a block, in which its backward runs, and audit the backward.

        Args:
            opened: block of ``PendingDecisions.open_decision``.
            feeds: optimizers that the loss feeds.

        Raises:
            RuntimeError: a CUDA graph is captured.
        """
        keeps_graph, self.keeps_graph = self.keeps_graph, False
        with opened as scaled:
            if is_capturing(scaled.device):
                raise RuntimeError(
                    "amp.audit: a CUDA graph cannot compare bits on the host: call "
                    "amp.audit(every=None) before the capture"
                )
            decision: Any = self._pending.weights[feeds[0]].decision
            if scaled.grad_fn is None or not self._is_due(decision, feeds):
                yield scaled
                return
            found = self._found.setdefault(decision, [])
            passes, reason = self._begun(scaled, decision, keeps_graph)
            if passes is None:
                found.append(Finding("unclear", reason, reason))
                yield scaled
                return
            self.is_running = True
            try:
                with passes.real():
                    yield scaled
            finally:
                self.is_running = False
            found.append(passes.finding())

    def _is_due(self, decision: Decision, feeds: Sequence[Optimizer]) -> bool:
        """Return whether the losses of ``decision`` are audited."""
        key = decision.scaler, *feeds
        last, number = self._turns.get(key, (None, -1))
        if last is None or last() is not decision:
            number += 1
            self._turns[key] = weakref.ref(decision), number
        if number % self.every:
            return False
        if any(map(_waits_for_first, self._pending.ranks.wrappers)):
            self._turns[key] = weakref.ref(decision), number - 1  # the next one, then
            return False
        return True

    def _begun(
        self, scaled: Tensor, decision: Decision, keeps_graph: bool
    ) -> tuple[Passes | None, str]:
        """Run the passes before the real one; return None and a reason if they are impossible."""
        names = parameter_names(self._models)
        several = self._pending.ranks.several
        device = decision.scale.device
        passes = Passes(scaled, names, device, self._backend, self._models, several)
        reason = passes.why_not()
        if reason:
            return None, reason
        try:
            passes.run_ahead(keeps_graph)
        except Exception as error:
            # the real backward raises it again, unless only two backwards are impossible
            first = (str(error) or type(error).__name__).splitlines()[0]
            return None, f"the backward cannot run twice: {first}"
        return passes, ""

    def before_decision(self, decision: Decision) -> None:
        """Veto the step on all ranks if the bits of an audited backward differ on one rank."""
        found = self._found.pop(decision, None)
        if found is None:
            self._decisions += 1
            # the backward of the first decision may have run before ``amp.audit``
            if self._decisions == 2 and not self._turns:
                logger.warning(_NOT_SEEN)
            return
        ranks = self._pending.ranks
        worst = max(found, key=lambda finding: KINDS.index(finding.kind), default=CLEAN)
        by_rank = ranks.gather((tuple(worst), self._state_sums(decision)))
        findings = {rank: Finding(*told) for rank, (told, _) in by_rank.items()}
        kind = max((f.kind for f in findings.values()), key=KINDS.index)
        self._counts[kind] += 1
        self._compare_states({rank: state for rank, (_, state) in by_rank.items()})
        if kind == "unclear":
            first = next(f for f in findings.values() if f.kind == kind)
            self._say_once(first.topic, "amp.audit gives no verdict: %s", first.reason)
        if kind == "suspected":
            text = _suspicion(findings, ranks.several)
            # where ranks may be missing there is no agreement, so that one would skip alone
            skips = not (ranks.several and ranks.may_be_missing)
            step = sum(self._log.counts().values()) + 1 if self._log.rule is not None else 1
            end = "The step is skipped." if skips else "The step is taken: ranks may be missing."
            logger.warning("step %s: %s %s", step, text, end)
            if skips:
                decision.veto(True, text)

    def _say_once(self, topic: str, text: str, reason: str) -> None:
        if topic not in self._said:
            self._said.add(topic)
            logger.warning(text, reason)

    def _state_sums(self, decision: Decision) -> dict[str, int]:
        """Return checksums of masters and optimizer state that should be the same on all ranks."""
        ranks = self._pending.ranks
        apart = ranks.sharding is not None or ranks.staged or ranks.may_be_missing
        # before the first decision masters of the ranks may still differ
        if apart or not ranks.several or self._log.rule is None or not ranks.is_aligned:
            return {}
        copied = {
            param
            for wrapper in ranks.wrappers
            for name, param in wrapper.module.named_parameters()
            if name not in wrapper.parameters_to_ignore
        }
        names = parameter_names(self._models)
        found: dict[str, Tensor] = {}
        device = decision.scale.device
        for w in decision.waiting:
            state = w.optimizer.state
            # one by one, because a value may be lent only until the next one
            for param, value in w.fp32_values(lends=False):
                if param in copied:
                    name = names[param]
                    found[name] = self._sum_of(value, device)
                    for key, part in state.get(value, {}).items():
                        if isinstance(part, Tensor):
                            found[f"{name} ({key})"] = self._sum_of(part, device)
        if not found:
            return {}
        return dict(zip(found, torch.cat([*found.values()]).tolist(), strict=True))

    def _sum_of(self, tensor: Tensor, device: torch.device) -> Tensor:
        return checksums([tensor.detach()], device, self._backend)

    def _compare_states(self, by_rank: Mapping[int, Mapping[str, int]]) -> None:
        """Warn of ranks whose masters or state differ from those of most ranks."""
        # some optimizers keep the state of a parameter on one rank alone
        known = set.intersection(*(set(state) for state in by_rank.values()))
        values = {r: {n: v for n, v in s.items() if n in known} for r, s in by_rank.items()}
        groups = Counter(tuple(state.items()) for state in values.values())
        if len(groups) < 2:
            return
        (most, size), *_ = groups.most_common()
        other = [rank for rank, state in values.items() if tuple(state.items()) != most]
        usual = dict(most)
        names = [n for n in usual if any(values[rank][n] != usual[n] for rank in other)]
        if 2 * size > len(by_rank):
            who = f"{ranks_in_words(other)} {'has' if len(other) == 1 else 'have'}"
            whose = f"other values than {size} of {len(by_rank)} ranks"
        else:
            who, whose = f"{ranks_in_words(list(by_rank))} have", "different values"
        self._say_once(who, _APART, f"{who} {whose} in {listed(names)}")


_APART = (
    "amp.audit: %s, though DDP gives all ranks the same gradients. A fault of the hardware or a "
    "write on one rank alone is suspected: load the last good checkpoint on all ranks"
)


def _suspicion(findings: Mapping[int, Finding], several: bool) -> str:
    """Return which rank has made other bits, and where."""
    suspected = {rank: f.reason for rank, f in findings.items() if f.kind == "suspected"}
    where = f"other bits on {ranks_in_words(list(suspected))}" if several else "other bits"
    told = "; ".join(dict.fromkeys(suspected.values()))
    return (
        f"{where}: one of three backwards of the same graph differs in {told}. torch calls no op "
        "on the way there nondeterministic, so hardware is suspected."
    )


def _waits_for_first(wrapper: Any) -> bool:
    """Return whether a DDP with a static graph has yet to see its first backward."""
    # private (torch 2.11 to 2.15): that backward starts the reduction, even into other tensors
    return wrapper.static_graph and not wrapper._static_graph_delay_allreduce_enqueued


def check_every(every: Any) -> None:
    """Raise ValueError if ``every`` is not None or a number of steps."""
    if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 0):
        raise ValueError(f"every: expected a number of steps, 1 or more, or None, got {every!r}")
