"""``functional.group_norm``: against FP64, as torch's, and in an enabled forward."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tritonamp
from tests.functional.test_norms import FP32, HALVES, U32, each_half, unit
from tritonamp import functional

LAST = torch.channels_last
each_format = pytest.mark.parametrize("form", [torch.contiguous_format, LAST], ids=str)


def made(
    half: torch.dtype, of_weights: torch.dtype, form: torch.memory_format, device: torch.device
) -> list[Tensor]:
    """Return x, [3, 4, 3, 5], weight and bias, for two groups."""
    x = torch.randn(3, 4, 3, 5, device=device).to(half).contiguous(memory_format=form)
    weight, bias = (1 + torch.rand(2, 4, device=device)).to(of_weights)
    return [t.detach().requires_grad_() for t in (x, weight, bias)]


@pytest.mark.parametrize("of_weights", [*HALVES, FP32], ids=str)
@each_half
@each_format
def test_values_and_gradients(
    device: torch.device, half: torch.dtype, of_weights: torch.dtype, form: torch.memory_format
) -> None:
    """Each result is rounded once. Before that 30 numbers are summed and scaled a few times, below
    64 u of the largest; over samples and places 45.
    """
    if of_weights is half and device.type == "cuda":
        pytest.skip("so few elements are torch's own kernels'")
    tensors = made(half, of_weights, form, device)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    y = functional.group_norm(tensors[0], 2, *tensors[1:])
    expected = F.group_norm(exact[0], 2, *exact[1:])
    grad = torch.randn(y.shape, device=device).to(half)
    y.backward(grad)
    expected.backward(grad.double())
    assert y.dtype is half and y.is_contiguous(memory_format=form)
    assert tensors[0].grad.is_contiguous(memory_format=form)
    pairs = [(y, expected), *((t.grad, e.grad) for t, e in zip(tensors, exact, strict=True))]
    for got, right in pairs:
        slack = (64 + 45) * U32 * max(right.abs().max().item(), 45.0)
        bound = unit(got.dtype) * right.abs() + slack + torch.finfo(got.dtype).smallest_normal
        assert ((got.double() - right).abs() <= bound).all()


def test_channels_last_keep_their_variance(device: torch.device) -> None:
    """Torch's own, which multiplies x and not its distance from the mean, is off by 2**10 u."""
    x = torch.full((1, 2, 16, 16), 1024.0, dtype=torch.float16, device=device)
    x[..., ::2] += 2
    x = x.contiguous(memory_format=LAST)
    y = functional.group_norm(x, 1, torch.ones(2, device=device), None, 0.0)
    assert torch.equal(y, x - 1025)


def test_a_gradient_may_be_differentiated_again(device: torch.device) -> None:
    """y and dx are rounded to half before they are used: 2**-11 each, cubes thrice that."""
    tensors = made(torch.float16, FP32, torch.contiguous_format, device)
    wide = [t.detach().double().requires_grad_() for t in tensors]

    def penalty(library: Any, x: Tensor, *weights: Tensor) -> Tensor:
        y = library.group_norm(x, 2, *weights, 1e-3).double()
        (dx,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
        return dx.double().square().sum() / 1024  # or half gradients overflow

    penalty(functional, *tensors).backward()
    penalty(F, *wide).backward()
    for got, right in zip(tensors, wide, strict=True):
        assert (got.grad.double() - right.grad).abs().max() <= 2.0**-6 * right.grad.abs().max()


def test_only_what_needs_a_gradient_gets_one(device: torch.device) -> None:
    tensors = made(torch.float16, FP32, LAST, device)
    for one in tensors:
        for t in tensors:
            t.requires_grad_(t is one).grad = None
        functional.group_norm(tensors[0], 2, *tensors[1:]).float().sum().backward()
        assert [t.grad is not None for t in tensors] == [t is one for t in tensors]


@pytest.mark.parametrize("dtype", [FP32, torch.float64], ids=str)
def test_other_dtypes_are_torchs(device: torch.device, dtype: torch.dtype) -> None:
    x, w, b = (t.detach() for t in made(dtype, dtype, LAST, device))
    assert torch.equal(functional.group_norm(x, 2, w, b), F.group_norm(x, 2, w, b))


@pytest.mark.parametrize(
    ("shape", "groups", "weight"),
    [((2, 4, 3), 3, 4), ((2, 4, 3), 2, 3), ((4,), 2, 4), ((1, 2, 1), 2, 2)],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float16, FP32], ids=str)
def test_what_torch_refuses_is_its_error(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, ...], groups: int, weight: int
) -> None:
    x = torch.ones(shape, device=device, dtype=dtype)
    w = torch.ones(weight, device=device, dtype=dtype)
    with pytest.raises((RuntimeError, ValueError)) as torchs:
        F.group_norm(x, groups, w)
    with pytest.raises(torchs.type) as ours:
        functional.group_norm(x, groups, w)
    assert str(ours.value) == str(torchs.value)


def test_without_images(device: torch.device) -> None:
    x = torch.empty(0, 4, 3, dtype=torch.float16, device=device, requires_grad=True)
    w = torch.ones(4, device=device, requires_grad=True)
    y = functional.group_norm(x, 2, w)
    y.sum().backward()
    assert (y.shape, y.dtype, x.grad.shape) == (x.shape, x.dtype, x.shape)
    assert not w.grad.any()


def test_any_strides(device: torch.device) -> None:
    x, w, b = made(torch.float16, FP32, torch.contiguous_format, device)
    moved = x.detach().movedim(0, -1).contiguous().movedim(-1, 0).requires_grad_()
    results = []
    for given in (x, moved):
        y = functional.group_norm(given, 2, w, b)
        y.backward(torch.ones_like(y))
        results.append((y, given.grad))
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected)


def test_shapes_without_data() -> None:
    tensors = made(torch.float16, FP32, LAST, torch.device("cpu"))
    x, w, b = (t.detach().to("meta").requires_grad_() for t in tensors)
    y = functional.group_norm(x, 2, w, b)
    y.sum().backward()
    assert (y.shape, y.dtype, y.stride()) == (x.shape, x.dtype, x.stride())
    assert (x.grad.dtype, w.grad.dtype) == (x.dtype, w.dtype)


@each_format
def test_what_is_kept_for_backward(device: torch.device, form: torch.memory_format) -> None:
    """The half input as it is, and 8 bytes for each group of an image."""
    tensors = made(torch.float16, FP32, form, device)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        functional.group_norm(tensors[0], 2, *tensors[1:])
    assert [t.data_ptr() for t in kept[:3]] == [t.data_ptr() for t in tensors]
    assert [(t.shape, t.dtype) for t in kept[3:]] == [((2, 6), FP32)]


def test_function_transforms(device: torch.device) -> None:
    """Under torch.func it is torch's own. A rounding to half each of values up to 8."""
    x = torch.randn(4, 2, 6, 3, device=device).half()
    batched = torch.func.vmap(lambda image: functional.group_norm(image, 3))(x)
    expected = functional.group_norm(x.flatten(0, 1), 3).view_as(x)
    assert batched.dtype is torch.float16
    assert (batched - expected).abs().max() <= 2 * unit(torch.float16) * 8


@pytest.mark.compiled
# torch 2.11 tracing a Function
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("dynamic", [False, True])
@each_format
def test_compile_sees_one_graph(
    device: torch.device, form: torch.memory_format, dynamic: bool
) -> None:
    def norm(x: Tensor, w: Tensor) -> Tensor:
        return functional.group_norm(x, 2, w, 2 * w)

    torch.compiler.reset()
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for images in (3, 5):
        x = torch.randn(images, 4, 2, 3, device=device).half().contiguous(memory_format=form)
        args = [t.requires_grad_() for t in (x, torch.rand(4, device=device))]
        results = []
        for function in (compiled, norm):
            y = function(*args)
            results.append((y, *torch.autograd.grad(y.sum(), args)))
        for got, expected in zip(*results, strict=True):
            assert torch.equal(got, expected) and got.stride() == expected.stride()


# in an enabled forward


class Groups(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift, self.norm = nn.Conv2d(2, 16, 3), nn.GroupNorm(4, 16)

    def forward(self, x: Tensor) -> Tensor:
        self.result = self.norm(self.lift(x))
        return self.result


@pytest.mark.parametrize("backend", ["triton", "eager"])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@each_format
def test_an_enabled_forward(
    device: torch.device, launched: list[str], form: torch.memory_format, level: str, backend: str
) -> None:
    """Half storage with FP32 weights, by the kernels where Triton runs; at O3 there is no table."""
    torch.manual_seed(0)
    model = Groups().to(device=device, memory_format=form)
    x = torch.randn(2, 2, 6, 6, device=device).contiguous(memory_format=form)
    with tritonamp.enable(model, level=level, backend=backend, loss_scale=1.0):
        model(x).sum().backward()
    assert model.result.dtype is torch.float16
    uses_kernels = backend == "triton" and level != "O3"
    names = ["group_norm_kernel", "group_norm_backward_kernel"]
    assert launched == (names if uses_kernels else [])
    assert model.result.is_contiguous(memory_format=form)
    with torch.no_grad():
        h = F.conv2d(x.half().double(), *(p.half().double() for p in model.lift.parameters()))
        # the convolution's result is rounded to half before: its error grows by at most rstd
        expected = F.group_norm(h.half().double(), 4)
    assert (model.result.double() - expected).abs().max() <= 2.0**-8
