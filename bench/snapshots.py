"""Committed numbers of every launch, and the gate on their growth, for two scripts.

``static.py`` has numbers of machine code, and ``counts.py`` has executed instructions and bytes.
Each Triton version has its own files, with a line per launch: its numbers by architecture.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import triton

VERSION = ".".join(triton.__version__.split(".")[:2])
FOLDER = Path(__file__).parent / "static"
MAX_GROWTH = 1.15

Snapshot = dict[str, dict[str, list[float | None]]]


class Numbers(NamedTuple):
    """The committed numbers of one launch.

    Attributes:
        name: names of the call and the kernel.
        arch: architecture.
        target: architecture as text.
        values: the numbers by name; None if they are unknown for this architecture.
    """

    name: str
    arch: int | str
    target: str
    values: dict[str, float | None]


def growth_faults(now: Numbers, snapshot: Snapshot, file: str) -> list[str]:
    """Return the numbers that got worse than the committed ones of the same Triton version."""
    start = f"{now.target} {now.name}: "
    before = snapshot.get(now.name, {}).get(str(now.arch))
    if before is None:
        return [f"{start}not in {file}, write that with --snapshot"]
    return [
        f"{start}{new:g} {what}, {old:g} in {file}: allowed is {MAX_GROWTH} times as many"
        for (what, new), old in zip(now.values.items(), before, strict=True)
        if new is not None and old is not None and new > MAX_GROWTH * old
    ]


def snapshot_text(launches: Iterable[Numbers]) -> str:
    """Return the JSON of a file, with a line for each launch."""
    found: dict[str, dict[int | str, list[float | None]]] = {}
    for launch in launches:
        found.setdefault(launch.name, {})[launch.arch] = list(launch.values.values())
    lines = (f"{json.dumps(name)}: {json.dumps(found[name])}" for name in sorted(found))
    return "{\n" + ",\n".join(lines) + "\n}\n"


def parser_for(path: Path, description: str, archs: Sequence[int | str]) -> argparse.ArgumentParser:
    """Return a parser with the options that select builds, and ``--snapshot``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--arch",
        type=lambda text: int(text) if text.isdigit() else text,
        nargs="+",
        action="extend",
        choices=archs,
        metavar="N",
        help=f"architectures, like 80 {archs[-1]}",
    )
    parser.add_argument("--op", nargs="+", help="kernel modules, like softmax")
    parser.add_argument(
        "--only", default="", help="calls whose name this regular expression finds, like n=1024"
    )
    parser.add_argument("--snapshot", action="store_true", help=f"write {path.name}")
    return parser


def parsed(parser: argparse.ArgumentParser, arguments: list[str] | None) -> Any:
    args = parser.parse_args(arguments)
    if args.snapshot and (args.arch or args.op or args.only):
        parser.error("--snapshot takes everything: leave out --arch, --op and --only")
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        parser.error(
            "TRITON_INTERPRET is set: kernels would be interpreted, not compiled. Unset it"
        )
    return args


def finish(path: Path, launches: list[Numbers], failed: list[str], write: bool) -> int:
    """Write a snapshot or check growth against it; print failures, and return the exit status."""
    if write:
        path.write_text(snapshot_text(launches))
    elif path.exists():
        snapshot = json.loads(path.read_text())
        failed = failed + [f for now in launches for f in growth_faults(now, snapshot, path.name)]
    else:
        print(f"no {path.name}: growth is not checked for this version of Triton", file=sys.stderr)
    print(*failed, sep="\n", end="\n" if failed else "", file=sys.stderr)
    return 1 if failed else 0
