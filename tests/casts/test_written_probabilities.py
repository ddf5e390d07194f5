"""Softmaxes and sigmoids that code reads, or a model returns: which are FP32, and gradients."""

import copy
import dataclasses
import inspect
import math
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tritonamp
from tests.casts.written_probabilities import FOUND, LEFT, RETURNED, SIGMOIDS
from tritonamp.casts.written.rewriting import rewritten

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


class Reads(nn.Module):
    """Calls a function of half logits, of which all rows go from ``high`` to ``low``."""

    def __init__(self, function: Callable[..., Any], low: float, high: float) -> None:
        super().__init__()
        rows = torch.linspace(low, high, 8).flip(0).expand(6, 8)
        self.logits, self.function = nn.Parameter(rows.contiguous().clone()), function

    def forward(self, dtype: torch.dtype) -> Tensor:
        self.given = self.logits.to(dtype)
        result: Tensor = self.function(self.given)
        return result


OF_ONE = (*SIGMOIDS, "log1p_of_the_others", "log_of_the_others")
"""Functions that read 1 - p."""


def model_of(name: str) -> Reads:
    """Return a model whose largest probability is 1 in half, and whose least is 0 in float16."""
    if name in SIGMOIDS:
        return Reads(SIGMOIDS[name], -20.0, 9.0)
    if name in OF_ONE:
        return Reads(FOUND[name], 2.0, -61.0)
    return Reads(FOUND[name], -25.0, 2.0)


def outcome(model: Reads, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return output and gradient of the logits."""
    output = model(dtype)
    (grad,) = torch.autograd.grad(output.double().sum(), model.given)
    return output.detach().double(), grad.double()


def assert_has_digits(found: tuple[Tensor, Tensor], name: str, dtype: torch.dtype) -> None:
    """Fail unless output and gradient have the digits of FP32."""
    model = model_of(name)
    x = model.logits.to(dtype).double().requires_grad_()
    expected = model.function(x)
    (grad,) = torch.autograd.grad(expected.sum(), x)
    # the last digit of the exponentials, of their sum, and of the function; 1 - p = e^-9 has less
    rtol = torch.finfo(FP32).eps * (8 if name not in OF_ONE else 8 + math.exp(9))
    torch.testing.assert_close(found[0], expected.double(), rtol=rtol, atol=1e-6)
    # the gradient is rounded to half, in float16 with steps of 6e-8 below 6e-5
    rtol += torch.finfo(dtype).eps
    torch.testing.assert_close(found[1], grad, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", [*FOUND, *SIGMOIDS])
def test_probabilities_that_code_reads_have_the_digits_of_fp32(
    handles: Any, name: str, level: str, dtype: torch.dtype
) -> None:
    settings = {"level": level, "dtype": dtype, "cast_outputs": None}
    model = model_of(name)
    amp = handles(model, **settings)
    assert any(f".{name}:" in site for site in amp.stats()["fused"])
    found = outcome(model, dtype)
    amp.disable()
    assert_has_digits(found, name, dtype)
    handles(model, fuse_ops=False, **settings)
    with pytest.raises((AssertionError, ValueError)):  # distributions refuse NaN
        assert_has_digits(outcome(model, dtype), name, dtype)


@pytest.mark.parametrize("name", LEFT)
def test_other_code_is_left_alone(name: str) -> None:
    assert rewritten(LEFT[name], lambda _: False) is None
    assert rewritten(LEFT[name], lambda _: False, is_result=True) is None


def test_there_are_thirty_of_the_others() -> None:
    assert len(LEFT) >= 30


def test_attention_stays_half(handles: Any) -> None:
    """Of two softmaxes, the one that is read is FP32."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.layer(x)
            weights = F.softmax(x @ x.mT, dim=-1)
            p = F.softmax(weights @ x, dim=-1)
            self.dtypes = weights.dtype, p.dtype
            return -(p * torch.log(p)).sum(-1)

    model = Both()
    amp = handles(model, level="O2", dtype=FP16)
    model(torch.randn(6, 8))
    assert model.dtypes == (FP16, FP32)
    assert len(amp.stats()["fused"]) == 1


@pytest.mark.parametrize("name", ["log_of_softmax", "log_of_a_method", "log_of_an_expression"])
def test_log_of_softmax_is_log_softmax(handles: Any, name: str) -> None:
    """It is finite where an FP32 softmax is 0."""
    model = Reads(FOUND[name], -200.0, 10.0)
    amp = handles(model, level="O1", dtype=FP16, cast_outputs=None)
    found = model(FP16)
    expected = F.log_softmax(model.given.detach().float(), dim=-1)
    assert found.dtype is FP32 and torch.equal(found.detach(), expected)
    plain = FOUND[name](model.given.detach().float())
    assert not plain.isfinite().all()
    amp.disable()


class Returns(nn.Module):
    """A model that calls a function of its half logits."""

    def __init__(self, function: Callable[..., Any], *, outside: bool = False) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 8), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.layer(x))


def tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    parts = vars(output).values() if dataclasses.is_dataclass(output) else output
    parts = output.values() if isinstance(output, dict) else parts
    return [part for part in parts if isinstance(part, Tensor)]


def is_rounded(x: Tensor) -> bool:
    return torch.equal(x.half().float(), x)


def forward_of(function: Callable[..., Any]) -> nn.Module:
    """Return a model whose forward is a function of tensors, except that it has a ``self``."""
    lines = inspect.getsource(function).splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("def"))
    lines[first] = "def forward(self, x):"
    path = Path(tempfile.mkdtemp()) / "model.py"
    path.write_text("\n".join(lines))
    space = dict(function.__globals__)
    exec(compile(path.read_text(), str(path), "exec"), space)
    model: nn.Module = type("Model", (nn.Module,), {"forward": space["forward"]})()
    model.register_parameter("weight", nn.Parameter(torch.ones(1)))
    return model


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", RETURNED)
def test_probabilities_that_a_model_returns_are_not_rounded(
    handles: Any, name: str, level: str
) -> None:
    model, x = forward_of(RETURNED[name]), torch.linspace(-12, 12, 48).half().view(6, 8)
    expected = tensors(RETURNED[name](x.double()))
    amp = handles(model, level=level, dtype=FP16)
    assert len(amp.stats()["fused"]) == 1
    found = tensors(model(x))
    amp.disable()
    eps = torch.finfo(FP32).eps
    for result, one in zip(found, expected, strict=True):
        assert result.dtype is FP32
        torch.testing.assert_close(result.double(), one, rtol=8 * eps, atol=eps)
    for fields in ({"fuse_ops": False}, {"softmax_dtype": FP32}, {"level": "O3"}):
        amp = handles(model, **{"level": level, "dtype": FP16, **fields})
        found, is_wide = tensors(model(x)), "softmax_dtype" in fields and "sigmoid" not in name
        assert all(result.dtype is FP32 for result in found)
        if name not in ("the_others", "a_method_of_an_expression") and not is_wide:
            assert all(map(is_rounded, found))
        amp.disable()
    amp = handles(model, level=level, dtype=FP16, cast_outputs=None)
    assert {result.dtype for result in tensors(model(x))} == {FP16}


@pytest.mark.parametrize("name", RETURNED)
def test_probabilities_inside_of_a_model_stay_half(handles: Any, name: str) -> None:
    inner = forward_of(RETURNED[name])
    model = nn.Sequential(inner)
    amp = handles(model, level="O1", dtype=FP16)
    assert amp.stats()["fused"] == []
    found = tensors(model(torch.randn(6, 8).half()))
    assert all(map(is_rounded, found))
    amp.disable()
    # also where the class is known as that of a model
    root = handles(copy.deepcopy(inner), level="O1", dtype=FP16)
    assert len(root.stats()["fused"]) == 1
    assert handles(model, level="O1", dtype=FP16).stats()["fused"] == []
    assert all(map(is_rounded, tensors(model(torch.randn(6, 8).half()))))


MODULES = {
    "Softmax": nn.Softmax(dim=1),
    "Softmin": nn.Softmin(dim=1),
    "Softmax2d": nn.Softmax2d(),
    "Sigmoid": nn.Sigmoid(),
    "in a Sequential": nn.Sequential(nn.ReLU(), nn.Sequential(nn.Softmax(dim=1))),
}


def layers(last: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 1), last)


class Named(nn.Module):
    """Returns the result of one module, and takes the logarithm of another's."""

    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.actor, self.critic, self.inner = (layers(copy.deepcopy(last)) for _ in range(3))
        self.last = copy.deepcopy(last)

    def forward(self, x: Tensor) -> Any:
        read = self.critic(x)
        self.inside = self.inner(x)
        self.seen = direct, _ = self.last(x), self.last(self.inside)
        return self.actor(x), torch.log(read + 1e-9), direct


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", MODULES)
def test_modules_that_compute_the_result(handles: Any, name: str, level: str) -> None:
    torch.manual_seed(0)
    model, x = layers(copy.deepcopy(MODULES[name])), torch.randn(2, 3, 4, 4).half()
    classes = [type(m) for m in model.modules()]
    amp = handles(model, level=level, dtype=FP16)
    found = model(x)
    assert found.dtype is FP32 and not is_rounded(found)
    with amp.autocast():
        logits = model[0](x)
    with tritonamp.disable_casts():
        expected = MODULES[name](logits.float())
    torch.testing.assert_close(found, expected, rtol=0, atol=4 * torch.finfo(FP16).eps)
    amp.disable()
    assert [type(m) for m in model.modules()] == classes
    handles(model, level=level, dtype=FP16, fuse_ops=False)
    assert is_rounded(model(x))


@pytest.mark.parametrize("name", MODULES)
def test_modules_that_code_names(handles: Any, name: str) -> None:
    model, x = Named(MODULES[name]), torch.randn(2, 3, 4, 4).half()
    handles(model, level="O1", dtype=FP16)
    actor, _, direct = model(x)
    assert not is_rounded(actor) and not is_rounded(direct)
    assert model.inside.dtype is FP16
    # each call of a module has the same dtype
    assert {y.dtype for y in model.seen} == {FP32}


def test_other_dtypes_keep_theirs(handles: Any) -> None:
    class Any_(Returns):
        def forward(self, x: Any) -> Any:
            p = F.softmax(x, dim=-1)
            q = torch.softmax(x * 1, -1)
            return torch.log(p), q.log(), torch.log(x.softmax(-1)), (1 - torch.sigmoid(x)).log()

    model = Any_(F.relu)
    handles(model, level="O1", dtype=FP16)
    for dtype in (FP32, FP64):
        x = torch.randn(3, 4, dtype=dtype)
        found = model(x)
        assert {y.dtype for y in found} == {dtype}
        assert torch.equal(found[2], torch.log(torch.softmax(x, -1)))
    mapped = torch.func.vmap(lambda x: torch.log(torch.softmax(x, -1)))
    with torch.no_grad():
        assert mapped(torch.randn(3, 4).half()).dtype is FP16


class Objects:
    """Has methods of a tensor's names."""

    def softmax(self, dim: int) -> Tensor:
        return torch.ones(3)

    def sigmoid(self) -> Tensor:
        return torch.ones(3)


def test_objects_with_methods_of_these_names(handles: Any) -> None:
    class Calls(Returns):
        def forward(self, x: Any) -> Any:
            return x.softmax(-1).log(), torch.log(x.sigmoid()), x.softmax(dim=-1)

    model = Calls(F.relu)
    handles(model, level="O1", dtype=FP16, cast_inputs=False)
    assert [y.tolist() for y in model(Objects())] == [[0.0] * 3, [0.0] * 3, [1.0] * 3]


class Whole(nn.Module):
    """Every kind of change in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1))
        self.sigmoid = nn.Sigmoid()

    def forward(self, x: Tensor) -> Any:
        h = self.layer(x)
        p, s = h.softmax(-1), torch.sigmoid(h)
        read = torch.log(F.softmax(h, dim=-1)), (p * p.log()).sum(-1), torch.log(1 - s)
        return *read, F.softmax(h, dim=1), self.last(h), h.sigmoid(), self.sigmoid(h)


def test_copies_pickles_and_checkpoints(handles: Any) -> None:
    model, x = Whole(), torch.randn(3, 4)
    amp = handles(model, level="O2", dtype=FP16)
    expected = model(x)
    assert not any(map(is_rounded, expected))
    twin = copy.deepcopy(model)
    assert all(map(torch.equal, twin(x), expected))
    again = checkpoint(model, x, use_reentrant=False)
    assert all(map(torch.equal, again, expected))
    sum(y.sum() for y in again).backward()
    grad = model.layer.weight.grad
    assert grad is not None and grad.isfinite().all()
    loaded = pickle.loads(pickle.dumps(model.last))
    assert type(loaded[1]) is nn.Softmax
    amp.disable()
    assert type(model.sigmoid) is nn.Sigmoid and type(model.last[1]) is nn.Softmax
    assert all(map(torch.equal, twin(x), expected))


# torch 2.11 tracing a Function
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled(handles: Any) -> None:
    model, x = Whole(), torch.randn(3, 4)
    handles(model, level="O2", dtype=FP16)
    expected = model(x)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for found, one in zip(compiled(x), expected, strict=True):
        assert found.dtype is FP32 and torch.equal(found, one)


def test_a_healed_softmax_follows_the_policy_again(handles: Any) -> None:
    model, x = Whole(), torch.randn(3, 4)
    amp = handles(model, level="O1", dtype=FP16)
    expected = model(x)
    amp.heal("last")
    amp.heal("sigmoid")
    assert model(x)[-1].dtype is FP32
    amp.unheal("last")
    amp.unheal("sigmoid")
    assert all(map(torch.equal, model(x), expected))


class Classifier(nn.Module):
    """Sharp logits: most probabilities are 0 in float16."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(16, 64), nn.ReLU()), nn.Linear(64, 32)
        self.loss = loss
        with torch.no_grad():
            self.head.weight.mul_(40)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.head(self.body(x)), y)


def log_likelihood(x: Tensor, y: Tensor) -> Tensor:
    return F.nll_loss(torch.log(F.softmax(x, dim=-1)), y)


def with_entropy(x: Tensor, y: Tensor) -> Tensor:
    p = x.softmax(-1)
    return F.cross_entropy(x, y) + 0.1 * (p * p.log()).sum(-1).mean()


def masked(x: Tensor, y: Tensor) -> Tensor:
    p = torch.softmax(x, -1) * (torch.arange(32, device=x.device) % 2 == y[:, None] % 2)
    p = p / p.sum(-1, keepdim=True)
    return ((p - F.one_hot(y, 32)) ** 2).sum(-1).mean()


def trained(handles: Any, model: nn.Module, loss_of: Any, **fields: Any) -> tuple[int, float]:
    """Return the number of skips in 12 steps, and the last loss."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    amp = handles(model, optimizer, raise_after=100, **fields)
    for _ in range(12):
        loss = loss_of(model)
        optimizer.zero_grad()
        amp.backward(loss)
        optimizer.step()
    skips = amp.stats()["skipped"]
    amp.disable()
    return skips, float(loss.detach())


LOOPS = {
    "log": lambda: Classifier(log_likelihood),
    "entropy": lambda: Classifier(with_entropy),
    "masked": lambda: Classifier(masked),
    "outside": lambda: nn.Sequential(nn.Linear(16, 32), nn.Softmax(dim=1)),
}


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", LOOPS)
def test_training_skips_as_few_steps_as_with_log_softmax(
    handles: Any, name: str, level: str
) -> None:
    torch.manual_seed(0)
    model, x, y = LOOPS[name](), torch.randn(64, 16), torch.randint(32, (64,))
    if name == "outside":
        with torch.no_grad():
            next(model.parameters()).mul_(16)

    def loss_of(model: nn.Module) -> Tensor:
        if name != "outside":
            loss: Tensor = model(x, y)
            return loss
        return -torch.log(model(x)[range(64), y]).mean()

    runs = [
        trained(handles, copy.deepcopy(model), loss_of, dtype=dtype, level=kind, fuse_ops=fuse)
        for kind, dtype, fuse in (("O0", None, True), (level, FP16, True), (level, FP16, False))
    ]
    assert runs[1][0] <= 1 < runs[2][0]
    # one step of twelve may be missing, of less than a tenth of the loss
    assert runs[1][1] == pytest.approx(runs[0][1], rel=0.1)
