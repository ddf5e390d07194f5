"""A picture of the distances between the results of two levels, as a PNG."""

import math
import posixpath
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import offset_copy

import tritonamp

FORWARD, BACKWARD, ODD = "tab:blue", "tab:orange", "#d62728"
LEAST = 1e-2  # ulps; smaller distances are drawn here, at the foot of the picture
HALF_AN_ULP = 0.5  # ulps; the error of rounding once
NAMED = 4  # number of results with a text, those that grow most


def save_picture(model: str, compared: tritonamp.Comparison, path: Path) -> None:
    """Draw each result in the order in which it was computed, and save the picture to ``path``."""
    drawn(model, compared).savefig(path, dpi=120)


def drawn(model: str, compared: tritonamp.Comparison) -> Figure:
    """Return the picture. Distances of inf and NaN are named marks at its upper edge."""
    ulps = [each.ulps for each in compared.differences if not each.parameter]
    backward = [each.backward for each in compared.differences if not each.parameter]
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.subplots()
    axes.set(
        yscale="log",
        ylim=(LEAST / 2, 20 * max([1.0, *filter(math.isfinite, ulps)])),
        xlim=(-0.5, max(len(ulps), 2) - 0.5),
        xlabel="results, in the order in which they were computed",
        ylabel="off by, in ulps (root mean square)\nat the foot: the same",
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for label, color, is_backward in (("forward", FORWARD, False), ("backward", BACKWARD, True)):
        at = [n for n, own in enumerate(backward) if own == is_backward and math.isfinite(ulps[n])]
        if at:
            heights = [max(ulps[n], LEAST) for n in at]
            axes.plot(at, heights, ".", color=color, markersize=7, label=label)
    edge: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "clip_on": False, "color": ODD}
    for word, marker, has in (
        ("inf: inf or NaN at one level only", "^", math.isinf),
        ("NaN", "x", math.isnan),
    ):
        at = [n for n, value in enumerate(ulps) if has(value)]
        if at:
            axes.plot(at, [1] * len(at), marker, markersize=5, label=word, **edge)
            axes.text(at[-1], 1, f" {word[:3]}", va="bottom", fontsize=9, **edge)
    axes.axhline(HALF_AN_ULP, color="0.6", lw=1, ls=":", label="half an ulp: rounded once")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1.04), ncols=4, fontsize=9)
    names = _name(figure, axes, compared)
    if names:
        figure.legend(handles=names, frameon=False, loc="outside lower left", fontsize=9)
    figure.suptitle(
        f"{model}: {compared.level} against {compared.reference}", fontsize=12, weight="bold"
    )
    return figure


def _name(figure: Figure, axes: Axes, compared: tritonamp.Comparison) -> list[Line2D]:
    """Draw numbers at the first difference and those that grow most; return them with texts."""
    results = [each for each in compared.differences if not each.parameter]
    parted = [n for n, each in enumerate(results) if each.parts]
    grown = sorted(parted, key=lambda number: -results[number].growth)[:NAMED]
    marks = []
    for number, at in enumerate(sorted({*parted[:1], *grown}), 1):
        each = results[at]
        text = f"{each.place.module or 'the model itself'}: {each.op}"
        if each.place.line:
            text += f", {posixpath.basename(each.place.line)}"
        # next to the point, not on it
        data, y, height = axes.transData, 9, max(each.ulps, LEAST)
        if not math.isfinite(each.ulps):
            data, y, height = axes.get_xaxis_transform(), -9, 1.0
        marks += axes.plot(
            [at],
            [height],
            marker=f"${number}$",
            linestyle="none",
            color="black",
            transform=offset_copy(data, figure, y=y, units="points"),
            label=f"they part: {text}" if number == 1 else text,
        )
    return marks
