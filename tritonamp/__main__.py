"""``python -m tritonamp``: ``check``, ``demo``, ``doctor``, ``explain`` and ``migrate``."""

import argparse
import os
import sys
from collections.abc import Sequence

import tritonamp
from tritonamp import demo
from tritonamp.commands import check, doctor, explain
from tritonamp.commands.migrate import command as migrate


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
    elif args.command == "doctor":
        return doctor.run(args, parser.error)
    elif args.command == "check":
        return check.run(args, parser.error)
    elif args.command == "explain":
        return explain.run(args, parser.error)
    elif args.command == "migrate":
        return migrate.run(args, parser.error)
    else:
        try:
            demo.run(args)
        except tritonamp.UnsupportedDeviceError as error:
            parser.exit(1, f"{error}\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tritonamp", description=tritonamp.__doc__)
    commands = parser.add_subparsers(dest="command", metavar="command")
    check.add_arguments(
        commands.add_parser(
            "check", help="what half precision would do to a model, before it is trained"
        )
    )
    demo.add_arguments(
        commands.add_parser(
            "demo", help="train two small models at every level: a table and a picture"
        )
    )
    doctor.add_arguments(
        commands.add_parser(
            "doctor", help="what this machine has, which backend each operation will use, and why"
        )
    )
    explain.add_arguments(
        commands.add_parser("explain", help="what an error means, and its cure, by its text")
    )
    migrate.add_arguments(
        commands.add_parser("migrate", help="rewrite scripts for torch.amp or apex")
    )
    return parser


def until_nobody_reads() -> int:
    """Run ``main``; end quietly with status 1 if the reader of the output has gone."""
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        # what is still buffered would raise once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


if __name__ == "__main__":
    sys.exit(until_nobody_reads())
