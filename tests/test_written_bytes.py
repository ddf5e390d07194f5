"""The table of formulas in casts/README.md: bytes as steps and as one op, and of probabilities."""

import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpuless.fake_cuda import FakeCuda
from torch import Tensor, nn

pytest.importorskip("matplotlib")  # as for all of bench/

import model_counts
import traffic

import tritonamp

README = Path(tritonamp.__file__).parent / "casts" / "README.md"
SIZE, MASK = (4, 4, 64, 64), (4, 1, 64, 64)
FP16 = torch.float16


def gelu_tanh(x):
    return 0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.044715 * x**3)))


def gelu_erf(x):
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def quick_gelu(x):
    return x * torch.sigmoid(1.702 * x)


def silu(x):
    return x / (1 + torch.exp(-x))


def squared_relu(x):
    return F.relu(x) ** 2


def gated(a, b):
    return F.silu(a) * b


def added(scores, mask):
    scores = scores * 0.125
    scores = scores + mask
    return F.softmax(scores, dim=-1)


def widened(scores, mask):
    scores = scores * 0.125
    scores = scores + mask
    return F.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype)


def filled(scores, mask):
    scores = scores * 0.125
    scores = scores.masked_fill(mask, -1e4)
    return F.softmax(scores, dim=-1)


def kept(scores, mask):
    scores = scores * 0.125
    scores = torch.where(mask, scores, -1e4)
    return F.softmax(scores, dim=-1)


FORMULAS = {
    "0.5 * x * (1 + tanh": gelu_tanh,
    "x * (1 + erf": gelu_erf,
    "x * sigmoid": quick_gelu,
    "x / (1 + exp": silu,
    "relu(x)**2": squared_relu,
    "silu(a) * b": gated,
}
"""Functions, by the beginning of their row in the table."""


class Calls(nn.Module):
    """A model that calls a function. Its results are half for a next layer."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function
        self.unused = nn.Parameter(torch.ones(1))  # its device is the model's

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs).to(inputs[0].dtype)


def per_element(
    gpu: FakeCuda, model: nn.Module, arguments: list[Tensor], context: Any = contextlib.nullcontext
) -> float:
    """Return the bytes of a forward and backward for each element of the first argument."""
    trained = [x for x in arguments if x.requires_grad]
    grad = torch.ones_like(trained[0])
    gpu.observer = found = traffic.Traffic([])
    with context():
        result = model(*arguments)
    torch.autograd.grad(result, trained, grad)
    return sum(found.total().values()) / grad.numel()


def counts(gpu: FakeCuda, function: Callable[..., Tensor], *arguments: Tensor) -> list[float]:
    """Return the bytes under ``torch.autocast``, and as one op."""
    given = [x.cuda() for x in arguments]
    model = Calls(function).cuda()
    with model_counts.as_if_large():
        plain = per_element(gpu, model, given, lambda: torch.autocast("cuda", dtype=given[0].dtype))
        with tritonamp.enable(model, level="O1", dtype=given[0].dtype, cast_outputs=None):
            return [plain, per_element(gpu, model, given)]


def row(code: str) -> list[str]:
    """Return the last two cells of the row of the table that begins with ``code``."""
    (line,) = [x for x in README.read_text().splitlines() if x.startswith(f"| `{code}")]
    return [cell.strip() for cell in line.split("|")[-3:-1]]


@pytest.mark.smoke
@pytest.mark.parametrize("code", FORMULAS)
def test_bytes_of_activations(fake_cuda: FakeCuda, code: str) -> None:
    function = FORMULAS[code]
    dtype = torch.bfloat16 if function is squared_relu else FP16
    inputs = torch.randn(function.__code__.co_argcount, *SIZE).to(dtype).unbind()
    found = counts(fake_cuda, function, *(x.detach().requires_grad_() for x in inputs))
    assert found == [float(cell) for cell in row(code)]


SCORES = [  # with the number of times that the bytes of the mask move
    (added, FP16, 40, 10, 1),
    (widened, FP16, 40, 10, 1),
    (filled, torch.bool, 44, 14, 2),
    (kept, torch.bool, 44, 14, 4),  # the backward also inverts it
]


@pytest.mark.parametrize(("function", "dtype", "plain", "fused", "times"), SCORES)
def test_bytes_of_scores(
    fake_cuda: FakeCuda,
    function: Callable[..., Tensor],
    dtype: torch.dtype,
    plain: int,
    fused: int,
    times: int,
) -> None:
    scores, mask = torch.randn(SIZE).half().requires_grad_(), torch.zeros(MASK).to(dtype)
    found = counts(fake_cuda, function, scores, mask)
    share = mask.numel() * mask.itemsize / scores.numel()
    assert found[1] == fused + times * share
    assert plain < found[0] <= plain + 1


def test_the_row_of_scores() -> None:
    (line,) = [x for x in README.read_text().splitlines() if x.startswith("| scores that are")]
    assert line.endswith("| 41 to 45 | 10, 14 with a boolean mask, and the mask |")


def log_of_softmax(x):
    return torch.log(F.softmax(x, dim=-1))


def log_of_a_name(x):
    p = F.softmax(x, dim=-1)
    return p.log()


def attention(x):
    return F.softmax(x, dim=-1) @ x


class Plain(Calls):
    """Its results stay FP32."""

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


class ReturnsSoftmax(Plain):
    def forward(self, *inputs: Tensor) -> Tensor:
        return F.softmax(inputs[0], dim=-1)


class ReturnsSigmoid(Plain):
    def forward(self, *inputs: Tensor) -> Tensor:
        return torch.sigmoid(inputs[0])


PROBABILITIES = {  # bytes with ``fuse_ops=False``, and without
    "log of softmax": (Plain(log_of_softmax), 18 + 28, 6 + 14),
    "log of a name": (Plain(log_of_a_name), 18 + 28, 14 + 26),
    "softmax": (ReturnsSoftmax(attention), 10 + 16, 6 + 14),
    "sigmoid": (ReturnsSigmoid(attention), 10 + 16, 14 + 22),
    "attention": (Plain(attention), 16 + 34, 16 + 34),
}


@pytest.mark.parametrize("name", PROBABILITIES)
def test_bytes_of_probabilities(fake_cuda: FakeCuda, name: str) -> None:
    model, plain, fused = PROBABILITIES[name]
    x, found = torch.randn(SIZE).half().cuda().requires_grad_(), []
    model.cuda()
    for fuse in (False, True):
        fields = {"level": "O1", "dtype": FP16, "fuse_ops": fuse}
        with model_counts.as_if_large(), tritonamp.enable(model, **fields):
            fake_cuda.observer = counted = traffic.Traffic([])
            result = model(x)
            torch.autograd.grad(result, x, torch.ones_like(result))
            found.append(sum(counted.total().values()) / x.numel())
    assert found == [plain, fused]
