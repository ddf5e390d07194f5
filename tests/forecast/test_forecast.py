"""check(): what it predicts, that its policy cures, that clean models are left alone, and that
nothing moves.
"""

import collections
import contextlib
import copy
import dataclasses
import math
import random
import threading

import numpy
import pytest
import torch
import torch.nn.functional as F
from helpers import take_step
from small_models import Apply, around
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tritonamp
from tritonamp.forecast import unrounded
from tritonamp.forecast.loss_scale import largest_scale
from tritonamp.forecast.unrounded import (
    Unrounded,
    magnitudes,
    rounds_to_inf,
    rounds_to_zero,
    vanishing,
)
from tritonamp.kernels.device import UnsupportedDeviceError

FP16, BF16 = torch.float16, torch.bfloat16


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def check(model, *batch, loss_fn=None, **kwargs):
    return tritonamp.check(model, adamw(model), batch, loss_fn, **kwargs)


def kinds(forecast):
    return [finding.kind for finding in forecast.findings]


class Weighted(Apply):
    """A function of its input times a trained weight."""

    def __init__(self, function, size=16):
        super().__init__(function)
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return super().forward(x * self.weight)


class UnscaledAttention(nn.Module):
    """Scores without a scale; ``mask`` says how the future is hidden."""

    def __init__(self, width=16, mask=None):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.mask = mask

    def forward(self, x):
        scores = self.query(x) @ self.key(x).mT
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        if self.mask == "fill":
            scores = scores.masked_fill(future, -1e9)
        elif self.mask == "add":
            scores = scores + future.to(scores.dtype) * -1e9
        elif self.mask == "min":
            scores = scores + future.to(scores.dtype) * torch.finfo(scores.dtype).min
        elif self.mask == "inf":
            scores = scores.masked_fill(future, float("-inf"))
        return scores.softmax(-1) @ self.value(x)


class RootMeanSquare(nn.Module):
    """The square of a half value is half unless it is taken in FP32."""

    def __init__(self, width=16, eps=1e-5, square=lambda x: x * x):
        super().__init__()
        self.weight, self.eps, self.square = nn.Parameter(torch.ones(width)), eps, square

    def forward(self, x):
        return x / (self.square(x).mean(-1, keepdim=True) + self.eps).sqrt() * self.weight


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = self._conv(3, 16)
        self.body = nn.Sequential(
            self._conv(16, 16), nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)
        )
        self.head = nn.Linear(16, 10)

    @staticmethod
    def _conv(inputs, outputs):
        conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU(True))

    def forward(self, x):
        x = self.stem(x)
        return self.head(F.relu(x + self.body(x)).mean((2, 3)))


class LanguageModel(nn.Module):
    """Tied weights, masked attention, checkpointed blocks or an LSTM."""

    def __init__(self, body, width=32, vocabulary=64):
        super().__init__()
        self.token, self.body, self.norm = (
            nn.Embedding(vocabulary, width),
            body,
            nn.LayerNorm(width),
        )
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight

    def forward(self, codes):
        x = self.token(codes)
        if isinstance(self.body, nn.LSTM):
            x = self.body(x)[0]
        else:
            mask = nn.Transformer.generate_square_subsequent_mask(codes.shape[1], device=x.device)
            x = checkpoint(self.body, x, mask, use_reentrant=False)
        return self.head(self.norm(x))


def cross_entropy(output):
    logits = output.flatten(0, -2)
    return F.cross_entropy(
        logits, torch.arange(len(logits), device=logits.device) % logits.shape[-1]
    )


def encoder():
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2, enable_nested_tensor=False
    )


def codes():
    return torch.arange(14).view(2, 7)


CLEAN = {
    "convolutions": lambda: (Classifier(), torch.randn(4, 3, 8, 8), cross_entropy),
    "encoder": lambda: (LanguageModel(encoder()), codes(), cross_entropy),
    "lstm": lambda: (
        LanguageModel(nn.LSTM(32, 32, 2, batch_first=True, dropout=0.1)),
        codes(),
        cross_entropy,
    ),
    "attention": lambda: (
        nn.Sequential(nn.LayerNorm(16), UnscaledAttention(mask="inf")),
        torch.randn(2, 5, 16),
        None,
    ),
    "finfo mask": lambda: (UnscaledAttention(mask="min"), 30 * torch.randn(2, 5, 16), None),
    "rms norm in FP32": lambda: (
        around(RootMeanSquare(square=lambda x: x.pow(2))),
        1e3 * torch.randn(4, 16),
        None,
    ),
    "normalize": lambda: (
        nn.Sequential(nn.Linear(16, 16), Weighted(lambda x: F.normalize(x, dim=-1))),
        torch.randn(4, 16),
        None,
    ),
    "exp and var": lambda: (
        around(Weighted(lambda x: (x.exp() / x.var(-1, keepdim=True)).log())),
        torch.randn(4, 16),
        None,
    ),
    "zeros": lambda: (around(Weighted(lambda x: x.relu() * 0)), torch.randn(4, 16), None),
    "bce with logits": lambda: (
        around(nn.Tanh()),
        torch.randn(4, 16),
        lambda y: F.binary_cross_entropy_with_logits(y, y.detach().sigmoid()),
    ),
}


@pytest.mark.parametrize("name", CLEAN)
@pytest.mark.parametrize(("level", "dtype"), [("O1", FP16), ("O2", FP16), ("O2", BF16)])
def test_no_false_alarm(name, level, dtype):
    model, inputs, loss_fn = CLEAN[name]()
    forecast = check(model, inputs, loss_fn=loss_fn, level=level, dtype=dtype)
    assert not forecast.findings
    assert str(forecast).startswith("nothing found: ")
    ran = str(forecast).splitlines()[1:]
    assert " ".join(map(str.strip, ran)).startswith("the policy ran 3 steps on this batch: loss ")
    assert forecast.rehearsal.went_well
    assert forecast.asked == tritonamp.policy.resolve(level, dtype)
    scale = {FP16: forecast.formats["float16"].scale, BF16: forecast.asked.init_scale}[dtype]
    assert forecast.policy == dataclasses.replace(forecast.asked, init_scale=scale)
    assert forecast.formats["float16"].fits


# What overflows


@pytest.mark.smoke
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_scores_that_overflow(level):
    model, x = around(UnscaledAttention()), 1e3 * torch.randn(2, 5, 16)
    with torch.no_grad():
        hidden = model[0](x)
        scores = model[1].query(hidden) @ model[1].key(hidden).mT
    forecast = check(model, x, level=level)
    (finding,) = forecast.findings
    assert (finding.kind, finding.where) == ("overflow", "1")
    assert finding.weight == pytest.approx(float(scores.abs().max()) / 65504, rel=1e-5)
    assert (
        "matmul" in finding.why and f"{finding.weight:.3g} times the largest float16" in finding.why
    )
    assert finding.line.rpartition(":")[0].endswith("test_forecast.py")
    assert (forecast.policy.fp32_results, forecast.policy.fp32_modules) == (("1",), ())
    assert forecast.formats["float16"].overflows == 1
    assert forecast.formats["bfloat16"].overflows == 0


def test_the_silent_overflow_of_a_square():
    """In half the result is zero and no NaN: only the intermediate tells."""
    model, x = around(RootMeanSquare()), 1e3 * torch.randn(4, 16)
    forecast = check(model, x)
    (first, *rest) = forecast.findings
    assert (first.kind, first.where, first.problem) == ("overflow", "1", True)
    assert first.why.startswith("mul gives")
    assert {finding.kind for finding in rest} == {"follows"}
    assert "more results after these would overflow too" in str(forecast)


# (function of half values of about 1e3, whether it overflows): FP32 ops do not overflow inside,
# only where stored
OPS = {
    "sum": (lambda x: x.sum(-1, keepdim=True) - x, False),
    "sum stored in half": (lambda x: (100 * x.abs().sum(-1, keepdim=True)).to(x.dtype) + x, True),
    "pow": (lambda x: x.pow(2), False),
    "mul": (lambda x: x * x, True),
    "var": (lambda x: x.var(-1, keepdim=True) + x, False),
    "exp": (lambda x: (x / 50).exp(), False),
    "norm": (lambda x: x / x.norm(dim=-1, keepdim=True), False),
    "softmax": (lambda x: x.softmax(-1), False),
    "cumsum": (lambda x: x.cumsum(-1), False),
    "layer_norm": (lambda x: F.layer_norm(30 * x, (16,)), False),
    "mse_loss": (lambda x: F.mse_loss(x, -x), False),
    "matmul": (lambda x: x @ x.mT, True),
    "in place": (lambda x: x.clone().mul_(100), True),
}


@pytest.mark.parametrize("name", OPS)
def test_each_op_overflows_only_where_half_is_stored(name):
    function, overflows = OPS[name]
    model = nn.Sequential(Weighted(nn.Identity()), Weighted(function))
    x, level = 1000 + 10 * torch.rand(16, 16), tritonamp.policy.resolve("O2", cast_inputs=True)
    found = [finding for finding in check(model, x, level=level).findings if finding.where == "1"]
    assert [finding.kind for finding in found][:1] == ["overflow"] * overflows
    amp = tritonamp.enable(model, level=level)  # what is predicted is what happens
    amax = []
    model[1].register_forward_hook(
        lambda module, args, output: amax.append(output.detach().float().abs().max())
    )
    model(x)
    amp.disable()
    assert math.isinf(amax[0]) == overflows


@pytest.mark.parametrize("where", ["batch", "parameter"])
def test_what_is_too_large_before_any_op(where):
    model, x = around(nn.LayerNorm(16)), torch.randn(4, 16)
    if where == "batch":
        model, x = (
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 8)),
            1e5 + torch.arange(64.0).view(4, 16),
        )
        assert not check(model, x).problems  # the norm reads it in FP32
        forecast = check(model, x, level=dataclasses.replace(tritonamp.O2, cast_inputs=True))
        (problem,) = forecast.problems
        assert problem.where == "the batch"
        assert "cast_inputs=False" in problem.advice
        assert forecast.policy == tritonamp.O2
    else:
        model[0].weight.data[0, 0] = 1e6
        forecast = check(model, x)
        assert forecast.findings[0].where == "0.weight"
        assert "0" in forecast.policy.fp32_modules
    assert finite_loss(model, forecast.policy, x)


def test_a_value_that_is_not_finite_already():
    model = around()
    model[1].weight.data[0, 0] = float("nan")
    first = check(model, torch.randn(4, 16)).findings[0]
    assert (first.kind, first.where) == ("non-finite", "1.weight")
    model, x = around(Weighted(lambda x: (x - 100).log())), torch.randn(4, 16)
    first = check(model, x).findings[0]
    assert (first.kind, first.where) == ("non-finite", "1")
    assert "log gives NaN in FP32 already" in first.why
    x[2, 5] = float("nan")
    (first,) = check(around(), x).findings
    assert (first.kind, first.where) == ("non-finite", "the batch")
    assert first.why == "the batch holds NaN"
    assert "drop or repair the samples" in first.advice
    assert first.advice.endswith("(not tried: no other batch is at hand)")


# What vanishes


def test_constants_of_masks():
    x = torch.randn(2, 5, 16)
    assert not check(around(UnscaledAttention(mask="fill")), x).findings  # the op table clamps it
    for mask, op, level in (("fill", "masked_fill", "O3"), ("add", "mul", "O2")):
        forecast = check(around(UnscaledAttention(mask=mask)), x, level=level)
        (finding,) = (f for f in forecast.findings if f.kind == "constant")
        assert finding.where == "1"
        assert finding.why.startswith(f"{op} with -1e+09")
        assert 'float("-inf")' in finding.advice
        assert forecast.policy.fp32_modules == ("1",)


def test_a_constant_that_is_made_in_half():
    forecast = check(around(Weighted(lambda x: x * x.new_tensor(1e5))), torch.randn(4, 16))
    assert (forecast.findings[0].kind, forecast.findings[0].where) == ("constant", "1")
    # where 1e5 times x is finite, the next layer has to take it
    assert forecast.policy.fp32_modules == ("1", "2")


def test_a_row_that_the_mask_hides_completely_is_no_excuse():
    hide = Weighted(lambda x: (x - 60000.0).sub(60000.0).softmax(-1))
    assert kinds(check(around(hide), torch.randn(4, 16)))[:1] == ["overflow"]


def test_a_norm_that_runs_as_rms_norm_has_no_fault():
    class RMSNorm(RootMeanSquare):
        def forward(self, x):
            return x / ((x * x).mean(-1, keepdim=True) + self.eps).sqrt() * self.weight

    as_written = dataclasses.replace(tritonamp.O2, fuse_norms=False)
    for eps, size, kind in ((1e-8, 1, "eps"), (1e-5, 1e3, "overflow")):
        model, x = around(RMSNorm(eps=eps)), size * torch.randn(4, 16)
        assert not check(model, x).findings
        assert kind in kinds(check(model, x, level=as_written))


def test_an_eps_that_is_zero():
    forecast = check(around(RootMeanSquare(eps=1e-8)), torch.randn(4, 16))
    (finding,) = forecast.findings
    assert (finding.kind, finding.where) == ("eps", "1")
    assert "add of 1e-08, which is zero in float16" in finding.why
    assert not check(around(RootMeanSquare(eps=1e-8)), torch.randn(4, 16), dtype=BF16).findings


def test_dividing_by_what_becomes_zero():
    model = around(Weighted(lambda x: x * 1e-5 / (x.abs().amax(-1, keepdim=True) * 1e-9)))
    found = check(model, torch.randn(4, 16))
    assert "divisor" in kinds(found) and "vanishing" in kinds(found)
    assert found.policy.fp32_modules == ("1",)


# The loss scale


@pytest.mark.parametrize("power", [-60, -20, 0, 12])
def test_the_largest_loss_scale(power):
    """Linear, so the gradients are known: 2^power of each output's row of the weight."""
    model = nn.Sequential(nn.Linear(4, 1, bias=False))
    model[0].weight.data.fill_(1.0)
    forecast = check(model, torch.ones(1, 4), loss_fn=lambda y: y.sum() * 2.0**power)
    seen = forecast.formats["float16"]
    # the largest gradient is 2^power times a product of ones: 2^15 is the largest power of two in
    # float16
    assert seen.max_scale == min(2.0 ** (15 - power), 2.0**24)
    assert seen.scale == seen.max_scale / 4
    assert seen.fits == (power > -60)
    assert (seen.grad_vanishing == 1.0) == (power < -25)
    assert forecast.formats["bfloat16"].scale == 1.0
    assert forecast.formats["bfloat16"].fits


@pytest.mark.parametrize(
    ("amax", "scale"),
    [(65519.0, 1.0), (65520.0, 0.5), (65520 / 4, 2.0), (3.0, 2.0**14), (0.0, 2.0**24)],
)
def test_the_largest_scale_of_a_gradient(amax, scale):
    assert largest_scale(amax, FP16) == scale
    assert torch.tensor(amax * scale).half().isfinite()


def test_the_largest_scale_is_what_a_step_takes():
    torch.manual_seed(0)
    model, x = around(nn.ReLU()), torch.randn(4, 16)
    largest = check(model, x, loss_fn=lambda y: y.square().sum()).formats["float16"].max_scale
    for exponent, finite in ((0, True), (1, False)):
        twin = copy.deepcopy(model)
        optimizer = adamw(twin)
        amp = tritonamp.enable(twin, optimizer, level="O2", loss_scale=largest * 2**exponent)
        amp.backward(twin(x).square().sum())
        optimizer.step()
        assert (amp.stats()["skipped"] == 0) == finite
        amp.disable()


def test_no_loss_scale_fits_two_parameters_that_far_apart():
    model = nn.ModuleDict({"large": Weighted(nn.Identity()), "small": Weighted(nn.Identity())})

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = model

        def forward(self, x):
            return self.parts["large"](x), self.parts["small"](x)

    both, x = Both(), torch.randn(4, 16)

    def loss_fn(outputs):
        return 1e4 * outputs[0].sum() + 1e-9 * outputs[1].sum()

    forecast = tritonamp.check(both, adamw(both), (x,), loss_fn)
    (finding,) = forecast.findings
    assert finding.kind == "loss scale"
    assert "the gradient of parts.small.weight is zero" in finding.why
    assert not forecast.formats["float16"].fits
    assert forecast.policy != forecast.asked
    fixed = tritonamp.check(both, adamw(both), (x,), loss_fn, level="O2", dtype=BF16)
    assert not fixed.findings


def test_a_fixed_loss_scale():
    model, x = around(), torch.randn(4, 16)
    low = dataclasses.replace(tritonamp.O2, loss_scale=1.0)
    high = dataclasses.replace(tritonamp.O2, loss_scale=2.0**24)
    for policy, loss_fn in ((low, lambda y: y.mean() * 1e-9), (high, lambda y: y.sum())):
        (finding,) = check(model, x, loss_fn=loss_fn, level=policy).findings
        assert finding.kind == "loss scale"
        assert finding.advice.startswith('loss_scale="dynamic" (tried: loss scale 2^')


def test_gradients_that_are_rounding_noise_are_not_missed():
    """A key's bias in attention has no gradient at all, but for rounding."""
    forecast = check(
        UnscaledAttention(),
        torch.randn(2, 5, 16),
        level=dataclasses.replace(tritonamp.O2, loss_scale=1.0),
    )
    noise = next(r for r in forecast.records if r.op == "gradient" and r.parameter == "key.bias")
    assert vanishing(noise.sizes.exponents, FP16) > 0.5
    assert not forecast.findings


# The policy cures


def finite_loss(model, policy, x, steps=3):
    """Whether training under ``policy`` takes its steps and follows FP32."""
    losses = {}
    for name, chosen in (("FP32", tritonamp.O0), ("policy", policy)):
        torch.manual_seed(0)
        twin = copy.deepcopy(model)
        optimizer = adamw(twin)
        amp = tritonamp.enable(twin, optimizer, policy=chosen, scaler=None)
        try:
            while amp.stats()["steps"] < steps and amp.stats()["skipped"] < 40:
                output = twin(x)
                loss = (output - 1).square().mean()
                take_step(amp, optimizer, loss)
            losses[name] = loss.item()
        finally:
            amp.disable()
    close = abs(losses["policy"] - losses["FP32"]) <= 0.02 * abs(losses["FP32"])
    return math.isfinite(losses["policy"]) and close


class OverflowsItself(nn.Module):
    """Overflows in the model's own forward, which no name can reach."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x):
        y = 300 * self.inner(x)
        return (y * y).mean(-1, keepdim=True).sqrt()


FAULTY = {
    "attention": (lambda: around(UnscaledAttention()), lambda: 1e3 * torch.randn(2, 5, 16)),
    "attention in a model": (
        lambda: nn.Sequential(encoderlike(), nn.Linear(16, 8)),
        lambda: 1e3 * torch.randn(2, 5, 16),
    ),
    "square": (lambda: around(RootMeanSquare()), lambda: 3e3 * torch.randn(4, 16)),
    "constant": (
        lambda: around(Weighted(lambda x: F.threshold(x, 0.0, -1e9).softmax(-1))),
        lambda: torch.randn(2, 5, 16),
    ),
    "residual": (lambda: residual(), lambda: 1e3 * torch.randn(4, 16)),
    "own forward": (OverflowsItself, lambda: 10 * torch.randn(4, 16)),
    "divisor": (
        lambda: around(Weighted(lambda x: x * 1e-6 / (x.abs().amax(-1, True) * 1e-9 + 1e-10))),
        lambda: torch.randn(4, 16),
    ),
}


def encoderlike():
    return nn.ModuleDict({"attention": UnscaledAttention()})["attention"]


def residual():
    """What overflows once stays too large for every layer after it."""
    large = nn.Linear(16, 16)
    large.weight.data *= 400
    return nn.Sequential(large, nn.ReLU(), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 8))


@pytest.mark.parametrize("name", FAULTY)
def test_the_policy_cures(name):
    make, data = FAULTY[name]
    torch.manual_seed(0)
    model, x = make(), data()
    forecast = check(model, x, loss_fn=lambda y: (y - 1).square().mean())
    assert forecast.problems
    assert finite_loss(model, forecast.policy, x)
    with contextlib.suppress(RuntimeError):  # torch refuses to write a constant
        assert not finite_loss(model, tritonamp.O2, x)


def test_the_call_that_a_report_prints_has_an_optimizer_only_if_there_is_one():
    model, x = residual(), 1e3 * torch.randn(4, 16)
    for optimizer, arguments in (
        (None, "model"),
        (torch.optim.SGD(model.parameters()), "model, optimizer"),
    ):
        told = " ".join(str(tritonamp.check(model, optimizer, (x,))).split())
        assert f"tritonamp.enable({arguments}, policy=forecast.policy) takes it" in told


def test_only_what_has_to_stays_fp32():
    model, x = residual(), 1e3 * torch.randn(4, 16)
    policy = check(model, x).policy
    assert (policy.fp32_results, policy.fp32_modules) == (("0",), ("2",))
    own = check(OverflowsItself(), 10 * torch.randn(4, 16)).policy
    assert (own.dtype, own.fp32_modules, own.loss_scale) == (BF16, (), 1.0)


def test_the_policy_keeps_what_was_asked_for():
    asked = dataclasses.replace(tritonamp.O2, fp32_modules=(nn.LayerNorm, "3"), cast_outputs=None)
    model = around(UnscaledAttention(), nn.LayerNorm(16))
    policy = check(model, 1e3 * torch.randn(2, 5, 16), level=asked).policy
    asked = dataclasses.replace(asked, init_scale=policy.init_scale)
    assert policy == dataclasses.replace(asked, fp32_results=("1",))


# Nothing moves


class Restless(nn.Module):
    """Changes everything that a forward can change."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.3))
        self.calls, self.kept, self.seen = 0, None, []
        self.register_buffer("total", torch.zeros(16))

    def forward(self, x):
        x += random.random() + numpy.random.rand() + torch.rand(())
        self.calls += 1
        self.kept = self.body(x)
        self.seen.append(self.kept)
        self.total += self.kept.detach().float().sum(0)
        return self.kept


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(("training", "level"), [(True, "O1"), (True, "O2"), (False, "O2")])
def test_everything_is_as_before(training, level, fails):
    model = Restless().train(training)
    x, optimizer = torch.randn(8, 16), adamw(model)
    # kept results, gradients and optimizer state to leave alone
    model(x.clone()).square().mean().backward()
    optimizer.step()
    before = snapshot(model, optimizer, x)
    with torch.no_grad():
        if fails:
            with pytest.raises(
                RuntimeError, match="failed in the dry run, in FP32: ZeroDivisionError"
            ):
                tritonamp.check(model, optimizer, (x,), lambda y: 1 / 0, level=level)
        else:
            tritonamp.check(model, optimizer, (x,), level=level)
        assert not torch.is_grad_enabled()
    after = snapshot(model, optimizer, x)
    assert before.keys() == after.keys()
    for name, value in before.items():
        same = (
            torch.equal(value, after[name]) if isinstance(value, Tensor) else value == after[name]
        )
        assert same, name
    assert not tritonamp.casts.dispatch.is_registered()


def snapshot(model, optimizer, x):
    state = {f"model.{name}": tensor.clone() for name, tensor in model.state_dict().items()}
    state |= {f"grad.{name}": p.grad.clone() for name, p in model.named_parameters()}
    state |= {f"id.{name}": id(p) for name, p in model.named_parameters()}
    for i, values in enumerate(optimizer.state.values()):
        state |= {f"optimizer.{i}.{name}": value.clone() for name, value in values.items()}
    numpy_state = numpy.random.get_state()
    return state | {
        "classes": [type(module) for module in model.modules()],
        "hooks": [
            len(module._forward_hooks) + len(module._forward_pre_hooks)
            for module in model.modules()
        ],
        "flags": [module.training for module in model.modules()],
        "calls": model.calls,
        "seen": list(map(id, model.seen)),
        "kept": model.kept.detach().clone(),
        "x": x.clone(),
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (numpy_state[1].tolist(), numpy_state[2]),
    }


def test_the_dry_run_computes_what_fp32_computes():
    model, x = around(nn.LayerNorm(16), UnscaledAttention(), nn.GELU()), torch.randn(2, 5, 16)
    loss = model(x).mean()
    grads = torch.autograd.grad(loss, list(model.parameters()))
    forecast = check(model, x)
    assert forecast.loss == loss.item()
    amax = {r.parameter: r.sizes.amax for r in forecast.records if r.op == "gradient"}
    for (name, _), grad in zip(model.named_parameters(), grads, strict=True):
        # the softmax backward of the op table sums in another order: a few roundings, relative to
        # the largest gradient
        assert amax[name] == pytest.approx(float(grad.abs().max()), rel=1e-5, abs=1e-7)


def test_records_name_module_and_phase():
    model = around(nn.ReLU())
    records = check(model, torch.randn(4, 16)).records
    forward = [
        (r.place.module, r.op)
        for r in records
        if r.half and not r.scaled and r.op not in ("parameter", "input")
    ]
    assert forward == [("0", "to"), ("0", "addmm"), ("1", "relu"), ("2", "addmm")]
    backward = {
        (r.place.module, r.op) for r in records if r.half and r.scaled and r.op != "gradient"
    }
    assert {("2", "mm"), ("1", "threshold_backward"), ("0", "mm")} <= backward
    assert {r.parameter for r in records if r.op == "gradient"} == {
        n for n, _ in model.named_parameters()
    }


# Without data


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class CustomFwd(Function):
    forward = staticmethod(
        torch.amp.custom_fwd(lambda ctx, x: x * 2, device_type="cpu", cast_inputs=torch.float32)
    )
    backward = staticmethod(torch.amp.custom_bwd(lambda ctx, grad: grad * 2, device_type="cpu"))


class Mismatch(torch.autograd.Function):
    """Its backward multiplies FP32 by half, as autocast is off there."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w.mT, x.mT @ grad


def test_autograd_functions():
    x = torch.randn(4, 16)
    (finding,) = check(around(Weighted(Function.apply)), x).findings
    assert (finding.kind, finding.where, finding.problem) == ("function", "1", False)
    assert "Function" in finding.why and "custom_fwd" in finding.advice
    assert not check(around(Weighted(CustomFwd.apply)), x).findings


def test_dtypes_that_torch_would_refuse():
    class Matrix(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16, 16))

        def forward(self, x):
            return Mismatch.apply(x, self.weight)

    forecast = check(around(Matrix()), torch.randn(4, 16), level="O1")
    assert {"refused", "function"} <= set(kinds(forecast))
    assert forecast.findings[0].where == "1"


def test_adam_and_half_parameters():
    x = torch.randn(4, 16)
    half = around(nn.LayerNorm(16)).half()
    for level in ("O0", "O1", "O2"):  # which give them FP32 values
        assert not check(half, x, level=level).problems
    nadam = torch.optim.NAdam(half.parameters())
    found = {f.kind: f for f in tritonamp.check(half, nadam, (x,), level="O3").findings}
    assert {"adam eps", "no masters", "half norm"} <= set(found)
    assert "eps=1e-08" in found["adam eps"].why
    assert found["half norm"].where == "1"
    good = tritonamp.optim.AdamW(half.parameters())
    assert not {"adam eps", "no masters"} & {*kinds(tritonamp.check(half, good, (x,), level="O3"))}
    large = torch.optim.NAdam(half.parameters(), eps=1e-4)
    assert "adam eps" not in kinds(tritonamp.check(half, large, (x,), level="O3"))
    fused = kinds(check(around(), x, level="O3"))  # its step computes in FP32
    assert "no masters" in fused and "adam eps" not in fused


def test_averaged_copies():
    class Teacher(nn.Module):
        def __init__(self, make):
            super().__init__()
            self.student = nn.Linear(16, 16)
            self.teacher = make(self.student)

        def forward(self, x):
            return self.student(x) - self.teacher(x)

    x = torch.randn(4, 16)
    copied = check(Teacher(lambda m: copy.deepcopy(m).requires_grad_(False)), x)
    assert [(f.kind, f.where, f.problem) for f in copied.findings] == [
        ("average", "teacher", False)
    ]
    averaged = check(Teacher(torch.optim.swa_utils.AveragedModel), x)
    assert [(f.kind, f.where, f.problem) for f in averaged.findings] == [
        ("average", "teacher", True)
    ]
    assert averaged.policy.fp32_modules == ("teacher",)
    # merely frozen
    assert not check(Teacher(lambda m: nn.Linear(16, 16).requires_grad_(False)), x).findings


@pytest.mark.parametrize("inside", [True, False])
def test_bce_loss(inside):
    class Probability(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.loss = nn.Linear(16, 8), nn.BCELoss()

        def forward(self, x):
            p = self.linear(x).sigmoid()
            return self.loss(p, torch.ones_like(p)) if inside else p

    model = Probability()
    if not inside:
        model.loss = None
    found = check(
        model,
        torch.randn(4, 16),
        loss_fn=None if inside else lambda p: nn.BCELoss()(p, torch.ones_like(p)),
    )
    assert kinds(found) == ["BCELoss"]
    assert "BCEWithLogitsLoss" in found.findings[0].advice


@pytest.mark.parametrize("name", ["LigerCrossEntropyLoss", "LigerFusedLinearCrossEntropyLoss"])
def test_gradients_that_are_rounded_before_the_loss_scale(name):
    """As Liger-Kernel's losses round them, which it tells by their names: in float16 alone."""
    loss = type(name, (nn.CrossEntropyLoss,), {})()
    x = torch.randn(4, 16)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.loss = nn.Linear(16, 8), loss

        def forward(self, x):
            return self.loss(self.head(x), torch.zeros(4, dtype=torch.int64))

    (finding,) = check(Model(), x).findings
    assert (finding.kind, finding.where, finding.problem) == ("early gradients", "loss", True)
    assert "69 % become 0" in finding.why
    function = "linear_cross_entropy" if "Linear" in name else "cross_entropy"
    assert f"use tritonamp.functional.{function}, which" in finding.advice
    assert not check(Model(), x, dtype=torch.bfloat16).findings


@pytest.mark.parametrize("where", ["inside", "outside", "outside, in FP32"])
def test_torchs_linear_cross_entropy_outside_the_forward(where):
    """Inside it is tritonamp's; with FP32 rows nothing is rounded."""
    if not hasattr(nn.functional, "linear_cross_entropy"):
        pytest.skip("torch has linear_cross_entropy from 2.13 on")
    weight, target = torch.randn(32, 8), torch.zeros(4, dtype=torch.int64)
    options = nn.LinearCrossEntropyOptions()

    def loss(rows):
        return nn.functional.linear_cross_entropy(
            rows, weight.to(rows.dtype), target, options=options
        )

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(16, 8)

        def forward(self, x):
            return loss(self.body(x)) if where == "inside" else self.body(x)

    outputs = None if where == "outside" else torch.float32
    loss_fn = None if where == "inside" else loss
    policy = dataclasses.replace(tritonamp.O1, cast_outputs=outputs)
    found = check(Model(), torch.randn(4, 16), loss_fn=loss_fn, level=policy)
    early = [f for f in found.findings if f.kind == "early gradients"]
    assert len(early) == (where == "outside")
    for finding in early:
        assert "torch's linear_cross_entropy with options rounds the gradients" in finding.why
        assert "use tritonamp.functional.linear_cross_entropy, which" in finding.advice
        assert "test_forecast.py" in finding.line


def test_a_thread_of_its_own():
    class Threaded(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(16, 16)

        def forward(self, x):
            results = []
            thread = threading.Thread(target=lambda: results.append(self.inner(x)))
            thread.start()
            thread.join()
            return results[0]

    (finding,) = check(nn.Sequential(Threaded(), nn.Linear(16, 8)), torch.randn(4, 16)).problems
    assert (finding.kind, finding.where) == ("thread", "0.inner")


def test_modules_and_buffers_to_mind():
    x = torch.randn(4, 16)
    assert kinds(check(nn.Sequential(nn.DataParallel(nn.Linear(16, 8))), x)) == ["data parallel"]
    model = around()
    model.register_buffer("mask", torch.full((4,), -1e9))
    (finding,) = check(model, x).findings
    assert (finding.kind, finding.where, finding.problem) == ("constant", "mask", False)
    sparse = nn.Sequential(nn.Embedding(64, 16, sparse=True), nn.Linear(16, 8))
    indices = torch.zeros(2, 3, dtype=torch.int64)
    assert any(
        r.parameter == "0.weight" and r.op == "gradient" for r in check(sparse, indices).records
    )
    lbfgs = torch.optim.LBFGS(around().parameters())
    (finding,) = tritonamp.check(around(), lbfgs, (x,)).findings
    assert (finding.kind, finding.where) == ("refused by enable", "optimizer")
    assert finding.why.startswith("LBFGS calls its closure many times inside one step")
    assert finding.advice.startswith("use a first-order optimizer, or train in plain FP32 (not ")


# Arguments and results


def test_the_report_is_worst_first_and_short():
    blocks = [m for _ in range(20) for m in (Weighted(lambda x: x * x * 1e-3), nn.LayerNorm(16))]
    forecast = check(
        nn.Sequential(Weighted(lambda x: x * x), UnscaledAttention(), *blocks),
        1e3 * torch.randn(2, 5, 16),
    )
    text = str(forecast)
    assert len(text.splitlines()) <= 45
    assert max(map(len, text.splitlines())) <= 120
    origins = [f.weight for f in forecast.problems if f.kind != "follows"]
    assert origins == sorted(origins, reverse=True)
    assert text.splitlines()[1].startswith("1. ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, None, ()), "model: expected a torch.nn.Module or a list of them, got int"),
        (
            (nn.Linear(4, 4), 3, (torch.ones(1, 4),)),
            "optimizer: expected a torch.optim.Optimizer, a list of them, or None, got int",
        ),
        (
            (nn.Linear(4, 4), None, (torch.ones(1, 4),), lambda y: y),
            r"expected a scalar tensor, got a tensor of shape \(1, 4\)",
        ),
        (
            (nn.Linear(4, 4), None, (torch.ones(1, 4),), lambda y: 1.0),
            "expected a scalar tensor, got float",
        ),
        (
            (nn.Identity(), None, (torch.ones(2, dtype=torch.int64),)),
            "no floating tensor: pass loss_fn",
        ),
    ],
)
def test_misuse(arguments, message):
    with pytest.raises(ValueError, match=message):
        tritonamp.check(*arguments)


def test_failures_name_the_module():
    with pytest.raises(
        RuntimeError,
        match=r"module '1\.0' failed in the dry run, in FP32: RuntimeError: .*mat1 and mat2",
    ):
        check(nn.Sequential(nn.Linear(16, 8), nn.Sequential(nn.Linear(16, 8))), torch.randn(4, 16))


def test_an_enabled_model_is_refused():
    model = around()
    amp = tritonamp.enable(model)
    with pytest.raises(ValueError, match="enabled already"):
        tritonamp.check(model, None, (torch.randn(4, 16),))
    amp.disable()


@pytest.mark.parametrize(
    "batch", [torch.randn(4, 16), [torch.randn(4, 16)], (torch.randn(4, 16).half(),)]
)
def test_batches(batch):
    assert not tritonamp.check(around(), None, batch).findings


class Keywords(nn.Module):
    """As models of transformers: takes keywords and returns its loss with the logits."""

    def __init__(self, returns):
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 16), nn.Linear(16, 8)
        self.returns = returns

    def forward(self, input_ids, attention_mask=None, labels=None):
        logits = self.head(self.embedding(input_ids) * attention_mask[..., None])
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return self.returns(loss, logits)


@dataclasses.dataclass
class Output:
    loss: Tensor | None
    logits: Tensor


RETURNS = {
    "dataclass": Output,
    "dict": lambda loss, logits: {"loss": loss, "logits": logits},
    "namedtuple": collections.namedtuple("Output", "loss logits"),
    "a loss for each": lambda loss, logits: Output(
        loss if loss is None else torch.stack([loss, loss]), logits
    ),
}
TEXT = {
    "input_ids": torch.arange(12).view(2, 6),
    "attention_mask": torch.ones(2, 6),
    "labels": torch.arange(12).view(2, 6) % 8,
}


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict, collections.UserDict])
@pytest.mark.parametrize("returns", RETURNS)
def test_a_mapping_is_the_keywords_and_the_models_loss_is_the_loss(returns, kind):
    model = Keywords(RETURNS[returns])
    forecast = tritonamp.check(model, adamw(model), kind(TEXT))
    output = model(**TEXT)
    loss = output["loss"] if isinstance(output, dict) else output.loss
    assert forecast.loss == pytest.approx(loss.mean().item(), rel=1e-6)
    assert not forecast.findings
    without = {name: TEXT[name] for name in ("input_ids", "attention_mask")}
    mean = tritonamp.check(model, adamw(model), kind(without)).loss
    output = model(**without)
    logits = output["logits"] if isinstance(output, dict) else output.logits
    assert mean == pytest.approx(logits.mean().item(), rel=1e-5, abs=1e-7)


def test_a_loss_fn_comes_before_the_models_loss():
    model = Keywords(Output)
    assert tritonamp.check(model, None, TEXT, lambda output: 0 * output.loss + 3).loss == 3.0


def test_a_mapping_that_does_not_fit():
    model = Keywords(Output)
    with pytest.raises(
        ValueError,
        match=r"batch: expected the keywords of Keywords.forward\(input_ids, attention_mask, "
        r"labels\), got a Mapping of input_ids, token_type_ids \(got an unexpected keyword "
        r"argument 'token_type_ids'\): a dict that is one input goes into a tuple, \(batch,\)",
    ):
        tritonamp.check(model, None, {"input_ids": codes(), "token_type_ids": codes()})
    inside = nn.Sequential(Weighted(lambda x: x))
    inside[0].forward = lambda batch: inside[0].weight * batch["x"]
    assert not tritonamp.check(inside, None, ({"x": torch.randn(4, 16)},)).problems


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile])
@pytest.mark.parametrize("wrapped_first", [True, False])
def test_the_policy_of_a_wrapped_model_holds_for_the_model(wrap, wrapped_first):
    model, x = around(UnscaledAttention()), 1e3 * torch.randn(2, 5, 16)
    one, other = (wrap(model), model) if wrapped_first else (model, wrap(model))
    policy = tritonamp.check(one, None, (x,)).policy
    assert len(policy.fp32_results) == 1
    amp = tritonamp.enable(other, policy=policy)
    assert model[1].query.weight.dtype is FP16
    with torch.compiler.set_stance("force_eager"):
        assert other(x).isfinite().all()
    amp.disable()


def test_the_policy_begins_at_the_loss_scale_that_fits():
    torch.manual_seed(0)
    model, x = around(nn.ReLU()), torch.randn(4, 16)
    forecast = check(model, x, loss_fn=lambda y: 1e3 * y.square().sum())
    seen = forecast.formats["float16"]
    assert forecast.policy == dataclasses.replace(tritonamp.O2, init_scale=seen.scale)
    assert f"init_scale=2.0**{math.log2(seen.scale):.0f}" in str(forecast)
    (finding,) = forecast.problems
    assert (finding.kind, finding.where) == ("loss scale", "the loss")
    largest = int(math.log2(seen.max_scale))
    assert f"2^{largest} is the largest loss scale that fits: from 2^16 the first" in finding.why
    assert f"{16 - largest} steps are skipped" in finding.why
    assert f"forecast.scaler() start at 2^{largest - 2}" in finding.advice
    lost = {}
    for name, options in {
        "level": {"level": "O2"},
        "policy": {"policy": forecast.policy},
        "scaler": {"level": "O2", "scaler": forecast.scaler()},
        "both": {"policy": forecast.policy, "scaler": forecast.scaler()},
    }.items():
        twin = copy.deepcopy(model)
        optimizer = adamw(twin)
        amp = tritonamp.enable(twin, optimizer, **options)
        while not amp.stats()["steps"]:
            take_step(amp, optimizer, 1e3 * twin(x).square().sum())
        lost[name] = amp.stats()["skipped"]
        amp.disable()
    assert lost == {"level": 16 - largest, "policy": 0, "scaler": 0, "both": 0}


@pytest.mark.parametrize(("factor", "problem"), [(2.0**-9, False), (1.0, True)])
def test_a_loss_scale_below_256_is_a_problem(factor, problem):
    model = nn.Sequential(nn.Linear(4, 1, bias=False))
    model[0].weight.data.fill_(1.0)
    # the largest gradient is 64 times the factor: 2^9 fits it, with a margin 2^7, or 2^9 times that
    forecast = check(model, torch.ones(1, 4), loss_fn=lambda y: y.sum() * 64 * factor)
    assert forecast.formats["float16"].scale == 2.0**7 / factor
    assert [f.kind for f in forecast.problems] == ["loss scale"] * problem
    assert str(forecast).startswith("nothing found") != problem
    assert forecast.scaler().get_scale() == 2.0**7 / factor
    assert not check(model, torch.ones(1, 4), loss_fn=lambda y: y.sum() * 64, dtype=BF16).findings


def test_the_scale_is_that_of_the_cured_model():
    """The largest gradient is inside of the module that has to stay FP32."""
    model = around(Weighted(lambda x: x * 1e-4 * 1e7 * 1e-3))
    x = 300 * torch.randn(4, 16)
    forecast = check(model, x)
    assert forecast.policy.fp32_modules == ("1",)
    again = check(model, x, level=forecast.policy)
    assert forecast.policy.init_scale == again.formats["float16"].scale
    assert forecast.policy.init_scale > forecast.formats["float16"].scale


def test_a_fixed_scale_stays():
    fixed = dataclasses.replace(tritonamp.O2, loss_scale=128.0)
    forecast = check(around(), torch.randn(4, 16), level=fixed)
    assert forecast.policy == fixed
    assert forecast.scaler().get_scale() == 128.0


def test_a_policy_without_mixed_precision_says_so(monkeypatch):
    model, x = OverflowsItself(), 10 * torch.randn(4, 16)
    forecast = check(model, x)
    assert forecast.policy == dataclasses.replace(tritonamp.O2, dtype=BF16, loss_scale=1.0)
    assert "policy: dtype=torch.bfloat16, loss_scale=1.0. tritonamp.enable(" in str(forecast)

    def refuse(dtype, device):
        raise UnsupportedDeviceError("compute capability 7.5")

    monkeypatch.setattr("tritonamp.forecast.cure.check_dtype", refuse)
    forecast = check(model, x)
    assert forecast.policy == tritonamp.O0
    text = " ".join(str(forecast).split())
    assert "policy: FP32: no mixed precision. tritonamp.enable(model, optimizer, policy=" in text
    assert forecast.scaler().get_scale() == 1.0


def test_asking_for_fp32_says_so():
    model = around(Weighted(lambda x: (x - 100).log()))
    text = str(check(model, torch.randn(4, 16), level="O0"))
    assert text.startswith("Sequential in FP32: 1 problem, 0 of advice")
    assert "policy: FP32: no mixed precision, as asked for\n" in text


# The tensors it is built on


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_where_rounding_gives_inf_and_zero(dtype):
    for edge, rounded in ((rounds_to_inf(dtype), float("inf")), (rounds_to_zero(dtype), 0.0)):
        value = torch.tensor(edge)
        inside = torch.nextafter(value, torch.tensor(1.0))
        assert value.to(dtype) == rounded != inside.to(dtype)


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_shares_are_those_of_real_rounding(dtype):
    info = torch.finfo(dtype)
    centre = math.log2(info.smallest_normal)
    # away from powers of two, so that no value sits on the edge between two bins
    values = (
        1.37
        * 2.0 ** torch.randint(int(max(centre - 30, -126)), int(centre) + 30, (10000,)).double()
    )
    values = torch.cat([values.float(), torch.zeros(100)])
    sizes = magnitudes(values)
    half = values.to(dtype)
    assert vanishing(sizes.exponents, dtype) == pytest.approx(
        float((half[:10000] == 0).double().mean())
    )
    subnormal = (half != 0) & (half.abs() < info.smallest_normal)
    assert unrounded.subnormal(sizes.exponents, dtype) == pytest.approx(
        float(subnormal.sum()) / 10000
    )
    assert vanishing(sizes.exponents, dtype, 2.0**6) == pytest.approx(
        float((values[:10000] * 2.0**6).to(dtype).eq(0).double().mean())
    )
    assert (sizes.amax, sizes.amin) == (float(values.max()), float(values[values > 0].min()))
    assert sum(sizes.exponents.values()) == 10000


def test_sizes_of_special_values():
    sizes = magnitudes(torch.tensor([float("inf"), float("nan"), -3.0, 0.5, 0.0, -0.0]))
    assert (sizes.amax, sizes.amin, sizes.largest, sizes.nans) == (3.0, 0.5, 0.5, 1)
    assert sizes.exponents == {1: 1, -1: 1}
    assert magnitudes(torch.zeros(3)).amin == 0.0


def test_unrounded_says_half_and_holds_fp32():
    x = Unrounded(torch.tensor([1e6, 1e-9]), FP16)
    for y, expected in (
        (x * 2, [2e6, 2e-9]),
        (x.float() + 1, [1e6 + 1, 1.0]),
        (x[:1].add_(1), [1e6 + 1]),
    ):
        values = y.values if isinstance(y, Unrounded) else y
        assert torch.equal(values, torch.tensor(expected))
    assert (x * 2).dtype is FP16
    assert (x * torch.ones(2)).dtype is torch.float32
    assert (x + torch.ones(())).dtype is FP16
    assert x.values[0] == 1e6 + 1  # written through the view
    assert "1.0000e+06" in repr(x)
    # what CUDA makes of softmax(dtype=torch.float32)
    assert torch.ops.aten._softmax(x, 0, True).dtype is torch.float32


class Doubling(nn.Module):
    """The same addition overflows again and again, on one line."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Sums()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        for _ in range(20):
            h = h + h
        return h / 1e6


def test_an_operation_that_overflows_again_in_a_loop_is_one_problem() -> None:
    torch.manual_seed(0)
    model = Doubling()
    forecast = tritonamp.check(model, torch.optim.AdamW(model.parameters()), (torch.randn(2, 4),))
    assert [finding.kind for finding in forecast.problems] == ["overflow"]
    assert forecast.policy.fp32_modules == ("body",)


def test_one_model_at_a_time() -> None:
    with pytest.raises(
        ValueError,
        match=r"model: expected one torch.nn.Module, got list: check models one by one",
    ):
        tritonamp.check([nn.Linear(2, 2)], None, (torch.ones(1, 2),))  # type: ignore[arg-type]


def test_the_call_of_check_is_no_line_of_the_model():
    model = nn.Sequential(nn.Linear(4, 4))
    nn.init.constant_(model[0].weight, 3e4)
    (found,) = tritonamp.check(model, None, (torch.ones(2, 4),)).problems
    assert (found.kind, found.where, found.line) == ("overflow", "0", "")
