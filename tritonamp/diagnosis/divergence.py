"""Decide by the growth of loss, gradients and weights whether training has diverged."""

import functools
import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# factors over earlier values; see Growth
_MOVED, _GREW, _EXPLODED = 2.0, 4.0, 16.0
_LOSS_GREW, _LOSS_EXPLODED, _NORM_GREW = 10.0, 100.0, 10.0
_SMALL = 0.1  # smaller weights count as this


class Fp32Run(NamedTuple):
    """The result of a failing batch that ran again in FP32, weights included."""

    finite: bool
    loss: float | None = None  # if the result is one number; None: the loss is computed elsewhere


class Growth(NamedTuple):
    """Factors by which loss, gradients and weights have grown."""

    loss: float = 1.0  # factor over good steps; 1: not known
    norm: float = 1.0  # the same for the gradients' norm
    weights: float = 1.0  # the same for the weights, beyond growth at an even pace
    usual_loss: float = 0.0  # magnitude in good steps, 0 where it is not known
    after: int = 0  # the last step whose loss was usual
    losses: tuple[float | None, float] = (None, math.inf)  # in step ``after``; now. None: unknown
    largest: tuple[float, float] = (0.0, 0.0)  # the largest weight before it grew, and now
    place: str = ""  # name of the parameter that holds the largest weight now
    is_finite: bool = False  # whether the loss of the skipped step is finite

    @property
    def is_suspect(self) -> bool:
        """Whether training may have diverged, so that a run in FP32 is worth its time."""
        return self.weights >= _GREW or (self.loss >= _LOSS_GREW and self.norm >= _NORM_GREW)

    @property
    def is_explosion(self) -> bool:
        """Whether no healthy run grows like this."""
        grew_together = (
            self.weights >= _MOVED and self.loss >= _LOSS_EXPLODED and self.norm >= _NORM_GREW
        )
        return self.weights >= _EXPLODED or grew_together

    @property
    def has_run_away(self) -> bool:
        """Whether training has diverged although its steps are taken."""
        before, now = self.largest
        return self.loss >= _LOSS_EXPLODED and now >= _GREW * max(before, _SMALL)

    def is_divergence(self, in_fp32: Fp32Run | None) -> bool:
        """Return whether training has diverged, rather than left the range of a half format.

        Args:
            in_fp32: result of the failing batch in FP32; None: it did not run in FP32.
        """
        if not self.is_suspect:
            return False
        if self.is_finite and self.loss < _LOSS_GREW:
            return False  # these weights still serve
        if in_fp32 is None:
            return self.is_explosion
        if in_fp32.finite and in_fp32.loss is not None and self.usual_loss:
            return abs(in_fp32.loss) > _LOSS_GREW * self.usual_loss
        return not in_fp32.finite or self.is_explosion

    def words(self, in_fp32: Fp32Run | None) -> str:
        """Return the growth in words, and the result of a run in FP32."""
        before, now = self.losses
        if not math.isfinite(now) and in_fp32 is not None and in_fp32.loss is not None:
            now = in_fp32.loss
        parts = []
        if before is not None:
            became = f"{now:.3g}" if math.isfinite(now) else "inf or NaN"
            parts.append(f"loss {before:.3g} -> {became} after step {self.after}")
        then, largest = self.largest
        after = "" if parts else f" after step {self.after}"
        place = f" (in {self.place})" if self.place else ""
        parts.append(f"largest weight {then:.3g} -> {largest:.3g}{place}{after}")
        return f"training has diverged: {', '.join(parts)}; {_of_fp32(in_fp32)}. "


def _of_fp32(in_fp32: Fp32Run | None) -> str:
    if in_fp32 is None:
        return "FP32 was not tried"
    if in_fp32.finite and in_fp32.loss is None:
        return "run again in FP32, the output of the model is finite, and the loss is not known"
    found = f"the loss is {in_fp32.loss:.3g}" if in_fp32.loss is not None else "it is not finite"
    return f"FP32 diverges as well: run again in it, {found}. No precision helps"


class WeightSizes:
    """The largest magnitude in each parameter, measured before some steps of a run.

    These are the first four steps of the same optimizers, and their steps 8, 16, 32...
    Measurements stay on the device without a wait. In a long run they cost nothing.
    """

    def __init__(self, tensors: Callable[[], Mapping[Tensor, str]]) -> None:
        self._ask_tensors = tensors
        self._measured: list[tuple[Tensor, dict[str, Tensor]]] = []  # counts, and sizes

    def measure(self, counts: Tensor) -> None:
        """Measure before a step is taken, or skipped; ``counts`` include it."""
        norm = functools.partial(torch.linalg.vector_norm, ord=math.inf)
        self._measured.append((counts.clone(), self._sizes(norm)))

    def _sizes(self, size: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Return ``size`` of each trainable parameter by name, 0-d on the device."""
        params = ((p.detach(), name) for p, name in self._ask_tensors().items() if p.requires_grad)
        return {
            name: size(p)
            for p, name in params
            if p.is_floating_point() and p.layout is torch.strided and p.numel()
        }

    def growth(
        self, taken: int, calm: Collection[int] = ()
    ) -> tuple[float, tuple[float, float], str]:
        """Return by which factor the weights have grown, and the largest weight before and now.

        The third value is the name of the parameter that holds it now; "" without measurements.

        Growth at an even pace over the ``taken`` steps does not count, because weights that begin
        at zero always grow. Growth until the last of the ``calm`` steps does not count either,
        because the loss was usual with those weights. Waits for the device.
        """
        # without inf and NaN, unlike a norm, at the cost of memory
        now = _read(self._sizes(lambda p: torch.nan_to_num(p, 0.0, 0.0, 0.0).abs().max()))
        found: list[tuple[float, float, float]] = []
        read = [(counts.tolist(), _read(sizes)) for counts, sizes in self._measured]
        in_calm = [(counts, sizes) for counts, sizes in read if int(sum(counts)) in calm]
        for (count, *_), then in in_calm[-1:] or read:
            pairs = [(then[name], now[name]) for name in then if name in now]
            largest = max((a for a, _ in pairs), default=0.0), max((b for _, b in pairs), default=0)
            ratios = [b / max(a, _SMALL) for a, b in pairs] or [1.0]
            times = max(largest[1] / max(largest[0], _SMALL), statistics.median(ratios))
            pace = (taken + 1) / max(float(count), 1.0)
            found.append((times / max(pace, 1.0), *largest))
        if not found:
            return 1.0, (0.0, 0.0), ""
        grown, before, after = zip(*found, strict=True)
        return (
            max(grown),
            (min(before), max(after)),
            max(now, key=lambda name: now[name], default=""),
        )


def _read(sizes: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the finite sizes as numbers. Reads the device."""
    if not sizes:
        return {}
    device = next(iter(sizes.values())).device
    values = torch.stack([size.to(device, torch.float32) for size in sizes.values()]).tolist()
    return {name: v for name, v in zip(sizes, values, strict=True) if math.isfinite(v)}


def growth_of(
    good: Iterable[tuple[int, float | None, float | None]],
    loss: float | None,
    taken: int,
    weights: WeightSizes,
) -> Growth:
    """Return how much has grown since the good steps. Waits for the device.

    Args:
        good: number, loss and gradient norm of the steps that were taken; None where not known.
        loss: loss of the step that was skipped; None: not known.
        taken: number of steps that were taken in all.
        weights: measured sizes of the weights.
    """
    steps = list(good)
    losses = [(n, x) for n, x, _ in steps if x is not None]
    sizes = [abs(x) for _, x in losses]
    norms = [norm for _, _, norm in steps if norm is not None]
    usual = _usual(sizes)
    times, largest, place = weights.growth(taken, _calm(losses))
    latest = [*sizes[-2:], *([] if loss is None else [abs(loss)])]
    # by the usual loss, not by ``_calm``, because a loss that has changed its sign was near 0 once
    near_usual = [(n, x) for n, x in losses if abs(x) <= _LOSS_GREW * usual]
    last = steps[-1][0] if steps else 0
    after, before = near_usual[-1] if near_usual else (last, None)
    return Growth(
        _times(latest, usual),
        _times(norms[-2:], _usual(norms)),
        times,
        usual,
        after,
        (before, math.inf if loss is None else loss),
        largest,
        place=place,
    )


def _calm(losses: Sequence[tuple[int, float]]) -> set[int]:
    """Return the numbers of the steps whose loss was not far above earlier losses."""
    usual = math.inf
    found = set()
    for number, loss in losses:
        if abs(loss) <= _LOSS_GREW * usual:
            found.add(number)
            usual = min(usual, abs(loss))
    return found


def _usual(values: Sequence[float]) -> float:
    """Return the median or the first value, whichever is less. Most may have grown since."""
    return min(values[0], statistics.median(values)) if values else 0.0


def _times(latest: Sequence[float], usual: float) -> float:
    known = [x for x in latest if not math.isnan(x)]
    return max(known) / usual if known and usual else 1.0
