"""torch.compile: the backward of what is FP32 on purpose is FP32, however the model is called."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tritonamp
from tritonamp.casts import compiled_backward

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.filterwarnings("ignore:.*torch._dynamo"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

AOT = "aot_eager"  # what every backend gets, run op by op
SCALE = 2.0**16


class Fp32Head(nn.Module):
    """Its FP32 head has gradients above what float16 holds, once they are scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(16, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).relu())


def loss_of(output: Tensor, y: Tensor) -> Tensor:
    return (output - y).pow(2).sum()


Gradient = Callable[..., Tensor]


def gradient(
    compile_it: Callable[[Fp32Head], Any],
    loss_fn: Any = loss_of,
    around: bool = True,
    batches: tuple[int, ...] = (256,),
    **fields: Any,
) -> Tensor:
    """Return the head's gradient of a last batch, unscaled, at a scale of 2^16."""
    torch.manual_seed(0)
    model = Fp32Head()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = tritonamp.GradScaler("cpu", init_scale=SCALE)
    settings = {"level": "O1", "dtype": torch.float16, "fp32_modules": ["head"], **fields}
    with tritonamp.enable(model, optimizer, scaler=scaler, **settings) as amp:
        run = compile_it(model)
        for size in batches:
            x, y = torch.randn(size, 16) * 4, torch.randn(size, 8)
            optimizer.zero_grad()
            with amp.autocast() if around else contextlib.nullcontext():
                loss = loss_fn(run(x).float(), y)
            amp.backward(loss)
        assert model.head.weight.grad is not None
        return model.head.weight.grad.float() / SCALE


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def whole(model: Fp32Head) -> Any:
    return torch.compile(model, backend=AOT)


def in_place(model: Fp32Head) -> Any:
    model.compile(backend=AOT)
    return model


def in_one_graph(model: Fp32Head) -> Any:
    return torch.compile(model, backend=AOT, fullgraph=True)


def of_any_shape(model: Fp32Head) -> Any:
    return torch.compile(model, backend=AOT, dynamic=True)


def by_parts(model: Fp32Head) -> Any:
    """As blocks of a large model are compiled, inside of a forward that is not."""
    model.body.compile(backend=AOT)
    model.head.compile(backend=AOT)
    return model


def in_a_function(model: Fp32Head) -> Any:
    return torch.compile(lambda x: model(x) + model(x) - model(x), backend=AOT)


def by_default_partitioner(model: Fp32Head) -> Any:
    return torch.compile(model, backend="aot_eager_decomp_partition")


WAYS = [whole, in_place, in_one_graph, of_any_shape, by_parts, in_a_function]
WAYS += [by_default_partitioner]
CONTEXTS = {
    "O1": {},
    "O1 bf16": {"dtype": torch.bfloat16},
    "O2": {"level": "O2"},
    "O2 bf16": {"level": "O2", "dtype": torch.bfloat16},
}


def close(found: Tensor, expected: Tensor) -> bool:
    """Half rounding of what comes before the head; its own gradients are FP32."""
    return bool((found - expected).norm() <= 2e-3 * expected.norm())


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("way", WAYS)
def test_the_backward_of_fp32_modules(way: Any, context: str) -> None:
    """Also of what is compiled again, for another batch size."""
    how = {"batches": (8, 256), **CONTEXTS[context]}
    expected = gradient(lambda model: model, **how)
    assert bool(expected.isfinite().all())
    assert close(gradient(way, **how), expected)


@pytest.mark.parametrize("way", WAYS)
def test_without_a_context_around_it(way: Any) -> None:
    assert close(gradient(way, around=False), gradient(lambda model: model, around=False))


@pytest.mark.parametrize("model", [lambda model: model, whole], ids=["eager", "whole"])
def test_a_compiled_loss_in_the_context(model: Any) -> None:
    """Its backward has a matmul, which is FP32 in the forward by the loss's own wish."""

    def loss_fn(output: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return (output @ torch.eye(8) - y).pow(2).sum()

    expected = gradient(lambda model: model, loss_fn)
    assert close(gradient(model, torch.compile(loss_fn, backend=AOT)), expected)


def test_in_a_context_of_torchs_own() -> None:
    """A compiled model inside of the user's ``torch.autocast``."""
    model = Fp32Head()
    with tritonamp.enable(model, level="O1", fp32_modules=["head"]):
        run = whole(model)
        x, y = torch.randn(256, 16) * 4, torch.randn(256, 8)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_of(run(x).float(), y)
        (loss * SCALE).backward()
    assert bool(model.head.weight.grad.isfinite().all())


# torch's setting


def setting() -> Any:
    return torch._functorch.config.backward_pass_autocast


def users_own() -> Tensor:
    """The gradient of a function that the user compiles under an autocast of his own."""
    torch.manual_seed(0)
    weight = torch.randn(32, 32, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return (x @ weight).square().mean()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = torch.compile(function, backend=AOT)(torch.randn(32, 32))
    loss.backward()
    assert weight.grad is not None
    return weight.grad


def test_the_users_own_compilations_stay_torchs() -> None:
    """Before, while and after something is enabled, but for those inside of the context."""
    stock = users_own()
    torch.compiler.reset()
    model = Fp32Head()
    with tritonamp.enable(model, level="O1"):
        whole(model)(torch.randn(2, 16)).sum().backward()
        assert setting() == "same_as_forward"
        assert torch.equal(users_own(), stock)
    torch.compiler.reset()
    assert torch.equal(users_own(), stock)


@pytest.mark.parametrize(
    ("users", "while_compiling"),
    [
        ("same_as_forward", "off"),
        ("off", "off"),
        ([{"device_type": "cpu"}], [{"device_type": "cpu"}]),  # a setting of the user's stays
    ],
    ids=str,
)
def test_it_comes_back_where_a_compilation_fails(users: Any, while_compiling: Any) -> None:
    def fails(graph: Any, inputs: Any) -> Any:
        seen.append(setting())
        raise RuntimeError("no backend")

    seen: list[Any] = []
    model = Fp32Head()
    with torch._functorch.config.patch(backward_pass_autocast=users):
        with tritonamp.enable(model, level="O1"), pytest.raises(Exception, match="no backend"):
            torch.compile(model, backend=fails)(torch.randn(2, 16))
        assert (seen, setting()) == ([while_compiling], users)


def test_torch_is_left_as_it_was() -> None:
    handler = torch._dynamo.callback_handler
    model = Fp32Head()
    with tritonamp.enable(model, level="O1") as amp:
        for _ in range(2):  # torch.compiler.reset() drops what observes compilations
            with amp.autocast():
                pass
            assert handler.start_callbacks.count(compiled_backward.begins) == 1
            torch.compiler.reset()
        model(torch.randn(2, 16))
    assert handler.start_callbacks == handler.end_callbacks == []
