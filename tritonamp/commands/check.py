"""``python -m tritonamp check``: the effect of half precision on a model, before its training."""

import argparse
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import tritonamp
from tritonamp.commands.factory import RETURNS, made
from tritonamp.commands.progress import runs_shown, wrote


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "One forward and backward in FP32 says what would overflow or vanish in half."
    )
    parser.epilog = (
        "Exit status: 0 no problems, 1 problems, 2 the command could not be carried out."
    )
    parser.add_argument(
        "factory",
        metavar="module:factory",
        help=f"a function without arguments, such as train:make or src/train.py:make, that returns "
        f"{RETURNS}",
    )
    parser.add_argument(
        "--level", default="O2", choices=("O0", "O1", "O2", "O3"), help="default: %(default)s"
    )
    parser.add_argument(
        "--dtype",
        default="float16",
        choices=("float16", "bfloat16"),
        help="the half format (default: %(default)s)",
    )
    parser.add_argument(
        "--diff",
        nargs="?",
        const="O0",
        choices=("O0", "O1", "O2", "O3"),
        help="also run the batch at --level and at this level (default: O0), and say operation by "
        "operation where the two part, in ulps; write it behind module:factory",
    )
    parser.add_argument(
        "--policy", type=Path, help="write the policy for tritonamp.enable, as JSON, to this file"
    )
    parser.add_argument(
        "--picture",
        type=Path,
        help="draw the exponents against the format's range, or with --diff how far the results of "
        "the two levels are apart, to this .png file",
    )


def run(args: argparse.Namespace, fail: Callable[[str], Any]) -> int:
    """Forecast, print and return the exit status; ``fail`` ends the command with a message."""
    for path in (args.policy, args.picture):
        if path is not None and not path.parent.is_dir():
            fail(f"{path}: there is no folder {path.parent}")
        if path is not None and path.is_dir():
            fail(f"{path}: expected the name of a file, got a folder")
    if args.picture is not None and (
        args.picture.suffix != ".png" or find_spec("matplotlib") is None
    ):
        fail(
            f"--picture {args.picture}: needs a name that ends in .png, and matplotlib: pip "
            'install "tritonamp[demo]"'
        )
    try:
        arguments = made(args.factory)
        with runs_shown(compares=args.diff is not None):
            forecast = tritonamp.check(
                *arguments, level=args.level, dtype=getattr(torch, args.dtype), compare=args.diff
            )
    except (ValueError, RuntimeError) as error:
        fail(str(error))
    print(forecast)
    if args.policy is not None:
        start = time.perf_counter()
        args.policy.write_text(forecast.policy.to_json() + "\n", "utf-8")
        print(wrote(args.policy, start))
    if args.picture is not None:
        start = time.perf_counter()
        from tritonamp.commands import apart, ranges  # here, because matplotlib is an extra

        if forecast.comparison is None:
            ranges.save_picture(forecast, args.picture)
        else:
            apart.save_picture(forecast.model, forecast.comparison, args.picture)
        print(wrote(args.picture, start))
    return 1 if forecast.problems else 0
