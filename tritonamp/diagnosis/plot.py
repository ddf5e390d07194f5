"""A picture of a run's steps: loss scale, gradient norm, skips by cause."""

import importlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tritonamp.diagnosis.records import StepRecord
from tritonamp.diagnosis.skips import Cause


def save_picture(history: Sequence[StepRecord], path: str | Path) -> Path:
    """Write the picture to ``path``, in the format of its suffix, and return the path.

    Raises:
        RuntimeError: there was no step yet.
        ValueError: matplotlib cannot write files with this suffix.
        ImportError: matplotlib is not installed.
    """
    if not history:
        raise RuntimeError("amp.plot(): expected a step in amp.history, got none: train first")
    path, figure = Path(path), picture(history)
    formats = figure.canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in formats:
        raise ValueError(
            "path: expected a name that ends in .png, .svg or another of matplotlib's "
            f"({', '.join(sorted(formats))}), got {str(path)!r}"
        )
    figure.savefig(path, dpi=120)
    return path


def picture(history: Sequence[StepRecord]) -> Any:
    """Return a matplotlib ``Figure`` with panels above one another, over the numbers of the steps.

    It does not use pyplot, so it needs no display and leaves no global state.
    """
    try:
        figure_class = importlib.import_module("matplotlib.figure").Figure
    except ImportError as error:
        raise ImportError(
            "amp.plot() draws with matplotlib, which is not installed: "
            'pip install "tritonamp[demo]"'
        ) from error
    figure = figure_class(figsize=(8, 7), layout="constrained")
    scale, norm, skips = figure.subplots(3, sharex=True, height_ratios=[2, 2, 1])
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
    _draw_skips(skips, history)
    return figure


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
