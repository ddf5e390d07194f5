"""What the compiler makes of every shipped kernel, for every architecture, and the gates on it.

    python bench/static.py --op softmax --arch 80 90

Needs no GPU. A kernel joins by ``shipped()`` in its module, see
``tritonamp.kernels._shipped.Shipped``. One line for each build; failed gates on stderr, exit status
1. Numbers are of the code as it stands: the body of a loop counts once.
"""

import argparse
import json
import os
import sys

from builds import ARCHITECTURES, all_builds
from gates import SNAPSHOT, exp2_faults, faults, growth_faults, snapshot_text
from machine_code import Row, measured


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


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Builds every shipped kernel and checks what the compiler made of it."
    )
    parser.add_argument(
        "--arch",
        type=lambda text: int(text) if text.isdigit() else text,
        nargs="+",
        choices=ARCHITECTURES,
        metavar="N",
        help="architectures, like 80 90 gfx942",
    )
    parser.add_argument("--op", nargs="+", help="kernel modules, like softmax")
    parser.add_argument(
        "--only", default="", help="calls whose name this regular expression finds, like n=1024"
    )
    parser.add_argument(
        "--json", action="store_true", help="a JSON object for each build, on one line"
    )
    parser.add_argument("--snapshot", action="store_true", help=f"write {SNAPSHOT.name}")
    args = parser.parse_args(arguments)
    if args.snapshot and (args.arch or args.op or args.only):
        parser.error("--snapshot takes everything: leave out --arch, --op and --only")
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        parser.error(
            "TRITON_INTERPRET is set: kernels would be interpreted, not compiled. Unset it"
        )

    rows = []
    for row in measured(all_builds(args.op, args.arch or list(ARCHITECTURES), args.only)):
        fields = row._asdict() | {"build": row.build._asdict()}
        print(json.dumps(fields, default=str) if args.json else line(row), flush=True)
        rows.append(row)
    if not rows:
        parser.error("nothing to build: no kernel module has that name and ships such a call")
    failed = [message for row in rows for message in faults(row)] + exp2_faults(rows)
    if args.snapshot:
        SNAPSHOT.write_text(snapshot_text(rows))
    elif SNAPSHOT.exists():
        snapshot = json.loads(SNAPSHOT.read_text())
        failed += [message for row in rows for message in growth_faults(row, snapshot)]
    else:
        print(
            f"no {SNAPSHOT.name}: growth is not checked for this version of Triton", file=sys.stderr
        )
    print(*failed, sep="\n", end="\n" if failed else "", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
