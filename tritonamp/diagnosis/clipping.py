"""Find gradients that were clipped while they carried the loss scale, by their marks.

Clipping leaves a mark. Many elements of one tensor are exactly its largest, or the norms of rows,
of tensors, or of all gradients are the same number, or the same share of the weights' norms. If
that number is far below the loss scale, the clipping was meant for gradients without the scale, and
training stands still. Factors, masks, averages and noise leave no such mark. It does not matter how
the clipping was done: in place, through ``.data``, by hooks, or in a library.
"""

import logging
import math
import statistics
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonamp.diagnosis.looks import Looks
from tritonamp.diagnosis.scaled_gradients import ScaledGradients
from tritonamp.kernels.device import widened
from tritonamp.watched.frames import Role, role_of

logger = logging.getLogger("tritonamp")

_ROWS = 8  # of each tensor
_COLUMNS = 4096  # of a tensor with one row
_TIES = 4  # elements that are the largest one
_AT_LEAST = 4  # equal numbers that prove a mark
_SHARE = 0.05  # of the elements that are not zero
_FAR_BELOW = 2.0**-10  # as a share of the loss scale
_TINY = 2.0**-10  # smaller half gradients are multiples of the smallest number, and often equal
_IN_A_ROW = 3  # looks
WHY_ZERO = (
    "Call zero_grad() after the step or before amp.backward(loss), not between the two. If you do, "
    "look for a loss that is computed in half (compute it in FP32, and multiply it by a constant "
    "if it is tiny), for detached tensors, and for ReLUs of negative values alone: amp.watch(), "
    "and amp.ranges() after the next step, show where"
)
"""Advice where all gradients are 0."""
_ALL_ZERO = (
    f"all gradients of a step were 0, %d times in a row, so that it trained nothing. {WHY_ZERO}"
)
_ROUND = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 7.5, 8, 9, 10)  # digits that people choose


class _Gradient(NamedTuple):
    """Numbers of one gradient.

    Attributes:
        high: largest element of the sample.
        low: smallest element of the sample.
        at_high: number of elements that are equal to ``high``.
        at_low: number of elements that are equal to ``low``.
        nonzero: number of elements that are not zero.
        norm: 2-norm of the whole gradient.
        weight_norm: 2-norm of the parameter.
        ratios: 2-norm of each row of the gradient, divided by that of the parameter's row; NaN
            where the two rows are parallel.
    """

    high: float
    low: float
    at_high: float
    at_low: float
    nonzero: float
    norm: float
    weight_norm: float
    ratios: Sequence[float]

    @property
    def is_constant(self) -> bool:
        """Whether all nonzero elements are equal, as in the gradient of a sum."""
        return self.nonzero in (self.at_high, self.at_low)

    def limits(self) -> Iterator[float]:
        """Yield magnitudes at which elements were cut off."""
        for value, ties in ((self.high, self.at_high), (self.low, self.at_low)):
            if ties >= _TIES and ties >= _SHARE * self.nonzero and value:
                yield abs(value)

    def rows(self) -> list[float]:
        """Return the ratios of rows in which neither gradient nor weights are 0."""
        return [ratio for ratio in self.ratios if 0 < ratio < math.inf]


_SIZE = len(_Gradient._fields) - 1 + _ROWS


class ClippedGradients:
    """Looks for clipped gradients in the first steps of a run, and warns once.

    Args:
        names: function that returns the name of each parameter.
        scaled: scaled gradients of the same run. The two give only one warning of clipping
            together.

    Attributes:
        looks: numbers on their way to the host.
    """

    def __init__(self, names: Callable[[], Mapping[Tensor, str]], scaled: ScaledGradients) -> None:
        self._names = names
        self._scaled = scaled
        self.looks = Looks(self._read)
        # of the last looks: the norm of all gradients, and their largest element
        self._totals: dict[Hashable, list[tuple[float, float]]] = {}

    @torch.no_grad()
    def look(
        self, key: Hashable, params: Sequence[Tensor], grads: Sequence[Tensor], scale: Tensor
    ) -> None:
        """Measure gradients on the device.

        Args:
            key: name of the sequence of steps, by which their totals are compared.
            params: parameters of the model.
            grads: dense gradient of each parameter.
            scale: 0-d tensor, the loss scale that the gradients carry.
        """
        if self.looks.has_ended:
            return
        pairs = [
            (p, g)
            for p, g in zip(params, grads, strict=True)
            if g.numel() and g.is_floating_point()
        ]
        numbers = [_numbers(p.detach(), g.detach()).to(scale.device) for p, g in pairs]
        self.looks.start(
            torch.cat([widened(scale.reshape(1)), *numbers]), (key, [p for p, _ in pairs])
        )

    def _read(self, values: Sequence[float], attached: Any) -> None:
        key, params = attached
        scale, *rest = values
        parts = [rest[i : i + _SIZE] for i in range(0, len(rest), _SIZE)]
        found = [_Gradient._make([*part[:-_ROWS], part[-_ROWS:]]) for part in parts]
        if not found or not all(map(math.isfinite, (scale, *(g.norm for g in found)))):
            return
        total = math.hypot(*(gradient.norm for gradient in found))
        totals = self._totals.setdefault(key, [])
        totals.append((total, max(max(g.high, -g.low) for g in found)))
        del totals[:-_IN_A_ROW]
        if len(totals) == _IN_A_ROW and not any(norm for norm, _ in totals):
            self.looks.has_ended = True
            logger.warning(_ALL_ZERO, _IN_A_ROW)
        if scale == 1:  # nothing to unscale, so clipping is right
            return
        seen = dict(zip(params, found, strict=True))
        most = scale * _FAR_BELOW
        mark = _mark(seen, most) or _mark_of_total(totals, params, most)
        if mark is not None:
            self.looks.has_ended = True
            if self._scaled.is_news():
                self._warn(*mark, scale)

    def _warn(self, what: str, params: Sequence[Tensor], scale: float) -> None:
        names = self._names()
        known = [names[p] for p in params if p in names]
        listed = ", ".join(known[:3]) + (f" and {len(known) - 3} more" if len(known) > 3 else "")
        hook = next(filter(None, map(_line_of_hook, params)), "")
        logger.warning(
            "gradients%s %s while they still carry the loss scale (%g), as if clipped%s: next to "
            "nothing of them is left, and training stands still. Call amp.unscale_() after "
            "amp.backward(loss), and clip then, the work of hooks included, or call "
            "amp.clip_grad_norm_(max_norm) instead of your own clipping",
            f" of {listed}" if known else "",
            what,
            scale,
            hook,
        )


def _numbers(param: Tensor, grad: Tensor) -> Tensor:
    """Return the numbers of a ``_Gradient``."""
    part, weights = (
        (x[:_ROWS].flatten(1) if x.dim() > 1 else x.reshape(1, -1)[:, :_COLUMNS]).float()
        for x in (grad, param)
    )
    high, low = part.amax(), part.amin()
    of_grad, of_param = (torch.linalg.vector_norm(x, dim=1) for x in (part, weights))
    # the gradient of a weight penalty is a multiple of the weights: no mark of clipping
    is_penalty = (part * weights).sum(1).abs() > 0.999 * of_grad * of_param
    ratios = torch.where(is_penalty, math.nan, of_grad / of_param)
    numbers = (
        high,
        low,
        (part == high).sum(),
        (part == low).sum(),
        (part != 0).sum(),
        *(torch.linalg.vector_norm(x, dtype=_wide(x.dtype)) for x in (grad, param)),
    )
    rows = ratios if grad.dim() > 1 else ratios[:0]
    filled = torch.nn.functional.pad(rows, (0, _ROWS - len(rows)), value=math.nan)
    return torch.cat([torch.stack([widened(x) for x in numbers]), widened(filled)])


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _mark(found: Mapping[Tensor, _Gradient], most: float) -> tuple[str, list[Tensor]] | None:
    """Return the mark of clipping in words, and the parameters that have it; None: no mark.

    Args:
        found: gradient of each parameter.
        most: largest number that counts as a mark.
    """
    limits = {p: x for p, g in found.items() for x in g.limits() if _TINY <= x <= most}
    cut = [p for p, x in limits.items() if _is_round(x)]
    varied = [p for p in limits if not found[p].is_constant]
    same = _common([limits[p] for p in varied], 1e-3, at_least=2)
    if not cut and same is not None and 2 * len(varied) >= len(found):
        cut = varied
    if cut:
        return f"end at exactly {limits[cut[0]]:.3g}", cut
    rows = {p: g.rows() for p, g in found.items() if len(g.rows()) >= _AT_LEAST}
    shares = {p: _common(ratios, 1e-2) for p, ratios in rows.items()}
    alike = {p: share for p, share in shares.items() if share is not None and share <= most}
    share = _common(list(alike.values()), 2e-2, at_least=1)
    if share is not None and 2 * len(alike) >= len(rows):
        return f"have rows of {share:.3g} times the norm of the weights", list(alike)
    norms = {p: g.norm for p, g in found.items() if g.norm}
    ratios = {p: g.norm / g.weight_norm for p, g in found.items() if g.rows() and g.weight_norm}
    for of_each, words in (
        (norms, "have the norm {:.3g} each"),
        (ratios, "have {:.3g} times the norm of their weights each"),
    ):
        value = _common(list(of_each.values()), 5e-3)
        if value is not None and value <= most:
            return words.format(value), list(of_each)
    return None


def _mark_of_total(
    totals: Sequence[tuple[float, float]], params: list[Tensor], most: float
) -> tuple[str, list[Tensor]] | None:
    """Return the mark of clipping by the norm of all gradients, as ``_mark`` does.

    An equal norm in one look after another is a mark if the norm is a round number, or if the
    gradients changed otherwise. ``totals`` are norm and largest element of the last looks.
    """
    norms, sizes = zip(*totals, strict=True)
    same = _common(norms, 1e-3, at_least=2)
    if same is None or not _TINY <= same <= most:
        return None
    changes = len(sizes) == _IN_A_ROW and max(sizes) > 1.01 * min(sizes)
    if not (changes or _is_round(same)):
        return None
    return f"have the norm {same:.3g} in each step", params


def _common(values: Sequence[float], tolerance: float, at_least: int = _AT_LEAST) -> float | None:
    """Return the median if nine in ten values equal it, up to a relative tolerance, else None."""
    if len(values) < at_least:
        return None
    middle = statistics.median(values)
    near = sum(abs(x - middle) <= tolerance * abs(middle) for x in values)
    return middle if near >= 0.9 * len(values) else None


def _is_round(value: float) -> bool:
    """Return whether a number has few digits."""
    digits = value / 10.0 ** math.floor(math.log10(value))
    return any(abs(digits - x) <= 5e-4 * x for x in _ROUND)


def _line_of_hook(param: Any) -> str:
    """Return " by the hook at FILE:LINE" of the user's first hook on a gradient, or ""."""
    # private (torch 2.11 to 2.15): where a tensor keeps its hooks
    for hooks in (param._backward_hooks, param._post_accumulate_grad_hooks):
        for hook in (hooks or {}).values():
            code = getattr(hook, "__code__", None)
            if code is not None and role_of(code) is Role.USER:
                return f" by the hook at {code.co_filename}:{code.co_firstlineno}"
    return ""
