"""The differentiable functions against torch, FP64, and torch's own operator database."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import torchs_database
from torch import Tensor

from tritonamp import functional

HALVES = [torch.float16, torch.bfloat16]
DTYPES = [*HALVES, torch.float32, torch.float64]
NAMES = ["softmax", "log_softmax", "sum"]
INF, NAN = float("inf"), float("nan")

each_half = pytest.mark.parametrize("half", HALVES, ids=str)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_name = pytest.mark.parametrize("name", NAMES)

OURS: dict[str, Callable[..., Tensor]] = {name: getattr(functional, name) for name in NAMES}
TORCHS: dict[str, Callable[..., Tensor]] = {
    "softmax": torch.nn.functional.softmax,
    "log_softmax": torch.nn.functional.log_softmax,
    "sum": torch.sum,
}


@functools.cache
def operator(name: str, variant: str) -> Any:
    op_db = torchs_database("common_methods_invocations", "op_db")
    return next(info for info in op_db if (info.name, info.variant_test_name) == (name, variant))


def unit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def assert_within(actual: Tensor, exact: Tensor, bound: Tensor) -> None:
    assert actual.shape == exact.shape
    assert ((actual.double() - exact).abs() <= bound).all()


def value_bound(
    name: str, x: Tensor, dims: Any, keepdim: bool, exact: Tensor, dtype: torch.dtype
) -> Tensor:
    """One rounding to ``dtype``, half of the smallest subnormal, and FP32's error on small samples:
    16 u of exp(x - max) with |x - max| < 20 and at most 10 terms; for sum the contract's
    (log2 n + 2) u sum |x|, n < 16.
    """
    info, u32 = torch.finfo(dtype), 2.0**-24
    scale = {"softmax": exact.abs(), "log_softmax": torch.ones_like(exact)}.get(name)
    if scale is None:
        scale = torch.sum(x.double().abs(), dims, keepdim)
    return unit(dtype) * exact.abs() + 32 * u32 * scale + info.tiny * info.eps / 2


def gradient_bound(
    name: str, y: Tensor, grad: Tensor, dim: Any, exact: Tensor, dtype: torch.dtype
) -> Tensor:
    """From y rounded to ``dtype``: u |y| in softmax, the same inside exp in log_softmax; one
    rounding, FP32 errors.
    """
    if name == "sum":
        return torch.zeros_like(exact)
    info, u = torch.finfo(dtype), unit(dtype)
    if name == "softmax":
        weight = y + info.tiny * info.eps
        mass = weight * (grad.abs() + (grad * weight).abs().sum(dim, keepdim=True))
    else:
        weight = y.exp() * y.abs()
        mass = weight * grad.sum(dim, keepdim=True).abs()
    fp32 = 2.0**-20 * (grad.abs() + grad.abs().sum(dim, keepdim=True))
    return u * exact.abs() + 2.125 * u * mass + fp32 + info.tiny * info.eps


# torch's operator database


@each_dtype
@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("softmax", ""),
        ("softmax", "with_dtype"),
        ("log_softmax", ""),
        ("log_softmax", "with_dtype"),
        ("sum", ""),
    ],
)
def test_operator_database(
    device: torch.device, name: str, variant: str, dtype: torch.dtype
) -> None:
    info = operator(name, variant)
    samples = list(info.sample_inputs(device.type, dtype, requires_grad=True))
    assert len(samples) >= 7
    for sample in samples:
        x, kwargs = sample.input, sample.kwargs
        reference = info.op(x, *sample.args, **kwargs)
        y = OURS[name](x, *sample.args, **kwargs)
        assert (y.dtype, y.shape, y.device) == (reference.dtype, reference.shape, reference.device)
        grad = torch.randn_like(reference)
        (dx,) = torch.autograd.grad(y, x, grad)
        assert (dx.dtype, dx.shape) == (x.dtype, x.shape)
        if dtype not in HALVES or variant:  # handed to torch
            assert torch.equal(y, reference)
            assert torch.equal(dx, torch.autograd.grad(reference, x, grad)[0])
            continue
        wide = x.detach().double().requires_grad_()
        exact = info.op(wide, *sample.args, **kwargs)
        (exact_dx,) = torch.autograd.grad(exact, wide, grad.double())
        dim = sample.args[0] if sample.args else kwargs.get("dim")
        exact = exact.detach()
        assert_within(
            y, exact, value_bound(name, x, dim, kwargs.get("keepdim", False), exact, dtype)
        )
        assert_within(
            dx, exact_dx, gradient_bound(name, exact, grad.double(), dim, exact_dx, dtype)
        )


# arguments


@each_dtype
@pytest.mark.parametrize("out", [*DTYPES, None], ids=str)
@each_name
def test_dtype_of_the_result(
    device: torch.device, name: str, dtype: torch.dtype, out: torch.dtype | None
) -> None:
    """From half: one rounding of the FP32 (for ``out`` FP64 the FP64) value, while torch rounds the
    input to a half ``out`` first. 32 u of FP32 as in ``value_bound``.
    """
    x = torch.randn(5, 7, device=device).to(dtype)
    y, reference = OURS[name](x, 1, dtype=out), TORCHS[name](x, 1, dtype=out)
    assert y.dtype is reference.dtype is (out or dtype)
    if dtype not in HALVES or out is torch.float64:
        assert torch.equal(y, reference)
    else:
        exact = TORCHS[name](x.double(), 1)
        assert_within(y, exact, value_bound(name, x, 1, False, exact, y.dtype))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=str)
def test_sum_of_other_dtypes_is_torchs(device: torch.device, dtype: torch.dtype) -> None:
    x = torch.tensor([[1, 0, 1], [1, 1, 0]], device=device).to(dtype)
    for args in ((), (0,), ((0, 1), True)):
        result, reference = functional.sum(x, *args), torch.sum(x, *args)
        assert result.dtype is reference.dtype
        assert torch.equal(result, reference)


DIMS = [
    None,
    0,
    1,
    -1,
    -3,
    (),
    [],
    (0,),
    (0, 2),
    (-1, 0),
    (-3, -1),
    (-2, -3),
    [2, 0, 1],
    np.int64(1),
    torch.Size([1]),
]


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dim", DIMS, ids=repr)
@each_half
def test_dims_of_sum_and_their_gradients(
    device: torch.device, half: torch.dtype, dim: Any, keepdim: bool
) -> None:
    """Sums of few small integers are exact, and so is the gradient."""
    x = torch.randint(-4, 5, (3, 4, 5), device=device).to(half).transpose(0, 2).requires_grad_()
    y, reference = functional.sum(x, dim, keepdim), torch.sum(x.double(), dim, keepdim)
    assert y.dtype is half
    assert torch.equal(y.double(), reference)
    grad = torch.randn_like(y)
    expected = torch.autograd.grad(reference, x, grad.double())[0]
    assert torch.equal(torch.autograd.grad(y, x, grad)[0], expected)


@each_half
def test_keywords(device: torch.device, half: torch.dtype) -> None:
    x = torch.tensor([[1.0, 2.0], [4.0, 8.0]], device=device, dtype=half)
    assert functional.sum(x) == functional.sum(input=x, dim=None) == 15
    assert functional.sum(input=x, dim=0, keepdim=True, dtype=torch.float32).tolist() == [
        [5.0, 10.0]
    ]
    for name in ("softmax", "log_softmax"):
        assert torch.equal(OURS[name](input=x, dim=0), OURS[name](x, 0))
        assert torch.equal(
            OURS[name](x, 0, 3, torch.float32), OURS[name](x, dim=0, dtype=torch.float32)
        )


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_an_implicit_dim_warns_at_the_callers_line(
    device: torch.device, dtype: torch.dtype, name: str
) -> None:
    for shape, dim in (((4,), 0), ((2, 3), 1), ((2, 3, 4), 0)):
        x = torch.randn(shape, device=device).to(dtype)
        with pytest.warns(
            UserWarning, match=f"Implicit dimension choice for {name} has been deprecated"
        ) as caught:
            y = OURS[name](x)
        assert caught[0].filename == __file__
        assert torch.equal(y, OURS[name](x, dim))


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("softmax", (2,)),
        ("softmax", (-3,)),
        ("softmax", ("0",)),
        ("softmax", ((0, 1),)),
        ("log_softmax", (2,)),
        ("log_softmax", (0.5,)),
        ("sum", (2,)),
        ("sum", ((0, -3),)),
        ("sum", ((0, 0),)),
        ("sum", ((1, -1),)),
        ("sum", (0.5,)),
    ],
    ids=str,
)
def test_errors_are_torchs(device: torch.device, name: str, args: tuple[Any, ...]) -> None:
    x = torch.zeros(2, 3, dtype=torch.float16, device=device)
    with pytest.raises((IndexError, RuntimeError, TypeError)) as torchs:
        TORCHS[name](x, *args)
    with pytest.raises(torchs.type) as ours:
        OURS[name](x, *args)
    # those list the overloads of the op that was called
    if not isinstance(torchs.value, TypeError):
        assert str(ours.value) == str(torchs.value)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_integers_are_refused_as_in_torch(name: str) -> None:
    with pytest.raises(NotImplementedError, match="not implemented for 'Long'"):
        OURS[name](torch.zeros(2, dtype=torch.int64), 0)


# gradients


@each_half
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize("out", [None, torch.float32], ids=str)
def test_gradients(
    device: torch.device, name: str, half: torch.dtype, out: torch.dtype | None
) -> None:
    x = (torch.randn(6, 40, 3, device=device) * 2).to(half).transpose(0, 2).requires_grad_()
    y = OURS[name](x, 1, dtype=out)
    grad = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, grad)
    wide = x.detach().double().requires_grad_()
    exact = TORCHS[name](wide, 1)
    (exact_dx,) = torch.autograd.grad(exact, wide, grad.double())
    assert dx.dtype is half
    kept = gradient_bound(name, exact.detach(), grad.double(), 1, exact_dx, out or half)
    assert_within(
        dx,
        exact_dx,
        kept + unit(half) * exact_dx.abs() + torch.finfo(half).tiny * torch.finfo(half).eps,
    )


@each_name
def test_fp64_passes_gradcheck_twice(device: torch.device, name: str) -> None:
    x = torch.randn(3, 4, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: OURS[name](t, 1), x)
    assert torch.autograd.gradgradcheck(lambda t: OURS[name](t, 1), x)


@each_half
@each_name
def test_double_backward(device: torch.device, name: str, half: torch.dtype) -> None:
    """About ten half roundings on the way, none larger than the largest second gradient."""
    x, w = (torch.randn(5, 8, device=device).to(half) for _ in range(2))

    def second(function: Callable[..., Tensor], x: Tensor, w: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (dx,) = torch.autograd.grad(
            (function(x, 1).reshape(5, -1).square() * w[:, :1]).sum(), x, create_graph=True
        )
        return torch.autograd.grad((dx * w).sum(), x)[0]

    exact = second(TORCHS[name], x.double(), w.double())
    result = second(OURS[name], x, w)
    assert result.dtype is half
    torch.testing.assert_close(
        result.double(), exact, rtol=0, atol=20 * unit(half) * exact.abs().max().item()
    )


@each_half
def test_masked_entries_have_no_gradient(device: torch.device, half: torch.dtype) -> None:
    rows = [
        [0.0, -INF, 1.0],
        [-INF, -INF, 2.0],
        [-INF, -INF, -INF],
        [NAN, 0.0, 0.0],
        [65504.0, 65504.0, -65504.0],
    ]
    x = torch.tensor(rows, device=device).to(half).requires_grad_()
    y = functional.softmax(x, 1)
    (dx,) = torch.autograd.grad(
        y, x, torch.tensor([1.0, 2.0, 3.0], device=device).to(half).expand_as(y)
    )
    assert torch.equal(
        y.isnan().all(1), torch.tensor([False, False, True, True, False], device=device)
    )
    assert torch.equal(dx.isnan(), y.isnan())
    assert not dx[0, 1] and not dx[1].any()
    assert dx[4].tolist() == [-0.25, 0.25, 0.0]


@each_half
def test_only_the_half_output_is_kept_for_backward(device: torch.device, half: torch.dtype) -> None:
    x = torch.randn(4, 5, device=device).to(half).requires_grad_()
    for name, kept in (("softmax", 1), ("log_softmax", 1), ("sum", 0)):
        packed: list[Tensor] = []

        def pack(tensor: Tensor, into: list[Tensor] = packed) -> Tensor:
            into.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = OURS[name](x, 1)
        assert [t.dtype for t in packed] == [half] * kept
        assert all(t.data_ptr() == y.data_ptr() for t in packed)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_an_overwritten_output_is_noticed(device: torch.device, name: str) -> None:
    y = OURS[name](torch.ones(3, dtype=torch.float16, device=device, requires_grad=True), 0)
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# transforms


@pytest.mark.compiled
# torch 2.11 tracing a Function
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@each_name
def test_compile_sees_one_graph(
    device: torch.device, name: str, dtype: torch.dtype, dynamic: bool
) -> None:
    torch.compiler.reset()
    compiled = torch.compile(
        lambda x: OURS[name](x, -1), fullgraph=True, backend="aot_eager", dynamic=dynamic
    )
    for rows in (3, 5):
        x = torch.randn(rows, 4, device=device).to(dtype).requires_grad_()
        y, expected = compiled(x), OURS[name](x, -1)
        grad = torch.randn_like(expected)
        assert torch.equal(y, expected)
        assert torch.equal(
            torch.autograd.grad(y, x, grad)[0], torch.autograd.grad(expected, x, grad)[0]
        )


@each_half
@each_name
def test_function_transforms(device: torch.device, name: str, half: torch.dtype) -> None:
    """Under torch.func they are torch's own functions, which it can look into: ensembles,
    per-sample gradients. On a CPU those round more than once: 4 u of |value| <= 8, then of a
    gradient made of such values.
    """
    x = torch.randn(4, 6, device=device).to(half)
    function = OURS[name]
    batched = torch.func.vmap(lambda row: function(row, 0))(x)
    assert batched.dtype is half
    torch.testing.assert_close(
        batched.double(), TORCHS[name](x.double(), 1), rtol=0, atol=4 * unit(half) * 8
    )
    per_sample = torch.func.vmap(torch.func.grad(lambda row: function(row, 0).square().sum()))(x)
    leaf = x.clone().requires_grad_()
    function(leaf, 1).square().sum().backward()
    torch.testing.assert_close(per_sample, leaf.grad, rtol=0, atol=4 * unit(half) * 64)


@each_name
def test_stock_autocast_changes_nothing(device: torch.device, name: str) -> None:
    x = torch.randn(3, 1000, device=device).half()
    expected = OURS[name](x, 1)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        result = OURS[name](x, 1)
    assert result.dtype is torch.float16
    assert torch.equal(result, expected)


@each_name
def test_no_graph_where_none_is_wanted(device: torch.device, name: str) -> None:
    x = torch.ones(3, dtype=torch.float16, device=device)
    assert OURS[name](x, 0).grad_fn is None
    with torch.inference_mode():
        assert OURS[name](x.requires_grad_(), 0).is_inference()
