"""What is done about a skip beyond skipping: replay the batch; name, heal or raise the fault."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tritonamp.diagnosis.causes import Explanation
from tritonamp.diagnosis.log import NonFiniteError, StepLog
from tritonamp.diagnosis.replay import (
    NOT_REPRODUCED,
    FaultReport,
    Snapshot,
    find_fault,
    write_bundle,
)
from tritonamp.policy import Policy

logger = logging.getLogger("tritonamp")

HEAL_AFTER = 2  # faults in one module
FIRST_REPLAYS = 8  # of the faults since the last heal; later ones at 16, 32, 64...
HEALED_BY_FP32 = frozenset(
    """matmul_overflow square_overflow reduction_overflow exp_overflow overflow constant_overflow
    cast_overflow weight_overflow vanished_eps zero_by_zero division_by_zero
    gradient_overflow""".split()
)


class Response:
    """Does what ``policy.on_nonfinite`` says about each skip.

    Args:
        models: the enabled ones.
        policy: of the Amp.
        log: knows the cause of the last skip, and the forwards that led to it.
        heal: makes the module of that name compute in FP32.
    """

    def __init__(
        self, models: list[nn.Module], policy: Policy, log: StepLog, heal: Callable[[str], None]
    ) -> None:
        self._models = models
        self._policy = policy
        self._log = log
        self._heal = heal
        self._in_a_row = 0
        self._seen = 0  # faults since the last heal that a replay can find
        self._healed: list[str] = []
        self._faults: Counter[str] = Counter()  # by module
        self._reported: tuple[Explanation | None, str] = (None, "")  # the last replay, and of what

    def __call__(self, skipped: bool) -> None:
        """Do what the policy says about a decision.

        Args:
            skipped: whether it was a skip.

        Raises:
            NonFiniteError: under "raise", where a lower scale cannot help.
        """
        if skipped:
            self._answer()
        else:
            self._in_a_row = 0

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
        explanation = self._log.explanation()
        if explanation is None:
            return "No step was skipped."
        if replay is not False:
            return f"{explanation.text}\n{self.replay(None if replay is True else replay)[0]}"
        of, report = self._reported
        if of is None or of.cause != explanation.cause:
            return explanation.text + explanation.hint
        earlier = "" if of is explanation else "Of an earlier one, when it ran again: "
        return f"{explanation.text}\n{earlier}{report}"

    def replay(self, run: Callable[[], Any] | None = None) -> tuple[str, FaultReport | None]:
        """Run the forwards of the last skip again, or ``run``.

        Returns:
            the report in words, and the fault if one was found.
        """
        runs: list[tuple[Callable[[], Any], dict[str, Any]]] = [
            (b.run, _known(b)) for b in self._log.batches
        ]
        if run is not None:
            runs = [(run, {})]
        if not runs:
            return (
                "Not replayed: no forward led to it that could be run again (a compiled one "
                "leaves no trace).",
                None,
            )
        for function, known in runs:
            try:
                fault = find_fault(
                    self._models,
                    function,
                    dtype=self._policy.dtype,
                    scale=self._log.last_scale,
                    **known,
                )
            except Exception as error:  # the user's code raised: training goes on without a report
                return f"The replay failed: {type(error).__name__}: {error}", None
            if fault is not None:
                return str(fault), fault
        if any(known.get("backward") is False for _, known in runs):
            return _IN_THE_LOSS, None
        healed = f" Healed since: {', '.join(map(repr, self._healed))}." if self._healed else ""
        return (
            f"{NOT_REPRODUCED}.{healed} If the loss is computed outside of the model, look there.",
            None,
        )

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
        if module is None or fault.kind not in HEALED_BY_FP32:
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
