"""Which arguments of a forward are cast, and what is said about those that lose by it."""

import copy
import logging
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpuless.fake_cuda import FakeCuda
from gpuless.real_cuda import AnyCuda
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import tritonamp
from tritonamp.casts.inputs import input_tensors, signature_of
from tritonamp.casts.rounded_inputs import inputs_to_cast, worst_rounding

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


# which are cast


class Echo(nn.Module):
    """Returns the tensors that it got."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor, y: Any = None, *more: Any, z: Any = None, **rest: Any) -> Any:
        inputs = {"x": x, "y": y, "z": z, **dict(enumerate(more, 2)), **rest}
        return {name: t[0]["boxes"] if isinstance(t, list) else t for name, t in inputs.items()}


def dtypes(output: dict[Any, Tensor | None]) -> dict[Any, torch.dtype]:
    return {name: tensor.dtype for name, tensor in output.items() if tensor is not None}


@pytest.mark.parametrize(
    ("cast_inputs", "half"),
    [
        (True, {"x", "y", "z", 2, 3, "other"}),
        (False, set()),
        ([], set()),
        (["x"], {"x"}),
        ("x", {"x"}),
        ([0], {"x"}),
        ([1, "z"], {"y", "z"}),
        ([3], {3}),
        (["more"], {2, 3}),
        (["other"], {"other"}),
    ],
    ids=lambda value: repr(value) if not isinstance(value, set) else f"{len(value)} of them",
)
@pytest.mark.parametrize("by_name", [False, True])
def test_only_what_is_named_is_cast(cast_inputs: Any, half: set[Any], by_name: bool) -> None:
    model, x = Echo(), torch.ones(2)
    boxes = [{"boxes": x}]
    amp = tritonamp.enable(model, level="O2", cast_inputs=cast_inputs, cast_outputs=None)
    got = dtypes(model(y=boxes, x=x, z=x) if by_name else model(x, boxes, x, x, z=x, other=x))
    amp.disable()
    assert boxes[0]["boxes"] is x
    assert got == {name: FP16 if name in half else FP32 for name in got}


@pytest.mark.compiled
def test_named_inputs_compile_in_one_piece() -> None:
    torch.compiler.reset()
    model, x = Echo(), torch.ones(2)
    amp = tritonamp.enable(model, level="O2", cast_inputs=["y", 2], cast_outputs=None)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    got = dtypes(compiled(x, [{"boxes": x}], x, z=x))
    assert got == {"x": FP32, "y": FP16, "z": FP32, 2: FP16}
    amp.disable()


def test_a_forward_on_the_instance_and_a_copy_keep_the_names() -> None:
    model, x = Echo(), torch.ones(2)
    own = model.forward

    def forward(image: Tensor, target: Tensor) -> Any:
        return own(image, target)

    model.forward = forward  # type: ignore[method-assign]
    amp = tritonamp.enable(model, level="O2", cast_inputs=["image"], cast_outputs=None)
    for each in (model, copy.deepcopy(model)):
        for output in (each(x, x), each(target=x, image=x)):
            assert dtypes(output) == {"x": FP16, "y": FP32}
    amp.disable()
    assert dtypes(model(x, x)) == {"x": FP32, "y": FP32}


class Pair(nn.Linear):
    def forward(self, images: Tensor, targets: Any = None) -> Tensor:  # type: ignore[override]
        return super().forward(images)


@pytest.mark.parametrize(
    ("models", "wanted", "message"),
    [
        (
            Pair(2, 2),
            "image",
            r"cast_inputs: expected names or positions of arguments of Pair.forward\(images, "
            r"targets\), got 'image'",
        ),
        (Pair(2, 2), 2, r"Pair.forward\(images, targets\), got 2"),
        (
            [Pair(2, 2), nn.Linear(2, 2)],
            "x",
            r"of Pair.forward\(images, targets\), Linear.forward\(input\), got 'x'",
        ),
    ],
    ids=["name", "position", "two models"],
)
def test_arguments_that_no_forward_takes(models: Any, wanted: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tritonamp.enable(models, level="O2", cast_inputs=["images", wanted])
    first = models[0] if isinstance(models, list) else models
    assert first.weight.dtype is FP32
    policy = tritonamp.policy.resolve("O2", cast_inputs=["no such"])
    with pytest.raises(ValueError, match="cast_inputs: expected names or positions"):
        tritonamp.check(first, None, (torch.ones(1, 2),), level=policy)


def test_one_of_several_models_takes_it() -> None:
    tritonamp.enable(
        [Pair(2, 2), nn.Linear(2, 2)], level="O2", cast_inputs=["images", "input"]
    ).disable()


def test_paths_of_inputs() -> None:
    x = torch.ones(2)
    signature = signature_of(Echo().forward)
    assert str(signature) == "(x, y, *more, z, **)"
    found = input_tensors((x, [{"boxes": x}], (x,)), {"z": UserDict(a=x), "k": "text"}, signature)
    assert [(argument, path) for argument, path, _ in found] == [
        ("x", "x"),
        ("y", "y[0]['boxes']"),
        (2, "more[2][0]"),
        ("z", "z['a']"),
    ]


@pytest.mark.parametrize(
    ("cast_inputs", "paths"),
    [
        (True, ["x", "y[0]['boxes']", "more[2]", "more[3]", "other"]),
        (["more"], ["more[2]", "more[3]"]),
        ([0, 3, "other"], ["x", "more[3]", "other"]),
        (False, []),
    ],
    ids=repr,
)
def test_what_is_cast_is_what_is_looked_at(cast_inputs: Any, paths: list[str]) -> None:
    x, signature = torch.ones(2), signature_of(Echo().forward)
    policy = tritonamp.policy.resolve("O2", cast_inputs=cast_inputs)
    given = (x, [{"boxes": x, "labels": x.long()}], x, x), {"other": x, "z": x.half()}
    assert [one.path for one in inputs_to_cast(*given, signature, policy)] == paths
    half = tritonamp.policy.resolve("O3")
    assert inputs_to_cast(*given, signature, half) == []  # its layers need half inputs


# what a cast loses


@pytest.mark.parametrize(
    ("values", "dtype", "expected"),
    [
        ([1280.7, 2.0], FP16, (1280.7, 1281.0)),
        ([255.9, -0.3, 1e-9], FP16, None),  # steps below a quarter: noise
        ([256.1], FP16, (256.1, 256.0)),
        ([257.25, 2048.0, -4096.0], FP16, None),  # exact
        ([2049.0, 600.1], FP16, (2049.0, 2048.0)),
        ([70000.5, float("nan"), float("inf")], FP16, None),  # an overflow, or bad data
        ([31.9, 256.0], BF16, None),
        ([32.1], BF16, (32.1, 32.0)),
        ([257.0], BF16, (257.0, 256.0)),
        ([70001.0], BF16, (70001.0, 70144.0)),
    ],
)
def test_what_loses_more_than_noise(values: list[float], dtype: Any, expected: Any) -> None:
    row = worst_rounding(torch.tensor(values), dtype).tolist()
    assert (row[0] > 0) == (expected is not None)
    if expected is not None:
        assert tuple(row[1:]) == (float(torch.tensor(expected[0])), expected[1])


# the line of the log


class Model(nn.Module):
    """Its loss is what ``function`` makes of a prediction and the second input."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.conv, self.linear, self.norm = nn.Conv1d(1, 4, 1), nn.Linear(4, 4), nn.LayerNorm(4)
        self.register_buffer("mean", torch.full((4,), 1000.0))
        self.function = function

    def forward(self, images: Tensor, targets: Any = None, mask: Any = None) -> Tensor:
        prediction = self.linear(images)
        if targets is None:
            return prediction.sum()
        return self.function(self, prediction, targets).float().sum()


class Seeing(Model):
    def forward(self, images: Tensor, targets: Any = None, mask: Any = None) -> Tensor:
        self.seen = targets
        return super().forward(images, targets, mask)


def boxes(model: Model, prediction: Tensor, targets: list[dict[str, Tensor]]) -> Tensor:
    """What detectors do with boxes: scale, join, compare, write into a tensor of predictions."""
    wanted = torch.cat([t["boxes"] / 1.5 for t in targets])
    area = (wanted[:, 2] - wanted[:, 0]) * (wanted[:, 3] - wanted[:, 1])
    written = torch.zeros_like(prediction)
    written[torch.tensor([0, 2])] = wanted
    return (prediction - written).abs() / area.sum().sqrt()


def angles(model: Model, prediction: Tensor, targets: Tensor) -> Tensor:
    """What diffusion models do with time steps: rounding is magnified before a product."""
    return model.linear(torch.sin(targets)) + prediction


TARGETS = torch.tensor([[1.5, 2.25, 1280.7, 600.3]])
DICTS = [{"boxes": TARGETS, "labels": torch.ones(1)}, {"boxes": 2 * TARGETS}]
# name: (what the model does, what it is given, where the loss is, None where none matters)
PROGRAMS: dict[str, tuple[Callable[..., Tensor], Any, str | None]] = {
    "boxes": (boxes, DICTS, "targets[1]['boxes'] (1 more) holds 2561.4, which is 2562 in float16"),
    "regression": (lambda m, p, t: (p - t).abs(), TARGETS, "targets holds 1280.7, which is 1281"),
    "whole numbers": (lambda m, p, t: p * t, 2049 * torch.ones(1, 4), "holds 2049, which is 2048"),
    "angles": (angles, TARGETS, "targets holds 1280.7"),
    "through a norm": (lambda m, p, t: p + m.norm(t), TARGETS, "targets holds 1280.7"),
    "linear": (lambda m, p, t: m.linear(t), TARGETS, None),
    "convolution": (lambda m, p, t: m.conv(t[:, None]), TARGETS, None),
    "matmul": (lambda m, p, t: p @ t.mT, TARGETS, None),
    "attention": (
        lambda m, p, t: nn.functional.scaled_dot_product_attention(p, t, t),
        TARGETS,
        None,
    ),
    "normalised": (lambda m, p, t: m.linear(((t - m.mean) / 300).flatten(1)), TARGETS, None),
    "joined": (lambda m, p, t: m.linear(torch.stack([t, 2 * t])[0].clone()), TARGETS, None),
    "not used": (lambda m, p, t: p, TARGETS, None),
    "small": (lambda m, p, t: (p - t).abs(), TARGETS / 10, None),
    "integers": (lambda m, p, t: p + t, TARGETS.long(), None),
    "double": (lambda m, p, t: p + t, TARGETS.double(), None),
}


def lines(caplog: Any) -> list[str]:
    messages = [record.getMessage() for record in caplog.records]
    return [message for message in messages if "enable(..., cast_inputs" in message]


def forwards(model: nn.Module, *args: Any, times: int = 2, **options: Any) -> tritonamp.Amp:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    amp = tritonamp.enable(model, optimizer, **{"level": "O2", **options})
    for _ in range(times):
        amp.backward(model(*args))
        optimizer.step()
    return amp


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_first_forward_names_what_loses(name: str, caplog: Any) -> None:
    function, targets, expected = PROGRAMS[name]
    images = 3000.5 + torch.rand(3, 4)  # a product reads them
    forwards(Model(function), images, targets).disable()
    found = lines(caplog)
    assert len(found) == (expected is not None)
    if expected is not None:
        assert found[0].startswith("Model.forward: targets") and expected in found[0]
        assert "no matmul or convolution reads it first" in found[0]
        assert "tritonamp.enable(..., cast_inputs=['images']) leaves it in FP32" in found[0]
    assert [r.levelno for r in caplog.records if r.getMessage() in found] == [
        logging.WARNING
    ] * len(found)


@pytest.mark.parametrize("name", ["boxes", "regression"])
def test_with_what_the_line_says_nothing_is_lost_or_said(name: str, caplog: Any) -> None:
    function, targets, _ = PROGRAMS[name]
    images = torch.rand(3, 4)
    for cast_inputs in (["images"], [0], False):
        model = Seeing(function)
        forwards(model, images, targets, cast_inputs=cast_inputs).disable()
        assert model.seen is targets
    assert lines(caplog) == []


def test_where_there_are_no_others_nothing_is_cast(caplog: Any) -> None:
    class Codes(nn.Embedding):
        def forward(self, codes: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
            return (super().forward(codes) - labels).abs().sum()

    forwards(Codes(8, 4), torch.tensor([1]), TARGETS).disable()
    assert lines(caplog) and "cast_inputs=False) leaves" in lines(caplog)[0]


def test_what_the_caller_compares_counts_too(caplog: Any) -> None:
    class Gives(nn.Linear):
        def forward(self, images: Tensor, targets: Tensor) -> Any:  # type: ignore[override]
            return {"prediction": super().forward(images), "wanted": [targets.flatten() / 2]}

    amp = tritonamp.enable(Gives(4, 4), level="O2")
    amp._parts.models[0](torch.rand(3, 4), TARGETS)
    amp.disable()
    assert "targets holds 1280.7" in lines(caplog)[0]


@pytest.mark.compiled
def test_a_part_may_be_compiled(caplog: Any) -> None:
    """torch.compile refuses fullgraph under a mode that wants to see all."""
    torch.compiler.reset()
    model = Model(PROGRAMS["regression"][0])
    model.linear = torch.compile(model.linear, backend="aot_eager", fullgraph=True)  # type: ignore
    forwards(model, 3000.5 + torch.rand(3, 4), TARGETS).disable()
    assert len(lines(caplog)) == 1
    assert lines(caplog)[0].startswith("Model.forward: targets holds 1280.7")


def test_bfloat16_has_fewer_bits(caplog: Any) -> None:
    forwards(Model(PROGRAMS["small"][0]), torch.rand(3, 4), TARGETS / 10, dtype=BF16).disable()
    assert "targets holds 128.07, which is 128 in bfloat16" in lines(caplog)[0]


class Look(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("how", ["no_grad", "mode", "func", "compile", "O1", "O3"])
def test_where_it_must_be_silent(how: str, caplog: Any) -> None:
    """And of what can be looked at later, that forward is the first."""
    model, images = Model(PROGRAMS["regression"][0]), torch.rand(1, 4)
    level = how if how in ("O1", "O3") else "O2"
    amp = tritonamp.enable(model, level=level)
    if how == "no_grad":
        with torch.no_grad():
            model(images, TARGETS)
    elif how == "mode":
        with Look():
            model(images, TARGETS)
    elif how == "func":
        torch.func.vmap(model)(images[None], TARGETS[None])
    elif how == "compile":
        torch.compile(model, backend="eager")(images, TARGETS)
    else:
        model(images, TARGETS)
    assert lines(caplog) == []
    model(images, TARGETS)
    assert len(lines(caplog)) == (level == "O2")
    copy.deepcopy(model)(images, TARGETS)
    assert len(lines(caplog)) == (level == "O2")
    amp.disable()


def test_an_evaluation_without_targets_is_another_kind(caplog: Any) -> None:
    model = Model(PROGRAMS["regression"][0])
    amp = tritonamp.enable(model, level="O2")
    model(torch.rand(1, 4))
    model(torch.rand(1, 4), None)
    assert lines(caplog) == []
    model(torch.rand(1, 4), targets=TARGETS, mask=None)
    model(torch.rand(1, 4), targets=TARGETS)
    assert len(lines(caplog)) == 1
    amp.disable()


def test_a_forward_that_fails_leaves_no_mode(caplog: Any) -> None:
    def fails(*_: Any) -> Tensor:
        raise KeyError("boxes")

    model = Model(fails)
    amp = tritonamp.enable(model, level="O2")
    with pytest.raises(KeyError, match="boxes"):
        model(torch.rand(1, 4), TARGETS)
    assert torch._C._len_torch_dispatch_stack() == 0
    assert lines(caplog) == []
    amp.disable()


def test_the_gpu_is_not_waited_for(fake_cuda: FakeCuda, caplog: Any) -> None:
    fake_cuda.event_lag = 2
    model = Model(PROGRAMS["regression"][0]).cuda()
    images, targets = torch.rand(1, 4).cuda(), TARGETS.cuda()
    amp = tritonamp.enable(model, level="O2")
    with fake_cuda.watch() as records:
        for _ in range(2):
            model(images, targets)
            assert lines(caplog) == []
        model(images, targets)
        model(images, targets)
    assert records == []
    assert len(lines(caplog)) == 1
    amp.disable()


def test_a_capture_is_not_looked_at(gpu: AnyCuda, caplog: Any) -> None:
    model = Model(PROGRAMS["regression"][0]).cuda()
    images, targets = torch.rand(1, 4).cuda(), TARGETS.cuda()
    amp = tritonamp.enable(model, level="O2")
    with gpu.capture():
        model(images, targets)
    assert lines(caplog) == []
    for _ in range(2):
        model(images, targets)
        torch.cuda.synchronize()
    assert len(lines(caplog)) == 1
    amp.disable()
