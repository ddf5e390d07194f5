"""``python -m tritonamp demo --story NAME``: one thing that goes wrong, in torch.amp and here."""

import argparse
import logging
import textwrap
import time
from collections.abc import Callable
from typing import Any

from tritonamp.commands.table import table
from tritonamp.demo.device import chosen_device, describe
from tritonamp.demo.logits import logits
from tritonamp.demo.sides import Setting, Story, power_of_two
from tritonamp.demo.too_large import attention, bad_batches, masked
from tritonamp.demo.too_small import lost_updates, vanishing

WIDTH = 110

STORIES: dict[str, Callable[[Setting], Story]] = {
    "attention": attention,
    "bad-batches": bad_batches,
    "lost-updates": lost_updates,
    "vanishing": vanishing,
    "masked": masked,
    "logits": logits,
}

SHOWN_AS: dict[str, Callable[[Any], str]] = {
    "accuracy": "{:.1f} %".format,
    "zero gradients": "{:.1f} %".format,
    "weights not moved": "{:.1f} %".format,
    "error of gradients": "{:.2f} %".format,
    "error of the picture": "{:.4f}".format,
    "error on hidden pixels": "{:.2f}".format,
    "loss scale": power_of_two,
}


def tell(args: argparse.Namespace) -> None:
    """Print the story that was asked for; "list": the names of all."""
    if args.story == "list":
        print(listed())
        return
    story = STORIES.get(args.story)
    if story is None:
        raise SystemExit(f"--story {args.story}: there is no such story. There are\n{listed()}")
    start = time.perf_counter()
    setting = Setting(chosen_device(args.device), args.seed, args.steps, args.quiet)
    print(f"{story.__doc__}\nfloat16 on {describe(setting.device)}, seed {setting.seed}\n")
    print(shown(_without_log(story, setting)))
    print(f"total: {time.perf_counter() - start:.0f} s")


def listed() -> str:
    width = max(map(len, STORIES))
    return "\n".join(f"  {name.ljust(width)}  {story.__doc__}" for name, story in STORIES.items())


def shown(story: Story) -> str:
    """Return the rows as a table, the words below it."""
    columns = list(dict.fromkeys(column for row in story.rows.values() for column in row))
    cells = [
        [
            name,
            *(
                SHOWN_AS.get(column, str)(row[column]) if column in row else ""
                for column in columns
            ),
        ]
        for name, row in story.rows.items()
    ]
    paragraphs = ["\n".join(map(_wrapped, text.splitlines())) for text in story.words]
    return "\n\n".join([table(["", *columns], cells), *paragraphs]) + "\n"


def _wrapped(line: str) -> str:
    # indented: a line of a report
    return line if line.startswith(" ") else textwrap.fill(line, WIDTH)


def _without_log(story: Callable[[Setting], Story], setting: Setting) -> Story:
    """Run ``story`` without the log's lines about skips: it tells of them itself."""
    logger = logging.getLogger("tritonamp")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return story(setting)
    finally:
        logger.setLevel(level)
