"""The curves of all runs as a PNG: loss above, loss scale below, one column per model."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tritonamp.demo.measured import Run

# each curve is thinner than the one below it, so that all can be seen
STYLES: dict[str, dict[str, Any]] = {
    "O0": {"color": "lightgray", "linewidth": 8},
    "O1": {"color": "tab:blue", "linewidth": 5},
    "O2": {"color": "tab:orange", "linewidth": 2.5},
    "O3": {"color": "black", "linewidth": 0.8},
}
SMOOTHED = 20  # number of steps whose mean is one point of a loss curve


def save_picture(runs: Sequence[Run], path: Path) -> None:
    """Draw and save the curves. pyplot is not used, because it needs a display and keeps state."""
    names = list(dict.fromkeys(run.task.name for run in runs))
    figure = Figure(figsize=(6 * len(names), 6.5), layout="constrained")
    axes = figure.subplots(2, len(names), squeeze=False, sharex="col", height_ratios=[2, 1])
    for (loss, scale), name in zip(axes.T, names, strict=True):
        own = [run for run in runs if run.task.name == name]
        for run in own:
            _draw_loss(loss, run)
            scale.plot(*zip(*run.scales, strict=True), drawstyle="steps-post", **STYLES[run.name])
        loss.set(title=own[0].task.title, ylabel=f"training loss, mean of {SMOOTHED} steps")
        loss.legend()
        scale.set(xlabel="step", ylabel="loss scale")
        scale.set_yscale("log", base=2)
    figure.savefig(path, dpi=120)


def _draw_loss(axes: Axes, run: Run) -> None:
    broken = next(
        (step for step, loss in enumerate(run.losses, 1) if not math.isfinite(loss)), None
    )
    label = f"{run.name}: {run.shown_score}" + (
        f", not finite from step {broken}" if broken else ""
    )
    axes.plot(_running_mean(run.losses), label=label, **STYLES[run.name])


def _running_mean(values: Sequence[float]) -> list[float]:
    windows = (values[max(0, end - SMOOTHED) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]
