"""check(): inf and NaN in FP32 already, zeros of a softmax, and advice that was tried."""

import math

import pytest
import torch
import torch.nn.functional as F
from small_models import Apply, around
from torch import Tensor, nn

import tritonamp

INF = math.inf


def check(model, x, loss_fn=None, **kwargs):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return tritonamp.check(model, optimizer, (x,), loss_fn, **kwargs)


def squares(output: Tensor) -> Tensor:
    return output.float().square().mean()


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


CLAMP, DIVISOR = "clamp the argument:", "in place of the divisor d"
# (function, op, result, advice that was tried)
BROKEN = {
    "exp": (lambda x: torch.exp(x * 400), "exp", "inf", f"{CLAMP} exp(x.clamp(max=10))"),
    "expm1": (lambda x: torch.expm1(x * 400), "expm1", "inf", f"{CLAMP} expm1(x.clamp(max=10))"),
    "log": (lambda x: torch.log(x.relu()), "log", "-inf", f"{CLAMP} log(x.clamp(min=1e-06))"),
    "log2": (lambda x: x.relu().log2(), "log2", "-inf", f"{CLAMP} log2(x.clamp(min=1e-06))"),
    "negative log": (lambda x: x.log(), "log", "NaN", f"{CLAMP} log(x.clamp(min=1e-06))"),
    "1 / x": (
        lambda x: 1 / x.relu(), "reciprocal", "inf",
        f"write torch.where(d == 0, 0.001, d) {DIVISOR}",
    ),
    "y / x": (
        lambda x: (x + 1) / (1e2 * x.relu()), "div", "inf",
        f"write torch.where(d == 0, 0.01, d) {DIVISOR}",
    ),
    "rsqrt": (lambda x: x.relu().rsqrt(), "rsqrt", "inf", f"{CLAMP} rsqrt(x.clamp(min=1e-06))"),
    "pow": (lambda x: x.relu().pow(-0.5), "pow", "inf", f"{CLAMP} pow(x.clamp(min=1e-06))"),
    "large pow": (lambda x: (x.abs() * 1e3).pow(20), "pow", "inf", ""),
    "prod": (lambda x: (1e4 * x).cumprod(-1), "cumprod", "inf", ""),
    "log1p": (lambda x: (x - 1).log1p(), "log1p", "NaN", f"{CLAMP} log1p(x.clamp(min=-0.999999))"),
    "exp_": (lambda x: (x * 400).exp_(), "exp", "inf", f"{CLAMP} exp(x.clamp(max=10))"),
    "normalize": (
        lambda x: F.normalize(x * 0, dim=-1, eps=0.0) + x, "div", "NaN",
        "write normalize(..., eps=1e-06)",
    ),
    "acos": (
        lambda x: torch.acos(4 * x), "acos", "NaN", f"{CLAMP} acos(x.clamp(-1 + 1e-06, 1 - 1e-06))",
    ),
    "slope": (lambda x: (x * 0).sqrt() + x, "sqrt", "", f"{CLAMP} sqrt(x.clamp(min=0.001))"),
}  # fmt: skip


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", BROKEN)
def test_the_origin_is_named_and_not_the_layers_behind_it(name, level):
    function, op, result, tried = BROKEN[name]
    model, x = around(Apply(function)), torch.randn(8, 16)
    forecast = check(model, x, squares, level=level)
    (problem,) = forecast.problems
    assert (problem.kind, problem.where) == ("non-finite", "1")
    assert problem.line.startswith("tests/forecast/test_non_finite.py:")
    if result:
        assert problem.why.startswith(f"{op} gives {result}")
    else:
        assert problem.why.startswith(f"div in backward of {op} gives inf")
    assert forecast.policy == forecast.asked
    assert str(forecast).endswith("the policy was not run: the batch is not finite in FP32 either")
    if tried:
        assert problem.advice == f"{tried} (tried: no problem is left)"
    else:
        assert problem.advice.endswith("(not tried: it changes the code)")


def test_the_next_layer_makes_nan_of_it():
    (problem,) = check(around(Apply(lambda x: torch.exp(x * 400))), torch.randn(8, 16)).problems
    assert problem.why == "exp gives inf in FP32 already, and linear makes NaN of it"


HIDDEN = torch.ones(5, 5, dtype=torch.bool).triu(1)


def log_of_a_mask(scores: Tensor) -> Tensor:
    return (scores + (~HIDDEN).float().log()).softmax(-1)


ON_PURPOSE = {
    "masked_fill": lambda s: s.masked_fill(HIDDEN, -INF).softmax(-1),
    "masked_fill in place": lambda s: s.clone().masked_fill_(HIDDEN, -INF).softmax(-1),
    "where": lambda s: torch.where(HIDDEN, -INF, s).softmax(-1),
    "log of a mask": log_of_a_mask,
    "max": lambda s: s.masked_fill(HIDDEN, -INF).amax(-1, keepdim=True) + s,
    "logsumexp": lambda s: s.masked_fill(HIDDEN, -INF).logsumexp(-1, keepdim=True) + s,
    "nan_to_num": lambda s: (s / torch.zeros(5)).nan_to_num(0, 0, 0).detach() + s,
    "tanh": lambda s: torch.tanh(s.detach() * INF) + s,
    "one over inf": lambda s: s + 1 / torch.full((5,), INF),
}


class Scores(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x @ x.mT) @ x


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", ON_PURPOSE)
def test_inf_that_ends_in_a_finite_result_is_no_problem(name, level):
    model = around(Scores(ON_PURPOSE[name]))
    assert not check(model, torch.randn(2, 5, 16), squares, level=level).findings


def test_a_fault_behind_a_mask_is_not_the_mask():
    def scores(s):
        weights = s.masked_fill(HIDDEN, -INF)
        return (400 * weights).exp()

    (problem,) = check(around(Scores(scores)), torch.randn(2, 5, 16), squares).problems
    assert problem.why.startswith("exp gives inf")
    assert problem.advice == "clamp the argument: exp(x.clamp(max=10)) (tried: no problem is left)"


def test_a_mask_that_is_added_to_a_fault_is_not_the_fault():
    scores = Scores(lambda s: (s.masked_fill(HIDDEN, -INF) + (400 * s).exp()).softmax(-1))
    (problem,) = check(around(scores), torch.randn(2, 5, 16), squares).problems
    assert problem.why.startswith("exp gives inf")


@pytest.mark.parametrize("softmax", [torch.softmax, F.softmax, F.log_softmax])
def test_a_row_without_scores(softmax):
    hidden = HIDDEN | (torch.arange(5) == 3)[:, None]
    model = around(Scores(lambda s: softmax(s.masked_fill(hidden, -INF), dim=-1).exp()))
    (problem,) = check(model, torch.randn(2, 5, 16), squares).problems
    assert problem.why == (
        f"{softmax.__name__} gives NaN in FP32 already, because every score of a row is -inf"
    )
    assert problem.advice == (
        "write zeros over rows that are masked completely, before the softmax: "
        "torch.where((x == -torch.inf).all(-1, keepdim=True), 0, x) (tried: no problem is left)"
    )


def test_ctc_of_targets_that_are_too_long():
    def ctc(y):
        lengths = torch.full((4,), 2), torch.full((4,), 3)
        return F.ctc_loss(y.log_softmax(-1).expand(2, 4, 8), torch.ones(4, 3).long(), *lengths)

    (problem,) = check(around(), torch.randn(4, 16), ctc).problems
    assert problem.why == "ctc_loss gives inf in FP32 already"
    assert problem.advice == "pass zero_infinity=True to ctc_loss (tried: no problem is left)"


def test_a_loss_of_ignored_targets():
    nothing = torch.full((4,), -100)
    (problem,) = check(around(), torch.randn(4, 16), lambda y: F.cross_entropy(y, nothing)).problems
    assert problem.why == "nll_loss_forward gives NaN in FP32 already"
    assert problem.advice == (
        "write cross_entropy(..., reduction='sum') divided by the number of targets that count, at "
        "least 1 (tried: no problem is left)"
    )


def test_inf_that_is_written_into_what_a_layer_reads():
    infs = torch.full((4, 8), INF)
    for value, why, advice in (
        (lambda x: torch.full_like(x, INF), "full_like gives inf", "leave inf to a softmax or a"),
        (lambda x: infs.clone(), "clone is given inf", "write finite numbers into what it reads"),
    ):
        model = around(Apply(lambda x, value=value: torch.cat([x[:, :8], value(x[:, 8:])], 1)))
        (problem,) = check(model, torch.randn(4, 16), squares, level="O0").problems
        assert problem.why.startswith(f"{why} in FP32 already")
        assert problem.advice.startswith(advice)


def test_a_loss_in_float64():
    model = around(Apply(lambda x: x.exp()))
    found = check(model, torch.randn(4, 16), lambda y: y.double().mean() / 0).problems
    assert [(f.kind, f.where) for f in found] == [("non-finite", "the loss")]
    assert found[0].why.startswith("the loss is ") and "in FP32 already" in found[0].why


def test_a_patch_that_leaves_the_fault_is_not_advised():
    """The division is mended, and the power behind it is not."""
    model = around(Apply(lambda x: 1 / x.relu()), Apply(lambda x: (1e3 * x).pow(20)))
    (problem,) = check(model, torch.randn(4, 16), squares, level="O0").problems
    assert (problem.where, problem.why[:15]) == ("1", "reciprocal give")
    assert problem.advice.endswith("(tried: it helps; non-finite in 2 is left)")


def test_a_patch_that_leaves_other_problems_says_so():
    (problem,) = check(
        around(Apply(lambda x: (x + 9) / x.relu())), torch.randn(8, 16), squares
    ).problems
    assert problem.advice == (
        f"write torch.where(d == 0, 0.001, d) {DIVISOR} (tried: it helps; overflow in 1 is left)"
    )


def test_a_loss_that_is_inf():
    (problem,) = check(around(), torch.randn(4, 16), lambda y: 1 / (y.sum() * 0)).problems
    assert (problem.kind, problem.where) == ("non-finite", "the loss")
    assert problem.why == "reciprocal gives inf in FP32 already"


# Zeros of a softmax


class Probabilities(nn.Module):
    """A sharp softmax, in half, and what the model does with it."""

    def __init__(self, sharpness=10.0, reads=lambda p: p):
        super().__init__()
        self.body, self.sharpness, self.reads = nn.Linear(16, 8), sharpness, reads

    def forward(self, x):
        return self.reads((self.sharpness * self.body(x)).softmax(-1))


def mean_log(p: Tensor) -> Tensor:
    return -p.log().mean()


LOG_SOFTMAX = "write log_softmax(x, dim) in place of log(softmax(x, dim))"
BEHIND = {  # what the loss does with probabilities, and the code that is advised
    "log": (mean_log, LOG_SOFTMAX),
    "log2": (lambda p: p.log2().mean(), LOG_SOFTMAX),
    "entropy": (lambda p: -(p * p.log()).sum(-1).mean(), LOG_SOFTMAX),
    "division": (lambda p: (1 / p).log().mean(), "clamp the divisor d: d.clamp(min=1e-06)"),
}


@pytest.mark.parametrize("name", BEHIND)
@pytest.mark.parametrize("inside", [True, False])
def test_zeros_of_a_softmax(name, inside):
    function, code = BEHIND[name]
    model, x = Probabilities(reads=function if inside else lambda p: p), torch.randn(8, 16)
    loss_fn = (lambda y: y) if inside else function
    forecast = check(model, x, loss_fn)
    (finding,) = (f for f in forecast.problems if f.kind == "softmax")
    if name == "division" and not inside:  # FP32 there, so the 0 that it compares with is exact
        code = f"write torch.where(d == 0, 1e-06, d) {DIVISOR}"
    assert finding.where == ("" if inside else "the loss")
    assert "a probability of a softmax that is zero in float16" in finding.why
    policy = "forecast.policy, softmax_dtype=torch.float32 (tried: the batch fits)"
    assert finding.advice == f"{policy}. Or {code} (tried: no problem is left)"
    assert forecast.policy.softmax_dtype is torch.float32
    assert forecast.policy.fp32_modules == () and forecast.policy.dtype is torch.float16
    assert forecast.rehearsal.went_well


def test_an_eps_behind_a_softmax():
    model = Probabilities(reads=lambda p: (p + 1e-8).log())
    forecast = check(model, 2 * torch.randn(8, 16), lambda y: -y.mean())
    finding = next(f for f in forecast.problems if f.kind == "softmax")
    assert "softmax_dtype=torch.float32 (tried: the batch fits)" in finding.advice
    # without the eps, which log_softmax does not need
    assert f"{LOG_SOFTMAX} (tried: no problem is left)" in finding.advice
    assert forecast.policy.softmax_dtype is torch.float32


def test_a_softmax_that_is_zero_in_fp32_as_well():
    model = Probabilities(sharpness=300.0)
    (problem,) = check(model, 2 * torch.randn(8, 16), mean_log).problems
    assert problem.why == "log gives -inf in FP32 already"
    assert problem.advice == f"{LOG_SOFTMAX} (tried: no problem is left)"


def test_a_softmax_outside_of_the_model():
    """No policy reaches it, but for bfloat16, which holds smaller probabilities."""
    half = tritonamp.policy.resolve("O2", cast_outputs=None)
    forecast = check(
        nn.Linear(16, 8), 8 * torch.randn(8, 16), lambda y: mean_log(y.softmax(-1)), level=half
    )
    finding = next(f for f in forecast.problems if f.kind == "softmax")
    assert forecast.policy.dtype is torch.bfloat16
    assert "dtype=torch.bfloat16, loss_scale=1.0 (tried: the batch fits)" in finding.advice
    assert f"{LOG_SOFTMAX} (tried: no problem is left)" in finding.advice


def test_a_softmax_without_zeros_is_no_problem():
    assert not check(Probabilities(0.1), torch.randn(8, 16), mean_log).findings


def test_advice_for_the_models_own_forward_is_tried():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(16, 16)

        def forward(self, x):
            y = 300 * self.inner(x)
            return (y * y).mean(-1, keepdim=True).sqrt()

    (first, *_) = check(Own(), 10 * torch.randn(4, 16)).problems
    edit = "write with tritonamp.disable_casts(): mul(x.float(), y.float())"
    assert f"{edit} (tried: no problem is left)" in first.advice


CODE = {  # of the model's own forward, and the edit that is advised
    "eps": (lambda x: x / (x.abs() + 1e-8), "take a larger eps: 0.0001 in place of 1e-08"),
    "constant": (
        lambda x: (x + (x > 1).to(x.dtype) * -1e9).softmax(-1),
        "write torch.finfo(x.dtype).min in place of -1e+09",
    ),
}


@pytest.mark.parametrize("name", CODE)
def test_a_number_that_half_cannot_hold_is_edited(name):
    function, edit = CODE[name]

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(16, 8)

        def forward(self, x):
            return function(self.inner(x))

    forecast = check(Own(), torch.randn(8, 16))
    (finding,) = (f for f in forecast.problems if f.kind == name)
    assert f"{edit} (tried: no problem is left)" in finding.advice


def test_every_advice_says_whether_it_was_tried():
    model = around(Apply(lambda x: x * x), Apply(lambda x: x / (x + 1e-8)), nn.LayerNorm(16))
    for finding in check(model, 1e3 * torch.randn(4, 16)).findings:
        assert "tried: " in finding.advice
