"""``python -m tritonamp check``: the effect of half precision on a model, before its training."""

import argparse
import importlib
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import tritonamp

RETURNS = (
    "(model, optimizer, batch), (model, optimizer, batch, loss_fn), or (model, batch); batch is a "
    "tuple of inputs, or a mapping of keywords"
)


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
        help=f"a function without arguments that returns {RETURNS}",
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
    if args.picture is not None and (
        args.picture.suffix != ".png" or find_spec("matplotlib") is None
    ):
        fail(
            f"--picture {args.picture}: needs a name that ends in .png, and matplotlib: pip "
            'install "tritonamp[demo]"'
        )
    try:
        arguments = _made(args.factory)
        forecast = tritonamp.check(
            *arguments, level=args.level, dtype=getattr(torch, args.dtype), compare=args.diff
        )
    except (ValueError, RuntimeError) as error:
        fail(str(error))
    print(forecast)
    if args.policy is not None:
        args.policy.write_text(forecast.policy.to_json() + "\n")
    if args.picture is not None:
        from tritonamp.commands import apart, ranges  # here, because matplotlib is an extra

        if forecast.comparison is None:
            ranges.save_picture(forecast, args.picture)
        else:
            apart.save_picture(forecast.model, forecast.comparison, args.picture)
    return 1 if forecast.problems else 0


def _made(factory: str) -> tuple[Any, ...]:
    """Call the factory, and return its result as the arguments of ``tritonamp.check``.

    Raises:
        ValueError: the factory is missing, it raises, or it returns something else.
    """
    module_name, _, name = factory.partition(":")
    if not module_name or not name:
        raise ValueError(f"expected module:factory, such as train:make, got {factory!r}")
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ValueError(
            f"cannot import {module_name!r}: {type(error).__name__}: {error}"
        ) from error
    finally:
        sys.path.pop(0)
    if not callable(getattr(module, name, None)):
        functions = [
            key
            for key, value in vars(module).items()
            if callable(value) and not key.startswith("_")
        ]
        raise ValueError(
            f"{module_name!r} has no function {name!r}; it has {', '.join(functions) or 'none'}"
        )
    try:
        made = getattr(module, name)()
    except Exception as error:
        raise ValueError(f"{factory} raised {type(error).__name__}: {error}") from error
    parts = made if isinstance(made, tuple) else ()
    if len(parts) not in (2, 3, 4) or not isinstance(parts[0], torch.nn.Module):
        kinds = ", ".join(type(part).__name__ for part in parts)
        got = f"a tuple of {kinds}" if parts else type(made).__name__
        raise ValueError(f"{factory}: expected {RETURNS}, got {got}")
    return (parts[0], None, parts[1]) if len(parts) == 2 else parts
