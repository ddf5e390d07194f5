"""Activations that code writes out: which are found, and what they compute then."""

import copy
import functools
import inspect
import math
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tritonamp
from tests.casts.written_code import EXACT, LEFT
from tritonamp.casts.written import installed
from tritonamp.casts.written.modules import of_module
from tritonamp.casts.written.rewriting import rewritten
from tritonamp.kernels.activation import KINDS

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
EPS = torch.finfo(FP16).eps


class Calls(nn.Module):
    """A model that calls a function of its input, or of two inputs, after a layer."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 8), function

    def forward(self, *inputs: Tensor) -> Tensor:
        self.given = [self.layer(x) for x in inputs]
        self.found = self.function(*self.given)
        return self.found


def inputs(function: Callable[..., Any], device: torch.device) -> list[Tensor]:
    count = len(inspect.signature(function).parameters)
    torch.manual_seed(0)
    return [torch.randn(6, 4, device=device) for _ in range(count)]


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", EXACT)
def test_it_computes_the_same_in_one_op(
    handles: Any, device: torch.device, name: str, level: str, dtype: torch.dtype
) -> None:
    function, formula = EXACT[name]
    own = function.__code__
    model = Calls(function).to(device)
    amp = handles(model, level=level, dtype=dtype, cast_outputs=None)
    assert [site.rpartition(":")[0] for site in amp.stats()["fused"]] == [f"written_code.{name}"]
    model(*inputs(function, device))
    is_square = "squared" in name or name == "relu_times_relu"
    assert model.found.dtype is dtype or (is_square and dtype is FP16)
    wide = [x.detach().double().requires_grad_() for x in model.given]
    expected = formula(*wide)
    # one rounding; half the tests have two ops, or an addition behind the one
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(model.found.double(), expected, rtol=2 * eps, atol=eps / 8)
    grads = torch.autograd.grad(expected.sum(), wide, allow_unused=True)
    found = torch.autograd.grad(model.found.sum(), model.given, allow_unused=True)
    for grad, result in zip(grads, found, strict=True):
        assert (grad is None) == (result is None)
        if grad is not None:
            torch.testing.assert_close(result.double(), grad, rtol=2 * eps, atol=2 * eps)
    amp.disable()
    assert function.__code__ is own


@pytest.mark.parametrize("name", LEFT)
def test_other_code_is_left_alone(name: str) -> None:
    assert rewritten(LEFT[name], lambda _: False) is None


def test_there_are_thirty_of_the_others() -> None:
    assert len(LEFT) >= 30


def gelu(x: Tensor) -> Tensor:
    c = 0.044715
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + c * x**3)))


class MLP(nn.Module):
    """A gated layer whose activation is a module."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.up, self.gate, self.down = (nn.Linear(8, 8) for _ in range(3))
        self.act = act
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.gate(x)) * self.up(x)
        self.product = x
        return self.down(x)


class Swapped(MLP):
    def forward(self, x: Tensor) -> Tensor:
        self.product = self.up(x) * self.act(self.gate(x))
        return self.down(self.product)


class WrittenSiLU(nn.Module):
    """One argument, and a docstring."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x * sigmoid(x)."""
        return x * torch.sigmoid(x)


class Held(nn.Module):
    """It calls a function that it holds, as activations of transformers do."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


ACTS = {
    "SiLU": (nn.SiLU(), "silu"),
    "GELU": (nn.GELU(), "gelu"),
    "GELU tanh": (nn.GELU("tanh"), "gelu tanh"),
    "own": (WrittenSiLU(), "silu"),
    "held SiLU": (Held(F.silu), "silu"),
    "held GELU": (Held(F.gelu), "gelu"),
    "partial GELU": (Held(functools.partial(F.gelu, approximate="none")), "gelu"),
    "partial GELU tanh": (Held(functools.partial(F.gelu, approximate="tanh")), "gelu tanh"),
}
"""Modules, each with its name in ``KINDS``."""


def is_gated(model: Any) -> bool:
    return bool(model.product.grad_fn.name() == "ActivationBackward")


@pytest.mark.parametrize("cls", [MLP, Swapped])
@pytest.mark.parametrize("act", ACTS)
def test_a_module_times_a_gate(
    handles: Any, device: torch.device, act: str, cls: type[MLP]
) -> None:
    torch.manual_seed(0)
    module, kind = ACTS[act]
    model, x = cls(module).to(device), torch.randn(4, 8, device=device)
    assert of_module(module) == KINDS[kind]  # two kinds of GELU are closer than the tolerance
    expected = model(x)
    amp = handles(model, level="O1", dtype=FP16, cast_outputs=None)
    found = {site.rpartition(":")[0] for site in amp.stats()["fused"]}
    assert f"test_written.{cls.__name__}.forward" in found
    result = model(x)
    assert is_gated(model) and result.dtype is FP16
    # numbers up to 2, rounded to half after each of two layers and the product: half an ulp each
    torch.testing.assert_close(result.float(), expected, rtol=0, atol=3 * EPS)
    result.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_module_with_hooks_is_called(handles: Any) -> None:
    model, seen = MLP(nn.SiLU()), []
    handles(model, level="O1")
    hook = model.act.register_forward_hook(lambda *_: seen.append(1))
    model(torch.randn(2, 8))
    assert seen == [1] and not is_gated(model)
    hook.remove()
    every = nn.modules.module.register_module_forward_hook(lambda *_: seen.append(2))
    model(torch.randn(2, 8))
    every.remove()
    assert 2 in seen and not is_gated(model)
    model(torch.randn(2, 8))
    assert is_gated(model)


def test_a_gate_of_another_dtype(handles: Any) -> None:
    """FP32 times half is FP32."""

    class Wide(MLP):
        def forward(self, x: Tensor) -> Tensor:
            h, gate = self.gate(x), self.up(x).float()
            self.product = self.act(h) * gate
            self.written = F.silu(h) * gate
            return self.product

    model = Wide(nn.SiLU())
    sites = handles(model, level="O1").stats()["fused"]
    assert sum("Wide" in site for site in sites) == 2
    model(torch.randn(2, 8))
    assert model.product.dtype is model.written.dtype is FP32
    assert {model.product.grad_fn.name(), model.written.grad_fn.name()} == {"MulBackward0"}


CALLS: list[Tensor] = []


def noted(x: Tensor) -> Tensor:
    CALLS.append(x)
    return x


@pytest.mark.parametrize("fuse", [True, False])
def test_operands_are_evaluated_once_and_in_their_order(handles: Any, fuse: bool) -> None:
    """Also where the operands do not fit, and the expression runs as it stands."""

    class Notes(MLP):
        def forward(self, x: Tensor) -> Tensor:
            gate, up = self.gate(x), self.up(x)
            if not fuse:
                gate, up = gate.float(), up.float()
            self.operands = up, gate
            self.product = noted(up) * F.silu(noted(gate))
            return self.product

    model = Notes(nn.SiLU())
    handles(model, level="O1")
    CALLS.clear()
    model(torch.randn(2, 8))
    assert is_gated(model) is fuse
    assert [id(x) for x in CALLS] == [id(x) for x in model.operands]


def test_another_module_in_its_place_is_called(handles: Any) -> None:
    model = MLP(nn.SiLU())
    handles(model, level="O1")
    model.act = nn.Tanh()
    x = torch.randn(2, 8)
    model(x)
    assert not is_gated(model)
    model.act = nn.GELU()
    model(x)
    assert is_gated(model)


def test_dropout_between_keeps_its_place_in_the_random_numbers(handles: Any) -> None:
    class Random(MLP):
        def forward(self, x: Tensor) -> Tensor:
            self.product = self.act(F.dropout(self.gate(x))) * F.dropout(self.up(x))
            return self.product

    results = []
    for fuse in (True, False):
        torch.manual_seed(0)
        model = Random(nn.SiLU())
        amp = handles(model, level="O1", fuse_ops=fuse)
        results.append(model(torch.ones(4, 8)))
        assert is_gated(model) is fuse
        amp.disable()
    assert torch.equal(results[0] == 0, results[1] == 0)
    # one rounding instead of two of a product up to 2
    torch.testing.assert_close(*results, rtol=2 * EPS, atol=EPS)


@pytest.mark.parametrize(
    "fields", [{"level": "O1", "fuse_ops": False}, {"level": "O0"}, {"level": "O3"}]
)
def test_without_the_field_code_stays(handles: Any, fields: Any) -> None:
    own = gelu.__code__
    model = Calls(gelu)
    amp = handles(model, **fields)
    assert amp.stats()["fused"] == [] and gelu.__code__ is own
    model(torch.randn(2, 4))


def test_the_field_counts_after_another_enable(handles: Any) -> None:
    own = gelu.__code__
    handles(Calls(gelu), level="O1").disable()
    amp = handles(Calls(gelu), level="O1", fuse_ops=False)
    assert gelu.__code__ is own
    amp.disable()


class Inside(nn.Module):
    """Code that only half tensors inside an enabled forward may run as one op."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        half = self.layer(x)
        with tritonamp.disable_casts():
            uncast = gelu(half.float())
        return (
            gelu(half),
            gelu(half.float()),
            gelu(half.double()),
            uncast,
            gelu(2.0 * torch.ones(())),
        )


def test_other_dtypes_run_the_code_as_it_stands(handles: Any) -> None:
    model = Inside()
    amp = handles(model, level="O1", cast_outputs=None)
    found = model(torch.randn(3, 4))
    assert [y.dtype for y in found] == [FP16, FP32, torch.float64, FP32, FP32]
    names = [y.grad_fn.name() for y in found[:-1]]
    assert names == ["GeluBackward0", "MulBackward0", "MulBackward0", "MulBackward0"]
    outside = gelu(found[0].detach())
    assert outside.dtype is FP16
    amp.disable()
    assert torch.equal(gelu(found[0].detach()), outside)


def test_transforms_run_the_code_as_it_stands(handles: Any) -> None:
    class Transformed(Calls):
        def forward(self, *inputs: Tensor) -> Any:
            x = self.layer(inputs[0])
            return self.function(x), torch.func.vmap(self.function)(x)

    model = Transformed(quick_gelu)
    handles(model, level="O1", dtype=FP16, cast_outputs=None)
    one_op, mapped = model(torch.randn(3, 4))
    assert one_op.grad_fn.name() == "ActivationBackward"
    assert mapped.grad_fn.name() == "MulBackward0"
    # the sigmoid and the product are rounded one by one
    torch.testing.assert_close(mapped, one_op, rtol=2 * EPS, atol=EPS / 64)


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def test_sparse_tensors_run_the_code_as_it_stands(handles: Any) -> None:
    def squared(x: Tensor) -> Tensor:
        return F.relu(x) ** 2

    class Sparse(Calls):
        def forward(self, *inputs: Tensor) -> Tensor:
            return self.function(self.layer(inputs[0]).to_sparse())

    model = Sparse(squared)
    amp = handles(model, level="O1", dtype=BF16, cast_outputs=None)
    assert len(amp.stats()["fused"]) == 1
    result = model(torch.randn(6, 4))
    assert result.is_sparse and result.grad_fn is not None
    assert result.grad_fn.name() == "PowBackward0"


def test_numbers_and_errors_are_those_of_the_code(handles: Any) -> None:
    class Faulty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            return gelu(x)

    model = Faulty()
    handles(model, level="O1")
    with pytest.raises(TypeError) as raised:
        model("text")
    last = traceback.extract_tb(raised.value.__traceback__)[-1]
    lines, first = inspect.getsourcelines(gelu)
    assert (last.filename, last.lineno) == (__file__, first + 2)
    assert last.line == lines[2].strip()


def test_two_models_share_a_function(handles: Any) -> None:
    own = gelu.__code__
    first, second = Calls(gelu), Calls(gelu)
    one = handles(first, level="O1", cast_outputs=None)
    two = handles(second, level="O1", cast_outputs=None, fuse_ops=False)
    x = torch.randn(2, 4)
    assert (first(x).dtype, second(x).dtype) == (FP16, FP32)
    one.disable()
    assert second(x).dtype is FP32 and gelu.__code__ is not own
    two.disable()
    assert gelu.__code__ is own


def test_a_second_model_may_have_more_modules(handles: Any) -> None:
    class Two(nn.Module):
        def __init__(self, left: nn.Module, right: nn.Module) -> None:
            super().__init__()
            self.layer, self.left, self.right = nn.Linear(8, 8), left, right

        def forward(self, x: Tensor) -> Any:
            x = self.layer(x)
            left = self.left(x) * x
            return left, self.right(x) * x

    x = torch.randn(2, 8)
    first, second = Two(nn.SiLU(), nn.Tanh()), Two(nn.Tanh(), nn.SiLU())
    one = handles(first, level="O1")
    two = handles(second, level="O1")
    assert len(one.stats()["fused"]) == len(two.stats()["fused"]) == 1
    for model, place in ((first, 0), (second, 1)):
        outputs = model(x)
        names = [y.grad_fn.name() for y in outputs]
        assert [name == "ToCopyBackward0" for name in names] == [True, True]
        inner = [y.grad_fn.next_functions[0][0].name() for y in outputs]
        assert [name == "ActivationBackward" for name in inner] == [place == 0, place == 1]


class Twice(WrittenSiLU):
    def __call__(self, x: Tensor) -> Any:
        return 2 * super().__call__(x)


FACTOR = torch.tensor(3.0)


class Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x) * FACTOR


class Itself(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x) * x


def without_source(function: Callable[..., Tensor]) -> nn.Module:
    """Return a module that adds 1 to a function that it holds."""
    space: dict[str, Any] = {}
    exec("def forward(self, x):\n    return self.function(x) + 1", space)
    act: Any = type("WithoutSource", (Held,), {"forward": space["forward"]})(function)
    return act  # type: ignore[no-any-return]


MORE = nn.SiLU(inplace=True), Twice(), Scaled(), Itself(), without_source(F.silu)


@pytest.mark.parametrize("act", MORE, ids=lambda a: type(a).__name__)
def test_a_module_that_does_more_is_called(handles: Any, act: nn.Module) -> None:
    class Shares(MLP):
        def forward(self, x: Tensor) -> Tensor:
            h = self.gate(x)
            self.product = self.act(h) * self.up(h)
            return self.product + h

    model, x = Shares(act), torch.randn(2, 8)
    results = []
    for fuse in (False, True):
        amp = handles(model, level="O1", fuse_ops=fuse)
        results.append(model(x))
        assert not is_gated(model)
        amp.disable()
    assert torch.equal(*results)


def test_equal_code_of_other_globals_is_another_function(handles: Any, tmp_path: Path) -> None:
    text = """from torch import nn
from torch.nn.functional import {} as act


class Act(nn.Module):
    def forward(self, x):
        return act(x)
"""
    acts = []
    for name in ("silu", "mish"):
        path = tmp_path / f"{name}.py"
        path.write_text(text.format(name))
        space: dict[str, Any] = {"__name__": name}
        exec(compile(path.read_text(), str(path), "exec"), space)
        acts.append(space["Act"]())
    for act in acts:
        model = MLP(act)
        handles(model, level="O1")
        model(torch.randn(2, 8))
        assert is_gated(model) is (act is acts[0])


def test_generators_are_left_alone(handles: Any) -> None:
    class Yields(MLP):
        def forward(self, x: Tensor) -> Any:
            for _ in range(2):
                yield self.act(self.gate(x)) * self.up(x)

    model = Yields(nn.SiLU())
    amp = handles(model, level="O1")
    outputs = model(torch.randn(2, 8))
    next(outputs)
    amp.disable()
    next(outputs)


def test_code_that_runs_while_a_model_is_disabled_goes_on(handles: Any) -> None:
    class Ends(MLP):
        def forward(self, x: Tensor) -> Any:
            x = self.gate(x)
            self.end()
            return self.act(x) * x

    model = Ends(nn.SiLU())
    first = handles(MLP(nn.SiLU()), level="O1")
    amp = handles(Ends(nn.SiLU()), level="O1")

    def end() -> None:
        first.disable()
        amp.disable()

    model.end = end  # type: ignore[assignment]
    assert model(torch.randn(2, 8)).dtype is FP32


def test_a_gate_may_change_the_input_of_the_module(handles: Any) -> None:
    class Changes(MLP):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                h = self.gate(x)
                self.product = self.act(h) * h.add_(1)
            return self.product

    sites = handles(Changes(nn.SiLU()), level="O1").stats()["fused"]
    assert not any("Changes" in site for site in sites)


SIZES = ([1, 2], [3, 4])  # Hashable by type, without a hash


class AnswersAll:
    """A callable that answers each question about an attribute."""

    def __getattr__(self, name: str) -> Any:
        return AnswersAll()

    def __call__(self, x: Tensor) -> Tensor:
        return x * len(SIZES)


def of_no_module(x: Tensor) -> Tensor:
    return x * len(SIZES)


of_no_module.__module__ = None  # type: ignore[assignment]


def of_itself(x: Tensor) -> Tensor:
    return x * len(SIZES)


of_itself.__wrapped__ = of_itself  # type: ignore[attr-defined]


def of_changed_source(tmp_path: Path, text: str) -> Callable[..., Tensor]:
    """Return a function whose file has changed since."""
    path = tmp_path / "changed.py"
    path.write_text("import torch\n\n\ndef act(x):\n    return x * torch.sigmoid(x)\n")
    space: dict[str, Any] = {"__name__": "changed"}
    exec(compile(path.read_text(), str(path), "exec"), space)
    path.write_text(text)
    found: Callable[..., Tensor] = space["act"]
    return found


@pytest.mark.parametrize(
    "text", ["#\n" * 9, "a = 1; b = 2\n" * 9, "\n\n\ndef act(x):\n    return (x\n", "", "\0\n" * 9]
)
def test_changed_source_is_no_error(handles: Any, tmp_path: Path, text: str) -> None:
    model = Calls(of_changed_source(tmp_path, text))
    amp = handles(model, level="O1")
    assert amp.stats()["fused"] == []
    model(torch.randn(2, 4))


def test_callables_of_any_kind_are_no_error(handles: Any) -> None:
    for function in (AnswersAll(), of_no_module, of_itself):
        model = Calls(function)
        amp = handles(model, level="O1")
        assert amp.stats()["fused"] == []
        model(torch.randn(2, 4))
        amp.disable()


def test_code_that_another_tool_has_replaced_stays(handles: Any) -> None:
    def scaled(x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)

    model = Calls(scaled)
    amp = handles(model, level="O1")
    other = (lambda x: 2 * x).__code__
    scaled.__code__ = other
    amp.disable()
    assert scaled.__code__ is other
    assert handles(model, level="O1").stats()["fused"] == [] and scaled.__code__ is other
    scaled.__code__ = next(row.original for f, row in installed._rows.items() if f is scaled)


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    wrapper.__wrapped__ = function  # type: ignore[attr-defined]
    return wrapper


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    @staticmethod
    def static(x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)

    def method(self, x: Tensor, /, scale: float = 1.0, *, shift: float = 0.0) -> Tensor:
        """With defaults, and a nested function that reads another name."""

        def shifted(y: Tensor) -> Tensor:
            return y + shift

        self.inner = shifted.__qualname__
        return shifted(x * torch.sigmoid(x) * scale)


class Decorated(Base):
    @decorated
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x * torch.sigmoid(x)


class Static(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.static(super().forward(x))


class Method(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.method(self.layer(x), shift=1.0)


class Partial(Base):
    def __init__(self) -> None:
        super().__init__()
        self.act = functools.partial(gelu)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.layer(x))


class Bound(Base):
    def __init__(self) -> None:
        super().__init__()
        self.act = self.method

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.layer(x))


# in Python 3.10 code holds the names of inner functions, which depend on the class around it
SITES = {"Base.static"} | ({"Base.method"} if sys.version_info >= (3, 11) else set())
FURTHER: dict[type, set[str]] = {Decorated: {"Decorated.forward"}, Partial: {"gelu"}}


@pytest.mark.parametrize(
    "cls", [Decorated, Static, Method, Partial, Bound], ids=lambda c: c.__name__
)
def test_the_function_is_found(handles: Any, cls: type[Base]) -> None:
    torch.manual_seed(0)
    model, x = cls(), torch.randn(3, 4)
    expected = model(x)
    amp = handles(model, level="O2", cast_outputs=None)
    found = {s.rpartition(":")[0].partition(".")[2] for s in amp.stats()["fused"]}
    assert found == SITES | FURTHER.get(cls, set())
    result = model(x)
    assert result.dtype is FP16 or "Base.method" not in found
    # numbers up to 2, rounded to half by the layer and by each operation on its result
    torch.testing.assert_close(result.float(), expected, rtol=0, atol=2 * EPS)


def test_inner_functions_keep_their_names(handles: Any) -> None:
    model, x = Method(), torch.randn(3, 4)
    model(x)
    name = model.inner
    handles(model, level="O1")
    model(x)
    assert model.inner == name == "Base.method.<locals>.shifted"


def keyword_alone(*, x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def arguments_alone(*xs: Tensor) -> Tensor:
    return xs[0] * torch.sigmoid(xs[0])


class WithoutArguments(nn.Module):
    """Its parameter is not called self."""

    def __init__(this) -> None:
        super().__init__()
        this.layer, this.act, this.swish = nn.Linear(4, 4), nn.SiLU(), keyword_alone

    def forward(this, *xs: Tensor) -> Tensor:
        (x,) = xs
        half = this.layer(x)
        inner = lambda: half * torch.sigmoid(half)  # noqa: E731
        return this.act(half) * half.exp() + this.swish(x=half) + arguments_alone(half) + inner()


def test_functions_without_positional_arguments(handles: Any) -> None:
    model, x = WithoutArguments(), torch.randn(3, 4)
    expected = model(x)
    amp = handles(model, level="O1")
    found = [site.rpartition(":")[0].rpartition(".")[2] for site in amp.stats()["fused"]]
    has_inner = sys.version_info >= (3, 11)  # see SITES
    assert found == [*["forward"][: int(has_inner)], "keyword_alone"]
    torch.testing.assert_close(model(x), expected, rtol=2e-2, atol=2e-2)


def test_a_square_of_float16_has_the_range_of_fp32(handles: Any) -> None:
    model = Calls(EXACT["squared_relu_at_once"][0])
    model.layer.bias.data += 300
    handles(model, level="O2", cast_outputs=None)
    output = model(torch.randn(3, 4))
    assert output.dtype is FP32 and bool((output > 65504).all())


def test_copies_pickles_and_checkpoints(handles: Any) -> None:
    model = MLP(nn.SiLU())
    x = torch.randn(2, 8)
    amp = handles(model, level="O2")
    expected = model(x)
    del model.product  # a tensor with a graph has no copy
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), expected) and is_gated(twin)
    loss = checkpoint(model, x, use_reentrant=False).sum()
    loss.backward()
    assert model.gate.weight.grad.isfinite().all()
    amp.disable()
    assert torch.equal(twin(x), expected) and is_gated(twin)
    del twin, model.product
    assert pickle.loads(pickle.dumps(model)) is not None


# torch 2.11 tracing a Function
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled(handles: Any) -> None:
    model = MLP(nn.SiLU())
    handles(model, level="O2")
    x = torch.randn(2, 8)
    expected = model(x)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    # the compiled product rounds twice, before a layer
    torch.testing.assert_close(compiled(x), expected, rtol=2 * EPS, atol=2 * EPS)


def test_explain_names_the_line(handles: Any) -> None:
    class Overflows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def forward(self, x: Tensor) -> Tensor:
            y, gate = 300 + self.layer(x), 300 - self.layer(x)
            return F.silu(y) * gate

    model = Overflows()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = tritonamp.enable(model, optimizer, level="O1")
    try:
        amp.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
        text = amp.explain(replay=True)
    finally:
        amp.disable()
    _, first = inspect.getsourcelines(Overflows.forward)
    assert f"test_written.py:{first + 2}" in text, text


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    assert all(f.__code__ is row.original for f, row in installed._rows.items())
