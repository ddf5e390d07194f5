"""``python -m tritonamp demo``: two small models on real data at every level, and a story.

A story shows one thing that goes wrong in half precision, with torch.amp and here. ``train.py`` is
the file to read: it is a complete training script, and all runs use its loop.
"""

import argparse
from importlib.util import find_spec
from pathlib import Path

LEVELS = ("O0", "O1", "O2", "O3")
STORIES = ("attention", "bad-batches")
DTYPE, OUTPUT = "float16", Path("tritonamp-demo.png")
EXTRA_PACKAGES = {"sklearn": "scikit-learn", "matplotlib": "matplotlib", "tqdm": "tqdm"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--level",
        action="append",
        choices=LEVELS,
        help="one level; repeat the option for several (default: all)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float16", "bfloat16"),
        default=DTYPE,
        help="half type of O1 to O3 (default: %(default)s)",
    )
    parser.add_argument(
        "--story",
        choices=STORIES,
        help="tell only this story of float16, in torch.amp and here: attention scores that "
        f"overflow, or batches with inf in them (default: the levels, then {STORIES[0]})",
    )
    parser.add_argument(
        "--steps",
        type=_positive,
        help="training steps of every run (default: as many as each model needs)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of weights and data order (default: %(default)s)"
    )
    parser.add_argument("--device", help="cpu, cuda, cuda:1 (default: cuda if there is a GPU)")
    parser.add_argument(
        "--output",
        type=_picture,
        default=OUTPUT,
        help="the picture of the story (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> None:
    """Train, print the table, tell a story and save its picture; exit with a message if not."""
    _require_extras()
    from tritonamp.demo import (  # here, because they import the extra packages
        compare,
        stories,
    )
    from tritonamp.demo.device import chosen_device
    from tritonamp.demo.measured import Setting

    setting = Setting(chosen_device(args.device), args.seed, args.steps)
    if args.story is None:
        compare.compare(setting, args.level or LEVELS, args.dtype)
    else:
        _refuse_what_stories_ignore(args)
    stories.tell(args.story or STORIES[0], setting, args.output)


def _require_extras() -> None:
    missing = [package for module, package in EXTRA_PACKAGES.items() if find_spec(module) is None]
    if missing:
        raise SystemExit(f'the demo needs {", ".join(missing)}: pip install "tritonamp[demo]"')


def _refuse_what_stories_ignore(args: argparse.Namespace) -> None:
    ignored = {"level": None, "dtype": DTYPE}
    given = [f"--{name}" for name, default in ignored.items() if getattr(args, name) != default]
    if given:
        raise SystemExit(f"--story has levels of its own, and float16: drop {', '.join(given)}")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text}")
    return number


def _picture(text: str) -> Path:
    """Return a path for the picture, or raise before the training rather than after it."""
    path = Path(text)
    if path.suffix != ".png" or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"expected a .png file in a folder that exists, got {text}"
        )
    return path
