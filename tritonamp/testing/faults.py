"""The kinds of faults, and the causes that ``amp.history`` may name for each."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

CAUSES: Mapping[str, tuple[str, ...]] = {
    "batch": ("data",),
    "loss": ("forward fault",),
    "overflow": ("forward fault",),
    "gradient": ("scale overflow", "backward fault", "scale exhausted"),
    "scale": ("scale overflow", "backward fault", "scale exhausted"),
    "bitflip": (
        "scale overflow",
        "backward fault",
        "scale exhausted",
        "huge gradient",
        "forward fault",
        "bad parameters",
        "divergence",
        "outlier",
        "veto",  # of an audit
    ),
    "missing gradient": (),
    "error in forward": (),
    "error in backward": (),
    "error in step": (),
    "out of memory": (),
}
"""Kind of a fault to the causes that ``amp.history`` may name for the step; (): no cause, because
the step is taken or the loop gets an exception.
"""

KINDS = tuple(CAUSES)
IN_STEP = ("error in step", "out of memory")
"""Kinds that raise in the optimizer's step."""


@dataclass(frozen=True)
class Fault:
    """A fault in one step.

    Attributes:
        kind: one of ``KINDS``.

            - "batch": one number of the model's first floating input becomes ``value``;
            - "loss": the tensor that is given to ``FaultInjector.loss`` becomes ``value``;
            - "overflow": one number of the output of module ``place`` becomes ``value``;
            - "gradient": one number of the gradient of parameter ``place`` becomes ``value``; the
              loss is finite;
            - "scale": in the backward, at the output of module ``place``, one number becomes too
              large for float16;
            - "bitflip": bit ``bit`` of one number of ``target`` flips, as in silent corruption;
            - "missing gradient": the gradient of parameter ``place`` becomes None;
            - "error in forward", "error in backward": module ``place`` raises ``InjectedError``;
            - "error in step", "out of memory": ``optimizer.step`` raises ``InjectedError``, or
              ``torch.OutOfMemoryError``.
        place: name of a module or parameter.
        value: inf or NaN.
        step: number of the step in ``amp.history``; if the step raised, the number of the next
            attempt.
        target: the tensor in which a bit flips.

            - "gradient": the gradient of parameter ``place``, after the first backward of the step;
            - "backward": the gradient of the output of module ``place``, in that backward;
            - "weight": parameter ``place``, before the forward;
            - "master": its FP32 master, before the forward; without masters, the parameter;
            - another name: the tensor of this name in the optimizer's state of parameter ``place``,
              such as "exp_avg_sq", before the forward.
        bit: number of the bit, from 0, the lowest; None: drawn.
        element: index of the number in the flat tensor; None: drawn.
    """

    kind: str
    place: str = ""
    value: float = math.nan
    step: int = 0
    target: str = "gradient"
    bit: int | None = None
    element: int | None = None

    @property
    def raises(self) -> bool:
        """Whether the loop gets an exception instead of a step or a skip."""
        return self.kind.startswith("error") or self.kind == "out of memory"

    @property
    def causes(self) -> tuple[str, ...]:
        """The causes that ``amp.history`` may name for the step; (): no cause."""
        return CAUSES[self.kind]

    @property
    def may_pass(self) -> bool:
        """Whether the step may be taken although there are ``causes``, as after most bitflips."""
        return self.kind == "bitflip"
