"""The advice in the text of a skip is followed to the letter: the same run trains then."""

import logging
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from helpers import take_step
from torch import Tensor, nn
from torch.nn import functional

import tritonamp

INF = float("inf")
LEVELS = ["O0", "O1", "O2", "O3"]


def dead_units() -> nn.Module:
    """A model of which some gradients are exactly 0."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    nn.init.constant_(model[0].bias, -50.0)
    return model


def train(
    model: nn.Module,
    make: Callable[..., torch.optim.Optimizer],
    batches: Sequence[tuple[Tensor, Tensor]],
    loss: Callable[[Tensor, Tensor], Tensor] = functional.cross_entropy,
    clip: Callable[[Any, nn.Module], Any] | None = None,
    **fields: Any,
) -> Any:
    optimizer = make(model.parameters())
    amp = tritonamp.enable(model, optimizer, backend="eager", **fields)
    for x, y in batches:
        amp.backward(loss(model(x), y))
        if clip is not None:
            clip(amp, model)
        optimizer.step()
        optimizer.zero_grad()
    return amp


def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(32, 16, generator=generator), torch.randint(0, 4, (32,), generator=generator))
        for _ in range(steps)
    ]


def causes(amp: Any) -> list[str | None]:
    return [record.cause for record in amp.history]


# eps=0

DIVIDING = [
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    tritonamp.optim.Adam,
    tritonamp.optim.AdamW,
]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", DIVIDING, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_an_eps_of_zero(kind: Any, level: str) -> None:
    rate = {} if kind is torch.optim.Adadelta else {"lr": 1e-3}
    if level == "O3" and kind.__module__.startswith("tritonamp"):
        pytest.skip("it keeps masters of its own")
    with train(dead_units(), partial(kind, eps=0.0, **rate), batches(9), level=level) as amp:
        found, text = causes(amp), amp.explain()
    wrote = found.index("bad parameters")
    assert set(found[:wrote]) <= {None, "scale overflow"} and set(found[wrote:]) == {found[wrote]}
    assert f"Step {wrote} wrote them ({kind.__name__}, lr=" in text
    assert "eps=0, so a gradient that is 0 is divided by 0. Give an eps of " in text
    assert "level=" not in text
    eps = float(re.search(r"Give an eps of (\S+) or more", text)[1])
    with train(dead_units(), partial(kind, eps=eps, **rate), batches(9), level=level) as amp:
        assert set(causes(amp)) <= {None, "scale overflow"} and causes(amp)[-1] is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_eps_of_zero_in_half(dtype: torch.dtype) -> None:
    make = partial(torch.optim.NAdam, lr=1e-3, eps=0.0)
    with train(dead_units(), make, batches(4), level="O3", dtype=dtype) as amp:
        text = amp.explain()
    eps = float(re.search(r"Give an eps of (\S+) or more", text)[1])
    assert eps == (1e-4 if dtype is torch.float16 else 1e-8)


def test_a_rate_that_is_not_finite() -> None:
    make = partial(torch.optim.SGD, lr=float("nan"))
    with train(dead_units(), make, batches(3), level="O2") as amp:
        text = amp.explain()
    assert "wrote them (SGD, lr=nan): The learning rate is not finite: look in its sch" in text


# data


class Bounded(nn.Module):
    """The loss of a batch with inf is finite."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.tail = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        h = torch.tanh(self.stem(x))
        return self.tail(h if mask is None else (h + mask).softmax(-1))


@pytest.mark.parametrize("mode", ["skip", "explain"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_data_that_spoils_only_gradients(level: str, mode: str) -> None:
    torch.manual_seed(0)
    rows = batches(4)
    rows[2][0][3, 5] = INF
    make = partial(torch.optim.AdamW, lr=1e-3)
    with train(Bounded(), make, rows, level=level, on_nonfinite=mode) as amp:
        assert causes(amp) == [None, None, "data", None]
        text = amp.explain()
        assert amp.history[2].parameters == ("stem.weight",)
        assert amp.stats()["scale"] == 2.0**15 and amp.history[2].loss is not None
    assert "held inf or NaN, and gradients became NaN: input 0: inf or NaN in sample(s) 3" in text
    assert "The loss scale was lowered all the same" in text
    rows = [(x.where(x.isfinite(), 0.0), y) for x, y in rows]  # clean the data
    with train(Bounded(), make, rows, level=level) as amp:
        assert causes(amp) == [None] * 4


def test_data_at_a_fixed_scale() -> None:
    torch.manual_seed(0)
    rows = batches(2)
    rows[1][0][3, 5] = INF
    make = partial(torch.optim.AdamW, lr=1e-3)
    with train(Bounded(), make, rows, level="O2", loss_scale=128.0) as amp:
        assert causes(amp) == [None, "data"]
        assert "scale" not in amp.explain()


def test_a_mask_is_not_blamed_for_a_scale_that_is_too_high() -> None:
    """A scale far too high makes NaN of the inf in gradients."""
    torch.manual_seed(0)
    model = Bounded()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    mask = torch.zeros(32, 16).masked_fill(torch.rand(32, 16) < 0.5, -INF)
    with tritonamp.enable(model, optimizer, level="O2", backend="eager") as amp:
        for x, y in batches(3):
            take_step(amp, optimizer, 1e5 * functional.cross_entropy(model(x, mask), y))
        assert causes(amp) == ["scale overflow"] * 3
        assert "NaN" in amp.explain()


# divergence


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
    )


def squares(output: Tensor, y: Tensor) -> Tensor:
    return functional.mse_loss(output, 3.0 * functional.one_hot(y, 4))


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(
    ("make", "loss", "by"),
    [
        (partial(torch.optim.SGD, lr=30.0), squares, 2),
        (partial(torch.optim.SGD, lr=30.0), functional.cross_entropy, 5),
        (partial(torch.optim.AdamW, lr=10.0), squares, 2),
        (partial(torch.optim.AdamW, lr=1.0), functional.cross_entropy, 2),
        (partial(torch.optim.SGD, lr=1000.0), functional.cross_entropy, 2),
    ],
)
def test_a_rate_far_too_high_is_said_before_the_scale_has_found_its_level(
    make: Any, loss: Any, by: int, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    rate = make.keywords["lr"]
    with (
        caplog.at_level(logging.WARNING, "tritonamp"),
        train(mlp(), make, batches(9), loss, level=level) as amp,
    ):
        found = causes(amp)
    assert found.index("divergence") + 1 == by
    text = next(text for text in caplog.messages if "That is normal in the first" not in text)
    assert f"step {by} skipped" in text
    assert f"Lower the learning rate (now {make.func.__name__}, lr={rate:g}), f" in text
    assert "FP32 was not tried" in text
    assert "precision" not in text and "lip" not in text
    with train(mlp(), partial(make.func, lr=1e-2), batches(9), loss, level=level) as amp:
        assert "divergence" not in causes(amp)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(
    ("make", "decay"),
    [
        (partial(torch.optim.AdamW, lr=0.1), 50.0),
        (partial(torch.optim.Adam, lr=0.1, decoupled_weight_decay=True), 50.0),
        (partial(torch.optim.SGD, lr=0.1), 30.0),
    ],
)
def test_weight_decay_that_makes_weights_grow(make: Any, decay: float, level: str) -> None:
    with train(mlp(), partial(make, weight_decay=decay), batches(9), level=level) as amp:
        text = amp.explain()
        assert next(filter(None, causes(amp))) == "divergence"
    name = make.func.__name__
    assert f"Lower weight_decay ({name}, lr=0.1, weight_decay={decay:g}): lr * weight_dec" in text
    assert f"is {0.1 * decay:g}, so each step multiplies the weights by {1 - 0.1 * decay:g}" in text
    with train(mlp(), partial(make, weight_decay=9.0), batches(9), level=level) as amp:
        assert "divergence" not in causes(amp)


@pytest.mark.parametrize(
    ("kind", "fields", "decay"),
    [
        (torch.optim.SGD, {"momentum": 0.9}, None),
        (torch.optim.SGD, {}, 0.5),
        (torch.optim.Adam, {}, None),
        (torch.optim.AdamW, {}, 0.5),
        (tritonamp.optim.AdamW, {}, 0.5),
        (tritonamp.optim.Adam, {}, None),
    ],
)
def test_decay_that_takes_a_share_of_weights(kind: Any, fields: Any, decay: float | None) -> None:
    model = nn.Linear(2, 2)
    optimizer = kind(model.parameters(), lr=1e-3, weight_decay=0.5, **fields)
    with tritonamp.enable(model, optimizer, level="O2") as amp:
        (writer, *_) = amp._parts.log._model_names.writers().values()
        assert writer.decay == decay


@pytest.mark.parametrize(
    ("clip", "said"),
    [
        (None, True),
        (lambda amp, model: amp.clip_grad_norm_(1e6), False),
        (
            lambda amp, model: (
                amp.unscale_(),
                nn.utils.clip_grad_norm_(model.parameters(), 1e6),
            ),
            False,
        ),
    ],
)
def test_a_loop_that_clips_is_not_told_to_clip(clip: Any, said: bool) -> None:
    make = partial(torch.optim.SGD, lr=1.0)
    rows = [(5 * x, y) for x, y in batches(20)]
    with train(mlp(), make, rows, squares, clip, level="O1") as amp:
        text = amp.explain()
    assert "training has diverged" in text
    assert ("Clip gradients: amp.clip_grad_norm_(1.0)" in text) is said
    by_advice = lambda amp, model: amp.clip_grad_norm_(1.0)  # noqa: E731
    with train(mlp(), make, rows, squares, by_advice, level="O1") as amp:
        assert set(causes(amp)) <= {None, "scale overflow"} and causes(amp)[-1] is None


# formats


@pytest.mark.parametrize(
    "fields", [{"level": "O0"}, {"level": "O1", "dtype": torch.bfloat16}], ids=str
)
def test_limits_of_float16_are_named_only_there(fields: Any) -> None:
    def text_of(spoil: Callable[[nn.Module], Any]) -> str:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with tritonamp.enable(model, optimizer, backend="eager", **fields) as amp:
            spoil(model)
            take_step(amp, optimizer, model(torch.ones(2, 16)).mean() * INF)
            return amp.explain()

    for text in (text_of(lambda model: None), text_of(lambda m: m[0].bias.data.fill_(INF))):
        assert "65504" not in text and "float16" not in text and "lower scale" not in text


# gradients that are 0


def in_half(output: Tensor, y: Tensor) -> Tensor:
    return (output.half() - 20.0).exp().float().mean()


def in_fp32(output: Tensor, y: Tensor) -> Tensor:
    return (output - 20.0).exp().mean()


def tiny(output: Tensor, y: Tensor) -> Tensor:
    return (output.half() * 1e-6).square().float().mean()


def multiplied(output: Tensor, y: Tensor) -> Tensor:
    return (output * 1e-6).square().mean() * 1e6


@pytest.mark.parametrize(("loss", "cure"), [(in_half, in_fp32), (tiny, multiplied)])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(("steps", "words"), [(1, "step"), (4, "4 steps")])
def test_gradients_that_are_all_zero(
    level: str, loss: Any, cure: Any, steps: int, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    make = partial(torch.optim.AdamW, lr=1e-3)
    with (
        caplog.at_level(logging.WARNING, "tritonamp"),
        train(mlp(), make, batches(steps), loss, level=level) as amp,
    ):
        text = amp.explain()
    assert text.startswith(
        f"No step was skipped.\nall gradients of the last {words} were 0, which trained nothing. "
    )
    assert "look for a loss that is computed in half" in text
    assert len(caplog.messages) == (steps > 2)
    assert all("3 times in a row, so that it trained nothing. Call" in m for m in caplog.messages)
    with train(mlp(), make, batches(steps), cure, level=level) as amp:
        assert amp.explain() == "No step was skipped." and amp.history[-1].grad_norm > 0.0


def test_ranges_show_where_gradients_become_zero() -> None:
    model = mlp()
    nn.init.constant_(model[2].bias, -50.0)  # its ReLU is dead
    optimizer = torch.optim.AdamW([*model[0].parameters(), *model[2].parameters()], lr=1e-3)
    with tritonamp.enable(model, optimizer, level="O2", backend="eager") as amp:
        (x, y), *_ = batches(1)
        take_step(amp, optimizer, functional.cross_entropy(model(x), y))
        assert "ReLUs of negative values alone: amp.watch(), and amp.ranges() aft" in amp.explain()
        amp.watch()
        take_step(amp, optimizer, functional.cross_entropy(model(x), y))
        found = {r.module: r.absmax for r in amp.ranges() if r.direction == "backward"}
    assert found["3"] > 0.0 and found["2"] == found["0"] == 0.0


class Gained(nn.Linear):
    """The product with a constant beyond float16 fits for small values, and is divided out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (super().forward(x) * 1e5).mul(0.5) / 1e5


def test_a_factor_beyond_the_format_is_no_constant_to_replace() -> None:
    """A product takes its factor in FP32: the product is too large, and another factor is wrong."""
    model = Gained(4, 4)
    with torch.no_grad():
        model.weight.copy_(0.7 * torch.eye(4))
        model.bias.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with tritonamp.enable(model, optimizer, level="O2") as amp:
        for size in (0.5, 1.0):
            amp.backward(model(torch.full((2, 4), size)).mean())
            optimizer.step()
            optimizer.zero_grad()
        said = amp.explain(replay=True)
    assert amp.history[0].cause is None and amp.history[1].cause == "forward fault"
    assert "constant" not in said and "finfo" not in said
    assert "the product is 7" in said or "the result is 7" in said
