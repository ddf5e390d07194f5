"""Stories of numbers that are too small for half precision: gradients, and updates of weights."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tritonamp.demo import data
from tritonamp.demo.sides import (
    Experiment,
    Outcome,
    Setting,
    Story,
    power_of_two,
    train_torch,
    train_tritonamp,
)

Train = Callable[[Experiment, Setting], Outcome]
Rows = dict[str, dict[str, float]]

BATCH = 64
REDRAWING_WEIGHT = 1e-4
LEARNING_RATE = 3e-6  # of the fine-tuning
PRETRAINING_STEPS = 150

FP32, AUTOCAST, STOCK, HALF = "FP32", "torch.autocast alone", "torch.amp", "torch, model.half()"
UNSCALED, OURS = "tritonamp, loss_scale=1", "tritonamp"
O2, O3 = "tritonamp O2, FP32 masters", "tritonamp O3, no masters"

_fp32 = functools.partial(train_torch, autocast=False, scaling=False)


class ReadAndRedraw(nn.Module):
    """(N, 1, 8, 8) images -> (N, 10) logits and (N, 64) pixels: two heads on one layer."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU())
        self.read = nn.Linear(width, 10)
        self.redraw = nn.Linear(width, 64)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(images)
        return self.read(features), self.redraw(features)


def vanishing(setting: Setting) -> Story:
    """Gradients of a loss with a small weight vanish without a loss scale."""
    experiment = Experiment(
        build=ReadAndRedraw,
        split=data.digits(),
        batch_size=BATCH,
        optimizer=functools.partial(torch.optim.Adam, lr=3e-3),
        steps=300,
        criterion=_read_and_redraw,
        score=_read_and_redrawn,
    )
    sides: dict[str, Train] = {
        FP32: _fp32,
        AUTOCAST: functools.partial(train_torch, scaling=False),
        STOCK: train_torch,
        UNSCALED: functools.partial(train_tritonamp, loss_scale=1.0),
        OURS: train_tritonamp,
    }
    rows: Rows = {}
    for name, train in sides.items():
        zeros = ZeroGradients("redraw")
        outcome = train(dataclasses.replace(experiment, watch=zeros), setting)
        rows[name] = {**outcome.score, "zero gradients": zeros.share(), "loss scale": outcome.scale}
    return Story(rows, _of_vanishing(rows))


def _of_vanishing(rows: Rows) -> list[str]:
    float16 = torch.finfo(torch.float16)
    return [
        "The model reads the digit and redraws the picture. The redrawing has a loss of its own, "
        f"the mean square over all pixels, with weight {REDRAWING_WEIGHT:g}. So a pixel that is "
        f"off by 0.1 has the gradient {0.2 * REDRAWING_WEIGHT / (BATCH * 64):.0e}; the smallest "
        f"number of float16 is {float16.smallest_normal * float16.eps:.0e}. Adam would not mind "
        "how small gradients are, but zero is zero.",
        f"Without GradScaler {rows[AUTOCAST]['zero gradients']:.0f} % of the gradients of the "
        f"redrawing's weights are zero, in FP32 {rows[FP32]['zero gradients']:.0f} %. Nothing "
        "warns: digits are read as well as ever, but the error of the picture is "
        f"{rows[AUTOCAST]['error of the picture']:.4f} instead of "
        f"{rows[FP32]['error of the picture']:.4f}.",
        "GradScaler helps where it was not forgotten. tritonamp.enable scales the loss (here by "
        f"{power_of_two(rows[OURS]['loss scale'])}) unless told not to.",
    ]


class ZeroGradients:
    """Watches which share of the gradients of one submodule is exactly zero."""

    def __init__(self, submodule: str) -> None:
        self._submodule = submodule
        self._shares: list[Tensor] = []

    def __call__(self, model: nn.Module) -> None:
        parameters = model.get_submodule(self._submodule).parameters()
        gradients = [p.grad.flatten() for p in parameters if p.grad is not None]
        self._shares.append((torch.cat(gradients) == 0).float().mean())

    def share(self) -> float:
        """Percent, mean over the steps."""
        return 100 * torch.stack(self._shares).mean().item()


class Reader(nn.Module):
    """(N, 1, 8, 8) images of any dtype -> (N, 10) logits."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.hidden = nn.Linear(64, width)
        self.out = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        images = images.flatten(1).to(self.hidden.weight.dtype)
        logits: Tensor = self.out(F.gelu(self.hidden(images)))
        return logits


def lost_updates(setting: Setting) -> Story:
    """Tell of updates that are smaller than the distance from one half number to the next."""
    split = data.digits()
    experiment = Experiment(
        build=lambda: _pretrained(split, setting.seed),
        split=split._replace(x=0.5 + 0.5 * split.x, test_x=0.5 + 0.5 * split.test_x),  # faded
        batch_size=32,
        optimizer=_adam,
        steps=800,
    )
    half_weights = dataclasses.replace(
        experiment, build=lambda: _pretrained(split, setting.seed).half()
    )
    tracked = functools.partial(train_tritonamp, track_lost_updates=True)
    sides: dict[str, tuple[Experiment, Train]] = {
        STOCK: (experiment, train_torch),
        HALF: (half_weights, _fp32),
        O3: (experiment, functools.partial(tracked, level="O3")),
        O2: (experiment, functools.partial(tracked, level="O2")),
    }
    start = _pretrained(split, setting.seed)
    rows: Rows = {"before": experiment.test(start, torch.device("cpu"))}
    lost: dict[str, list[float]] = {}
    for name, (own, train) in sides.items():
        unmoved = UnmovedWeights()
        outcome = train(dataclasses.replace(own, watch=unmoved), setting)
        rows[name] = {**outcome.score, "weights not moved": unmoved.share()}
        lost[name] = outcome.stats.get("lost_updates", [])
    return Story(rows, _of_lost_updates(start, rows, lost))


def _of_lost_updates(start: nn.Module, rows: Rows, lost: dict[str, list[float]]) -> list[str]:
    weight = torch.cat([p.detach().abs().flatten() for p in start.parameters()]).median().item()
    spacing = 2.0 ** (math.frexp(weight)[1] - 11)  # float16 has 11 binary digits
    accuracy = {name: f"{row['accuracy']:.1f} %" for name, row in rows.items()}
    return [
        f"A reader of clean digits is fine-tuned on faded ones, with lr={LEARNING_RATE:g}: about "
        f"what Adam moves a weight by in a step. But around {weight:.2f}, the median of the "
        f"weights, float16 numbers are {spacing:.0e} apart. {rows[HALF]['weights not moved']:.0f} "
        f"% of the updates are rounded away, and model.half() ends at {accuracy[HALF]} where FP32 "
        f"weights get to {accuracy[STOCK]}. Nothing warns.",
        "At O2 most half weights stay where they are in any one step, too "
        f"({rows[O2]['weights not moved']:.0f} %), but the optimizer steps on FP32 masters, where "
        f"the updates add up: {accuracy[O2]}.",
        f"O3 is without masters and ends as model.half() does: {accuracy[O3]}. With "
        "track_lost_updates=True the step counts: amp.stats()['lost_updates'], the share of the "
        f"last step in each parameter group, is {_shares(lost[O3])} at O3 and {_shares(lost[O2])} "
        "at O2.",
    ]


def _shares(lost: list[float]) -> str:
    return f"[{', '.join(f'{share:.3f}' for share in lost)}]"


class UnmovedWeights:
    """Watches which share of the weights that have a gradient a step has left as it was."""

    def __init__(self) -> None:
        self._before: list[tuple[Tensor, Tensor]] = []
        self._shares: list[Tensor] = []

    def __call__(self, model: nn.Module) -> None:
        parameters = list(model.parameters())
        if self._before:
            same = [
                (p == old)[pushed]
                for p, (old, pushed) in zip(parameters, self._before, strict=True)
            ]
            self._shares.append(torch.cat(same).float().mean())
        self._before = [
            (p.detach().clone(), p.grad.ne(0)) for p in parameters if p.grad is not None
        ]

    def share(self) -> float:
        """Percent, mean over the steps but the last, which nothing came after."""
        return 100 * torch.stack(self._shares).mean().item() if self._shares else math.nan


def _pretrained(split: data.Split, seed: int) -> Reader:
    """Return a reader that knows the digits, trained in FP32."""
    torch.manual_seed(seed)
    model = Reader()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for x, y in data.batches(split, BATCH, PRETRAINING_STEPS, seed + 1, torch.device("cpu")):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def _adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Adam:
    """Return torch's Adam with an eps that the dtype of the parameters can hold.

    Where it rounds to 0, Adam turns half weights to NaN.
    """
    weights = list(parameters)
    return torch.optim.Adam(
        weights, lr=LEARNING_RATE, eps=1e-8 if weights[0].dtype is torch.float32 else 1e-4
    )


def _read_and_redraw(outputs: tuple[Tensor, Tensor], images: Tensor, labels: Tensor) -> Tensor:
    logits, pixels = outputs
    redrawing = F.mse_loss(pixels.float(), images.flatten(1))
    return F.cross_entropy(logits.float(), labels) + REDRAWING_WEIGHT * redrawing


def _read_and_redrawn(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, float]:
    logits, pixels = model(images)
    error = F.mse_loss(pixels.float(), images.flatten(1))
    return {
        "accuracy": data.percent_right(logits, labels).item(),
        "error of the picture": error.item(),
    }
