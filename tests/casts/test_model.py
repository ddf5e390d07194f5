"""Casts of nested values, and models of many kinds at every level against their FP32 selves."""

import copy
import dataclasses
import gc
import re
from collections import ChainMap, OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from outputs import floats, largest_error
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import tritonamp
from tritonamp.casts.tree import cast_tree, from_half, to_half

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


# nested values

Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass
class Sample:
    x: Any
    label: str = "cat"


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    inner: Any = None


@dataclasses.dataclass
class Slotted:
    __slots__ = ("x",)
    x: Any


@dataclasses.dataclass
class ModelOutput(OrderedDict):  # type: ignore[type-arg]
    """What Hugging Face models return: a dataclass that is an OrderedDict of its fields that are
    not None.
    """

    loss: Any = None
    logits: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                super().__setitem__(field.name, getattr(self, field.name))

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.keys() and value is not None:
            super().__setitem__(name, value)
        super().__setattr__(name, value)

    def __reduce__(self) -> Any:
        function, _, *rest = super().__reduce__()
        return (
            function,
            tuple(getattr(self, field.name) for field in dataclasses.fields(self)),
            *rest,
        )


class ReadOnly(Mapping[str, Any]):
    """A Mapping that is no MutableMapping."""

    def __init__(self, items: dict[str, Any]) -> None:
        self.items_of_it = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self.items_of_it[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_of_it)

    def __len__(self) -> int:
        return len(self.items_of_it)


class SharesItems(ReadOnly, MutableMapping[str, Any]):
    """What ``copy.copy`` makes of it holds the same dictionary."""

    def __setitem__(self, key: str, value: Any) -> None:
        self.items_of_it[key] = value

    def __delitem__(self, key: str) -> None:
        del self.items_of_it[key]


class Locked(dict[str, Any]):
    """A dict that refuses to be written to."""

    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError("read only")


class TwoArguments(tuple[Any, ...]):
    """A tuple that is made of something else than its items."""

    def __new__(cls, value: Any, label: str) -> "TwoArguments":
        made = super().__new__(cls, (value, label))
        made.label = label
        return made


class OneArgument(Pair):
    """A named tuple with a constructor of its own."""

    def __new__(cls, second: Any) -> "OneArgument":
        return super().__new__(cls, 1, second)


class Labelled(list[Any]):
    """A list that is made of something else than its items."""

    def __init__(self, value: Any, label: str) -> None:
        super().__init__([value])
        self.label = label


class Batch:
    """Has a ``to`` that takes a dtype, as batches of graph and text libraries do."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def to(self, dtype: torch.dtype) -> "Batch":
        return self if self.x.dtype is dtype else Batch(self.x.to(dtype))


class Converter:
    """Has a ``to`` that is about something else."""

    def to(self, unit: str) -> str:
        return unit.upper()


def packed(dtype: torch.dtype = FP32) -> PackedSequence:
    return pack_padded_sequence(torch.ones(3, 2, 2, dtype=dtype), [3, 1])


# name: (a container around a value, the way back to the value)
CONTAINERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "dict": (lambda v: {"a": v, "b": 1}, lambda c: c["a"]),
    "OrderedDict": (lambda v: OrderedDict(a=v), lambda c: c["a"]),
    "defaultdict": (lambda v: defaultdict(list, a=v), lambda c: c["a"]),
    "UserDict": (lambda v: UserDict(a=v), lambda c: c["a"]),
    "list": (lambda v: [None, v], lambda c: c[1]),
    "tuple": (lambda v: (v, "text"), lambda c: c[0]),
    "namedtuple": (lambda v: Pair(1, v), lambda c: c.second),
    "dataclass": (lambda v: Sample(v), lambda c: c.x),
    "frozen dataclass": (lambda v: Frozen(v), lambda c: c.x),
    "dataclass with slots": (lambda v: Slotted(v), lambda c: c.x),
    "ModelOutput": (lambda v: ModelOutput(logits=v), lambda c: c.logits),
    "mapping proxy": (lambda v: MappingProxyType({"a": v}), lambda c: c["a"]),
    "read-only mapping": (lambda v: ReadOnly({"a": v, "b": 1}), lambda c: c["a"]),
    "mapping whose copies share": (lambda v: SharesItems({"a": v, "b": 1}), lambda c: c["a"]),
    "locked dict": (lambda v: Locked(a=v), lambda c: c["a"]),
    "ChainMap": (lambda v: ChainMap({"b": 1}, {"a": v}), lambda c: c["a"]),
    "deque": (lambda v: deque([v], maxlen=1), lambda c: c[0]),
    "UserList": (lambda v: UserList([1, v]), lambda c: c[1]),
    "tuple of two arguments": (lambda v: TwoArguments(v, "text"), lambda c: c[0]),
    "named tuple of one argument": (lambda v: OneArgument(v), lambda c: c.second),
    "labelled list": (lambda v: Labelled(v, "text"), lambda c: c[0]),
    "nested": (
        lambda v: {"a": [Pair(Frozen(None, inner=(v,)), 2)]},
        lambda c: c["a"][0].first.inner[0],
    ),
}
BUILT_IN = {"dict", "OrderedDict", "defaultdict", "list", "tuple", "namedtuple"}
each_container = pytest.mark.parametrize("container", CONTAINERS)

UNTOUCHED: dict[str, Any] = {
    "int64": torch.arange(3),
    "bool": torch.tensor([True]),
    "uint8": torch.zeros(2, dtype=torch.uint8),
    "float64": torch.ones(2, dtype=torch.float64),
    "complex64": torch.ones(2, dtype=torch.complex64),
    "None": None,
    "text": "text",
    "bytes": b"text",
    "number": 1.5,
    "size": torch.Size([2, 3]),
    "dtype": FP32,
    "device": torch.device("cpu"),
    "module": nn.Linear(2, 2),
    "class": Sample,
    "class with to": Batch,
    "other to": Converter(),
    "function": len,
    "empty list": [],
    "empty dict": {},
}


@each_container
@pytest.mark.parametrize("half", [FP16, BF16], ids=str)
def test_containers_keep_their_type(container: str, half: torch.dtype) -> None:
    wrap, unwrap = CONTAINERS[container]
    x = torch.randn(3)
    value = wrap(x)
    result = cast_tree(value, to_half(half))
    assert type(result) is type(value)
    assert torch.equal(unwrap(result), x.to(half))
    assert unwrap(value) is x  # the caller's own is not written to
    assert unwrap(cast_tree(result, from_half(FP32))).dtype is FP32


@each_container
@pytest.mark.parametrize("name", UNTOUCHED)
def test_same_object_where_nothing_changes(container: str, name: str) -> None:
    value = CONTAINERS[container][0](UNTOUCHED[name])
    assert cast_tree(value, to_half(FP16)) is value
    assert cast_tree(UNTOUCHED[name], from_half(FP32)) is UNTOUCHED[name]


@each_container
def test_same_object_where_the_dtype_is_right_already(container: str) -> None:
    value = CONTAINERS[container][0](torch.ones(2))
    assert cast_tree(value, from_half(FP32)) is value
    x = torch.ones(2, dtype=FP16)
    assert cast_tree(x, to_half(FP16)).data_ptr() == x.data_ptr()


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32], ids=str)
@pytest.mark.parametrize("half", [FP16, BF16], ids=str)
def test_to_half_takes_fp32_and_the_other_half(dtype: torch.dtype, half: torch.dtype) -> None:
    assert cast_tree(torch.ones(2, dtype=dtype), to_half(half)).dtype is half
    assert cast_tree(torch.ones(2, dtype=dtype), from_half(FP32)).dtype is FP32


def test_what_a_container_carries_beside_the_tensors_stays() -> None:
    value = defaultdict(list, x=torch.ones(2), y=[1])
    result = cast_tree(value, to_half(FP16))
    assert result.default_factory is list
    assert list(result) == ["x", "y"]
    assert result["y"] is value["y"]
    assert cast_tree(Sample(torch.ones(2), "dog"), to_half(FP16)).label == "dog"


@pytest.mark.parametrize(
    "value", [TwoArguments(torch.ones(2), "dog"), Labelled(torch.ones(2), "dog")], ids=type
)
def test_sequences_keep_their_attributes(value: Any) -> None:
    assert cast_tree(value, to_half(FP16)).label == "dog"


class Stubborn(ReadOnly):
    """A Mapping that cannot be made of a dict."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)


class SharedAndStubborn(SharesItems):
    def __init__(self, **items: Any) -> None:
        super().__init__(items)


class Broken(Mapping[str, Any]):
    """A Mapping that raises whatever is asked."""

    def __getitem__(self, key: str) -> Any:
        raise OSError("closed")

    __iter__ = __len__ = __getitem__  # type: ignore[assignment]


class Lazy:
    """Raises where it is asked for an attribute."""

    def __getattr__(self, name: str) -> Any:
        raise OSError("closed")


def holds_itself() -> list[Any]:
    value = [torch.ones(2)]
    value.append(value)  # type: ignore[arg-type]
    return value


REFUSING = {
    "mapping": Stubborn(a=torch.ones(2)),
    "mapping whose copies share": SharedAndStubborn(a=torch.ones(2)),
    "mapping that raises": Broken(),
    "object that raises": Lazy(),
    "list in itself": holds_itself(),
}


@pytest.mark.parametrize("name", REFUSING)
def test_what_cannot_be_made_with_other_items_stays(name: str) -> None:
    value = REFUSING[name]
    for cast in (to_half(FP16), from_half(FP32)):
        assert cast_tree(value, cast) is value
        x = torch.ones(2, dtype=FP16)
        assert cast_tree([value, x], cast)[0] is value or name == "list in itself"
    if isinstance(value, ReadOnly):
        assert value["a"].dtype is FP32  # not written to


class Given(nn.Module):
    """Returns what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, value: Any) -> Any:
        return value, self.linear(torch.ones(2, dtype=self.linear.weight.dtype))


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@each_container
def test_containers_pass_through_a_step(container: str, level: str) -> None:
    """Whatever looks into a forward's arguments and outputs: casts, watches, explanations."""
    model, (wrap, unwrap) = Given(), CONTAINERS[container]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with tritonamp.enable(
        model, optimizer, level=level, cast_inputs=True, on_nonfinite="explain"
    ) as amp:
        amp.watch(every=1)
        value = wrap(torch.ones(2))
        result, output = model(value)
        assert type(result) is type(value)
        assert unwrap(result).dtype is FP32
        amp.backward(output.sum())
        optimizer.step()
    assert tritonamp.check(Given(), None, (value,), lambda output: output[1].sum()).loss


def test_model_output_stays_one_object_with_two_faces() -> None:
    output = cast_tree(
        ModelOutput(loss=torch.ones((), dtype=FP16), logits=torch.ones(2, dtype=FP16)),
        from_half(FP32),
    )
    assert output.loss is output["loss"]
    assert output.logits.dtype is output["loss"].dtype is FP32
    assert list(output) == ["loss", "logits"]


def test_results_of_torch_keep_their_names() -> None:
    result = cast_tree(torch.ones(2, 2).max(0), to_half(FP16))
    assert type(result) is torch.return_types.max
    assert result.values.dtype is FP16
    assert result.indices.dtype is torch.int64


def test_packed_sequence() -> None:
    value = packed()
    result = cast_tree(value, to_half(FP16))
    assert type(result) is PackedSequence
    assert result.data.dtype is FP16
    assert result.batch_sizes is value.batch_sizes
    assert cast_tree(value, from_half(FP32)) is value


def test_objects_with_to() -> None:
    batch = Batch(torch.ones(2))
    assert cast_tree([batch], to_half(FP16))[0].x.dtype is FP16
    value = [batch]
    assert cast_tree(value, from_half(FP32)) is value


def test_casts_are_differentiable() -> None:
    x = torch.ones(2, requires_grad=True)
    cast_tree({"x": [x]}, to_half(FP16))["x"][0].sum().backward()
    assert torch.equal(x.grad, torch.ones(2))


# models of many kinds


class Lambda(nn.Module):
    """``function(module, *inputs)`` as a model."""

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.function = module, function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.module, *args, **kwargs)


class Rotary(nn.Module):
    """Position angles as complex numbers in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)
        angles = torch.arange(20.0).view(5, 4) / 7
        self.register_buffer("rotation", torch.polar(torch.ones(5, 4), angles))
        self.register_buffer("angles", angles)
        self.register_buffer("steps", torch.arange(5))

    def forward(self, x: Tensor) -> Tensor:
        pairs = self.project(x).float().unflatten(-1, (4, 2))
        return torch.view_as_real(torch.view_as_complex(pairs) * self.rotation).flatten(-2)


class SharedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.also_head = self.head

    def forward(self, tokens: Tensor) -> Tensor:
        return self.also_head(torch.tanh(self.embedding(tokens)))


class Doubles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), nn.Parameter(torch.rand(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).double() * self.scale


def steps(cell: nn.Module, x: Tensor) -> Any:
    state = None
    for item in x:
        state = cell(item, state)
    return state


def transformer_layer(**kwargs: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(
        8, 2, 16, dropout=0, batch_first=True, activation="gelu", **kwargs
    )


def causal(attention: nn.Module, x: Tensor) -> Any:
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
    return attention(x, x, x, attn_mask=mask, is_causal=True)


PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
R = torch.randn

# name: (model, inputs, layers of arithmetic that a value passes one after the other)
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]], int]] = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)),
        lambda: (R(5, 8),),
        2,
    ),
    "conv1d": (lambda: nn.Conv1d(3, 4, 3), lambda: (R(2, 3, 9),), 1),
    "conv2d": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3, padding="same", padding_mode="reflect"),
            nn.Tanh(),
            nn.Conv2d(4, 4, 3, groups=2),
        ),
        lambda: (R(2, 3, 7, 7),),
        2,
    ),
    "conv3d": (
        lambda: nn.Sequential(
            nn.Conv3d(2, 3, 3), nn.MaxPool3d(2), nn.Conv3d(3, 2, 2), nn.AvgPool3d(2)
        ),
        lambda: (R(1, 2, 9, 9, 9),),
        4,
    ),
    "conv_transpose1d": (lambda: nn.ConvTranspose1d(3, 4, 3), lambda: (R(2, 3, 5),), 1),
    "conv_transpose2d": (
        lambda: nn.ConvTranspose2d(3, 4, 3, stride=2),
        lambda: (R(2, 3, 5, 5),),
        1,
    ),
    "conv_transpose3d": (lambda: nn.ConvTranspose3d(3, 4, 3), lambda: (R(2, 3, 4, 4, 4),), 1),
    "upsample": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.Upsample(scale_factor=2, mode="bilinear"), nn.PixelShuffle(2)
        ),
        lambda: (R(2, 3, 6, 6),),
        2,
    ),
    "lstm": (lambda: nn.LSTM(4, 6, 2, batch_first=True), lambda: (R(3, 5, 4),), 10),
    "lstm with state": (lambda: nn.LSTM(4, 6), lambda: (R(5, 3, 4), (R(1, 3, 6), R(1, 3, 6))), 5),
    "gru": (lambda: nn.GRU(4, 6, 2, bidirectional=True), lambda: (R(5, 3, 4),), 10),
    "rnn": (lambda: nn.RNN(4, 6), lambda: (R(5, 3, 4),), 5),
    "rnn relu": (lambda: nn.RNN(4, 6, nonlinearity="relu"), lambda: (R(5, 3, 4),), 5),
    "packed lstm": (
        lambda: nn.LSTM(4, 6, 2, bidirectional=True),
        lambda: (pack_padded_sequence(R(5, 3, 4), [5, 3, 2]),),
        10,
    ),
    "packed gru": (
        lambda: nn.GRU(4, 6),
        lambda: (pack_padded_sequence(R(5, 3, 4), [2, 5, 3], enforce_sorted=False),),
        5,
    ),
    "lstm cell": (lambda: Lambda(nn.LSTMCell(4, 6), steps), lambda: (R(5, 3, 4),), 5),
    "gru cell": (lambda: Lambda(nn.GRUCell(4, 6), steps), lambda: (R(5, 3, 4),), 5),
    "rnn cell": (lambda: Lambda(nn.RNNCell(4, 6), steps), lambda: (R(5, 3, 4),), 5),
    "attention": (
        lambda: Lambda(nn.MultiheadAttention(8, 2, batch_first=True), lambda m, x: m(x, x, x)),
        lambda: (R(2, 5, 8),),
        4,
    ),
    "cross attention": (
        lambda: Lambda(
            nn.MultiheadAttention(8, 2, batch_first=True, kdim=4, vdim=6),
            lambda m, q, k, v: m(q, k, v, need_weights=False)[0],
        ),
        lambda: (R(2, 5, 8), R(2, 7, 4), R(2, 7, 6)),
        4,
    ),
    "causal attention": (
        lambda: Lambda(nn.MultiheadAttention(8, 2, batch_first=True), causal),
        lambda: (R(2, 5, 8),),
        4,
    ),
    "transformer layer": (transformer_layer, lambda: (R(2, 5, 8),), 8),
    "transformer layer, norm first": (
        lambda: transformer_layer(norm_first=True),
        lambda: (R(2, 5, 8),),
        8,
    ),
    "transformer": (
        lambda: nn.TransformerEncoder(transformer_layer(), 2, enable_nested_tensor=False),
        lambda: (R(2, 5, 8), None, PADDING),
        16,
    ),
    "decoder": (
        lambda: nn.TransformerDecoderLayer(
            8, 2, 16, dropout=0, batch_first=True, activation="gelu"
        ),
        lambda: (R(2, 5, 8), R(2, 3, 8)),
        12,
    ),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(10, 8, padding_idx=0), nn.Linear(8, 3)),
        lambda: (torch.randint(10, (3, 4)),),
        1,
    ),
    "embedding bag": (
        lambda: nn.Sequential(nn.EmbeddingBag(10, 8, mode="mean"), nn.Linear(8, 3)),
        lambda: (torch.randint(10, (3, 4)),),
        2,
    ),
    "batch norm 1d": (
        lambda: nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8)),
        lambda: (R(16, 4),),
        2,
    ),
    "batch norm 2d": (
        lambda: nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)),
        lambda: (R(2, 3, 6, 6),),
        3,
    ),
    "instance norm": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3, bias=False),
            nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        ),
        lambda: (R(2, 3, 6, 6),),
        2,
    ),
    "group norm": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Conv2d(4, 2, 1)),
        lambda: (R(2, 3, 6, 6),),
        3,
    ),
    "layer norm": (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3)),
        lambda: (R(6, 4),),
        3,
    ),
    "rms norm": (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.RMSNorm(8), nn.Linear(8, 3)),
        lambda: (R(6, 4),),
        3,
    ),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(4, 8)), lambda: (R(6, 4),), 2),
    "spectral norm": (
        lambda: parametrizations.spectral_norm(nn.Conv2d(3, 4, 3)),
        lambda: (R(2, 3, 6, 6),),
        3,
    ),
    "spectral norm, hooks": (
        lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 8)), nn.Tanh()),
        lambda: (R(6, 4),),
        3,
    ),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(4, 4)), lambda: (R(6, 4),), 2),
    "bilinear": (
        lambda: Lambda(
            nn.ModuleList([nn.Linear(4, 4), nn.Bilinear(4, 5, 3)]), lambda m, x, y: m[1](m[0](x), y)
        ),
        lambda: (R(6, 4), R(6, 5)),
        3,
    ),
    "prelu": (lambda: nn.Sequential(nn.Linear(4, 8), nn.PReLU(8)), lambda: (R(6, 4),), 2),
    "softmax": (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.Softmax(-1), nn.Linear(8, 8), nn.LogSoftmax(-1)),
        lambda: (R(6, 4),),
        4,
    ),
    "rotary": (Rotary, lambda: (R(2, 5, 8),), 2),
    "tied": (SharedHead, lambda: (torch.randint(10, (3, 4)),), 3),
    "doubles": (Doubles, lambda: (R(3, 4),), 1),
}
each_model = pytest.mark.parametrize("name", MODELS)
# without an op policy nothing reconciles half values with the FP32 ones that torch makes inside
# these
MIXED_INSIDE = {"causal attention", "orthogonal"}
each_model_and_level = pytest.mark.parametrize(
    ("name", "level"),
    [
        (name, level)
        for name in MODELS
        for level in ("O1", "O2", "O3", "O5")
        if level != "O3" or name not in MIXED_INSIDE
    ],
)


def build(name: str) -> tuple[nn.Module, tuple[Any, ...], int]:
    make, inputs, layers = MODELS[name]
    torch.manual_seed(0)
    return make(), inputs(), layers


@pytest.fixture(scope="module", autouse=True)
def _stay_registered() -> Iterator[None]:
    """Registering and removing the op table costs 0.1 s: once for the module, not in each of its
    tests.
    """
    amp = tritonamp.enable(nn.Linear(1, 1))
    yield
    amp.disable()
    gc.collect()


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@each_model_and_level
def test_within_half_rounding_of_fp32(name: str, level: str, training: bool) -> None:
    model, inputs, layers = build(name)
    model.train(training)
    reference = copy.deepcopy(model)
    expected = floats(reference(*inputs))
    upstream = [torch.randn_like(e) for e in expected]
    torch.autograd.backward(expected, upstream)
    amp = tritonamp.enable(model, level=level)
    found = floats(model(*inputs))
    assert [f.dtype for f in found] == [e.dtype for e in expected]
    torch.autograd.backward(found, upstream)

    # A layer rounds its input, its weight and its result, each by a relative u at most; 2: the gain
    # of the layers after it. The backward passes the same layers a second time.
    u = torch.finfo(amp.policy.dtype).eps / 2
    tolerance = 2 * 3 * layers * u
    assert 0 < largest_error(found, expected) <= tolerance
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    grads = [(p.grad, q.grad) for p, q in pairs if q.grad is not None]
    assert largest_error([p for p, _ in grads], [q for _, q in grads]) <= 2 * tolerance
    amp.disable()


@each_model_and_level
def test_inference_is_what_eval_with_gradients_gives(name: str, level: str) -> None:
    """Without gradients nn.MultiheadAttention and nn.TransformerEncoderLayer take fused paths of
    their own.
    """
    model, inputs, layers = build(name)
    amp = tritonamp.enable(model.eval(), level=level)
    expected = floats(model(*inputs))
    with torch.no_grad():
        found = floats(model(*inputs))
    with torch.inference_mode():
        inferred = floats(model(*inputs))
    assert [f.dtype for f in found] == [f.dtype for f in inferred] == [e.dtype for e in expected]
    tolerance = 2 * 3 * layers * torch.finfo(amp.policy.dtype).eps / 2
    assert largest_error(found, expected) <= tolerance
    assert largest_error(inferred, expected) <= tolerance
    amp.disable()


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O5"])
@each_model
def test_disable_restores_every_bit(name: str, level: str) -> None:
    model, inputs, _ = build(name)
    model.eval()  # training would move running statistics
    plain = copy.deepcopy(model)
    objects = [*model.parameters(), *model.buffers()]
    classes = [type(m) for m in model.modules()]
    expected = floats(plain(*inputs))
    amp = tritonamp.enable(model, level=level)
    dtypes = [b.dtype for b in model.buffers() if not b.is_floating_point()]
    assert dtypes == [b.dtype for b in plain.buffers() if not b.is_floating_point()]
    amp.disable()
    after = [*model.parameters(), *model.buffers()]
    assert all(a is b for a, b in zip(after, objects, strict=True))
    for a, b in zip(after, [*plain.parameters(), *plain.buffers()], strict=True):
        assert a.dtype is b.dtype
        assert torch.equal(a, b)
    assert [type(m) for m in model.modules()] == classes
    assert all(torch.equal(a, b) for a, b in zip(floats(model(*inputs)), expected, strict=True))


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_an_fp64_model_runs_as_before(level: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Softmax(-1)).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    expected = model(x)
    amp = tritonamp.enable(model, level=level)
    assert torch.equal(model(x), expected)
    amp.disable()


# what stays FP32

NORMS = [
    nn.BatchNorm1d(4),
    nn.BatchNorm2d(4),
    nn.BatchNorm3d(4),
    nn.SyncBatchNorm(4),
    nn.InstanceNorm2d(4, affine=True),
    nn.LayerNorm(4),
    nn.GroupNorm(2, 4),
    nn.RMSNorm(4),
]


@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: type(norm).__name__)
@pytest.mark.parametrize(("level", "dtype"), [("O1", FP32), ("O2", FP32), ("O3", FP16)])
def test_parameters_of_norms(norm: nn.Module, level: str, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(4, 4), copy.deepcopy(norm))
    amp = tritonamp.enable(model, level=level)
    assert {p.dtype for p in model[1].parameters()} == {dtype}
    assert model[0].weight.dtype is (FP32 if level == "O1" else FP16)
    amp.disable()
    assert {p.dtype for p in model.parameters()} == {FP32}


@pytest.mark.parametrize(("level", "dtype"), [("O1", FP32), ("O2", FP32), ("O3", FP16)])
def test_buffers(level: str, dtype: torch.dtype) -> None:
    """Under an op policy buffers stay: tables of angles and running statistics lose too much in
    half.
    """
    model = Rotary()
    before = {name: b.clone() for name, b in model.named_buffers()}
    amp = tritonamp.enable(model, level=level)
    assert model.angles.dtype is dtype
    assert torch.equal(model.angles, before["angles"].to(dtype))
    assert model.rotation.dtype is torch.complex64
    assert torch.equal(model.rotation, before["rotation"])
    assert torch.equal(model.steps, before["steps"])
    amp.disable()


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_tied_weights_stay_tied(level: str) -> None:
    model = SharedHead()
    amp = tritonamp.enable(model, level=level)
    assert model.head.weight is model.embedding.weight
    amp.disable()
    assert model.head.weight is model.embedding.weight
    assert model.head.weight.dtype is FP32


class Seen(nn.Module):
    """Notes what it computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = (x.dtype, self.weight.dtype, torch.is_autocast_enabled("cpu"))
        return x @ self.weight


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = (
            nn.Linear(4, 4),
            nn.Sequential(Seen(), nn.Tanh()),
            nn.Linear(4, 4),
        )
        self.again = self.block

    def forward(self, x: Tensor) -> Tensor:
        self.before = self.first(x)
        self.after = self.again(self.before)
        return self.last(self.after)


# an FP32 module returns FP32 where the op policy reconciles dtypes, half where the next layer would
# refuse FP32
@pytest.mark.parametrize(("level", "after"), [("O1", FP32), ("O2", FP32), ("O3", FP16)])
@pytest.mark.parametrize(
    "wanted", ["block", "again", nn.Sequential, "block.0", "again.0", Seen], ids=repr
)
def test_fp32_modules_really_compute_in_fp32(level: str, after: torch.dtype, wanted: Any) -> None:
    model = Outer()
    amp = tritonamp.enable(model, level=level, fp32_modules=[wanted])
    output = model(torch.randn(2, 4))
    assert model.block[0].seen == (FP32, FP32, False)
    assert model.before.dtype is FP16
    assert model.after.dtype is after
    assert output.dtype is FP32
    assert model.first.weight.dtype is (FP32 if level == "O1" else FP16)
    output.sum().backward()
    assert model.block[0].weight.grad.dtype is FP32
    amp.disable()
    assert type(model.block[0]) is Seen
    assert type(model.block) is nn.Sequential


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_fp32_modules_get_everything_in_fp32(level: str) -> None:
    class Pass(nn.Module):
        def forward(self, x: Tensor, *, more: Any) -> Any:
            return [x.dtype, *(t.dtype for t in more.values())]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.inner = nn.Linear(4, 4), Pass()

        def forward(self, x: Tensor) -> Any:
            half = self.linear(x)
            return self.inner(half, more={"a": half, "b": half.long(), "c": half.double()})

    model = Model()
    amp = tritonamp.enable(model, level=level, fp32_modules=Pass)
    assert model(torch.randn(2, 4)) == [FP32, FP32, torch.int64, torch.float64]
    amp.disable()


def test_fp32_modules_help_modules_that_refuse_half() -> None:
    """nn.AdaptiveLogSoftmaxWithLoss copies FP32 log-probabilities into a tensor of the input's
    dtype.
    """
    model = Lambda(nn.AdaptiveLogSoftmaxWithLoss(8, 20, [5]), lambda m, x, y: m(x, y).loss)
    x, y = torch.randn(6, 8), torch.randint(20, (6,))
    expected = model(x, y)
    amp = tritonamp.enable(model, level="O2", fp32_modules=nn.AdaptiveLogSoftmaxWithLoss)
    # the input alone was rounded
    assert largest_error([model(x, y)], [expected]) <= torch.finfo(FP16).eps
    amp.disable()


def test_norms_kept_without_an_op_policy_compute_in_fp32() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    amp = tritonamp.enable(model, level="O3", keep_norms_fp32=True)
    dtypes: list[Any] = []
    model[1].register_forward_hook(lambda m, args, out: dtypes.append((m.weight.dtype, out.dtype)))
    assert model(torch.randn(3, 4)).dtype is FP32
    assert dtypes == [(FP32, FP16)]
    amp.disable()


@pytest.mark.parametrize("wanted", ["", "nowhere", nn.Conv2d, nn.Sequential], ids=repr)
def test_fp32_modules_that_match_nothing(wanted: Any) -> None:
    """The model itself does not count: with everything in FP32 there would be nothing to enable."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with pytest.raises(
        ValueError, match=r"fp32_modules: .* got .* matches no module; its modules are 0, 1"
    ):
        tritonamp.enable(model, fp32_modules=[wanted])
    assert type(model) is nn.Sequential
    with pytest.raises(ValueError, match=r"its modules are .it has no submodules."):
        tritonamp.enable(nn.Linear(2, 2), fp32_modules="head")


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ("0.dwon", ": did you mean '0.down'?"),
        ("down", ": did you mean '0.down' or '1.down'?"),
        ("other", "; its modules are 0, 0.down, 1, 1.down, 10, 11, 12, "),
    ],
)
def test_a_name_that_matches_nothing_has_a_hint(wanted: str, told: str) -> None:
    named = [nn.Sequential(OrderedDict(down=nn.Linear(2, 2))) for _ in range(2)]
    model = nn.Sequential(*named, *(nn.ReLU() for _ in range(20)))
    for field in ("fp32_modules", "fp32_results"):
        with pytest.raises(ValueError, match=re.escape(f"matches no module{told}")) as raised:
            tritonamp.enable(model, level="O2", **{field: [wanted]})
        assert str(raised.value).endswith("and 4 more" if wanted == "other" else "?")


class Body(nn.Module):
    """With a module inside of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def compiled_inside(model: nn.Module) -> nn.Module:
    model.body = torch.compile(model.body)  # type: ignore[assignment]
    return model


# name: (a wrapping, the name of a module then)
WRAPPINGS: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "plain": (lambda m: m, "body.1"),
    "compiled": (torch.compile, "_orig_mod.body.1"),
    "DataParallel": (nn.DataParallel, "module.body.1"),
    "compiled inside": (compiled_inside, "body._orig_mod.1"),
    "both": (lambda m: nn.DataParallel(compiled_inside(m)), "module.body._orig_mod.1"),
}


@pytest.mark.parametrize("named", WRAPPINGS)
@pytest.mark.parametrize("enabled", WRAPPINGS)
def test_names_of_modules_hold_with_and_without_wrappers(named: str, enabled: str) -> None:
    name, model = WRAPPINGS[named][1], Body()
    assert name in dict(WRAPPINGS[named][0](Body()).named_modules())
    kept, other = model.body[1], model.body[0]
    amp = tritonamp.enable(WRAPPINGS[enabled][0](model), level="O2", fp32_modules=[name])
    assert (kept.weight.dtype, other.weight.dtype) == (FP32, FP16)
    amp.disable()


def test_the_name_itself_comes_first() -> None:
    class Wrapper(Body):
        def __init__(self) -> None:
            super().__init__()
            self.module = Body()

    model = Wrapper()
    amp = tritonamp.enable(model, level="O2", fp32_modules=["body.1"])
    assert model.body[1].weight.dtype is FP32
    assert model.module.body[1].weight.dtype is FP16
    amp.disable()
    with pytest.raises(ValueError, match="got 'module', which matches no module"):
        tritonamp.enable(Body(), level="O2", fp32_modules=["module"])


# inputs and outputs


class Echo(nn.Module):
    """Returns what it got, and its first tensor through a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, other: Any = None, *, named: Any = None) -> Any:
        return {"y": self.linear(x), "got": (x.dtype, other, named)}


@pytest.mark.parametrize(("level", "got"), [("O0", FP32), ("O1", FP32), ("O2", FP32), ("O3", FP16)])
def test_inputs(level: str, got: torch.dtype) -> None:
    model = Echo()
    amp = tritonamp.enable(model, level=level, cast_outputs=None)
    x, ids = torch.randn(2, 4), torch.arange(3)
    dtype, other, named = model(x, [x, ids], named=Frozen(x, inner="text"))["got"]
    assert dtype is other[0].dtype is named.x.dtype is got
    assert other[1] is ids
    assert named.inner == "text"
    amp.disable()


@pytest.mark.parametrize(
    ("level", "dtype"), [("O1", FP16), ("O2", FP16), ("O3", FP16), ("O4", BF16)]
)
def test_outputs(level: str, dtype: torch.dtype) -> None:
    x = torch.randn(2, 4)
    for cast_outputs, expected in ((FP32, FP32), (None, dtype), (BF16, BF16)):
        model = Echo()
        amp = tritonamp.enable(model, level=level, cast_outputs=cast_outputs)
        assert model(x)["y"].dtype is expected
        amp.disable()


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@each_container
def test_outputs_in_containers(container: str, level: str) -> None:
    wrap, unwrap = CONTAINERS[container]
    model = Lambda(nn.Linear(4, 4), lambda m, x: wrap(m(unwrap(x))))
    amp = tritonamp.enable(model, level=level)
    value = wrap(torch.randn(2, 4))
    output = model(value)
    assert type(output) is type(value)
    assert unwrap(output).dtype is FP32
    assert unwrap(value).dtype is FP32
    amp.disable()


# torch 2.11 cannot trace a copy of an object
COMPILED = [name for name in CONTAINERS if torch.__version__ >= "2.15" or name in BUILT_IN]


@pytest.mark.compiled
@pytest.mark.parametrize("container", COMPILED)
def test_containers_compile_in_one_piece(container: str) -> None:
    torch.compiler.reset()
    wrap, unwrap = CONTAINERS[container]
    model = Lambda(nn.Linear(4, 4), lambda m, x: wrap(m(unwrap(x))))
    amp = tritonamp.enable(model, level="O2")
    value = wrap(torch.randn(2, 4))
    expected = model(value)
    output = torch.compile(model, backend="aot_eager", fullgraph=True)(value)
    assert type(output) is type(expected)
    assert torch.equal(unwrap(output), unwrap(expected))
    amp.disable()


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_gradients_reach_fp32_inputs(level: str) -> None:
    model = nn.Linear(4, 4, bias=False)
    weight = model.weight.detach().clone()
    amp = tritonamp.enable(model, level=level)
    x = torch.randn(2, 4, requires_grad=True)
    model(x).sum().backward()
    assert x.grad.dtype is FP32
    # a sum of 4 rounded weights
    assert largest_error([x.grad], [weight.sum(0).expand(2, 4)]) <= 4 * torch.finfo(FP16).eps
    amp.disable()


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_parametrized_model_stays_parametrized(level: str) -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 8)))
    amp = tritonamp.enable(model, level=level)
    assert parametrize.is_parametrized(model[0])
    model(torch.randn(2, 4)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    amp.disable()


class Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_model_may_be_parametrized_while_it_is_enabled(level: str) -> None:
    """torch derives a class from the enabled one; disable leaves one derived from the plain one."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), torch.randn(3, 4)
    first, second = copy.deepcopy(model)
    amp = tritonamp.enable(model, level=level)
    parametrize.register_parametrization(model[0], "weight", Twice(), unsafe=True)
    expected = second(nn.functional.linear(x, 2 * first.weight, first.bias))
    torch.testing.assert_close(model(x), expected, rtol=2**-7, atol=2**-7)
    amp.disable()
    assert type(model[0]).__bases__ == (nn.Linear,) and parametrize.is_parametrized(model[0])
    parametrize.remove_parametrizations(model[0], "weight")
    assert type(model[0]) is nn.Linear


def test_gradients_that_exist_already_follow_the_dtype() -> None:
    model = nn.Linear(4, 4)
    model(torch.randn(2, 4)).sum().backward()
    grad = model.weight.grad.clone()
    amp = tritonamp.enable(model, level="O2")
    assert torch.equal(model.weight.grad, grad.half())
    amp.disable()
    assert model.weight.grad.dtype is FP32


class Whatever(nn.Module):
    """Returns its arguments except the input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor, *others: Any) -> Any:
        self.seen = others[0].weight.dtype, others[-1].x.dtype
        return self.layer(x).sum(), others


def test_only_what_moves_to_a_dtype_is_asked_to(device: torch.device) -> None:
    """A module among the arguments stays as it is, and so do classes and objects of no ``to``."""

    class Batch:
        def __init__(self, x: Tensor) -> None:
            self.x = x

        def to(self, dtype: torch.dtype) -> "Batch":
            return Batch(self.x.to(dtype))

    model, module, plain = Whatever().to(device), nn.Linear(2, 2), object()
    amp = tritonamp.enable(model, level="O2", cast_inputs=True)
    given = (module, nn.Linear, Batch, plain, "text", 3)
    _, got = model(torch.ones(1, 2, device=device), *given, Batch(torch.ones(2)))
    amp.disable()
    assert all(a is b for a, b in zip(given, got[:-1], strict=True))
    assert module.weight.dtype is torch.float32
    assert model.seen == (torch.float32, torch.float16)
