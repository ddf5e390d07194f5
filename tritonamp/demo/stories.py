"""``python -m tritonamp demo --story NAME``: one thing that goes wrong, in torch.amp and here."""

import argparse
import functools
import logging
import textwrap
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tritonamp.commands.table import table
from tritonamp.demo import data
from tritonamp.demo.device import chosen_device, describe
from tritonamp.demo.sides import (
    Batches,
    Experiment,
    Outcome,
    Setting,
    train_torch,
    train_tritonamp,
)

WIDTH = 110
PIXEL_MAX = 255.0
BAD_BATCHES = 40  # every second batch, until there were so many


class Story(NamedTuple):
    """The outcome of each run by its name, and paragraphs about them."""

    outcomes: dict[str, Outcome]
    words: list[str]


class Attention(nn.Module):
    """One head, written out. Input and output have the shape (N, T, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).mT * x.shape[-1] ** -0.5
        return scores.softmax(-1) @ self.value(x)


class RowReader(nn.Module):
    """(N, 1, 8, 8) images, each a sequence of eight rows -> (N, 10) logits."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.attention = Attention(width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(8 * width, 10)

    def forward(self, images: Tensor) -> Tensor:
        rows = self.embed(images.squeeze(1))
        logits: Tensor = self.head(self.norm(rows + self.attention(rows)).flatten(1))
        return logits


def attention(setting: Setting) -> Story:
    """Attention scores overflow on pixels that are not normalised."""
    split = data.digits()
    experiment = Experiment(
        build=RowReader,
        split=split._replace(x=split.x * PIXEL_MAX, test_x=split.test_x * PIXEL_MAX),
        batch_size=32,
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-3),
        steps=180,
    )
    ours = functools.partial(train_tritonamp, experiment, setting)
    fp32 = train_torch(experiment, setting, enabled=False)
    stock = train_torch(experiment, setting)
    explained = ours(on_nonfinite="explain", ask=lambda amp: amp.explain(replay=True))
    healed = ours(on_nonfinite="heal", ask=lambda amp: str(amp.policy.fp32_modules))
    outcomes = {
        "FP32": fp32,
        "torch.amp": stock,
        'tritonamp, "explain"': explained,
        'tritonamp, "heal"': healed,
    }
    words = [
        f"Pixels are 0 to {PIXEL_MAX:g}, so that queries times keys leave the range of float16. "
        "They become inf, of which softmax makes NaN. GradScaler takes that for a scale that is "
        f"too high. It skips {stock.skipped} of {stock.steps} steps, its scale ends at "
        f"{stock.power}, and nothing more is learned.",
        "tritonamp leaves the scale alone, because a lower one cannot help. With "
        "on_nonfinite='explain' it runs the batch again and names the operation:\n"
        f"{explained.explanation}",
        "With on_nonfinite='heal' a module in which that happens again computes in FP32 from then "
        f"on. Afterwards amp.policy.fp32_modules is {healed.explanation}, and the accuracy is "
        f"{healed.accuracy:.1f} %; in FP32 it is {fp32.accuracy:.1f} %.",
    ]
    return Story(outcomes, words)


def bad_batches(setting: Setting) -> Story:
    """Forty batches with one inf pixel each wear out the loss scale."""
    experiment = Experiment(
        build=lambda: nn.Sequential(
            nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)
        ),
        split=data.digits(),
        batch_size=64,
        optimizer=functools.partial(torch.optim.AdamW, lr=3e-3),
        steps=300,
        change=_with_bad_ones,
    )
    stock = train_torch(experiment, setting)
    ours = train_tritonamp(experiment, setting)
    words = [
        f"{stock.skipped} of {stock.steps} batches hold one inf pixel. Both sides skip them, and "
        "no weight is harmed. But GradScaler takes every bad batch for a scale that is too high. "
        f"It halves the scale each time, to {stock.power} in the end, where gradients of good "
        "batches round to zero; and it doubles the scale only after 2000 good steps.",
        "tritonamp sees that the loss itself was not finite, which no scale can change. Its scale "
        f"stays at {ours.power}. amp.explain() says:\n{ours.explanation}",
    ]
    return Story({"torch.amp": stock, "tritonamp": ours}, words)


def _with_bad_ones(batches: Batches) -> Batches:
    for i, (x, y) in enumerate(batches):
        if i % 2 == 0 and i < 2 * BAD_BATCHES:
            x[-1, 0, 3, 3] = torch.inf  # a batch is a copy
        yield x, y


STORIES: dict[str, Callable[[Setting], Story]] = {
    "attention": attention,
    "bad-batches": bad_batches,
}


def tell(args: argparse.Namespace) -> None:
    """Print the story ``args.story``, or the names of all for "list"."""
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
    """Return the outcomes as a table, and the words below it."""
    rows = [
        [name, f"{outcome.accuracy:.1f} %", str(outcome.skipped), outcome.power]
        for name, outcome in story.outcomes.items()
    ]
    paragraphs = ["\n".join(map(_wrapped, text.splitlines())) for text in story.words]
    printed = table(["", "accuracy", "skipped", "loss scale"], rows)
    return "\n\n".join([printed, *paragraphs]) + "\n"


def _wrapped(line: str) -> str:
    # an indented line belongs to a report
    return line if line.startswith(" ") else textwrap.fill(line, WIDTH)


def _without_log(story: Callable[[Setting], Story], setting: Setting) -> Story:
    """Run ``story`` without the log's lines about skips, because it tells of them itself."""
    logger = logging.getLogger("tritonamp")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return story(setting)
    finally:
        logger.setLevel(level)
