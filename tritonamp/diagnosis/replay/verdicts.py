"""Find the kind of fault from an op's event, with the texts for reason and advice."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tritonamp.diagnosis.replay.known_ops import family, is_product
from tritonamp.names import short
from tritonamp.watched.places import Place


@dataclass(frozen=True)
class OpInput:
    """A floating input of an op, as the op read it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    amax: float  # the largest finite magnitude in it

    def __str__(self) -> str:
        return f"{short(self.dtype)}{list(self.shape)} up to {self.amax:.4g}"


class Eps(NamedTuple):
    """A small number that was added, or is a lower limit."""

    value: float
    dtype: torch.dtype  # of the sum
    place: Place | None = None  # where it was added

    @property
    def vanishes(self) -> bool:
        """Whether the dtype rounds it to 0."""
        info = torch.finfo(self.dtype)
        return abs(self.value) <= info.smallest_normal * info.eps / 2


@dataclass
class Event:
    """An op that made inf or NaN, and the effects of these values."""

    place: Place
    phase: str  # "forward" or "backward"
    dtype: torch.dtype  # of the result
    aten: str = ""  # the op as torch dispatched it; ``place.op`` is the one the user called
    inputs: tuple[OpInput, ...] = ()  # the floating tensors that the user's op was given
    nan: bool = False  # whether there is NaN in the result
    # largest magnitude of the result in float64; inf or NaN where float64 has no number either;
    # None where the op could not be run again
    exact: float | None = None
    quiet: bool = False  # an infinity written on purpose, such as a mask of -inf
    source: str = ""  # "data", "parameters" or "propagated" where no op made it
    names: tuple[str, ...] = ()  # of the inputs or parameters that were not finite
    samples: tuple[int, ...] = ()  # of the input, by number, that were not finite
    scalars: tuple[float, ...] = ()  # Python numbers among the arguments
    eps: Eps | None = None  # added earlier to a number that is hardly larger
    zero: bool = False  # a divisor, or the argument of a logarithm, is zero
    masked: bool = False  # a softmax row has nothing but -inf
    constant: bool = False  # an infinity written on purpose is among the inputs
    rounding: bool = False  # the op only rounded a finite value of a wider format
    squares: bool = False  # the op multiplied a tensor by itself
    own: bool = False  # it ran in a backward or a hook that the user wrote
    softmax: Place | None = None  # of the softmax whose small values the op reads
    divisor: float | None = None  # the smallest magnitude that its line of the forward divides by
    divider: str = ""  # the op that divides by it
    maker: Place | None = None  # of a cast: where its value was computed
    tensor: Tensor | None = None  # the tensor of the batch that was not finite
    discarded: bool = False  # the forward discarded its result, the backward did not
    later: int = 0  # number of ops that passed inf or NaN on
    first_nan: Place | None = None  # where inf became NaN
    absorbed: Place | None = None  # where inf became a wrong finite number
    vanished: Place | None = None  # where inf first became a finite number, right or wrong

    @property
    def overflowed(self) -> bool:
        """Whether the value exists, and this format cannot hold it."""
        if self.source or self.quiet or self.exact is None:
            return False
        return math.isfinite(self.exact)

    @property
    def is_product(self) -> bool:
        """Whether a product overflowed in the forward that can have an FP32 result."""
        is_result = self.phase == "forward" and self.overflowed and not self.rounding
        return is_result and is_product(self.place.op)

    @property
    def multiple(self) -> float | None:
        """The exact result in units of the format's maximum."""
        return None if self.exact is None else self.exact / torch.finfo(self.dtype).max


class Verdict(NamedTuple):
    """The texts for a kind of fault. Names of ``FaultReport._words`` are in braces.

    Attributes:
        why: the reason.
        hint: advice for a fault without a tried remedy.
    """

    why: str
    hint: str


VERDICTS = {
    "matmul_overflow": Verdict(
        "the product is {value}, {multiple} times the largest number of {format}, {limit}",
        "Normalise or scale what goes into it: in attention scale q before q @ k.",
    ),
    "square_overflow": Verdict(
        "a square is {value}, {multiple} times the largest number of {format}, {limit}",
        "Make the numbers smaller before the square.",
    ),
    "reduction_overflow": Verdict(
        "the sum is {value}, {multiple} times the largest number of {format}, {limit}",
        "Sum in FP32: x.sum(dtype=torch.float32).",
    ),
    "exp_overflow": Verdict(
        "the exponential of {amax} is {value}, above the largest number of {format}, {limit}",
        "Subtract the maximum before exp (softmax and logsumexp do), or clamp its input.",
    ),
    "overflow": Verdict(
        "the result is {value}, {multiple} times the largest number of {format}, {limit}",
        "Make its inputs smaller.",
    ),
    "constant_overflow": Verdict(
        "the constant {scalar} does not fit {format}, whose largest number is {limit}",
        "Write float('-inf') or torch.finfo(x.dtype).min for a mask; for other constants compute "
        "in FP32.",
    ),
    "cast_overflow": Verdict(
        "{named}a finite {value}{made} was cast to {format}, {multiple} times its largest "
        "number, {limit}",
        "Bring the value into range before the cast.",
    ),
    "masked_row": Verdict(
        "a row of this softmax is -inf everywhere, and its sum of exponentials is 0/0",
        "Leave one entry of each row unmasked.",
    ),
    "vanished_eps": Verdict(
        "eps={eps} rounds to zero in {eps_format}, and {op} meets a zero",
        "Take a larger eps: float16 holds 6e-5 and up.",
    ),
    "zero_by_zero": Verdict(
        "0/0",
        "Clamp the divisor, or handle the empty case (all masked, all equal) apart.",
    ),
    "division_by_zero": Verdict(
        "a divisor is zero",
        "Clamp it from below by a number that {format} holds.",
    ),
    "domain_error": Verdict(
        "{op} has no value there: its argument is {argument}",
        "Clamp the argument into range.",
    ),
    "infinite_constant": Verdict(
        "an infinity that was written as a constant met inf - inf, 0 * inf or the loss",
        "Mask with torch.where or masked_fill after the arithmetic, or use "
        "torch.finfo(x.dtype).min in place of inf.",
    ),
    "data": Verdict(
        "inf or NaN came in with the batch: {names}{samples}",
        "Find out where the data comes from, and drop or repair such samples before the model.",
    ),
    "parameters": Verdict(
        "inf or NaN is in the model already: {names}",
        "Load the last checkpoint that is finite: no step can repair it.",
    ),
    "weight_overflow": Verdict(
        "a weight does not fit {format}, though its FP32 master is finite: {names}",
        "Decay or clip this weight.",
    ),
    "softmax_zero": Verdict(
        "{op} meets a 0 that is a softmax's result{softmax}: {read_format} rounds small "
        "probabilities to 0{logarithm}",
        "{mend_softmax}",
    ),
    "softmax_gradient": Verdict(
        "{op} reads small results of a softmax{softmax}, and its gradient divides by them: "
        "{value} at loss scale {scale}",
        "{mend_softmax}",
    ),
    "small_divisor": Verdict(
        "{divider} divides by {divisor}, so that its gradient is {value} at loss scale {scale}",
        "Take a larger eps, or clamp the divisor.",
    ),
    "ctc_length": Verdict(
        "a target is longer than its input, so no alignment exists and the loss is inf",
        "Pass zero_infinity=True to ctc_loss, or drop such samples.",
    ),
    "own_backward": Verdict(
        "your own backward, or a hook on a gradient, makes it there: its inputs are finite, its "
        "result is not",
        "Mend that line of your own backward or hook.",
    ),
    "propagated": Verdict(
        "inf or NaN arrived with {names}",
        "Look there: behind an output is the loss, behind a kernel of your own its inputs, before "
        "the forward your training loop.",
    ),
    "scale_too_high": Verdict(
        "the gradient is {value} at loss scale {scale}, {multiple} times the largest "
        "number of {format}, {limit}; all gradients fit at {fits}",
        "Nothing, if it is rare: the scale comes down by itself, or begins there, with "
        "scaler=tritonamp.GradScaler(init_scale={init_scale}) (tried: all gradients fit).",
    ),
    "gradient_overflow": Verdict(
        "the gradient is {value} at loss scale {scale}, {multiple} times the largest "
        "number of {format}, {limit}, and no loss scale from 1 up fits",
        "Make the loss or the gradient of this op smaller.",
    ),
    "backward_nan": Verdict(
        "the forward is finite, the gradient of {op} is not: {reason}",
        "Put a harmless value in before {op} where it is not differentiable (torch.where after it "
        "does not stop 0 * inf in the backward), or clamp its argument.",
    ),
    "unknown": Verdict(
        "its inputs are finite and its output is not", "Compute it by hand in float64."
    ),
}


def _is(*families: str) -> Callable[[Event], bool]:
    return lambda e: bool(family(e.place.op) & set(families))


def _constant(e: Event) -> bool:
    """Return whether a constant that does not fit is to blame."""
    return any(is_too_large(s, e) for s in e.scalars)


def is_too_large(constant: float, e: Event) -> bool:
    """Return whether a constant of an operation does not fit its format."""
    limit = torch.finfo(e.dtype).max
    largest = max((o.amax for o in e.inputs), default=0.0)
    # products are taken in FP32: the constant has to be far out, or to multiply a mask
    if family(e.place.op) & {"product", "divide"} and largest not in (0.0, 1.0):
        limit *= 16
    return limit < abs(constant) < math.inf


FORWARD: list[tuple[str, Callable[[Event], bool]]] = [
    ("ctc_length", lambda e: "ctc_loss" in e.place.op),
    ("softmax_zero", lambda e: e.softmax is not None and e.zero and _is("log", "divide")(e)),
    ("infinite_constant", lambda e: e.quiet),
    ("constant_overflow", _constant),
    ("cast_overflow", lambda e: e.rounding and e.overflowed),
    ("exp_overflow", lambda e: "pow.Scalar" in e.aten and not e.nan),
    ("square_overflow", lambda e: e.overflowed and (e.squares or _is("square")(e))),
    ("matmul_overflow", lambda e: e.overflowed and _is("matmul")(e)),
    ("exp_overflow", lambda e: _is("exp")(e) and not e.nan),
    ("reduction_overflow", lambda e: e.overflowed and _is("reduction")(e)),
    ("overflow", lambda e: e.overflowed),
    ("masked_row", lambda e: e.masked),
    ("vanished_eps", lambda e: e.eps is not None and e.eps.vanishes and e.zero),
    ("infinite_constant", lambda e: e.nan and e.constant),
    ("domain_error", _is("log")),
    ("domain_error", lambda e: e.place.op in ("lgamma", "digamma")),  # at 0, -1, -2...
    ("zero_by_zero", lambda e: e.nan and _is("average")(e)),
    ("zero_by_zero", lambda e: e.zero and e.nan),
    ("division_by_zero", lambda e: e.zero),
    ("domain_error", lambda e: e.nan and _is("root", "divide", "square")(e)),
    ("square_overflow", lambda e: _is("square")(e) and e.exact == math.inf),
]
"""Kinds of a forward fault. The first match wins."""

GOOD_SCALE = 2.0**8  # dynamic scaling reaches it from 2^16 after few skips
SMALL_DIVISOR = 1e-4  # a gradient divides by its square, which float16 rounds to 0

REASONS = {
    "sqrt": "the slope of sqrt at 0 is infinite",
    "pow": "the slope of a power below 1 at 0 is infinite",
    "norm": "a norm has no slope at 0",
    "linalg_vector_norm": "a norm has no slope at 0",
    "std": "a standard deviation has no slope at 0",
    "div": "its divisor is 0",
    "log": "the slope of log at 0 is infinite",
    "log1p": "the slope of log1p at -1 is infinite",
    "acos": "the slope of acos at 1 and -1 is infinite",
    "asin": "the slope of asin at 1 and -1 is infinite",
    "atan2": "it has no slope at (0, 0)",
    "svd": "it divides by differences of singular values, and two are equal or one is 0",
    "linalg_svd": "it divides by differences of singular values, and two are equal or one is 0",
    "linalg_eigh": "it divides by differences of eigenvalues, and two are equal",
    "linalg_eig": "it divides by differences of eigenvalues, and two are equal",
}


def judge(event: Event, fits: float | None = None) -> str:
    """Return the kind of fault: a key of ``VERDICTS``.

    Args:
        event: event of the fault.
        fits: for a backward, the largest loss scale at which all gradients are finite; None: none.
    """
    if event.source:
        return event.source
    if event.phase == "backward":
        if event.own:
            return "own_backward"
        if "ctc_loss" in event.place.op and not event.overflowed:
            return "ctc_length"
        fits_well = fits is not None and fits >= GOOD_SCALE
        if event.softmax is not None and _is("log", "divide")(event) and not fits_well:
            return "softmax_gradient"
        small = event.divisor is not None and 0.0 < event.divisor < SMALL_DIVISOR
        if small and _is("divide", "log")(event) and not fits_well:
            return "small_divisor"
        if not event.overflowed:
            return "backward_nan"
        return "scale_too_high" if fits is not None and fits >= 1 else "gradient_overflow"
    return next((kind for kind, holds in FORWARD if holds(event)), "unknown")
