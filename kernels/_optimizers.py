"""Facts about optimizers by the name of their class. No other module lists these names."""

from collections.abc import Sequence
from typing import NamedTuple

from tritonamp.kernels._state_formats import FORMATS

SUM, NORM = "sum", "norm"
_FORMATS = tuple(FORMATS)


class Known(NamedTuple):
    """Facts about one kind of optimizer, for messages and checks.

    Attributes:
        squares: key in a group of the decay of squared gradients. ``SUM``: squares are added up
            without decay. ``NORM``: the decayed number is the sum over a whole parameter. None: the
            optimizer keeps no squares.
        states: formats in which the fused step keeps state; (): the optimizer runs its own step.
        in_parts: whether a fused step can work on some parameters after others.
        in_torch: whether ``torch.optim`` has the optimizer.
        in_optim: whether ``tritonamp.optim`` has the optimizer, if it takes a fused step.
        bounded: whether each step is bounded, however large a gradient is. RAdam's first steps are
            not.
        finite: whether each step is finite if gradients are finite and eps is not 0.
    """

    squares: str | None = None
    states: tuple[str, ...] = ()
    in_parts: bool = True
    in_torch: bool = True
    in_optim: bool = True
    bounded: bool = False
    finite: bool = False


OPTIMIZERS = {
    **dict.fromkeys(("Adam", "AdamW"), Known("betas", _FORMATS, bounded=True, finite=True)),
    "SGD": Known(None, _FORMATS, finite=True),
    "Lion": Known(None, _FORMATS, in_torch=False, bounded=True, finite=True),
    "Muon": Known("betas", _FORMATS[:1], in_parts=False),  # betas: of groups that AdamW steps on
    "NAdam": Known("betas", bounded=True),
    **dict.fromkeys(("RAdam", "SparseAdam"), Known("betas")),
    **dict.fromkeys(("Adamax", "Rprop"), Known(bounded=True)),
    "FusedLAMB": Known("betas", in_torch=False),
    "Adagrad": Known(SUM, bounded=True),
    "FusedAdagrad": Known(SUM, in_torch=False),
    "Adafactor": Known(NORM),
    "FusedNovoGrad": Known(NORM, in_torch=False),
    "RMSprop": Known("alpha", _FORMATS, in_optim=False),
    "Adadelta": Known("rho"),
}

FUSED = [name for name, known in OPTIMIZERS.items() if known.states]
"""Optimizers that take a fused step."""
IN_PARTS = [name for name in FUSED if OPTIMIZERS[name].in_parts]
IN_OPTIM = [name for name in IN_PARTS if OPTIMIZERS[name].in_optim]
"""Optimizers of ``tritonamp.optim`` for parameters of any shape."""


def keeping(state: str) -> list[str]:
    """Return the optimizers whose fused step can keep its state in this format."""
    return [name for name in FUSED if state in OPTIMIZERS[name].states]


def in_words(names: Sequence[str], word: str = "and") -> str:
    """Return "a, b and c"."""
    return f" {word} ".join(filter(None, (", ".join(names[:-1]), names[-1])))
