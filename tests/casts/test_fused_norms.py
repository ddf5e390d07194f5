"""RMSNorms that people write: which are recognised, and what they compute then."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tritonamp
from tritonamp.casts.fused_norms import recipe_of

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
N = 24


class Written(nn.Module):
    """The base of the norms here."""

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(N)), eps
        self.n = N


class LlamaRMSNorm(Written):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(x.dtype)


class HalfNorm(Written):
    """Squares in the input's dtype: inf in float16 above 256."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class GemmaRMSNorm(Written):
    """Its weight begins at 0."""

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__(eps)
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return (wide * (1.0 + self.weight.float())).type_as(x)


class RootNorm(Written):
    def forward(self, x: Tensor) -> Tensor:
        return x / (x.norm(dim=-1, keepdim=True).square() / self.n + 1e-8).sqrt() * self.weight


class TorchsRMSNorm(Written):
    """With eps of FP32, as torch's default is."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.n,), self.weight)


RECIPES: dict[type[Written], tuple[str, float, float]] = {
    LlamaRMSNorm: ("weight", 0.0, 1e-6),
    HalfNorm: ("weight", 0.0, 1e-5),
    GemmaRMSNorm: ("weight", 1.0, 1e-6),
    RootNorm: ("weight", 0.0, 1e-8),
    TorchsRMSNorm: ("weight", 0.0, torch.finfo(FP32).eps),
}


@pytest.mark.parametrize("cls", RECIPES, ids=lambda cls: cls.__name__)
def test_what_it_computes_is_recognised(cls: type[Written]) -> None:
    found = recipe_of(cls())
    assert found is not None and found[:3] == RECIPES[cls]


@pytest.mark.parametrize("eps", [1e-3, 1.2345e-6, 3e-12])
def test_eps_is_found_in_an_attribute(eps: float) -> None:
    found = recipe_of(LlamaRMSNorm(eps))
    assert found is not None and found[:3] == ("weight", 0.0, eps)


class CentredNorm(Written):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (N,), self.weight)


class L2Norm(Written):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) * self.weight


class NoEpsNorm(Written):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True)) * self.weight


class NoWeightNorm(Written):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (N,), None, 1e-6)


class DetachedNorm(Written):
    """The same values, other gradients."""

    def forward(self, x: Tensor) -> Tensor:
        rate = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        return x * rate.detach() * self.weight


class ChannelNorm(Written):
    """Of the second dimension."""

    def forward(self, x: Tensor) -> Tensor:
        rate = torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-6)
        return x * rate * self.weight.view(-1, *[1] * (x.dim() - 2))


class AlmostRMSNorm(Written):
    """Off by a thousandth."""

    def forward(self, x: Tensor) -> Tensor:
        return 1.001 * F.rms_norm(x, (N,), self.weight, 1e-6)


class DropoutNorm(Written):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(F.rms_norm(x, (N,), self.weight, 1e-6), 0.1, self.training)


class FailingNorm(Written):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return F.rms_norm(x * gate, (N,), self.weight, 1e-6)


OTHERS = (
    CentredNorm, L2Norm, NoEpsNorm, NoWeightNorm, DetachedNorm, ChannelNorm, AlmostRMSNorm,
    DropoutNorm, FailingNorm,
)  # fmt: skip


@pytest.mark.parametrize("cls", OTHERS, ids=lambda cls: cls.__name__)
def test_what_computes_something_else_is_left_alone(cls: type[Written]) -> None:
    state = torch.get_rng_state()
    assert recipe_of(cls()) is None
    assert torch.equal(torch.get_rng_state(), state)


def test_a_probe_leaves_no_trace() -> None:
    module = LlamaRMSNorm()
    module.register_forward_hook(lambda *_: pytest.fail("a hook has run"))
    before = dict(vars(module)), module.weight
    assert recipe_of(module) is not None
    assert (vars(module), module.weight) == before and module.weight.grad is None


class Model(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, N), norm, nn.Linear(N, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.normed = self.norm(self.first(x))
        return self.last(self.normed)


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("cls", [LlamaRMSNorm, HalfNorm, GemmaRMSNorm], ids=lambda c: c.__name__)
def test_it_runs_as_rms_norm(
    handles: Any, device: torch.device, cls: type[Written], level: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = Model(cls()).to(device)
    x = 1000 * torch.randn(8, 6, device=device)  # squares are inf in float16
    expected = model(x)
    amp = handles(model, level=level, dtype=dtype)
    assert amp.stats()["fused"] == ["norm"]
    output = model(x)
    assert model.normed.dtype is dtype and model.normed.grad_fn.name() == "NormBackward"
    torch.testing.assert_close(output, expected, rtol=0, atol=16 * torch.finfo(dtype).eps)
    output.sum().backward()
    assert model.norm.weight.grad.dtype is FP32 and bool(model.norm.weight.grad.isfinite().all())
    amp.disable()
    assert type(model.norm) is cls


@pytest.mark.parametrize(
    "fields",
    [{"level": "O2", "fuse_norms": False}, {"level": "O1", "fuse_norms": False}, {"level": "O0"}],
)
def test_without_the_field_its_own_forward_runs(handles: Any, fields: Any) -> None:
    model = Model(LlamaRMSNorm())
    amp = handles(model, **fields)
    model(torch.ones(2, 6))
    assert amp.stats()["fused"] == [] and model.normed.grad_fn.name() != "NormBackward"


def test_other_arguments_go_to_its_own_forward(handles: Any) -> None:
    class ScaledNorm(LlamaRMSNorm):
        def forward(self, x: Tensor, times: float = 1.0) -> Tensor:
            wide = x.to(torch.float32)
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
            return times * (self.weight * wide.to(x.dtype))

    model = Model(ScaledNorm())
    amp = handles(model, level="O2")
    assert amp.stats()["fused"] == ["norm"]
    x = torch.randn(2, N).half()
    for result in (model.norm(x, 2.0), model.norm(x, times=2.0)):
        torch.testing.assert_close(result, 2 * model.norm(x), rtol=2e-3, atol=0)


# torch 2.11 tracing a Function
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_copies_and_compiled(handles: Any) -> None:
    model = Model(LlamaRMSNorm())
    handles(model, level="O2")
    twin = copy.deepcopy(model)
    expected = model(torch.ones(2, 6))
    assert torch.equal(twin(torch.ones(2, 6)), expected)
    assert twin.normed.grad_fn.name() == "NormBackward"
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(2, 6)), expected)


def test_several_models_have_their_number_in_the_names() -> None:
    models = [Model(LlamaRMSNorm()), Model(CentredNorm())]
    params = [p for m in models for p in m.parameters()]
    with tritonamp.enable(models, torch.optim.SGD(params, lr=0.1), level="O1") as amp:
        assert amp.stats()["fused"] == ["0.norm"]


LIMIT = 30.0


class Clamped(LlamaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clamp(-30.0, 30.0)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Branched(LlamaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        if x.abs().amax() > 50:
            return x * self.weight
        return super().forward(x)


class ByMode(LlamaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        return y if self.training else 2 * y


class ByLength(LlamaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        return y * (1 + x.shape[-2] // 64)


class Counting(LlamaRMSNorm):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Masking(LlamaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.where(x.isinf(), 0.0, x)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class ByGlobal(LlamaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + LIMIT / 3e7) * self.weight


@pytest.mark.parametrize("cls", [Clamped, Branched, ByMode, ByLength, Counting, Masking, ByGlobal])
def test_what_is_no_straight_line_code_is_left_alone(cls: type[Written]) -> None:
    assert recipe_of(cls()) is None


@pytest.mark.parametrize("value", [0.5, 2.0])
def test_an_attribute_that_changes_after_enable_counts(value: float, handles: Any) -> None:
    model = Model(LlamaRMSNorm())
    amp = handles(model, level="O2")
    assert amp.stats()["fused"] == ["norm"]
    x = torch.randn(2, N).half()
    model.norm.variance_epsilon = value
    wide = x.float()
    expected = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + value)
    torch.testing.assert_close(model.norm(x).float(), expected, rtol=2e-3, atol=2e-3)


def test_a_forward_of_the_instance_is_left_alone() -> None:
    module = LlamaRMSNorm()
    module.forward = lambda x: x  # type: ignore[method-assign]
    assert recipe_of(module) is None
