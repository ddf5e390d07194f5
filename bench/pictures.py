"""The pictures, each drawn only if it has rows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

Row = dict[str, Any]
SOFTMAX = "softmax forward", "softmax backward"
# place of a legend: below the axes, where it hides no bar
BELOW: Row = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.12), "ncols": 3, "frameon": False}
STEPS, TRAINING = "full step", "training step"  # groups that the page has every row of


def names(stem: str, rows: list[Row]) -> dict[str, str]:
    """Return the file names of pictures that have rows, by title."""
    return {
        title: f"{stem}-{name}.png"
        for name, (title, has, _) in PICTURES.items()
        if any(map(has, rows))
    }


def draw(rows: list[Row], folder: Path, stem: str) -> list[Path]:
    """Write the pictures."""
    written = []
    for name, (title, has, picture) in PICTURES.items():
        own = [row for row in rows if has(row)]
        if own:
            figure = Figure(figsize=(12, 5.5), layout="constrained")
            figure.suptitle(f"{title}: {own[0]['device']}, torch {own[0]['torch']}")
            picture(figure.subplots(1, 2), own)
            written.append(folder / f"{stem}-{name}.png")
            figure.savefig(written[-1], dpi=110)
    return written


def _is_a_point(row: Row) -> bool:
    """Return whether the curves show a length, which they do for powers of two.

    Other lengths would make jumps; they are in the tables.
    """
    if row["group"] not in SOFTMAX or row["dtype"] != "bfloat16" or row["shape"].count("x") != 1:
        return False
    return _length(row).bit_count() == 1


def _length(row: Row) -> int:
    return int(row["shape"].split("x")[1])


def _bandwidth(axes: Any, rows: list[Row]) -> None:
    for ax, group in zip(axes, SOFTMAX, strict=True):
        own = [row for row in rows if row["group"] == group]
        for peer in _peers(own):
            points = sorted((_length(r), r["fraction_of_copy"]) for r in own if r["peer"] == peer)
            ax.plot(
                *zip(*points, strict=True),
                marker="o",
                linewidth=3 if peer == "tritonamp" else 1.5,
                label=peer,
            )
        ax.set(
            title=f"{group}, bfloat16",
            xlabel="row length",
            ylabel="fraction of copy bandwidth",
        )
        ax.set_xscale("log", base=2)
        ax.set_ylim(0)
        ax.grid(alpha=0.3)
        if own:
            ax.legend(**BELOW)


def _step(axes: Any, rows: list[Row]) -> None:
    _bars(axes[0], rows, lambda row: row["us"] / 1e3, "ms", log=True)
    moved = [row for row in rows if row["path_bytes_per_element"]]
    first = [row for row in moved if row["case"] == moved[0]["case"]]
    axes[1].barh([row["peer"] for row in first], [row["path_bytes_per_element"] for row in first])
    axes[1].set(title="bytes for each parameter, declared", xlabel="B")


def _training(axes: Any, rows: list[Row]) -> None:
    _bars(axes[0], rows, lambda row: row["us"] / 1e3, "ms a step")
    _bars(axes[1], rows, lambda row: row["peak_bytes"] / 2**20, "peak MiB")


def _bars(
    ax: Axes, rows: list[Row], value: Callable[[Row], float], label: str, log: bool = False
) -> None:
    """Draw a group of bars for each case, a colour for each peer."""
    cases, peers = list(dict.fromkeys(row["case"] for row in rows)), _peers(rows)
    height = 0.8 / len(peers)
    for i, peer in enumerate(peers):
        own = [row for row in rows if row["peer"] == peer]
        places = [cases.index(row["case"]) + i * height for row in own]
        ax.barh(places, [value(row) for row in own], height, label=peer)
    ax.set_yticks(
        [place + 0.4 for place in range(len(cases))], [case.replace(", ", "\n") for case in cases]
    )
    ax.set(xlabel=label, xscale="log" if log else "linear")
    ax.invert_yaxis()
    ax.legend(**BELOW)


def _peers(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(row["peer"] for row in rows))


PICTURES: dict[str, tuple[str, Callable[[Row], bool], Callable[[Any, list[Row]], None]]] = {
    "bandwidth": ("Fraction of copy bandwidth over row length", _is_a_point, _bandwidth),
    "step": ("Optimizer step with clipping", lambda row: row["group"] == STEPS, _step),
    "training": (
        "Training steps",
        lambda row: row["group"] == TRAINING and row["peak_bytes"] is not None,
        _training,
    ),
}
