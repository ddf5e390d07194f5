"""FP32 inputs that become FP32 residual streams: where, what their cast saves, and whether to."""

import ast
import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tritonamp
from tritonamp.forecast.streams import ROUNDINGS

FP16, BF16 = torch.float16, torch.bfloat16
WIDTH = 16


class ResidualBlock(nn.Module):
    """Keeps the dtype of its stream."""

    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, 16)
        self.norm_first = norm_first

    def forward(self, x: Tensor) -> Tensor:
        self.dtype = x.dtype
        if self.norm_first:
            return x + self.down(torch.relu(self.up(self.norm(x))))
        return self.norm(x + self.down(torch.relu(self.up(x))))


class Decoder(nn.Module):
    """Layers on embeddings that it is given, or that it looks up."""

    def __init__(self, norm_first: bool = True, change: Any = lambda x: x) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, WIDTH), nn.Linear(WIDTH, 4)
        self.layers = nn.ModuleList(ResidualBlock(norm_first) for _ in range(3))
        self.change = change

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, **rest: Any) -> Tensor:
        x = self.embedding(input_ids) if inputs_embeds is None else self.change(inputs_embeds)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


class InItsForward(nn.Module):
    """The layers are added to the stream in the model's own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, *tensors: Tensor) -> Tensor:
        x = tensors[0]
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return x


class Once(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Two(nn.Module):
    """An encoder and a decoder with streams of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Decoder(), Decoder()

    def forward(self, batch: dict[str, Tensor], target: Tensor) -> Tensor:
        return self.encoder(None, batch["src"]) * self.decoder(None, target)


X = torch.randn(4, 5, WIDTH, generator=torch.Generator().manual_seed(0))
# name: (model, batch, arguments, where, additions)
STREAMS: dict[str, tuple[Callable[[], nn.Module], Any, list[Any], str, int]] = {
    "norm first": (Decoder, {"inputs_embeds": X}, ["inputs_embeds"], "layers.0", 3),
    "norm last": (lambda: Decoder(False), (None, X), ["inputs_embeds"], "layers.0", 3),
    "own forward": (InItsForward, (X,), [0], "", 3),
    "two, one in a container": (Two, ({"src": X}, X), ["batch", "target"], "encoder.layers.0", 6),
    "scaled before": (
        lambda: Decoder(change=lambda x: 2 * x),
        {"inputs_embeds": X},
        ["inputs_embeds"],
        "layers.0",
        3,
    ),
    "torch's encoder": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True),
            2,
            enable_nested_tensor=False,
        ),
        (X,),
        ["src"],
        "layers.0",
        4,
    ),
}


def found(model: nn.Module, batch: Any, **fields: Any) -> list[Any]:
    forecast = tritonamp.check(model, None, batch, **fields)
    return [finding for finding in forecast.findings if finding.kind == "FP32 stream"]


def advised(advice: str) -> Any:
    """What ``cast_inputs`` the advice says."""
    match = re.search(r"cast_inputs=(\[.*?\])", advice)
    assert match is not None
    return ast.literal_eval(match[1])


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize("name", STREAMS)
def test_what_is_said_is_what_enable_takes(name: str, dtype: torch.dtype) -> None:
    make, batch, arguments, where, additions = STREAMS[name]
    torch.manual_seed(0)
    model = make()
    (finding,) = found(model, batch, dtype=dtype)
    assert (finding.where, finding.problem) == (where, False)
    assert finding.why.startswith(f"{additions} sums with half results are FP32, because ")
    assert "makes them half, tried on this batch" in finding.advice
    assert advised(finding.advice) == arguments
    after, before = map(float, re.findall(r"take (\S+) MiB instead of (\S+)", finding.advice)[0])
    assert 0 < after < before
    policy = tritonamp.policy.resolve("O2", dtype, cast_inputs=advised(finding.advice))
    assert not found(model, batch, level=policy)
    args, kwargs = ((), batch) if isinstance(batch, dict) else (batch, {})
    with tritonamp.enable(model, level="O2", dtype=dtype, cast_inputs=advised(finding.advice)):
        assert model(*args, **kwargs).isfinite().all()
        streams = {m.dtype for m in model.modules() if isinstance(m, ResidualBlock)}
    assert streams <= {dtype}


# name: (model, batch, loss_fn)
NONE: dict[str, tuple[Callable[[], nn.Module], Any, Any]] = {
    "half from an embedding": (Decoder, (torch.arange(5),), None),
    "a target": (lambda: nn.Linear(WIDTH, 16), (X,), lambda y: (y - X).abs().add(y).mean()),
    "images": (
        lambda: nn.Sequential(nn.Conv1d(5, 5, 3, padding=1), nn.Linear(WIDTH, 4)),
        (X,),
        None,
    ),
    "one skip": (lambda: Once(WIDTH, WIDTH), (X,), None),
}


@pytest.mark.parametrize("name", NONE)
def test_where_there_is_no_stream_nothing_is_said(name: str) -> None:
    make, batch, loss_fn = NONE[name]
    assert not found(make(), batch, loss_fn=loss_fn)


@pytest.mark.parametrize("level", ["O0", "O1", "O3", "cast"])
def test_levels_without_half_weights_or_with_half_inputs(level: str) -> None:
    """At O1 embeddings are FP32 as well, so every stream is."""
    given = dataclasses.replace(tritonamp.O2, cast_inputs=True) if level == "cast" else level
    assert not found(Decoder(), (None, X), level=given)


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_what_would_lose_by_the_cast_is_left(dtype: torch.dtype) -> None:
    """Half a step of the format at 3000 is of the size of what is left after it is centred."""
    torch.manual_seed(0)
    model = Decoder(change=lambda x: (x - x.mean()) / x.std())
    (finding,) = found(model, {"inputs_embeds": 3000 + X}, dtype=dtype)
    assert finding.advice.startswith("leave it: with cast_inputs=['inputs_embeds'] ")
    moved = float(re.findall(r"move by (\S+)%", finding.advice)[0])
    assert moved > 100 * ROUNDINGS * torch.finfo(dtype).eps


def test_arguments_that_are_cast_already_stay_in_the_advice() -> None:
    policy = dataclasses.replace(tritonamp.O2, cast_inputs=("target",))
    (finding,) = found(Two(), ({"src": X}, X), level=policy)
    assert finding.why.endswith("because batch is FP32")
    assert advised(finding.advice) == ["target", "batch"]


def test_the_report_shows_it() -> None:
    text = str(tritonamp.check(Decoder(), None, {"inputs_embeds": X}))
    assert "0 problems, 1 of advice" in text and "-> cast_inputs=['inputs_embeds'] makes" in text
