"""Numbers of every shipped kernel's machine code for every architecture, with gates.

    python bench/static.py --op softmax --arch 80 90
    python bench/static.py --arch 90 --turns 4

Needs no GPU. A kernel joins by ``shipped()`` in its module, which returns
``tritonamp.kernels._shipped.Shipped``. The script prints a line per build, and failed gates on
stderr with exit status 1. The body of a loop counts once.
"""

import datetime
import json
import sys

import snapshots
from builds import ARCHITECTURES, Arch, all_builds
from gates import exp2_faults, faults, numbers
from machine_code import Row, measured

SNAPSHOT = snapshots.FOLDER / f"triton-{snapshots.VERSION}.json"


def line(row: Row) -> str:
    """Return a row of the table."""
    build = row.build
    size = f"{build.constants.get('ROWS', 1)}x{build.constants.get('BLOCK', 1)}"
    start = f"{build.target:<8}{build.name:64}{size:>8} {build.warps:2} warps "
    start += f"{row.registers:3} registers {row.shared:5} B shared {row.occupancy:4.0%}"
    if row.instructions is None:
        return f"{start}, not disassembled"
    loads, stores = (
        " ".join(f"{count}x{size}" for size, count in w.items()) for w in (row.loads, row.stores)
    )
    if row.in_flight is not None and row.ex2 is not None:
        start += f" {row.in_flight / 1024:4.0f} KiB in flight {row.ex2:4.2f} ex2"
    return (
        f"{start} {row.instructions:5.2f} instructions "
        f"{row.spills} spills, loads {loads}, stores {stores}"
    )


def of_today(turns: str, today: datetime.date | None = None) -> list[Arch]:
    """Return the architectures whose turn it is; each has a turn once in that many days.

    Raises:
        ValueError: ``turns`` is not the text of a positive integer.
    """
    day, number = (today or datetime.date.today()).toordinal(), int(turns)
    if number < 1:
        raise ValueError(f"expected at least one turn, got {number}")
    return list(ARCHITECTURES[day % number :: number])


def main(arguments: list[str] | None = None) -> int:
    description = "Builds every shipped kernel and checks what the compiler made of it."
    parser = snapshots.parser_for(SNAPSHOT, description, ARCHITECTURES)
    parser.add_argument(
        "--json", action="store_true", help="a JSON object for each build, on one line"
    )
    parser.add_argument(
        "--turns",
        type=of_today,
        action="extend",
        dest="arch",
        metavar="N",
        help="an N-th of all architectures, in addition to those of --arch: each day another",
    )
    args = snapshots.parsed(parser, arguments)
    archs = list(dict.fromkeys(args.arch or ARCHITECTURES))
    rows = []
    for row in measured(all_builds(args.op, archs, args.only)):
        fields = row._asdict() | {"build": row.build._asdict()}
        print(json.dumps(fields, default=str) if args.json else line(row), flush=True)
        rows.append(row)
    if not rows:
        parser.error("nothing to build: no kernel module has that name and ships such a call")
    failed = [message for row in rows for message in faults(row)] + exp2_faults(rows)
    return snapshots.finish(SNAPSHOT, list(map(numbers, rows)), failed, args.snapshot)


if __name__ == "__main__":
    sys.exit(main())
