"""``python -m tritonamp``: ``check``, ``demo``, ``doctor``, ``explain`` and ``migrate``."""

import argparse
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import tritonamp
from tritonamp import demo
from tritonamp.commands import check, doctor, explain
from tritonamp.commands.migrate import command as migrate
from tritonamp.diagnosis.terminal import fitted

_COMMANDS = {
    "check": (check, "what half precision would do to a model, before it is trained"),
    "demo": (demo, "train two small models at every level: a table and a picture"),
    "doctor": (doctor, "what this machine has, which backend each device will use, and why"),
    "explain": (explain, "what an error means, and its cure; the answer to a question"),
    "migrate": (migrate, "what to write in scripts for torch.amp or apex"),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    command, _ = _COMMANDS[args.command]
    if command is not demo:
        return command.run(args, parser.error)
    try:
        demo.run(args)
    except tritonamp.UnsupportedDeviceError as error:
        parser.exit(1, fitted(f"{error}\n"))
    return 0


class _Parser(argparse.ArgumentParser):
    """Also breaks the lines of errors."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(2, fitted(f"{self.prog}: error: {message}\n"))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m tritonamp", description=tritonamp.__doc__)
    commands = parser.add_subparsers(dest="command", metavar="command")
    for name, (command, what) in _COMMANDS.items():
        command.add_arguments(commands.add_parser(name, help=what))
    return parser


def until_reader_leaves() -> int:
    """Run ``main``; end quietly with status 1 if the reader of the output has gone.

    Characters that the output cannot encode become escapes.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        # what is still buffered would raise once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


if __name__ == "__main__":
    sys.exit(until_reader_leaves())
