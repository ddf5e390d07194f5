"""A picture of a run's steps: loss scale, gradient norm, skips by cause, mismatches."""

import importlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tritonamp.diagnosis.records import MismatchRecord, StepRecord
from tritonamp.diagnosis.skips import Cause


def save_picture(
    history: Sequence[StepRecord], path: str | Path, mismatches: Sequence[MismatchRecord] = ()
) -> Path:
    """Write the picture to ``path``, in the format of its suffix, and return the path.

    Raises:
        RuntimeError: there was no step yet.
        ValueError: matplotlib cannot write files with this suffix.
        ImportError: matplotlib is not installed.
    """
    if not history:
        raise RuntimeError("amp.plot(): expected a step in amp.history, got none: train first")
    path, figure = Path(path), picture(history, mismatches)
    formats = figure.canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in formats:
        raise ValueError(
            "path: expected a name that ends in .png, .svg or another of matplotlib's "
            f"({', '.join(sorted(formats))}), got {str(path)!r}"
        )
    figure.savefig(path, dpi=120)
    return path


def picture(history: Sequence[StepRecord], mismatches: Sequence[MismatchRecord] = ()) -> Any:
    """Return a matplotlib ``Figure`` with panels above one another, over the numbers of the steps.

    The panel of mismatches is left out if there are none.

    It does not use pyplot, so it needs no display and leaves no global state.
    """
    try:
        figure_class = importlib.import_module("matplotlib.figure").Figure
    except ImportError as error:
        raise ImportError(
            "amp.plot() draws with matplotlib, which is not installed: "
            'pip install "tritonamp[demo]"'
        ) from error
    heights = [2, 2, 2, 1] if mismatches else [2, 2, 1]
    figure = figure_class(figsize=(8, 2 + sum(heights)), layout="constrained")
    scale, norm, *rest, skips = figure.subplots(len(heights), sharex=True, height_ratios=heights)
    steps = [record.step for record in history]
    scale.plot(steps, [record.scale for record in history], drawstyle="steps-mid")
    scale.set(ylabel="loss scale")
    scale.set_yscale("log", base=2)
    # a gap where a step was skipped
    norms = [math.nan if record.grad_norm is None else record.grad_norm for record in history]
    norm.plot(steps, norms, marker="." if len(steps) < 100 else None)
    norm.set(ylabel="gradient norm")
    if any(0 < value < math.inf for value in norms):
        norm.set_yscale("log")
    if mismatches:
        _draw_mismatches(rest[0], mismatches)
    _draw_skips(skips, history)
    return figure


def _draw_mismatches(axes: Any, mismatches: Sequence[MismatchRecord]) -> None:
    """Draw k3 to the left axis, and the share of ratios outside of the band to the right one."""
    steps, marker = [m.step for m in mismatches], "." if len(mismatches) < 100 else None
    divergences = [m.k3 for m in mismatches]
    axes.plot(steps, divergences, color="C0", marker=marker)
    axes.set(title="distance from the sampler's log-probabilities")
    axes.set_ylabel("k3, mean per token", color="C0")
    if any(0 < value < math.inf for value in divergences):
        axes.set_yscale("log")
    shares = axes.twinx()
    shares.plot(steps, [100 * m.outside for m in mismatches], color="C1", marker=marker)
    shares.set_ylim(-5, 105)
    shares.set_ylabel("% of tokens out of band", color="C1")


def _draw_skips(axes: Any, history: Sequence[StepRecord]) -> None:
    """Draw a row of marks for each cause that occurred, in the order of ``Cause``."""
    steps = {
        cause.value: [record.step for record in history if record.cause == cause.value]
        for cause in Cause
    }
    rows = [cause for cause, found in steps.items() if found]
    for row, cause in enumerate(rows):
        axes.plot(steps[cause], [row] * len(steps[cause]), "|", markersize=12, label=cause)
    skipped = sum(map(len, steps.values()))
    axes.set(xlabel="step", ylabel=f"{skipped} of {len(history)} skipped")
    axes.set_yticks(range(len(rows)), [f"{cause} ({len(steps[cause])})" for cause in rows])
    axes.set_ylim(max(len(rows), 1) - 0.5, -0.5)
