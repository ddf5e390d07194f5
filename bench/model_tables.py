"""``counts.py --models``: the process that counts, and the tables of the page."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import provenance
from markdown import paragraph, table
from toy_models import MODELS

RESULT = Path(__file__).parent / "results" / "counts-models.json"
COMMAND = "python bench/counts.py --models --snapshot"
PINNED = "torch", "triton", "transformers", "diffusers"
PRODUCTS = "products"
ENVIRONMENT = {
    "TRITON_INTERPRET": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}
LARGEST, LARGEST_ON_PAGE = 10, 3  # operations of a row
TELLING = "O2"  # the way whose operations the page shows

Row = dict[str, Any]


def unknown(only: str) -> str | None:
    """Return an error if the regular expression finds no model, or is none."""
    try:
        found = any(re.search(only, name) for name in MODELS)
    except re.error as error:
        return f"--only: expected a regular expression, got {only!r}: {error}"
    names = ", ".join(map(repr, MODELS))
    return None if found else f"--only: {only!r} finds no model; expected a part of one of {names}"


def count_models(only: str) -> Row:
    """Count the models whose name ``only`` finds.

    Returns:
        The record: "rows" with bytes by kind, the bound and operations; "not_counted" with reasons;
        date, command, commit and "versions".
    """
    start = time.time()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        script = Path(__file__).with_name("model_counts.py")
        command = [sys.executable, str(script), str(path), "--only", only]
        env = os.environ | ENVIRONMENT
        code = subprocess.run(command, stdout=sys.stderr, check=False, env=env).returncode
        rows = list(map(json.loads, path.read_text().splitlines())) if path.exists() else []
    absent = [row for row in rows if "reason" in row]
    if code:
        absent.append({"model": "others", "reason": f"the process ended early: exit status {code}"})
    return {
        "date": time.strftime("%Y-%m-%d"),
        "command": COMMAND,
        "seconds": round(time.time() - start),
        "commit": provenance.commit(),
        "versions": provenance.versions(PINNED),
        "rows": [row for row in rows if "bytes" in row],
        "not_counted": absent,
    }


def largest(row: Row) -> list[Row]:
    """Return the LARGEST operations of a row that are no products."""
    return [op for op in row["ops"] if PRODUCTS not in op["bytes"]][:LARGEST]


def lines_of(found: Row) -> Iterator[str]:
    for row in found["rows"]:
        kinds = ", ".join(f"{kind} {_mb(size)}" for kind, size in row["bytes"].items())
        yield (
            f"{row['model']}, {row['way']}: {_mb(total(row))} MB, {_ratio(row)} times the bound of "
            f"{_mb(row['bound'])} MB: {kinds}"
        )
        for op in largest(row):
            yield (
                f"  {_mb(total(op)):>7} MB {op['direction']:8} {op['calls']:3} x {op['op']:28} "
                f"{op['line']} ({', '.join(op['bytes'])})"
            )
    for row in found["not_counted"]:
        yield f"{row['model']}{', ' + row['way'] if 'way' in row else ''}: {row['reason']}"


def total(row: Row) -> int:
    return sum(row["bytes"].values())


def _mb(size: int) -> str:
    return f"{size / 1e6:.2f}"


def _ratio(row: Row) -> str:
    return f"{total(row) / row['bound']:.1f}"


def page(found: Row | None) -> str:
    """Return the tables of the page: every model in every way, and their largest operations."""
    if found is None:
        return f"Not counted yet: `{COMMAND}`"
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    head = (
        f"MB of one forward and backward in float16, {found['date']}, commit {found['commit']}, "
        f"`{found['command']}` ({found['seconds']} s), {versions}. "
        f"[{RESULT.name}](results/{RESULT.name}) has the {LARGEST} largest operations of each row."
    )
    absent = ". ".join(
        f"{row['model']} {row.get('way', '')}".strip() + f": {row['reason']}"
        for row in found["not_counted"]
    )
    parts = [paragraph(head), _kinds(found["rows"]), *([paragraph(absent)] if absent else [])]
    largest_head = f"The largest operations at {TELLING} other than products:"
    return "\n\n".join([*parts, largest_head, _operations(found["rows"])])


def _kinds(rows: list[Row]) -> str:
    names = list(rows[0]["bytes"])
    return table(
        ("model", "way", "all", *names, "bound", "all / bound"),
        [
            (
                row["model"],
                row["way"],
                _mb(total(row)),
                *(_mb(row["bytes"][name]) for name in names),
                _mb(row["bound"]),
                _ratio(row),
            )
            for row in rows
        ],
    )


def _operations(rows: list[Row]) -> str:
    return table(
        ("model", "operation", "calls", "MB", "kind", "line"),
        [
            (
                row["model"],
                f"{op['op']}, {op['direction']}",
                str(op["calls"]),
                _mb(total(op)),
                ", ".join(op["bytes"]),
                op["line"],
            )
            for row in rows
            if row["way"] == TELLING
            for op in largest(row)[:LARGEST_ON_PAGE]
        ],
    )


def load(path: Path = RESULT) -> Row | None:
    return json.loads(path.read_text()) if path.exists() else None


def main(only: str, as_json: bool, snapshot: bool) -> int:
    found = count_models(only)
    if snapshot:
        rows = [row | {"ops": largest(row)} for row in found["rows"]]
        provenance.write_record(RESULT, found | {"rows": rows})
    elif as_json:
        for kind in ("rows", "not_counted"):
            for row in found[kind]:
                print(json.dumps(row))
    else:
        print(*lines_of(found), sep="\n")
    return 0 if found["rows"] else 1
