"""check(compare=): where two levels part, by how much, and what does not count as parting."""

import math

import pytest
import torch
from runs import batch
from small_models import Apply, LlamaRMSNorm, around
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tritonamp
from tritonamp.forecast.results import Reference
from tritonamp.forecast.ulps import PARTS, ROUNDED, ulps_between

FP16, BF16 = torch.float16, torch.bfloat16
EPS = {FP16: 2.0**-10, BF16: 2.0**-7}

both_formats = pytest.mark.parametrize("dtype", [FP16, BF16], ids=["float16", "bfloat16"])


def target_loss(output: Tensor) -> Tensor:
    """A loss whose gradient does not vanish behind a norm, and whose terms do not cancel."""
    weights = torch.linspace(-1, 1, output.numel()).view_as(output).sin()
    return (output.float() - weights).square().mean()


def compare(model, x, loss_fn=target_loss, level="O2", reference="O0", **kwargs):
    forecast = tritonamp.check(model, None, (x,), loss_fn, level=level, compare=reference, **kwargs)
    assert forecast.comparison is not None
    return forecast.comparison


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


# The unit


@both_formats
@pytest.mark.parametrize("size", [2.0**-3, 1.0, 1000.0])
def test_an_ulp_is_eps_of_the_root_mean_square(dtype, size):
    reference = size * torch.tensor([1.0, -1.0, 1.0, -1.0])
    result = reference + size * EPS[dtype] * torch.tensor([4.0, 0.0, 0.0, 0.0])
    assert ulps_between(result, reference, dtype) == pytest.approx((2.0, 4.0))


def test_what_half_holds_at_its_end_stands_for_larger_values():
    lowest = torch.tensor([torch.finfo(torch.float32).min, 1.0])
    assert ulps_between(torch.tensor([-65504.0, 1.0], dtype=FP16), lowest, FP16) == (0.0, 0.0)
    assert ulps_between(torch.tensor([-1e6, 1.0]), torch.tensor([-2e6, 1.0]), FP16)[0] > 500


@pytest.mark.parametrize(
    ("result", "reference", "ulps"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([math.inf, 1.0], [7e4, 1.0], math.inf),
        ([math.nan, 1.0], [1.0, 1.0], math.inf),
        ([math.inf, 1.0], [math.inf, 1.0], 0.0),  # both are inf: a mask
        ([7e4, 1.0], [math.inf, 1.0], math.inf),
        ([1.0, 1.0], [1.0, math.nan], math.inf),
        ([math.nan, 1.0], [math.inf, 1.0], 0.0),
        ([0.0, 3e38], [3e38, 0.0], pytest.approx(math.sqrt(2) * 2**10)),  # squares leave FP32
        ([2.0**-24], [0.0], pytest.approx(1.0)),  # the smallest subnormal
        ([0.0], [1e-12], pytest.approx(2**10)),  # all of it was lost
    ],
)
def test_special_values(result, reference, ulps):
    assert ulps_between(torch.tensor(result), torch.tensor(reference), FP16)[0] == ulps


# Where they part


@both_formats
def test_the_first_operation_that_parts_is_named_with_its_size(dtype):
    offset, width = 256.0, 512
    center = Apply(lambda x: x - x.mean(-1, keepdim=True))
    model = around(Apply(lambda x: x + offset), center, width=width)
    found = compare(model, batch(0, 64, width), dtype=dtype)
    first = found.first
    assert (first.place.module, first.op, first.backward) == ("2", "sub", False)
    assert first.place.line.startswith("tests/forecast/test_comparison.py:")
    # x + offset lies in [256, 512) or a binade below, where values are 256 eps or 128 eps apart:
    # rounding is uniform, of standard deviation spacing / sqrt(12)
    spread = model[0](batch(0, 64, width)).std().item()
    ulps = [spacing / math.sqrt(12) / spread for spacing in (offset / 2, offset)]
    assert ulps[0] < first.ulps < ulps[1]
    assert first.before < 1
    text = str(found)
    assert f"they part first in 2, op sub at {first.place.line}: " in text
    assert "code: center = Apply(lambda x: x - x.mean(-1, keepdim=True))" in text
    assert "fp32_modules=['2'] was tried in vain" in text


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_module_in_fp32_is_tried(level):
    model = around(Apply(lambda x: x * x), nn.LayerNorm(16))
    found = compare(model, 3e3 * batch(0, 4, 16), level=level)
    assert (found.first.place.module, found.first.op, found.first.ulps) == ("1", "mul", math.inf)
    assert math.isnan(found.losses[0])
    assert found.tried.first is None
    assert math.isfinite(found.tried.losses[0])
    assert "to do: fp32_modules=['1'] (tried: they part nowhere)" in str(found)


@pytest.mark.parametrize("levels", [("O2", "O0"), ("O0", "O2"), ("O1", "O0"), ("O0", "O1")])
def test_an_inf_at_either_level_is_where_they_part(levels):
    """Not the softmax on the line after it, which makes NaN of the inf."""

    class Attention(nn.Module):
        def forward(self, x):
            scores = x @ x.mT
            return scores.softmax(-1) @ x

    found = compare(around(Attention()), 1e3 * batch(0, 4, 16)[None], None, *levels)
    first = found.first
    assert (first.place.module, first.op, first.ulps) == ("1", "bmm", math.inf)
    assert "code: scores = x @ x.mT" in str(found)


def test_a_mask_of_minus_inf_is_no_parting():
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    scores = Apply(lambda x: ((x @ x.mT).masked_fill(hidden, -math.inf) + 1).softmax(-1) @ x)
    found = compare(around(scores), batch(0, 5, 16)[None])
    assert found.first is None
    # the sum with -inf is compared as well: it is no rounding noise
    assert "add" in {each.op for each in found.differences}


@both_formats
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_rounding_alone_is_no_parting(dtype, level):
    model = around(nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 16), nn.GELU())
    found = compare(model, batch(0, 32, 16), level=level, dtype=dtype)
    assert found.first is None
    assert 0.1 < found.furthest.ulps < ROUNDED
    assert "they part nowhere: no operation gives 4 times" in str(found)
    grads = {each.parameter for each in found.differences if each.op == "gradient"}
    assert grads == {name for name, _ in model.named_parameters()}
    assert found.unmatched <= 0.1 * len(found.differences)


def test_at_o3_the_result_of_a_module_in_fp32_is_half_again():
    model = around(Apply(lambda x: x * x), nn.LayerNorm(16))
    found = str(compare(model, 3e3 * batch(0, 4, 16), level="O3"))
    assert "fp32_modules=['1'] was tried in vain: what it gives on leaves float16" in found
    model = around(Apply(lambda x: (1e4 * x).square().mean(-1, keepdim=True).sqrt() * x))
    found = str(compare(model, 1e-2 * batch(0, 4, 16), level="O3"))
    assert "to do: fp32_modules=['1'] (tried: they part nowhere)" in found


class Repeated(nn.Module):
    """A model that calls one operation of one line again and again."""

    def __init__(self, calls, function):
        super().__init__()
        self.calls, self.function = calls, function

    def forward(self, x):
        for _ in range(self.calls):
            x = self.function(x)
        return x


@both_formats
def test_a_recurrence_that_forgets_does_not_part(dtype):
    cell = nn.Linear(16, 16)
    found = compare(
        around(Repeated(60, lambda x: torch.tanh(cell(x)))), batch(0, 8, 16), dtype=dtype
    )
    assert found.first is None


def test_a_cast_that_overflows_is_where_they_part():
    """The input: FP32 holds 1e5, and the model casts it before anything is computed."""
    found = compare(around(), 1e5 + batch(0, 4, 16))
    assert (found.first.op, found.first.ulps, found.first.before) == ("to float16", math.inf, 0.0)


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_level_against_itself(level):
    found = compare(around(nn.Dropout(0.5)), batch(0, 8, 16), level=level, reference=level)
    assert {each.ulps for each in found.differences} == {0.0}
    assert found.unmatched == 0
    assert "every result is the same" in str(found)


def test_the_other_way_round():
    center = Apply(lambda x: (x + 500) - (x + 500).mean(-1, keepdim=True))
    found = compare(around(center), batch(0, 8, 16), level="O0", reference="O2")
    assert (found.level, found.reference) == ("FP32 (O0)", "float16 (O2)")
    assert (found.first.place.module, found.first.op) == ("1", "sub")


def test_lost_gradients_are_found():
    """At a fixed scale of 1, gradients below 2^-25 are zero."""
    policy = tritonamp.Policy(op_policy=True, loss_scale=1.0)
    model = around(nn.Tanh())
    found = compare(model, batch(0, 8, 16), lambda y: 1e-9 * target_loss(y), level=policy)
    assert found.first.backward
    assert found.level == "float16 (the policy given)"
    lost = [each for each in found.differences if each.op == "gradient" and each.ulps == 2**10]
    assert lost


# What does not count


@both_formats
@pytest.mark.parametrize(
    "draw",
    [
        nn.Dropout(0.5),
        nn.AlphaDropout(0.5),
        Apply(lambda x: x + torch.rand_like(x)),
        Apply(lambda x: x + torch.randn(x.shape, dtype=x.dtype)),
        Apply(lambda x: x * torch.empty_like(x).bernoulli_(0.5)),
        Apply(lambda x: x + torch.empty_like(x).normal_()),
    ],
    ids=["dropout", "alpha", "rand_like", "randn", "bernoulli_", "normal_"],
)
def test_random_numbers_are_the_same_at_each_level(dtype, draw):
    found = compare(around(draw), batch(0, 32, 16), dtype=dtype)
    assert found.first is None
    assert found.furthest.ulps < ROUNDED


def test_a_norm_of_the_users_that_runs_as_ours_is_compared_as_a_whole():
    found = compare(around(LlamaRMSNorm(16)), batch(0, 8, 16))
    assert found.first is None
    assert found.unmatched == 0
    inside = [each for each in found.differences if each.place.module == "1"]
    assert [each.op for each in inside if not each.parameter] == ["output"]
    assert 0 < next(each.ulps for each in inside if each.op == "output") < 1


def test_gradients_that_are_zero_but_for_rounding_are_left_out():
    """A bias before a batch norm has none."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 30 * 30, 4)
    )
    found = compare(model, batch(0, 16, 3, 32, 32))
    assert found.first is None
    grads = {each.parameter for each in found.differences if each.op == "gradient"}
    assert grads == {"0.weight", "1.weight", "1.bias", "3.weight", "3.bias"}


def test_what_a_checkpointed_segment_computes_again_carries_no_loss_scale():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.head = around(nn.Dropout(0.5), nn.GELU()), nn.Linear(8, 3)

        def forward(self, x):
            return self.head(checkpoint(self.inner, x, use_reentrant=False))

    found = compare(Model(), batch(0, 8, 16), lambda y: y.square().mean())
    assert found.first is None
    assert found.furthest.ulps < ROUNDED
    assert found.unmatched == 0


def test_a_norm_of_three_dimensions_has_its_counterpart():
    found = compare(around(nn.LayerNorm(16)), batch(0, 4, 5, 16))
    norms = [each.op for each in found.differences if "layer_norm" in each.op]
    assert norms.count("native_layer_norm") == 1
    assert norms.count("native_layer_norm_backward") == 3  # of input, weight and bias


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + torch.arange(16, device=x.device).float(),
        lambda x: torch.fft.rfft(x.float()).abs().sum(-1, keepdim=True) + x,
        lambda x: x + torch.view_as_real(torch.ones(4, 8, dtype=torch.cfloat)).reshape(4, 16),
    ],
    ids=["integers", "complex", "a view of complex"],
)
def test_results_of_other_dtypes(function):
    found = compare(around(Apply(function)), batch(0, 4, 16))
    assert found.first is None
    assert found.unmatched == 0


def test_a_half_model_is_compared_with_its_values_in_fp32():
    found = compare(around(nn.LayerNorm(16)).half(), batch(0, 4, 16).half())
    assert found.first is None
    assert {each.ulps for each in found.differences if each.op in ("parameter", "input")} == {0.0}


# The result


def test_a_run_that_fails_is_said_and_what_came_before_it_kept():
    class Mixed(nn.Linear):
        def forward(self, x):
            return torch.mm(super().forward(x), torch.eye(16))

    found = compare(nn.Sequential(nn.Linear(16, 16), Mixed(16, 16)), batch(0, 4, 16), level="O3")
    assert found.failed.startswith("module '1' failed in the run in float16 (O3): RuntimeError: ")
    assert found.failed in " ".join(str(found).split())
    assert "until then they part nowhere" in str(found)
    assert math.isnan(found.losses[0])
    assert {"addmm"} <= {each.op for each in found.differences}


def test_a_reference_that_fails_is_an_error():
    def fails(output):
        if output.dtype is torch.float32 and not torch.is_autocast_enabled("cpu"):
            raise KeyError("vocabulary")
        return output.sum()

    with pytest.raises(RuntimeError, match=r"KeyError: 'vocabulary'"):
        compare(around(), batch(0, 4, 16), fails)


@pytest.mark.parametrize("wrong", ["O7", 2, "fp32"])
def test_an_unknown_level_is_refused(wrong):
    with pytest.raises((ValueError, TypeError), match=r"level: expected"):
        compare(around(), batch(0, 4, 16), reference=wrong)


def test_nothing_moves():
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 8))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state, x = torch.get_rng_state(), batch(0, 8, 16)
    kept = x.clone()
    compare(model, x)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(x, kept)


def test_counterparts_are_let_go_of(monkeypatch):
    references = []

    class Spied(Reference):
        def __init__(self, side, wholes):
            super().__init__(side, wholes)
            references.append(self)

    monkeypatch.setattr("tritonamp.forecast.comparing.Reference", Spied)
    compare(around(nn.ReLU()), batch(0, 8, 16))
    assert [reference.left() for reference in references] == [0]


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class WrittenGelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.044715 * x**3)))


@both_formats
@pytest.mark.parametrize("module", [SwiGLU, WrittenGelu])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_activations_that_train_as_one_op_do_not_part(module, level, dtype):
    found = compare(around(module()), batch(0, 8, 16), level=level, dtype=dtype)
    assert found.first is None and found.furthest.ulps < 4


def test_a_run_that_overflows():
    forecast = tritonamp.check(
        around(Apply(lambda x: x * x), nn.LayerNorm(16)),
        None,
        (3e3 * batch(0, 4, 16),),
        target_loss,
        compare="O0",
    )
    found = forecast.comparison
    assert (found.first.place.module, found.first.op, found.first.ulps) == ("1", "mul", math.inf)
    assert math.isnan(found.losses[0])
    assert found.tried.first is None
    assert str(forecast).endswith(str(forecast.comparison))


def test_a_forecast_without_findings_says_that_the_levels_part():
    model = around(Apply(lambda x: x + 256), Apply(lambda x: x - x.mean(-1, keepdim=True)))
    args = (model, None, (batch(0, 64, 16),), target_loss)
    found = str(tritonamp.check(*args, compare="O0"))
    assert found.startswith("nothing foreseen, but the levels part, see below: Sequential in ")
    assert str(tritonamp.check(*args)).startswith("nothing found: Sequential in ")


def test_without_compare_there_is_none():
    forecast = tritonamp.check(around(), None, (batch(0, 4, 16),), target_loss)
    assert forecast.comparison is None


def test_parting_takes_more_than_inputs_may_be_off():
    found = compare(around(Apply(lambda x: x + 100), nn.LayerNorm(16)), batch(0, 8, 16))
    grown = [each for each in found.differences if each.growth > 1]
    assert grown
    assert all(each.parts == (each.ulps >= PARTS * max(each.before, ROUNDED)) for each in grown)
