"""The user's own functions in the cast lists: decorators, registration by name, disable_casts."""

import copy
import math
import pickle
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tritonamp

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64

DECORATORS: dict[str, Callable[[Any], Any]] = {
    "half": tritonamp.half_function,
    "float": tritonamp.float_function,
    "promote": tritonamp.promote_function,
}
REGISTER: dict[str, Callable[[Any, str], None]] = {
    "half": tritonamp.register_half_function,
    "float": tritonamp.register_float_function,
    "promote": tritonamp.register_promote_function,
}
each_list = pytest.mark.parametrize("kind", DECORATORS)

# list: {dtypes of the arguments under the op policy: dtypes that the function gets}
CASTS: dict[str, dict[tuple[torch.dtype, ...], tuple[torch.dtype, ...]]] = {
    "half": {
        (FP32, FP32): (FP16, FP16),
        (FP16, FP32): (FP16, FP16),
        (BF16, FP64): (FP16, FP64),
        (FP32, torch.int64): (FP16, torch.int64),
    },
    "float": {
        (FP16, BF16): (FP32, FP32),
        (FP16, FP32): (FP32, FP32),
        (FP16, FP64): (FP32, FP64),
        (FP16, torch.complex64): (FP32, torch.complex64),
    },
    "promote": {
        (FP16, FP32): (FP32, FP32),
        (FP32, BF16): (FP32, FP32),
        (FP16, FP16): (FP16, FP16),
        (FP16, BF16): (FP32, FP32),
        (FP16, FP64): (FP16, FP64),
        (FP16, torch.int64): (FP16, torch.int64),
    },
}


def seen(*args: Any, **kwargs: Any) -> tuple[torch.dtype, ...]:
    """The dtypes of what it got."""
    return tuple(value.dtype for value in (*args, *kwargs.values()))


@pytest.fixture
def amp() -> Iterator[tritonamp.Amp]:
    handle = tritonamp.enable(nn.Linear(1, 1))
    yield handle
    if handle._enabled:
        handle.disable()


@pytest.fixture
def registered() -> Iterator[None]:
    """Registrations are for good; these end with the test."""
    registry = tritonamp.casts.user_functions.registered
    before = list(registry.wanted)
    yield
    registry.wanted[:] = before


@pytest.fixture
def library(registered: None) -> types.ModuleType:
    """Another library's module with functions."""
    module = types.ModuleType("library")
    module.seen, module.add, module.number = seen, lambda x, y: x + y, 3  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize(
    ("kind", "given", "got"),
    [(kind, given, got) for kind, rows in CASTS.items() for given, got in rows.items()],
)
def test_casts(
    kind: str, given: tuple[torch.dtype, ...], got: tuple[torch.dtype, ...], amp: tritonamp.Amp
) -> None:
    function = DECORATORS[kind](seen)
    first, second = (torch.ones(2, dtype=dtype) for dtype in given)
    with amp.autocast():
        assert function(first, second) == got
        assert function(first, by_name=second) == got
        with tritonamp.disable_casts():
            assert function(first, second) == given
    assert function(first, second) == given


@each_list
def test_nested_arguments(kind: str, amp: tritonamp.Amp) -> None:
    function = DECORATORS[kind](lambda values, options: seen(*values, options["x"]))
    wide, half = torch.ones(2), torch.ones(2).half()
    with amp.autocast():
        assert {*function([wide, half], {"x": half})} == {FP16 if kind == "half" else FP32}


@each_list
def test_a_decorated_function_keeps_its_name_and_text(kind: str) -> None:
    def area(x: Tensor) -> Tensor:
        """Of a square."""
        return x * x

    decorated = DECORATORS[kind](area)
    assert (decorated.__name__, decorated.__doc__, decorated.__wrapped__) == (
        "area",
        "Of a square.",
        area,
    )


@each_list
def test_nothing_is_cast_under_stock_autocast(kind: str, amp: tritonamp.Amp) -> None:
    function = DECORATORS[kind](seen)
    with torch.autocast("cpu", dtype=BF16):
        assert function(torch.ones(2), torch.ones(2).half()) == (FP32, FP16)


@each_list
@pytest.mark.parametrize("level", ["O0", "O3"])
def test_nothing_is_cast_without_an_op_policy(kind: str, level: str) -> None:
    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return DECORATORS[kind](seen)(x, x.float(), x.bfloat16())

    model = Model(2, 2)
    amp = tritonamp.enable(model, level=level)
    assert model(torch.ones(1, 2)) == (FP16 if level == "O3" else FP32, FP32, BF16)
    amp.disable()


@each_list
def test_nothing_is_cast_in_other_threads(kind: str, amp: tritonamp.Amp) -> None:
    found: list[Any] = []
    function = DECORATORS[kind](seen)
    with amp.autocast():
        thread = threading.Thread(
            target=lambda: found.append(function(torch.ones(2), torch.ones(2).half()))
        )
        thread.start()
        thread.join()
    assert found == [(FP32, FP16)]


def test_float_function_runs_without_casts(amp: tritonamp.Amp) -> None:
    x = torch.randn(3, 3)
    with amp.autocast():
        found = tritonamp.float_function(torch.matmul)(x, x)
        assert (
            tritonamp.float_function(F.binary_cross_entropy)(x.sigmoid().half(), x.sigmoid()).dtype
            is FP32
        )
    assert torch.equal(found, x @ x)


def test_the_half_dtype_is_the_policys() -> None:
    amp = tritonamp.enable(nn.Linear(1, 1), dtype=BF16)
    with amp.autocast():
        assert tritonamp.half_function(seen)(torch.ones(2), torch.ones(2).half()) == (BF16, BF16)
    amp.disable()


@each_list
def test_gradients_pass_through_the_casts(kind: str, amp: tritonamp.Amp) -> None:
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, dtype=FP16, requires_grad=True)
    with amp.autocast():
        DECORATORS[kind](torch.mul)(x, 3 * y).float().sum().backward()
    assert torch.equal(x.grad, 3 * torch.ones(2))
    assert torch.equal(y.grad, 3 * torch.ones(2, dtype=FP16))


def test_disable_casts_inside_a_forward() -> None:
    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            half = super().forward(x)
            with tritonamp.disable_casts():
                assert not torch.is_autocast_enabled("cpu")
                return half.dtype, half.exp().dtype, (x @ x.t()).dtype, super().forward(x).dtype

    model = Model(4, 4)
    amp = tritonamp.enable(model)
    assert model(torch.randn(2, 4)) == (FP16, FP16, FP32, FP32)
    amp.disable()
    with tritonamp.disable_casts():  # outside it does nothing
        assert torch.randn(2).half().exp().dtype is FP16


def test_an_exception_ends_disable_casts(amp: tritonamp.Amp) -> None:
    with amp.autocast():
        with pytest.raises(KeyError), tritonamp.disable_casts():
            raise KeyError
        assert torch.ones(2).half().exp().dtype is FP32


# registration by name


@each_list
def test_registered_functions_are_cast_while_a_model_is_enabled(kind: str, library: Any) -> None:
    given, got = next(iter(CASTS[kind].items()))
    x, y = (torch.ones(2, dtype=dtype) for dtype in given)
    REGISTER[kind](library, "seen")
    assert library.seen is seen  # nothing is enabled
    amp = tritonamp.enable(nn.Linear(1, 1))
    assert library.seen is not seen
    assert library.seen(x, y) == given
    with amp.autocast():
        assert library.seen(x, y) == got
    amp.disable()
    assert library.seen is seen
    again = tritonamp.enable(nn.Linear(1, 1))
    with again.autocast():
        assert library.seen(x, y) == got
    again.disable()
    assert library.seen is seen


def test_registering_while_a_model_is_enabled(library: Any, amp: tritonamp.Amp) -> None:
    tritonamp.register_half_function(library, "seen")
    with amp.autocast():
        assert library.seen(torch.ones(2)) == (FP16,)
    amp.disable()
    assert library.seen is seen


def test_the_last_of_two_models_puts_the_originals_back(library: Any) -> None:
    tritonamp.register_float_function(library, "seen")
    first, second = tritonamp.enable(nn.Linear(1, 1)), tritonamp.enable(nn.Linear(1, 1), dtype=BF16)
    wrapper = library.seen
    first.disable()
    assert library.seen is wrapper
    with second.autocast():
        assert library.seen(torch.ones(2).half()) == (FP32,)
    second.disable()
    assert library.seen is seen


def test_registering_twice(library: Any) -> None:
    tritonamp.register_half_function(library, "seen")
    tritonamp.register_half_function(library, "seen")
    amp = tritonamp.enable(nn.Linear(1, 1))
    with amp.autocast():
        assert library.seen(torch.ones(2)) == (FP16,)
    amp.disable()
    assert library.seen is seen


def test_functions_of_torch(registered: None) -> None:
    """Where modules look their functions up: nn.Tanh calls torch.tanh."""
    original = torch.tanh
    tritonamp.register_float_function(torch, "tanh")
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    amp = tritonamp.enable(model, cast_outputs=None)
    assert model(torch.ones(1, 2)).dtype is FP32
    amp.disable()
    assert torch.tanh is original


class Ops:
    @staticmethod
    def static(x: Tensor) -> Any:
        return x.dtype

    @classmethod
    def of_class(cls, x: Tensor) -> Any:
        return cls.__name__, x.dtype

    def method(self, x: Tensor) -> Any:
        return type(self).__name__, x.dtype


class MoreOps(Ops):
    pass


@pytest.mark.parametrize("name", ["static", "of_class", "method"])
@pytest.mark.parametrize("owner", [Ops, MoreOps])
def test_methods_stay_what_they_are(owner: Any, name: str, registered: None) -> None:
    before = dict(vars(owner)), dict(vars(Ops))
    tritonamp.register_half_function(owner, name)
    amp = tritonamp.enable(nn.Linear(1, 1))
    x = torch.ones(2)
    with amp.autocast():
        expected = FP16 if name == "static" else ("MoreOps", FP16)
        assert getattr(MoreOps(), name)(x) == expected
        if owner is MoreOps:
            assert getattr(Ops(), name)(x) == (FP32 if name == "static" else ("Ops", FP32))
    amp.disable()
    assert (dict(vars(owner)), dict(vars(Ops))) == before


def test_functions_of_an_object(registered: None) -> None:
    ops = Ops()
    tritonamp.register_half_function(ops, "method")
    amp = tritonamp.enable(nn.Linear(1, 1))
    with amp.autocast():
        assert ops.method(torch.ones(2)) == ("Ops", FP16)
        assert Ops().method(torch.ones(2)) == ("Ops", FP32)
    amp.disable()
    assert vars(ops) == {}
    assert pickle.loads(pickle.dumps(copy.copy(ops))).method(torch.ones(2)) == ("Ops", FP32)


@each_list
@pytest.mark.parametrize(
    ("owner", "name"), [(math, "nowhere"), (math, "pi"), (Ops, "absent"), (F, "")]
)
def test_names_that_are_no_function(kind: str, owner: Any, name: str) -> None:
    text = f"name: expected the name of a function in {owner.__name__}, got {name!r}: it has none"
    with pytest.raises(ValueError, match=text):
        REGISTER[kind](owner, name)
    tritonamp.enable(nn.Linear(1, 1)).disable()  # nothing was kept


@pytest.mark.compiled
def test_compiled_in_one_piece() -> None:
    torch.compiler.reset()
    half, wide, widest = (decorate(lambda x, y: x * 2 + y) for decorate in DECORATORS.values())

    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            with tritonamp.disable_casts():
                plain = x @ x.t()
            return half(x, y), wide(y, y), widest(x, y), widest(y, y), plain

    model, x = Model(3, 3), torch.randn(3, 3)
    amp = tritonamp.enable(model, cast_outputs=None)
    expected = model(x)
    assert seen(*expected) == (FP16, FP32, FP32, FP16, FP32)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(compiled(x), expected, strict=True))
    function = torch.compile(half, backend="aot_eager", fullgraph=True)
    assert function(x, x).dtype is FP32
    with amp.autocast():
        assert function(x, x).dtype is FP16
    assert function(x, x).dtype is FP32
    amp.disable()
