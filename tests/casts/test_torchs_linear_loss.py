"""torch.nn.functional.linear_cross_entropy in an enabled forward, whatever its options."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from outputs import relative_error
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import tritonamp
from tritonamp import functional
from tritonamp.casts import dispatch

if not hasattr(F, "linear_cross_entropy"):
    pytest.skip("torch has linear_cross_entropy from 2.13 on", allow_module_level=True)

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
STOCK = F.linear_cross_entropy  # as programs have it that import the function by its name
ROWS, CLASSES, FEATURES = 7, 11, 8
OPTIONS = {
    "none": None,
    "default": nn.LinearCrossEntropyOptions(),
    "kept": nn.LinearCrossEntropyOptions(allow_retain_graph=True, batch_chunk_size=3),
    "compact": nn.LinearCrossEntropyOptions(acc_policy="compact"),
}
each_half = pytest.mark.parametrize("half", [FP16, BF16], ids=str)
each_options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
each_name = pytest.mark.parametrize("early", [False, True], ids=["F.", "imported before"])


@pytest.fixture
def amp() -> Iterator[tritonamp.Amp]:
    with tritonamp.enable(nn.Linear(1, 1)) as handle:
        yield handle


def arguments(device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows, weight, bias and targets, of which one is ignored; their values are half already."""
    torch.manual_seed(0)
    shapes = (ROWS, FEATURES), (CLASSES, FEATURES), (CLASSES,)
    x, weight, bias = (torch.randn(s, device=device).half().float() for s in shapes)
    return x, weight, bias, torch.tensor([0, 10, 3, -100, 5, 7, 1], device=device)


def function(early: bool) -> Callable[..., Tensor]:
    return STOCK if early else F.linear_cross_entropy


@each_name
@each_options
@each_half
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gradients_at_a_scale_where_torchs_are_inf(
    device: torch.device, level: str, half: torch.dtype, options: Any, early: bool
) -> None:
    """Head and input within 1 % of FP64, classes without a target within 2 %, loss in FP32."""
    torch.manual_seed(0)
    rows, classes, features = 1024, 512, 16
    x = torch.randn(rows, features, device=device).to(half)
    target = torch.randint(classes // 2, (rows,), device=device)

    class Head(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return function(early)(x, self.weight, target, linear_bias=self.bias, options=options)

    model = Head(features, classes).to(device=device, dtype=half).float()
    exact = [t.detach().double().requires_grad_() for t in (x, model.weight, model.bias)]
    loss = F.cross_entropy(F.linear(*exact), target)
    wanted = torch.autograd.grad(loss, exact)
    with tritonamp.enable(model, level=level, dtype=half):
        x.requires_grad_()
        found = model(x)
        assert found.dtype is FP32
        assert abs(found.item() - loss.item()) <= torch.finfo(half).eps
        gradients = torch.autograd.grad(found * 2.0**16, (x, model.weight, model.bias))
    x_grad, weight, bias = (g.double() / 2.0**16 for g in gradients)
    assert relative_error(x_grad, wanted[0]) < 0.01
    assert relative_error(weight, wanted[1]) < 0.01
    assert relative_error(bias, wanted[2]) < 0.01
    assert relative_error(weight[classes // 2 :], wanted[1][classes // 2 :]) < 0.02


@each_name
@each_options
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.filterwarnings(
    "ignore:linear_cross_entropy. ``options`` ignored"
)  # torch's, smoothing
@pytest.mark.parametrize("given", ["nothing", "bias", "classes", "smoothing", "ignored class"])
def test_arguments_mean_what_they_mean_in_torch(
    device: torch.device,
    amp: tritonamp.Amp,
    given: str,
    reduction: str,
    options: Any,
    early: bool,
) -> None:
    """Against torch's in FP64, of half logits: one may round to its other neighbour."""
    x, weight, bias, target = arguments(device)
    weights = torch.linspace(0.5, 2, CLASSES, device=device)
    more: dict[str, Any] = {
        "nothing": {},
        "bias": {"linear_bias": bias},
        "classes": {"weight": weights},
        "smoothing": {"label_smoothing": 0.1},
        "ignored class": {"ignore_index": 3},
    }[given]
    if given == "ignored class":
        target = target.where(target != -100, 3)
    wide = {k: v.double() if isinstance(v, Tensor) else v for k, v in more.items()}
    x, weight = x.requires_grad_(), weight.requires_grad_()
    exact = STOCK(x.double(), weight.double(), target, reduction=reduction, **wide)
    with amp.autocast():
        loss = function(early)(x, weight, target, reduction=reduction, options=options, **more)
    assert loss.dtype is FP32
    torch.testing.assert_close(loss.double(), exact, rtol=2**-10, atol=2**-8)
    seed = torch.randn_like(loss)
    found = torch.autograd.grad(loss, (x, weight), seed)
    for got, wanted in zip(found, torch.autograd.grad(exact, (x, weight), seed), strict=True):
        torch.testing.assert_close(got, wanted, rtol=2**-8, atol=2**-7)


def test_it_is_the_function_of_this_package(device: torch.device, amp: tritonamp.Amp) -> None:
    x, weight, bias, target = arguments(device)
    with amp.autocast():
        for options in OPTIONS.values():
            loss = F.linear_cross_entropy(x, weight, target, linear_bias=bias, options=options)
            assert torch.equal(loss, functional.linear_cross_entropy(x, weight, target, bias))
        one = F.linear_cross_entropy(x[0], weight, target[0])
        assert torch.equal(one, functional.linear_cross_entropy(x[0], weight, target[0]))


@pytest.mark.parametrize("given", ["probabilities", "more dimensions", "both"])
@each_name
def test_the_rest_is_torchs_in_fp32(
    device: torch.device, amp: tritonamp.Amp, early: bool, given: str
) -> None:
    x, weight, _, target = arguments(device)
    more: dict[str, Any] = {}
    if given == "probabilities":
        target = torch.rand(ROWS, CLASSES, device=device).softmax(1)
    elif given == "more dimensions":
        weight = torch.randn(CLASSES, 3, FEATURES, device=device).half().float()
        target = target[:, None].expand(ROWS, 3)
    else:
        more = {"weight": torch.rand(CLASSES, device=device), "label_smoothing": 0.1}
    with amp.autocast():
        loss = function(early)(x, weight, target, **more)
    assert loss.dtype is FP32
    torch.testing.assert_close(loss, STOCK(x, weight, target, **more), rtol=0, atol=2**-8)


@pytest.mark.filterwarnings("ignore:linear_cross_entropy. ``options`` ignored")  # by torch 2.13
def test_probabilities_with_options(device: torch.device, amp: tritonamp.Amp) -> None:
    """The operator behind options gets them, too."""
    x, weight, _, _ = arguments(device)
    target = torch.rand(ROWS, CLASSES, device=device).softmax(1)
    expected = STOCK(x, weight, target)
    with amp.autocast():
        loss = STOCK(x, weight, target, options=OPTIONS["default"])
    assert loss.dtype is FP32
    torch.testing.assert_close(loss, expected, rtol=0, atol=2**-8)


class MostRows(TorchDispatchMode):
    """Notes the most rows of classes that an operation returned."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(t, Tensor) and t.dim() == 2 and t.shape[1] == CLASSES:
                self.most = max(self.most, t.shape[0])
        return result


@each_options
def test_all_logits_are_never_there(device: torch.device, amp: tritonamp.Amp, options: Any) -> None:
    x = torch.randn(5000, 2, device=device, requires_grad=True)
    weight = torch.randn(CLASSES, 2, device=device, requires_grad=True)
    target = torch.randint(CLASSES, (5000,), device=device)
    with MostRows() as seen:
        with amp.autocast():
            loss = F.linear_cross_entropy(x, weight, target, options=options)
        loss.backward()
    assert 0 < seen.most <= 2048


@each_half
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_module_trains(device: torch.device, level: str, half: torch.dtype) -> None:
    """At the scale 2**16 no step is skipped; with torch's own operator each one is."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body = nn.Linear(FEATURES, FEATURES)
            self.loss = nn.LinearCrossEntropyLoss(
                FEATURES, CLASSES, bias=True, options=OPTIONS["default"]
            )

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return self.loss(torch.tanh(self.body(x)), target)

    x, _, _, target = arguments(device)
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    with tritonamp.enable(model, optimizer, level=level, dtype=half, loss_scale=2.0**16) as amp:
        losses = []
        for _ in range(20):
            loss = model(x, target)
            amp.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert amp.stats()["skipped"] == 0
    assert losses[-1] < losses[0] / 2


def test_outside_and_afterwards_it_is_torchs(device: torch.device) -> None:
    x, weight, _, target = arguments(device)
    x, weight = x.half(), weight.half()
    options = OPTIONS["kept"]
    expected = STOCK(x, weight, target, options=options)
    first, second = (tritonamp.enable(nn.Linear(1, 1)) for _ in range(2))
    assert F.linear_cross_entropy is not STOCK
    for call in F.linear_cross_entropy, STOCK:
        assert torch.equal(call(x, weight, target, options=options), expected)
        with first.autocast(), tritonamp.disable_casts():
            assert torch.equal(call(x, weight, target, options=options), expected)
    first.disable()
    assert F.linear_cross_entropy is not STOCK
    second.disable()
    assert F.linear_cross_entropy is STOCK
    assert not dispatch.is_registered()
    with torch.autocast(device.type, dtype=FP16):
        assert STOCK(x, weight, target, options=options).dtype is expected.dtype


@pytest.mark.parametrize(
    "change",
    [
        {"input": torch.zeros(2, ROWS, FEATURES)},
        {"linear_weight": torch.zeros(CLASSES, 9)},
        {"linear_weight": torch.zeros(FEATURES)},
        {"linear_bias": torch.zeros(ROWS)},
        {"target": torch.zeros(8).long()},
        {"target": torch.zeros(ROWS)},
        {"target": torch.full((ROWS,), CLASSES)},
        {"reduction": "all"},
        {"label_smoothing": 1.5},
        {"weight": torch.ones(3)},
        {"target": torch.zeros(ROWS, CLASSES), "ignore_index": 0},
    ],
)
def test_errors_are_torchs(amp: tritonamp.Amp, change: dict[str, Any]) -> None:
    x, weight, bias, target = arguments(torch.device("cpu"))
    given = {"input": x, "linear_weight": weight, "target": target, "linear_bias": bias} | change
    with pytest.raises((RuntimeError, ValueError, IndexError, TypeError)) as expected:
        STOCK(**given)
    with amp.autocast(), pytest.raises(expected.type) as found:
        F.linear_cross_entropy(**given)
    assert str(found.value).splitlines()[0] == str(expected.value).splitlines()[0]


@pytest.mark.compiled
# torch 2.11 tracing a Function
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compile_sees_one_graph(device: torch.device, amp: tritonamp.Amp) -> None:
    torch.compiler.reset()
    x, weight, _, target = arguments(device)

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear_cross_entropy(x, weight, target, options=OPTIONS["default"])

    with amp.autocast():
        expected = loss(x, weight)
        assert torch.equal(
            torch.compile(loss, fullgraph=True, backend="aot_eager")(x, weight), expected
        )
