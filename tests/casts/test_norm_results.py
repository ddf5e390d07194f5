"""What modules named like norms return: which results are half, and that none got worse."""

import copy
import functools
import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode

from tritonamp.casts import norm_results

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
N = 24


class Vectors(nn.Module):
    """The base of most norms here."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + torch.arange(N) / 99)
        self.bias = nn.Parameter(torch.arange(N) / 101)


class LlamaNorm(Vectors):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype) + 0 * self.bias


class T5LayerNorm(Vectors):
    """Asks for the dtype of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.to(FP32).pow(2).mean(-1, keepdim=True) + 1e-6)
        if self.weight.dtype in (FP16, BF16):
            y = y.to(self.weight.dtype)
        return self.weight * y + self.bias


class GemmaNorm(Vectors):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * (1 + self.weight.float()) + self.bias.float()).type_as(x)


class WideNorm(Vectors):
    """Returns FP32 for half input, whatever its weights are."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (
            wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight + self.bias
        )


class HandLayerNorm(Vectors):
    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scale = torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5)
        return centred * scale * self.weight + self.bias


class InnerNorm(Vectors):
    """With torch's norm inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LayerNorm(N)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.weight + self.bias


class HandInstanceNorm(Vectors):
    def forward(self, x: Tensor) -> Tensor:
        x = x.mT
        y = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-5).sqrt()
        return (y * self.weight[:, None] + self.bias[:, None]).mT


class HandBatchNorm(Vectors):
    """With running statistics, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(N))
        self.register_buffer("var", torch.ones(N))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        mean, var = self.mean, self.var
        if self.training:
            flat = x.float().reshape(-1, N)
            mean, var = flat.mean(0), flat.var(0, unbiased=False)
            with torch.no_grad():
                self.mean.lerp_(mean, 0.1)
                self.var = self.var.lerp(var, 0.1)
                self.seen += 1
        mean, var = mean.to(x.dtype), var.to(x.dtype)
        return (x - mean) * torch.rsqrt(var + 1e-5) * self.weight + self.bias


class L2Norm(Vectors):
    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1) * self.weight + self.bias


class ScaleNorm(nn.Module):
    """With a vector of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.full((1,), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        return x / x.norm(dim=-1, keepdim=True).clamp(min=1e-5) * self.g


class GRN(nn.Module):
    """Of ConvNeXt V2; not named like a norm, and its parameters are no vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((1, 1, N), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        energy = x.norm(p=2, dim=1, keepdim=True)
        return self.gamma * (x * (energy / (energy.mean(-1, keepdim=True) + 1e-6))) + x


class NormalPrior(Vectors):
    """Its log-probability leaves the range of float16."""

    def forward(self, x: Tensor) -> Tensor:
        z = 100 * x.float()
        return (-0.5 * ((z - self.bias) ** 2 * self.weight + math.log(2 * math.pi))).sum(-1)


class ActNorm(Vectors):
    """Initialises itself from its first batch, and returns a log-determinant."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("initialized", torch.tensor(0, dtype=torch.uint8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.training and self.initialized.item() == 0:
            flat = x.detach().float().reshape(-1, N)
            self.bias.data.copy_(-flat.mean(0))
            self.weight.data.copy_(1 / (flat.std(0) + 1e-6))
            self.initialized.fill_(1)
        logdet = 1e5 * (1 + self.weight.abs().log().sum().square())
        return x * self.weight + self.bias, logdet


class AddNorm(Vectors):
    """Keeps the residual stream in FP32."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        stream = x.float() * 3 + 1 / 3
        y = stream * torch.rsqrt(stream.pow(2).mean(-1, keepdim=True) + 1e-6)
        return y.to(x.dtype) * self.weight + self.bias, stream


class DictNorm(AddNorm):
    def forward(self, x: Tensor) -> Any:
        y, stream = super().forward(x)
        return {"normed": [y], "stream": stream, "size": N}


class AdaNorm(Vectors):
    """Conditional: scale and shift are computed by layers around it."""

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        scale = x[:, :1] if scale is None else scale
        return F.layer_norm(x, (N,)) * (1 + scale) * self.weight + self.bias


class ReadingNorm(Vectors):
    """Asks for values, which a run without data has not."""

    def forward(self, x: Tensor) -> Tensor:
        if x.abs().max() > 1e30:
            return x
        return F.layer_norm(x, (N,)) * self.weight + self.bias


class Normalize(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1)


class NormalizedEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-1, 1, 5 * N).reshape(5, N))

    def forward(self, x: Tensor) -> Tensor:
        return x + F.normalize(self.table)[0]


class Case(NamedTuple):
    """A module, and the dtypes of its results: "half" at O2, or FP32."""

    make: Callable[[], nn.Module]
    dtypes: tuple[str, ...]


CASES = {
    "Llama": Case(LlamaNorm, ("half",)),
    "T5": Case(T5LayerNorm, ("half",)),
    "Gemma": Case(GemmaNorm, ("half",)),
    "wide": Case(WideNorm, ("FP32",)),
    "layer norm by hand": Case(HandLayerNorm, ("half",)),
    "torch's inside": Case(InnerNorm, ("half",)),
    "instance norm by hand": Case(HandInstanceNorm, ("half",)),
    "batch norm by hand": Case(HandBatchNorm, ("half",)),
    "batch norm by hand, eval": Case(lambda: HandBatchNorm().eval(), ("half",)),
    "L2": Case(L2Norm, ("half",)),
    "scale norm": Case(ScaleNorm, ("half",)),
    "GRN": Case(GRN, ("FP32",)),  # as under torch.autocast: it is no norm to anybody
    "prior": Case(NormalPrior, ("FP32",)),
    "ActNorm": Case(ActNorm, ("half", "FP32")),
    "ActNorm, eval": Case(lambda: ActNorm().eval(), ("half", "FP32")),
    "add + norm": Case(AddNorm, ("half", "FP32")),
    "dict": Case(DictNorm, ("half", "FP32")),
    "conditional": Case(AdaNorm, ("half",)),
    "reads values": Case(ReadingNorm, ("FP32",)),
    "no parameters": Case(Normalize, ("FP32",)),
    "embedding": Case(NormalizedEmbedding, ("FP32",)),
    "weight norm": Case(lambda: parametrizations.weight_norm(nn.Linear(N, N)), ("half",)),
    "spectral norm": Case(lambda: parametrizations.spectral_norm(nn.Linear(N, N)), ("half",)),
}


class Around(nn.Module):
    """Hands a module half input, and keeps what it returns."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(N, N, bias=False), inner
        self.first.weight.data.copy_(torch.eye(N))

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        found = self.inner(self.first(x), *more)
        leaves = torch.utils._pytree.tree_leaves(found)
        self.found = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return sum(leaf.float().mean() for leaf in self.found)


def batch(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return FP32 values that the half format holds."""
    generator = torch.Generator().manual_seed(0)
    return (3 * torch.randn(4, 5, N, generator=generator)).to(dtype).float().to(device)


def worst(found: Tensor, expected: Tensor) -> float:
    """Return the largest error, in units of the largest value."""
    exact = expected.detach().double()
    return float((found.detach().double() - exact).abs().max() / exact.abs().max())


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", CASES)
def test_results_are_half_or_as_asked_for_and_no_worse_than_under_autocast(
    handles: Any, device: torch.device, name: str, level: str, dtype: torch.dtype
) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    model, x = Around(case.make()).to(device), batch(dtype, device)
    plain, stock = copy.deepcopy(model), copy.deepcopy(model)
    plain(x)
    with torch.autocast(device.type, dtype=dtype):
        stock(x)
    handles(model, level=level, dtype=dtype)
    model(x).backward()
    state = model.state_dict()
    assert all(
        torch.equal(v.long(), state[n].long()) for n, v in plain.named_buffers() if not v.dim()
    )
    # up to ten roundings of half follow each other, and a value that is rounded to 0 or 1 ulp of
    # the largest one does no harm
    bound = 10 * torch.finfo(dtype).eps
    for found, expected, theirs, wanted in zip(
        model.found, plain.found, stock.found, case.dtypes, strict=True
    ):
        if level == "O2":
            assert found.dtype is {"half": dtype, "FP32": FP32}[wanted]
        assert bool(found.isfinite().all())
        assert worst(found, expected) <= max(bound, worst(theirs, expected))
        if wanted == "FP32" and theirs.dtype is FP32:
            assert found.dtype is FP32


class NoisyNorm(Vectors):
    """Draws random numbers, counts, keeps notes and statistics, and has a hook inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LayerNorm(N)
        self.register_buffer("mean", torch.zeros(N))
        self.calls, self.notes, self.heard = 0, [], []
        self.inner.register_forward_hook(lambda *_: self.heard.append(1))
        self.log = self.note

    def note(self, shape: torch.Size) -> None:
        self.calls += 1
        self.notes.append(shape)

    def forward(self, x: Tensor) -> Tensor:
        self.log(x.shape)
        with torch.no_grad():
            self.mean += x.float().mean((0, 1))
            self.weight.mul_(1.0)
        noise = torch.rand(2).sum().item() + random.random()
        return self.inner(x) * self.weight + self.bias + 0 * noise


@pytest.mark.parametrize("inputs_require_grad", [False, True])
def test_finding_out_leaves_no_trace(
    handles: Any,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    inputs_require_grad: bool,
) -> None:
    def state(knows: bool) -> list[Any]:
        torch.manual_seed(0)
        random.seed(0)
        model = Around(NoisyNorm()).to(device)
        amp = handles(model, level="O2")
        if knows:
            monkeypatch.setattr(norm_results, "half_results", lambda *_: (True,))
        norm, x = model.inner, batch(FP16, device).requires_grad_(inputs_require_grad)
        loss = model(x)
        tensors = [*norm.parameters(), *norm.buffers()]
        found = [
            (norm.calls, norm.notes, len(norm.heard), x._version, loss.item()),
            [(t._version, t.dtype, t.grad, t.tolist()) for t in tensors],
            (torch.get_rng_state().tolist(), random.getstate()),
        ]
        assert model.found[0].dtype is FP16
        amp.disable()
        return found

    assert state(knows=False) == state(knows=True)


class Ops(TorchDispatchMode):
    """Counts what is dispatched."""

    seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["Llama", "T5", "ActNorm, eval", "add + norm", "reads values"])
def test_it_is_found_out_once_and_out_of_sight(
    handles: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Of each kind of arguments, that is; no mode around the forward sees its ops."""
    runs = []
    run = norm_results.half_results
    monkeypatch.setattr(norm_results, "half_results", lambda *a: runs.append(1) or run(*a))
    model = Around(CASES[name].make()).to(device)
    handles(model, level="O2")
    counts = []
    for _ in range(3):
        with torch.no_grad(), Ops() as ops:
            model(batch(FP16, device))
        counts.append(ops.seen)
    assert len(set(counts)) == 1 and len(runs) == 1


def test_fp32_input_gives_fp32(handles: Any, device: torch.device) -> None:
    for name in ("Llama", "T5", "add + norm"):
        module = nn.Sequential(CASES[name].make()).to(device)
        handles(module, level="O2", cast_inputs=False, cast_outputs=None)
        found = torch.utils._pytree.tree_leaves(module(batch(FP16, device)))
        assert {leaf.dtype for leaf in found} == {FP32}


class PriorNorm(Vectors):
    """Its single result is no norm of the input: one number a row, half where the weights are."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight + self.bias).amax(-1)


def test_a_single_result_of_another_shape_stays_fp32(handles: Any, device: torch.device) -> None:
    x = batch(FP16, device)
    plain = PriorNorm().to(device)
    expected = plain(x.float())
    model = nn.Sequential(plain)
    handles(model, level="O2", cast_outputs=None)
    found = model(x.half())
    assert found.dtype is FP32 and torch.equal(found, expected)


def test_fp32_that_came_in_makes_a_result_fp32(handles: Any, device: torch.device) -> None:
    """As it would with half weights: whoever passes an FP32 scale has asked for it."""
    model, x = Around(AdaNorm()).to(device), batch(FP16, device)
    handles(model, level="O2", cast_inputs=False)
    scales = {FP32: torch.full((1,), 2 / 3, device=device)}
    scales[FP16] = scales[FP32].half()
    for dtype in (FP16, FP32, FP16):
        model(x, scales[dtype])
        assert model.found[0].dtype is dtype


def as_method(norm: Any) -> Any:
    return AddNorm.forward.__get__(norm)


def as_partial(norm: Any) -> Any:
    """As accelerate does."""
    norm._old = AddNorm.forward.__get__(norm)
    return functools.partial(lambda module, x: module._old(x), norm)


def as_closure(norm: Any) -> Any:
    return lambda x: AddNorm.forward(norm, x)


@pytest.mark.parametrize(
    ("forward", "normed"), [(as_method, FP16), (as_partial, FP16), (as_closure, FP32)]
)
def test_a_forward_of_the_instance_is_asked(
    handles: Any, device: torch.device, forward: Callable[[Any], Any], normed: torch.dtype
) -> None:
    """But for a closure: it would run on the module itself, which may change."""
    model = Around(LlamaNorm()).to(device)
    model.inner.forward = forward(model.inner)  # type: ignore[method-assign]
    handles(model, level="O2")
    model(batch(FP16, device))
    assert [leaf.dtype for leaf in model.found] == [normed, FP32]


@pytest.mark.parametrize("name", ["Llama", "add + norm", "dict", "ActNorm, eval", "prior"])
@pytest.mark.parametrize("dynamic", [False, True])
# torch 2.11 tracing a Function
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_forwards_find_out_what_others_do(handles: Any, name: str, dynamic: bool) -> None:
    torch.manual_seed(0)
    model, other = (Around(CASES[name].make()) for _ in range(2))
    handles([model, other], level="O2")
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    assert torch.equal(compiled(batch(FP16, torch.device("cpu"))), other(batch(FP16, "cpu")))
    assert [t.dtype for t in model.found] == [t.dtype for t in other.found]


# torch 2.11 tracing a Function
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_copy_does_not_ask_the_original(handles: Any) -> None:
    """Which may be healed, asleep, in another mode, or gone."""
    model = Around(LlamaNorm())
    amp = handles(model, level="O2")
    copied = copy.deepcopy(model)
    amp.heal("inner")
    torch.compiler.reset()
    torch.compile(copied, backend="aot_eager", fullgraph=True)(batch(FP16, torch.device("cpu")))
    assert copied.found[0].dtype is FP16


def test_a_copy_with_an_op_table_finds_out_for_its_own_policy(handles: Any) -> None:
    """A copy of an O3 model has one; the first result of the original's norms is always half."""
    model, x = Around(WideNorm()), batch(FP16, torch.device("cpu"))
    handles(model, level="O3", keep_norms_fp32=True)
    for runs in (False, True):
        if runs:
            model(x)
            assert model.found.pop().dtype is FP16
        copied = copy.deepcopy(model)
        copied(x)
        assert copied.found[0].dtype is FP32


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("name", CASES)
def test_without_an_op_table_no_result_leaves_the_range(
    handles: Any, device: torch.device, name: str, dtype: torch.dtype
) -> None:
    """Norms compute in FP32 there, and their first result is half, as layers after it are."""
    case = CASES[name]
    torch.manual_seed(0)
    model, x = Around(case.make()).to(device), batch(dtype, device)
    plain = copy.deepcopy(model)
    plain(x)
    handles(model, level="O3", keep_norms_fp32=True, dtype=dtype)
    model(x)
    first = [dtype if model.found[0].shape == x.shape else FP32, *[FP32] * len(model.found[1:])]
    assert [found.dtype for found in model.found] == first
    for found, expected in zip(model.found, plain.found, strict=True):
        assert bool(found.isfinite().all())
        assert worst(found, expected) <= 10 * torch.finfo(dtype).eps
