"""Code of norms: what proves that it is an RMSNorm, and what only looks like one."""

import copy
import functools
import linecache
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

import tritonamp
from tritonamp.casts.fused_norms import proved, recipe_of

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
N = 24
SCALE = torch.ones(())


class Norm(nn.Module):
    """The base of the norms here: an RMSNorm in the fewest words."""

    def __init__(self, eps: Any = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps, self.gain = nn.Parameter(torch.linspace(-2, 2, N)), eps, 1.0
        self.shape, self.flag, self.n = (N,), True, N

    def rate(self, x: Tensor) -> Tensor:
        return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Tensor) -> Any:
        return x * self.rate(x) * self.weight


class LlamaNorm(Norm):
    def forward(self, x: Tensor) -> Any:
        """Doc string.

        In several lines.
        """
        input_dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.eps)
        return self.weight * x.to(input_dtype)


class T5Norm(Norm):
    def forward(self, x: Tensor) -> Any:
        variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.eps)
        if self.weight.dtype in [torch.float16, torch.bfloat16]:
            x = x.to(self.weight.dtype)
        return self.weight * x


class HelperNorm(Norm):
    def _norm(self, x: Tensor) -> Any:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Tensor) -> Any:
        output = self._norm(x.float()).type_as(x)
        return output * self.weight


class GemmaNorm(HelperNorm):
    def forward(self, x: Tensor) -> Any:
        output = self._norm(x.float())
        output = output * (1.0 + self.weight.float())
        return output.type_as(x)


class RootNorm(Norm):
    def forward(self, x: Tensor) -> Any:
        return self.weight * (x / torch.sqrt(torch.mean(x**2, dim=-1, keepdim=True) + self.eps))


class LengthNorm(Norm):
    def forward(self, x: Tensor) -> Any:
        length = x.norm(2, dim=-1, keepdim=True)
        return x / torch.sqrt(length**2 / self.n + self.eps) * self.weight


class SumNorm(Norm):
    def forward(self, x: Tensor) -> Any:
        dtype = x.dtype
        x = x.to(torch.float32)
        mean = (x * x).sum(dim=-1, keepdim=True) / x.shape[-1]
        return (self.weight * (x * (mean + self.eps) ** -0.5)).to(dtype=dtype)


class ReciprocalNorm(Norm):
    def forward(self, x: Tensor) -> Any:
        rate: Tensor = 1.0 / torch.sqrt(x.square().sum(-1, keepdim=True) / x.size(-1) + self.eps)
        return (x * rate).to(x.dtype) * self.weight


class FunctionNorm(Norm):
    def forward(self, x: Tensor) -> Any:
        mean = torch.square(x).mean(dim=(-1,), keepdim=True)
        return torch.mul(torch.div(x, torch.sqrt(torch.add(mean, self.eps))), self.weight)


class TorchsNorm(Norm):
    def forward(self, x: Tensor) -> Any:
        return F.rms_norm(x, self.shape, self.weight, self.eps)


class ShapeNorm(Norm):
    def forward(self, x: Tensor) -> Any:
        return F.rms_norm(x, x.shape[-1:], eps=self.eps) * self.weight


class AliasNorm(Norm):
    def forward(self, x: Tensor) -> Any:
        me = self
        return x * me.rate(x) * me.weight * me.gain


REAL = (
    Norm, LlamaNorm, T5Norm, HelperNorm, GemmaNorm, RootNorm, LengthNorm, SumNorm, ReciprocalNorm,
    FunctionNorm, TorchsNorm, ShapeNorm, AliasNorm,
)  # fmt: skip
SIZES = (1e-7, 1e-4, 1e-2, 1.0, 300.0, 6e4, 1e15)


def assert_same_as_unfused(model: nn.Module, norm: nn.Module, dtype: torch.dtype) -> None:
    """Compare an enabled norm with what ``norm`` computes in float64, to the dtype's end."""
    for size in [size for size in SIZES if size < torch.finfo(dtype).max]:
        x = (size * torch.randn(3, 70, N).clamp(-1, 1)).to(dtype)
        expected = norm(x.double())
        result = model(x)
        assert result.dtype is dtype
        info = torch.finfo(dtype)
        bound = 0.51 * (info.eps * expected.abs() + info.tiny * info.eps)
        assert bool(((result.double() - expected).abs() <= bound).all()), size


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("cls", REAL, ids=lambda cls: cls.__name__)
def test_a_proved_norm_has_the_same_values(
    handles: Any, cls: type[Norm], level: str, dtype: torch.dtype, is_frozen: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Identity(), cls())
    if is_frozen:  # half weights stay half
        model.to(dtype).requires_grad_(False)
    plain = copy.deepcopy(model[1]).double()
    amp = handles(model, level=level, dtype=dtype, cast_outputs=None)
    assert amp.stats()["fused"] == ["1"]
    assert_same_as_unfused(model, plain, dtype)


class ByTraining(Norm):
    def forward(self, x: Tensor) -> Any:
        me = self
        return x * self.rate(x) * self.weight * (2 - me.training)


class ByRequiresGrad(Norm):
    def forward(self, x: Tensor) -> Any:
        return x * self.rate(x) * self.weight * (1 + 1e-7 * self.weight.requires_grad)


class ByBytes(Norm):
    def forward(self, x: Tensor) -> Any:
        return x * self.rate(x) * self.weight * (1 + x.nbytes / 1e11)


class ByItemSize(Norm):
    def forward(self, x: Tensor) -> Any:
        return x * self.rate(x) * self.weight * (x.dtype.itemsize / 4)


class ByDevice(Norm):
    def forward(self, x: Tensor) -> Any:
        return x * self.rate(x) * self.weight * (1 + x.is_cuda)


class ByDimensions(Norm):
    def forward(self, x: Tensor) -> Any:
        return x * self.rate(x) * self.weight * (1 + x.ndim * 1e-8)


class BySetting(Norm):
    def forward(self, x: Tensor) -> Any:
        return x * self.rate(x) * self.weight * torch.backends.cudnn.enabled


class ByClassAttribute(Norm):
    factor = 1.0

    def forward(self, x: Tensor) -> Any:
        return x * self.rate(x) * self.weight * self.factor


class ByProperty(Norm):
    @property
    def factor(self) -> float:
        return 1.0 + SCALE.item() - 1.0

    def forward(self, x: Tensor) -> Any:
        return x * self.rate(x) * self.weight * self.factor


class ByPropertyWithValue(Norm):
    """Its value is in the instance, and another one is read."""

    @property
    def eps(self) -> float:
        return 2 * float(vars(self)["eps"])

    @eps.setter
    def eps(self, value: float) -> None:
        vars(self)["eps"] = value

    def forward(self, x: Tensor) -> Any:
        return x * self.rate(x) * self.weight


class ByFlag(Norm):
    def forward(self, x: Tensor) -> Any:
        return x * self.rate(x) * self.weight * self.flag


class ByComparison(Norm):
    def forward(self, x: Tensor) -> Any:
        return x * self.rate(x) * self.weight * (1 + (x.abs() > 1e3))


class ByDefault(Norm):
    def forward(self, x: Tensor, scale: Tensor = SCALE) -> Any:
        return x * self.rate(x) * self.weight * scale


class ByKeyword(Norm):
    def forward(self, x: Tensor, *, scale: float = 1.0) -> Any:
        return x * self.rate(x) * self.weight * scale


class ByDtype(Norm):
    def forward(self, x: Tensor) -> Any:
        y = x * self.rate(x) * self.weight
        if x.dtype != torch.float16:  # noqa: SIM108
            y = y * 1.0
        else:
            y = y * 2.0
        return y


class ByTorchsState(Norm):
    def forward(self, x: Tensor) -> Any:
        return x * self.rate(x) * self.weight * torch.is_grad_enabled()


class Writing(Norm):
    def forward(self, x: Tensor) -> Any:
        y = x * self.rate(x) * self.weight
        torch.mul(x, 0.5, out=x)
        return y


class InPlace(Norm):
    def forward(self, x: Tensor) -> Any:
        y = x * self.rate(x) * self.weight
        x *= 0.5
        return y


class Bent(Norm):
    """Straight up to a thousand."""

    def forward(self, x: Tensor) -> Any:
        x = x * (1 + (x * 1e-4).square().square().square())
        return x * self.rate(x) * self.weight


class Added(Norm):
    def forward(self, x: Tensor) -> Any:
        return x * self.rate(x) * self.weight + (x * 1e-3) ** 9


class Capped(Norm):
    def forward(self, x: Tensor) -> Any:
        x = x * torch.rsqrt((x * 1e-6).square() + 1.0)
        return x * self.rate(x) * self.weight


class WithFourthPower(Norm):
    def forward(self, x: Tensor) -> Any:
        square = x.square().mean(-1, keepdim=True)
        return x * torch.rsqrt(square + 1e-6 + 1e-17 * square.square()) * self.weight


class WithWeightsPower(Norm):
    def forward(self, x: Tensor) -> Any:
        return x * self.rate(x) * self.weight * (1 + (self.weight * 1e-3) ** 8)


class Cancelling(Norm):
    """The weight's low bits are lost."""

    def forward(self, x: Tensor) -> Any:
        return x * self.rate(x) * ((self.weight + 8.0) - 8.0)


class InFloat64(Norm):
    """Right above 1e19, where FP32's squares are inf."""

    def forward(self, x: Tensor) -> Any:
        wide = x.to(torch.float64)
        return (wide * self.rate(wide) * self.weight).to(x.dtype)


class ScaledDown(Norm):
    """The same."""

    def forward(self, x: Tensor) -> Any:
        small = x * 1e-5
        mean = small.square().mean(-1, keepdim=True)
        return small * torch.rsqrt(mean + 1e-16) * self.weight


class Vanishing(Norm):
    """Its small values are 0."""

    def forward(self, x: Tensor) -> Any:
        return x * 1e-9 * self.rate(x) * self.weight * 1e9


class WithReciprocal(Norm):
    """Its mean squares above 1e38 have a reciprocal of few bits."""

    def forward(self, x: Tensor) -> Any:
        mean = x.square().mean(-1, keepdim=True) + self.eps
        return x / mean * mean.sqrt() * self.weight


class NoEps(Norm):
    def forward(self, x: Tensor) -> Any:
        length = x.square().mean(-1, keepdim=True).sqrt()
        return x * self.rate(x) * self.weight * length / length


class FlatMean(Norm):
    def forward(self, x: Tensor) -> Any:
        return x * torch.rsqrt(x.square().mean(-1) + self.eps) * self.weight


class ToHalf(Norm):
    def forward(self, x: Tensor) -> Any:
        return (x * self.rate(x)).to(torch.float16).to(x.dtype) * self.weight


class Fp32Out(Norm):
    """Gives FP32 for half."""

    def forward(self, x: Tensor) -> Any:
        return (x * self.rate(x) * self.weight).float()


class OverTwo(Norm):
    def forward(self, x: Tensor) -> Any:
        mean = x.pow(2).mean((-2, -1), keepdim=True)
        return x * torch.rsqrt(mean + 1e-6) * self.weight


class OverFirst(Norm):
    """A square input hides which dimension it is."""

    def forward(self, x: Tensor) -> Any:
        return x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-6) * self.weight


class Centred(Norm):
    def forward(self, x: Tensor) -> Any:
        x = x - x.mean(-1, keepdim=True)
        return x * self.rate(x) * self.weight


class WithAutocast(Norm):
    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x * self.rate(x) * self.weight


class Clamped(Norm):
    def forward(self, x: Tensor) -> Any:
        return x * torch.clamp(self.rate(x), 1e-5) * self.weight


class Selecting(Norm):
    def forward(self, x: Tensor) -> Any:
        return torch.where(x.shape[-2] > 64, 2.0, 1.0) * x * self.rate(x) * self.weight


class Sliced(Norm):
    def forward(self, x: Tensor) -> Any:
        return (x * self.rate(x) * self.weight)[..., :4096, :]


class Intercepting(Norm):
    def __getattribute__(self, name: str) -> Any:
        return 1e-6 if name == "eps" else super().__getattribute__(name)

    def forward(self, x: Tensor) -> Any:
        return x * self.rate(x) * self.weight


def doubled(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def forward(self: Any, x: Tensor) -> Any:
        return torch.where(x.abs() > 40, 2.0, 1.0) * function(self, x)

    return forward


class Decorated(Norm):
    @doubled
    def forward(self, x: Tensor) -> Any:
        return x * self.rate(x) * self.weight


class Wrapped(Norm):
    """A class as another library's patch leaves it."""


Wrapped.forward = doubled(Norm.forward)  # type: ignore[method-assign]


class WithOtherDefault(Norm):
    """Says that it is a function which it is not."""

    def _forward(self, x: Tensor, times: float = 1.0) -> Any:
        return x * self.rate(x) * self.weight * times

    forward = functools.wraps(_forward)(
        types.FunctionType(_forward.__code__, globals(), "forward", (2.0,))
    )


class Partial(Norm):
    def _forward(self, x: Tensor, scale: float) -> Any:
        return x * self.rate(x) * self.weight * scale

    forward = functools.partialmethod(_forward, scale=1.0)  # type: ignore[assignment]


class Inherited(Bent):
    pass


class Calling(Norm):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x)


ALMOST = (
    ByTraining, ByRequiresGrad, ByBytes, ByItemSize, ByDevice, ByDimensions, BySetting,
    ByClassAttribute, ByProperty, ByPropertyWithValue, ByFlag, ByComparison, ByDefault, ByKeyword,
    ByDtype, ByTorchsState, Writing, InPlace, Bent, Added, Capped, WithFourthPower,
    WithWeightsPower, Cancelling, InFloat64, ScaledDown, Vanishing, WithReciprocal, NoEps,
    FlatMean, ToHalf, Fp32Out, OverTwo, OverFirst, Centred, WithAutocast, Clamped, Selecting,
    Sliced, Intercepting, Decorated, Wrapped, WithOtherDefault, Partial, Inherited, Calling,
)  # fmt: skip


@pytest.mark.parametrize("cls", ALMOST, ids=lambda cls: cls.__name__)
def test_what_is_not_proved_is_left_alone(cls: type[Norm]) -> None:
    assert recipe_of(cls()) is None
    assert (proved(cls()) is None) == (cls is not Fp32Out)  # what runs says dtypes, not the code


@pytest.mark.parametrize("eps", [np.float64(1e-6), torch.tensor(1e-6), [1e-6], 0.0, -1e-6, 2.0])
def test_an_eps_that_is_no_plain_small_number(eps: Any) -> None:
    assert proved(Norm(eps)) is None


def _helper_of_the_instance(norm: Norm) -> None:
    norm.rate = lambda x: torch.ones_like(x)  # type: ignore[method-assign]


def _buffer(norm: Norm) -> None:
    del norm.gain
    norm.register_buffer("gain", torch.ones(()))


def _parametrization(norm: Norm) -> None:
    parametrize.register_parametrization(norm, "weight", nn.Tanh())


def _list(norm: Norm) -> None:
    del norm.weight
    norm.weight = nn.ParameterList([torch.ones(N)])  # type: ignore[assignment]


CHANGES = (_helper_of_the_instance, _buffer, _parametrization, _list)


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_an_instance_that_is_not_as_its_class_is_left_alone(change: Any) -> None:
    norm = AliasNorm()
    assert proved(norm) is not None
    change(norm)
    assert proved(norm) is None


@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated")
def test_a_traced_norm_is_left_alone() -> None:
    assert proved(torch.jit.trace(LlamaNorm(), torch.ones(2, N))) is None


LINES = (
    "class CellNorm(Norm):\n",
    "    def forward(self, x):\n",
    "        mean = torch.mean(x.square(), -1, keepdim=True)\n",
    "        return x * torch.rsqrt(mean + self.eps) * self.weight\n",
)


def in_a_cell(*imports: str, shown: str | None = None) -> Norm:
    """Return a norm whose class is compiled alone, as in a notebook, and what its source shows."""
    lines = [*imports, *LINES]
    module = types.ModuleType("cell")
    module.__dict__.update(Norm=Norm, torch=torch)
    exec(compile("".join(lines), "<cell>", "exec"), module.__dict__)
    lines[-1] = shown or lines[-1]
    linecache.cache["<cell>"] = (0, None, lines, "<cell>")
    norm: Norm = module.__dict__["CellNorm"]()
    return norm


@pytest.mark.parametrize("imports", [(), ("import torch\n",)])
def test_imports_may_be_in_another_cell(imports: tuple[str, ...]) -> None:
    assert proved(in_a_cell(*imports)) is not None


def test_source_that_is_not_what_runs_proves_nothing() -> None:
    """A file that was edited after it was imported, say."""
    twice = LINES[-1].replace("self.weight", "self.weight * 2.0 * 0.5")
    assert proved(in_a_cell(shown=twice)) is None


class ChangingNorm(AliasNorm):
    """Whose class a test changes."""

    def rate(self, x: Tensor) -> Tensor:
        return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Tensor, times: float = 1.0) -> Any:
        return x * self.rate(x) * self.weight * self.gain * times


def _half_rate(self: Any, x: Tensor) -> Tensor:
    return 0.5 * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def _twice(self: Any, x: Tensor) -> Any:
    return 2 * Norm.forward(self, x)


class Tripled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 3 * weight


def _change(norm: Any, patch: pytest.MonkeyPatch, kind: str) -> None:
    match kind:
        case "gain":
            norm.gain = 2.0
        case "gain of another type":
            norm.gain = True
        case "gain that is a tensor":
            norm.gain = torch.linspace(0.5, 2, N)
        case "forward of the class":
            patch.setattr(ChangingNorm, "forward", _twice)
        case "forward of the instance":
            norm.forward = functools.partial(_twice, norm)
        case "code":
            patch.setattr(ChangingNorm.forward, "__code__", _twice.__code__)
        case "defaults":
            patch.setattr(ChangingNorm.forward, "__defaults__", (2.0,))
        case "helper of the class":
            patch.setattr(ChangingNorm, "rate", _half_rate)
        case "helper of the instance":
            norm.rate = functools.partial(_half_rate, norm)
        case "hook":
            norm.register_forward_hook(lambda module, args, output: 2 * output)
        case "hook before":
            norm.register_forward_pre_hook(lambda module, args: (args[0].clamp(-0.5, 0.5),))
        case "parametrization":
            parametrize.register_parametrization(norm, "weight", Tripled())
        case "weight":
            norm.weight = nn.Parameter(torch.linspace(1, 3, N))
        case "eval":
            norm.eval()


CASES = (
    "gain", "gain of another type", "gain that is a tensor", "forward of the class",
    "forward of the instance", "code", "defaults", "helper of the class", "helper of the instance",
    "hook", "hook before", "parametrization", "weight", "eval",
)  # fmt: skip


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("kind", CASES)
def test_what_changes_after_enable_counts(
    handles: Any, monkeypatch: pytest.MonkeyPatch, kind: str, level: str
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Identity(), ChangingNorm())
    plain = copy.deepcopy(model)
    amp = handles(model, level=level, cast_outputs=None)
    assert amp.stats()["fused"] == ["1"]
    for module in (model, plain):
        _change(module[1], monkeypatch, kind)
    x = torch.randn(4, N).half()
    torch.testing.assert_close(model(x).float(), plain(x.float()), rtol=4e-3, atol=4e-3)
    if kind == "parametrization":
        parametrize.remove_parametrizations(model[1], "weight")


def test_a_model_whose_class_is_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is enabled, and between two enables."""
    model, x = ChangingNorm(), torch.randn(4, N)
    with tritonamp.enable(model, level="O1"):
        before = model(x)
        monkeypatch.setattr(ChangingNorm, "forward", _twice)
        torch.testing.assert_close(model(x), 2 * before)
    monkeypatch.undo()
    with tritonamp.enable(model, level="O1"):
        torch.testing.assert_close(model(x), before)


@pytest.mark.parametrize("dtype", [torch.float64, FP32])
def test_inputs_of_other_dtypes_go_to_its_own_forward(handles: Any, dtype: torch.dtype) -> None:
    """FP32 with half weights, and float64, have the dtype that the code gives them."""
    model = nn.Sequential(nn.Identity(), LlamaNorm()).to(BF16).requires_grad_(False)
    plain, x = copy.deepcopy(model), torch.randn(4, N, dtype=dtype)
    handles(model, level="O1", dtype=BF16, cast_outputs=None, cast_inputs=False)
    assert torch.equal(model(x), plain(x))
