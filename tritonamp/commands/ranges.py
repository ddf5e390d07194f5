"""A picture of a forecast's exponents against the range of its half format, as a PNG.

Gradients are drawn before and after loss scaling.
"""

import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MultipleLocator

import tritonamp

VALUES, GRADIENTS, SCALED = "tab:blue", "tab:orange", "tab:green"
LOST, POOR, FULL = "#d62728", "#f2c14e", "white"
# parts of the axis from left to right: name, fate of the values there, color
PARTS = [
    ("zero", "become zero", LOST),
    ("fewer bits", "lose bits", POOR),
    ("full precision", "", FULL),
    ("inf", "overflow", LOST),
]


def save_picture(forecast: tritonamp.Forecast, path: Path) -> None:
    """Draw three rows on one axis of powers of two, and save them to ``path``.

    The rows are the values of the forward, the gradients, and the scaled gradients.
    """
    dtype = forecast.asked.dtype
    outlook = forecast.formats[str(dtype).removeprefix("torch.")]
    values = _exponents(r.sizes.exponents for r in forecast.records if r.half and not r.scaled)
    gradients = _exponents(r.sizes.exponents for r in forecast.records if r.half and r.scaled)
    shift = round(math.log2(outlook.scale))
    scaled = Counter({exponent + shift: share for exponent, share in gradients.items()})
    rows = [
        ("values of the forward", values, VALUES),
        ("gradients, loss scale 1", gradients, GRADIENTS),
        (f"gradients, loss scale $2^{{{shift}}}$", scaled, SCALED),
    ]
    info = torch.finfo(dtype)
    edges = [
        round(math.log2(x))
        for x in (info.smallest_normal * info.eps / 2, info.smallest_normal, info.max)
    ]
    everything = [exponent for _, shares, _ in rows for exponent in shares]
    limits = min([edges[0] - 8, *everything]) - 1, max([edges[2] + 6, *everything]) + 2
    bounds = [limits[0], *edges, limits[1]]

    figure = Figure(figsize=(9, 7), layout="constrained")
    axes = figure.subplots(3, 1, sharex=True)
    for ax, (label, shares, color) in zip(axes, rows, strict=True):
        _draw(ax, label, shares, color, bounds)
    _name_parts(axes[0], bounds)
    axes[-1].set(xlabel="magnitude", xlim=limits)
    axes[-1].xaxis.set_major_locator(MultipleLocator(8 if limits[1] - limits[0] < 100 else 32))
    axes[-1].xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"$2^{{{x:.0f}}}$"))
    figure.suptitle(
        f"{forecast.model}: what {str(dtype).removeprefix('torch.')} holds",
        fontsize=13,
        weight="bold",
    )
    figure.savefig(path, dpi=120)


def _exponents(counts: Iterable[Counter[int]]) -> Counter[int]:
    """Return the share of each exponent in all nonzero values, in percent."""
    total = sum(counts, Counter())
    size = total.total()
    return Counter({exponent: 100 * n / size for exponent, n in total.items()})


def _draw(axes: Axes, label: str, shares: Counter[int], color: str, bounds: list[int]) -> None:
    fates = []
    for (_, fate, shade), left, right in zip(PARTS, bounds, bounds[1:], strict=False):
        axes.axvspan(left, right, color=shade, alpha=0.16, lw=0)
        share = sum(share for e, share in shares.items() if left <= e < right)
        if fate:
            fates.append(f"{fate} {_percent(share)}")
    height = 1.3 * max([1.0, *shares.values()])
    inside = [bounds[1] <= e < bounds[3] for e in shares]
    # even a few values that overflow matter
    heights = [
        share if fits else max(share, height / 50)
        for share, fits in zip(shares.values(), inside, strict=True)
    ]
    axes.bar(
        [e + 0.5 for e in shares],
        heights,
        width=0.88,
        color=[color if fits else LOST for fits in inside],
    )
    axes.set_title(label, loc="left", fontsize=11, color=color, weight="bold")
    axes.set(ylabel="% of values", ylim=(0, height))
    axes.spines[["top", "right"]].set_visible(False)
    text = "   ".join(fates) if shares else "none are stored in half"
    axes.set_title(text, loc="right", fontsize=9.5, color="0.25")


def _name_parts(axes: Axes, bounds: list[int]) -> None:
    for (name, _, shade), left, right in zip(PARTS, bounds, bounds[1:], strict=False):
        axes.text(
            (left + right) / 2,
            0.97,
            name,
            ha="center",
            va="top",
            color=LOST if shade == LOST else "0.35",
            transform=axes.get_xaxis_transform(),
        )


def _percent(share: float) -> str:
    return "0 %" if share == 0 else "< 0.1 %" if share < 0.1 else f"{share:.1f} %"
