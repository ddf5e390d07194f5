"""The runs of a story as a PNG, over the same steps: loss, loss scale, skipped steps."""

import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

from tritonamp.demo.measured import Run

# FP32, torch.amp, and ours: colors that differ for people who do not see red or green
COLORS = ["0.75", "#d55e00", "#0072b2", "#009e73"]
ZERO = -150  # exponent where a loss scale of 0 is drawn; the smallest number of FP32 has -149
SMOOTHED = 20  # number of steps whose mean is one point of a loss curve
WIDTH = 90  # characters of a line of text


def save_picture(fault: str, runs: Mapping[str, Run], cause: str, path: Path) -> None:
    """Draw and save the runs. pyplot is not used, because it needs a display and keeps state.

    Args:
        fault: what goes wrong, for the title.
        runs: runs by name.
        cause: the cause of skips in the words of tritonamp.
        path: path of the picture.
    """
    figure = Figure(figsize=(8, 6.5), layout="constrained")
    graded = {name: run for name, run in runs.items() if name != "FP32"}
    heights = [2.2, 1.6, 0.2 + 0.25 * len(graded)]
    loss, scale, skips = figure.subplots(3, sharex=True, height_ratios=heights)
    colors = dict(zip(["FP32", *graded], COLORS, strict=False))
    for name, run in runs.items():
        style = {"color": colors[name], "linewidth": 4 if name == "FP32" else 1.8}
        _draw_loss(loss, run, label=f"{name}: {run.shown_score}", **style)
    for row, (name, run) in enumerate(graded.items()):
        color = colors[name]
        steps, scales = zip(*run.scales, strict=True)
        exponents = [math.log2(value) if value else ZERO for value in scales]
        scale.plot(steps, exponents, drawstyle="steps-post", color=color, linewidth=1.8)
        scale.annotate(
            f" {_power(exponents[-1])}", (steps[-1], exponents[-1]), color=color, va="center"
        )
        skips.plot(run.skips, [row] * len(run.skips), "|", color=color, markersize=9)
    loss.set(ylabel=f"training loss, mean of\nfinite ones in {SMOOTHED} steps", yscale="log")
    lowest, highest = scale.get_ylim()
    scale.set(ylabel="loss scale", ylim=(lowest - 1, highest + 1))
    scale.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    scale.yaxis.set_major_formatter(lambda exponent, _: _power(exponent))
    labels = [f"{name}: {run.stats['skipped']} skipped" for name, run in graded.items()]
    skips.set_yticks(range(len(labels)), labels)
    skips.set(xlabel="step", ylim=(len(labels) - 0.5, -0.5))
    skips.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (loss, scale, skips):
        axes.spines[["top", "right"]].set_visible(False)
    loss.legend(loc="lower left", bbox_to_anchor=(0, 1.05), ncols=2, frameon=False)
    figure.suptitle(textwrap.fill(fault, WIDTH - 10), fontsize=12, weight="bold")
    figure.supxlabel(
        textwrap.fill(f"tritonamp says: {' '.join(cause.split())}", WIDTH), fontsize=10
    )
    with io.BytesIO() as file:
        figure.savefig(file, dpi=100)
        Image.open(file).convert("RGB").quantize().save(path, optimize=True)  # a quarter as large


def _draw_loss(axes: Axes, run: Run, **style: Any) -> None:
    """Draw the loss; where no loss of a window was finite, a mark at the upper edge says so."""
    means = _means_of_finite(run.losses)
    axes.plot(range(1, len(means) + 1), means, marker=".", markersize=3, **style)
    lost = [step for step, mean in enumerate(means, 1) if math.isnan(mean)]
    if lost:
        edge = {"transform": axes.get_xaxis_transform(), "color": style["color"]}
        axes.plot(lost, [1] * len(lost), "x", markersize=5, clip_on=False, **edge)
        axes.text(lost[-1], 1, " inf or NaN", va="bottom", **edge)


def _power(exponent: float) -> str:
    return "0" if exponent <= ZERO else f"$2^{{{exponent:g}}}$"


def _means_of_finite(losses: Sequence[float]) -> list[float]:
    """Return the mean of the finite losses of each window; NaN, a gap, where there are none."""
    means = []
    for end in range(1, len(losses) + 1):
        window = [loss for loss in losses[max(0, end - SMOOTHED) : end] if math.isfinite(loss)]
        means.append(sum(window) / len(window) if window else math.nan)
    return means
