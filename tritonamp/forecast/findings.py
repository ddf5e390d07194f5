"""A finding of a forecast: place, reason and remedy."""

from dataclasses import dataclass, field

from tritonamp.diagnosis.replay.verdicts import Event

BATCH, LOSS = "the batch", "the loss"  # where a finding is that no module has
CODE = "it changes the code"  # why most advice is not tried


@dataclass(frozen=True)
class Finding:
    """One problem or piece of advice.

    Attributes:
        kind: "overflow", "vanishing", "constant", "adam eps"...
        where: path of a module, full name of a parameter, or another place; "" is the model's own
            forward.
        why: effect of the problem.
        advice: remedy; of ``Forecast.findings`` with the result of trying it, or the reason why it
            was not tried.
        problem: whether training would fail or lose accuracy.
        weight: sort key, largest first.
        modules: paths of the modules that cure the problem by computing in FP32.
        of_product: whether FP32 results of products in ``modules`` may cure the problem, too.
        line: line of the user's code that causes the problem, "file:number", or "".
        untried: reason why ``advice`` cannot be tried; "" if it was.
        event: the op that edits of ``line`` may cure; None: no edit is tried.
    """

    kind: str
    where: str
    why: str
    advice: str
    problem: bool = True
    weight: float = 1.0
    modules: tuple[str, ...] = ()
    line: str = ""
    untried: str = CODE
    event: Event | None = field(default=None, repr=False, compare=False)
    of_product: bool = False


def bce(where: str, line: str = "") -> Finding:
    """Return the finding about a binary_cross_entropy."""
    why = (
        "binary_cross_entropy takes probabilities: in half they round to 0 and 1, and autocast "
        "refuses it"
    )
    advice = "use BCEWithLogitsLoss and leave out the sigmoid"
    return Finding("BCELoss", where, why, advice, weight=1e6, line=line)


def early_gradients(where: str, name: str, ours: str, line: str = "") -> Finding:
    """Return the finding about a loss that rounds gradients before the loss scale.

    ``ours`` is the function in tritonamp.functional that does the same as the loss ``name``.
    """
    why = (
        f"{name} rounds the gradients of logits to float16 in the forward, before the loss "
        "scale: of a mean over 4096 tokens of 8192 words 69 % become 0"
    )
    advice = f"use tritonamp.functional.{ours}, which rounds them after it"
    return Finding("early gradients", where, why, advice, weight=1e5, line=line)
