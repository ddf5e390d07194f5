"""A picture of the distances between the results of two levels, as a PNG."""

import math
import posixpath
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

import tritonamp

FORWARD, BACKWARD, INFINITE = "tab:blue", "tab:orange", "#d62728"
LEAST = 1e-2  # ulps; smaller distances are drawn here, at the foot of the picture
HALF_AN_ULP = 0.5  # ulps; the error of rounding once
NAMED = 4  # number of results with a text, those that grow most


def save_picture(model: str, compared: tritonamp.Comparison, path: Path) -> None:
    """Draw each result in the order in which it was computed, and save the picture to ``path``."""
    results = [each for each in compared.differences if not each.parameter]
    top = 10 * max([1.0, *(each.ulps for each in results if math.isfinite(each.ulps))])
    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.subplots()
    axes.set(
        yscale="log",
        ylim=(LEAST / 2, 4 * top),
        xlabel="results, in the order in which they were computed",
        ylabel="off by, in ulps (root mean square); at the foot: the same",
    )
    for label, color, shown in (
        ("forward", FORWARD, lambda each: not each.backward),
        ("backward", BACKWARD, lambda each: each.backward),
        ("inf or NaN", INFINITE, lambda each: math.isinf(each.ulps)),
    ):
        at = [number for number, each in enumerate(results) if shown(each)]
        heights = [min(max(results[number].ulps, LEAST), top) for number in at]
        if at:
            axes.plot(at, heights, ".", color=color, markersize=7, label=label)
    axes.axhline(HALF_AN_ULP, color="0.6", lw=1, ls=":", label="half an ulp: rounded once")
    _name(axes, compared, top)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, loc="outside lower center", ncols=4)
    figure.suptitle(
        f"{model}: {compared.level} against {compared.reference}", fontsize=13, weight="bold"
    )
    figure.savefig(path, dpi=120)


def _name(axes: Axes, compared: tritonamp.Comparison, top: float) -> None:
    """Write module, operation and line next to the first difference and those that grow most."""
    results = [each for each in compared.differences if not each.parameter]
    parted = [n for n, each in enumerate(results) if each.parts]
    grown = sorted(parted, key=lambda number: -results[number].growth)[:NAMED]
    for number in {*parted[:1], *grown}:
        each, first = results[number], number == parted[0]
        text = f"{each.place.module or 'the model itself'}: {each.op}"
        if each.place.line:
            text += f", {posixpath.basename(each.place.line)}"
        axes.annotate(
            f"they part: {text}" if first else text,
            (number, min(each.ulps, top)),
            xytext=(4, 6),
            textcoords="offset points",
            fontsize=9,
            weight="bold" if first else "normal",
        )
