"""Stories of the demo: one thing that goes wrong, in torch.amp and here, and its picture."""

import functools
import logging
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tritonamp.commands.progress import wrote
from tritonamp.demo import data
from tritonamp.demo.device import describe
from tritonamp.demo.measured import Batches, Run, Setting, Task, measured, measured_torch
from tritonamp.demo.models import CausalAttention
from tritonamp.demo.picture import save_picture
from tritonamp.diagnosis.terminal import fitted, paragraph, table

PIXEL_MAX = 255.0
RAW = 0.02  # share of the images that were not divided by PIXEL_MAX
BAD_BATCHES = 40  # every second batch, until there were so many


class Story(NamedTuple):
    """The runs of a story, and its texts.

    Attributes:
        fault: what goes wrong.
        runs: runs by their names in the table.
        words: paragraphs about the runs.
        cause: the cause of skips in the words of tritonamp.
    """

    fault: str
    runs: dict[str, Run]
    words: list[str]
    cause: str


class RowReader(nn.Module):
    """(N, 1, 8, 8) images, each a sequence of eight rows -> (N, 10) logits."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.attention = CausalAttention(width, heads=1)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(8 * width, 10)

    def forward(self, images: Tensor) -> Tensor:
        rows = self.embed(images.squeeze(1))
        logits: Tensor = self.head(self.norm(rows + self.attention(rows)).flatten(1))
        return logits


def attention(setting: Setting) -> Story:
    """Attention scores overflow in batches with an image that is not normalised."""
    split = data.digits()
    raw = torch.rand(len(split.x), 1, 1, 1, generator=torch.Generator().manual_seed(0)) < RAW
    task = Task(
        name="digits",
        title="digits: attention over rows",
        build=RowReader,
        split=split._replace(x=torch.where(raw, split.x * PIXEL_MAX, split.x)),
        batch_size=32,
        lr=1e-3,
        steps=200,
    )
    fp32 = measured(task, setting, level="O0")
    stock = measured_torch(task, setting)
    ours = functools.partial(measured, task, setting, level="O1")  # casts as autocast does
    explained = ours(on_nonfinite="explain", explain=lambda amp: amp.explain(replay=True))
    healed = ours(on_nonfinite="heal", explain=lambda amp: str(amp.policy.fp32_results))
    runs = {
        "FP32": fp32,
        "torch.amp": stock,
        "tritonamp": explained,
        "tritonamp, heal": healed,
    }
    fault = (
        f"{int(raw.sum())} of {len(raw)} images have pixels from 0 to {PIXEL_MAX:g} instead of 0 "
        "to 1: their attention scores leave float16"
    )
    words = [
        f"{fault}. They become inf, of which softmax makes NaN. GradScaler takes that for a scale "
        f"that is too high. It halves its scale {stock.stats['skipped']} times in "
        f"{len(stock.losses)} steps, to {power(stock.stats['scale'])}. At a low scale gradients of "
        "good batches round to zero, and the loss no longer falls.",
        "tritonamp leaves the scale alone, because a lower one cannot help. With "
        "on_nonfinite='explain' it runs the batch again and names the operation:\n"
        f"{explained.explanation}",
        "With on_nonfinite='heal' products of a module in which that happens again have FP32 "
        f"results from then on. Afterwards amp.policy.fp32_results is {healed.explanation}, and "
        f"the accuracy is {healed.score:.1f} %; in FP32 it is {fp32.score:.1f} %.",
    ]
    return Story(fault, runs, words, _operation(explained.explanation))


def bad_batches(setting: Setting) -> Story:
    """Batches with one inf pixel each wear out the loss scale."""
    task = Task(
        name="digits",
        title="digits: two linear layers",
        build=lambda: nn.Sequential(
            nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)
        ),
        split=data.digits(),
        batch_size=64,
        lr=3e-3,
        steps=300,
        change=_with_bad_ones,
    )
    stock, ours = measured_torch(task, setting), measured(task, setting)
    fault = f"{stock.stats['skipped']} of {len(stock.losses)} batches hold one inf pixel"
    words = [
        f"{fault}. Both sides "
        "skip them, and no weight is harmed. But GradScaler takes every bad batch for a scale that "
        f"is too high. It halves the scale each time, to {power(stock.stats['scale'])} in the end. "
        "At a low scale gradients of good batches round to zero, and the scale doubles only after "
        "2000 good steps.",
        "tritonamp sees that the loss itself was not finite, which no scale can change. Its scale "
        f"stays at {power(ours.stats['scale'])}. amp.explain() says:\n{ours.explanation}",
    ]
    return Story(fault, {"torch.amp": stock, "tritonamp": ours}, words, ours.explanation)


def _operation(explanation: str) -> str:
    """Return the operation that a replay has named, without the folder of its file."""
    text = " ".join(explanation.split())  # the lines were broken to fit a terminal
    named = re.search(r"(\S+ \S+, \w+: [^:]* at )(\S+:\d+)", text)
    return f"{named[1]}{Path(named[2]).name}" if named else text


def _with_bad_ones(batches: Batches) -> Batches:
    for i, (x, y) in enumerate(batches):
        if i % 2 == 0 and i < 2 * BAD_BATCHES:
            x[-1, 0, 3, 3] = torch.inf  # a batch is a copy
        yield x, y


STORIES: dict[str, Callable[[Setting], Story]] = {
    "attention": attention,
    "bad-batches": bad_batches,
}


def tell(name: str, setting: Setting, path: Path) -> None:
    """Print the story ``name``, and save its picture to ``path``."""
    start, tell_story = time.perf_counter(), STORIES[name]
    where = f"float16 on {describe(setting.device)}, seed {setting.seed}"
    print(fitted(f"{tell_story.__doc__}\n{where}; less than a minute on a CPU core\n"))
    logger = logging.getLogger("tritonamp")
    level = logger.level
    logger.setLevel(logging.ERROR)  # the story itself tells of skips
    try:
        story = tell_story(setting)
    finally:
        logger.setLevel(level)
    print(shown(story))
    save_picture(story.fault, story.runs, story.cause, path)
    print(wrote(path, start))


def shown(story: Story) -> str:
    """Return the runs as a table, and the words below it."""
    rows = [
        [name, f"{run.score:.1f} %", str(run.stats["skipped"]), power(run.stats["scale"])]
        for name, run in story.runs.items()
    ]
    printed = table(["", "accuracy", "skipped", "loss scale"], rows)
    return "\n\n".join([printed, *map(_fitted, story.words)]) + "\n"


def power(scale: float) -> str:
    """Return a loss scale as people read it: 2^16, or 1, or 0 below the smallest FP32 number."""
    return f"{scale:g}" if scale in (0.0, 1.0) else f"2^{math.log2(scale):g}"


def _fitted(text: str) -> str:
    words, *report = text.splitlines()  # of amp.explain()
    return "\n".join([paragraph(words), *map(fitted, report)])
