"""Edits that a replay tries: each does to a call what its words say."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import tritonamp
from tritonamp.diagnosis.replay.edits import edits_for, edits_of
from tritonamp.diagnosis.replay.faults import FaultReport
from tritonamp.diagnosis.replay.search import find_fault
from tritonamp.diagnosis.replay.user_calls import Patch, Site
from tritonamp.diagnosis.replay.verdicts import Event, OpInput
from tritonamp.watched.places import Place

HALF, FULL = torch.float16, torch.float32


def edits(
    function: Any, kind: str = "unknown", phase: str = "forward", op: str = "", **fields: Any
) -> dict[str, Patch]:
    """Return the edits for a fault in a call of a function, by their words."""
    place = Place("block", "Block", op or function.__name__.strip("_"), "f.py", 1, function)
    dtype = fields.pop("dtype", FULL)
    event = Event(place, phase, dtype, **fields)
    return {patch.words: patch for patch in edits_for(FaultReport(kind, event))}


def applied(patch: Patch, function: Any, *args: Any, **kwargs: Any) -> Any:
    (site,) = patch.changes
    result = patch(site, function, args, kwargs)
    assert patch.used
    return result


X = torch.tensor([[-2.0, 0.0, 0.5, 1.0], [3.0, 1.0, 0.0, 2.0]])
MASKED = torch.tensor([[-math.inf, -math.inf], [-math.inf, 1.0]])
Y = torch.tensor([-100, -100])
LOSS = "write cross_entropy(..., reduction='sum') divided by the number of targets that count"

CASES: list[tuple[Any, str, Callable[[], Any], tuple[Any, ...], dict[str, Any]]] = [
    (torch.log, "clamp the argument: log(x.clamp(min=1e-06))",
     lambda: torch.log(X.clamp(min=1e-6)), (X,), {}),
    (Tensor.log1p, "clamp the argument: log1p(x.clamp(min=-0.999999))",
     lambda: torch.log1p(X.clamp(min=-0.999999)), (X,), {}),
    (torch.sqrt, "clamp the argument: sqrt(x.clamp(min=0.001))",
     lambda: torch.sqrt(X.clamp(min=1e-3)), (X,), {"dtype": HALF}),
    (torch.acosh, "clamp the argument: acosh(x.clamp(min=1.001))",
     lambda: torch.acosh(X.clamp(min=1.001)), (X,), {}),
    (torch.acos, "clamp the argument: acos(x.clamp(-1 + 1e-06, 1 - 1e-06))",
     lambda: torch.acos(X.clamp(-1 + 1e-6, 1 - 1e-6)), (X,), {}),
    (torch.logit, "write logit(x, eps=0.001)", lambda: torch.logit(X, eps=1e-3), (X,), {}),
    (Tensor.__truediv__, "write torch.where(d == 0, 1e-06, d) in place of the divisor d",
     lambda: X / torch.where(X == 0, 1e-6, X), (X, X), {}),
    (Tensor.__rtruediv__, "clamp the divisor d: d.clamp(min=0.001)",
     lambda: 1.0 / X.abs().clamp(min=1e-3), (X.abs(), 1.0), {}),
    (torch.div, "write torch.where(d.abs() < 0.001, 0.001, d) in place of the divisor d",
     lambda: X / torch.where(X.abs() < 1e-3, 1e-3, X), (X, X), {"dtype": HALF}),
    (torch.div, "clamp the divisor d: d.clamp(min=0.01)",
     lambda: X / X.abs().clamp(min=1e-2), (X, X.abs()), {"dtype": HALF, "exact": 1e5}),
    (torch.atan2, "write torch.where(x == 0, 1e-06, x) in place of the second argument x",
     lambda: torch.atan2(X, torch.where(X == 0, 1e-6, X)), (X, X), {"phase": "backward"}),
    (torch.exp, "clamp the argument: exp(x.clamp(max=10))",
     lambda: (X * 9).clamp(max=10).exp(), (X * 9,),
     {"dtype": HALF}),
    (torch.exp, "if it is a softmax by hand, subtract the maximum of each sum first, here of dim "
     "-1: "
     "exp(x - x.amax(-1, keepdim=True))",
     lambda: (X - X.amax(-1, keepdim=True)).exp(), (X,), {}),
    (torch.special.i0, "clamp the argument: special_i0(x.clamp(-80, 80))",
     lambda: torch.special.i0((X * 99).clamp(-80, 80)), (X * 99,), {}),
    (torch.matmul, "scale the first factor of matmul, and so its result, by 2^-3",
     lambda: (X * 2.0**-3) @ X.mT, (X, X.mT), {"dtype": HALF, "exact": 4 * 65504.0}),
    (torch.cumsum, "sum in FP32: cumsum(dtype=torch.float32)",
     lambda: X.cumsum(-1), (X.half(), -1), {"dtype": HALF, "exact": 1e5}),
    (torch.softmax, "write zeros over rows that are masked completely, before the softmax: "
     "torch.where((x == -torch.inf).all(-1, keepdim=True), 0, x)",
     lambda: torch.tensor([[0.5, 0.5], [0.0, 1.0]]), (MASKED, -1), {"masked": True}),
    (torch.add, "write torch.finfo(x.dtype).min in place of -1e+09",
     lambda: X.half() + torch.finfo(HALF).min, (X.half(), -1e9),
     {"dtype": HALF, "scalars": (-1e9,)}),
    (torch.mul, "write torch.where(mask != 0, -torch.inf, 0), which is masked_fill, for mask "
     "* -inf",
     lambda: torch.zeros(2, 4).masked_fill(X > 1, -math.inf), (X > 1, -math.inf),
     {"constant": True}),
    (torch.mul, "write torch.where(p == 0, 0, x) in place of the infinite factor x of p * x",
     lambda: torch.tensor([[0.0, 0.0], [0.0, 0.25]]), (MASKED.exp().clamp(max=0.25), MASKED),
     {"constant": True}),
    (torch.mul, "write torch.where(p == 0, 0, x) in place of the infinite factor x of p * x",
     lambda: torch.tensor([[0.0, 0.0], [0.0, 0.25]]), (MASKED, MASKED.exp().clamp(max=0.25)),
     {"constant": True}),
    (torch.sub, "write torch.finfo(x.dtype).min in place of -inf",
     lambda: MASKED.clamp(min=torch.finfo(FULL).min) - 1.0, (MASKED, 1.0), {"constant": True}),
    (F.normalize, "write normalize(..., eps=0.001)",
     lambda: F.normalize(X * 1e-5, dim=-1, eps=1e-3), (X * 1e-5,),
     {"phase": "backward", "op": "div", "dim": -1}),
    (torch.std, "write std(..., correction=0)",
     lambda: torch.tensor([[5.0]]).std(0, correction=0), (torch.tensor([[5.0]]), 0), {}),
    (torch.std, "write (x.var(...) + 1e-6).sqrt() in place of std",
     lambda: (X.var(-1) + 1e-6).sqrt(), (X, -1), {"phase": "backward"}),
    (torch.linalg.vector_norm, "write (x.square().sum(...) + 1e-6).sqrt() in place of the norm",
     lambda: (X.square().sum(-1, True) + 1e-6).sqrt(), (X, 2, -1, True), {"phase": "backward"}),
    (torch.mean, "write x.sum() / max(x.numel(), 1) in place of mean, which is 0/0 where x is "
     "empty", lambda: torch.tensor(0.0), (X[:0],), {"nan": True}),
    (F.cross_entropy, f"{LOSS}, at least 1", lambda: torch.tensor(0.0), (X, Y), {"nan": True}),
    (F.ctc_loss, "pass zero_infinity=True to ctc_loss", lambda: torch.tensor(0.0),
     (X[:, None].log_softmax(-1), torch.tensor([[1, 1, 1]]), torch.tensor([2]), torch.tensor([3])),
     {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("function", "words", "expected", "args", "fields"), CASES, ids=[c[1][:60] for c in CASES]
)
def test_an_edit_does_what_its_words_say(
    function: Any, words: str, expected: Any, args: Any, fields: dict[str, Any]
) -> None:
    kwargs = {key: fields[key] for key in ("dim",) if key in fields}
    found = edits(function, **{k: v for k, v in fields.items() if k not in kwargs})
    torch.testing.assert_close(
        applied(found[words], function, *args, **kwargs), expected(), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("inside", [True, False])
def test_an_edit_computes_a_call_in_fp32(inside: bool) -> None:
    place = Place("block" if inside else None, "", "mul", "f.py", 1, torch.mul)
    fault = FaultReport("overflow", Event(place, "forward", HALF, exact=1e5))
    (patch,) = [p for p in edits_for(fault) if "float()" in p.words]
    call = "mul(x.float())"
    assert patch.words == f"write {'with tritonamp.disable_casts(): ' if inside else ''}{call}"
    result = applied(patch, torch.mul, torch.full((2,), 300.0).half(), 1000.0)
    assert result.dtype is FULL and result.tolist() == [300000.0] * 2


@pytest.mark.parametrize(
    ("tensors", "fields", "arguments"),
    [
        (2, {}, "x.float(), y.float()"),
        (1, {"scalars": (10.0,)}, "x.float(), ..."),
        (4, {}, "x.float(), y.float(), z.float(), ..."),
        (2, {"phase": "backward"}, "x.float()"),
        (2, {"maker": Place("block", "", "mul", "f.py", 1, torch.mul)}, "x.float()"),
    ],
    ids=str,
)
def test_a_call_in_fp32_is_written_with_all_its_arguments(
    tensors: int, fields: dict[str, Any], arguments: str
) -> None:
    """So that it runs as it is printed: a square has two arguments."""
    place = Place("block", "", "mul", "f.py", 1, torch.mul)
    inputs = (OpInput(HALF, (2,), 300.0),) * tensors
    event = Event(place, **{"phase": "forward", "dtype": HALF, "inputs": inputs, **fields})
    words = [p.words for p in edits_of(event, in_fp32=True)]
    assert f"write with tritonamp.disable_casts(): mul({arguments})" in words


@pytest.mark.parametrize(
    ("function", "args"),
    [(torch.log, (0.5,)), (F.normalize, (X, 2.0, -1, 1e-12))],
    ids=["no tensor", "by position"],
)
def test_a_call_that_cannot_be_changed_so_runs_as_it_is(function: Any, args: Any) -> None:
    found = edits(function, op=function.__name__.strip("_"))
    ran: list[Any] = []
    for patch in found.values():
        if "disable_casts" in patch.words:
            continue

        def run(*given: Any, **kwargs: Any) -> str:
            if kwargs:
                raise TypeError
            ran.append(given)
            return "as it is"

        run.__name__ = function.__name__
        (site,) = patch.changes
        assert patch(site, run, args, {}) == "as it is" and not patch.used
    assert ran


@pytest.mark.parametrize(
    ("function", "args", "words", "expected"),
    [
        (
            Tensor.log_,
            (),
            "clamp the argument: log(x.clamp(min=1e-06))",
            lambda y: y.clamp(1e-6).log(),
        ),
        (
            Tensor.div_,
            (X.abs(),),
            "clamp the divisor d: d.clamp(min=0.001)",
            lambda y: y / X.abs().clamp(1e-3),
        ),
    ],
    ids=["log_", "div_"],
)
def test_an_edited_call_in_place_writes_to_its_tensor(
    function: Any, args: Any, words: str, expected: Callable[[Tensor], Tensor]
) -> None:
    x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
    given = x * 2
    patch = edits(function, op=function.__name__.strip("_"))[words]
    assert applied(patch, function, given, *args) is given
    wanted = expected(y * 2)
    torch.testing.assert_close(given, wanted, rtol=0, atol=0)
    for result in (given, wanted):
        result.sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("function", "words", "args", "fields"),
    [
        (torch.div, "clamp the divisor d: d.clamp(min=0.001)", (X, X), {}),
        (
            torch.mul,
            "write torch.where(mask != 0, -torch.inf, 0), which is masked_fill, for mask * -inf",
            (MASKED.exp(), MASKED),
            {"constant": True},
        ),
    ],
    ids=["a divisor on both sides of 0", "a factor that is no mask"],
)
def test_an_edit_that_changes_other_values_is_not_tried(
    function: Any, words: str, args: Any, fields: dict[str, Any]
) -> None:
    patch = edits(function, **fields)[words]
    (site,) = patch.changes
    result = patch(site, function, args, {})
    assert not patch.used
    torch.testing.assert_close(result, function(*args), rtol=0, atol=0, equal_nan=True)


def test_only_an_exponential_may_be_a_softmax_by_hand() -> None:
    for function, may in ((torch.exp, True), (torch.exp2, True), (torch.cosh, False)):
        assert any("softmax by hand" in words for words in edits(function)) is may


def test_a_softmax_that_something_divides_by_is_clamped() -> None:
    softmax = Place("block", "Block", "softmax", "f.py", 1, torch.softmax)
    found = edits(torch.div, "softmax_zero", softmax=softmax, zero=True)
    patch = found["clamp the result of softmax at f.py:1: softmax(x, dim).clamp(min=1e-06)"]
    result = applied(patch, torch.softmax, 100 * X, -1)
    assert torch.equal(result, torch.softmax(100 * X, -1).clamp(min=1e-6))
    assert not any("clamp the result" in words for words in edits(torch.log, softmax=softmax))


class Log(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(torch.relu(self.layer(x)))


class Checkpointed(nn.Module):
    """The backward computes the logarithm again."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.layer, self.log, self.use_reentrant = nn.Linear(2, 2), Log(), use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.log, self.layer(x), use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_segment_that_is_computed_again_is_edited_again(use_reentrant: bool) -> None:
    model = Checkpointed(use_reentrant)
    nn.init.constant_(model.log.layer.bias, -9.0)
    with tritonamp.enable(model, level="O1") as amp:
        report = amp.explain(replay=lambda: model(torch.ones(1, 2)).sum())
    assert "log(x.clamp(min=1e-06)) (tried: the batch passes)" in report
    assert not torch.overrides._get_current_function_mode_stack(), "the mode has left"


class Gaussian(nn.Module):
    """A deviation of 0: ``log_prob`` of torch takes its logarithm."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        mean = self.layer(x)
        return torch.distributions.Normal(mean, 0.0 * mean, validate_args=False).log_prob(x)


def test_a_call_inside_of_a_distribution_is_not_edited() -> None:
    model = Gaussian()
    with tritonamp.enable(model, level="O1") as amp:
        report = amp.explain(replay=lambda: model(torch.ones(1, 2)).sum())
    called = r"\w+ is called in torch/distributions/\w+.py:\d+"
    assert re.search(rf"validate_args=False\).log_prob\(x\)  \({called}\)\n", report)
    assert "clamp(min" not in report and "torch.where(" not in report


def test_a_composite_of_torch_is_not_edited_as_the_op_inside_it() -> None:
    """The first argument of ``F.normalize`` is not the divisor that the op inside reads."""
    words = " ".join(edits(F.normalize, "zero_by_zero", op="div", nan=True))
    assert "divisor" not in words and "clamp" not in words


def test_only_the_calls_on_the_line_and_in_the_module_are_edited() -> None:
    site = Site.of(Place("a", "A", "log", "f.py", 1, torch.log))
    patch = Patch("", {site: lambda function, args, kwargs: "edited"})
    for other in (
        Place("b", "A", "log", "f.py", 1, torch.log),
        Place("a", "A", "log", "f.py", 2, torch.log),
        Place("a", "A", "log", "f.py", 1, torch.log2),
    ):
        assert patch(Site.of(other), torch.ones, (1,), {}).tolist() == [1.0] and not patch.used
    assert patch(site, torch.log, (X,), {}) == "edited" and patch.used


class Probabilities(nn.Module):
    def __init__(self, log: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.log = log

    def forward(self, x: Tensor) -> Tensor:
        p = torch.softmax(self.linear(x) * 400, -1)
        return self.log(p).float().mean()


CHOSEN = torch.tensor([[0], [1], [2], [3]] * 2)


@pytest.mark.parametrize(
    ("log", "of_logs"),
    [
        (lambda p: p.log(), lambda logs: logs),
        (lambda p: torch.log2(p.float()), lambda logs: logs / math.log(2)),
        (
            lambda p: (p[:, :2].contiguous() + 1e-8).log10(),
            lambda logs: logs[:, :2] / math.log(10),
        ),
        (lambda p: torch.log(p.gather(1, CHOSEN)), lambda logs: logs.gather(1, CHOSEN)),
        (lambda p: p.detach().t().diagonal().log(), lambda logs: logs.t().diagonal()),
    ],
    ids=["log", "log2 of a cast", "log10 of a choice with eps", "gather", "diagonal"],
)
def test_the_logarithm_of_a_softmax_becomes_log_softmax(log: Any, of_logs: Any) -> None:
    torch.manual_seed(0)
    model, x = Probabilities(log), torch.randn(8, 4)
    scores = model.linear(x) * 400
    amp = tritonamp.enable(model, level="O2", fuse_ops=False)
    fault = find_fault(model, lambda: model(x))
    assert fault is not None and fault.kind == "softmax_zero"
    patch = next(iter(edits_for(fault)))
    assert patch.words == "write log_softmax(x, dim) in place of log(softmax(x, dim))"
    results: list[Tensor] = []
    assert find_fault(model, lambda: results.append(model(x)) or results[0], patch=patch) is None
    amp.disable()
    assert patch.used
    # float16 rounds the linear's result, of which 400 times is the score: 4 half ulps
    torch.testing.assert_close(
        results[0], of_logs(torch.log_softmax(scores, -1)).mean(), rtol=2.0**-9, atol=0
    )


def masked_in_place(p: Tensor) -> Tensor:
    p = p.detach().clone()
    p[:, 0] = 0
    return p.log()


@pytest.mark.parametrize(
    "log",
    [
        lambda p: (p + torch.zeros_like(p)).log(),
        lambda p: p.clamp(max=0.5).log(),
        masked_in_place,
    ],
    ids=["sum with a tensor", "clamp", "written to"],
)
def test_other_logarithms_do_not_become_log_softmax(log: Any) -> None:
    torch.manual_seed(0)
    model, x = Probabilities(log), torch.randn(8, 4)
    with tritonamp.enable(model, level="O2", fuse_ops=False):
        fault = find_fault(model, lambda: model(x))
        assert fault is not None and fault.event.softmax is not None
        (patch,) = [p for p in edits_for(fault) if "log_softmax" in p.words]
        assert find_fault(model, lambda: model(x), patch=patch) is not None
    assert not patch.used


def test_softmin_does_not_become_log_softmax() -> None:
    model, x = nn.Linear(4, 4), 400 * torch.randn(8, 4)
    with tritonamp.enable(model, level="O2"):

        def run() -> Tensor:
            return F.softmin(model(x).half(), -1).log().mean()

        fault = find_fault(model, run)
        assert fault is not None
        (patch,) = [p for p in edits_for(fault) if "log_softmax" in p.words]
        assert find_fault(model, run, patch=patch) is not None
    assert not patch.used


@pytest.mark.parametrize("function", [F.normalize, F.group_norm, torch.renorm])
def test_what_is_no_norm_is_not_replaced_by_one(function: Any) -> None:
    found = edits(function, "small_divisor", "backward", op="div")
    assert not any("in place of the norm" in words for words in found)


@pytest.mark.parametrize("function", [torch.norm, Tensor.norm, torch.linalg.vector_norm])
def test_a_norm_is_replaced_by_squares(function: Any) -> None:
    found = edits(function, "backward_nan", "backward")
    assert any("in place of the norm" in words for words in found)


def test_an_edit_names_each_call_of_its_line(device: torch.device) -> None:
    """It was tried on all of them, and one alone is in vain."""

    def entropy(p: Tensor) -> Tensor:
        return -(p * torch.log(p) + (1 - p) * torch.log(1 - p)).mean()

    def one(p: Tensor) -> Tensor:
        return torch.log(1 - p).mean()  # and not log(p)

    model = nn.Linear(4, 4).to(device)
    x = torch.full((2, 4), 1e6, device=device)
    clamp = "clamp the argument: log(x.clamp(min=1e-06))"
    for loss, words in ((entropy, f"{clamp}, in each log of this line"), (one, clamp)):
        fault = find_fault(model, lambda loss=loss: loss(model(x).sigmoid()))
        assert fault is not None
        assert words in [patch.words for patch in edits_for(fault)]
