"""Norms of ``functional``: against FP64, as torch's, of sums; and where they run in a forward."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tritonamp
from tritonamp import functional
from tritonamp.kernels import _implementations
from tritonamp.kernels.add_norm import ADD_NORM
from tritonamp.kernels.cross_entropy import CROSS_ENTROPY
from tritonamp.kernels.norm import NORM
from tritonamp.kernels.norm_backward import NORM_BACKWARD

HALVES = [torch.float16, torch.bfloat16]
FP32 = torch.float32
U32 = 2.0**-24

each_half = pytest.mark.parametrize("half", HALVES, ids=str)
each_center = pytest.mark.parametrize("center", [True, False], ids=["layer_norm", "rms_norm"])


CPU = torch.device("cpu")
NAMES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "layer_norm": lambda x, _, w: functional.layer_norm(x, (8,), w, 2 * w),
    "rms_norm": lambda x, _, w: functional.rms_norm(x, (8,), w),
    "add_layer_norm": lambda *args: torch.add(*added(*args)),
    "add_rms_norm": lambda x, r, w: functional.add_rms_norm(x, r, (8,), w)[1],
    "add_rms_norm of x and x": lambda x, _, w: functional.add_rms_norm(x, x, (8,), w)[0],
}


def added(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return functional.add_layer_norm(x, r, (8,), w)


def unit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def call(center: bool, library: Any, x: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
    if center:
        return library.layer_norm(x, (4, 5), w, b, 1e-3)
    return library.rms_norm(x, (4, 5), w, 1e-3)


def made(half: torch.dtype, of_weights: torch.dtype, device: torch.device) -> list[Tensor]:
    tensors = [
        torch.randn(6, 3, 4, 5).to(half),
        (1 + torch.rand(4, 5)).to(of_weights),
        torch.rand(4, 5).to(of_weights),
    ]
    return [t.to(device).requires_grad_() for t in tensors]


@pytest.mark.parametrize("same", [True, False], ids=["half weights", "FP32 weights"])
@each_half
@each_center
def test_values_and_gradients(
    device: torch.device, center: bool, half: torch.dtype, same: bool
) -> None:
    """Each result is rounded once; before that 20 numbers are summed and scaled a few times, below
    64 u of the largest. What is summed over 18 lines has 18 u of their sum more.
    """
    if same and device.type == "cuda":
        pytest.skip("so few elements are torch's own kernels'")
    tensors = made(half, half if same else FP32, device)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    y, expected = call(center, functional, *tensors), call(center, F, *exact)
    grad = torch.randn(y.shape, device=device).to(half)
    y.backward(grad)
    expected.backward(grad.double())
    pairs = [(y, expected), *((t.grad, e.grad) for t, e in zip(tensors, exact, strict=True))]
    if not center:
        assert pairs.pop() == (None, None)
    assert [p.dtype for p, _ in pairs] == [half, *(t.dtype for t in tensors[: len(pairs) - 1])]
    for got, right in pairs:
        slack = (64 + 18) * U32 * max(right.abs().max().item(), 18.0)
        bound = unit(got.dtype) * right.abs() + slack + torch.finfo(got.dtype).smallest_normal
        assert ((got.double() - right).abs() <= bound).all()


@each_half
@each_center
def test_mixed_norms_round_to_what_is_asked_for(
    device: torch.device, center: bool, half: torch.dtype
) -> None:
    x, w, b = (t.detach() for t in made(half, FP32, device))
    rounded = call(center, functional, x, w, b)

    def mixed(dtype: torch.dtype, *args: Any) -> Tensor:
        if center:
            return functional.mixed_layer_norm(args[0], (4, 5), *args[1:], 1e-3, dtype=dtype)
        return functional.mixed_rms_norm(args[0], (4, 5), args[1], 1e-3, dtype=dtype)

    assert torch.equal(mixed(half, x, w, b), rounded)
    wide = mixed(FP32, x, w, b)
    assert wide.dtype is FP32 and torch.equal(wide.to(half), rounded)
    for args in ((x.float(), w, b), (x, w.double(), b.double())):  # the formula is torch's
        torch.testing.assert_close(mixed(FP32, *args), wide, rtol=64 * U32, atol=64 * U32)
        assert mixed(half, *args).dtype is half


@each_center
def test_a_gradient_may_be_differentiated_again(device: torch.device, center: bool) -> None:
    """y and dx are rounded to half before they are used: 2**-11 each, cubes thrice that."""
    x, w, b = made(torch.float16, FP32, device)
    wide = [t.detach().double().requires_grad_() for t in (x, w, b)]

    def penalty(library: Any, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        y = call(center, library, x, w, b).double()
        (dx,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
        return dx.double().square().sum() / 1024  # or half gradients overflow

    for tensors, library in (([x, w, b], functional), (wide, F)):
        penalty(library, *tensors).backward()
    for got, right in zip((x, w, b)[: 2 + center], wide, strict=False):
        assert (got.grad.double() - right.grad).abs().max() <= 2.0**-6 * right.grad.abs().max()


def test_only_what_needs_a_gradient_gets_one(device: torch.device) -> None:
    x, w, b = made(torch.float16, FP32, device)
    for one in (x, w, b):
        for t in (x, w, b):
            t.requires_grad_(t is one).grad = None
        functional.layer_norm(x, (4, 5), w, b).float().sum().backward()
        assert [t.grad is not None for t in (x, w, b)] == [t is one for t in (x, w, b)]


@pytest.mark.parametrize("dtype", [FP32, torch.float64], ids=str)
@each_center
def test_other_dtypes_are_torchs(device: torch.device, center: bool, dtype: torch.dtype) -> None:
    x, w, b = (t.detach() for t in made(dtype, dtype, device))
    assert torch.equal(call(center, functional, x, w, b), call(center, F, x, w, b))


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "group_norm"])
def test_arguments_are_torchs(name: str) -> None:
    ours, torchs = (inspect.signature(getattr(library, name)) for library in (functional, F))
    assert [(p.name, p.kind, p.default) for p in ours.parameters.values()] == [
        (p.name, p.kind, p.default) for p in torchs.parameters.values()
    ]


@pytest.mark.parametrize(
    ("shape", "weight"),
    [((4,), None), ((), None), ((5,), (4,)), ((4, 5), (20,)), (5, None)],
    ids=str,
)
@each_center
def test_wrong_shapes_are_refused_by_torch(
    device: torch.device, center: bool, shape: Any, weight: tuple[int, ...] | None
) -> None:
    x = torch.ones(2, 4, 5, dtype=torch.float16, device=device)
    w = None if weight is None else torch.ones(weight, dtype=torch.float16, device=device)
    name = "layer_norm" if center else "rms_norm"
    with pytest.raises((RuntimeError, TypeError)) as torchs:
        getattr(F, name)(x, shape, w)
    with pytest.raises(torchs.type) as ours:
        getattr(functional, name)(x, shape, w)
    assert str(ours.value) == str(torchs.value)


@pytest.mark.parametrize("shape", [(0, 4, 5), (3, 0, 4, 5)], ids=str)
@each_center
def test_without_lines(device: torch.device, center: bool, shape: tuple[int, ...]) -> None:
    _, w, b = made(torch.float16, FP32, device)
    x = torch.empty(shape, dtype=torch.float16, device=device, requires_grad=True)
    y = call(center, functional, x, w, b)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert not w.grad.any()


@each_center
def test_any_strides(device: torch.device, center: bool) -> None:
    x, w, b = made(torch.float16, FP32, device)
    transposed = x.detach().movedim(0, -1).contiguous().movedim(-1, 0).requires_grad_()
    results = []
    for given in (x, transposed):
        y = call(center, functional, given, w, b)
        y.backward(torch.ones_like(y))
        results.append((y, given.grad))
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected)


@each_center
def test_shapes_without_data(center: bool) -> None:
    x, w, b = (t.detach().to("meta").requires_grad_() for t in made(torch.float16, FP32, CPU))
    y = call(center, functional, x, w, b)
    y.sum().backward()
    assert (y.shape, y.dtype, x.grad.dtype, w.grad.dtype) == (x.shape, x.dtype, x.dtype, w.dtype)


def test_what_is_kept_for_backward(device: torch.device) -> None:
    """The half input as it is, and 8 bytes a line."""
    x, w, b = made(torch.float16, FP32, device)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        functional.layer_norm(x, (4, 5), w, b)
    pointers = [t.data_ptr() for t in (x, w, b)]
    assert [t.data_ptr() for t in kept[:3]] == pointers
    assert [(t.shape, t.dtype) for t in kept[3:]] == [((2, 18), FP32)]


@each_half
@each_center
def test_function_transforms(device: torch.device, center: bool, half: torch.dtype) -> None:
    """Under torch.func they are torch's own. Two roundings to half of values up to 8 apart."""
    x = torch.randn(4, 6, device=device).to(half)

    def norm(library: Any, x: Tensor) -> Tensor:
        return (library.layer_norm if center else library.rms_norm)(x, (6,))

    batched = torch.func.vmap(lambda row: norm(functional, row))(x)
    assert batched.dtype is half
    assert (batched - norm(functional, x)).abs().max() <= 4 * unit(half) * 8
    per_sample = torch.func.vmap(torch.func.grad(lambda row: norm(functional, row).pow(3).sum()))
    leaf = x.clone().requires_grad_()
    norm(functional, leaf).pow(3).sum().backward()
    torch.testing.assert_close(per_sample(x), leaf.grad, rtol=0, atol=4 * unit(half) * 64)


@pytest.mark.compiled
# torch 2.11 tracing a Function
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_compile_sees_one_graph(device: torch.device, name: str, dynamic: bool) -> None:
    torch.compiler.reset()
    compiled = torch.compile(NAMES[name], fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows in (3, 5):
        args = [torch.randn(rows, 8), torch.randn(rows, 8), torch.rand(8)]
        args = [t.half().to(device).requires_grad_() for t in args]
        results = []
        for function in (compiled, NAMES[name]):
            y = function(*args)
            results.append((y, *torch.autograd.grad(y.sum(), args, allow_unused=True)))
        for got, expected in zip(*results, strict=True):
            assert (got is None and expected is None) or torch.equal(got, expected)


def test_stock_autocast_changes_nothing(device: torch.device) -> None:
    x, w, b = (t.detach() for t in made(torch.float16, FP32, device))
    expected = functional.layer_norm(x, (4, 5), w, b)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        result = functional.layer_norm(x, (4, 5), w, b)
    assert torch.equal(result, expected)


def test_eps_left_out_is_torchs(device: torch.device) -> None:
    x = torch.full((2, 8), 2.0**-12, dtype=torch.float16, device=device)
    expected = F.rms_norm(x.float(), (8,))  # mean square 2**-24, eps 2**-23
    assert torch.equal(functional.rms_norm(x, (8,)), expected.half())


# of a sum


def add_call(center: bool, x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    if center:
        return functional.add_layer_norm(x, r, (4, 5), w, b, 1e-3)
    return functional.add_rms_norm(x, r, (4, 5), w, 1e-3)


@each_half
@each_center
def test_a_sum_and_its_norm(device: torch.device, center: bool, half: torch.dtype) -> None:
    """Values as of the two operations, bit for bit; the gradient of x is rounded once, where theirs
    are rounded to half before they are added: half an ulp of one of them, and of the sum twice.
    """
    x, w, b = made(half, FP32, device)
    r = torch.randn_like(x).requires_grad_()
    grads = torch.randn(2, *x.shape, device=device).to(half)
    inputs = [x, r, w, b][: 3 + center]
    one = add_call(center, x, r, w, b)
    total = x + r
    two = total, call(center, functional, total, w, b)
    for got, expected in zip(one, two, strict=True):
        assert torch.equal(got, expected)
    ours, theirs = (torch.autograd.grad(outputs, inputs, [*grads]) for outputs in (one, two))
    assert torch.equal(ours[0], ours[1])
    bound = unit(half) * (3 * theirs[0].abs() + grads[0].abs())
    assert ((ours[0] - theirs[0]).abs() <= bound).all()
    for got, expected in zip(ours[2:], theirs[2:], strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("used", [0, 1], ids=["the sum", "the norm"])
def test_one_of_the_two_may_go_unused(device: torch.device, used: int) -> None:
    x, w, b = made(torch.float16, FP32, device)
    r = torch.randn_like(x).requires_grad_()
    grad = torch.randn_like(x)
    ours = add_call(True, x, r, w, b)[used]
    total = x + r
    expected = (total, call(True, functional, total, w, b))[used]
    inputs = [x, r, w, b]
    for got, right in zip(
        torch.autograd.grad(ours, inputs, grad, allow_unused=True),
        torch.autograd.grad(expected, inputs, grad, allow_unused=True),
        strict=True,
    ):
        assert (got is None and right is None) or torch.equal(got, right)


@pytest.mark.parametrize("of_residual", [(FP32, (6, 3, 4, 5)), (torch.float16, (4, 5))], ids=str)
def test_what_torch_adds_is_normalised_too(
    device: torch.device, of_residual: tuple[torch.dtype, tuple[int, ...]]
) -> None:
    """An FP32 residual makes an FP32 sum; one that is expanded gets the sum of its gradients."""
    x, w, b = made(torch.float16, FP32, device)
    r = torch.randn(of_residual[1], device=device).to(of_residual[0]).requires_grad_()
    total, y = add_call(True, x, r, w, b)
    assert total.dtype is y.dtype is of_residual[0]
    assert torch.equal(y, call(True, functional, x + r, w, b))
    (total + y).sum().backward()
    assert r.grad.shape == r.shape


def test_sums_that_torch_cannot_form_are_its_errors(device: torch.device) -> None:
    x, w, b = made(torch.float16, FP32, device)
    with pytest.raises(RuntimeError, match="must match the size of tensor b"):
        functional.add_layer_norm(x, x[..., :3], (4, 5), w, b)
    with pytest.raises(RuntimeError, match="normalized_shape"):
        functional.add_rms_norm(x, x, (3,))


def test_a_gradient_through_both_may_be_differentiated_again(device: torch.device) -> None:
    """As in ``test_a_gradient_may_be_differentiated_again``."""
    x, w, b = made(torch.float16, FP32, device)
    r = torch.randn_like(x).requires_grad_()
    exact = [t.detach().double().requires_grad_() for t in (x, r, w, b)]

    def penalty(outputs: tuple[Tensor, Tensor], x: Tensor) -> Tensor:
        total, y = (t.double() for t in outputs)
        (dx,) = torch.autograd.grad((y.pow(3) + total * y).sum(), x, create_graph=True)
        return dx.double().square().sum() / 1024

    penalty(add_call(True, x, r, w, b), x).backward()
    total = exact[0] + exact[1]
    penalty((total, call(True, F, total, *exact[2:])), exact[0]).backward()
    for got, right in zip((x, r, w, b), exact, strict=True):
        assert (got.grad.double() - right.grad).abs().max() <= 2.0**-6 * right.grad.abs().max()


# in an enabled forward


class Norms(nn.Module):
    def __init__(self, center: bool) -> None:
        super().__init__()
        self.lift = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16) if center else nn.RMSNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        self.result = self.norm(self.lift(x))
        return self.result


@pytest.mark.parametrize("backend", ["triton", "eager"])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@each_center
def test_an_enabled_forward(
    device: torch.device, launched: list[str], center: bool, level: str, backend: str
) -> None:
    """Half storage with FP32 weights, by the kernels where Triton runs; at O3 there is no table."""
    torch.manual_seed(0)
    model = Norms(center).to(device)
    x = torch.randn(32, 8, device=device)
    with tritonamp.enable(model, level=level, backend=backend, loss_scale=1.0):
        model(x).sum().backward()
    assert model.result.dtype is torch.float16
    uses_kernels = backend == "triton" and level != "O3"
    assert launched == (["norm_kernel", "norm_backward_kernel"] if uses_kernels else [])
    exact = F.layer_norm if center else F.rms_norm
    with torch.no_grad():
        h = F.linear(x.half().double(), *(p.half().double() for p in model.lift.parameters()))
        # the linear's result is rounded to half before the norm: its error grows by at most rstd
        expected = exact(h.half().double(), (16,), eps=1e-5 if center else 2.0**-23)
    assert (model.result.double() - expected).abs().max() <= 2.0**-8


@pytest.mark.parametrize(
    ("operation", "fused"),
    [(NORM, False), (NORM_BACKWARD, False), (ADD_NORM, False), (CROSS_ENTROPY, True)],
    ids=lambda value: getattr(value, "name", None),
)
def test_inductor_is_left_what_it_fuses(
    monkeypatch: pytest.MonkeyPatch, operation: Any, fused: bool
) -> None:
    """Under torch.compile "auto" is the formula; asked for, it is the kernel."""
    monkeypatch.setattr(_implementations, "runs_triton", lambda device: True)
    x = torch.ones(1 << 16, dtype=torch.float16)

    def uses(backend: str) -> Tensor:
        return x.new_full((), operation.uses_triton(backend, x))

    compiled = torch.compile(uses, backend="eager", fullgraph=True)
    assert uses("auto") == 1 and compiled("auto") == fused and compiled("triton") == 1


# torch 2.11 tracing a Function
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("library", [functional, F], ids=["functional", "the op table"])
def test_inductor_is_left_norms_of_a_forward(
    monkeypatch: pytest.MonkeyPatch, handles: Any, library: Any
) -> None:
    """Whose rules run when AOTAutograd traces, after dynamo has."""

    class Norm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return library.layer_norm(x, (1024,))

    model, x = nn.Sequential(Norm(), nn.Linear(1024, 1)), torch.randn(64, 1024)
    handles(model, level="O2")
    expected = model(x)
    monkeypatch.setattr(_implementations, "runs_triton", lambda device: True)
    monkeypatch.setattr(NORM, "traceable", lambda *args: pytest.fail("the kernel is in the graph"))
    assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(x), expected)
