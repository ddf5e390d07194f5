"""functional.cross_entropy against torch and FP64: eager on a CPU, and by the kernels."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tritonamp
from tritonamp import functional
from tritonamp.functional.losses import fused, is_ours
from tritonamp.kernels.device import INTERPRETED

HALVES = [torch.float16, torch.bfloat16]
FP16, FP32 = torch.float16, torch.float32
SHAPES = {"line": (7,), "lines": (5, 9), "images": (2, 6, 3, 5), "long": (2, 300)}

each_half = pytest.mark.parametrize("half", HALVES, ids=str)
each_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
each_reduction = pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
interpreted = pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()), reason="kernels cannot run here"
)
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered:RuntimeWarning")  # NumPy's


def logits_and_targets(shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> Any:
    torch.manual_seed(0)
    x = (torch.randn(shape, device=device) * 3).to(dtype)
    target = torch.randint(shape[min(1, len(shape) - 1)], (*shape[:1], *shape[2:]), device=device)
    target = target[0] if len(shape) == 1 else target
    if target.dim():
        target.view(-1)[1] = -100
    return x, target


def by_kernel(x: Tensor, target: Tensor, reduction: str, smoothing: float = 0.0) -> Tensor:
    assert is_ours("triton", x, target, None, smoothing)
    return fused(x, target, -100, reduction, smoothing, "triton")


def by_torch(x: Tensor, target: Tensor, reduction: str, smoothing: float = 0.0) -> Tensor:
    return functional.cross_entropy(x, target, reduction=reduction, label_smoothing=smoothing)


each_way = pytest.mark.parametrize(
    "way", [pytest.param(by_kernel, marks=interpreted), by_torch], ids=["kernel", "torch"]
)
Way = Callable[..., Tensor]


@each_way
@each_shape
@each_reduction
def test_losses_and_gradients(
    device: torch.device, way: Way, shape: tuple[int, ...], reduction: str
) -> None:
    """The loss within FP32's 32 u (few classes, few lines), the gradient rounded once."""
    x, target = logits_and_targets(shape, FP16, device)
    x, wide = x.requires_grad_(), x.double().requires_grad_()
    loss, exact = way(x, target, reduction, 0.1), by_torch(wide, target, reduction, 0.1)
    assert loss.dtype is FP32 and loss.shape == exact.shape
    torch.testing.assert_close(loss.double(), exact, rtol=2.0**-19, atol=2.0**-19)
    grad = torch.randn_like(loss) * 2**10
    (dx,) = torch.autograd.grad(loss, x, grad)
    (exact_dx,) = torch.autograd.grad(exact, wide, grad.double())
    assert dx.dtype is FP16
    half_ulp = 2.0**-11 * exact_dx.abs()
    assert ((dx - exact_dx).abs() <= half_ulp + 2.0**-17 * grad.abs().max()).all()


OTHERS: dict[str, Callable[[Any], dict[str, Tensor]]] = {
    "weights": lambda device: {"weight": torch.rand(9, device=device)},
    "probabilities": lambda device: {"target": torch.rand(5, 9, device=device).softmax(1)},
    "no classes": lambda device: {"input": torch.zeros(5, 0, device=device)},
    "FP64": lambda device: {"input": torch.rand(5, 9, device=device).double()},
}


@pytest.mark.parametrize("case", OTHERS)
@each_half
def test_the_rest_is_torchs_in_fp32(device: torch.device, case: str, half: torch.dtype) -> None:
    x, target = logits_and_targets((5, 9), half, device)
    if case == "no classes":
        target.fill_(-100)
    given = {"input": x, "target": target} | OTHERS[case](device)
    given = {name: t.to(half) if t.dtype is FP32 else t for name, t in given.items()}
    assert not is_ours("triton", given["input"], given["target"], given.get("weight"), 0.0)
    wide = {name: t.float() if t.dtype is half else t for name, t in given.items()}
    found, expected = functional.cross_entropy(**given), F.cross_entropy(**wide)
    assert found.dtype is expected.dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_deprecated_arguments_are_torchs(device: torch.device) -> None:
    x, target = logits_and_targets((5, 9), FP16, device)
    with pytest.warns(UserWarning, match="please use reduction='sum' instead"):
        loss = functional.cross_entropy(x, target, None, False)
    assert torch.equal(loss, by_torch(x, target, "sum"))


@pytest.mark.parametrize(
    "change",
    [
        {"reduction": "average"},
        {"label_smoothing": 2.0},
        {"target": torch.tensor([0, 1, 9, 2, 3])},
        {"target": torch.zeros(4, dtype=torch.int64)},
        {"target": torch.zeros(5, dtype=torch.int32)},
    ],
    ids=str,
)
def test_errors_are_torchs(change: dict[str, Any]) -> None:
    x, target = logits_and_targets((5, 9), FP16, "cpu")
    arguments = {"target": target, **change}
    with pytest.raises((ValueError, RuntimeError, IndexError)) as torchs:
        F.cross_entropy(x.float(), **arguments)
    with pytest.raises(torchs.type) as ours:
        functional.cross_entropy(x, **arguments)
    assert str(ours.value) == str(torchs.value)


@each_way
def test_no_targets_that_count(device: torch.device, way: Way) -> None:
    """The mean of nothing is NaN, as in torch, and has gradient 0."""
    x = torch.randn(3, 9, device=device).half().requires_grad_()
    target = torch.full((3,), -100, device=device)
    assert way(x, target, "sum") == 0
    loss = way(x, target, "mean")
    assert loss.isnan()
    (dx,) = torch.autograd.grad(loss, x)
    assert not dx.any()


@each_way
def test_the_loss_scale_saves_gradients(device: torch.device, way: Way) -> None:
    """The mean over 4096 lines of 8192 classes, of which 16 lines are here.

    In half, before the loss scale, 69 % of the gradients of classes that are no target are 0: what
    kernels give that make gradients in the forward. Under it none is that half could hold.
    """
    torch.manual_seed(0)
    x = torch.randn(16, 8192, device=device).half().requires_grad_()
    target = torch.randint(8192, (16,), device=device)
    scale, rows = 2.0**16, 4096
    (dx,) = torch.autograd.grad(way(x, target, "sum") / rows * scale, x)
    wide = x.double().requires_grad_()
    (true,) = torch.autograd.grad(by_torch(wide, target, "sum") / rows, wide)
    others = torch.ones_like(true).scatter_(1, target[:, None], 0.0).bool()
    too_early = true.half()[others] == 0
    assert 0.67 < too_early.double().mean() < 0.71
    assert not (dx[others] == 0).any()
    rounded = 2.0**-11 * true.abs() + 2.0**-25 / scale  # half an ulp; FP32 adds 1 %
    assert ((dx.double() / scale - true).abs() <= 1.01 * rounded).all()


@interpreted
def test_double_backward(device: torch.device) -> None:
    x, target = logits_and_targets((5, 9), FP16, device)
    w = torch.randn(5, 9, device=device)

    def second(way: Way, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (dx,) = torch.autograd.grad(way(x, target, "mean").square(), x, create_graph=True)
        return torch.autograd.grad((dx * w.to(x.dtype)).sum(), x)[0]

    exact = second(by_torch, x.double())
    atol = 2.0**-8 * exact.abs().max().item()
    torch.testing.assert_close(second(by_kernel, x).double(), exact, rtol=0, atol=atol)


@interpreted
def test_logits_and_two_numbers_a_line_are_kept(device: torch.device) -> None:
    x, target = logits_and_targets((5, 9), FP16, device)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        losses = by_kernel(x.requires_grad_(), target, "none")
    assert [(t.dtype, t.numel()) for t in kept] == [(FP16, 45), (torch.int64, 5), (FP32, 10)]
    assert kept[0].data_ptr() == x.data_ptr()
    losses.mul_(2)  # nothing that the backward reads
    losses.sum().backward()
    with torch.inference_mode():
        assert by_kernel(x, target, "mean").grad_fn is None


@pytest.mark.compiled
@pytest.mark.parametrize("dtype", [FP16, FP32], ids=str)
def test_compile_sees_one_graph(device: torch.device, dtype: torch.dtype) -> None:
    torch.compiler.reset()
    compiled = torch.compile(functional.cross_entropy, fullgraph=True, backend="aot_eager")
    x, target = logits_and_targets((5, 9), dtype, device)
    loss = compiled(x.requires_grad_(), target)
    assert torch.equal(loss, functional.cross_entropy(x, target))
    (dx,) = torch.autograd.grad(loss, x)
    assert torch.equal(dx, torch.autograd.grad(functional.cross_entropy(x, target), x)[0])


def test_meta_tensors(device: torch.device) -> None:
    x, target = torch.empty(4, 9, dtype=FP16, device="meta"), torch.empty(4, device="meta").long()
    assert functional.cross_entropy(x, target).dtype is FP32


def test_function_transforms(device: torch.device) -> None:
    """Under torch.func it is torch's own function, which it can look into."""
    x, target = logits_and_targets((5, 9), FP16, device)
    per_sample = torch.func.vmap(torch.func.grad(functional.cross_entropy))(x, target.clamp(min=0))
    leaf = x.clone().requires_grad_()
    functional.cross_entropy(leaf, target.clamp(min=0), reduction="sum").backward()
    torch.testing.assert_close(per_sample, leaf.grad, rtol=0, atol=2.0**-10)


class Losses(nn.Module):
    """A model that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 9)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return nn.CrossEntropyLoss(label_smoothing=0.1)(self.head(x), target)


@interpreted
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_enabled_forward_takes_the_kernels(
    device: torch.device, launched: list[str], level: str
) -> None:
    torch.manual_seed(0)
    model, plain = Losses().to(device), Losses().to(device)
    plain.load_state_dict(model.state_dict())
    x, target = torch.randn(5, 8, device=device), torch.tensor([0, 8, 3, -100, 1], device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tritonamp.enable(model, optimizer, level=level, backend="triton") as amp:
        loss = model(x, target)
        assert loss.dtype is FP32
        torch.testing.assert_close(loss, plain(x, target), rtol=0, atol=2.0**-8)
        amp.backward(loss)
        assert launched == ["cross_entropy_kernel", "cross_entropy_backward_kernel"]
        launched.clear()
        with amp.autocast():
            probabilities = torch.rand(5, 9, device=device)
            F.cross_entropy(model.head(x), probabilities / probabilities.sum(1, keepdim=True))
        assert launched == []
