"""A picture of a run's steps: loss, loss scale, gradient norm, skips by cause, mismatches."""

import importlib
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tritonamp.diagnosis.records import MismatchRecord, StepRecord
from tritonamp.diagnosis.skips import Cause
from tritonamp.names import short
from tritonamp.policy import LEVELS, Policy

_OF_THE_LOSS = {c.value for c in (Cause.DATA, Cause.FORWARD, Cause.PARAMETERS, Cause.DIVERGENCE)}
"""Causes under which a loss that is not known was inf or NaN."""
_FEW = 100  # steps with large points
_WIDE = 100  # ratio of losses that have a logarithmic axis
_NAME, _TITLE = 28, 65  # characters of a module's name, and of a line of the title
_ODD = "tab:red"


def save_picture(
    history: Sequence[StepRecord],
    path: str | Path,
    mismatches: Sequence[MismatchRecord] = (),
    title: str = "",
    in_turn: bool = False,
) -> Path:
    """Write the picture to ``path``, in the format of its suffix, and return the path.

    Raises:
        RuntimeError: there was no step yet.
        ValueError: matplotlib cannot write files with this suffix.
        ImportError: matplotlib is not installed.
    """
    if not history:
        raise RuntimeError("amp.plot(): expected a step in amp.history, got none: train first")
    path, figure = Path(path), picture(history, mismatches, title, in_turn)
    formats = figure.canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in formats:
        raise ValueError(
            "path: expected a name that ends in .png, .svg or another of matplotlib's "
            f"({', '.join(sorted(formats))}), got {str(path)!r}"
        )
    figure.savefig(path, dpi=120)
    return path


def title(models: Sequence[nn.Module], policy: Policy) -> str:
    """Return classes of the models, level and dtype, like "Net: O2, float16"."""
    classes = [type(getattr(model, "_orig_mod", model)).__name__ for model in models]
    dtype = short(policy.dtype if policy.op_policy or policy.cast_model else torch.float32)
    kinds = {(p.op_policy, p.cast_model, p.master_weights): name for name, p in LEVELS.items()}
    level = kinds.get((policy.op_policy, policy.cast_model, policy.master_weights))
    return f"{' + '.join(classes)}: {', '.join(filter(None, [level, dtype]))}"


def picture(
    history: Sequence[StepRecord],
    mismatches: Sequence[MismatchRecord] = (),
    title: str = "",
    in_turn: bool = False,
) -> Any:
    """Return a matplotlib ``Figure`` with panels above one another, over the numbers of the steps.

    The panel of losses is left out if no loss is known, that of mismatches if there are none. It
    does not use pyplot, so it needs no display and leaves no global state.

    Args:
        history: steps, the oldest first; at least one.
        mismatches: mismatches that have arrived.
        title: first words of the title, before the number of steps.
        in_turn: whether steps of several losses or optimizers take turns. Their points are then not
            connected.
    """
    try:
        figure_class = importlib.import_module("matplotlib.figure").Figure
    except ImportError as error:
        raise ImportError(
            "amp.plot() draws with matplotlib, which is not installed: "
            'pip install matplotlib, or pip install "tritonamp[demo]"'
        ) from error
    losses = [_loss(record) for record in history]
    known = [loss for loss in losses if loss is not None and math.isfinite(loss)]
    causes = [c.value for c in Cause if any(record.cause == c.value for record in history)]
    heights = [2.0] * bool(known) + [1.6, 1.6] + [1.6] * bool(mismatches)
    heights.append(0.3 + 0.4 * max(len(causes), 1))
    figure = figure_class(figsize=(7.5, 1.5 + sum(heights)), layout="constrained")
    panels = list(figure.subplots(len(heights), sharex=True, height_ratios=heights))
    *curves, skips = panels
    steps = [record.step for record in history]
    span = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    words = textwrap.fill(f"{title}, {span}" if title else span, _TITLE)
    figure.suptitle(words, fontsize=11, weight="bold")
    style = {"linestyle": "none"} if in_turn else {}
    if known:
        wide = 0 < min(known) < max(known) / _WIDE
        _draw_curve(curves.pop(0), "loss", steps, losses, 10 if wide else 0, "inf or NaN", **style)
    scales = [record.scale for record in history]
    _draw_curve(curves.pop(0), "loss scale", steps, scales, 2, drawstyle="steps-mid", **style)
    # a gap where a step was skipped
    norms = [record.grad_norm for record in history]
    _draw_curve(curves.pop(0), "gradient norm", steps, norms, 10, **style)
    if mismatches:
        _draw_mismatches(curves.pop(0), mismatches)
    _draw_skips(skips, panels, history, causes)
    return figure


def _loss(record: StepRecord) -> float | None:
    """Return the loss of a step; NaN if it was inf or NaN, None if it is not known."""
    return math.nan if record.loss is None and record.cause in _OF_THE_LOSS else record.loss


def _draw_curve(
    axes: Any,
    label: str,
    steps: Sequence[int],
    values: Sequence[float | None],
    base: int,
    nan: str = "NaN",
    color: str = "C0",
    **style: str,
) -> None:
    """Draw a curve with gaps for None. Values that have no place on the axis are at its edges.

    Args:
        axes: panel.
        label: name of the values.
        steps: number of each value's step.
        values: values.
        base: base of a logarithmic axis, which takes a positive value; 0: a linear axis.
        nan: name of NaN.
        color: color of the curve.
        style: further settings of the curve.
    """
    shown = [math.nan if value is None else value for value in values]
    size = 6 if len(steps) < _FEW else 3
    axes.plot(steps, shown, marker=".", markersize=size, linewidth=1, color=color, **style)
    axes.set_ylabel(label, color="black" if color == "C0" else color)
    is_log = base > 0 and any(0 < value < math.inf for value in shown)
    if is_log:
        axes.set_yscale("log", base=base, nonpositive="mask")
    known = [(step, value) for step, value in zip(steps, values, strict=True) if value is not None]
    odd = {
        "\N{BLACK UP-POINTING TRIANGLE} inf": [s for s, value in known if value == math.inf],
        f"\N{MULTIPLICATION SIGN} {nan}": [s for s, value in known if math.isnan(value)],
        "\N{BLACK DOWN-POINTING TRIANGLE} -inf": [s for s, value in known if value == -math.inf],
        "\N{BLACK DOWN-POINTING TRIANGLE} 0": [s for s, value in known if is_log and value == 0],
    }
    for at, marker, height in zip(odd.values(), "^xvv", (1, 1, 0, 0), strict=True):
        edge = {"transform": axes.get_xaxis_transform(), "clip_on": False, "zorder": 3}
        if at:
            axes.plot(at, [height] * len(at), marker, markersize=5, color=_ODD, **edge)
    words = "   ".join(word for word, at in odd.items() if at)
    axes.set_title(words, loc="left" if color == "C0" else "right", fontsize=9, color=_ODD)


def _draw_mismatches(axes: Any, mismatches: Sequence[MismatchRecord]) -> None:
    """Draw k3 to the left axis, and the share of ratios outside of the band to the right one."""
    steps = [m.step for m in mismatches]
    axes.set(title="distance from the sampler's log-probabilities")
    _draw_curve(axes, "k3, mean per token", steps, [m.k3 for m in mismatches], 10)
    axes.yaxis.label.set_color("C0")
    shares = axes.twinx()
    outside = [100 * m.outside for m in mismatches]
    _draw_curve(shares, "% of tokens out of band", steps, outside, 0, color="C1")
    shares.set_ylim(-5, 105)


def _draw_skips(
    axes: Any, panels: Sequence[Any], history: Sequence[StepRecord], causes: Sequence[str]
) -> None:
    """Draw a row of marks for each cause, and a faint line through all panels for each skip."""
    rows, skipped = [], 0
    for row, cause in enumerate(causes):
        records = [record for record in history if record.cause == cause]
        steps, color = [record.step for record in records], f"C{row + 1}"
        axes.plot(steps, [row] * len(steps), "|", markersize=12, label=cause, color=color)
        for panel in panels:
            foot = {"transform": panel.get_xaxis_transform(), "zorder": 0}
            panel.vlines(steps, 0, 1, color=color, alpha=0.15, linewidth=1, **foot)
        rows.append("\n".join([f"{cause} ({len(steps)})", *_module(records[-1])]))
        skipped += len(steps)
    axes.set_xlabel("step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    # above the panel, which is too low for it
    axes.set_ylabel(f"{skipped} of {len(history)} skipped", rotation=0, ha="left", va="bottom")
    axes.yaxis.set_label_coords(0, 1.02)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(max(len(rows), 1) - 0.5, -0.5)


def _module(record: StepRecord) -> list[str]:
    """Return the last module with gradients that were not finite, if there is one."""
    names = [name.rpartition(".")[0] or name for name in record.parameters[-1:]]
    return [f"in {name if len(name) <= _NAME else f'...{name[3 - _NAME :]}'}" for name in names]
