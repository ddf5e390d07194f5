"""Stories of numbers that are too large for half precision, and of batches that were bad before."""

import functools
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

import tritonamp
from tritonamp.demo import data
from tritonamp.demo.sides import (
    Batches,
    Experiment,
    Outcome,
    Setting,
    Story,
    power_of_two,
    train_torch,
    train_tritonamp,
)

PIXEL_MAX = 255.0
BAD_BATCHES = 40  # every second one, until there were so many
HIDDEN = 0.6  # of the pixels of a batch
NOTHING_HIDDEN_EVERY = 10  # batches


class Attention(nn.Module):
    """(N, T, width) -> the same, one head, written out."""

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
    """Attention scores overflow on pixels that nobody normalised."""
    split = data.digits()
    experiment = Experiment(
        build=RowReader,
        split=split._replace(x=split.x * PIXEL_MAX, test_x=split.test_x * PIXEL_MAX),
        batch_size=32,
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-3),
        steps=180,
    )
    ours = functools.partial(train_tritonamp, experiment, setting)
    fp32 = train_torch(experiment, setting, autocast=False, scaling=False)
    stock = train_torch(experiment, setting)
    explained = ours(on_nonfinite="explain", ask=lambda amp, model: amp.explain(replay=True))
    healed = ours(on_nonfinite="heal", ask=lambda amp, model: str(amp.policy.fp32_modules))
    rows = {
        "FP32": fp32.row(),
        "torch.amp": stock.row(),
        'tritonamp, "explain"': explained.row(),
        'tritonamp, "heal"': healed.row(),
    }
    words = [
        f"Pixels go in as 0 to {PIXEL_MAX:g}, so that queries times keys leave the range of "
        "float16: inf, of which softmax makes NaN. GradScaler takes that for a scale that is too "
        f"high. It skips {stock.skipped} of {len(stock.losses)} steps, its scale ends at "
        f"{power_of_two(stock.scale)}, and nothing more is learned.",
        "tritonamp leaves the scale alone: a lower one cannot help. With on_nonfinite='explain' it "
        f"runs the batch again and names the operation:\n{explained.explanation}",
        "With on_nonfinite='heal' a module in which that happens again computes in FP32 from then "
        f"on. Afterwards amp.policy.fp32_modules is {healed.explanation}, and the accuracy "
        f"{healed.score['accuracy']:.1f} %; in FP32 it is {fp32.score['accuracy']:.1f} %.",
    ]
    return Story(rows, words)


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
        f"{stock.skipped} of {len(stock.losses)} batches hold one inf pixel. Both sides skip them, "
        "and no weight is harmed. But to GradScaler every bad batch is a scale that is too high. "
        f"It halves the scale each time, to {power_of_two(stock.scale)} in the end, where "
        "gradients of good batches round to zero; and it doubles it only every 2000 good steps.",
        "tritonamp sees that the loss itself was not finite, which no scale can change: it stays "
        f"at {power_of_two(ours.scale)}. amp.explain() says:\n{ours.explanation}",
    ]
    return Story({"torch.amp": stock.row(), "tritonamp": ours.row()}, words)


def _with_bad_ones(batches: Batches, seed: int) -> Batches:
    for i, (x, y) in enumerate(batches):
        if i % 2 == 0 and i < 2 * BAD_BATCHES:
            x[-1, 0, 3, 3] = torch.inf  # a batch is a copy
        yield x, y


def masked(setting: Setting) -> Story:
    """Tell of the NaN loss of a masked autoencoder: (loss * mask).sum() / mask.sum() in half."""
    experiment = Experiment(
        build=lambda: nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)),
        split=data.digits(),
        batch_size=2048,
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-2),
        steps=100,
        criterion=_error_on_hidden,
        score=_restored,
        change=_with_pixels_hidden,
    )
    batch = next(experiment.batches(1, setting))

    def replayed(amp: tritonamp.Amp, model: nn.Module) -> str:
        return amp.explain(replay=lambda: _error_on_hidden(model(batch[0]), *batch))

    stock = train_torch(experiment, setting)
    half = train_tritonamp(experiment, setting, cast_outputs=None, ask=replayed)
    ours = train_tritonamp(experiment, setting)
    rows = {"torch.amp": stock, "tritonamp, cast_outputs=None": half, "tritonamp": ours}
    words = [
        f"About {int(batch[2].sum())} pixels of a batch are hidden. That count is inf in float16, "
        f"and so is the sum of their errors: inf / inf = NaN, in {_nans(stock)} of "
        f"{len(stock.losses)} steps. The gradient of x / inf is 0, so GradScaler skips only "
        f"{stock.skipped} steps, and the others change nothing.",
        "tritonamp hands out FP32, and the same lines compute this loss in FP32. The "
        f"{_nans(ours)} NaN that are left are batches with nothing hidden, 0/0 in any precision; "
        f"no scale can change that, and it ends at {power_of_two(ours.scale)}.",
        "With half outputs, tritonamp does not step on a NaN loss, and "
        f"amp.explain(replay=loss_function) says:\n{half.explanation}",
        "What helps, too: to compute such a loss in `with amp.autocast():`, where sums are FP32.",
    ]
    return Story(
        {name: {**outcome.row(), "NaN losses": _nans(outcome)} for name, outcome in rows.items()},
        words,
    )


def _with_pixels_hidden(batches: Batches, seed: int) -> Iterator[tuple[Tensor, ...]]:
    """Yield (images with 0 for the hidden pixels, whole images, where they are hidden).

    All are of shape (N, 64); pixels are 0 to 16.
    """
    generator = torch.Generator().manual_seed(seed)
    for i, (x, _) in enumerate(batches):
        images = 16 * x.flatten(1)
        share = 0.0 if i % NOTHING_HIDDEN_EVERY == NOTHING_HIDDEN_EVERY // 2 else HIDDEN
        hidden = (torch.rand(images.shape, generator=generator) < share).to(images.device)
        yield images.masked_fill(hidden, 0), images, hidden


def _error_on_hidden(output: Tensor, _: Tensor, images: Tensor, hidden: Tensor) -> Tensor:
    """In the dtype of the output, as it is often written."""
    mask = hidden.to(output.dtype)
    loss = (output - images.to(output.dtype)) ** 2
    return (loss * mask).sum() / mask.sum()


def _restored(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, float]:
    batch = next(_with_pixels_hidden(iter([(images, labels)]), seed=0))
    return {"error on hidden pixels": _error_on_hidden(model(batch[0]).float(), *batch).item()}


def _nans(outcome: Outcome) -> int:
    return sum(map(math.isnan, outcome.losses))
