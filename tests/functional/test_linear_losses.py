"""Losses of linear layers against torch on all logits, and FP64."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import tritonamp
from tritonamp.functional import linear_cross_entropy, linear_token_log_probs

HALVES = [torch.float16, torch.bfloat16]
FP16, FP32, FP64 = torch.float16, torch.float32, torch.float64
ROWS, CLASSES, FEATURES = 7, 11, 8


def arguments(
    dtype: torch.dtype, device: Any, weights: torch.dtype | None = None, ignored: bool = True
) -> Any:
    torch.manual_seed(0)
    x = torch.randn(ROWS, FEATURES, device=device).to(dtype).requires_grad_()
    weight = torch.randn(CLASSES, FEATURES, device=device).to(weights or dtype).requires_grad_()
    bias = torch.randn(CLASSES, device=device).to(weights or dtype).requires_grad_()
    target = torch.tensor([0, 10, 3, -100 if ignored else 2, 5, 7, 1], device=device)
    return x, weight, bias, target


def at_once(x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, **options: Any) -> Any:
    logits = F.linear(x, weight, bias)
    return F.cross_entropy(logits.flatten(0, -2), target.flatten(), **options)


class Row(NamedTuple):
    """A loss of a linear layer.

    Attributes:
        function: the loss.
        products: products of its training step, each of 2 rvd FLOPs.
        options: its options.
    """

    function: Callable[..., Any]
    products: int
    options: dict[str, Any]

    def __call__(
        self, x: Tensor, weight: Tensor, target: Tensor, bias: Any = None, **given: Any
    ) -> tuple[Tensor, ...]:
        """Return all results."""
        found = self.function(x, weight, target, bias, **{**self.options, **given})
        return found if isinstance(found, tuple) else (found,)


def cross_entropy_row(products: int, **options: Any) -> Row:
    return Row(linear_cross_entropy, products, options)


def tokens_row(**options: Any) -> Row:
    return Row(linear_token_log_probs, 4, options)


ROWS_OF_BOTH = {
    "mean": cross_entropy_row(3),
    "sum": cross_entropy_row(3, reduction="sum", label_smoothing=0.2),
    "none": cross_entropy_row(4, reduction="none"),
    "tokens": tokens_row(),
    "entropies": tokens_row(return_entropy=True, temperature=0.7),
}
each_row = pytest.mark.parametrize("row", ROWS_OF_BOTH.values(), ids=ROWS_OF_BOTH)


@pytest.mark.parametrize("chunk_rows", [1, 3, 7, None])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("dtype", [FP64, FP32], ids=str)
def test_losses_and_gradients(
    device: torch.device, dtype: torch.dtype, reduction: str, chunk_rows: int | None
) -> None:
    """In any chunks as at once: within 64 u, for a few dozen terms of size 1 to 8."""
    x, weight, bias, target = arguments(dtype, device)
    options: Any = {"reduction": reduction, "label_smoothing": 0.1}
    loss = linear_cross_entropy(x, weight, target, bias, chunk_rows=chunk_rows, **options)
    expected = at_once(x, weight, bias, target, **options)
    atol = 64 * 8 * torch.finfo(dtype).eps / 2
    torch.testing.assert_close(loss, expected, rtol=0, atol=atol)
    grad = torch.randn_like(loss)
    found = torch.autograd.grad(loss, (x, weight, bias), grad)
    for got, wanted in zip(
        found, torch.autograd.grad(expected, (x, weight, bias), grad), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=0, atol=atol)


@pytest.mark.parametrize("weights", [None, FP32], ids=["half weights", "FP32 weights"])
@pytest.mark.parametrize("half", HALVES, ids=str)
def test_half_rounds_logits_and_their_gradients_alone(
    device: torch.device, half: torch.dtype, weights: torch.dtype | None
) -> None:
    """Step by step: what is half on the way, and that the sums over rows are not."""
    x, weight, bias, target = arguments(half, device, weights)
    loss = linear_cross_entropy(x, weight, target, bias, reduction="sum", chunk_rows=2)
    assert loss.dtype is FP32
    scale = 2.0**10
    found = torch.autograd.grad(loss * scale, (x, weight, bias))
    assert [g.dtype for g in found] == [t.dtype for t in (x, weight, bias)]
    rows, w, b = (t.detach().to(half).double() for t in (x, weight, bias))
    logits = F.linear(rows, w, b).to(half).double().requires_grad_()
    exact = F.cross_entropy(logits, target, reduction="sum")
    # FP32 may round a logit to its other neighbour; so little moves the loss by less than this
    u = torch.finfo(half).eps / 2
    torch.testing.assert_close(loss.double(), exact.detach(), rtol=0, atol=2 * u)
    (dlogits,) = torch.autograd.grad(exact * scale, logits)
    dlogits = dlogits.to(half).double()
    sums = dlogits @ w, dlogits.t() @ rows, dlogits.sum(0)
    for got, wanted in zip(found, sums, strict=True):
        rounded = torch.finfo(got.dtype).eps / 2 * wanted.abs()
        # the loss scale times a neighbouring logit's effect, and a neighbouring gradient
        assert ((got - wanted).abs() <= rounded + 4 * u * scale).all()


def test_weight_gradients_are_added_up_in_fp32(device: torch.device) -> None:
    """After 1/2 come 64 times 2**-14: each is less than half an ulp, together they are 2**-8."""
    x = torch.full((65, 1), 2.0**-13, device=device, dtype=FP16)
    x[0] = 1
    weight, bias = (torch.zeros(shape, device=device, dtype=FP16) for shape in ((2, 1), 2))
    target = torch.zeros(65, dtype=torch.int64, device=device)
    weight.requires_grad_()
    loss = linear_cross_entropy(x, weight, target, bias, reduction="sum", chunk_rows=1)
    (dw,) = torch.autograd.grad(loss, weight)
    assert dw.flatten().tolist() == [-(0.5 + 2.0**-8), 0.5 + 2.0**-8]


@pytest.mark.parametrize(
    "needed", [s for n in (1, 2, 3) for s in itertools.combinations(range(3), n)], ids=str
)
def test_any_of_the_gradients(device: torch.device, needed: tuple[int, ...]) -> None:
    *tensors, target = arguments(FP32, device)
    for i, t in enumerate(tensors):
        t.requires_grad_(i in needed)
    wanted = [tensors[i] for i in needed]
    x, weight, bias = tensors
    found = torch.autograd.grad(linear_cross_entropy(x, weight, target, bias, chunk_rows=3), wanted)
    expected = torch.autograd.grad(at_once(x, weight, bias, target), wanted)
    for got, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(got, exact)


def test_no_bias_and_more_dimensions(device: torch.device) -> None:
    x, weight, _, target = arguments(FP32, device)
    x, target = x[:6].view(2, 3, FEATURES), target[:6].view(2, 3)
    losses = linear_cross_entropy(x, weight, target, reduction="none", chunk_rows=4)
    expected = at_once(x, weight, None, target, reduction="none").view(2, 3)
    torch.testing.assert_close(losses, expected)
    line = linear_cross_entropy(x[0, 0], weight, target[0, 0])
    torch.testing.assert_close(line, expected[0, 0])
    nothing = linear_cross_entropy(x[:0], weight, target[:0], reduction="none")
    assert nothing.shape == (0, 3)


def many(
    device: torch.device, dtype: torch.dtype
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, tuple[Tensor, ...]]:
    """Rows, weight and bias of values in ``dtype``, targets, and the mean's exact gradients.

    The last 100 classes are no target.
    """
    torch.manual_seed(0)
    shapes: Any = (512, 16), (300, 16), (300,)
    given = tuple(torch.randn(s, device=device).to(dtype).requires_grad_() for s in shapes)
    target = torch.randint(200, (512,), device=device)
    target[::5] = -100
    exact = [t.detach().double().requires_grad_() for t in given]
    loss = F.cross_entropy(F.linear(*exact), target)
    return given, target, torch.autograd.grad(loss, exact)  # type: ignore[return-value]


@pytest.mark.parametrize("factor", [2.0**16, 2.0**6, 3.0 * 2**10, 0.1 * 2**16, -(2.0**12)])
@pytest.mark.parametrize("half", HALVES, ids=str)
def test_any_factor_that_comes_is_applied_before_rounding(
    device: torch.device, half: torch.dtype, factor: float
) -> None:
    """Gradients that the forward has made: each within 1 % of FP64, as if it had been known."""
    (x, weight, bias), target, exact = many(device, half)
    loss = linear_cross_entropy(x, weight, target, bias, chunk_rows=100)
    found = torch.autograd.grad(loss * factor, (x, weight, bias))
    for got, wanted, given in zip(found, exact, (x, weight, bias), strict=True):
        assert got.dtype is given.dtype
        error = got.double() / factor - wanted
        assert error.norm() < 0.01 * wanted.norm()
    rare = found[1][200:].double() / factor - exact[1][200:]
    assert rare.norm() < 0.02 * exact[1][200:].norm()


def test_a_factor_that_is_a_power_of_two_changes_no_bit(device: torch.device) -> None:
    """So micro-batches, each with a part of the loss, add up to what one batch gives."""
    (x, weight, bias), target, _ = many(device, FP16)
    found = []
    for factor in (2.0**10, 2.0**8):
        loss = linear_cross_entropy(x, weight, target, bias)
        gradients = torch.autograd.grad(loss * factor, (x, weight, bias))
        found.append([g.double() / factor for g in gradients])
    for first, second in zip(*found, strict=True):
        normal = second.abs() * 2**8 >= torch.finfo(FP16).smallest_normal
        assert normal.any() and torch.equal(first[normal], second[normal])


def test_a_factor_beyond_half_is_inf(device: torch.device) -> None:
    """The loss scale has to learn of it."""
    x, weight, bias, target = arguments(FP16, device)
    loss = linear_cross_entropy(x, weight, target, bias)
    (dw,) = torch.autograd.grad(loss * 2.0**30, weight)
    assert not dw.isfinite().all()


def test_the_graph_may_be_kept(device: torch.device) -> None:
    x, weight, bias, target = arguments(FP16, device)
    loss = linear_cross_entropy(x, weight, target, bias)
    first = torch.autograd.grad(loss, (x, weight, bias), retain_graph=True)
    second = torch.autograd.grad(loss * 4, (x, weight, bias))
    for one, four in zip(first, second, strict=True):
        torch.testing.assert_close(four, one * 4, rtol=2**-9, atol=0)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_where_no_target_counts_gradients_are_zero(device: torch.device, reduction: str) -> None:
    x, weight, bias, target = arguments(FP16, device)
    target.fill_(-100)
    loss = linear_cross_entropy(x, weight, target, bias, reduction=reduction)
    assert loss.isnan().all() if reduction == "mean" else (loss == 0).all()
    for grad in torch.autograd.grad(loss.sum(), (x, weight, bias)):
        assert (grad == 0).all()


@each_row
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_products_of_a_step(level: str, row: Row) -> None:
    """6 rvd FLOPs, as with all logits; 8 where each row's loss gets a factor of its own.

    On a CPU: a mode that counts does not reach into operations of a GPU in software.
    """

    class Head(nn.Linear):
        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return sum(r.mean() for r in row(x, self.weight, target, self.bias, chunk_rows=100))

    x, target = torch.randn(512, 16, requires_grad=True), torch.randint(300, (512,))
    model = Head(16, 300)
    with tritonamp.enable(model, level=level), FlopCounterMode(display=False) as flops:
        model(x, target).backward()
    assert flops.get_total_flops() == row.products * 2 * 512 * 300 * 16
    with FlopCounterMode(display=False) as flops, torch.no_grad():
        row(x, model.weight, target)
    assert flops.get_total_flops() == 2 * 512 * 300 * 16


class Sizes(TorchDispatchMode):
    """Notes the most rows of classes that an operation returned."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, tuple) else [result]:
            if isinstance(t, Tensor) and t.dim() == 2 and t.shape[1] == CLASSES:
                rows = t.shape[0] if t.shape[0] != FEATURES else 0  # the weight, transposed
                self.most = max(self.most, rows)
        return result


@each_row
@pytest.mark.parametrize("half", [FP16, FP32], ids=str)
def test_no_more_rows_of_logits_than_asked_for(
    device: torch.device, half: torch.dtype, row: Row
) -> None:
    x, weight, bias, target = arguments(half, device, ignored=False)
    with Sizes() as sizes:
        sum(r.sum() for r in row(x, weight, target, bias, chunk_rows=3)).backward()
    assert sizes.most == 3
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.numel()) or t, lambda t: t
    ):
        row(x, weight, target, bias, chunk_rows=3)
    assert max(kept) == weight.numel()


@each_row
def test_the_same_bits_again(device: torch.device, row: Row) -> None:
    x, weight, bias, target = arguments(FP16, device, ignored=False)

    def run() -> list[Tensor]:
        results = row(x, weight, target, bias, chunk_rows=3)
        loss = sum(r.sum() for r in results)
        return [*results, *torch.autograd.grad(loss * 2.0**8, (x, weight, bias))]

    for first, again in zip(run(), run(), strict=True):
        assert torch.equal(first, again)


def test_the_loss_scale_saves_gradients(device: torch.device) -> None:
    """A gradient of 1.5 * 2**-25: half would round it to 2**-24, by a third."""
    rows, classes = 2, 1024
    x = torch.ones(rows, 1, device=device, dtype=FP16)
    weight = torch.zeros(classes, 1, device=device, dtype=FP16, requires_grad=True)
    target = torch.zeros(rows, dtype=torch.int64, device=device)
    loss = linear_cross_entropy(x, weight, target, reduction="sum") * (1.5 / 2**15)
    (dw,) = torch.autograd.grad(loss * 2.0**16, weight)
    assert (dw[1:] == rows * 1.5 * 2.0**-9).all()


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("half", HALVES, ids=str)
def test_training_under_amp(device: torch.device, level: str, half: torch.dtype) -> None:
    """The same weights as with all logits in the forward, but for neighbouring half gradients.

    Those are below 4, the learning rate is 0.1, and there are three steps.
    """

    class Head(nn.Module):
        def __init__(self, fused: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body, self.head = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)
            self.fused = fused

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            h = torch.tanh(self.body(x))
            if not self.fused:
                return F.cross_entropy(self.head(h), target)
            return linear_cross_entropy(h, self.head.weight, target, self.head.bias, chunk_rows=3)

    x, _, _, target = arguments(FP32, device)
    trained = []
    for fused in (False, True):
        model = Head(fused).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with tritonamp.enable(model, optimizer, level=level, dtype=half, loss_scale=256.0) as amp:
            for _ in range(3):
                amp.backward(model(x.detach(), target))
                optimizer.step()
                optimizer.zero_grad()
            assert amp.stats()["skipped"] == 0
        trained.append([p.detach() for p in model.parameters()])
    for plain, ours in zip(*trained, strict=True):
        torch.testing.assert_close(ours, plain, rtol=0, atol=4 * 0.3 * torch.finfo(half).eps)


@each_row
def test_fp64_passes_gradcheck_twice(device: torch.device, row: Row) -> None:
    x, weight, bias, target = arguments(FP64, device)

    def results(*tensors: Tensor) -> tuple[Tensor, ...]:
        return row(tensors[0], tensors[1], target[:3], tensors[2], chunk_rows=2)

    tensors = x[:3].detach().requires_grad_(), weight, bias
    assert torch.autograd.gradcheck(results, tensors)
    assert torch.autograd.gradgradcheck(results, tensors)


@pytest.mark.compiled
# torch 2.11 tracing a Function
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("name", ["mean", "entropies"])
def test_compile_sees_one_graph(device: torch.device, name: str) -> None:
    torch.compiler.reset()
    x, weight, bias, target = arguments(FP16, device, ignored=False)
    row = ROWS_OF_BOTH[name]
    compiled = torch.compile(row.function, fullgraph=True, backend="aot_eager")
    call = row._replace(function=compiled)
    found, expected = (f(x, weight, target, bias, chunk_rows=3) for f in (call, row))
    for got, wanted in zip(found, expected, strict=True):
        assert torch.equal(got, wanted)
    gradients = (
        torch.autograd.grad(sum(r.sum() for r in results), (x, weight))
        for results in (found, expected)
    )
    for got, wanted in zip(*gradients, strict=True):
        assert torch.equal(got, wanted)


@each_row
def test_function_transforms_meta_tensors_and_nothing(device: torch.device, row: Row) -> None:
    x, weight, _, target = arguments(FP32, device, ignored=False)

    def total(x: Tensor) -> Tensor:
        return sum(r.sum() for r in row(x, weight, target))

    (expected,) = torch.autograd.grad(total(x), x)
    torch.testing.assert_close(torch.func.grad(total)(x), expected)
    shape = row(x, weight, target)[0].shape
    assert row(*(t.to("meta") for t in (x, weight, target)))[0].shape == shape
    assert row(x[:0], weight, target[:0])[0].shape == ((0,) if shape else ())


BOTH = ROWS_OF_BOTH["mean"], ROWS_OF_BOTH["tokens"]
WRONG_LAYERS: list[tuple[dict[str, Any], str]] = [
    ({"weight": torch.zeros(11, 9)}, r"expected input \[..., d\] and weight \[v, d\], got"),
    ({"bias": torch.zeros(7)}, r"bias: expected shape \(11,\), weight's first, got \(7,\)"),
    ({"chunk_rows": 0}, "chunk_rows: expected 1 or more, or None, got 0"),
    ({"target": torch.zeros(8).long()}, r"classes of shape \(7,\), one for each row"),
    ({"target": torch.zeros(7)}, r"expected int64 classes of shape \(7,\).*float32"),
]
WRONG_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"reduction": "all"}, "reduction: expected 'none', 'mean' or 'sum', got 'all'"),
    ({"label_smoothing": 1.5}, "label_smoothing: expected 0 to 1, got 1.5"),
]


@pytest.mark.parametrize(
    ("row", "change", "message"),
    [(row, *wrong) for row in BOTH for wrong in WRONG_LAYERS]
    + [(BOTH[0], *wrong) for wrong in WRONG_OPTIONS],
)
def test_errors(row: Row, change: dict[str, Any], message: str) -> None:
    x, weight, bias, target = arguments(FP32, "cpu")
    given = {"x": x, "weight": weight, "target": target, "bias": bias} | change
    with pytest.raises(ValueError, match=message):
        row(**given)


@pytest.mark.parametrize("row", BOTH, ids=["cross entropy", "tokens"])
def test_targets_that_are_no_class_are_refused(row: Row) -> None:
    x, weight, _, target = arguments(FP32, "cpu")
    with pytest.raises(IndexError, match="Target 11 is out of bounds"):
        row(x, weight, torch.full_like(target, 11))
