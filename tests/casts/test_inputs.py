"""Which arguments of a forward are cast."""

import copy
from collections import UserDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tritonamp
from tritonamp.casts.inputs import input_tensors, signature_of

FP16, FP32 = torch.float16, torch.float32


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


def test_arguments_of_tensors() -> None:
    x = torch.ones(2)
    signature = signature_of(Echo().forward)
    assert str(signature) == "(x, y, *more, z, **)"
    found = input_tensors((x, [{"boxes": x}], (x,)), {"z": UserDict(a=x), "k": "text"}, signature)
    assert [argument for argument, _ in found] == ["x", "y", 2, "z"]
