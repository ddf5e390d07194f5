"""functional.masked_softmax against FP64 and torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import ulp
from tritonamp import functional
from tritonamp.functional.masked_rows import softmax_of_scores

HALVES = [torch.float16, torch.bfloat16]
DTYPES = [*HALVES, torch.float32]
INF, NAN = float("inf"), float("nan")
SHAPE = 2, 3, 6, 10

each_half = pytest.mark.parametrize("half", HALVES, ids=str)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_causal = pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])

MASKS: dict[str, Callable[[torch.device], Tensor | None]] = {
    "none": lambda device: None,
    "bool": lambda device: torch.rand(2, 1, 6, 10, device=device) < 0.7,
    "padding": lambda device: torch.rand(2, 1, 1, 10, device=device) < 0.7,
    "half": lambda device: torch.randn(10, device=device).half(),
    "float32": lambda device: torch.randn(3, 1, 10, device=device),
    "float64": lambda device: torch.randn(6, 1, device=device, dtype=torch.float64),
    "-inf": lambda device: torch.zeros(6, 10, device=device).masked_fill(
        torch.rand(6, 10, device=device) < 0.4, -INF
    ),
}
each_mask = pytest.mark.parametrize("kind", MASKS)


def exact(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """Written out in FP64; lines of which no column counts are 0, and so is their gradient."""
    wide = x.double() * scale
    if mask is not None and mask.dtype is torch.bool:
        wide = wide.masked_fill(~mask, -INF)
    elif mask is not None:
        wide = wide + mask.double()
    if causal:
        queries, keys = x.shape[-2:]
        above = torch.ones(queries, keys, dtype=torch.bool, device=x.device)
        wide = wide.masked_fill(above.triu(keys - queries + 1), -INF)
    empty = (wide == -INF).all(-1, keepdim=True)
    return wide.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)


def scores(dtype: torch.dtype, device: torch.device, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return (torch.randn(shape, device=device) * 3).to(dtype).requires_grad_()


@each_dtype
@each_mask
@each_causal
def test_values_and_gradients(
    device: torch.device, dtype: torch.dtype, kind: str, causal: bool
) -> None:
    """The result within one ulp. Its gradient, of a loss scaled by 2**15, from the rounded result:
    half an ulp of y, in y and in the sum; FP32 errors; and a rounding.
    """
    x, mask = scores(dtype, device), MASKS[kind](device)
    y = functional.masked_softmax(x, mask, scale=0.4, causal=causal)
    grad = (torch.randn(SHAPE, device=device) * 2.0**-3).to(dtype) * 2.0**15
    (dx,) = torch.autograd.grad(y, x, grad)
    wide = x.detach().double().requires_grad_()
    expected = exact(wide, mask, 0.4, causal)
    (dexpected,) = torch.autograd.grad(expected, wide, grad.double())
    expected = expected.detach()
    assert (y.dtype, y.shape, dx.dtype) == (dtype, x.shape, dtype)
    fp32 = 64 * 2.0**-24
    rounding = ulp(expected, dtype)
    assert (
        (y.double() - expected).abs()
        <= rounding + (fp32 if dtype is torch.float32 else 0) * expected
    ).all()
    kept, g = rounding / 2 + fp32 * expected, grad.double()
    mass = expected * (kept * g.abs()).sum(-1, keepdim=True) + kept * (
        g.abs() + (expected * g.abs()).sum(-1, keepdim=True)
    )
    assert (
        (dx.double() - dexpected).abs() <= 0.4 * (1 + fp32) * mass * 1.01 + ulp(dexpected, dtype)
    ).all()


@each_half
@pytest.mark.parametrize(
    "shape", [(2, 1, 6, 10), (3, 1, 10), (10,), (6, 1), (), (2, 3, 6, 10)], ids=str
)
@pytest.mark.parametrize("mask_dtype", [*DTYPES, None], ids=str)
@each_causal
def test_learned_biases_get_their_gradient(
    device: torch.device,
    half: torch.dtype,
    shape: tuple[int, ...],
    mask_dtype: torch.dtype | None,
    causal: bool,
) -> None:
    """Sums over what shares an element, of FP32 terms: rounded once, to the bias's dtype. Each
    term inherits the rounding of y, and the sum of all of them is bounded by their mass.
    """
    x = scores(half, device)
    bias = torch.randn(shape, device=device).to(mask_dtype or half).requires_grad_()
    y = functional.masked_softmax(x, bias, scale=0.4, causal=causal)
    grad = torch.randn(SHAPE, device=device).to(half)
    dx, dbias = torch.autograd.grad(y, (x, bias), grad)
    wide = x.detach().double().requires_grad_(), bias.detach().double().requires_grad_()
    expected = exact(*wide, 0.4, causal)
    dx_exact, dbias_exact = torch.autograd.grad(expected, wide, grad.double())
    assert (dbias.dtype, dbias.shape, dx.dtype) == (bias.dtype, bias.shape, half)
    eps = torch.finfo(half).eps
    terms = (grad.double().abs() * expected.detach()).sum(-1, keepdim=True) + grad.double().abs()
    error = (eps * expected.detach() + torch.finfo(half).tiny * eps) * terms
    assert ((dx.double() - dx_exact).abs() <= 2 * error + ulp(dx_exact, half)).all()
    bound = (2 * error).sum_to_size(shape) + ulp(dbias_exact, bias.dtype)
    assert ((dbias.double() - dbias_exact).abs() <= bound).all()
    # alone, too
    (alone,) = torch.autograd.grad(
        functional.masked_softmax(x.detach(), bias, scale=0.4, causal=causal), bias, grad
    )
    assert torch.equal(alone, dbias)


@each_dtype
@each_causal
def test_rows_that_see_nothing_are_zero(
    device: torch.device, dtype: torch.dtype, causal: bool
) -> None:
    x = scores(dtype, device, (2, 5, 3))
    for value in (False, -INF):
        mask = (
            torch.ones(5, 3, dtype=torch.bool, device=device)
            if value is False
            else torch.zeros(5, 3, device=device)
        )
        mask[4] = value
        y = functional.masked_softmax(x, mask, causal=causal)
        (dx,) = torch.autograd.grad(y.double().square().sum(), x)
        rows = torch.tensor([causal, causal, False, False, True], device=device)
        for result in (y, dx):
            assert result.isfinite().all()
            assert not result[:, rows].any()
        assert (y[:, ~rows].sum(-1) > 0.9).all()


@each_dtype
def test_no_mask_and_scale_1_are_softmax(device: torch.device, dtype: torch.dtype) -> None:
    x = scores(dtype, device)
    y, expected = functional.masked_softmax(x), functional.softmax(x, -1)
    rtol = torch.finfo(dtype).eps * (1 if dtype in HALVES else 16)
    torch.testing.assert_close(y, expected, rtol=rtol, atol=0 if dtype in HALVES else 1e-7)


def test_scale_is_a_factor_of_any_sign(device: torch.device) -> None:
    x = scores(torch.float16, device)
    for scale in (0, 1, -2, 0.5):
        expected = exact(x.detach(), None, scale, False)
        y = functional.masked_softmax(x, scale=scale)
        assert ((y.double() - expected).abs() <= ulp(expected, torch.float16)).all()
        (dx,) = torch.autograd.grad(y.sum() * 2 + y.square().sum(), x)
        assert scale or not dx.any()


def test_only_the_half_output_is_kept_for_backward(device: torch.device) -> None:
    x, mask = scores(torch.float16, device), MASKS["float32"](device)
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = functional.masked_softmax(x, mask)
    assert [t.data_ptr() for t in packed] == [y.data_ptr()]


@pytest.mark.parametrize("biased", [False, True])
@each_causal
def test_fp64_passes_gradcheck_twice(device: torch.device, biased: bool, causal: bool) -> None:
    x = torch.randn(2, 4, 3, dtype=torch.float64, device=device, requires_grad=True)
    bias = torch.randn(4, 1, dtype=torch.float64, device=device, requires_grad=biased)

    def function(x: Tensor, bias: Tensor) -> Tensor:
        return functional.masked_softmax(x, bias, scale=0.7, causal=causal)

    assert torch.autograd.gradcheck(function, (x, bias))
    assert torch.autograd.gradgradcheck(function, (x, bias))


@each_dtype
@pytest.mark.parametrize("kind", ["bool", "float32"])
def test_double_backward(device: torch.device, dtype: torch.dtype, kind: str) -> None:
    """About ten half roundings on the way, none larger than the largest second gradient."""
    mask = MASKS[kind](device)
    w = torch.randn(SHAPE, device=device).to(dtype)

    def second(function: Callable[..., Tensor], x: Tensor, w: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        y = function(x, mask)
        (dx,) = torch.autograd.grad((y.square() * w).sum(), x, create_graph=True)
        return torch.autograd.grad((dx * w).sum(), x)[0]

    x = scores(dtype, device)
    expected = second(lambda x, m: exact(x, m, 0.4, True), x.double(), w.double())
    result = second(lambda x, m: functional.masked_softmax(x, m, scale=0.4, causal=True), x, w)
    atol = 20 * torch.finfo(dtype).eps / 2 * expected.abs().max().item()
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=atol)


def test_double_backward_of_a_bias(device: torch.device) -> None:
    """In FP32, for which autograd's own second gradients are exact enough."""
    x, bias = (
        scores(torch.float32, device),
        torch.randn(3, 1, 10, device=device, requires_grad=True),
    )

    def second(function: Callable[..., Tensor], *given: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in given]
        grads = torch.autograd.grad(function(*leaves).square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), leaves)

    found = second(lambda x, b: functional.masked_softmax(x, b, scale=0.4), x, bias)
    expected = second(lambda x, b: exact(x, b, 0.4, False), x.double(), bias.double())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(
            one.double(), other, rtol=0, atol=1e-5 * other.abs().max().item()
        )


# transforms


@pytest.mark.compiled
# torch 2.11 tracing a Function
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["none", "bool", "float32"])
def test_compile_sees_one_graph(
    device: torch.device, kind: str, dtype: torch.dtype, dynamic: bool
) -> None:
    torch.compiler.reset()

    def function(x: Tensor, mask: Tensor | None) -> Tensor:
        return functional.masked_softmax(x, mask, scale=0.4, causal=True)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    mask = MASKS[kind](device)
    for batch in (2, 4):
        x = scores(dtype, device, (batch, 3, 6, 10))
        given = mask if kind != "bool" or mask is None else mask[:1]
        y, expected = compiled(x, given), function(x, given)
        grad = torch.randn_like(expected)
        grads = [torch.autograd.grad(result, x, grad)[0] for result in (y, expected)]
        assert torch.equal(y, expected)
        if dtype is torch.float16:
            assert torch.equal(*grads)
        # of FP32, a graph has torch's own backward: n + 8 roundings in each of both
        terms = (grad * expected).abs().sum(-1, keepdim=True)
        bound = 2 * (x.shape[-1] + 8) * 2.0**-24 * 0.4 * expected * (grad.abs() + terms)
        if dtype is torch.float32:
            assert ((grads[0] - grads[1]).abs() <= bound).all()


@each_half
def test_function_transforms(device: torch.device, half: torch.dtype) -> None:
    """The twin's bits: one rounding of the same FP32 numbers."""
    x, mask = scores(half, device).detach(), torch.rand(10, device=device) < 0.7
    batched = torch.func.vmap(lambda rows: functional.masked_softmax(rows, mask, causal=True))(x)
    expected = exact(x, mask, 1.0, True)
    assert batched.dtype is half
    assert ((batched.double() - expected).abs() <= ulp(expected, half)).all()
    per_sample = torch.func.vmap(
        torch.func.grad(lambda rows: functional.masked_softmax(rows, mask).square().sum())
    )(x)
    leaf = x.double().requires_grad_()
    exact(leaf, mask, 1.0, False).square().sum().backward()
    eps = torch.finfo(half).eps
    torch.testing.assert_close(per_sample.double(), leaf.grad, rtol=4 * eps, atol=4 * eps)


@each_dtype
def test_stock_autocast_changes_nothing(device: torch.device, dtype: torch.dtype) -> None:
    x, mask = scores(dtype, device), MASKS["bool"](device)
    expected = functional.masked_softmax(x, mask, scale=0.4)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        result = functional.masked_softmax(x, mask, scale=0.4)
    assert result.dtype is dtype and torch.equal(result, expected)


# options of the operation


@each_half
def test_results_in_fp32_from_half(device: torch.device, half: torch.dtype) -> None:
    x, mask = scores(half, device), MASKS["bool"](device)
    y = softmax_of_scores(x, mask, 0.4, True, torch.float32)
    expected = exact(x.detach(), mask, 0.4, True)
    torch.testing.assert_close(y.double(), expected, rtol=2.0**-19, atol=2.0**-30)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert y.dtype is torch.float32 and dx.dtype is half


def test_rows_that_see_nothing_may_stay_torchs(device: torch.device) -> None:
    x = scores(torch.float16, device, (3, 4))
    mask = torch.tensor([[True], [False], [True]], device=device)
    y = softmax_of_scores(x, mask, 1.0, False, zero=False)
    assert y.isnan().all(1).tolist() == [False, True, False]


# errors


def test_errors(device: torch.device) -> None:
    x = torch.zeros(2, 3, 4, dtype=torch.float16, device=device)
    softmax: Any = functional.masked_softmax
    with pytest.raises(TypeError, match=r"x: expected floating scores, got torch\.int64"):
        softmax(x.long())
    for name, args in (("x", (None,)), ("x", ([0.5],)), ("mask", (x, [True]))):
        with pytest.raises(TypeError, match=f"^{name}: expected a tensor, got"):
            softmax(*args)
    for integer in (torch.int64, torch.uint8):
        with pytest.raises(
            TypeError, match=r"mask: expected bool \(True: keep\) or floating numbers"
        ):
            softmax(x, torch.ones(4, dtype=integer, device=device))
    for shape in ((3,), (2, 4), (1, 2, 3, 4), (2, 3, 1, 4), (2, 3, 5)):
        with pytest.raises(ValueError, match=r"broadcasts to the scores' \(2, 3, 4\), got"):
            softmax(x, torch.ones(shape, dtype=torch.bool, device=device))
    with pytest.raises(ValueError, match=r"causal softmax expects .* got shape \(4,\)"):
        softmax(x[0, 0], causal=True)
    with pytest.raises(
        TypeError, match=r"scale: expected a number, got Tensor: pass float\(scale\)"
    ):
        softmax(x, scale=torch.tensor(0.5))
    with pytest.raises(TypeError, match="scale: expected a number, got NoneType"):
        softmax(x, scale=None)
    with pytest.raises(ValueError, match="mask: expected the scores' device"):
        softmax(x, torch.ones(4, dtype=torch.bool, device="meta"))
    with pytest.raises(TypeError):
        softmax(x, None, 0.5)


def test_empty(device: torch.device) -> None:
    for shape in ((0, 5), (5, 0), (2, 0, 3)):
        x = scores(torch.float16, device, shape)
        y = functional.masked_softmax(x, torch.zeros(shape, device=device), causal=True)
        y.sum().backward()
        assert y.shape == shape and x.grad is not None
