"""Tables and pictures, made from the committed measurements in bench/results/ alone.

    python bench/report.py            # prints
    python bench/report.py --folder results-of-another-machine/
    python bench/report.py --write    # fills README.md, bench/README.md and the pages on RL and
                                      # hardware between their "bench:" marks, draws the pictures

A ratio of 2.0x means that the peer takes twice as long, 0.5x that it takes half. Ratios below 1 are
bold.
"""

import argparse
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import articles
import bitflips
import convergence
import first_summary
import jsonl
import matrix
import model_tables
import peer_tables
import pictures
import rl
import step_bytes
from markdown import multiple, paragraph, table
from peers import PEERS
from pictures import STEPS, TRAINING

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
README = ROOT / "bench" / "README.md"
LINK = "results"  # from there
FRONT_PAGE = ROOT / "README.md"
FRONT_LINK = "bench/results"
RL_PAGE = ROOT / "tritonamp" / "integrations" / "rl.md"
HARDWARE_PAGE = ROOT / "tritonamp" / "diagnosis" / "hardware.md"
NO_GPU = "Nothing has been run or measured on a GPU yet."
NOT_MEASURED = """Not measured yet. On a machine with an NVIDIA GPU, in six minutes:

```
bench/first_gpu.sh && python bench/report.py --write
```"""
SLOWER_SHOWN = 20

MACHINE = "device", "torch", "triton", "commit", "date"

Record = dict[str, Any]
Row = dict[str, Any]


def load(folder: Path) -> dict[str, Record]:
    """Return records by name of the run, for the run in ``folder`` or the runs in its folders."""
    paths = [folder / jsonl.ROWS, *sorted(folder.glob(f"*/{jsonl.ROWS}"))]
    records = {path.parent.name: record_of(path) for path in paths if path.exists()}
    return {name: record for name, record in records.items() if record["rows"]}


def record_of(path: Path) -> Record:
    """Return a file's rows with ratios, its machine, and the rows that were not measured.

    A later line of a row replaces the earlier one.
    """
    found = {(line.get("case"), line["peer"]): line for line in jsonl.read(path)}
    rows = [line for line in found.values() if "us" in line and line["clock"] != "host"]
    absent = [line for line in found.values() if "us" not in line]
    not_here = {line["peer"] for line in absent if "case" not in line}
    absent += [
        {"case": case.name, "peer": peer, "reason": jsonl.OUT_OF_TIME}
        for case in matrix.all_cases(toy=True)
        for peer in case.peers
        if peer not in not_here and (case.name, peer) not in found
    ]
    machine = {key: ", ".join(dict.fromkeys(row[key] for row in rows)) for key in MACHINE}
    return machine | {"rows": with_ratios(rows), "not_measured": absent}


def with_ratios(rows: list[Row]) -> list[Row]:
    """Add "ratio": by peer of the same case, the peer's time relative to this row's."""
    times: dict[str, dict[str, float]] = {}
    for row in rows:
        times.setdefault(row["case"], {})[row["peer"]] = row["us"]
    found = []
    for row in rows:
        others = {peer: us for peer, us in times[row["case"]].items() if peer != row["peer"]}
        found.append(row | {"ratio": {peer: us / row["us"] for peer, us in others.items()}})
    return found


def is_ours(peer: str) -> bool:
    return peer.startswith("tritonamp")


def speed(records: dict[str, Record], link: str) -> str:
    """Return the Markdown of all GPUs.

    Args:
        records: records by name of the run.
        link: folder of the runs, relative to the page.
    """
    parts = [_of_gpu(stem, record, link) for stem, record in records.items()]
    return "\n\n".join(parts) if parts else NOT_MEASURED


def _of_gpu(stem: str, record: Record, link: str) -> str:
    rows = record["rows"]
    bandwidths = sorted({row["copy_gb_per_s"] for row in rows})
    head = (
        f"**{record['device']}**, torch {record['torch']}, Triton {record['triton']}, "
        f"commit {record['commit']}, `python bench/run.py`, {record['date']}. "
        f"A copy moves {_range(bandwidths)} GB/s; "
        f"every row is in [{jsonl.ROWS}]({link}/{stem}/{jsonl.ROWS}). Ratios: "
        "how many times longer the peer takes; **bold**: we lose."
    )
    ours = [row for row in rows if is_ours(row["peer"])]
    telling = [row for row in ours if row["tier"] <= 2 and row["group"] not in (STEPS, TRAINING)]
    steps = [row for row in ours if row["group"] == STEPS]
    models = [row for row in rows if row["group"] == TRAINING]
    parts = [paragraph(head), *_pictures(stem, record, link)]
    parts += [our_table(own) for own in (telling, steps) if own]
    parts += [training_table(models)] if models else []
    return "\n\n".join([*parts, slower(rows), paragraph(absent(record["not_measured"]))])


def _pictures(stem: str, record: Record, link: str) -> list[str]:
    found = pictures.names(stem, record["rows"])
    return [f"![{title}]({link}/{file})" for title, file in found.items()]


def summary(records: dict[str, Record], link: str) -> str:
    """Return the front page's Markdown: of one GPU, a row of each group and a picture.

    Without results of a GPU it is the sentence that there are none.
    """
    if not records:
        return NO_GPU
    stem, record = next(iter(records.items()))
    head = (
        f"On {record['device']}, with torch {record['torch']} (2.00x: a peer takes twice as long; "
        "**bold**: we lose). All rows are in [bench](bench/README.md):"
    )
    shown = [row for row in record["rows"] if is_ours(row["peer"]) and row["tier"] <= 2]
    firsts = {row["group"]: row for row in reversed(shown)}
    rows = []
    for row in reversed(firsts.values()):
        peers = [peer for peer in row["ratio"] if PEERS[peer].process in ("torch", "compile")]
        ratios = ", ".join(f"{peer} {multiple(row['ratio'][peer])}" for peer in peers)
        time = f"{_number(row['us'])} us" if row["us"] < 1e4 else f"{_number(row['us'] / 1e3)} ms"
        rows.append((row["case"], time, _number(row["fraction_of_copy"], 2), ratios))
    drawn = table(("what", "time", "of copy bandwidth", "peers"), rows)
    return "\n\n".join([paragraph(head), drawn, *_pictures(stem, record, link)[:1]])


def our_table(rows: list[Row]) -> str:
    """Return a table of our rows, with a column for each peer in them."""
    peers = list(dict.fromkeys(p for row in rows for p in row["ratio"] if not is_ours(p)))
    shown = [
        (
            row["case"],
            _number(row["us"]),
            _number(row["gb_per_s"]),
            _number(row["fraction_of_copy"], 2),
            _number(row["host_us"]),
            _mib(row["peak_bytes"]),
            *(multiple(row["ratio"].get(peer)) for peer in peers),
        )
        for row in rows
    ]
    return table(("what", "us", "GB/s", "of copy", "host us", "peak MiB", *peers), shown)


def training_table(rows: list[Row]) -> str:
    """Return a table of every mode of every model, with the ratio to torch.amp."""
    shown = [
        (
            row["case"],
            row["peer"],
            _number(row["us"] / 1e3),
            _mib(row["peak_bytes"]),
            _number(row["host_us"]),
            multiple(row["ratio"].get("torch.amp")),
        )
        for row in rows
    ]
    return table(("what", "mode", "ms a step", "peak MiB", "host us", "torch.amp"), shown)


def slower(rows: list[Row]) -> str:
    """Return the cases in which a peer takes less time, the worst first.

    FP32 counts as a peer of a training step.
    """
    compared = [
        (ratio, row["case"] + row["peer"].removeprefix("tritonamp"), peer)
        for row in rows
        if is_ours(row["peer"])
        for peer, ratio in row["ratio"].items()
        if not is_ours(peer)
    ]
    lost = sorted(found for found in compared if found[0] < 1)
    if not lost:
        return f"Where we lose: in none of {len(compared)} comparisons."
    head = f"Where we lose, {len(lost)} of {len(compared)} comparisons:"
    shown = ((name, peer, multiple(ratio)) for ratio, name, peer in lost[:SLOWER_SHOWN])
    parts = [head, table(("what", "peer", "ratio"), shown)]
    if len(lost) > SLOWER_SHOWN:
        worst = multiple(lost[SLOWER_SHOWN][0])
        parts.append(f"and {len(lost) - SLOWER_SHOWN} more, none worse than {worst}.")
    return "\n\n".join(parts)


def absent(entries: list[Row]) -> str:
    """Return the rows that the run could not measure as text, by reason."""
    reasons = Counter((entry["peer"], entry["reason"]) for entry in entries)
    if not reasons:
        return "Nothing was left out."
    what = (
        f"{peer}: {reason}" + f" ({count} cases)" * (count > 1)
        for (peer, reason), count in reasons.items()
    )
    return "Not measured: " + "; ".join(what) + "."


def training_results(folder: Path, study: str) -> str:
    """Return the tables of a study of ``convergence.py``, one for each device."""
    parts = []
    for path in sorted(folder.glob(f"convergence-{study}-*.json")):
        record = json.loads(path.read_text())
        steps = {run["task"]: run["steps"] for run in record["runs"]}
        trained = " and ".join(f"{number} steps of {task}" for task, number in steps.items())
        seeds = len({run["seed"] for run in record["runs"]})
        about = (
            f"{f'Mean of {seeds} seeds (lowest to highest)' if seeds > 1 else 'One seed'}. "
            f"Training loss: {record['loss']}; "
            "test score: accuracy in percent (digits), loss (others). "
            f"{trained} in {record['dtype']} on {record['device']}, torch {record['torch']}, "
            f"commit {record['commit']}, `{record['command']}`; "
            f"every run is in `{path.relative_to(folder.parents[1])}`."
        )
        parts.append(f"{convergence.text(record['runs'])}\n\n{paragraph(about)}")
    return "\n\n".join(parts) or f"Not measured yet: `python bench/convergence.py {study}`"


def filled(text: str, name: str, body: str) -> str:
    """Return ``text`` with ``body`` between the marks ``bench:name`` and ``/bench:name``.

    Raises:
        ValueError: the marks are not there.
    """
    pattern = re.compile(rf"(<!-- bench:{name}[^>]*-->\n).*?(<!-- /bench:{name} -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"no <!-- bench:{name} --> ... <!-- /bench:{name} --> to fill")
    return pattern.sub(lambda found: f"{found[1]}{body}\n{found[2]}", text)


def _number(value: float | None, digits: int | None = None) -> str:
    if value is None:
        return ""
    if digits is None:
        digits = 1 if value < 100 else 0
    return f"{value:.{digits}f}"


def _mib(size: int | None) -> str:
    return _number(None if size is None else size / 2**20)


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
        help="fill the pages between their marks, and draw the pictures next to the results",
    )
    parser.add_argument("--folder", type=Path, help="print the results of one run")
    args = parser.parse_args(arguments)
    if args.write and args.folder:
        parser.error("expected --write or --folder: the pages show bench/results/ alone")
    if args.folder:
        print(first_summary.text(args.folder), speed(load(args.folder), "."), sep="\n\n")
        return 0
    folder = RESULTS
    records = load(folder)
    studies = {study: training_results(folder, study) for study in convergence.STUDIES}
    pages = {
        FRONT_PAGE: {"summary": summary(records, FRONT_LINK)},
        README: {
            "speed": speed(records, LINK),
            "articles": articles.results(folder),
            "bytes": step_bytes.page(),
            "short": peer_tables.short(peer_tables.load()),
            "counts": peer_tables.page(peer_tables.load()),
            "models": model_tables.page(model_tables.load()),
            **studies,
        },
        RL_PAGE: {"rl": rl.results()},
        HARDWARE_PAGE: {"bitflips": bitflips.results()},
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
