"""Models with one planted fault each: the replay names the module and the kind; clean models give
None.
"""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from runs import LEVELS
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tritonamp
from tritonamp.diagnosis.replay.faults import FaultReport
from tritonamp.diagnosis.replay.search import find_fault
from tritonamp.kernels.device import INTERPRETED

WIDTH, SAMPLES = 16, 6
BACKENDS = ["eager"] + ["triton"] * (INTERPRETED or torch.cuda.is_available())
HALF = [torch.float16, torch.bfloat16]


class Function(nn.Module):
    """A module whose forward is ``function(x, big)``; ``big`` squared is beyond the half format,
    ``big`` is not.
    """

    def __init__(self, function: Callable[[Tensor, float], Tensor]) -> None:
        super().__init__()
        self.function, self.big = function, 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.big)


class Around(nn.Module):
    def __init__(self, block: nn.Module, dtype: torch.dtype = torch.float16) -> None:
        super().__init__()
        self.stem, self.block, self.head = (
            nn.Linear(WIDTH, WIDTH),
            copy.deepcopy(block),
            nn.Linear(WIDTH, 4),
        )
        for module in self.block.modules():
            if isinstance(module, Function):
                module.big = 1e3 if dtype is torch.float16 else 1e22

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.stem(x)))


def filled(module: nn.Module, value: float) -> nn.Module:
    for p in module.parameters():
        nn.init.constant_(p, value)
    return module


def large(x: Tensor, big: float) -> Tensor:
    return x.abs() * big


def eye(x: Tensor) -> Tensor:
    return torch.eye(len(x), dtype=x.dtype, device=x.device)


def attention(scores: Tensor, x: Tensor) -> Tensor:
    return scores.softmax(-1).to(x.dtype) @ x


def attend_to_large(x: Tensor, big: float) -> Tensor:
    q = x * big
    return attention(q @ q.transpose(-1, -2), x)


def rms_norm(x: Tensor, big: float) -> Tensor:
    x = x * big
    return x * (x * x).mean(-1, keepdim=True).rsqrt()


def standardise(x: Tensor, big: float) -> Tensor:
    x = x * big
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred * (x - x.mean(-1, keepdim=True))).mean(-1, keepdim=True).sqrt()


def rms_norm_of_zeros(x: Tensor, big: float) -> Tensor:
    x = x * 0
    return x * ((x * x).mean(-1, keepdim=True) + 1e-8).rsqrt()


def divide_by_eps(x: Tensor, big: float) -> Tensor:
    return x * 0 / ((x * 0).abs().amax(-1, keepdim=True) + 1e-8)


def log_of_eps(x: Tensor, big: float) -> Tensor:
    return x + (x * 0).add(1e-8).log()


def masked_row(x: Tensor, big: float) -> Tensor:
    mask = torch.zeros(len(x), len(x), dtype=torch.bool, device=x.device)
    mask[2] = True
    return attention((x @ x.T).masked_fill(mask, float("-inf")), x)


def row_masked_by_log(x: Tensor, big: float) -> Tensor:
    return attention(x @ x.T + (eye(x) * 0).log(), x)


def added_constant(x: Tensor, big: float) -> Tensor:
    return attention(x @ x.T + (eye(x) * 0 + 1) * -1e9, x)


def infinite_times_zero(x: Tensor, big: float) -> Tensor:
    return attention(x @ x.T + (1 - eye(x)) * float("-inf"), x)


def where_root(x: Tensor, big: float) -> Tensor:
    return torch.where(x > 0, x.sqrt(), x * 0)


def own_norm(x: Tensor, big: float) -> Tensor:
    return x + ((x * 0) ** 2).sum(-1, keepdim=True).sqrt()


def root_of_zero(x: Tensor, big: float) -> Tensor:
    return (x * 0).sqrt() + x


class Recomputed(nn.Module):
    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


class MaskedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        everything = torch.ones(1, len(x), dtype=torch.bool, device=x.device)
        return self.attn(x[None], x[None], x[None], key_padding_mask=everything)[0][0]


class Recurrent(nn.Module):
    def __init__(self, before: float = 1.0) -> None:
        super().__init__()
        self.rnn, self.before = nn.LSTM(WIDTH, WIDTH, batch_first=True), before

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn((x if self.before == 1 else x.float() * self.before)[None])[0][0]


class Case(NamedTuple):
    block: nn.Module
    kind: str
    op: str
    module: str = "block"
    phase: str = "forward"
    silent: bool = False
    dtypes: list[torch.dtype] = HALF


def function(f: Callable[[Tensor, float], Tensor], kind: str, op: str, **fields: Any) -> Case:
    return Case(Function(f), kind, op, **fields)


FP16 = HALF[:1]
CASES = {
    "linear": Case(
        nn.Sequential(Function(large), filled(nn.Linear(WIDTH, WIDTH), 50)),
        "matmul_overflow",
        "linear",
        "block.1",
        dtypes=FP16,
    ),
    "conv": Case(
        nn.Sequential(
            Function(large),
            nn.Unflatten(1, (1, -1)),
            filled(nn.Conv1d(1, 1, 3, padding=1), 50),
            nn.Flatten(),
        ),
        "matmul_overflow",
        "conv1d",
        "block.2",
        dtypes=FP16,
    ),
    "attention": function(attend_to_large, "matmul_overflow", "matmul"),
    "einsum": function(
        lambda x, big: torch.einsum("ij,kj->ik", x * big, x * big) @ x, "matmul_overflow", "einsum"
    ),
    "square": function(lambda x, big: (x * big) * (x * big), "square_overflow", "mul"),
    "rms norm": function(rms_norm, "square_overflow", "mul", silent=True),
    "variance": function(standardise, "square_overflow", "mul", silent=True),
    "sum in half": function(
        lambda x, big: x - large(x, 30 * big).sum(-1, keepdim=True, dtype=x.dtype),
        "reduction_overflow",
        "sum",
        dtypes=FP16,
    ),
    "exp": function(lambda x, big: (x.abs() * 300).exp(), "exp_overflow", "exp"),
    "product": function(lambda x, big: x * big * x.abs().add(1) * big, "overflow", "mul"),
    "residuals": function(
        lambda x, big: (x * 0 + 4e4) + (x * 0 + 4e4), "overflow", "add", dtypes=FP16
    ),
    "added constant": function(added_constant, "constant_overflow", "mul", dtypes=FP16),
    "masked row": function(masked_row, "masked_row", "softmax"),
    "row masked by log": function(row_masked_by_log, "masked_row", "softmax"),
    "padding everywhere": Case(MaskedAttention(), "masked_row", "softmax", "block.attn"),
    "inf times 0": function(infinite_times_zero, "infinite_constant", "mul"),
    "eps in rsqrt": function(rms_norm_of_zeros, "vanished_eps", "rsqrt", dtypes=FP16),
    "eps in division": function(divide_by_eps, "vanished_eps", "div", dtypes=FP16),
    "eps in log": function(log_of_eps, "vanished_eps", "log", dtypes=FP16),
    "0/0": function(lambda x, big: x + (x * 0).sum() / (x * 0).sum(), "zero_by_zero", "div"),
    "1/0": function(lambda x, big: x + 1 / (x * 0), "division_by_zero", "reciprocal"),
    "mean of nothing": function(lambda x, big: x + x[x > 1e4].mean(), "zero_by_zero", "mean"),
    "log of negative": function(lambda x, big: x.log(), "domain_error", "log"),
    "log of zero": function(lambda x, big: x + (x * 0).log(), "domain_error", "log"),
    "root of negative": function(lambda x, big: (x - 10).sqrt(), "domain_error", "sqrt"),
    "acos": function(lambda x, big: (x * 0 + 2).acos(), "domain_error", "acos"),
    "negative power": function(lambda x, big: (x - 10) ** 0.5, "domain_error", "pow"),
    "cast": Case(
        nn.Sequential(Function(lambda x, big: x.float() * big * big), nn.Linear(WIDTH, WIDTH)),
        "cast_overflow",
        "linear",
        "block.1",
        dtypes=FP16,
    ),
    "cast before lstm": Case(Recurrent(1e6), "cast_overflow", "lstm", "block.rnn", dtypes=FP16),
    "checkpoint": Case(
        Recomputed(Function(rms_norm), False), "square_overflow", "mul", "block.inner", silent=True
    ),
    "root at 0": function(root_of_zero, "backward_nan", "sqrt", phase="backward"),
    "norm at 0": function(own_norm, "backward_nan", "sqrt", phase="backward"),
    "where": function(where_root, "backward_nan", "sqrt", phase="backward"),
    "backward in a checkpoint": Case(
        Recomputed(Function(root_of_zero), False),
        "backward_nan",
        "sqrt",
        "block.inner",
        phase="backward",
    ),
    "backward in a reentrant checkpoint": Case(
        Recomputed(Function(root_of_zero), True),
        "backward_nan",
        "sqrt",
        "block.inner",
        phase="backward",
    ),
    "steep": function(
        lambda x, big: x + (x.float() * 1e7).sin().to(x.dtype),
        "gradient_overflow",
        "to_copy",
        phase="backward",
        dtypes=FP16,
    ),
}


def enabled(
    model: nn.Module, level: str, dtype: torch.dtype, device: torch.device, **fields: Any
) -> Any:
    return tritonamp.enable(model.to(device), level=level, dtype=dtype, **fields)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(
    ("case", "dtype"),
    [pytest.param(c, d, id=f"{name}-{str(d)[6:]}") for name, c in CASES.items() for d in c.dtypes],
)
def test_planted_fault(case: Case, dtype: torch.dtype, level: str, device: torch.device) -> None:
    model, x = Around(case.block, dtype), torch.randn(SAMPLES, WIDTH, device=device)
    amp = enabled(model, level, dtype, device)
    fault = find_fault(model, lambda: model(x).square().mean())
    amp.disable()
    assert fault is not None
    found = (fault.kind, fault.module, fault.event.phase, fault.silent)
    assert found == (case.kind, case.module, case.phase, case.silent)
    if device.type == "cpu":  # CUDA's own autocast leaves no trace of the op that a cast was for
        assert fault.op == case.op
    assert fault.event.place.file in (None, __file__)
    assert case.module in str(fault)
    assert fault.advice in str(fault)


# Outside the ops: data, parameters, scale


@pytest.fixture
def net(device: torch.device) -> Around:
    return Around(nn.Identity()).to(device)


def find(
    model: nn.Module, x: Tensor, level: str = "O2", scale: float = 1.0, factor: float = 1.0
) -> FaultReport | None:
    amp = tritonamp.enable(model, level=level)
    fault = find_fault(model, lambda: model(x).square().mean() * factor, scale=scale)
    amp.disable()
    return fault


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_data(net: Around, level: str, value: str, device: torch.device) -> None:
    x = torch.randn(SAMPLES, WIDTH, device=device)
    x[2, 3] = x[5, 0] = float(value)
    fault = find(net, x, level)
    assert fault is not None
    assert (fault.kind, fault.event.samples, fault.names) == ("data", (2, 5), ("input 0",))


def test_target_outside_the_model(net: Around, device: torch.device) -> None:
    x, y = torch.randn(SAMPLES, WIDTH, device=device), torch.zeros(SAMPLES, 4, device=device)
    y[1] = float("nan")
    fault = find_fault(net, lambda: F.mse_loss(net(x), y))
    assert fault is not None
    assert (fault.kind, fault.module, fault.event.samples) == ("data", None, (1,))


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_input_beyond_half(net: Around, level: str, device: torch.device) -> None:
    fault = find(net, torch.full((SAMPLES, WIDTH), 1e6, device=device), level)
    assert fault is not None
    assert (fault.kind, fault.module) == ("cast_overflow", "stem")
    assert fault.multiple == pytest.approx(1e6 / 65504)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_parameter(net: Around, level: str, device: torch.device) -> None:
    with torch.no_grad():
        net.block = nn.Linear(WIDTH, WIDTH).to(device)
        net.block.weight[0, 0] = net.head.bias[1] = float("nan")
    fault = find(net, torch.randn(SAMPLES, WIDTH, device=device), level)
    assert fault is not None
    assert (fault.kind, set(fault.names)) == ("parameters", {"block.weight", "head.bias"})


def test_weight_beyond_half(net: Around, device: torch.device) -> None:
    with torch.no_grad():
        net.head.weight[0, 0] = 1e5
    x = torch.randn(SAMPLES, WIDTH, device=device)
    at_o1, at_o2 = find(net, x, "O1"), find(net, x, "O2")
    assert at_o1 is not None
    assert at_o2 is not None
    assert (at_o1.kind, at_o1.event.names, at_o1.module) == (
        "cast_overflow",
        ("head.weight",),
        "head",
    )
    assert (at_o2.kind, at_o2.names, at_o2.module) == ("weight_overflow", ("head.weight",), "head")


def unscaled(model: nn.Module, x: Tensor) -> Tensor:
    amp = tritonamp.enable(model, level="O1")
    model(x).square().mean().backward()
    amp.disable()
    largest = max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)
    model.zero_grad()
    return torch.tensor(largest)


def test_scale_too_high(net: Around, device: torch.device) -> None:
    x = torch.randn(SAMPLES, WIDTH, device=device)
    fault = find(net, x, "O1", scale=2.0**24)
    assert fault is not None
    assert (fault.kind, fault.module, fault.scale) == ("scale_too_high", "head", 2.0**24)
    assert fault.fits is not None
    assert find(net, x, "O1", scale=fault.fits) is None
    higher = find(net, x, "O1", scale=2 * fault.fits)
    assert higher is not None
    assert higher.fits == fault.fits
    assert len(fault.names) == 4


class OnOneLine(nn.Module):
    """A half mean of 1e-5, whose square is a divisor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        nn.init.zeros_(self.layer.weight)
        nn.init.constant_(self.layer.bias, 1e-5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x).half()
        return x.sum() / (h[0, 0] ** 2 + 1e-9)


class OnTwoLines(OnOneLine):
    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x).half()
        square = h[0, 0] ** 2
        return x.sum() / (square + 1e-9)


@pytest.mark.parametrize(
    ("net", "why"), [(OnOneLine(), "div divides by 1.1"), (OnTwoLines(), "the gradient is ")]
)
def test_a_square_does_not_divide(net: nn.Module, why: str) -> None:
    """The gradient of a divisor overflows in the cast behind its square, which is no division."""
    with tritonamp.enable(net, level="O2", cast_outputs=None):
        fault = find_fault(net, lambda: net(torch.ones(1, 2)), scale=2.0**8)
    assert fault is not None
    assert (fault.event.phase, fault.op) == ("backward", "pow")
    assert fault.why.startswith(why)


def test_gradient_that_arrives_broken(net: Around, device: torch.device) -> None:
    x = torch.randn(SAMPLES, WIDTH, device=device)
    grad = torch.full((SAMPLES, 4), float("nan"), device=device)
    fault = find_fault(net, lambda: net(x), grad_outputs=[grad])
    assert fault is not None
    assert (fault.kind, fault.event.phase) == ("propagated", "backward")


def test_masked_loss_in_half_outside_the_model(net: Around, device: torch.device) -> None:
    amp = tritonamp.enable(net, level="O2", cast_outputs=None)
    x, mask = (
        torch.randn(SAMPLES, WIDTH, device=device),
        torch.ones(SAMPLES, 1, device=device).half(),
    )

    def run() -> Tensor:
        loss = (net(x) * 0 + 100) ** 2
        return (loss * mask).sum() / mask.sum()

    fault = find_fault(net, run)
    amp.disable()
    assert fault is not None
    assert (fault.kind, fault.module, fault.op) == ("reduction_overflow", None, "sum")
    assert fault.multiple == pytest.approx(240000 / 65504)


def test_several_models(device: torch.device) -> None:
    first, second = Around(nn.Identity()).to(device), Around(Function(attend_to_large)).to(device)
    amp = tritonamp.enable([first, second], level="O2")
    x = torch.randn(SAMPLES, WIDTH, device=device)
    fault = find_fault([first, second], lambda: (first(x) + second(x)).mean())
    amp.disable()
    assert fault is not None
    assert fault.module == "1.block"


def test_every_label_ignored(net: Around, device: torch.device) -> None:
    x, y = torch.randn(SAMPLES, WIDTH, device=device), torch.full((SAMPLES,), -100, device=device)
    fault = find_fault(net, lambda: F.cross_entropy(net(x), y))
    assert fault is not None
    assert (fault.kind, fault.module) == ("zero_by_zero", None)


def test_own_backward_names_its_line(device: torch.device) -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return grads[0] / (grads[0] * 0)

    model = Around(Function(lambda x, big: Broken.apply(x))).to(device)
    x = torch.randn(SAMPLES, WIDTH, device=device)
    fault = find_fault(model, lambda: model(x).mean())
    assert fault is not None
    assert (fault.kind, fault.module, fault.event.phase) == ("own_backward", "block", "backward")
    assert "return grads[0] / (grads[0] * 0)" in str(fault)


def test_memory_that_no_op_has_written_to(device: torch.device) -> None:
    """NaN from a kernel of the user's, where an overflow was before: not the overflow's."""
    if device.type != "cpu":
        pytest.skip("NumPy stands for the kernel")

    def by_kernel(x: Tensor, big: float) -> Tensor:
        kept = (x * big * big).clamp(-1, 1)
        result = torch.empty_like(x)
        result.detach().numpy()[:] = float("nan")
        return kept + result

    model, x = Around(Function(by_kernel)), torch.randn(SAMPLES, WIDTH)
    amp = tritonamp.enable(model, level="O2")
    fault = find_fault(model, lambda: model(x).mean())
    amp.disable()
    assert fault is not None
    assert (fault.kind, fault.module, fault.op) == ("propagated", "block", "add")


def test_memory_that_nothing_has_written_to(device: torch.device) -> None:
    def assembled(x: Tensor, big: float) -> Tensor:
        result = torch.empty_like(x)
        result[:, 0], result[:, 1:] = x[:, 0], x[:, 1:] * big
        return result

    model = Around(Function(assembled)).to(device)
    x = torch.randn(SAMPLES, WIDTH, device=device)
    assert find_fault(model, lambda: model(x).mean()) is None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes with NaN in NumPy
def test_kernels(backend: str, device: torch.device) -> None:
    model = Around(Function(masked_row)).to(device)
    amp = tritonamp.enable(model, level="O2", backend=backend)
    x = torch.randn(SAMPLES, WIDTH, device=device)
    fault = find_fault(model, lambda: model(x).mean())
    amp.disable()
    assert fault is not None
    assert (fault.kind, fault.op) == ("masked_row", "softmax")


# Clean models


class Causal(nn.Module):
    """Masks of -inf from a buffer, from masked_fill, from log(0) and from -1e9, each with something
    left.
    """

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.register_buffer("mask", torch.full((SAMPLES, SAMPLES), float("-inf")).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.T / 4
        below = torch.ones_like(scores).tril()
        masked = [
            scores + self.mask,
            scores.masked_fill(below == 0, float("-inf")),
            scores + below.log(),
            torch.where(below > 0, scores, torch.tensor(float("-inf"), device=x.device)),
            scores + (1 - below) * -1e9,
        ]
        return sum(attention(s, v) for s in masked) + F.scaled_dot_product_attention(
            q, k, v, is_causal=True
        )


class Harmless(nn.Module):
    """inf that ends as the right number."""

    def forward(self, x: Tensor) -> Tensor:
        huge = x * 60000 * 60000
        top = huge.clamp(-1, 1) + huge.tanh() + huge.sigmoid() + torch.where(huge.isinf(), 0, huge)
        return top + (x.detach() * 0).reciprocal().reciprocal()


CLEAN = {
    "plain": nn.Identity(),
    "transformer": nn.Sequential(
        nn.Unflatten(0, (1, -1)),
        nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True),
        nn.Flatten(0, 1),
    ),
    "convolutions": nn.Sequential(
        nn.Unflatten(1, (1, 4, 4)),
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
    ),
    "lstm": Recurrent(),
    "causal": Causal(),
    "harmless": Harmless(),
    "checkpoint": Recomputed(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout()), False
    ),
    "norms": nn.Sequential(nn.LayerNorm(WIDTH), nn.GroupNorm(2, WIDTH), nn.RMSNorm(WIDTH)),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("block", CLEAN.values(), ids=CLEAN)
def test_clean(block: nn.Module, level: str, device: torch.device) -> None:
    model, x = Around(block), torch.randn(SAMPLES, WIDTH, device=device)
    y = torch.randint(4, (SAMPLES,), device=device)
    amp = enabled(model, level, torch.float16, device)
    fault = find_fault(
        model, lambda: F.cross_entropy(model(x), y), scale=1.0 if level == "O0" else 256.0
    )
    amp.disable()
    assert fault is None, fault


def test_masked_logits_are_no_fault(net: Around, device: torch.device) -> None:
    x = torch.randn(SAMPLES, WIDTH, device=device)
    banned = torch.tensor([True, False, False, False], device=device)
    assert find_fault(net, lambda: net(x).masked_fill(banned, float("-inf"))) is None


def test_loss_of_minus_inf_by_a_constant(net: Around, device: torch.device) -> None:
    x = torch.randn(SAMPLES, WIDTH, device=device)
    banned = torch.tensor([True, False, False, False], device=device)
    fault = find_fault(net, lambda: net(x).masked_fill(banned, float("-inf")).mean())
    assert fault is not None
    assert (fault.kind, fault.op) == ("infinite_constant", "masked_fill")
