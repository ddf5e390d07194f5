"""Tables and pictures from the committed measurements in bench/results/, and nothing else.

    python bench/report.py            # prints
    python bench/report.py --folder results-of-another-machine/
    python bench/report.py --write    # fills README.md and bench/README.md between their "bench:"
                                      # marks, and draws the pictures

Ratios are times: 2.0x means that the peer takes twice as long, 0.5x that it takes half. Those below
1 are bold.
"""

import argparse
import json
import re
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import convergence
import peer_tables
import pictures
from peers import PEERS

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
README = ROOT / "bench" / "README.md"
LINK = "results"  # from there
FRONT_PAGE = ROOT / "README.md"
FRONT_LINK = "bench/results"
NO_GPU = "Nothing has been run or measured on a GPU yet."
NOT_MEASURED = """Not measured yet. On a machine with an NVIDIA GPU, in ten minutes:

```
pip install -e ".[bench]" && python bench/run.py && python bench/report.py --write
```"""
SLOWER_SHOWN = 20
STEP, TRAINING = "full step", "training step"  # groups that the page has every row of

Record = dict[str, Any]
Row = dict[str, Any]


def load(folder: Path) -> dict[str, Record]:
    """By name of the file, what ``run.py`` wrote; quick runs only where there is no full one."""
    paths = [
        path
        for path in sorted(folder.glob("*.json"))
        if not path.stem.startswith(("convergence-", "counts-"))
    ]
    full = [path for path in paths if not path.stem.endswith("-quick")]
    return {path.stem: json.loads(path.read_text()) for path in full or paths}


def is_ours(row: Row) -> bool:
    return row["peer"].startswith("tritonamp")


def speed(records: dict[str, Record], link: str) -> str:
    """Return the Markdown of all GPUs.

    Args:
        records: what was measured, by file.
        link: folder of the pictures, as the page has to name it.
    """
    parts = [_one(stem, record, link) for stem, record in records.items()]
    return "\n\n".join(parts) if parts else NOT_MEASURED


def _one(stem: str, record: Record, link: str) -> str:
    rows = record["rows"]
    bandwidths = sorted({row["copy_gb_per_s"] for row in rows})
    head = (
        f"**{record['device']}**, torch {record['torch']}, Triton {record['triton']}, "
        f"commit {record['commit']}, `{record['command']}`, {record['date']}. "
        f"A copy moves {_range(bandwidths)} GB/s; "
        f"every row is in [{stem}.json]({link}/{stem}.json). Ratios: "
        "how many times longer the peer takes; **bold**: we lose."
    )
    shown = [f"![{name}]({link}/{file})" for name, file in pictures.names(stem, rows).items()]
    lines = [
        row
        for row in rows
        if is_ours(row) and row["headline"] and row["group"] not in (STEP, TRAINING)
    ]
    steps = [row for row in rows if is_ours(row) and row["group"] == STEP]
    models = [row for row in rows if row["group"] == TRAINING]
    tables = [
        make(own) for make, own in ((table, lines), (table, steps), (training_table, models)) if own
    ]
    return "\n\n".join(
        [_wrapped(head), *shown, *tables, slower(rows), _wrapped(absent(record["not_measured"]))]
    )


def summary(records: dict[str, Record], link: str) -> str:
    """Return the Markdown of the front page: of one GPU a row of each group, a picture.

    Before there is one: what an emulator counted.
    """
    if not records:
        return peer_tables.short(peer_tables.load(), NO_GPU)
    stem, record = next(iter(records.items()))
    head = (
        f"On {record['device']}, beside torch {record['torch']} (2.00x: it takes twice as long; "
        "**bold**: we lose); all rows are in [bench](bench/README.md):"
    )
    shown = [row for row in record["rows"] if is_ours(row) and row["headline"]]
    firsts = {row["group"]: row for row in reversed(shown)}
    lines = [_line("what", "time", "of copy bandwidth", "beside"), _line(*["---"] * 4)]
    for row in reversed(firsts.values()):
        peers = [peer for peer in row["ratio"] if PEERS[peer].process in ("torch", "compile")]
        beside = ", ".join(f"{peer} {_ratio(row['ratio'][peer])}" for peer in peers)
        time = f"{_number(row['us'])} us" if row["us"] < 1e4 else f"{_number(row['us'] / 1e3)} ms"
        lines.append(_line(row["case"], time, _number(row["fraction_of_copy"], 2), beside))
    pictured = [
        f"![{name}]({link}/{file})" for name, file in pictures.names(stem, record["rows"]).items()
    ]
    return "\n\n".join([_wrapped(head), "\n".join(lines), *pictured[:1]])


def table(rows: list[Row]) -> str:
    """Our rows, a column for each peer that one of them has."""
    peers = list(
        dict.fromkeys(
            peer for row in rows for peer in row["ratio"] if not peer.startswith("tritonamp")
        )
    )
    lines = [
        _line("what", "us", "GB/s", "of copy", "host us", "peak MiB", *peers),
        _line(*["---"] * (6 + len(peers))),
    ]
    for row in rows:
        peak = None if row["peak_bytes"] is None else row["peak_bytes"] / 2**20
        numbers = _number(row["us"]), _number(row["gb_per_s"]), _number(row["fraction_of_copy"], 2)
        numbers += _number(row["host_us"]), _number(peak)
        lines.append(
            _line(row["case"], *numbers, *(_ratio(row["ratio"].get(peer)) for peer in peers))
        )
    return "\n".join(lines)


def training_table(rows: list[Row]) -> str:
    """Every mode of every model, with what torch.amp takes as a ratio."""
    lines = [
        _line("what", "mode", "ms a step", "peak MiB", "host us", "torch.amp"),
        _line(*["---"] * 6),
    ]
    for row in rows:
        peak = None if row["peak_bytes"] is None else row["peak_bytes"] / 2**20
        numbers = _number(row["us"] / 1e3), _number(peak), _number(row["host_us"])
        lines.append(
            _line(row["case"], row["peer"], *numbers, _ratio(row["ratio"].get("torch.amp")))
        )
    return "\n".join(lines)


def slower(rows: list[Row]) -> str:
    """Return where a peer takes less time, the worst first.

    The baseline of a training step in FP32 counts too.
    """
    lost = sorted(
        (ratio, row["case"] + row["peer"].removeprefix("tritonamp"), peer)
        for row in rows
        if is_ours(row)
        for peer, ratio in row["ratio"].items()
        if ratio < 1 and not peer.startswith("tritonamp")
    )
    count = sum(
        not peer.startswith("tritonamp") for row in rows if is_ours(row) for peer in row["ratio"]
    )
    if not lost:
        return f"Where we lose: in none of {count} comparisons."
    head = f"Where we lose, {len(lost)} of {count} comparisons:"
    lines = [head, "", _line("what", "peer", "ratio"), _line("---", "---", "---")]
    lines += [_line(name, peer, _ratio(ratio)) for ratio, name, peer in lost[:SLOWER_SHOWN]]
    if len(lost) > SLOWER_SHOWN:
        worst = _ratio(lost[SLOWER_SHOWN][0])
        lines += ["", f"and {len(lost) - SLOWER_SHOWN} more, none worse than {worst}."]
    return "\n".join(lines)


def absent(entries: list[Row]) -> str:
    """Return what the run could not measure, by reason."""
    reasons = Counter((entry["peer"], entry["reason"]) for entry in entries)
    if not reasons:
        return "Nothing was left out."
    what = (
        f"{peer}: {reason}" + f" ({count} cases)" * (count > 1)
        for (peer, reason), count in reasons.items()
    )
    return "Not measured: " + "; ".join(what) + "."


def training_results(folder: Path, study: str) -> str:
    """Return what a study of ``convergence.py`` found, for each device."""
    parts = []
    for path in sorted(folder.glob(f"convergence-{study}-*.json")):
        record = json.loads(path.read_text())
        steps = {run["task"]: run["steps"] for run in record["runs"]}
        told = " and ".join(f"{number} steps of {task}" for task, number in steps.items())
        seeds = len({run["seed"] for run in record["runs"]})
        about = (
            f"{f'Mean of {seeds} seeds (lowest to highest)' if seeds > 1 else 'One seed'}. "
            f"Training loss: {record['loss']}; "
            "test score: accuracy in percent (digits), loss (others). "
            f"{told} in {record['dtype']} on {record['device']}, torch {record['torch']}, "
            f"commit {record['commit']}, `{record['command']}`; "
            f"every run is in `{path.relative_to(folder.parents[1])}`."
        )
        parts.append(f"{convergence.markdown(record['runs'])}\n\n{_wrapped(about)}")
    return "\n\n".join(parts) or f"Not measured yet: `python bench/convergence.py {study}`"


def filled(text: str, name: str, body: str) -> str:
    """``text`` with what is between the marks ``bench:name`` and ``/bench:name`` replaced.

    Raises:
        ValueError: the marks are not there.
    """
    pattern = re.compile(rf"(<!-- bench:{name}[^>]*-->\n).*?(<!-- /bench:{name} -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"no <!-- bench:{name} --> ... <!-- /bench:{name} --> to fill")
    return pattern.sub(lambda found: f"{found[1]}{body}\n{found[2]}", text)


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False)


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _number(value: float | None, digits: int | None = None) -> str:
    if value is None:
        return ""
    return (
        f"{value:.{digits}f}"
        if digits is not None
        else f"{value:.1f}"
        if value < 100
        else f"{value:.0f}"
    )


def _ratio(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f}x" if value >= 1 else f"**{value:.2f}x**"


def _range(values: list[float]) -> str:
    low, high = values[0], values[-1]
    return f"{low:.0f}" if round(low) == round(high) else f"{low:.0f} to {high:.0f}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Tables and pictures from the committed measurements."
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="fill README.md and bench/README.md, and draw the pictures beside the results",
    )
    parser.add_argument("--folder", type=Path, help="print what this folder holds")
    args = parser.parse_args(arguments)
    if args.write and args.folder:
        parser.error("expected --write or --folder: the pages show bench/results/ alone")
    folder = args.folder or RESULTS
    records = load(folder)
    studies = {study: training_results(folder, study) for study in convergence.STUDIES}
    pages = {
        FRONT_PAGE: {"summary": summary(records, FRONT_LINK)},
        README: {
            "speed": speed(records, LINK),
            "counts": peer_tables.page(peer_tables.load()),
            **studies,
        },
    }
    if not args.write:
        for sections in pages.values():
            print(*(f"{name}\n\n{body}\n" for name, body in sections.items()), sep="\n")
        return 0
    for page, sections in pages.items():
        text = page.read_text()
        for name, body in sections.items():
            text = filled(text, name, body)
        page.write_text(text)
    for stem, record in records.items():
        pictures.draw(record["rows"], RESULTS, stem)
    return 0


if __name__ == "__main__":
    sys.exit(main())
